"""Who leads a cell: never two but by force, a standby soon after a leader is gone; and a coordinator that may not lead."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest
from tests.simulation.leadership_stand import Candidates, Way
from tests.simulation.session_stand import Listening, Stand, play

from weir import errors
from weir.coordinator.leadership import LEASE_MS, Leadership
from weir.core.endings import FinishReason
from weir.core.ledger.records import HoldRecord, ReleaseRecord, SettleRecord
from weir.messages import DeliveryBooked, Granted, Rejected, Stopped
from weir.sim.random_source import seeded_random
from weir.sim.virtual_loop import run, run_seeds
from weir.sim.world import POOL

LEASE_S = LEASE_MS / 1e3
RENEW_S = LEASE_S / 3
ASK_S = 0.2
"""How often the store is asked by one that stands by, or that it did not answer."""
BOUND_S = 0.6
"""Of an operation, as the durable lease bounds it."""
SEEDS = range(100)
WORLD_S = 60.0
PHASES_S = [0.0, 0.1, 0.3, 0.6, 0.7, 1.3, 1.9, 2.0, 5.55]
"""Moments between two renewals, and at them."""
ROUNDING_S = 1e-6


def now_s() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def scene(script: Callable[[Candidates], Awaitable[None]]) -> None:
    """Run a script with a lease that nobody has yet; what still runs then is cancelled."""

    async def played() -> None:
        await script(Candidates(seeded_random(0, "scene")))

    run(played(), until_ms=600_000)


def started(life: Leadership) -> asyncio.Task[None]:
    """It renews, as a task of the test's."""
    return asyncio.get_running_loop().create_task(life.run())


def standing_by(life: Leadership) -> asyncio.Task[bool]:
    """It waits for its turn, as a task of the test's."""
    return asyncio.get_running_loop().create_task(life.win())


async def one_follows(
    candidates: Candidates, phase_s: float
) -> tuple[Leadership, Leadership, asyncio.Task[None], asyncio.Task[bool]]:
    """One has led for so long, and another stands by: both, and what each of them does."""
    old, new = candidates.life(candidates.way()), candidates.life(candidates.way())
    await old.win()
    leading, following = started(old), standing_by(new)
    await asyncio.sleep(phase_s)
    return old, new, leading, following


async def stop(task: asyncio.Task[None]) -> None:
    """Its process was killed, or goes by itself."""
    task.cancel()
    await asyncio.wait([task])


# ── never two ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def weather(way: Way, random: Random) -> None:
    """What befalls one process's way to the store, one thing after another, until cancelled."""
    way.bound_s = random.choice([None, BOUND_S])
    while True:
        way.slow_s = random.choice([0.0, 0.01, 0.3, 1.0, 3.0])
        way.is_away = random.random() < 0.25
        if random.random() < 0.2:
            way.freeze()
        await asyncio.sleep(random.choice([0.1, 0.7, 2.0, 5.0]) * random.random())
        way.slow_s, way.is_away = random.choice([0.0, 0.01]), False
        way.thaw()
        await asyncio.sleep(3 * random.random())


async def live(life: Leadership, random: Random) -> bool:
    """One life of a process: it leads once it can, for a while, then it goes by itself or is killed; whether it led."""
    led = False
    with suppress(TimeoutError, errors.LedgerUnavailable, errors.StaleEpoch):
        async with asyncio.timeout(15 * random.random()):
            led = await life.win(by_force=random.random() < 0.1)
            assert life.holds()
            try:
                await life.run()
            except errors.StaleEpoch:
                assert not life.holds()
                raise
    if random.random() < 0.5:
        await life.give_back()
        assert not life.holds()
    return led


