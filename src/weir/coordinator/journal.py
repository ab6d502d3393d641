"""Grouped, fenced writes of ledger records: one transaction for all that came since the last one began.

A group begins at once after a pause, and otherwise no sooner than `group_ms` after the one before it: a transaction costs
almost the same for one record as for a handful, and on a quick disk every record would be its own.

It keeps order and durability and decides nothing. A record is durable when its group is, and then its callback runs; a durable
record implies all earlier ones. A write that fails is repeated until it lands, so that what was decided while the store was
away lands once, in order; whoever cannot wait asks `late_ns` and ends its request by rule. A journal that closes tries a few
times more, and leaves the rest to recovery. StaleEpoch is never repeated: a newer coordinator writes, and this one must end.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from weir import errors
from weir.core.ledger.records import LedgerRecord
from weir.ports import Clock, LedgerStore
from weir.units import NANOS_PER_SECOND, Millis, Nanos, ns_from_ms

_GROUP_RECORDS_MAX = 2_000
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0
_CLOSING_TRIES_MAX = 5


class _Pending(msgspec.Struct):
    record: LedgerRecord
    since_ns: Nanos
    on_durable: Callable[[], None] | None


class Journal:
    """One coordinator's stream of records. epoch and next_seq come from the store's recovery; group_ms: see the module."""

    def __init__(self, store: LedgerStore, clock: Clock, epoch: int, next_seq: int, group_ms: Millis) -> None:
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._next_seq = next_seq
        self._group_ns = ns_from_ms(group_ms)
        self._next_group_ns: Nanos = 0
        self._pending: deque[_Pending] = deque()
        self._writing: list[_Pending] = []
        self._wake = asyncio.Event()
        self._is_ambiguous = False  # a write of the group in hand may have taken effect
        self._closing = False

    @property
    def epoch(self) -> int:
        """The turn in which this journal is the store's writer."""
        return self._epoch

    def next_seq(self) -> int:
        """The number of the next record to append."""
        self._next_seq += 1
        return self._next_seq - 1

    def append(self, record: LedgerRecord, on_durable: Callable[[], None] | None = None) -> None:
        """Queue a record for the next group. on_durable runs on the loop, in order, once it is durable."""
        self._pending.append(_Pending(record, self._clock.monotonic_ns(), on_durable))
        self._wake.set()

    def withdraw(self, seq: int, instead: LedgerRecord, on_durable: Callable[[], None] | None = None) -> bool:
        """Replace a record that is surely not written; False if its outcome is already the store's to decide."""
        for waiting in self._pending:
            if waiting.record.seq == seq:
                waiting.record, waiting.on_durable = instead, on_durable
                return True
        return False

    @property
    def backlog(self) -> int:
        """Records that are not durable."""
        return len(self._pending) + len(self._writing)

    def late_ns(self) -> Nanos:
        """How long the oldest record has waited to become durable; 0 when all are."""
        oldest = self._writing[0] if self._writing else self._pending[0] if self._pending else None
        return self._clock.monotonic_ns() - oldest.since_ns if oldest else 0

    async def run(self) -> None:
        """Write groups until closed and empty, or closed and the store is away. Raises StaleEpoch."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                await self._gather()
                if not await self._write_group():
                    return
            if self._closing:
                return

    def close(self) -> None:
        """Let `run` return once everything is written, or cannot be."""
        self._closing = True
        self._wake.set()

    async def _gather(self) -> None:
        wait_ns = self._next_group_ns - self._clock.monotonic_ns()
        if wait_ns > 0 and not self._closing:
            await asyncio.sleep(wait_ns / NANOS_PER_SECOND)
        self._next_group_ns = self._clock.monotonic_ns() + self._group_ns

    async def _write_group(self) -> bool:
        """Write the next group; False when the journal closes and the store stays away.

        A group that the store surely did not write waits among the pending again, where a record may still be withdrawn; one
        whose outcome was ever unknown is repeated as it is.
        """
        delay_s = _RETRY_FIRST_S
        closing_tries = 0
        is_settled = False
        self._take_group()
        while not is_settled:
            try:
                await self._store.write(self._epoch, [waiting.record for waiting in self._writing])
                is_settled = True
            except errors.LedgerUnavailable as fault:
                closing_tries += self._closing
                if closing_tries > _CLOSING_TRIES_MAX:
                    return False
                self._is_ambiguous |= not fault.not_written
                if not self._is_ambiguous:
                    self._give_group_back()
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
                self._take_group()
        written, self._writing, self._is_ambiguous = self._writing, [], False
        for waiting in written:
            if waiting.on_durable is not None:
                waiting.on_durable()
        return True

    def _take_group(self) -> None:
        if not self._writing:
            size = min(len(self._pending), _GROUP_RECORDS_MAX)
            self._writing = [self._pending.popleft() for _ in range(size)]

    def _give_group_back(self) -> None:
        self._pending.extendleft(reversed(self._writing))
        self._writing = []
