"""What a rollout decides: for each state, what makes it go on, hold, or go back, and what people are told."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from weir.core.registry.comparison import Comparison, Measure, compare
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import (
    Finish,
    Live,
    Lose,
    OnCanary,
    Paused,
    Promote,
    Promoting,
    Proposed,
    RaiseWeight,
    Regain,
    RollBack,
    RollbackReason,
    RolledBack,
    RollingBack,
    RolloutEvent,
    RolloutState,
    Verified,
    Verify,
)
from weir.core.registry.rollout_decision import (
    DETAIL_CHARACTERS_MAX,
    Awaited,
    Breach,
    Decision,
    Evaluated,
    Evaluation,
    GiveUp,
    Hold,
    NotEvaluated,
    NothingToEvaluate,
    Observation,
    Proceed,
    Verdict,
    Wait,
    can_carry,
    decide,
)
from weir.core.registry.rollout_plan import RolloutPlan, Step

PLAN = RolloutPlan(
    steps=(Step(10, 20, 1_000), Step(50, 30, 2_000), Step(100, 40, 3_000)),
    ready_ms=10_000,
    evaluation_ms=20_000,
    lost_ms=500,
    warm_ms=600,
    back_ms=700,
)
SINCE = 1_000
SCORE = Score(9, 10, ("capital-1",))
PROPOSED = Proposed(SINCE)
VERIFIED = Verified(SINCE, SCORE)
CANARY = OnCanary(0, SINCE)
LAST = OnCanary(2, SINCE, Tally(1_000, 5, 30))
PROMOTING = Promoting(SINCE)
ROLLING_BACK = RollingBack(SINCE, RollbackReason.OPERATOR, "asked")
ENOUGH = Evidence(Tally(180, 1, 5), Tally(20, 0, 1), Pairs(20, 8), Pairs(20, 10), Pairs(18, 3), Pairs(18, 5))
READY = Observation(SINCE, 1, carries_share=True, evaluation=NothingToEvaluate(), evidence=ENOUGH)


def _at(elapsed_ms: int, **changes: Any) -> Observation:
    return replace(READY, now_ms=SINCE + elapsed_ms, **changes)


def _wait(what: Awaited, have: int, need: int) -> Wait:
    return Wait(what, have, need)


@pytest.mark.parametrize(
    ("state", "seen", "waits"),
    [
        (PROPOSED, _at(9_999, ready_replicas=0), [_wait(Awaited.REPLICA, 9_999, 10_000)]),
        (PROPOSED, _at(29_999, evaluation=None), [_wait(Awaited.EVALUATION, 29_999, 30_000)]),
        (VERIFIED, _at(0, carries_share=False), [_wait(Awaited.CAPACITY, 1, 10)]),
        (Verified(SINCE, SCORE, SINCE), _at(499, ready_replicas=0), [_wait(Awaited.REPLICA, 499, 500)]),
        (CANARY, _at(999), [_wait(Awaited.TIME, 999, 1_000)]),
        (CANARY, _at(-50), [_wait(Awaited.TIME, 0, 1_000)]),
        (CANARY, _at(1_000, carries_share=False), [_wait(Awaited.CAPACITY, 1, 50)]),
        (
            CANARY,
            _at(0, evidence=Evidence(), carries_share=False, ready_replicas=2),
            [_wait(Awaited.SAMPLES, 0, 20), _wait(Awaited.TIME, 0, 1_000), _wait(Awaited.CAPACITY, 2, 50)],
        ),
        (CANARY, _at(1_000, evidence=None), [_wait(Awaited.SAMPLES, 0, 20)]),
        (LAST, _at(9_000, evidence=Evidence(canary=Tally(39))), [_wait(Awaited.SAMPLES, 39, 40)]),
        (Paused(PROPOSED, SINCE), _at(99_999, ready_replicas=0), [_wait(Awaited.OPERATOR, 99_999, 0)]),
        (Paused(CANARY, SINCE), _at(99_999, ready_replicas=0), [_wait(Awaited.OPERATOR, 99_999, 0)]),
        (PROMOTING, _at(599), [_wait(Awaited.WARMTH, 599, 600)]),
        (ROLLING_BACK, _at(699, running=3), [_wait(Awaited.RUNNING, 3, 0)]),
        (Live(SINCE), READY, []),
        (RolledBack(SINCE, RollbackReason.OPERATOR, "asked"), READY, []),
    ],
)
def test_it_holds_and_says_what_for(state: RolloutState, seen: Observation, waits: list[Wait]) -> None:
    """Protects patience: nothing changes, and people see each thing that is not there yet, with have and need."""
    assert decide(PLAN, state, seen) == Decision(None, Hold(tuple(waits)))


@pytest.mark.parametrize(
    ("state", "seen", "event", "weight"),
    [
        (PROPOSED, _at(5), Verify(SINCE + 5, None), 0),
        (PROPOSED, _at(5, evaluation=Evaluated(SCORE)), Verify(SINCE + 5, SCORE), 0),
        (PROPOSED, _at(5, evaluation=Evaluated(SCORE, Score(92, 100))), Verify(SINCE + 5, SCORE), 0),
        (VERIFIED, _at(5), RaiseWeight(SINCE + 5), 10),
        (CANARY, _at(1_000), RaiseWeight(SINCE + 1_000, ENOUGH.stable), 50),
        (LAST, _at(3_000, evidence=Evidence(canary=Tally(40))), Promote(SINCE + 3_000), 100),
        (PROMOTING, _at(600), Finish(SINCE + 600), 100),
        (ROLLING_BACK, _at(0), Finish(SINCE), 0),
        (ROLLING_BACK, _at(700, running=3), Finish(SINCE + 700), 0),
    ],
)
def test_it_goes_on_once_everything_is_there(state: RolloutState, seen: Observation, event: RolloutEvent, weight: int) -> None:
    """Protects progress: exactly at the bounds of samples, time and score, and with the stable tally as the next baseline."""
    assert decide(PLAN, state, seen) == Decision(event, Proceed(weight))


@pytest.mark.parametrize(
    ("state", "seen", "reason", "said"),
    [
        (PROPOSED, _at(10_000, ready_replicas=0), RollbackReason.NO_CAPACITY, "No replica was ready within 10000 ms."),
        (
            PROPOSED,
            _at(10_000, ready_replicas=0, start_fault="out of memory"),
            RollbackReason.START_FAILED,
            "No replica was ready within 10000 ms: out of memory",
        ),
        (PROPOSED, _at(30_000, evaluation=None), RollbackReason.EVALUATION, "not over within 30000 ms"),
        (Verified(0, None, SINCE), _at(500, ready_replicas=0), RollbackReason.NO_CAPACITY, "No replica was ready for 500 ms."),
        (OnCanary(1, 0, None, SINCE), _at(500, ready_replicas=0), RollbackReason.NO_CAPACITY, "for 500 ms"),
        (Promoting(0, SINCE), _at(900, ready_replicas=0), RollbackReason.NO_CAPACITY, "for 500 ms"),
    ],
)
def test_it_gives_up_what_never_comes(state: RolloutState, seen: Observation, reason: RollbackReason, said: str) -> None:
    """Protects against waiting forever for a replica or an evaluation; where a start failed, that is the reason."""
    decision = decide(PLAN, state, seen)
    assert isinstance(decision.event, RollBack)
    assert decision.event.reason is reason and said in decision.event.detail
    assert decision.verdict == GiveUp(reason, decision.event.detail)


@pytest.mark.parametrize("ready_replicas", [0, 1])
@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (NotEvaluated("the replica was lost"), "The evaluation broke off: the replica was lost"),
        (Evaluated(Score(89, 100)), "89 of 100 cases passed; 90.0% must."),
        (Evaluated(Score(90, 100), Score(93, 100)), "90 of 100 cases passed, 93 of 100 with the stable revision"),
    ],
)
def test_a_failed_evaluation_ends_it(evaluation: Evaluation, said: str, ready_replicas: int) -> None:
    """Protects everybody from a revision that is wrong: nothing is routed to it, whether its replica is still there or not."""
    decision = decide(PLAN, PROPOSED, _at(5, evaluation=evaluation, ready_replicas=ready_replicas))
    assert isinstance(decision.event, RollBack)
    assert decision.event.reason is RollbackReason.EVALUATION and said in decision.event.detail


def test_what_a_start_says_is_cut() -> None:
    """Protects the store: a fault's text is bounded."""
    decision = decide(PLAN, PROPOSED, _at(10_000, ready_replicas=0, start_fault="x" * 10_000))
    assert isinstance(decision.event, RollBack) and len(decision.event.detail) == DETAIL_CHARACTERS_MAX


