"""Where requests may run and what they take there, counted a second time: pools, lanes, KV tokens and prompts still to read.

It knows pools from the configuration, replicas from their keeper, and everything else from the wire and the engines' door. It
never asks the fleet what is right; it compares what the fleet says with its own figures, while requests run and at rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weir.config import CoordinatorConfig
from weir.coordinator.fleet import Fleet, PoolView
from weir.core.endings import Status
from weir.core.metering import InputBasis
from weir.core.registry.model import Pool
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.capacity import Need
from weir.core.routing.replica import Replica, ReplicaState
from weir.messages import Acquire, Ended, Granted, Progress, Rejected, ReplicaAddress
from weir.sim.naive_lengths import Caller, NaiveLengths
from weir.units import Millis, Tokens

_TOO_MUCH = Need(1 << 60, 1 << 60, backlog_ms=0)

_UNBOUNDED_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Reach:
    """What was in force for a request as it was admitted. pools: that may take it; kv_tokens: input and expected output.

    backlog_ms: below this is what the prompts before it take to be read.
    """

    pools: frozenset[str]
    kv_tokens: Tokens
    backlog_ms: Millis


@dataclass(slots=True)
class Place:
    """What runs on a lane, or may still. unread: its input until the first output; is_salted: part of that may be cached."""

    input_tokens: Tokens
    kv_tokens: Tokens
    unread: Tokens
    is_salted: bool


class Places:
    """The replicas of one world. fleet: of the process that runs, compared with what is counted here; None: there is none."""

    def __init__(self, pools: Sequence[Pool], config: CoordinatorConfig) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._config = config
        self._snapshot = Snapshot()
        self._homes: dict[str, str] = {}
        self._taken: dict[str, dict[int, Place]] = {}
        self._lengths = NaiveLengths()
        self._salts: dict[str, str] = {}
        self.fleet: Fleet | None = None

    # ── processes and configuration ──────────────────────────────────────────────────────────────────────────────────

    def begin(self, snapshot: Snapshot) -> None:
        """A process begins with this configuration, knows nothing of answers, and finds no replica."""
        self.die()
        self._lengths = NaiveLengths()
        self.publish(snapshot)

    def publish(self, snapshot: Snapshot) -> None:
        """A configuration comes in force. A pool that it has no more may still have replicas."""
        self._snapshot = snapshot
        self._pools |= snapshot.pools

    def kept(self, pool: Pool) -> None:
        """A pool is so from now on, also before it comes in force."""
        self._pools[pool.name] = pool

    def die(self) -> None:
        """The process is gone, with its replicas."""
        self._taken, self.fleet = {}, None

    def added(self, replica: str, pool: str) -> None:
        """A replica of this pool exists."""
        self._homes[replica] = pool

    def gone(self, replica: str) -> None:
        """A replica's process is gone, and its lanes with it."""
        self._taken.pop(replica, None)

    @property
    def lanes_taken(self) -> int:
        """Lanes between a grant and a confirmed stop."""
        return sum(map(len, self._taken.values()))

    # ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, acquire: Acquire) -> Reach:
        """An admission; what holds for it from now on."""
        typical = self._snapshot.revisions[acquire.revision].typical_output_tokens
        expected = self._lengths.expected(_caller(acquire), acquire.max_output_tokens, typical)
        pools = frozenset(pool.name for pool in self._takers(acquire) if _is_short_enough(pool, acquire))
        [backlog_ms] = [row.backlog_ms for row in self._snapshot.workload_classes if row.name == acquire.workload_class]
        backlog_ms = _UNBOUNDED_MS if backlog_ms is None else max(1, backlog_ms * self._config.backlog_percent // 100)
        return Reach(pools, acquire.choices * (acquire.input_tokens + expected), backlog_ms)

    def _takers(self, acquire: Acquire) -> list[Pool]:
        """The pools of its revision that are for its tenant and its service class; where none is in force, any that was."""
        tenant, snapshot = self._snapshot.tenants[acquire.tenant], self._snapshot
        known = [pool for pool in self._pools.values() if pool.revision == acquire.revision]
        pools = [pool for pool in known if pool.name in snapshot.pools] or known
        stays = not tenant.leaves_its_pools and any(pool.tenant == tenant.name for pool in pools)
        owners = {tenant.name} if stays else {tenant.name, None}
        return [pool for pool in pools if pool.tenant in owners and acquire.service_class in pool.service_classes]

    def refuse(self, acquire: Acquire, rejected: Rejected) -> None:
        """A refusal for want of a pool: there is none."""
        takers = self._takers(acquire)
        if rejected.code == "no_capacity" and rejected.retry_after_ms is None:
            assert not takers and rejected.should_retry is False, f"{[pool.name for pool in takers]} would take it"
        if rejected.code == "input_too_long":
            bounds = [pool.input_tokens_max for pool in takers]
            assert takers and not any(_is_short_enough(pool, acquire) for pool in takers), f"it fits one of {bounds}"
            assert rejected.members["limit"] == max(bound or 0 for bound in bounds)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self, acquire: Acquire, reach: Reach, granted: Granted) -> None:
        """A request gets a lane: in a pool that is for it, of a replica that has room for it beside what runs there."""
        address, name = granted.replica, granted.replica.name
        pool = self._pools[self._homes[name]]
        assert pool.name == address.pool and pool.name in reach.pools, f"{acquire.generation_id} is in {pool.name}"
        places = self._taken.setdefault(name, {})
        assert granted.lane not in places and len(places) < pool.concurrency, f"{name} is overbooked"
        unread = acquire.choices * acquire.input_tokens
        places[granted.lane] = Place(unread, reach.kv_tokens, unread, address.cache_salt)
        if len(places) > 1:
            self._check_room(reach, granted, places)

    def _check_room(self, reach: Reach, granted: Granted, places: dict[int, Place]) -> None:
        address = granted.replica
        kv_tokens = sum(place.kv_tokens for place in places.values())
        assert address.kv_tokens is None or kv_tokens <= address.kv_tokens, f"{address.name} is to hold {kv_tokens} tokens"
        others = sum(place.unread for lane, place in places.items() if lane != granted.lane)
        if address.pace is not None and not address.cache_salt and others:
            backlog_ms = others * address.pace.input_ms
            assert backlog_ms < reach.backlog_ms, f"{address.name} has still to read for {backlog_ms} ms"

    def progress(self, replica: str, lane: int, progress: Progress) -> None:
        """What runs there has its first output, or so much that it takes more than was reserved."""
        place = self._taken.get(replica, {}).get(lane)
        if place is None:
            return
        if progress.first_output or progress.has_output:
            place.unread = 0
        if progress.delivered_max is not None:
            produced = progress.delivered_max - 2 * self._config.delivery_step_tokens
            place.kv_tokens = max(place.kv_tokens, place.input_tokens + produced)

    def free(self, replica: str, lane: int) -> None:
        """The engine runs nothing there any more."""
        self._taken.get(replica, {}).pop(lane, None)

    def end(self, acquire: Acquire, ended: Ended) -> None:
        """A request ended; the length of a whole answer is what the next one is expected to have."""
        if ended.record.status is Status.COMPLETED:
            self._lengths.observe(_caller(acquire), ended.record.output_tokens // acquire.choices)

    def started(self, replica: ReplicaAddress, tenant: str, salt: str | None) -> None:
        """An engine is about to run a prompt of this tenant: never in another's pool, nor under another's salt."""
        owner = self._pools[self._homes[replica.name]].tenant
        assert owner in (None, tenant), f"{replica.name} belongs to {owner} and is to run a prompt of {tenant}"
        assert (salt is not None) == replica.cache_salt
        assert salt is None or self._salts.setdefault(salt, tenant) == tenant, f"{tenant} runs under another's salt"

    # ── the fleet ────────────────────────────────────────────────────────────────────────────────────────────────────

    def compare(self) -> None:
        """The fleet's figures are those counted here."""
        for view in self.fleet.pools if self.fleet is not None else ():
            replicas = view.replicas.values()
            for replica in replicas:
                self._compare_replica(replica, self._pools[view.name])
            sums = sum(replica.usable for replica in replicas), sum(replica.free for replica in replicas)
            assert (view.lanes.usable, view.lanes.free) == sums, f"{view.name} has {view.lanes}, its replicas {sums}"

    def _compare_replica(self, replica: Replica, pool: Pool) -> None:
        name, room, places = replica.name, replica.room, self._taken.get(replica.name, {}).values()
        assert self._homes[name] == pool.name == replica.pool
        assert replica.running == len(places) <= pool.concurrency, f"{name} runs {len(places)} and says {replica.running}"
        kv_tokens = sum(place.kv_tokens for place in places)
        assert room.kv_tokens == kv_tokens, f"{name} has reserved {room.kv_tokens} KV tokens, by this count {kv_tokens}"
        unread = sum(place.unread for place in places)
        least = sum(min(place.unread, 1) if place.is_salted else place.unread for place in places)
        assert least <= room.prefill_tokens <= unread, f"{name} has to read {room.prefill_tokens}, by this count {unread}"
        assert 1 <= replica.allowed <= pool.concurrency
        usable = {ReplicaState.READY: replica.allowed, ReplicaState.HALF_OPEN: 1}.get(replica.state, 0)
        assert replica.usable == usable and 0 <= replica.free <= usable, f"{name} has {replica.usable} lanes of {usable}"
        if replica.state is ReplicaState.READY:
            assert replica.free == max(0, usable - len(places)), f"{name} has {replica.free} free lanes"

    def check_rest(self) -> None:
        """Nothing runs: no lane is taken, and every replica is as empty as a new one."""
        assert self.lanes_taken == 0, "lanes are taken and nothing runs"
        self.compare()
        for view in self.fleet.pools if self.fleet is not None else ():
            _check_empty(view)


def _check_empty(view: PoolView) -> None:
    assert view.lanes.free == view.lanes.usable, f"{view.name} is empty and has {view.lanes}"
    for replica in view.replicas.values():
        room = replica.room
        assert (room.kv_tokens, room.prefill_tokens) == (0, 0), f"{replica.name} is empty and has room reserved"
        assert room.fits(_TOO_MUCH), f"{replica.name} is empty and does not know it"


def _caller(acquire: Acquire) -> Caller:
    return acquire.tenant, acquire.application, acquire.revision


def _is_short_enough(pool: Pool, acquire: Acquire) -> bool:
    """Where only an upper bound is known, every pool's bound is met."""
    bound = pool.input_tokens_max
    return bound is None or acquire.input_basis is InputBasis.UPPER_BOUND or acquire.input_tokens <= bound
