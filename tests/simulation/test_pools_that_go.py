"""Pools come and go under load, as a model is promoted, rolled back, retired or revoked: no admitted request is lost by that.

Each world is audited at its end: what was admitted ended once, was paid once, and ran where it was allowed to.
"""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.followed_world import (
    GRACE_MS,
    KINDS,
    LATE_S,
    NEW,
    NEW_POOL,
    OLD_POOL,
    PATIENT,
    SPEC,
    Clients,
    FollowedWorld,
    LinkedWorld,
    check_completed,
    play,
    promoted,
    tried,
)
from tests.simulation.stage import LONG_PROMPTS

from weir.core.registry.model import Pool, RevisionState
from weir.core.routing.replica import ReplicaState
from weir.sim.audit import Exchange
from weir.sim.world import ALIAS, REVISION, Order

CLIENTS = 12
QUEUED = 16
NARROW = replace(OLD_POOL, concurrency=1)
IN_FLIGHT_S = 0.3
"""How late a request that was pinned before a change is asked for, beside what its gateway is late."""


@pytest.fixture(params=KINDS, ids=["beside", "linked"])
def kind(request: pytest.FixtureRequest) -> type[FollowedWorld]:
    """Control beside the coordinator, and on a link."""
    found: type[FollowedWorld] = request.param
    return found


def fill(world: FollowedWorld, number: int = QUEUED, **changes: object) -> list[Exchange]:
    """So many requests of about two seconds each, asked at once."""
    first = len(world.exchanges)
    orders = [Order(f"one of many {first + each}", max_output_tokens=24, **changes) for each in range(number)]  # type: ignore[arg-type]
    return [world.send(order) for order in orders]


async def until_done(world: FollowedWorld, exchanges: list[Exchange]) -> None:
    """Wait for all of them."""
    await world.until(lambda: all(exchange.is_done for exchange in exchanges))


# ── under full load ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_a_promotion_under_full_load_fails_no_request(kind: type[FollowedWorld], is_late: bool) -> None:
    """Protects every client: what was pinned before runs where it was pinned, what comes later on the new revision."""

    async def script(world: FollowedWorld) -> None:
        clients = Clients(world, CLIENTS)
        await world.approve(OLD_POOL, NEW_POOL)
        await world.until_ready(NEW_POOL)
        if is_late:
            world.late()
        await asyncio.sleep(2)
        before = len(clients.exchanges)
        await world.approve(NEW_POOL, alias=promoted())
        await asyncio.sleep(IN_FLIGHT_S + LATE_S * is_late)
        pinned = clients.exchanges[before:]
        last = len(clients.exchanges)
        await world.until_gone(OLD_POOL)
        await asyncio.sleep(1)
        await clients.stop()
        clients.check_all_completed()
        assert set(world.ran_in(clients.exchanges[:before])) == {"old"}
        assert set(world.ran_in(clients.exchanges[last:])) == {"new"} and len(clients.exchanges) > last + CLIENTS
        if is_late:
            assert world.ran_in(pinned)["old"] > CLIENTS, "nobody was late"

    play(kind, script)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_a_rollback_under_full_load_fails_no_request(kind: type[FollowedWorld], is_late: bool) -> None:
    """Protects every client from a canary that is taken back: its requests finish, and no new one reaches it."""

    async def script(world: FollowedWorld) -> None:
        clients = Clients(world, CLIENTS)
        await world.approve(OLD_POOL, NEW_POOL)
        await world.until_ready(NEW_POOL)
        await world.approve(OLD_POOL, NEW_POOL, alias=tried(50))
        if is_late:
            world.late()
        await asyncio.sleep(3)
        assert min(world.ran_in(clients.exchanges).values()) > CLIENTS
        await world.approve(OLD_POOL)
        await asyncio.sleep(IN_FLIGHT_S + LATE_S * is_late)
        last = len(clients.exchanges)
        await world.until_gone(NEW_POOL)
        await clients.stop()
        clients.check_all_completed()
        assert set(world.ran_in(clients.exchanges[last:])) == {"old"}

    play(kind, script)


