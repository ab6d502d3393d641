"""The fleet as the coordinator sees it: replicas by pool, their addresses, lanes and states.

It holds facts and answers questions. Control's supervisor reports what was launched, answered or gone; the coordinator takes
and frees lanes. Every change that could let waiting work start, or that gateways must know, is announced to `on_change`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from weir.core.endings import FinishReason
from weir.core.registry.model import Pool
from weir.core.routing.breaker import BACK_OFF_MS
from weir.core.routing.capacity import Need
from weir.core.routing.prefixes import PrefixIndex
from weir.core.routing.replica import LaneSums, Replica, ReplicaEvent, ReplicaLimits, ReplicaState
from weir.messages import ReplicaAddress, ReplicaPace
from weir.ports import Clock
from weir.units import Millis, Nanos

START_EXPECTED_MS: Millis = 5_000
"""Retry-After while no replica is ready: a small model loads in seconds."""


@dataclass(slots=True)
class PoolView:
    """A pool and its replicas by name. lanes: their sums. pace: of the quickest of them when idle, None while none is known.

    is_kept: whether anybody keeps replicas for it.
    """

    pool: Pool
    replicas: dict[str, Replica] = field(default_factory=dict)
    lanes: LaneSums = field(default_factory=LaneSums)
    pace: ReplicaPace | None = None
    is_kept: bool = False
    _paces: dict[str, ReplicaPace] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.pool.name

    @property
    def revision(self) -> str:
        """What it serves."""
        return self.pool.revision

    @property
    def on_demand(self) -> bool:
        """Whether a first request starts a replica."""
        return self.pool.on_demand

    @property
    def running(self) -> int:
        """Lanes taken."""
        return sum([replica.running for replica in self.replicas.values()])

    def keep_pace(self, replica: str, pace: ReplicaPace | None) -> None:
        """A replica was measured, or is gone; kept, not computed, because every request asks."""
        if pace is None:
            self._paces.pop(replica, None)
        else:
            self._paces[replica] = pace
        self.pace = min(self._paces.values(), key=lambda each: each.first_ms + 1_000 * each.input_ms, default=None)

    def read_ms(self, need: Need, now_ns: Nanos, avoid: str | None = None) -> float:
        """Until a replica that has a lane and memory for this has read what is before it."""
        able = [each for each in self.lanes.open.values() if each.name != avoid and each.room.holds(need.kv_tokens)]
        return min([each.room.unread_ms(now_ns) for each in able], default=0.0)

    def has_memory(self, need: Need, avoid: str | None = None) -> bool:
        """Whether some replica with a free lane, but not the one to avoid, has memory for this."""
        return any(each.name != avoid and each.room.holds(need.kv_tokens) for each in self.lanes.open.values())

    def has_room(self, need: Need, avoid: str | None = None) -> bool:
        """Whether some replica, but not the one to avoid, can start this now."""
        return any(each.name != avoid and each.room.fits(need) for each in self.lanes.open.values())


@dataclass(frozen=True, slots=True)
class Adapting:
    """How replicas adapt. back_off_ms: how long one that failed is left alone; least_percent: of its lanes, always usable."""

    back_off_ms: Millis = BACK_OFF_MS
    least_percent: int = 100


class Fleet:
    """Pools and replicas of a cell. Names of replicas are never reused. prefixes: what their caches are believed to hold."""

    def __init__(self, clock: Clock, adapting: Adapting | None = None) -> None:
        self._clock = clock
        self._adapting = adapting or Adapting()
        self._pools: dict[str, PoolView] = {}
        self._pools_of_revision: dict[str, tuple[PoolView, ...]] = {}
        self._addresses: dict[str, ReplicaAddress] = {}
        self.prefixes = PrefixIndex()
        self.on_change: Callable[[], None] = lambda: None
        self.on_condemned: Callable[[str], None] = lambda replica: None
        self.on_demand: Callable[[str], None] = lambda pool: None
        self.on_state: Callable[[Replica, ReplicaState, str], None] = lambda replica, before, why: None
        self.on_known: Callable[[Replica, ReplicaAddress], None] = lambda replica, address: None
        """Told when a replica's address is learnt, before it takes any work."""
        self.carries: Callable[[str, str | None], bool] = lambda pool, replica: False
        """Whether a coordinator has anything of a pool's, or on one of its replicas, also what takes no lane so far."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What changes within the block is announced once, at its end."""
        announce, self.on_change = self.on_change, lambda: None
        try:
            yield
        finally:
            self.on_change = announce
        announce()

    # ── reported by control ──────────────────────────────────────────────────────────────────────────────────────────

    def add_pool(self, pool: Pool) -> None:
        """A pool that may get replicas. One of its name is from now on as this one says; of another revision only if empty."""
        view = self._pools.get(pool.name)
        if view is None:
            view = self._pools[pool.name] = PoolView(pool)
        elif view.revision != pool.revision:
            assert not view.replicas
            self._unlist(view)
        view.pool, view.is_kept = pool, True
        listed = self.pools_of(pool.revision)
        if all(each is not view for each in listed):
            self._pools_of_revision[pool.revision] = (*listed, view)

    def withdraw(self, pool: str) -> None:
        """Nobody keeps replicas for this pool any more: it takes no new work. Idempotent."""
        view = self._pools[pool]
        view.is_kept = False
        self._unlist(view)

    def _unlist(self, view: PoolView) -> None:
        self._pools_of_revision[view.revision] = tuple(each for each in self.pools_of(view.revision) if each is not view)

    def add(self, name: str, pool: str, concurrency: int) -> None:
        """A replica is starting."""
        view = self._pools[pool]
        assert name not in view.replicas
        least = max(1, concurrency * self._adapting.least_percent // 100)
        limits = ReplicaLimits(concurrency, least)
        view.replicas[name] = Replica(name, pool, limits, self._adapting.back_off_ms, view.lanes)

    def answered(self, address: ReplicaAddress) -> None:
        """The replica's warm-up or probe succeeded: it takes work, at this address, with these capabilities.

        One whose breaker is open takes trials, once its time-out is over.
        """
        replica = self._replica(address.pool, address.name)
        if replica is None or replica.state in (ReplicaState.STOPPED, ReplicaState.FAILED):
            return
        before = (self._addresses.get(address.name), replica.state, replica.free)
        if before[0] != address:
            self._learn(replica, address)
        replica.answered(self._clock.monotonic_ns())
        self._tell_change(replica, before[1], "answered")
        if before != (address, replica.state, replica.free):
            self.on_change()

    def _learn(self, replica: Replica, address: ReplicaAddress) -> None:
        """Where it is, what its memory holds and how fast it is."""
        is_new = address.name not in self._addresses
        self._addresses[address.name] = address
        replica.room.kv_tokens_max = address.kv_tokens
        if address.cache_salt:
            self.prefixes.bound(address.name, address.kv_tokens)
        pace = address.pace
        if pace is not None:
            self._pools[address.pool].keep_pace(address.name, pace)
            replica.room.input_ms = pace.input_ms
        if is_new:
            self.on_known(replica, address)

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
        self._pools[pool].keep_pace(name, None)
        self.prefixes.gone(name)
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
        replica.showed_output(lane, self._clock.monotonic_ns())
        if replica.free > before:
            self.on_change()

    # ── asked by the coordinator ─────────────────────────────────────────────────────────────────────────────────────

    def pools_of(self, revision: str) -> tuple[PoolView, ...]:
        """Every pool that serves a revision, in the order in which they were added."""
        return self._pools_of_revision.get(revision, ())

    def pool(self, name: str) -> PoolView:
        """A pool by its name."""
        return self._pools[name]

    def address_of(self, name: str) -> ReplicaAddress:
        """Where a replica that takes work is reached."""
        return self._addresses[name]

    def known_address(self, name: str) -> ReplicaAddress | None:
        """A replica's address, once it answered."""
        return self._addresses.get(name)

    def find(self, pool: str, name: str, url: str | None) -> Replica | None:
        """A replica of a pool by where it is, else by its name: another supervisor may have named it otherwise."""
        replicas = self._pools[pool].replicas if pool in self._pools else {}
        if name in replicas and name in self._addresses and url in (None, self._url_of(name)):
            return replicas[name]
        return next((replicas[each] for each in replicas if url is not None and self._url_of(each) == url), None)

    def _url_of(self, name: str) -> str | None:
        address = self._addresses.get(name)
        return address.url if address is not None else None

    def ready_addresses(self) -> tuple[ReplicaAddress, ...]:
        """Addresses of all replicas that take work now; half-open ones come last, for others are to be asked first."""
        takers = [replica for pool in self._pools.values() for replica in pool.replicas.values() if replica.takes_work]
        takers.sort(key=lambda replica: replica.state is ReplicaState.HALF_OPEN)
        return tuple(self._addresses[replica.name] for replica in takers)

    def lanes(self, pool: PoolView, avoid: str | None = None) -> tuple[int, int]:
        """(lanes that can be used now, those of them that are free). avoid: a replica that does not count."""
        usable, free = pool.lanes.usable, pool.lanes.free
        if avoid is not None and (avoided := pool.replicas.get(avoid)) is not None:
            usable, free = usable - avoided.usable, free - avoided.free
        return usable, free

    def demand(self, pool: PoolView) -> None:
        """A request found no replica that takes work: start one if the pool is on demand."""
        if pool.on_demand:
            self.on_demand(pool.name)

    def is_idle(self, pool: str) -> bool:
        """Whether nothing runs in a pool, and nothing waits there."""
        return not self._pools[pool].running and not self.carries(pool, None)

    def occupied(self) -> dict[str, int]:
        """Lanes taken by pool; where none is, and something waits all the same, 1."""
        return {view.name: view.running or int(not self.is_idle(view.name)) for view in self.pools}

    def is_unused(self, pool: str, name: str) -> bool:
        """Whether nothing runs on a replica."""
        replica = self._replica(pool, name)
        return not (replica is not None and replica.running) and not self.carries(pool, name)

    @property
    def pools(self) -> Iterable[PoolView]:
        """Every pool."""
        return self._pools.values()

    def running(self) -> int:
        """Lanes taken in the whole fleet."""
        return sum([pool.running for pool in self._pools.values()])

    def _replica(self, pool: str, name: str) -> Replica | None:
        return self._pools[pool].replicas.get(name)

    def _tell_change(self, replica: Replica, before: ReplicaState, why: str) -> None:
        if replica.state is not before:
            self.on_state(replica, before, why)
