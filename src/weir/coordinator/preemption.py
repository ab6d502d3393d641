"""Whoever waits for an answer gets the lane of a batch's line that took it while it was idle.

Once a request of another class has waited for `yield_after_ms` because no lane is free, as many lines as requests wait are
asked to stop, of those that were lent a lane the last ones that began first. They end `preempted`, at the platform's cost, and
their batches run them again.
"""

import asyncio
from collections.abc import Callable

from weir.coordinator.execution import Execution, Placement
from weir.coordinator.pool_domains import Attempted, PoolDomains
from weir.core.endings import FinishReason
from weir.core.scheduling.lent_lanes import YIELDS_MAX
from weir.core.tenancy import ServiceClass
from weir.units import Millis

_STOP_MS: Millis = 250
"""What an engine takes to stop, rather too long: it looks between two steps of its batch."""


class Preemption:
    """Of all pools. may_grant: whether anything may start now; stop: asks an execution that runs to end for a reason."""

    def __init__(self, yield_after_ms: Millis, may_grant: Callable[[], bool]) -> None:
        self._yield_after_ms = yield_after_ms
        self._may_grant = may_grant
        self._running: dict[Attempted, Execution] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.stop: Callable[[Execution, FinishReason], None] = lambda execution, reason: None

    def took_lane(self, domains: PoolDomains, execution: Execution, placement: Placement) -> None:
        """An attempt runs there. One of a line keeps its lane if it is its turn while others wait, or gave way often before."""
        if not execution.acquire.yields:
            return
        attempted = execution.id, placement.attempt
        self._running[attempted] = execution
        may_keep = domains.lent.may_keep(domains.view.lanes.usable)
        is_turn = domains.waiting_beside(execution.acquire.service_class) > 0 or execution.id.execution > YIELDS_MAX
        domains.lent.take(attempted, keeps=may_keep and is_turn)
        self.look_soon(domains)

    def freed_lane(self, domains: PoolDomains, execution: Execution, placement: Placement) -> None:
        """It runs there no more."""
        attempted = execution.id, placement.attempt
        if self._running.pop(attempted, None) is not None:
            domains.lent.give_back(attempted)

    def shortened(self, domains: PoolDomains, service_class: ServiceClass, wait_ms: Millis) -> Millis:
        """A predicted wait of one more of this class, unless a line makes room for it before."""
        if not domains.lent or service_class is ServiceClass.BATCH or domains.view.lanes.free:
            return wait_ms
        makes_room = len(domains.lent) > domains.waiting_beside(ServiceClass.BATCH)
        return min(wait_ms, self._yield_after_ms + _STOP_MS) if makes_room else wait_ms

    def look_soon(self, domains: PoolDomains) -> None:
        """If somebody waits for an answer while lines could make room: whether still, once that was long enough."""
        waits = domains.lent and domains.waiting_beside(ServiceClass.BATCH)
        if waits and domains.view.name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[domains.view.name] = loop.call_later(self._yield_after_ms / 1e3, self._look, domains)

    def _look(self, domains: PoolDomains) -> None:
        del self._timers[domains.view.name]
        waiting = domains.waiting_beside(ServiceClass.BATCH)
        if waiting and self._may_grant() and domains.is_short:
            for attempted in domains.lent.ask_for(waiting):
                execution = self._running[attempted]
                if execution.runs(attempted[1]):  # else its lane comes free by itself
                    self.stop(execution, FinishReason.PREEMPTED)
        self.look_soon(domains)