async def world(seed: int) -> tuple[int, int]:
    """A few processes that live again and again; how many lives led, and how often force made two believe that they lead."""
    random = seeded_random(seed, "lives")
    candidates, led = Candidates(seeded_random(seed, "delays")), 0

    async def process(number: int) -> None:
        nonlocal led
        way, own = candidates.way(), seeded_random(seed, f"process-{number}")
        storms = asyncio.get_running_loop().create_task(weather(way, seeded_random(seed, f"weather-{number}")))
        while now_s() < WORLD_S:
            led += await live(candidates.life(way), own)
            await asyncio.sleep(2 * own.random())
        storms.cancel()

    async with asyncio.TaskGroup() as tasks:
        for number in range(random.randint(2, 5)):
            tasks.create_task(process(number))
    return led, candidates.overlaps


def test_never_two_lead() -> None:
    """Protects tenants' limits: whatever befalls processes and their store, two lead only within a lease after force."""
    worlds = run_seeds(SEEDS, world, until_ms=600_000)
    led, overlaps = (sum(counts) for counts in zip(*worlds, strict=True))
    assert led > 3 * len(SEEDS) and overlaps > len(SEEDS) / 10, "nothing happened that could show it"


# ── a leader goes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_a_standby_leads_soon_after_a_leader_was_killed(phase_s: float) -> None:
    """Protects availability: a leader that dies at any moment is followed within its lease and one ask, and not before."""

    async def script(candidates: Candidates) -> None:
        old, new, leading, following = await one_follows(candidates, phase_s)
        await stop(leading)
        killed_s = now_s()
        assert await following
        assert new.holds() and not old.holds()
        assert LEASE_S - RENEW_S - ROUNDING_S <= now_s() - killed_s <= LEASE_S + ASK_S + ROUNDING_S

    scene(script)


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_a_frozen_leader_is_followed_and_hears_of_it(phase_s: float) -> None:
    """Protects against two that lead: a leader that was frozen until another one led leads no more, and is told."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        old, new = candidates.life(way), candidates.life(candidates.way())
        await old.win()
        leading, following = started(old), standing_by(new)
        await asyncio.sleep(phase_s)
        way.freeze()
        frozen_s = now_s()
        assert await following
        assert now_s() - frozen_s <= LEASE_S + ASK_S + ROUNDING_S
        renewing = started(new)
        await asyncio.sleep(7)
        way.thaw()
        assert not old.holds()
        with pytest.raises(errors.StaleEpoch):
            await leading
        assert not old.holds() and new.holds()
        await stop(renewing)

    scene(script)


def test_a_frozen_leader_that_nobody_followed_leads_again() -> None:
    """Protects a cell without a standby: after a freeze longer than its lease it leads again, once it has renewed."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        life = candidates.life(way)
        await life.win()
        leading = started(life)
        way.freeze()
        await asyncio.sleep(10)
        assert not life.holds()
        way.thaw()
        await asyncio.sleep(RENEW_S + ROUNDING_S)
        assert life.holds() and not leading.done()

    scene(script)


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_a_leader_that_goes_is_followed_at_once(phase_s: float) -> None:
    """Protects restarts: a lease that is given back is another one's with its next ask, and its giver believes nothing more."""

    async def script(candidates: Candidates) -> None:
        old, new, leading, following = await one_follows(candidates, phase_s)
        await stop(leading)
        gone_s = now_s()
        await old.give_back()
        assert not old.holds()
        assert await following and new.holds()
        assert now_s() - gone_s <= ASK_S + ROUNDING_S

    scene(script)


