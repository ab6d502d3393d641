"""Rejections as counters per tenant, code and minute: no row, no prompt, bounded. Flushed to the store now and then."""

import asyncio
from collections import Counter

from weir import errors
from weir.ports import Clock, LedgerStore
from weir.units import Millis

_MINUTE_MS = 60_000
_FLUSH_S = 1.0
_KEYS_MAX = 10_000
_OTHER = "(other)"
_UNSTAMPED: Millis = 0
"""The minute of what is counted beyond the bound, until it is flushed."""


class RejectionCounter:
    """Counts in memory between flushes; beyond its bound of keys further tenants are counted as `(other)`."""

    def __init__(self, store: LedgerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._writing: asyncio.Task[None] | None = None

    def count(self, tenant: str, code: str) -> None:
        """One more rejection of this code for this tenant."""
        self._add(tenant, code, self._minute_ms(), 1)

    def _minute_ms(self) -> Millis:
        return self._clock.wall_ms() // _MINUTE_MS * _MINUTE_MS

    def _add(self, tenant: str, code: str, minute_ms: Millis, number: int) -> None:
        key = (tenant, code, minute_ms)
        if key not in self._counts and len(self._counts) >= _KEYS_MAX:
            key = (_OTHER, code, _UNSTAMPED)  # so few codes are there that these keys are bounded too
        self._counts[key] += number

    async def run(self) -> None:
        """Flush now and then until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Add the counts to the store's; what it does not take is kept for the next flush, and a write is never cut short."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        if self._counts:
            flushing, self._counts = self._counts, Counter()
            self._writing = asyncio.get_running_loop().create_task(self._write(flushing))
            await asyncio.shield(self._writing)

    async def _write(self, flushing: Counter[tuple[str, str, int]]) -> None:
        now_ms = self._minute_ms()
        counts = [(tenant, code, minute_ms or now_ms, number) for (tenant, code, minute_ms), number in flushing.items()]
        try:
            await self._store.count_rejections(counts)
        except errors.LedgerUnavailable:
            for key, number in flushing.items():
                self._add(*key, number)
        finally:
            self._writing = None
