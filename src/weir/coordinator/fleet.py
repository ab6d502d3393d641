"""The fleet as the coordinator sees it: replicas by pool, their addresses, lanes and states.

It holds facts and answers questions. Control's supervisor reports what was launched, answered or gone; the coordinator takes
and frees lanes. Every change that could let waiting work start, or that gateways must know, is announced to `on_change`.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MS
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits, ReplicaState
from weir.messages import ReplicaAddress
from weir.ports import Clock
from weir.units import Millis

START_EXPECTED_MS: Millis = 5_000
"""Retry-After while no replica is ready: a small model loads in seconds."""


@dataclass(slots=True)
class PoolView:
    """A pool's replicas by name, and whether a first request starts one."""

    name: str
    revision: str
    replicas: dict[str, Replica]
    on_demand: bool


class Fleet:
    """Pools and replicas of a cell. Names of replicas are never reused. back_off_ms: how long one that failed is left alone."""

    def __init__(self, clock: Clock, back_off_ms: Millis = BACK_OFF_MS) -> None:
        self._clock = clock
        self._back_off_ms = back_off_ms
        self._pools: dict[str, PoolView] = {}
        self._pool_of_revision: dict[str, str] = {}
        self._addresses: dict[str, ReplicaAddress] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_condemned: Callable[[str], None] = lambda replica: None
        self.on_demand: Callable[[str], None] = lambda pool: None
        self.on_state: Callable[[Replica, ReplicaState, str], None] = lambda replica, before, why: None

    # ── reported by control ──────────────────────────────────────────────────────────────────────────────────────────

    def add_pool(self, name: str, revision: str, *, on_demand: bool = False) -> None:
        """A pool that may get replicas. Idempotent."""
        if name not in self._pools:
            self._pools[name] = PoolView(name, revision, {}, on_demand)
            self._pool_of_revision[revision] = name

    def add(self, name: str, pool: str, concurrency: int) -> None:
        """A replica is starting."""
        assert name not in self._pools[pool].replicas
        self._pools[pool].replicas[name] = Replica(name, pool, ReplicaLimits(concurrency), self._back_off_ms)

    def answered(self, address: ReplicaAddress) -> None:
        """The replica's warm-up or probe succeeded: it takes work, at this address, with these capabilities.

        One whose breaker is open takes trials, once its time-out is over.
        """
        replica = self._replica(address.pool, address.name)
        if replica is None or replica.state in (ReplicaState.STOPPED, ReplicaState.FAILED):
            return
        before = (self._addresses.get(address.name), replica.state)
        self._addresses[address.name] = address
        replica.answered(self._clock.monotonic_ns())
        self._tell_change(replica, before[1], "answered")
        if before != (address, replica.state):
            self.on_change()

    def doubted(self, pool: str, name: str) -> None:
        """A probe of the replica failed: no new work until it answers."""
        replica = self._replica(pool, name)
        if replica is None or replica.state in (ReplicaState.STOPPED, ReplicaState.FAILED):
            return
        took_work = replica.takes_work
        before = replica.state
        replica.doubted()
        self._tell_change(replica, before, "probe failed")
        if took_work:
            self.on_change()

    def condemn(self, pool: str, name: str) -> None:
        """The replica did not confirm that it stopped: no new work, and control must replace it before its lanes return."""
        self.drain(pool, name)
        self.on_condemned(name)

    def drain(self, pool: str, name: str) -> None:
        """No new work; what runs may finish."""
        replica = self._replica(pool, name)
        if replica is not None and (replica.takes_work or replica.state is ReplicaState.SUSPECT):
            replica.advance(ReplicaEvent.DRAIN)
            self.on_change()

    def gone(self, pool: str, name: str) -> None:
        """The replica's process is confirmed gone, or its address was given up: its lanes are no more."""
        replica = self._pools[pool].replicas.pop(name, None)
        if replica is None:
            return
        replica.advance(ReplicaEvent.STOP if replica.state is ReplicaState.DRAINING else ReplicaEvent.FAIL)
        self._addresses.pop(name, None)
        self.on_change()

    # ── reported by the coordinator ──────────────────────────────────────────────────────────────────────────────────

    def attempt_ended(self, replica: Replica, lane: int | None, reason: FinishReason, *, showed_output: bool) -> None:
        """What ran there ended so: it may put the replica in doubt, or speak for it. lane: None if it is free."""
        before = replica.state
        replica.attempt_ended(lane, reason, self._clock.monotonic_ns(), showed_output=showed_output)
        self._tell_change(replica, before, reason.value)
        if replica.state is not before:
            self.on_change()

    def showed_output(self, replica: Replica, lane: int) -> None:
        """What runs on this lane has output: a half-open replica may take its next trial."""
        before = replica.free
        replica.showed_output(lane)
        if replica.free > before:
            self.on_change()

    # ── asked by the coordinator ─────────────────────────────────────────────────────────────────────────────────────

    def pool_of(self, revision: str) -> PoolView | None:
        """The pool that serves a revision."""
        name = self._pool_of_revision.get(revision)
        return self._pools[name] if name is not None else None

    def replicas_by_pool(self) -> dict[str, Collection[Replica]]:
        """What the scheduler matches with queues."""
        return {name: pool.replicas.values() for name, pool in self._pools.items()}

    def address_of(self, name: str) -> ReplicaAddress:
        """Where a replica that takes work is reached."""
        return self._addresses[name]

    def known_address(self, name: str) -> ReplicaAddress | None:
        """A replica's address, once it answered."""
        return self._addresses.get(name)

    def ready_addresses(self) -> tuple[ReplicaAddress, ...]:
        """Addresses of all replicas that take work now; half-open ones come last, for others are to be asked first."""
        takers = [replica for pool in self._pools.values() for replica in pool.replicas.values() if replica.takes_work]
        takers.sort(key=lambda replica: replica.state is ReplicaState.HALF_OPEN)
        return tuple(self._addresses[replica.name] for replica in takers)

    def lanes(self, pool: PoolView, avoid: str | None = None) -> tuple[int, int]:
        """(lanes that can be used now, those of them that are free). avoid: a replica that does not count."""
        usable = free = 0
        for replica in pool.replicas.values():
            if replica.name != avoid:
                usable += replica.usable
                free += replica.free
        return usable, free

    def demand(self, pool: PoolView) -> None:
        """A request found no replica that takes work: start one if the pool is on demand."""
        if pool.on_demand:
            self.on_demand(pool.name)

    def running_in(self, pool: str) -> int:
        """Lanes taken in one pool."""
        return sum(replica.running for replica in self._pools[pool].replicas.values())

    @property
    def pools(self) -> Iterable[PoolView]:
        """Every pool."""
        return self._pools.values()

    def running(self) -> int:
        """Lanes taken in the whole fleet."""
        return sum(replica.running for pool in self._pools.values() for replica in pool.replicas.values())

    def _replica(self, pool: str, name: str) -> Replica | None:
        return self._pools[pool].replicas.get(name)

    def _tell_change(self, replica: Replica, before: ReplicaState, why: str) -> None:
        if replica.state is not before:
            self.on_state(replica, before, why)
