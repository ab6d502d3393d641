"""The rollout loop: what is seen moves each rollout on, holds it, or takes it back, whatever else happens meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.unit.registry_desk import STABLE, RegistryDesk, registered

from weir import errors
from weir.control.cell_view import GatheredEvidence, PoolReport
from weir.control.rollout_loop import ENDED_MAX, RolloutLoop
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.model import Alias, Pool, RevisionState
from weir.core.registry.rollout import OnCanary, Proposed, RollbackReason, RolledBack, name_of
from weir.core.registry.rollout_decision import (
    Awaited,
    Breach,
    Evaluated,
    Evaluation,
    Hold,
    NotEvaluated,
    NothingToEvaluate,
    Wait,
)
from weir.core.registry.rollout_plan import RolloutPlan, Step
from weir.core.registry.rollout_record import Rollout
from weir.ports import Acknowledgement

NEXT = registered("small@2", state=RevisionState.APPROVED)
THIRD = registered("small@3", state=RevisionState.APPROVED)
INTERVAL_MS = 1_000
PLAN = RolloutPlan(
    steps=(Step(10, 20, 2_000), Step(50, 20, 2_000), Step(100, 20, 2_000)),
    interval_ms=INTERVAL_MS,
    ready_ms=20_000,
    evaluation_ms=20_000,
    lost_ms=3_000,
    warm_ms=2_000,
    back_ms=5_000,
)
HEALTHY = Evidence(Tally(180, 1, 5), Tally(20, 0, 1), Pairs(20, 8), Pairs(20, 10), Pairs(18, 3), Pairs(18, 5))
FAILING = Evidence(Tally(2_000, 8, 60), Tally(20, 14, 0))
NOTHING = NothingToEvaluate()
TO_LIVE = ["verify", "raise_weight", "raise_weight", "raise_weight", "promote", "finish"]


@dataclass
class Cell:
    """A running cell as it is seen. missing: replicas that are not ready, by revision. away: nobody answers.

    by_step: the evidence of a revision's step; HEALTHY for others. meanwhile: happens as evidence is asked for, once.
    """

    desk: RegistryDesk
    missing: dict[str, int] = field(default_factory=dict)
    by_step: dict[tuple[str, int], Evidence] = field(default_factory=dict)
    running: int = 0
    away: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    demanded: list[str] = field(default_factory=list)
    meanwhile: Callable[[], Awaitable[Any]] | None = None

    async def pools(self) -> list[PoolReport]:
        if self.away:
            raise errors.CoordinatorLost()
        left = dict(self.missing)
        return [self._report(pool, left) for pool in self.desk.snapshot.pools.values()]

    def _report(self, pool: Pool, left: dict[str, int]) -> PoolReport:
        missing = min(left.get(pool.revision, 0), pool.replicas)
        left[pool.revision] = left.get(pool.revision, 0) - missing
        ready = pool.replicas - missing
        return PoolReport(pool.name, pool.revision, pool.replicas, ready, pool.concurrency, 0, 0, pool.on_demand)

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        aliases = [*self.desk.snapshot.aliases.values(), *self.desk.snapshot.tenant_aliases.values()]
        steps = [alias.canary.step for alias in aliases if alias.canary is not None and alias.canary.rollout == rollout]
        gathered = GatheredEvidence(self.running)
        if steps:
            gathered = GatheredEvidence(self.running, steps[0], self.by_step.get((revision, steps[0]), HEALTHY))
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            await meanwhile()
        return gathered

    def fault_of(self, pool: str) -> str | None:
        return self.faults.get(pool)

    def demand(self, pool: str) -> None:
        self.demanded.append(pool)


class Evaluations:
    """Answers at once, or only once it is let. asked: rollouts, by id; stopped: how many were cancelled."""

    def __init__(self, found: Evaluation = NOTHING) -> None:
        self.found = found
        self.asked: list[str] = []
        self.stopped = 0
        self.let = asyncio.Event()
        self.let.set()

    async def evaluate(self, rollout: Rollout) -> Evaluation:
        self.asked.append(rollout.id)
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return self.found


class Stand:
    """A loop over a memory catalog, a cell and a clock that is moved by hand."""

    def __init__(self, found: Evaluation = NOTHING) -> None:
        self.desk = RegistryDesk()
        self.cell = Cell(self.desk)
        self.evaluations = Evaluations(found)
        self.decided: list[tuple[str, str]] = []
        self.restart()

    def restart(self) -> None:
        """Another control begins with what is stored."""
        self.loop = RolloutLoop(self.desk.commands, self.desk.rollouts, self.cell, self.cell, self.evaluations, self.desk.clock)
        self.loop.on_decided = lambda decision, reason: self.decided.append((decision, reason))

    async def open(self) -> "Stand":
        await self.desk.open()
        await self.desk.put(NEXT, THIRD)
        return self

    async def propose(self, revision: str = NEXT.id, alias: str = "assistant", **changes: Any) -> str:
        rollout, _ = await self.desk.rollouts.propose("ada", alias, revision, replace(PLAN, **changes))
        return rollout.id

    async def tick(self, passed_ms: int = INTERVAL_MS) -> int:
        """Let time pass, and everything happen that is due; how many looks there were."""
        self.desk.clock.now_ms += passed_ms
        looks = await self.loop.tick()
        await asyncio.gather(*looks)
        await asyncio.sleep(0)  # an evaluation that needs nothing is over
        return len(looks)

    async def ticks(self, count: int) -> None:
        for _ in range(count):
            await self.tick()

    async def until(self, rollout_id: str, state: str, step: int | None = None) -> Rollout:
        """Tick until it is there, for a minute at most."""
        for _ in range(60):
            rollout = await self.stored(rollout_id)
            if name_of(rollout.state) == state and (step is None or rollout.step == step):
                return rollout
            await self.tick()
        raise AssertionError(f"it is {rollout.state}")

    async def stored(self, rollout_id: str) -> Rollout:
        catalog = await self.desk.commands.catalog()
        [rollout] = [each for each in catalog.rollouts if each.id == rollout_id]
        return rollout

    def alias(self, name: str = "assistant") -> Alias:
        return self.desk.snapshot.aliases[name]

    async def course(self, rollout_id: str) -> list[str]:
        """What the loop did with it, in order."""
        acts = [(actor, action) for actor, action, subject in await self.desk.audited() if subject == rollout_id]
        return [action.removeprefix("rollout.") for actor, action in acts if actor == "rollout"]


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
    stand.cell.running = 3
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


async def test_an_evaluation_begins_with_a_replica_and_without_requests(stand: Stand) -> None:
    """Protects tenants' prompts: no replica is evaluated while a request is on it, and none is waited for twice."""
    stand.cell.missing, stand.cell.running = {NEXT.id: 2}, 1
    rollout_id = await stand.propose()
    await stand.ticks(3)
    assert not stand.evaluations.asked
    stand.cell.missing = {}
    await stand.ticks(3)
    assert not stand.evaluations.asked
    stand.cell.running = 0
    await stand.ticks(3)
    assert stand.evaluations.asked == [rollout_id]


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
    rollout_id = await stand.propose(interval_ms=60_000)
    await stand.tick()
    await stand.desk.rollouts.roll_back("bob", rollout_id)
    await stand.tick(60_000)
    await stand.tick()
    assert stand.evaluations.stopped == 1 and (await stand.stored(rollout_id)).is_over
    stand.loop.latest(rollout_id)


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


