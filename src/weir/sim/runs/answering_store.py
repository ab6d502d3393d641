"""A ledger store that only answers: it checks the order of records and that each hold ends once, and forgets what has ended.

Hours of requests would fill a store that keeps records, and a run has no crash to recover from. It never fails and takes no
time.
"""

from collections.abc import Sequence

from weir.core.ledger.records import ExecutionId, HoldRecord, LedgerRecord, StepRecord
from weir.ports import LedgerReport, Recovery, StoredExecution, UsageQuery, UsageRow
from weir.units import Millis


class AnsweringStore:
    """LedgerStore for one coordinator. open_holds: held and not ended, as the durable records say."""

    def __init__(self) -> None:
        self._open: set[ExecutionId] = set()
        self._last_seq = 0
        self._holds = 0

    @property
    def open_holds(self) -> int:
        """Holds that have no end."""
        return len(self._open)

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """The first epoch, of an empty ledger."""
        return Recovery(epoch=1, next_seq=1)

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """Take a group. An end without its hold is a KeyError: the run is broken."""
        for record in records:
            assert record.seq > self._last_seq, "records are written in the order of their numbers"
            self._last_seq = record.seq
            if isinstance(record, HoldRecord):
                assert record.id not in self._open, "an execution is held once"
                self._open.add(record.id)
                self._holds += 1
            elif isinstance(record, StepRecord):
                assert record.id in self._open, "a step's execution is held and has not ended"
            else:
                self._open.remove(record.id)

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """Nothing: each request of a run has its own id."""
        return None

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Nothing."""
        return []

    async def verify(self) -> LedgerReport:
        """What was counted."""
        ended = self._holds - len(self._open)
        return LedgerReport(1, self._last_seq, self._holds, len(self._open), ended, rolled_up=0, late=0, balances=0)

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """Nothing to roll up."""
        return 0

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """Counted elsewhere."""

    async def aclose(self) -> None:
        """Nothing to close."""
