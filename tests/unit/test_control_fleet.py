"""The fleet under control's reports: what a replay keeps, takes over, gives up, and refuses."""

import msgspec
import pytest
from tests.contract.control_stand import BEHIND, POOL, address_of
from tests.contract.link_stand import HandClock

from weir import errors
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import Pool
from weir.core.routing.replica import Replica, ReplicaState
from weir.link.control_fleet import ControlledFleet
from weir.link.control_messages import (
    Condemned,
    Demanded,
    FleetReport,
    PoolKept,
    PoolWithdrawn,
    ReplicaAdded,
    ReplicaAnswered,
    ReplicaDoubted,
    ReplicaDrained,
    ReplicaGone,
)
from weir.messages import ReplicaPace

URL = "http://engine"


class Kept:
    """A fleet that control changes. told: what control hears, in order; busy: pools with requests."""

    def __init__(self) -> None:
        self.fleet = Fleet(HandClock())
        self.told: list[Condemned | Demanded] = []
        self.busy: set[str] = set()
        self.controlled = ControlledFleet(self.fleet, lambda pool: pool in self.busy)
        self.controlled.tell = self.told.append
        self.fleet.on_condemned, self.fleet.on_demand = self.controlled.condemned, self.controlled.demanded

    def replay(self, *reports: FleetReport) -> None:
        """As the desk does."""
        self.controlled.check(reports)
        self.controlled.replay(reports)

    def replica(self, pool: str, name: str) -> Replica:
        """One of the fleet's."""
        return self.fleet.pool(pool).replicas[name]

    def names(self, pool: str = "behind") -> set[str]:
        """Of a pool's replicas."""
        return set(self.fleet.pool(pool).replicas)


def behind(name: str, pool: Pool = BEHIND, url: str = URL) -> list[FleetReport]:
    """A ready replica behind a URL, as a life of control reports it."""
    added = ReplicaAdded(name, pool.name, pool.concurrency, url)
    return [PoolKept(pool), added, ReplicaAnswered(address_of(name, pool.name, url))]


@pytest.fixture
def kept() -> Kept:
    """A fleet with a replica behind a URL, reported by a first life, with a lane taken."""
    made = Kept()
    made.replay(*behind("one-1"))
    made.replica("behind", "one-1").take_lane()
    return made


def test_the_next_life_takes_an_engine_over_as_it_is(kept: Kept) -> None:
    """Protects running streams: pool, URL and concurrency are the same, so the replica is, with its lanes and its name."""
    before = kept.replica("behind", "one-1")
    kept.replay(*behind("two-1"))
    assert kept.names() == {"one-1"} and kept.replica("behind", "one-1") is before
    assert (before.state, before.running) == (ReplicaState.READY, 1)
    assert kept.fleet.address_of("one-1").name == "one-1"


def test_reports_of_the_new_name_are_of_the_old_replica(kept: Kept) -> None:
    """Protects the new life's word: doubt, answers, drains and ends under its own name reach the replica that was kept."""
    kept.replay(*behind("two-1"))
    replica, states = kept.replica("behind", "one-1"), list[ReplicaState]()
    for report in (
        ReplicaDoubted("behind", "two-1"),
        ReplicaAnswered(address_of("two-1", "behind", URL)),
        ReplicaDrained("behind", "two-1"),
        ReplicaGone("behind", "two-1"),
    ):
        kept.controlled.apply(report)
        states.append(replica.state)
    assert states == [ReplicaState.SUSPECT, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STOPPED]
    assert kept.names() == set()


def test_an_engine_that_is_taken_over_keeps_its_pace(kept: Kept) -> None:
    """Protects predictions: the next life warms up an engine that is busy, and what it measures then is not its pace."""
    idle, busy = ReplicaPace(10.0, 0.1, 5.0), ReplicaPace(900.0, 9.0, 50.0)
    for name, pace in (("one-1", idle), ("two-1", busy)):
        kept.replay(*behind(name))
        kept.controlled.apply(ReplicaAnswered(msgspec.structs.replace(address_of(name, "behind", URL), pace=pace)))
    assert kept.fleet.address_of("one-1").pace == idle


