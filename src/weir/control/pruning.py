"""Keeps the ledger from growing for ever: every hour, executions past the retention are replaced by their sums.

It decides what is past it, and takes the store's only writer for a few milliseconds at a time, so that no request waits for it.
Sums of usage and balances stay as they are. It must never touch what has not ended, nor the last two days, in which a request
id may still be bound.
"""

import asyncio
from collections.abc import Callable

import structlog

from weir import errors
from weir.ports import Clock, LedgerStore
from weir.units import Millis

PERIOD_S = 3_600.0
GROUP_ROWS = 200
"""Executions in one transaction: a few milliseconds of the writer, about as long as a group of new records takes."""
PAUSE_S = 0.05
"""Between groups the writer belongs to the requests; what an hour brings is still through in minutes."""
GROUPS_MAX = 20_000
"""In one hour; a backlog beyond that goes on in the next."""

_MS_PER_DAY: Millis = 86_400_000
_log = structlog.get_logger("weir.control")


class Pruning:
    """One coordinator's pruning. epoch: its turn as the store's writer. on_rolled_up: told how many, after each group."""

    def __init__(
        self, store: LedgerStore, clock: Clock, epoch: int, retention_days: int, on_rolled_up: Callable[[int], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._retention_ms = retention_days * _MS_PER_DAY
        self._on_rolled_up = on_rolled_up

    async def run(self) -> None:
        """Sweep every hour until cancelled; a store that is away is asked again an hour later. Raises StaleEpoch."""
        while True:
            try:
                await self.sweep()
            except errors.LedgerUnavailable:
                _log.warning("pruning_postponed")
            await asyncio.sleep(PERIOD_S)

    async def sweep(self) -> int:
        """Roll up all that ended before the first UTC midnight within the retention; how many. Raises StoreFault.

        Whole days go at once, so that a report by days is exact on either side.
        """
        now_ms = self._clock.wall_ms()
        before_ms = (now_ms - self._retention_ms) // _MS_PER_DAY * _MS_PER_DAY
        total = 0
        for _ in range(GROUPS_MAX):
            rolled_up = await self._store.prune(self._epoch, before_ms, GROUP_ROWS)
            self._on_rolled_up(rolled_up)
            total += rolled_up
            if rolled_up < GROUP_ROWS:
                break
            await asyncio.sleep(PAUSE_S)
        return total
