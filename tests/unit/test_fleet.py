"""The fleet as the coordinator sees it: which replicas take work, and what is announced."""

import msgspec
import pytest

from weir.coordinator.fleet import Fleet
from weir.core.endings import FinishReason
from weir.core.registry.model import EngineKind, Pool
from weir.core.routing.capacity import Need
from weir.core.routing.replica import ReplicaState
from weir.messages import ReplicaAddress, ReplicaPace
from weir.units import Millis, Nanos, ns_from_ms


class HandClock:
    """Time that a test moves by hand."""

    def __init__(self) -> None:
        self.now_ns: Nanos = 0

    def monotonic_ns(self) -> Nanos:
        return self.now_ns

    def wall_ms(self) -> Millis:
        return 0


def _address(name: str, url: str = "") -> ReplicaAddress:
    return ReplicaAddress(name, "pool", "rev", EngineKind.SIMULATED, url, "demo", 1_000)


@pytest.fixture
def clock() -> HandClock:
    """The fleet's clock."""
    return HandClock()


@pytest.fixture
def fleet(clock: HandClock) -> Fleet:
    """A pool with two replicas that start."""
    fleet = Fleet(clock)
    fleet.add_pool(Pool("pool", "rev", 2, 2))
    fleet.add("a", "pool", 2)
    fleet.add("b", "pool", 3)
    return fleet


def _states(fleet: Fleet) -> dict[str, ReplicaState]:
    [pool] = fleet.pools
    return {name: replica.state for name, replica in pool.replicas.items()}


def test_a_replica_is_ready_once_it_answered(fleet: Fleet) -> None:
    """Protects late binding: nothing is offered before, and each change is announced once."""
    changes: list[int] = []
    fleet.on_change = lambda: changes.append(len(fleet.ready_addresses()))
    [pool] = fleet.pools_of("rev")
    assert fleet.lanes(pool) == (0, 0) and fleet.pools_of("other") == ()
    fleet.answered(_address("a"))
    fleet.answered(_address("a"))
    fleet.answered(_address("a", "moved"))
    assert changes == [1, 1] and fleet.lanes(pool) == (2, 2)
    assert fleet.address_of("a").url == "moved"


def test_a_retry_counts_the_other_replicas(fleet: Fleet) -> None:
    """Protects retries: lanes of the replica that failed are none for it."""
    fleet.answered(_address("a"))
    fleet.answered(_address("b"))
    [pool] = fleet.pools
    assert (fleet.lanes(pool), fleet.lanes(pool, "a"), fleet.lanes(pool, "b")) == ((5, 5), (3, 3), (2, 2))


def test_a_doubted_replica_takes_no_work_until_it_answers(fleet: Fleet) -> None:
    """Protects requests from a replica whose probe failed: suspect, announced once, ready again with the next answer."""
    changes: list[int] = []
    fleet.on_change = lambda: changes.append(len(fleet.ready_addresses()))
    fleet.answered(_address("a"))
    fleet.doubted("pool", "a")
    fleet.doubted("pool", "a")
    fleet.doubted("pool", "b")
    assert changes == [1, 0] and not fleet.ready_addresses()
    assert _states(fleet) == {"a": ReplicaState.SUSPECT, "b": ReplicaState.STARTING}
    fleet.answered(_address("a"))
    assert changes == [1, 0, 1] and _states(fleet)["a"] is ReplicaState.READY
    fleet.drain("pool", "a")
    assert _states(fleet)["a"] is ReplicaState.DRAINING


def test_only_what_can_be_used_now_counts(fleet: Fleet, clock: HandClock) -> None:
    """Protects the door after a loss: no lane of a suspect replica, one of a half-open one, and all once trials went well."""
    changes: list[tuple[str, ...]] = []
    fleet.on_change = lambda: changes.append(tuple(address.name for address in fleet.ready_addresses()))
    [pool] = fleet.pools
    for name in ("a", "b"):
        fleet.answered(_address(name))
    replica = pool.replicas["a"]
    for _ in range(2):
        fleet.attempt_ended(replica, replica.take_lane(), FinishReason.STALLED, showed_output=False)
        assert fleet.lanes(pool) == (3, 3)
        replica.free_lane(0)
        fleet.answered(_address("a"))
    assert fleet.lanes(pool) == (3, 3)  # left alone after two in a row, though it answers
    clock.now_ns = ns_from_ms(1_000)
    fleet.answered(_address("a"))
    assert fleet.lanes(pool) == (4, 4) and fleet.lanes(pool, "b") == (1, 1)
    for _ in range(3):
        lane = replica.take_lane()
        assert fleet.lanes(pool) == (4, 3)
        fleet.showed_output(replica, lane)
        assert fleet.lanes(pool) == (4, 4)
        fleet.attempt_ended(replica, lane, FinishReason.STOP, showed_output=True)
        replica.free_lane(lane)
    assert fleet.lanes(pool) == (5, 5)
    twice_doubted = [("b",), ("a", "b"), ("b",)]
    assert changes == [("a",), ("a", "b"), *twice_doubted, ("b", "a"), *3 * [("b", "a")], ("a", "b")]


def test_a_condemned_replica_is_reported(fleet: Fleet) -> None:
    """Protects lanes: control hears which replica must be replaced before its lanes return."""
    condemned: list[str] = []
    fleet.on_condemned = condemned.append
    fleet.answered(_address("a"))
    fleet.condemn("pool", "a")
    assert condemned == ["a"] and _states(fleet)["a"] is ReplicaState.DRAINING
    fleet.answered(_address("a"))  # a probe that was under way: it takes no work again
    assert _states(fleet)["a"] is ReplicaState.DRAINING