def test_a_third_life_takes_over_from_the_second(kept: Kept) -> None:
    """Protects names in the ledger: however often control is started, the replica has the name that it ran under."""
    kept.replay(*behind("two-1"))
    kept.replay(*behind("three-1"))
    assert kept.names() == {"one-1"}
    kept.fleet.condemn("behind", "one-1")
    assert kept.told == [Condemned("three-1")]


@pytest.mark.parametrize(
    "named",
    [
        behind("two-1", url="http://other"),
        behind("two-1", Pool("behind", "rev", 1, 4, urls=(URL,))),
        [PoolKept(BEHIND), ReplicaAdded("two-1", "behind", 2)],
    ],
    ids=["url", "concurrency", "launched"],
)
def test_another_engine_is_another_replica(kept: Kept, named: list[FleetReport]) -> None:
    """Protects lanes: only what is certainly the same engine is taken over; the other one is gone."""
    before = kept.replica("behind", "one-1")
    kept.replay(*named)
    assert kept.names() == {"two-1"} and before.state is ReplicaState.FAILED


def test_a_condemned_engine_is_replaced_and_not_taken_over(kept: Kept) -> None:
    """Protects lanes that are in doubt: the next life's replica starts anew, as it would for the life that was told."""
    kept.fleet.condemn("behind", "one-1")
    kept.replay(*behind("two-1"))
    assert kept.names() == {"two-1"} and kept.replica("behind", "two-1").running == 0


def test_a_condemnation_that_was_not_heard_is_said_again(kept: Kept) -> None:
    """Protects from a replica that nobody replaces: the same life hears it with its next replay, for as long as it names it."""
    kept.fleet.condemn("behind", "one-1")
    kept.told.clear()
    kept.replay(*behind("one-1"))
    assert kept.told == [Condemned("one-1")] and kept.replica("behind", "one-1").state is ReplicaState.DRAINING


def test_what_a_replay_does_not_name_is_gone(kept: Kept) -> None:
    """Protects placement from what nobody keeps: replicas go, and a pool takes no new work until it is named again."""
    kept.replay(PoolKept(POOL), ReplicaAdded("two-1", "pool", 2))
    assert kept.names() == set() and kept.names("pool") == {"two-1"}
    assert [view.name for view in kept.fleet.pools_of("rev")] == ["pool"]
    kept.replay(*behind("three-1"))
    assert [view.name for view in kept.fleet.pools_of("rev")] == ["behind"] and kept.names("pool") == set()


def test_a_replay_is_announced_once(kept: Kept) -> None:
    """Protects placement from half a fleet: waiting work looks for replicas when all are as control says, and not before."""
    announced: list[dict[str, ReplicaState]] = []

    def look() -> None:
        announced.append({name: replica.state for pool in kept.fleet.pools for name, replica in pool.replicas.items()})

    kept.fleet.on_change = look
    launched = ["pool-1", "pool-2"]
    kept.replay(
        *behind("two-1"),
        PoolKept(POOL),
        *(ReplicaAdded(name, "pool", 2) for name in launched),
        *(ReplicaAnswered(address_of(name)) for name in launched),
        ReplicaDrained("behind", "two-1"),
    )
    assert announced == [dict.fromkeys(launched, ReplicaState.READY) | {"one-1": ReplicaState.DRAINING}]
    kept.controlled.apply(ReplicaDoubted("pool", "pool-1"))
    assert len(announced) == 2


def test_pools_on_record_are_known_before_control_is(kept: Kept) -> None:
    """Protects the first moments of a coordinator: a request finds a pool without capacity, not an unknown model."""
    kept.controlled.declare([Pool("recorded", "old", 1, 1)])
    assert [view.name for view in kept.fleet.pools_of("old")] == ["recorded"]
    kept.replay(*behind("two-1"))
    assert kept.fleet.pools_of("old") == ()