def test_a_failing_start_is_shown_while_it_waits() -> None:
    """Protects whoever watches: why no replica is ready is said before the time is over."""
    seen = _at(5, ready_replicas=0, start_fault="out of memory")
    assert decide(PLAN, PROPOSED, seen).verdict == Hold((Wait(Awaited.REPLICA, 5, 10_000),), "out of memory")


@pytest.mark.parametrize("state", [VERIFIED, CANARY, PROMOTING])
def test_a_lost_canary_holds_and_comes_back(state: Verified | OnCanary | Promoting) -> None:
    """Protects against promoting what is gone: a lost replica stops the clock of nothing but is waited for, then forgiven."""
    seen = _at(5_000, ready_replicas=0)
    assert decide(PLAN, state, seen) == Decision(Lose(SINCE + 5_000), Hold((Wait(Awaited.REPLICA, 0, 500),)))
    lost = msgspec.structs.replace(state, lost_since_ms=SINCE + 5_000)
    assert decide(PLAN, lost, _at(5_100, ready_replicas=0)).verdict == Hold((Wait(Awaited.REPLICA, 100, 500),))
    assert decide(PLAN, lost, _at(5_100)) == Decision(Regain(), Hold())


@pytest.mark.parametrize("state", [VERIFIED, CANARY, PROMOTING])
def test_who_begins_to_look_waits_for_the_first_start(state: Verified | OnCanary | Promoting) -> None:
    """Protects a rollout from a restart of what keeps its replicas: they are still to come, for as long as a first one may."""
    first = {"ready_replicas": 0, "is_first_start": True, "seen_since_ms": SINCE + 5_000}
    for known in (state, msgspec.structs.replace(state, lost_since_ms=SINCE + 4_000)):
        held = decide(PLAN, known, _at(14_999, **first))
        assert held == Decision(None, Hold((Wait(Awaited.REPLICA, 9_999, 10_000),)))
    assert decide(PLAN, state, _at(15_000, **first)).event == Lose(SINCE + 15_000)
    breached = _at(6_000, evidence=BREACHES[Measure.ERRORS], **first)
    assert isinstance(decide(PLAN, CANARY, breached).verdict, Breach)


