"""Coordinators to be that share one lease in virtual time, each by a way to the store of its own that can be slow or cut.

Who leads by its own belief is looked at whenever a lease was taken: beliefs begin at no other moment, so no overlap is missed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import TypeVar

from weir import errors
from weir.coordinator.leadership import LEASE_MS, Leadership
from weir.ports import Clock
from weir.sim.virtual_loop import VirtualClock, VirtualLoop
from weir.storage.memory_lease import MemoryLeaderLease
from weir.units import Millis, ns_from_ms

Answer = TypeVar("Answer")


class Way:
    """One process's way to the store. slow_s: the most that going there and coming back each take; bound_s: of an operation.

    is_away: nothing arrives. Frozen, the process asks nothing and takes no answer in, while its clock goes on.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._late: list[asyncio.Task[object]] = []
        self.slow_s = 0.0
        self.bound_s: float | None = None
        self.is_away = False
        self._runs = asyncio.Event()
        self._runs.set()

    def freeze(self) -> None:
        """The process runs no more."""
        self._runs.clear()

    def thaw(self) -> None:
        """It runs again."""
        self._runs.set()

    async def carry(self, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        """There and back. Raises LedgerUnavailable; what was asked for may happen all the same, also later."""
        await self._runs.wait()
        there_s, back_s = (self._random.uniform(0, self.slow_s) for _ in range(2))
        if self.is_away:
            await asyncio.sleep(self.bound_s or 0)
            await self._runs.wait()
            raise errors.LedgerUnavailable(not_written=True)
        if self.bound_s is not None and there_s + back_s > self.bound_s:
            self._late.append(asyncio.get_running_loop().create_task(self._arrive(there_s, operation)))
            await asyncio.sleep(self.bound_s)
            await self._runs.wait()
            raise errors.LedgerUnavailable
        answer = await self._arrive(there_s, operation)
        await asyncio.sleep(back_s)
        await self._runs.wait()
        return answer

    async def _arrive(self, after_s: float, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        await asyncio.sleep(after_s)
        return await operation()


class Reached:
    """LeaderLease by a way. landed: called in the step in which it was taken; answered: in the turn after an answer came."""

    def __init__(
        self, lease: MemoryLeaderLease, way: Way, landed: Callable[[str, bool], None], answered: Callable[[], None]
    ) -> None:
        self._lease = lease
        self._way = way
        self._landed = landed
        self._answered = answered

    async def take(self, holder: str, ttl_ms: Millis, *, by_force: bool = False) -> bool:
        """As the lease."""

        async def take() -> bool:
            taken = await self._lease.take(holder, ttl_ms, by_force=by_force)
            if taken:
                self._landed(holder, by_force)
            return taken

        answer = await self._way.carry(take)
        asyncio.get_running_loop().call_soon(self._answered)
        return answer

    async def give_back(self, holder: str) -> None:
        """As the lease."""
        await self._way.carry(lambda: self._lease.give_back(holder))

    async def is_awaited(self, holder: str) -> bool:
        """As the lease."""
        return await self._way.carry(lambda: self._lease.is_awaited(holder))

    async def aclose(self) -> None:
        """The lease outlives its ways."""


class Candidates:
    """All lives of processes that ever wanted to lead, by the holder's name; also what a killed one believes counts.

    overlaps: how often two believed at once, because of force.
    """

    def __init__(self, random: Random) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock: Clock = VirtualClock(loop)
        self.overlaps = 0
        self._random = random
        self._lease = MemoryLeaderLease(self.clock)
        self._lives: dict[str, Leadership] = {}
        self._numbers = count()
        self._landed: dict[str, int] = {}
        self._forced = [(-1, "", -ns_from_ms(LEASE_MS))]

    def way(self) -> Way:
        """A process's way to the store."""
        return Way(self._random)

    def life(self, way: Way) -> Leadership:
        """One more process that may lead."""
        holder = f"life-{len(self._lives)}"
        lease = Reached(self._lease, way, self._note, self._check)
        self._lives[holder] = life = Leadership(lease, self.clock, holder)
        return life

    def leading(self) -> list[str]:
        """Who believes now that it leads, who took it last comes last."""
        return sorted((holder for holder, life in self._lives.items() if life.holds()), key=self._landed.__getitem__)

    def _note(self, holder: str, by_force: bool) -> None:
        number = self._landed[holder] = next(self._numbers)
        if by_force:
            self._forced.append((number, holder, self.clock.monotonic_ns()))

    def _check(self) -> None:
        """AssertionError for one that leads beside a later one, unless it was taken from it by force, less than a lease ago."""
        leading, since_ns = self.leading(), self.clock.monotonic_ns() - ns_from_ms(LEASE_MS)
        for older in leading[:-1]:
            landed = self._landed[older]
            assert any(number > landed and at_ns > since_ns for number, _, at_ns in self._forced), leading
            self.overlaps += 1
