"""The link between control and a coordinator: everything is replayed whole, nothing by halves, and one control is the one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.control_stand import (
    BEHIND,
    POOL,
    ControlStand,
    address_of,
    control_standing,
    serve_one,
    snapshot_of,
)
from tests.contract.link_stand import TERMS, until

from weir import errors
from weir.core.registry.model import Pool
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import ReplicaState

READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING
SILENCE_MS = 3 * TERMS.heartbeat_ms + 1


@pytest.fixture
async def stand() -> AsyncIterator[ControlStand]:
    async with control_standing() as standing:
        yield standing


# ── a replay ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_replay_puts_all_in_force(stand: ControlStand) -> None:
    """A session begins with everything: the snapshot with its limits, for how long it is good, pools and replicas."""
    desk = await stand.desk()
    control = stand.control(desk.coordinator.path)
    serve_one(control)
    control.fleet.add("pool-life-2", "pool", 2)
    control.fleet.add("pool-life-3", "pool", 2)
    control.fleet.answered(address_of("pool-life-3"))
    control.fleet.doubted("pool", "pool-life-3")
    control.fleet.add("pool-life-4", "pool", 2)
    control.fleet.answered(address_of("pool-life-4"))
    control.fleet.drain("pool", "pool-life-4")
    control.fleet.add("pool-life-5", "pool", 2)
    control.fleet.gone("pool", "pool-life-5")
    control.end.renew(7, 60_000)
    await control.start(7, "acme", "globex")
    await until(lambda: control.end.is_linked, "the replay is in force")
    assert control.end.in_force.is_set() and desk.host.published == [snapshot_of(7, "acme", "globex")]
    assert [*desk.states.values()] == [READY, ReplicaState.STARTING, ReplicaState.SUSPECT, DRAINING]
    await until(lambda: desk.host.renewed == [(7, 60_000)], "it is said to be checked")
    assert control.fleet.pools == {"pool"}


async def test_what_changes_is_said_as_it_does(stand: ControlStand) -> None:
    """After the replay each change goes alone: snapshots, renewals and reports, in order."""
    desk, control = await stand.linked()
    control.fleet.add("pool-life-1", "pool", 2)
    control.fleet.answered(address_of("pool-life-1"))
    await control.end.publish(snapshot_of(2, "acme", "globex"))
    control.end.renew(2, 1_000)
    await until(lambda: desk.host.renewed == [(2, 1_000)], "all of it arrives")
    assert desk.host.published[1:] == [snapshot_of(2, "acme", "globex")] and desk.states == {"pool-life-1": READY}
    control.fleet.doubted("pool", "pool-life-1")
    await until(lambda: desk.states == {"pool-life-1": ReplicaState.SUSPECT}, "it is doubted")
    control.fleet.gone("pool", "pool-life-1")
    await until(lambda: not desk.states, "it is gone")


async def test_a_pool_that_is_withdrawn_is_so_at_once_and_in_every_replay(stand: ControlStand) -> None:
    """A pool that control keeps no more takes no new work, for the coordinator that hears it and for the next one."""
    paths = stand.links.path(), stand.links.path()
    first = await stand.desk(path=paths[0])
    control = stand.control(*paths)
    serve_one(control)
    serve_one(control, "behind-life-1", BEHIND, "http://engine")
    await control.start()
    await until(lambda: len(first.states) == 2, "both are there")
    control.fleet.gone("behind", "behind-life-1")
    control.fleet.withdraw("behind")
    await until(lambda: [view.name for view in first.fleet.pools_of("rev")] == ["pool"], "it is withdrawn")
    await first.stop()
    second = await stand.desk(2, path=paths[1])
    await until(lambda: second.states == {"pool-life-1": READY}, "the next one has the rest")
    assert [view.name for view in second.fleet.pools] == ["pool"] and control.fleet.pools == {"pool"}


async def test_a_renewal_that_ran_out_is_not_said_again(stand: ControlStand) -> None:
    """A coordinator that is found late is told what is left of the time, and nothing where none is."""
    control = stand.control(stand.links.directory / "later")
    control.end.renew(1, 1_000)
    await control.start()
    control.clock.advance(400)
    first = await stand.desk(path=stand.links.directory / "later")
    await until(lambda: first.host.renewed == [(1, 600)], "what is left is said")
    await first.stop()
    await until(lambda: not control.end.is_linked, "it is lost")
    control.clock.advance(600)
    second = await stand.desk(2, path=stand.links.directory / "later")
    await until(lambda: control.end.is_linked, "the next one has all")
    assert await control.ask() == 0 and second.host.renewed == []


async def test_another_coordinator_gets_everything_again(stand: ControlStand) -> None:
    """The next coordinator knows what the last one did, with what changed while there was none."""
    first = await stand.desk()
    paths = first.coordinator.path, stand.links.path()
    control = stand.control(*paths)
    serve_one(control)
    await control.start()
    await until(lambda: first.states == {"pool-life-1": READY}, "the first one has all")
    await first.stop()
    await until(lambda: not control.end.is_linked, "it is lost")
    await control.end.publish(snapshot_of(5, "globex"))
    control.fleet.add("pool-life-2", "pool", 2)
    second = await stand.desk(2, path=paths[1])
    await until(lambda: control.end.is_linked, "the second one has all")
    assert second.states == {"pool-life-1": READY, "pool-life-2": ReplicaState.STARTING}
    assert second.host.published == [snapshot_of(5, "globex")]


async def test_a_broken_link_is_followed_by_a_replay(stand: ControlStand) -> None:
    """The same coordinator loses nothing: lanes stay, what is gone meanwhile goes, and a condemnation is said again."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    serve_one(control)
    for number in (2, 3):
        control.fleet.add(f"pool-life-{number}", "pool", 2)
        control.fleet.answered(address_of(f"pool-life-{number}"))
    await control.start()
    await until(lambda: len(desk.states) == 3, "all are there")
    replica = desk.fleet.pool("pool").replicas["pool-life-1"]
    replica.take_lane()
    relay.hold_back()
    relay.cut()
    desk.fleet.condemn("pool", "pool-life-2")
    control.fleet.gone("pool", "pool-life-3")
    await until(lambda: control.condemned == ["pool-life-2"], "it hears what it missed")
    assert desk.states == {"pool-life-1": READY, "pool-life-2": DRAINING} and relay.opened == 2
    assert desk.fleet.pool("pool").replicas["pool-life-1"] is replica and replica.running == 1