def test_a_pool_may_change_all_but_what_its_requests_run_on(kept: Kept) -> None:
    """Protects requests that were promised a revision: it changes once nothing of the pool runs or waits; the rest at once."""
    wider = Pool("behind", "rev", 1, 2, urls=(URL,), tenant="acme")
    kept.replay(*behind("two-1", wider))
    assert kept.fleet.pool("behind").pool == wider and kept.names() == {"one-1"}
    other = Pool("behind", "next", 1, 2, urls=(URL,))
    kept.busy.add("behind")
    with pytest.raises(errors.LinkFault) as refused:
        kept.replay(*behind("three-1", other))
    assert refused.value.is_final and kept.names() == {"one-1"}
    kept.busy.clear()
    kept.replay(*behind("three-1", other))
    assert kept.names() == {"three-1"} and [view.name for view in kept.fleet.pools_of("next")] == ["behind"]
    assert kept.fleet.pools_of("rev") == ()


@pytest.mark.parametrize(
    "report",
    [ReplicaAdded("x", "unknown", 1), ReplicaDoubted("behind", "x"), ReplicaGone("behind", "x")],
    ids=["pool", "doubted", "gone"],
)
def test_what_was_never_named_ends_the_link(kept: Kept, report: FleetReport) -> None:
    """Protects the coordinator from a control that speaks of something else: it is a fault of the link, not an assertion."""
    with pytest.raises(errors.LinkFault):
        kept.controlled.apply(report)


def test_demand_is_passed_on(kept: Kept) -> None:
    """Protects pools on demand: a request that finds none ready asks control for one."""
    kept.controlled.apply(PoolKept(Pool("asked", "rev", 1, 1, on_demand=True)))
    kept.fleet.demand(kept.fleet.pool("asked"))
    assert kept.told == [Demanded("asked")]


@pytest.mark.parametrize(
    "report",
    [
        ReplicaAdded("two-1", "behind", 2),
        ReplicaAnswered(address_of("two-1", "behind")),
        ReplicaDrained("behind", "one-1"),
    ],
    ids=["pool", "answered", "former life"],
)
def test_a_replay_that_names_not_all_that_it_speaks_of_changes_nothing(kept: Kept, report: FleetReport) -> None:
    """Protects the one step: a replay is refused before any of it is in force, and nobody is dismissed for good."""
    with pytest.raises(errors.LinkFault) as refused:
        kept.replay(PoolKept(POOL), report)
    assert not refused.value.is_final and kept.names() == {"one-1"} and len(list(kept.fleet.pools)) == 1


# ── pools that go ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_is_withdrawn_takes_no_new_work_until_it_is_named_again(kept: Kept) -> None:
    """Protects requests from a pool that control let go of; what it never named it cannot withdraw."""
    kept.controlled.apply(ReplicaGone("behind", "one-1"))
    kept.controlled.apply(PoolWithdrawn("behind"))
    assert kept.fleet.pools_of("rev") == ()
    kept.controlled.apply(PoolKept(BEHIND))
    assert [view.name for view in kept.fleet.pools_of("rev")] == ["behind"]
    with pytest.raises(errors.LinkFault):
        kept.controlled.apply(PoolWithdrawn("unknown"))


def test_a_pool_does_not_change_its_revision_beside_a_replay(kept: Kept) -> None:
    """Protects the coordinator from a control that says so: it is a fault of the link, not an assertion."""
    with pytest.raises(errors.LinkFault):
        kept.controlled.apply(PoolKept(Pool("behind", "next", 1, 2, urls=(URL,))))
    assert [view.name for view in kept.fleet.pools_of("rev")] == ["behind"]


def test_an_engine_that_was_drained_is_not_taken_over(kept: Kept) -> None:
    """Protects a pool that the next life keeps: its replica takes work, which the one that was drained never does again."""
    kept.controlled.apply(ReplicaDrained("behind", "one-1"))
    kept.replay(*behind("two-1"))
    assert kept.names() == {"two-1"} and kept.replica("behind", "two-1").state is ReplicaState.READY


def test_a_drained_replica_is_unused_once_nothing_runs_there(kept: Kept) -> None:
    """Protects what still runs from control, which hears it by its own names; of others it is not said."""
    kept.replay(*behind("two-1"))
    assert kept.controlled.unused() == ()
    kept.controlled.apply(ReplicaDrained("behind", "two-1"))
    assert kept.controlled.unused() == ()
    kept.replica("behind", "one-1").free_lane(0)
    assert kept.controlled.unused() == ("two-1",)
    kept.fleet.carries = lambda pool, replica: (pool, replica) == ("behind", "one-1")
    assert kept.controlled.unused() == ()
