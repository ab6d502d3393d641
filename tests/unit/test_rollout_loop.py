"""The rollout loop: what is seen moves each rollout on, or takes it back, and its evaluation is begun and ended with it."""

import asyncio

import pytest
from structlog.testing import capture_logs
from tests.unit.registry_desk import STABLE
from tests.unit.rollout_stand import FAILING, HEALTHY, INTERVAL_MS, NEXT, TO_LIVE, Stand

from weir.control.rollout_loop import ENDED_MAX
from weir.core.registry.golden_set import Score
from weir.core.registry.model import Alias, RevisionState
from weir.core.registry.rollout import Finish, OnCanary, Proposed, RollbackReason, RolledBack, name_of
from weir.core.registry.rollout_decision import (
    Awaited,
    Breach,
    Evaluated,
    Evaluation,
    Hold,
    NotEvaluated,
    Wait,
)
from weir.core.registry.rollout_plan import Step


@pytest.fixture
async def stand() -> Stand:
    return await Stand().open()


# ── the whole way ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_healthy_canary_goes_live_by_itself(stand: Stand) -> None:
    """Protects what rollouts are for: each step for its time, the old revision warm to the end, and each move is told."""
    rollout_id, weights = await stand.propose(), list[int]()
    with capture_logs() as logs:
        for _ in range(20):
            await stand.tick()
            canary = stand.alias().canary
            weights.append(canary.weight if canary else 100 * (stand.alias().revision == NEXT.id))
            assert "small" in stand.desk.snapshot.pools or (await stand.stored(rollout_id)).is_over
    assert await stand.course(rollout_id) == TO_LIVE
    assert [weights.count(weight) for weight in (10, 50)] == [2, 2] and weights == sorted(weights)
    assert "small" not in stand.desk.snapshot.pools and stand.desk.snapshot.revisions[NEXT.id].state is RevisionState.LIVE
    assert stand.decided == [(event, "none") for event in TO_LIVE]
    moved = [line for line in logs if line["event"] == "rollout_moved"]
    assert [line["decision"] for line in moved] == TO_LIVE and {line["rollout"] for line in moved} == {rollout_id}
    assert [line["weight"] for line in moved] == [0, 10, 50, 100, 100, 100]
    assert await stand.tick(60_000) == 0, "what is over is not looked at"


async def test_the_last_look_says_what_is_waited_for(stand: Stand) -> None:
    """Protects whoever watches: verdict, evidence, comparisons and replicas of the last look, also after the end."""
    rollout_id = await stand.propose()
    assert stand.loop.latest(rollout_id) is None
    rollout = await stand.until(rollout_id, "canary")
    stand.cell.running, stand.cell.faults = 3, dict.fromkeys(rollout.pools, "of long ago: all are ready")
    await stand.tick(INTERVAL_MS)
    look = stand.loop.latest(rollout_id)
    assert look is not None and isinstance(rollout.state, OnCanary)
    assert look.verdict == Hold((Wait(Awaited.TIME, 1_000, 2_000),)) and look.at_ms == rollout.state.since_ms + 1_000
    assert (look.evidence, look.ready_replicas, look.running, len(look.comparisons)) == (HEALTHY, 2, 3, 6)
    await stand.until(rollout_id, "live")
    await stand.tick()
    last = stand.loop.latest(rollout_id)
    assert last is not None and last.evidence is None and last.comparisons == ()
    assert stand.loop.latest("ro-unknown") is None


async def test_last_looks_are_bounded(stand: Stand) -> None:
    """Protects memory: of those that are over the newest are kept."""
    ids = []
    for _ in range(ENDED_MAX + 2):
        ids.append(await stand.propose())
        await stand.tick()
        await stand.desk.rollouts.roll_back("bob", ids[-1])
        await stand.until(ids[-1], "rolled_back")
        await stand.tick()
    assert [stand.loop.latest(each) is not None for each in ids] == [False] * 2 + [True] * ENDED_MAX


async def test_it_looks_once_per_interval(stand: Stand) -> None:
    """Protects the store and the coordinator: asked as often as the plan says, and not at all while nothing is under way."""
    assert await stand.tick() == 0
    stand.evaluations.let.clear()
    await stand.propose()
    looks = [await stand.tick(250) for _ in range(8)]
    assert looks == [1, 0, 0, 0, 1, 0, 0, 0]
    await stand.loop.aclose()


# ── the evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("found", [Evaluated(Score(5, 10, ("x",))), NotEvaluated("the replica was lost")], ids=repr)
async def test_a_failed_evaluation_routes_nobody(found: Evaluation) -> None:
    """Protects everybody from a revision that is wrong: it goes back before its first request, and its pool with it."""
    stand = await Stand(found).open()
    rollout_id = await stand.propose()
    rollout = await stand.until(rollout_id, "rolled_back")
    assert await stand.course(rollout_id) == ["roll_back", "finish"]
    assert stand.decided[0] == ("roll_back", "evaluation") and stand.alias() == Alias("assistant", STABLE.id, 600)
    assert not set(rollout.pools) & stand.desk.snapshot.pools.keys()