async def test_changes_in_the_middle_of_a_replay_come_after_it(stand: ControlStand) -> None:
    """What is published and reported while the snapshot is on its way is in force with it, or right behind it."""
    desk = await stand.desk()
    control = stand.control(desk.coordinator.path)
    serve_one(control)
    await control.start()
    publishing = [asyncio.get_running_loop().create_task(control.end.publish(snapshot_of(n, "acme"))) for n in range(2, 9)]
    control.fleet.add("pool-life-2", "pool", 2)
    await asyncio.gather(*publishing)
    await until(lambda: desk.version == 8 and len(desk.states) == 2, "the last one is in force")
    versions = [snapshot.version for snapshot in desk.host.published]
    assert versions == sorted(versions)


async def test_the_fleet_stays_when_control_is_gone(stand: ControlStand) -> None:
    """A coordinator without control goes on with what it knows, and renews nothing."""
    desk, control = await stand.linked()
    serve_one(control)
    await until(lambda: desk.states == {"pool-life-1": READY}, "it is ready")
    await control.stop()
    desk.fleet.demand(desk.fleet.pool("pool"))
    desk.fleet.condemn("pool", "pool-life-1")
    assert desk.states == {"pool-life-1": DRAINING} and desk.host.renewed == []


async def test_an_engine_behind_a_url_is_the_same_for_the_next_life(stand: ControlStand) -> None:
    """Another life of control names the engine anew: its replica stays, with lanes and first name, and hears the new name."""
    desk = await stand.desk()
    first = stand.control(desk.coordinator.path, life="one")
    serve_one(first, "behind-one-1", BEHIND, "http://engine")
    serve_one(first, "pool-one-1")
    await first.start()
    await until(lambda: len(desk.states) == 2, "all are there")
    replica = desk.fleet.pool("behind").replicas["behind-one-1"]
    replica.take_lane()
    await first.stop()
    second = stand.control(desk.coordinator.path, life="two")
    serve_one(second, "behind-two-1", BEHIND, "http://engine")
    await second.start()
    await until(lambda: second.end.is_linked, "its replay is in force")
    assert desk.states == {"behind-one-1": READY} and desk.fleet.pool("behind").replicas["behind-one-1"] is replica
    desk.fleet.condemn("behind", "behind-one-1")
    await until(lambda: second.condemned == ["behind-two-1"], "it hears its own name")