# ── holding ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_paused_rollout_stays(stand: Stand) -> None:
    """Protects people's say: the weight stays however long it takes, and what was gathered counts afterwards."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")
    await stand.desk.rollouts.pause("bob", rollout_id)
    await stand.ticks(10)
    canary = stand.alias().canary
    assert canary is not None and canary.weight == 10
    await stand.desk.rollouts.resume("bob", rollout_id)
    await stand.tick()
    canary = stand.alias().canary
    assert canary is not None and canary.weight == 50


async def test_a_step_waits_for_its_lanes(stand: Stand) -> None:
    """Protects the next step's customers: one of two replicas carries a half, and not the whole."""
    stand.cell.missing = {NEXT.id: 1}
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary", 1)
    await stand.ticks(10)
    look = stand.loop.latest(rollout_id)
    assert look is not None and look.verdict == Hold((Wait(Awaited.CAPACITY, 1, 100),))
    stand.cell.missing = {STABLE.id: 1, NEXT.id: 1}
    await stand.tick()
    assert (await stand.stored(rollout_id)).step == 2, "there is no more of the stable revision"


async def test_a_canary_on_demand_is_asked_for(stand: Stand) -> None:
    """Protects a rollout to a pool that nobody's request would start."""
    await stand.desk.put(pools=(Pool("lazy", NEXT.id, 2, 4, on_demand=True),))
    stand.cell.missing = {NEXT.id: 2}
    await stand.propose()
    await stand.tick()
    assert stand.cell.demanded == ["lazy"]
    stand.cell.missing = {}
    await stand.ticks(3)
    assert stand.cell.demanded == ["lazy"]


