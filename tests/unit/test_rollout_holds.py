"""The rollout loop beside all that goes wrong elsewhere: what is away, who acts meanwhile, other rollouts, restarts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.unit.registry_desk import STABLE
from tests.unit.rollout_stand import FAILING, HEALTHY, INTERVAL_MS, NEXT, PLAN, THIRD, TO_LIVE, Stand

from weir import errors
from weir.control.rollout_loop import Look
from weir.core.registry.evidence import Evidence
from weir.core.registry.golden_set import Score
from weir.core.registry.model import Alias, Pool
from weir.core.registry.rollout import Proposed, name_of
from weir.core.registry.rollout_decision import (
    Awaited,
    Evaluated,
    Hold,
    Wait,
)
from weir.core.registry.rollout_plan import Step
from weir.ports import Acknowledgement


@pytest.fixture
async def stand() -> Stand:
    return await Stand().open()


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


@pytest.mark.parametrize("busy", [False, True])
async def test_a_revoked_revision_leaves_its_alias_at_once(stand: Stand, busy: bool) -> None:
    """Protects everybody after a promotion: the alias means what serves nobody, whenever the next look would be due.

    busy: a look is under way as it is revoked, and saw it serve.
    """
    rollout_id = await stand.propose(interval_ms=600_000, warm_ms=86_400_000)
    for _ in range(60):
        await stand.tick(600_000)
        if name_of((await stand.stored(rollout_id)).state) == "promoting":
            break
    if busy:
        stand.cell.meanwhile = lambda: stand.desk.models.revoke("bob", NEXT.id)
        await stand.tick(600_000)
    else:
        await stand.desk.models.revoke("bob", NEXT.id)
    await stand.tick(1)
    assert stand.alias().revision == STABLE.id and name_of((await stand.stored(rollout_id)).state) == "rolling_back"
    looks = [await stand.tick(1) for _ in range(5)]
    assert sum(looks) == 0, "what is decided is looked at as often as any other"


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


async def test_a_lane_counts_wherever_it_is(stand: Stand) -> None:
    """Protects a canary on fewer and larger replicas: its lanes are compared, not its processes."""
    await stand.desk.put(pools=(Pool("large", NEXT.id, 1, 8),))
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "live")
    await stand.desk.put(pools=(Pool("slim", THIRD.id, 2, 3),))
    rollout_id = await stand.propose(THIRD.id)
    await stand.until(rollout_id, "canary", 1)
    await stand.ticks(10)
    assert (await stand.stored(rollout_id)).step == 1


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


async def test_a_gap_that_the_store_made_is_a_gap(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a canary that was started anew while nobody looked: it is not lost, and each gap is said."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary")

    async def away() -> int:
        raise errors.LedgerUnavailable()

    for gap in range(2):
        with monkeypatch.context() as store, capture_logs() as logs:
            store.setattr(stand.desk.store, "version", away)
            await stand.ticks(30)
        assert [line["event"] for line in logs] == ["rollouts_postponed"], f"gap {gap}"
        stand.cell.missing = {NEXT.id: 2}
        await stand.ticks(10)
        assert await stand.course(rollout_id) == ["verify", "raise_weight"]


async def test_each_gap_of_the_coordinator_is_said(stand: Stand) -> None:
    """Protects operators: what went away again is said again."""
    await stand.propose()
    for _ in range(2):
        stand.cell.away = True
        with capture_logs() as logs:
            await stand.ticks(3)
        assert [line["event"] for line in logs] == ["rollout_postponed"]
        stand.cell.away = False
        await stand.tick()


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


@pytest.mark.parametrize("is_last", [False, True])
async def test_a_slow_gateway_keeps_no_other_rollout_waiting(stand: Stand, is_last: bool) -> None:
    """Protects a second alias: its looks are not behind the confirmation of the first one's move, its last one included."""
    confirmed = asyncio.Event()

    async def confirm(acknowledged: Acknowledgement) -> Acknowledgement:
        await confirmed.wait()
        return acknowledged

    await stand.desk.put(aliases=(Alias("other", STABLE.id, 600),))
    stand.evaluations.let.clear()
    slow, other = await stand.propose(NEXT.id, "assistant"), await stand.propose(THIRD.id, "other")
    await stand.tick()
    if is_last:
        await stand.desk.rollouts.roll_back("bob", slow)
    else:
        await stand.desk.models.revoke("bob", NEXT.id)
    stand.desk.commands.confirm = confirm
    looks, seen = list[asyncio.Task[None]](), list[Look | None]()
    for _ in range(3):
        stand.desk.clock.now_ms += INTERVAL_MS
        looks += await stand.loop.tick()
        await asyncio.wait(looks, timeout=0.2)
        seen.append(stand.loop.latest(other))
    assert [look.done() for look in looks].count(False) == 1 and len(looks) == 4
    assert len({look.at_ms for look in seen if look is not None}) == 3
    confirmed.set()
    await asyncio.gather(*looks)
    await stand.ticks(2)
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


async def test_the_last_look_is_at_what_was_decided_on(stand: Stand) -> None:
    """Protects whoever watches from a verdict that another's act overtook: it is of the rollout as it was stored then."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary", 0)
    await stand.tick()
    stand.cell.meanwhile = lambda: stand.desk.rollouts.pause("bob", rollout_id)
    await stand.tick()
    look = stand.loop.latest(rollout_id)
    assert look is not None and look.verdict == Hold((Wait(Awaited.OPERATOR, 0, 0),))


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


async def test_a_promotion_that_is_refused_in_the_last_moment_is_none(stand: Stand) -> None:
    """Protects everybody from what was revoked as it was promoted: it is refused, and the next look takes it back."""
    rollout_id = await stand.propose()
    await stand.until(rollout_id, "canary", 2)
    await stand.tick()
    stand.cell.meanwhile = lambda: stand.desk.models.revoke("bob", NEXT.id)
    with capture_logs() as logs:
        await stand.tick()
    assert [(line["event"], line["reason"]) for line in logs] == [("rollout_postponed", "not_allowed_now")]
    await stand.tick()
    assert stand.decided[-1] == ("roll_back", "revoked") and stand.alias().revision == STABLE.id


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