def test_what_nobody_could_see_is_not_held_against_it() -> None:
    """Protects a rollout that is proposed from a gap in which it may have got ready and been evaluated: both begin anew."""
    gap = {"seen_since_ms": SINCE + 50_000}
    assert decide(PLAN, PROPOSED, _at(59_999, ready_replicas=0, **gap)).event is None
    assert isinstance(decide(PLAN, PROPOSED, _at(60_000, ready_replicas=0, **gap)).event, RollBack)
    assert decide(PLAN, PROPOSED, _at(79_999, evaluation=None, **gap)).event is None
    assert isinstance(decide(PLAN, PROPOSED, _at(80_000, evaluation=None, **gap)).event, RollBack)


@pytest.mark.parametrize("state", [PROPOSED, VERIFIED, CANARY, LAST, PROMOTING, Paused(CANARY, SINCE)], ids=repr)
def test_a_revoked_revision_goes_back_at_once(state: RolloutState) -> None:
    """Protects everybody from what was revoked, however good it looks."""
    decision = decide(PLAN, state, _at(99_999, serves=False))
    assert decision.event == RollBack(SINCE + 99_999, RollbackReason.REVOKED, "Its revision was revoked.")
    assert decide(PLAN, ROLLING_BACK, _at(0, serves=False)).event == Finish(SINCE)
    assert decide(PLAN, Live(SINCE), _at(0, serves=False)).event is None


@pytest.mark.parametrize(
    "state",
    [
        Proposed(SINCE),
        Verified(SINCE, None),
        OnCanary(1, SINCE),
        OnCanary(1, SINCE, None, SINCE),
        Paused(OnCanary(1, SINCE), SINCE),
    ],
)
def test_without_a_way_back_people_decide(state: RolloutState) -> None:
    """Protects callers of the canary: where the stable revision was revoked, going back by itself would leave nobody served."""
    seen = replace(
        READY, now_ms=SINCE + 100_000, ready_replicas=0, evidence=Evidence(Tally(100), Tally(50, 50)), stable_serves=False
    )
    assert decide(PLAN, state, seen) == Decision(None, Hold((Wait(Awaited.RETURN, 100_000, 0),)))
    assert isinstance(decide(PLAN, state, replace(seen, serves=False)).event, RollBack)


def test_a_promotion_ends_without_a_way_back() -> None:
    """Protects the new revision: it stays what the alias means, and goes back to a revoked one for no loss."""
    seen = replace(READY, ready_replicas=0, stable_serves=False)
    assert decide(PLAN, Promoting(SINCE), seen) == Decision(None, Hold((Wait(Awaited.WARMTH, 0, PLAN.warm_ms),)))
    late = replace(seen, now_ms=SINCE + PLAN.warm_ms)
    assert decide(PLAN, Promoting(SINCE), late).event == Finish(late.now_ms)