def test_a_lease_that_cannot_be_given_back_runs_out() -> None:
    """Protects a shutdown without the store: it believes nothing more, raises nothing, and is followed after its lease."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        old, new = candidates.life(way), candidates.life(candidates.way())
        await old.win()
        way.is_away = True
        await old.give_back()
        assert not old.holds()
        assert await new.win()
        assert LEASE_S <= now_s() <= LEASE_S + ASK_S

    scene(script)


def test_force_takes_over_at_once() -> None:
    """Protects a takeover by hand: the new one leads at once; the old one hears so with its next renewal, and stops."""

    async def script(candidates: Candidates) -> None:
        old, new = candidates.life(candidates.way()), candidates.life(candidates.way())
        await old.win()
        leading = started(old)
        await asyncio.sleep(1)
        assert await new.win(by_force=True)
        assert now_s() == 1.0 and new.holds()
        with pytest.raises(errors.StaleEpoch):
            await leading
        assert not old.holds(), "it knows that another one leads"
        assert now_s() <= 1 + RENEW_S

    scene(script)


# ── the store is away or slow ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bound_s", [None, BOUND_S], ids=["refuses", "is-silent"])
def test_a_store_that_is_away_shortly_changes_nothing(bound_s: float | None) -> None:
    """Protects availability: whenever it begins, an absence that leaves time to ask again within the lease is not noticed."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        way.bound_s, way.slow_s = bound_s, 0.02
        life = candidates.life(way)
        await life.win()
        leading = started(life)
        for number in range(70):
            for way.is_away, steps in ((True, 110), (False, 70 + number)):
                for _ in range(steps):
                    await asyncio.sleep(0.01)
                    assert life.holds(), now_s()
        assert not leading.done()

    scene(script)


def test_a_store_that_is_away_for_longer_ends_it_until_it_is_back() -> None:
    """Protects both: it believes no longer than its lease, and leads again with the first answer if nobody took it."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        life = candidates.life(way)
        await life.win()
        leading = started(life)
        way.is_away = True
        await asyncio.sleep(LEASE_S - 0.01)
        assert life.holds()
        await asyncio.sleep(0.01)
        assert not life.holds()
        await asyncio.sleep(10)
        assert not life.holds() and not leading.done()
        way.is_away = False
        await asyncio.sleep(ASK_S + ROUNDING_S)
        assert life.holds()

    scene(script)


def test_who_was_cut_off_for_long_is_told_that_another_leads() -> None:
    """Protects against two that lead: the cut off leader is followed, and gives up as it reaches the store again."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        old, new = candidates.life(way), candidates.life(candidates.way())
        await old.win()
        leading = started(old)
        way.is_away = True
        assert await new.win()
        renewing = started(new)
        await asyncio.sleep(5)
        way.is_away = False
        with pytest.raises(errors.StaleEpoch):
            await leading
        assert candidates.leading() == ["life-1"]
        await stop(renewing)

    scene(script)


def test_one_that_stands_by_waits_for_the_store_and_force_does_not() -> None:
    """Protects starts: a standby outlasts a store that is away; a start by force says so to whoever asked for it."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        way.is_away = True
        following = standing_by(candidates.life(way))
        await asyncio.sleep(5)
        assert not following.done()
        with pytest.raises(errors.LedgerUnavailable):
            await candidates.life(way).win(by_force=True)
        way.is_away = False
        assert await following

    scene(script)


@pytest.mark.parametrize("by_force", [False, True], ids=["in-turn", "by-force"])
def test_an_answer_that_comes_too_late_wins_nothing(by_force: bool) -> None:
    """Protects a start: who was told that it leads when that time was over doesn't lead; it asks again, and then it does."""

    async def script(candidates: Candidates) -> None:
        way = candidates.way()
        life = candidates.life(way)
        way.freeze()
        winning = asyncio.get_running_loop().create_task(life.win(by_force=by_force))
        await asyncio.sleep(LEASE_S)
        way.thaw()
        await asyncio.sleep(0)
        assert not winning.done() and not life.holds()
        assert await winning
        assert life.holds() and now_s() == LEASE_S + ASK_S

    scene(script)


# ── a coordinator that does not lead ─────────────────────────────────────────────────────────────────────────────────


async def a_moment() -> None:
    """What was decided becomes durable."""
    await asyncio.sleep(0.1)


async def fill(gateway: Listening) -> list[int]:
    """Requests that take both lanes."""
    refs = [gateway.ask() for _ in range(2)]
    await a_moment()
    assert all(gateway.about(ref, Granted) for ref in refs)
    return refs


def check_refused(gateway: Listening, ref: int) -> None:
    """AssertionError unless it was refused so that its client comes back."""
    [rejected] = gateway.about(ref, Rejected)
    assert rejected.code == "coordinator_lost" and rejected.retry_after_ms
    assert errors.ERROR_BY_CODE[rejected.code].http_status == 503