async def test_an_evaluation_begins_without_requests(stand: Stand) -> None:
    """Protects tenants' prompts: no replica is evaluated while a request is on it, and it is evaluated once."""
    stand.evaluations.let.clear()
    stand.cell.running = 1
    rollout_id = await stand.propose()
    await stand.ticks(3)
    assert not stand.evaluations.asked
    stand.cell.running = 0
    await stand.ticks(3)
    assert stand.evaluations.asked == [rollout_id]
    await stand.loop.aclose()


async def test_what_serves_another_alias_is_judged_in_spite_of_its_requests(stand: Stand) -> None:
    """Protects a rollout of a revision that serves already: no replica will be asked, so nothing is waited for."""
    await stand.desk.put(aliases=(Alias("third", NEXT.id, 600),))
    stand.cell.running = 1
    rollout_id = await stand.propose()
    await stand.ticks(2)
    assert stand.evaluations.asked == [rollout_id]


async def test_a_pause_stops_an_evaluation_and_a_resumption_begins_it_anew(stand: Stand) -> None:
    """Protects the replica of a rollout that is paused or over: nothing runs there that nobody waits for."""
    stand.evaluations.let.clear()
    rollout_id = await stand.propose()
    await stand.ticks(2)
    await stand.desk.rollouts.pause("bob", rollout_id)
    await stand.ticks(2)
    assert (len(stand.evaluations.asked), stand.evaluations.stopped) == (1, 1)
    await stand.desk.rollouts.resume("bob", rollout_id)
    await stand.ticks(2)
    assert (len(stand.evaluations.asked), stand.evaluations.stopped) == (2, 1)
    await stand.desk.rollouts.roll_back("bob", rollout_id)
    await stand.ticks(3)
    assert stand.evaluations.stopped == 2 and name_of((await stand.stored(rollout_id)).state) == "rolled_back"


async def test_an_end_stops_its_evaluation(stand: Stand) -> None:
    """Protects a canary's replica from prompts for a rollout that went back and was over between two looks."""
    stand.evaluations.let.clear()
    rollout_id = await stand.propose()
    await stand.tick()
    await stand.desk.rollouts.roll_back("bob", rollout_id)
    await stand.desk.rollouts.act("bob", rollout_id, lambda stored: Finish(stand.desk.clock.now_ms))
    assert await stand.tick() == 0 and stand.evaluations.stopped == 1


async def test_what_a_former_state_was_evaluated_for_verifies_nothing(stand: Stand) -> None:
    """Protects who pauses and resumes in the moment in which an evaluation is acted on: it begins anew, as was asked."""
    rollout_id = await stand.propose()
    await stand.tick()

    async def paused_and_resumed() -> None:
        await stand.desk.rollouts.pause("bob", rollout_id)
        await stand.desk.rollouts.resume("bob", rollout_id)

    stand.cell.meanwhile = paused_and_resumed
    await stand.tick()
    assert isinstance((await stand.stored(rollout_id)).state, Proposed)
    await stand.until(rollout_id, "verified")
    assert len(stand.evaluations.asked) == 2


async def test_a_finished_evaluation_is_acted_on_at_once(stand: Stand) -> None:
    """Protects time: between minutes of interval nobody waits for what is known."""
    stand.evaluations.let.clear()
    rollout_id = await stand.propose(interval_ms=60_000)
    await stand.tick()
    assert await stand.tick(10) == 0
    stand.evaluations.let.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await stand.tick(10) == 1 and await stand.course(rollout_id) == ["verify"]


async def test_closing_ends_what_is_under_way(stand: Stand) -> None:
    """Protects a stop: no evaluation outlives its loop."""
    stand.evaluations.let.clear()
    await stand.propose()
    await stand.tick()
    await stand.loop.aclose()
    assert stand.evaluations.stopped == 1