@pytest.mark.parametrize(
    ("canary", "stable", "weight", "can"),
    [(1, 100, 1, True), (1, 101, 1, False), (5, 10, 50, True), (4, 10, 50, False), (9, 10, 100, False), (10, 10, 100, True)],
)
def test_a_share_needs_its_share_of_lanes(canary: int, stable: int, weight: int, can: bool) -> None:
    """Protects the next step's customers from a canary that is too small for them."""
    assert can_carry(canary, stable, weight) is can


def test_a_canary_without_a_lane_carries_nothing() -> None:
    """Protects against going on to nobody; where the stable revision has none either, one replica is enough."""
    assert not can_carry(0, 0, 1) and can_carry(1, 0, 100)


MANY_STABLE = Tally(2_000, 8, 60)
BREACHES = {
    Measure.ERRORS: Evidence(MANY_STABLE, Tally(20, 12, 0)),
    Measure.CANCELLATIONS: Evidence(MANY_STABLE, Tally(40, 0, 25)),
    Measure.FIRST_TOKEN: Evidence(MANY_STABLE, Tally(30), first_token=Pairs(30, 28)),
    Measure.PER_TOKEN: Evidence(MANY_STABLE, Tally(30), per_token=Pairs(30, 28)),
    Measure.LONGER_OUTPUT: Evidence(MANY_STABLE, Tally(30), longer_output=Pairs(30, 28)),
    Measure.SHORTER_OUTPUT: Evidence(MANY_STABLE, Tally(30), shorter_output=Pairs(30, 28)),
}


@pytest.mark.parametrize("state", [CANARY, Paused(CANARY, SINCE), OnCanary(0, SINCE, lost_since_ms=SINCE)], ids=repr)
@pytest.mark.parametrize("measure", Measure)
def test_a_breach_goes_back_at_once(measure: Measure, state: RolloutState) -> None:
    """Protects the canary's customers: whatever else it waits for, also paused and without a replica, and with its figures."""
    decision = decide(PLAN, state, _at(0, evidence=BREACHES[measure], ready_replicas=0, carries_share=False))
    assert isinstance(decision.verdict, Breach)
    comparison = decision.verdict.comparison
    assert comparison.measure is measure and comparison.is_breach
    assert decision.event == RollBack(SINCE, RollbackReason(measure.value), f"{comparison}.")


def test_the_last_step_compares_rates_with_the_step_before() -> None:
    """Protects the last step: nobody is on the stable revision, so its tally of before stands in, and there are no pairs."""
    slow = Evidence(Tally(), Tally(60, 0, 2), first_token=Pairs(60, 60))
    assert decide(PLAN, LAST, _at(3_000, evidence=slow)).event == Promote(SINCE + 3_000)
    failing = Evidence(Tally(), Tally(60, 20, 2))
    decision = decide(PLAN, LAST, _at(3_000, evidence=failing))
    assert isinstance(decision.event, RollBack) and decision.event.reason is RollbackReason.ERRORS
    unknown = OnCanary(2, SINCE)
    assert decide(PLAN, unknown, _at(3_000, evidence=failing)).event == Promote(SINCE + 3_000)


def test_little_evidence_is_no_breach() -> None:
    """Protects against alarm at the first bad request: three failures of three prove nothing at this rate of false alarms."""
    few = Evidence(Tally(), Tally(3, 3, 0), first_token=Pairs(5, 5))
    assert not any(comparison.is_breach for comparison in compare(PLAN, 0, few, None))


def test_comparisons_are_told_in_words_and_numbers() -> None:
    """Protects whoever is woken up: counts, bounds and what was tolerated, in one sentence."""
    errors, *_, shorter = compare(PLAN, 0, Evidence(Tally(2_000, 8), Tally(20, 12), shorter_output=Pairs(30, 28)), None)
    assert str(errors) == "errors: 12 of 20 requests; at least 19.9% where at most 2.2% may be (stable: 8 of 2000)"
    assert str(shorter) == "shorter output: 28 of 30 pairs are worse; at least 64.5% where at most 50.0% may be"
    assert not errors.is_paired and shorter.is_paired


@pytest.mark.parametrize(
    "verdict",
    [
        Hold((Wait(Awaited.SAMPLES, 3, 20),), "out of memory"),
        Proceed(50),
        Breach(Comparison(Measure.ERRORS, 20, 12, 0.2, 0.02, 2_000, 8)),
        GiveUp(RollbackReason.EVALUATION, "89 of 100 cases passed; 90.0% must."),
    ],
)
def test_a_verdict_is_json(verdict: Verdict) -> None:
    """Protects the live view: what is shown crosses the admin API."""
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
