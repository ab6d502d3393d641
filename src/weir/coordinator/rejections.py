"""Rejections as counters per tenant, code and minute: no row, no prompt, bounded. Flushed to the store now and then."""

from collections import Counter

from weir import errors
from weir.ports import Clock, LedgerStore

_MINUTE_MS = 60_000
_KEYS_MAX = 10_000


class RejectionCounter:
    """Counts in memory between flushes; beyond its bound of keys further tenants are counted as `(other)`."""

    def __init__(self, store: LedgerStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def count(self, tenant: str, code: str) -> None:
        """One more rejection of this code for this tenant."""
        minute = self._clock.wall_ms() // _MINUTE_MS * _MINUTE_MS
        key = (tenant, code, minute)
        if key not in self._counts and len(self._counts) >= _KEYS_MAX:
            key = ("(other)", code, minute)
        self._counts[key] += 1

    async def flush(self) -> None:
        """Add the counts to the store's; they are kept for the next flush if the store is away."""
        if not self._counts:
            return
        flushing, self._counts = self._counts, Counter()
        try:
            await self._store.count_rejections([(*key, number) for key, number in flushing.items()])
        except errors.LedgerUnavailable:
            self._counts.update(flushing)