# ── back ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_breach_goes_back_within_one_interval(stand: Stand, step: int, paused: bool) -> None:
    """Protects the canary's customers: at every step, also paused, nobody gets it one interval after the evidence."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary", step)
    if paused:
        await stand.desk.rollouts.pause("bob", rollout_id)
    stand.cell.by_step[NEXT.id, step] = FAILING
    await stand.tick(INTERVAL_MS)
    assert stand.alias() == Alias("assistant", STABLE.id, 600)
    look = stand.loop.latest(rollout_id)
    assert look is not None and isinstance(look.verdict, Breach) and look.evidence == FAILING
    rollout = await stand.until(rollout_id, "rolled_back")
    assert isinstance(rollout.state, RolledBack) and rollout.state.reason is RollbackReason.ERRORS
    assert stand.decided[-2:] == [("roll_back", "errors"), ("finish", "none")]


async def test_what_runs_on_a_canary_may_end(stand: Stand) -> None:
    """Protects requests in flight: its pool is kept while they run, and no longer than the plan says."""
    for running_ms, until_ms in ((2_000, 3_000), (60_000, 6_000)):
        rollout_id = await stand.propose()
        rollout = await stand.until(rollout_id, "canary")
        stand.cell.by_step[NEXT.id, 0], stand.cell.running = FAILING, 2
        await stand.tick()
        passed_ms = 0
        while set(rollout.pools) & stand.desk.snapshot.pools.keys():
            stand.cell.running = 2 * (passed_ms < running_ms)
            await stand.tick()
            passed_ms += INTERVAL_MS
        assert passed_ms <= until_ms and (await stand.stored(rollout_id)).is_over
        stand.cell.by_step.clear()


async def test_a_lost_canary_is_waited_for_and_forgiven(stand: Stand) -> None:
    """Protects a rollout from one crash: nothing goes on while no replica is ready, and it goes on afterwards."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")
    stand.cell.missing = {NEXT.id: 2}
    await stand.ticks(3)
    assert stand.alias().canary is not None, "the router has the stable revision for these"
    stand.cell.missing = {}
    await stand.until(rollout_id, "live")
    assert await stand.course(rollout_id) == [*TO_LIVE[:2], "lose", "regain", *TO_LIVE[2:]]


async def test_a_canary_that_stays_lost_goes_back(stand: Stand) -> None:
    """Protects against a share that nobody serves."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")
    stand.cell.missing = {NEXT.id: 2}
    await stand.ticks(4)
    assert await stand.course(rollout_id) == ["verify", "raise_weight", "lose", "roll_back"]
    assert stand.decided[-1] == ("roll_back", "no_capacity")


async def test_a_start_that_fails_is_shown_and_ends_it(stand: Stand) -> None:
    """Protects whoever proposed: why no replica is ready is seen at once, and is the reason in the end."""
    stand.cell.missing = {NEXT.id: 2}
    rollout_id = await stand.propose()
    [pool] = (await stand.stored(rollout_id)).pools
    stand.cell.faults = {pool: "out of memory", "small": "not this one"}
    await stand.tick()
    look = stand.loop.latest(rollout_id)
    assert look is not None and isinstance(look.verdict, Hold) and look.verdict.fault == "out of memory"
    rollout = await stand.until(rollout_id, "rolled_back")
    assert isinstance(rollout.state, RolledBack) and rollout.state.reason is RollbackReason.START_FAILED
    assert rollout.state.detail.endswith(": out of memory")


@pytest.mark.parametrize("state", ["proposed", "canary", "promoting"])
async def test_a_revoked_revision_is_left_at_once(stand: Stand, state: str) -> None:
    """Protects everybody from what an administrator revoked: within one interval the alias means the stable revision."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, state)
    await stand.desk.models.revoke("bob", NEXT.id)
    await stand.tick()
    assert stand.alias() == Alias("assistant", STABLE.id, stand.alias().default_max_output_tokens)
    assert stand.decided[-1] == ("roll_back", "revoked")


# ── as it runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_it_runs_until_it_is_cancelled(stand: Stand) -> None:
    """Protects operation: left to itself it notices a proposal and takes it to its end, on time that passes by itself."""
    ended = asyncio.Event()
    stand.loop.on_decided = lambda decision, reason: ended.set() if decision == "finish" else None
    running = asyncio.get_running_loop().create_task(stand.loop.run())
    steps = (Step(10, 1, 0), Step(100, 1, 0))
    real = RollingClock(stand)
    moving = asyncio.get_running_loop().create_task(real.run())
    rollout_id = await stand.propose(interval_ms=100, steps=steps, warm_ms=0)
    try:
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        for task in (running, moving):
            task.cancel()
        await asyncio.wait([running, moving])
    assert (await stand.stored(rollout_id)).is_over and running.cancelled()


class RollingClock:
    """Moves the stand's clock with the loop's own time."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            self._stand.desk.clock.now_ms += 5


async def test_a_look_that_breaks_ends_the_loop(stand: Stand) -> None:
    """Protects against a loop that only seems to run: a bug in a look is raised, as in every other loop of control."""
    await stand.propose()

    async def broken() -> None:
        raise AssertionError("an invariant")

    stand.cell.meanwhile = broken
    with pytest.raises(AssertionError, match="an invariant"):
        await stand.loop.run()