def test_a_gone_replica_takes_its_lanes_along(fleet: Fleet) -> None:
    """Protects capacity figures: lanes of a replica that is confirmed gone are no more, and late reports change nothing."""
    fleet.answered(_address("a"))
    [pool] = fleet.pools
    pool.replicas["a"].take_lane()
    assert fleet.running() == 1
    fleet.gone("pool", "a")
    fleet.gone("pool", "a")
    fleet.answered(_address("a"))
    fleet.doubted("pool", "a")
    fleet.drain("pool", "a")
    assert fleet.running() == 0 and not fleet.ready_addresses() and set(_states(fleet)) == {"b"}


def test_a_draining_replica_finishes_what_runs(fleet: Fleet) -> None:
    """Protects drains: no new work, the lanes stay counted until it is gone."""
    fleet.answered(_address("a"))
    [pool] = fleet.pools
    pool.replicas["a"].take_lane()
    fleet.drain("pool", "a")
    fleet.drain("pool", "b")
    assert _states(fleet) == {"a": ReplicaState.DRAINING, "b": ReplicaState.STARTING}
    assert fleet.running() == 1 and not fleet.ready_addresses()
    fleet.gone("pool", "a")
    assert fleet.running() == 0


def test_a_pool_on_demand_asks_for_a_replica() -> None:
    """Protects the first request of an idle pool: it starts one and is told when to come back."""
    fleet, asked = Fleet(HandClock()), list[str]()
    fleet.on_demand = asked.append
    idle = Pool("idle", "rev", 1, 1, on_demand=True)
    fleet.add_pool(idle)
    fleet.add_pool(idle)
    fleet.add_pool(Pool("kept", "other", 1, 1))
    for revision in ("rev", "other"):
        [pool] = fleet.pools_of(revision)
        fleet.demand(pool)
    assert asked == ["idle"]
    assert [pool.name for pool in fleet.pools] == ["idle", "kept"]


def test_a_revision_may_have_several_pools(fleet: Fleet) -> None:
    """Protects placement among pools: each in the order in which it came, with its own replicas; none takes another's place."""
    second = Pool("jobs", "rev", 1, 4, tenant="acme")
    fleet.add_pool(second)
    fleet.add_pool(second)
    fleet.add("c", "jobs", 4)
    found = fleet.pools_of("rev")
    assert [(view.name, view.revision, set(view.replicas)) for view in found] == [
        ("pool", "rev", {"a", "b"}),
        ("jobs", "rev", {"c"}),
    ]
    assert found[1].pool is second and fleet.pools_of("other") == ()


def test_room_and_memory_are_told_apart(fleet: Fleet) -> None:
    """Protects the door's figures: behind prompts there is memory and no room, in a full memory neither, where it may go."""
    fleet.answered(msgspec.structs.replace(_address("a"), kv_tokens=100, pace=ReplicaPace(5.0, 0.5, 10.0)))
    fleet.answered(msgspec.structs.replace(_address("b"), kv_tokens=100))
    [pool] = fleet.pools
    pool.replicas["a"].take_lane(60, 40)
    need = Need(40, 10, backlog_ms=20)
    assert pool.has_memory(need) and pool.has_room(need)
    assert pool.has_memory(need, "b") and not pool.has_room(need, "b")
    assert pool.has_room(msgspec.structs.replace(need, backlog_ms=21), "b")
    assert not pool.has_memory(msgspec.structs.replace(need, kv_tokens=41), "b")
    pool.replicas["a"].take_lane()
    assert not pool.has_memory(need, "b"), "no lane is free"


def test_a_pool_that_is_withdrawn_takes_no_new_work_until_it_is_added_again(fleet: Fleet) -> None:
    """Protects requests from a pool that nobody keeps: it is not offered, and what it says of itself may change."""
    [view] = fleet.pools_of("rev")
    fleet.withdraw("pool")
    fleet.withdraw("pool")
    assert fleet.pools_of("rev") == () and list(fleet.pools) == [view]
    assert not any(each.is_kept for each in fleet.pools)
    fleet.add_pool(Pool("pool", "rev", 2, 2, tenant="acme"))
    assert fleet.pools_of("rev") == (view,) and view.pool.tenant == "acme" and set(view.replicas) == {"a", "b"}
    assert all(each.is_kept for each in fleet.pools)


def test_an_empty_pool_may_serve_another_revision(fleet: Fleet) -> None:
    """Protects placement: a pool is offered for the revision that it serves now, and for no other."""
    for name in ("a", "b"):
        fleet.gone("pool", name)
    fleet.add_pool(Pool("pool", "next", 2, 2))
    assert fleet.pools_of("rev") == () and [view.name for view in fleet.pools_of("next")] == ["pool"]


def test_a_pool_is_idle_and_a_replica_unused_where_nothing_runs_or_is_expected_to(fleet: Fleet) -> None:
    """Protects what runs from being stopped: lanes count, and whatever the coordinator has there without a lane."""
    fleet.answered(_address("a"))
    [pool] = fleet.pools
    assert fleet.is_idle("pool") and fleet.is_unused("pool", "a")
    pool.replicas["a"].take_lane()
    assert (fleet.is_idle("pool"), fleet.is_unused("pool", "a"), fleet.is_unused("pool", "b")) == (False, False, True)
    assert fleet.occupied() == {"pool": 1}
    pool.replicas["a"].free_lane(0)
    fleet.carries = lambda pool, replica: replica in (None, "b")
    assert (fleet.is_idle("pool"), fleet.is_unused("pool", "a"), fleet.is_unused("pool", "b")) == (False, True, False)
    assert fleet.is_unused("pool", "gone") and fleet.occupied() == {"pool": 1}