def test_a_pool_that_goes_while_its_link_breaks_loses_nothing() -> None:
    """Protects the same from a link that is cut again and again: each replay still has the pool that is going."""

    async def script(world: FollowedWorld) -> None:
        link = world.followed.link
        assert link is not None
        clients = Clients(world, CLIENTS)
        await world.approve(OLD_POOL, NEW_POOL)
        await world.until_ready(NEW_POOL)
        await world.approve(NEW_POOL, alias=promoted())
        for _ in range(8):
            await asyncio.sleep(0.7)
            link.cable.cut()
        await world.until_gone(OLD_POOL)
        await clients.stop()
        clients.check_all_completed()

    play(LinkedWorld, script)


# ── what waits there ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_is_served_before_its_pool_goes(kind: type[FollowedWorld]) -> None:
    """Protects what waits: its revision is pinned, so the pool's replicas take from its queue until that is empty."""

    async def script(world: FollowedWorld) -> None:
        waiting = fill(world)
        await world.approve(NARROW, NEW_POOL)
        await world.until_ready(NEW_POOL)
        assert world.cell.coordinator.queued_in("old") > QUEUED // 2
        await world.approve(NEW_POOL, alias=promoted())
        later = fill(world, 4, tenant=1)
        await until_done(world, waiting + later)
        for exchange in waiting + later:
            check_completed(exchange)
        assert (world.ran_in(waiting), world.ran_in(later)) == ({"old": QUEUED}, {"new": 4})
        assert world.cell.fleet.pool("old").is_kept
        await world.until_gone(OLD_POOL)

    play(kind, script, replace(SPEC, pools=[NARROW, NEW_POOL]))


def test_what_does_not_end_within_the_grace_ends_as_the_table_says(kind: type[FollowedWorld]) -> None:
    """Protects operators from a pool that never empties: what runs is lost with its replica, what waits waits no longer."""

    async def script(world: FollowedWorld) -> None:
        await world.approve(NARROW, NEW_POOL)
        await world.until_ready(NEW_POOL)
        long = {"max_output_tokens": 2_000, "deadline_ms": 3_000_000}
        waiting = [world.send(Order(prompt, **long)) for prompt in LONG_PROMPTS[:30]]  # type: ignore[arg-type]
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        await world.approve(NEW_POOL, alias=promoted())
        await world.until_gone(OLD_POOL)
        assert GRACE_MS / 1e3 <= asyncio.get_running_loop().time() - began_s < GRACE_MS / 1e3 + 5
        await until_done(world, waiting)
        reasons = [str(each.answer.record.finish_reason) for each in waiting if each.answer.record is not None]
        assert set(reasons) == {"stop", "replica_lost", "queue_wait"} and reasons.count("replica_lost") == 1

    play(kind, script, replace(SPEC, pools=[NARROW, NEW_POOL]))


def test_work_of_a_revoked_revision_is_cancelled_and_its_pool_goes_at_once(kind: type[FollowedWorld]) -> None:
    """Protects tenants from what must not run: nothing of it is finished, and its process does not outlive that."""

    async def script(world: FollowedWorld) -> None:
        await world.approve(OLD_POOL, NEW_POOL, alias=promoted())
        await world.until_ready(NEW_POOL)
        asked = fill(world, 12)
        await asyncio.sleep(0.2)
        began_s = asyncio.get_running_loop().time()
        await world.approve(OLD_POOL, NEW_POOL, revisions=[replace(NEW, state=RevisionState.REVOKED)])
        await world.until_gone(NEW_POOL)
        assert asyncio.get_running_loop().time() - began_s < 3
        await until_done(world, asked)
        assert {each.answer.record.finish_reason for each in asked if each.answer.record is not None} == {"revoked"}
        [after] = fill(world, 1, tenant=1)
        await until_done(world, [after])
        assert world.ran_in([after]) == {"old": 1}

    play(kind, script)


# ── several pools, and a change that is taken back ───────────────────────────────────────────────────────────────────