async def test_a_coordinator_that_is_away_is_nobodys_fault(stand: Stand) -> None:
    """Protects a rollout from what it cannot see: held, said once, and afterwards replicas get the time of a first start."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")
    stand.cell.away = True
    with capture_logs() as logs:
        await stand.ticks(60)
    assert [(line["event"], line["reason"]) for line in logs] == [("rollout_postponed", "coordinator_lost")]
    stand.cell.away, stand.cell.missing = False, {NEXT.id: 2}
    await stand.ticks(PLAN.ready_ms // INTERVAL_MS)
    assert await stand.course(rollout_id) == ["verify", "raise_weight"]
    stand.cell.missing = {}
    await stand.until(rollout_id, "live")
    assert await stand.course(rollout_id) == TO_LIVE


async def test_a_rollout_that_is_proposed_outlives_a_gap(stand: Stand) -> None:
    """Protects it from going back in the moment in which the coordinator is back and knows no replica yet."""
    stand.cell.missing = {NEXT.id: 2}
    rollout_id = await stand.propose()
    await stand.ticks(3)
    stand.cell.away = True
    await stand.ticks(60)
    stand.cell.away = False
    await stand.ticks(3)
    assert isinstance((await stand.stored(rollout_id)).state, Proposed)


async def test_a_store_that_is_away_is_nobodys_fault(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a rollout from the store: nothing moves, that is said once, and a breach is acted on once it is back."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")
    stand.cell.by_step[NEXT.id, 0] = FAILING

    async def away(*_: object) -> int:
        raise errors.LedgerUnavailable()

    with monkeypatch.context() as store, capture_logs() as logs:
        store.setattr(stand.desk.store, "apply", away)
        await stand.ticks(3)
        store.setattr(stand.desk.store, "version", away)
        await stand.ticks(3)
    told = [(line["event"], line["reason"]) for line in logs]
    assert told == [("rollout_postponed", "ledger_unavailable"), ("rollouts_postponed", "ledger_unavailable")]
    assert await stand.course(rollout_id) == ["verify", "raise_weight"]
    await stand.tick()
    assert await stand.course(rollout_id) == ["verify", "raise_weight", "roll_back"]


# ── several at once ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_two_rollouts_take_their_own_ways(stand: Stand) -> None:
    """Protects one alias from another's rollout: one goes back while the other goes live."""
    await stand.desk.put(aliases=(Alias("other", STABLE.id, 600),))
    stand.cell.by_step[NEXT.id, 1] = FAILING
    bad = await stand.propose(NEXT.id, "assistant")
    good = await stand.propose(THIRD.id, "other", steps=(Step(40, 20, 2_000), Step(100, 20, 2_000)))
    await stand.until(good, "live")
    assert (await stand.course(bad))[-2:] == ["roll_back", "finish"]
    assert (await stand.course(good)) == ["verify", "raise_weight", "raise_weight", "promote", "finish"]
    assert (stand.alias("assistant").revision, stand.alias("other").revision) == (STABLE.id, THIRD.id)


async def test_a_slow_gateway_keeps_no_other_rollout_waiting(stand: Stand) -> None:
    """Protects a second alias: its look is not behind the confirmation of the first one's move."""
    confirmed = asyncio.Event()

    async def confirm(acknowledged: Acknowledgement) -> Acknowledgement:
        await confirmed.wait()
        return acknowledged

    await stand.desk.put(aliases=(Alias("other", STABLE.id, 600),))
    slow, other = await stand.propose(NEXT.id, "assistant"), await stand.propose(THIRD.id, "other")
    stand.evaluations.let.clear()
    await stand.tick()
    await stand.desk.rollouts.roll_back("bob", slow)
    stand.desk.commands.confirm = confirm
    stand.desk.clock.now_ms += INTERVAL_MS
    looks = await stand.loop.tick()
    await asyncio.wait(looks, timeout=0.2)
    assert [look.done() for look in looks].count(False) == 1
    first = stand.loop.latest(other)
    stand.desk.clock.now_ms += INTERVAL_MS
    [again] = await stand.loop.tick()
    await again
    second = stand.loop.latest(other)
    assert first is not None and second is not None and second.at_ms == first.at_ms + INTERVAL_MS
    confirmed.set()
    await asyncio.gather(*looks)
    assert (await stand.stored(slow)).is_over
    await stand.loop.aclose()