async def test_a_replay_that_contradicts_what_runs_is_refused_for_good(stand: ControlStand) -> None:
    """A pool that still has requests cannot serve another revision: control ends, and what runs is not touched."""
    desk, first = await stand.linked("one")
    await first.stop()
    desk.host.busy.add("pool")
    second = stand.control(desk.coordinator.path, life="two")
    second.fleet.add_pool(Pool("pool", "other", 1, 2))
    await second.start(9)
    fault = await second.ended()
    assert isinstance(fault, errors.LinkFault) and fault.is_final and "another revision" in fault.detail
    assert desk.version == 1 and desk.fleet.pool("pool").revision == "rev"


async def test_snapshots_of_control_are_whole(stand: ControlStand) -> None:
    """A snapshot of many parts is in force with its last one; limits that are removed are removed at the coordinator too."""
    desk, control = await stand.linked()
    many = snapshot_of(1, *(f"t{number}" for number in range(3_000)))
    await control.end.publish(many)
    await until(lambda: desk.host.published[-1] == many, "it is in force")
    assert len(desk.host.published) == 2
    await control.end.publish(Snapshot(2, {}))
    await until(lambda: desk.version == 2, "it is in force")
    assert desk.host.published[-1] == Snapshot(2) and desk.host.published[-1].limits == {}


# ── one control ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_last_control_is_the_one(stand: ControlStand) -> None:
    """A second control dismisses the first, which does not come back; the second is not disturbed."""
    desk, first = await stand.linked("one")
    second = stand.control(desk.coordinator.path, life="two")
    second.fleet.add_pool(POOL)
    await second.start(2)
    fault = await first.ended()
    assert isinstance(fault, errors.LinkFault) and (fault.detail, fault.is_final) == ("Another control was started.", True)
    await until(lambda: second.end.is_linked, "the second one is the one")
    again = stand.control(desk.coordinator.path, life="one")
    await again.start()
    assert isinstance(await again.ended(), errors.LinkFault)
    assert second.end.is_linked and await second.ask() == 0 and desk.version == 2


async def test_a_dismissed_control_that_was_away_does_not_come_back(stand: ControlStand) -> None:
    """A control whose link was broken as another was started is refused when it finds the coordinator again."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    first = stand.control(path, life="one")
    await first.start()
    await until(lambda: first.end.is_linked, "the first one is linked")
    relay.holds_all = True
    relay.cut()
    await until(lambda: not first.end.is_linked, "it is away")
    second = stand.control(desk.coordinator.path, life="two")
    await second.start()
    await until(lambda: second.end.is_linked, "the second one is the one")
    relay.go_on()
    assert isinstance(await first.ended(), errors.LinkFault) and second.end.is_linked


async def test_a_control_that_greets_again_replaces_its_own_session(stand: ControlStand) -> None:
    """A coordinator that has not noticed yet that a link broke takes the same control on its next one."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    await control.start()
    await until(lambda: control.end.is_linked, "it is linked")
    relay.hold_back()
    control.clock.advance(SILENCE_MS)
    await until(lambda: relay.opened == 2 and control.end.is_linked, "it is linked again")
    assert await control.ask() == 0 and len(desk.host.published) == 2


async def test_a_silent_control_loses_its_session(stand: ControlStand) -> None:
    """Three beats without a word end the session at the coordinator's side too."""
    desk = await stand.desk()
    relay, path = await stand.links.relay(desk.coordinator.path)
    control = stand.control(path)
    await control.start()
    await until(lambda: control.end.is_linked, "it is linked")
    relay.hold_back(falling=False)
    desk.clock.advance(SILENCE_MS)
    await until(lambda: relay.opened == 2 and control.end.is_linked, "it is linked again")