def test_the_other_pool_of_a_revision_takes_over(kind: type[FollowedWorld]) -> None:
    """Protects a pool that is replaced by another one of its revision: however free it is, it gets no new work."""
    second = Pool("second", REVISION.id, 1, 4)

    async def script(world: FollowedWorld) -> None:
        await world.approve(NARROW, second)
        await world.until_ready(second)
        before = fill(world, 10)
        await asyncio.sleep(0.1)
        assert world.cell.fleet.pool("second").running == 4
        await world.approve(NARROW)
        later = fill(world, 4, tenant=1)
        await until_done(world, before + later)
        for exchange in before + later:
            check_completed(exchange)
        assert world.ran_in(later) == {"old": 4} and world.ran_in(before)["second"] > 4
        await world.until_gone(second)

    play(kind, script, replace(SPEC, pools=[NARROW, NEW_POOL, second]))


def test_fewer_replicas_under_full_load_fail_no_request(kind: type[FollowedWorld]) -> None:
    """Protects what runs on a replica that goes while its pool is as busy as ever: it ends there, and the process follows."""
    three = replace(OLD_POOL, replicas=3)

    async def script(world: FollowedWorld) -> None:
        await world.approve(three)
        await world.until_ready(three)
        clients = Clients(world, CLIENTS, max_output_tokens=120)
        await asyncio.sleep(1)
        await world.approve(OLD_POOL)
        await world.until(lambda: len(world.followed.names) == 1)
        await asyncio.sleep(1)
        await clients.stop()
        clients.check_all_completed()

    play(kind, script)


def test_other_lanes_under_full_load_fail_no_request(kind: type[FollowedWorld]) -> None:
    """Protects service while replicas follow one another: at each moment as many take work as are wanted."""
    narrow = replace(OLD_POOL, concurrency=2, replicas=2)
    wide = replace(narrow, concurrency=4)

    async def script(world: FollowedWorld) -> None:
        clients = Clients(world, CLIENTS)
        await world.approve(wide)
        view, least = world.cell.fleet.pool("old"), 99
        while view.lanes.usable != 8 or len(view.replicas) > 2:
            least = min(least, sum(replica.takes_work for replica in view.replicas.values()))
            assert len(view.replicas) <= 3
            await asyncio.sleep(0.1)
        assert least == 2
        await clients.stop()
        clients.check_all_completed()

    play(kind, script, replace(SPEC, pools=[narrow, wide], coordinator=replace(PATIENT, concurrency_min_percent=100)))


def test_a_promotion_that_is_taken_back_finds_the_pool_as_it_was(kind: type[FollowedWorld]) -> None:
    """Protects the way back: the old replicas serve on, whether they still waited for late requests or were drained."""

    async def script(world: FollowedWorld) -> None:
        [first] = world.cell.fleet.pool("old").replicas
        clients = Clients(world, CLIENTS)
        await world.approve(OLD_POOL, NEW_POOL)
        await world.until_ready(NEW_POOL)
        await world.approve(NEW_POOL, alias=promoted())
        await asyncio.sleep(1.5)
        await world.approve(OLD_POOL, NEW_POOL)
        await asyncio.sleep(10)
        assert list(world.cell.fleet.pool("old").replicas) == [first]
        await clients.stop()
        clients.check_all_completed()
        assert {replica.state for replica in world.cell.fleet.pool("old").replicas.values()} == {ReplicaState.READY}

    play(kind, script)


def test_a_restart_serves_what_is_approved(kind: type[FollowedWorld]) -> None:
    """Protects a cell that comes back: it keeps the pools that are wanted then, and resolves what it left."""

    async def script(world: FollowedWorld) -> None:
        await world.approve(OLD_POOL, NEW_POOL)
        await world.until_ready(NEW_POOL)
        await world.approve(NEW_POOL, alias=promoted())
        left = fill(world)
        await asyncio.sleep(0.5)
        await world.crash(land=True)
        await world.start()
        await world.until_ready(NEW_POOL)
        assert [view.name for view in world.cell.fleet.pools] == ["new"] and all(each.is_done for each in left)
        assert world.approved.aliases[ALIAS.name].revision == NEW.id
        again = fill(world, 2, tenant=1)
        await until_done(world, again)
        assert world.ran_in(again) == {"new": 2}

    play(kind, script)
