"""Being the one coordinator of a cell: the lease is won, renewed at a third of its time, and believed in no longer than that.

It decides whether this coordinator may grant now, by its own clock and from before each renewal was asked for, so that it stops
before another one starts. It must never be the only guard: a process that was frozen believes what it knew; its writes are
refused by the ledger's epoch.
"""

import asyncio
from collections.abc import Callable

import structlog

from weir import errors
from weir.ports import Clock, LeaderLease
from weir.units import Millis, Nanos, ns_from_ms

LEASE_MS: Millis = 2_000
"""More tries fit into it when a renewal fails; a standby takes over within it and one ask."""
_RENEWALS = 3
_ASK_AGAIN_S = 0.2

_log = structlog.get_logger("weir.coordinator")


class Leadership:
    """holder: a name that this life of the process has for itself alone."""

    def __init__(self, lease: LeaderLease, clock: Clock, holder: str, lease_ms: Millis = LEASE_MS) -> None:
        self._lease = lease
        self._clock = clock
        self._holder = holder
        self._lease_ms = lease_ms
        self._until_ns: Nanos = clock.monotonic_ns()
        self._is_store_away = False
        self.on_regained: Callable[[], None] = lambda: None
        """Called when it leads again after its time was over: what waited meanwhile may start."""

    def holds(self) -> bool:
        """Whether nobody else can lead now."""
        return self._clock.monotonic_ns() < self._until_ns

    def is_store_away(self) -> bool:
        """Whether the last renewal could not be asked for: then nobody else is known to lead."""
        return self._is_store_away

    async def win(self, *, by_force: bool = False) -> bool:
        """True, once it leads: by force at once (raises LedgerUnavailable), else when the lease is free or past its time."""
        while True:
            try:
                if await self._take(by_force=by_force) and self.holds():  # not if its time was over before the answer came
                    return True
            except errors.LedgerUnavailable:
                if by_force:
                    raise
            await asyncio.sleep(_ASK_AGAIN_S)

    async def run(self) -> None:
        """Renew until cancelled. Raises StaleEpoch when another one leads; a store that is away is asked again."""
        renew_s = pause_s = self._lease_ms / 1e3 / _RENEWALS
        while True:
            await asyncio.sleep(pause_s)
            asked_ns = self._clock.monotonic_ns()
            try:
                if not await self._take():
                    raise errors.StaleEpoch
                pause_s = renew_s
            except errors.LedgerUnavailable:
                self._is_store_away = True
                pause_s = max(0.0, _ASK_AGAIN_S - (self._clock.monotonic_ns() - asked_ns) / 1e9)
                _log.warning("lease_not_renewed", leads=self.holds())

    async def is_awaited(self) -> bool:
        """Whether another one stands by; False where that cannot be asked."""
        try:
            return await self._lease.is_awaited(self._holder)
        except errors.LedgerUnavailable:
            return False

    async def give_back(self) -> None:
        """A standby may lead at once; if that cannot be said, it does when the time is over."""
        self._until_ns = self._clock.monotonic_ns()
        try:
            await self._lease.give_back(self._holder)
        except errors.LedgerUnavailable:
            _log.warning("lease_not_given_back")

    async def _take(self, *, by_force: bool = False) -> bool:
        asked_ns = self._clock.monotonic_ns()
        taken = await self._lease.take(self._holder, self._lease_ms, by_force=by_force)
        self._is_store_away = False
        led = self.holds()
        self._until_ns = asked_ns + (ns_from_ms(self._lease_ms) if taken else 0)
        if self.holds() and not led:
            self.on_regained()
        return taken