Act = Callable[[Stand, str], Awaitable[Any]]


@pytest.mark.parametrize(
    ("act", "seen", "state"),
    [
        (lambda stand, each: stand.desk.rollouts.pause("bob", each), HEALTHY, "paused"),
        (lambda stand, each: stand.desk.rollouts.promote("bob", each), FAILING, "promoting"),
        (lambda stand, each: stand.desk.rollouts.roll_back("bob", each), HEALTHY, "rolled_back"),
        (lambda stand, each: stand.desk.models.revoke("bob", NEXT.id), HEALTHY, "canary"),
    ],
)
async def test_who_moves_it_between_look_and_commit_is_heeded(stand: Stand, act: Act, seen: Evidence, state: str) -> None:
    """Protects an administrator's act of the last moment: it is decided again on what is stored then."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary", 0)
    await stand.tick()
    stand.cell.by_step[NEXT.id, 0] = seen
    stand.cell.meanwhile = lambda: act(stand, rollout_id)
    await stand.tick()
    assert name_of((await stand.stored(rollout_id)).state) == state


async def test_evidence_of_another_step_decides_nothing(stand: Stand) -> None:
    """Protects the next step: what was gathered at the one before is not taken for its own."""
    rollout_id = await stand.propose(steps=(Step(10, 20, 0), Step(50, 20, 0), Step(100, 20, 0)))
    await stand.until(rollout_id, "canary", 0)
    former = stand.loop
    stand.restart()

    async def by_another() -> None:
        await asyncio.gather(*await stand.loop.tick())

    stand.cell.meanwhile = by_another
    stand.desk.clock.now_ms += INTERVAL_MS
    await asyncio.gather(*await former.tick())
    assert (await stand.stored(rollout_id)).step == 1


async def test_one_that_loses_a_race_tries_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a rollout from a catalog that others keep changing, and from a refusal: the next look is another try."""
    rollout_id = await stand.propose()
    await stand.tick()

    async def taken(*_: object) -> int:
        raise errors.AlreadyExists()

    with monkeypatch.context() as store, capture_logs() as logs:
        store.setattr(stand.desk.store, "apply", taken)
        await stand.ticks(2)
    assert [(line["event"], line["reason"]) for line in logs] == [("rollout_postponed", "already_exists")]
    await stand.tick()
    assert await stand.course(rollout_id) == ["verify"]


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def course_with(restarts: frozenset[int], breach: int | None, loss: int | None) -> tuple[list[str], Alias, str]:
    """What becomes of a rollout: its course, its alias and its state. breach, loss: at which step, if at any."""
    stand = await Stand(Evaluated(Score(10, 10))).open()
    if breach is not None:
        stand.cell.by_step[NEXT.id, breach] = FAILING
    rollout_id = await stand.propose()
    for number in range(40):
        if number in restarts:
            await stand.loop.aclose()
            stand.restart()
        await stand.tick()
        step = (await stand.stored(rollout_id)).step
        if loss is not None and step == loss:  # for one look of a control that saw it ready
            loss, stand.cell.missing = None, {NEXT.id: 2}
            await stand.tick()
            stand.cell.missing = {}
    await stand.loop.aclose()
    return await stand.course(rollout_id), stand.alias(), name_of((await stand.stored(rollout_id)).state)


@given(
    restarts=st.frozensets(st.integers(0, 39), max_size=6),
    breach=st.none() | st.integers(0, 2),
    loss=st.none() | st.integers(0, 2),
)
@settings(max_examples=25, deadline=None)
def test_a_restart_of_control_changes_nothing(restarts: frozenset[int], breach: int | None, loss: int | None) -> None:
    """Protects a rollout from a restart between any two looks: it goes the same way to the same end."""
    undisturbed = asyncio.run(course_with(frozenset(), breach, loss))
    assert asyncio.run(course_with(restarts, breach, loss)) == undisturbed
    assert undisturbed[2] in ("live", "rolled_back")


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
