"""The leader's lease in memory, with the semantics of the durable one: for the simulator and for tests.

One object is what its holders, all in one process, share; it decides by its own clock. It must never accept what the durable
one refuses, nor the reverse.
"""

from weir.ports import Clock
from weir.units import Millis, Nanos, ns_from_ms


class MemoryLeaderLease:
    """LeaderLease in memory, on a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holder: str | None = None
        self._until_ns: Nanos = 0
        self._waiting: set[str] = set()

    async def take(self, holder: str, ttl_ms: Millis, *, by_force: bool = False) -> bool:
        """Take or renew it for ttl_ms, if nobody else has it or by force; whether it is the holder's now."""
        now_ns = self._clock.monotonic_ns()
        if self._holder not in (None, holder) and now_ns < self._until_ns and not by_force:
            self._waiting.add(holder)
            return False
        self._waiting.discard(holder)
        self._holder, self._until_ns = holder, now_ns + ns_from_ms(ttl_ms)
        return True

    async def give_back(self, holder: str) -> None:
        """Let another one have it at once, if it is still this one's."""
        if self._holder == holder:
            self._holder = None

    async def is_awaited(self, holder: str) -> bool:
        """Whether another one asked for it in vain since it last had it; all that ever asked live."""
        return bool(self._waiting - {holder})

    async def aclose(self) -> None:
        """Nothing to close: the others share it."""