def test_new_requests_are_refused() -> None:
    """Protects tenants' limits: who doesn't lead admits nothing, and says when to come back; once it leads again it does."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("gateway")
        stand.leads = False
        refused = [gateway.ask(), gateway.ask(request_id_given=True)]
        await a_moment()
        for ref in refused:
            check_refused(gateway, ref)
        assert not stand.ledger.records and stand.book.open_holds == 0
        stand.leads = True
        ref = gateway.ask()
        await a_moment()
        assert gateway.about(ref, Granted)
        gateway.end(ref)

    play(script)


def test_what_asks_the_store_meanwhile_is_refused() -> None:
    """Protects tenants' limits: a request whose id is looked up as the lease ends is not admitted by the answer."""

    async def script(stand: Stand) -> None:
        stand.store_s["find_execution"] = 0.5
        gateway = stand.gateway("gateway")
        ref = gateway.ask(request_id_given=True)
        await a_moment()
        stand.leads = False
        await asyncio.sleep(1)
        check_refused(gateway, ref)
        assert not stand.ledger.records

    play(script)


def test_nothing_that_waits_is_granted_and_what_runs_goes_on() -> None:
    """Protects replicas: neither free lanes nor new replicas start what waits; what runs is served and settled."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("gateway")
        first, second = await fill(gateway)
        waiting = [gateway.ask() for _ in range(2)]
        await a_moment()
        stand.leads = False
        gateway.end(first)
        gateway.show(second, delivered_max=128)
        await a_moment()
        assert isinstance(stand.end_of(first), SettleRecord) and stand.end_of(first).status == "completed"
        assert gateway.about(second, DeliveryBooked)[-1].delivered_max == 128
        for name in ("first", "second"):
            stand.fleet.doubted(POOL, name)
            stand.fleet.answered(stand.fleet.address_of(name))
        gateway.end(second)
        await a_moment()
        assert stand.running == 0 and stand.waiting == 2 and stand.executions.live_count == 2
        assert not any(gateway.about(ref, Granted) for ref in waiting)
        stand.leads = True
        stand.coordinator.leads_again()
        await a_moment()
        assert stand.running == 2 and all(gateway.about(ref, Granted) for ref in waiting[:2])
        for ref in waiting:
            gateway.end(ref)
            await a_moment()

    play(script)


def test_a_lost_attempt_waits_for_its_retry() -> None:
    """Protects replicas from two masters: a retry is a grant like any other; it comes once the coordinator leads again."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("gateway")
        [lost, other] = await fill(gateway)
        gateway.end(other)
        await a_moment()
        stand.leads = False
        gateway.finish(lost, reason=FinishReason.REPLICA_LOST)
        await a_moment()
        assert stand.waiting == 1 and len(gateway.about(lost, Granted)) == 1
        stand.leads = True
        gateway.say(Stopped(lost, 1))
        await a_moment()
        assert [granted.attempt for granted in gateway.about(lost, Granted)] == [1, 2]
        gateway.end(lost, attempt=2)

    play(script)


def test_what_waits_can_leave() -> None:
    """Protects clients and holds: what waits while nobody leads ends as ever: its client goes, or its time is over."""

    async def script(stand: Stand) -> None:
        gateway = stand.gateway("gateway")
        running = await fill(gateway)
        leaves, late = gateway.ask(), gateway.ask(deadline_left_ms=20_000)
        await a_moment()
        stand.leads = False
        gateway.finish(leaves, attempt=0, reason=FinishReason.CLIENT)
        for ref in running:
            gateway.end(ref)
        await asyncio.sleep(6)
        assert stand.waiting == 0
        assert [stand.end_of(ref).finish_reason for ref in (leaves, late)] == ["client", "queue_wait"]
        assert all(isinstance(stand.end_of(ref), ReleaseRecord) for ref in (leaves, late))
        assert len([record for record in stand.ledger.records if isinstance(record, HoldRecord)]) == 4

    play(script)
