"""Whoever waits for an answer gets the lane of a batch's line that took it while it was idle.

A line is lent its lane. It keeps one if it was its turn while others waited, or if its request ran a few times in vain, of as
many lanes as are the batches' share of the pool, at least one. Once a request of another class has waited for `yield_after_ms`,
the lines that make room for it are asked to stop (`core/scheduling/making_room.py`). They end `preempted`, at the platform's
cost, and their batches run them again. Until the one that waits has started, no line starts where room is made for it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from weir.coordinator.execution import Execution, Placement
from weir.coordinator.fleet import PoolView
from weir.core.endings import FinishReason
from weir.core.ledger.records import ExecutionId
from weir.core.routing.capacity import Need
from weir.core.routing.replica import Replica
from weir.core.scheduling.making_room import Claim, Lent, Site, who_makes_room
from weir.core.tenancy import ServiceClass
from weir.ports import Clock
from weir.units import NANOS_PER_SECOND, Millis, Nanos, ns_from_ms

RUNS_IN_VAIN_MAX: Final = 3
"""So often a request runs in vain before it may keep a lane."""
_STOP_MS: Millis = 250
"""What an engine takes to stop writing, rather too long: it looks between two steps of its batch."""
_PENDING_NS: Nanos = NANOS_PER_SECOND
"""For which a lane that was asked for is on its way, and kept for whom it was; then another one is asked for."""
_CLAIMS_MAX, _LOOKS_MAX = 256, 16

_Attempted: TypeAlias = tuple[ExecutionId, int]


@dataclass(slots=True)
class _Line:
    """One that runs. keeps: its lane. asked_ns: when it was asked to stop."""

    execution: Execution
    placement: Placement
    keeps: bool
    asked_ns: Nanos | None = None

    @property
    def may_be_asked(self) -> bool:
        """Whether it would stop now, and is not about to for another reason."""
        execution, placement = self.execution, self.placement
        is_running = execution.runs(placement.attempt) and placement.lane is not None and not placement.is_withheld
        return is_running and not self.keeps and self.asked_ns is None and execution.stop_asked is None

    @property
    def kv_tokens(self) -> int:
        """What its lane takes of the memory."""
        lane = self.placement.lane
        return self.placement.replica.room.taken(lane) if lane is not None else 0


@dataclass(slots=True)
class _Pool:
    """lines: that run, in the order in which they began; kept: how many of them keep their lanes.

    waiting: requests of other classes, and since when; reserved: replicas on which room is made for those, and until when.
    """

    view: PoolView
    lines: dict[_Attempted, _Line] = field(default_factory=dict)
    kept: int = 0
    waiting: dict[ExecutionId, tuple[Execution, Nanos]] = field(default_factory=dict)
    reserved: dict[str, Nanos] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Preemption:
    """Of all pools. share_percent: of a pool's lanes that lines may keep. may_grant: whether anything may start now.

    stop: asks an execution that runs to end for a reason.
    """

    def __init__(self, clock: Clock, yield_after_ms: Millis, share_percent: int, may_grant: Callable[[], bool]) -> None:
        self._clock = clock
        self._yield_after_ms = yield_after_ms
        self._share_percent = share_percent
        self._may_grant = may_grant
        self._pools: dict[str, _Pool] = {}
        self.stop: Callable[[Execution, FinishReason], None] = lambda execution, reason: None

    def _pool(self, view: PoolView) -> _Pool:
        pool = self._pools.get(view.name)
        if pool is None:
            pool = self._pools[view.name] = _Pool(view)
        return pool

    # ── what runs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def took_lane(self, view: PoolView, execution: Execution, placement: Placement, *, is_turn: bool) -> None:
        """An attempt runs there. is_turn: no other waits whose turn it was."""
        if not execution.acquire.yields:
            return
        pool = self._pool(view)
        deserves = (is_turn and bool(pool.waiting)) or execution.id.execution > RUNS_IN_VAIN_MAX
        line = _Line(execution, placement, deserves and self._may_keep(pool))
        pool.kept += line.keeps
        pool.lines[execution.id, placement.attempt] = line
        self._look_soon(pool)

    def freed_lane(self, execution: Execution, placement: Placement) -> None:
        """It runs there no more."""
        pool = self._pools.get(execution.pool)
        line = pool.lines.pop((execution.id, placement.attempt), None) if pool is not None else None
        if pool is None or line is None:
            return
        pool.kept -= line.keeps
        if line.asked_ns is not None:
            pool.reserved[placement.replica.name] = self._clock.monotonic_ns() + _PENDING_NS

    def _may_keep(self, pool: _Pool) -> bool:
        return pool.kept < max(1, pool.view.lanes.usable * self._share_percent // 100)

    # ── what may start ───────────────────────────────────────────────────────────────────────────────────────────────

    def holds_lines_back(self, view: PoolView) -> bool:
        """Whether others wait, and lines keep their share or room is made for those: then lines come last."""
        pool = self._pools.get(view.name)
        if pool is None or not pool.waiting:
            return False
        return bool(self._reserved(pool)) or not self._may_keep(pool)

    def unreserved(self, view: PoolView) -> Collection[Replica]:
        """Replicas with a free lane on which no room is made for anybody."""
        reserved = self._reserved(self._pool(view))
        return [replica for name, replica in view.lanes.open.items() if name not in reserved]

    def _reserved(self, pool: _Pool) -> Collection[str]:
        now_ns = self._clock.monotonic_ns()
        for name in [name for name, until_ns in pool.reserved.items() if until_ns <= now_ns]:
            del pool.reserved[name]
        return pool.reserved

    def shortened_ms(self, view: PoolView, need: Need, caution: float) -> Millis | None:
        """What one more that waits for an answer waits at most where no lane is free; None where no line makes room for it.

        caution: by how much predictions were too short of late.
        """
        pool = self._pools.get(view.name)
        if pool is None or not pool.lines or view.lanes.free or len(pool.lines) - pool.kept <= len(pool.waiting):
            return None
        for number, line in enumerate(reversed(pool.lines.values())):
            replica = line.placement.replica
            stops_soon = not line.keeps and line.placement.has_output and replica.takes_work
            if stops_soon and _site_of(replica).with_one(line.kv_tokens, -1).has_room(need.kv_tokens):
                return int(caution * (self._yield_after_ms + _STOP_MS))
            if number == _LOOKS_MAX:
                break
        return None

    # ── who waits ────────────────────────────────────────────────────────────────────────────────────────────────────

    def waits(self, view: PoolView, execution: Execution) -> None:
        """It could not start."""
        if execution.acquire.service_class is ServiceClass.BATCH:
            return
        pool = self._pool(view)
        pool.waiting[execution.id] = execution, self._clock.monotonic_ns()
        self._look_soon(pool)

    def waits_no_more(self, execution: Execution) -> None:
        """It started, or ended."""
        pool = self._pools.get(execution.pool)
        if pool is not None and pool.waiting.pop(execution.id, None) is not None and not pool.waiting:
            pool.reserved.clear()

    def _look_soon(self, pool: _Pool) -> None:
        if pool.timer is not None or not pool.waiting or len(pool.lines) == pool.kept:
            return
        _, since_ns = next(iter(pool.waiting.values()))
        due_ns = since_ns + ns_from_ms(self._yield_after_ms) - self._clock.monotonic_ns()
        delay_ns = due_ns if due_ns > 0 else ns_from_ms(self._yield_after_ms)
        pool.timer = asyncio.get_running_loop().call_later(delay_ns / NANOS_PER_SECOND, self._look, pool)

    def _look(self, pool: _Pool) -> None:
        pool.timer = None
        now_ns = self._clock.monotonic_ns()
        if self._may_grant():
            for line in self._chosen(pool, now_ns):
                line.asked_ns = now_ns
                pool.reserved[line.placement.replica.name] = now_ns + _PENDING_NS
                self.stop(line.execution, FinishReason.PREEMPTED)
        self._look_soon(pool)

    def _chosen(self, pool: _Pool, now_ns: Nanos) -> list[_Line]:
        claims = list(_claims(pool, now_ns - ns_from_ms(self._yield_after_ms)))
        if not claims:
            return []
        sites = {replica.name: _site_of(replica) for replica in pool.view.replicas.values() if replica.takes_work}
        for line in pool.lines.values():
            is_pending = line.asked_ns is not None and line.asked_ns + _PENDING_NS > now_ns
            if is_pending and (name := line.placement.replica.name) in sites:
                sites[name] = sites[name].with_one(line.kv_tokens, -1)
        able = [(key, line) for key, line in reversed(pool.lines.items()) if line.may_be_asked]
        able.sort(key=lambda each: not each[1].placement.has_output)  # an engine that reads a prompt stops late
        lent = [Lent(key, line.placement.replica.name, line.kv_tokens) for key, line in able]
        return [pool.lines[key] for key in who_makes_room(claims, sites, lent)]


def _claims(pool: _Pool, until_ns: Nanos) -> Iterator[Claim]:
    """Of those that wait since then, or longer."""
    for number, (execution, since_ns) in enumerate(pool.waiting.values()):
        if since_ns > until_ns or number == _CLAIMS_MAX:
            return
        lost = execution.placement
        yield Claim(execution.need.kv_tokens, lost.replica.name if lost is not None else None)


def _site_of(replica: Replica) -> Site:
    room = replica.room
    return Site(replica.usable - replica.running, replica.running, None if room.kv_tokens_max is None else room.left)
