"""Watches the ledger's lateness: what waits for a store that is away too long is ended by rule, each after its own time.

What was decided meanwhile stays in the journal and lands when the store is back. The watch itself never waits for the store.
"""

import asyncio
from collections.abc import Callable

from weir.coordinator.execution import Execution
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.journal import Journal
from weir.coordinator.settler import Settler
from weir.core.endings import FinishReason
from weir.ports import Clock
from weir.units import Nanos

_TICK_S = 0.25


class StoreWatch:
    """wait_ns: how long anything may wait to become durable. ask_to_stop ends an execution that has not ended."""

    def __init__(
        self,
        clock: Clock,
        wait_ns: Nanos,
        journal: Journal,
        executions: ExecutionTable,
        settler: Settler,
        ask_to_stop: Callable[[Execution, FinishReason], None],
    ) -> None:
        self._clock = clock
        self._wait_ns = wait_ns
        self._journal = journal
        self._executions = executions
        self._settler = settler
        self._ask_to_stop = ask_to_stop

    @property
    def is_late(self) -> bool:
        """Whether the store is away for longer than its bound: nothing new is admitted."""
        return self._journal.late_ns() > self._wait_ns

    async def run(self) -> None:
        """Look several times a second until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self.is_late:
                for execution in self._executions.live:
                    self._end_if_late(execution)

    def _end_if_late(self, execution: Execution) -> None:
        now_ns = self._clock.monotonic_ns()
        if execution.end_record is None:
            since_ns = execution.waits_for_ledger_since_ns
            if since_ns is not None and now_ns - since_ns > self._wait_ns:
                self._ask_to_stop(execution, FinishReason.LEDGER_UNAVAILABLE)
            return
        if now_ns - execution.decided_ns <= self._wait_ns:
            return
        if execution.waits_to_be_shown:
            self._settler.give_up_completion(execution)
        self._settler.answer_cancel_queries(execution)
