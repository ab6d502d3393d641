"""What to do with a rollout now: go on, hold, or roll back, from what is seen of its canary.

`decide` is asked once per analysis interval and returns at most one event for `advance`, with a verdict for people. It has no
memory but the state, so that whoever asks may restart at any moment: what is missing then was not lost, but is still to come.
The rules and their reasons: `rollout.py`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from weir.core.registry.comparison import Comparison, compare
from weir.core.registry.evidence import Evidence
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import (
    Finish,
    Live,
    Lose,
    OnCanary,
    Pausable,
    Paused,
    Promoting,
    Proposed,
    Regain,
    RollBack,
    RollbackReason,
    RolledBack,
    RollingBack,
    RolloutEvent,
    RolloutState,
    Routable,
    Verified,
    Verify,
    advance,
    next_weight,
    onward,
    weight_of,
)
from weir.core.registry.rollout_plan import WEIGHT_MAX, RolloutPlan
from weir.units import Millis

DETAIL_CHARACTERS_MAX = 500
"""Of what a start's fault says, in a state that is stored."""
_ROUNDING = 1e-9


# ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NothingToEvaluate:
    """The revision names no evaluation set."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Every case was asked. stable: the stable revision's score of the same set, if it is known."""

    score: Score
    stable: Score | None = None


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """The evaluation broke off. detail: one sentence, without anybody's text."""

    detail: str


Evaluation: TypeAlias = NothingToEvaluate | Evaluated | NotEvaluated


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen at once. carries_share: the ready replicas of the canary can serve `next_weight` of the traffic.

    evaluation: None while it is not over. evidence: of the present step; None if it is not known now. running: requests on the
    canary. start_fault: why its last start failed; None if none did since. serves: its revision may; stable_serves: so may the
    one to go back to. seen_since_ms: since when whoever looks sees the cell without a gap. is_first_start: no replica of it was
    ready since then.
    """

    now_ms: Millis
    ready_replicas: int
    carries_share: bool = False
    evaluation: Evaluation | None = None
    evidence: Evidence | None = None
    running: int = 0
    start_fault: str | None = None
    serves: bool = True
    stable_serves: bool = True
    seen_since_ms: Millis = 0
    is_first_start: bool = False


def can_carry(canary_lanes: int, stable_lanes: int, weight: int) -> bool:
    """Whether a canary with this many ready lanes can serve a share, in percent, of what the stable revision's ready ones do.

    What serves all of it now is what is known of its need, and a lane of the one is taken for a lane of the other. Fewer do
    not count as enough because its pools want no more: they may have been made for another purpose, and who finds a full queue
    is no evidence against it, so nothing would stop the next step. To wait harms nobody and is shown; whoever knows that fewer
    lanes suffice promotes it. Where the stable revision has none, one replica is better than that.
    """
    return canary_lanes > 0 and canary_lanes * WEIGHT_MAX >= weight * stable_lanes


# ── what is decided ──────────────────────────────────────────────────────────────────────────────────────────────────


class Awaited(StrEnum):
    """What a rollout waits for: have and need of its `Wait` are in the unit given here."""

    REPLICA = "replica"  # milliseconds without a ready one, and after how many it is rolled back
    EVALUATION = "evaluation"  # milliseconds so far, and after how many it is rolled back
    CAPACITY = "capacity"  # ready replicas; the weight in percent that they must carry
    SAMPLES = "samples"  # the canary's requests that count
    TIME = "time"  # milliseconds at this step
    OPERATOR = "operator"  # milliseconds; no bound
    RETURN = "return"  # a stable revision that serves: milliseconds at this state; no bound
    RUNNING = "running"  # requests on the canary; none, or `back_ms`
    WARMTH = "warmth"  # milliseconds since the promotion


class Wait(msgspec.Struct, frozen=True):
    """One thing that is not there yet."""

    what: Awaited
    have: int
    need: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """It stays where it is. fault: why the canary's last start failed."""

    waits: tuple[Wait, ...] = ()
    fault: str | None = None


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """It goes on. weight: the canary's share after that, percent."""

    weight: int


class Breach(msgspec.Struct, frozen=True, tag="breach"):
    """The canary is worse beyond doubt, and goes back."""

    comparison: Comparison


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """It goes back for another reason than a comparison."""

    reason: RollbackReason
    detail: str


Verdict: TypeAlias = Hold | Proceed | Breach | GiveUp


@dataclass(frozen=True, slots=True)
class Decision:
    """event: for `advance`; None: the state stays. verdict: why, for people."""

    event: RolloutEvent | None
    verdict: Verdict


def decide(plan: RolloutPlan, state: RolloutState, seen: Observation) -> Decision:
    """What follows from what is seen; the event is always one that the state allows."""
    if not seen.serves and not isinstance(state, RollingBack | Live | RolledBack):
        return _give_up(seen, RollbackReason.REVOKED, "Its revision was revoked.")
    if not seen.stable_serves and isinstance(state, Pausable | Paused | Promoting):
        return _decide_without_return(plan, state, seen)
    match state:
        case Proposed():
            return _decide_proposed(plan, state, seen)
        case Verified():
            return _lost(plan, state, seen) or _decide_verified(plan, state, seen)
        case OnCanary():
            return _breach(plan, state, seen) or _lost(plan, state, seen) or _decide_on_canary(plan, state, seen)
        case Promoting():
            return _lost(plan, state, seen) or _decide_promoting(plan, state, seen)
        case Paused():
            breach = _breach(plan, state.was, seen) if isinstance(state.was, OnCanary) else None
            return breach or _hold(seen, Wait(Awaited.OPERATOR, _elapsed(state.since_ms, seen), 0))
        case RollingBack():
            return _decide_rolling_back(plan, state, seen)
        case Live() | RolledBack():
            return Decision(None, Hold())
        case _:
            assert_never(state)


def _decide_without_return(plan: RolloutPlan, state: Pausable | Paused | Promoting, seen: Observation) -> Decision:
    """The stable revision was revoked: going back would serve nobody, and whether to go on is for people to say."""
    if isinstance(state, Promoting):
        return _decide_promoting(plan, state, seen)
    return _hold(seen, Wait(Awaited.RETURN, _elapsed(state.since_ms, seen), 0))


def _decide_proposed(plan: RolloutPlan, state: Proposed, seen: Observation) -> Decision:
    elapsed = _elapsed(max(state.since_ms, seen.seen_since_ms), seen)  # nobody could see it get ready before
    if isinstance(seen.evaluation, NotEvaluated):
        return _give_up(seen, RollbackReason.EVALUATION, f"The evaluation broke off: {seen.evaluation.detail}")
    if isinstance(seen.evaluation, Evaluated) and (shortfall := _shortfall(plan, seen.evaluation)):
        return _give_up(seen, RollbackReason.EVALUATION, shortfall)
    if not seen.ready_replicas:
        if elapsed < plan.ready_ms:
            return _hold(seen, Wait(Awaited.REPLICA, elapsed, plan.ready_ms))
        return _no_replica(seen, f"No replica was ready within {plan.ready_ms} ms")
    if seen.evaluation is None:
        evaluation_ms = plan.ready_ms + plan.evaluation_ms
        if elapsed < evaluation_ms:
            return _hold(seen, Wait(Awaited.EVALUATION, elapsed, evaluation_ms))
        return _give_up(seen, RollbackReason.EVALUATION, f"The evaluation was not over within {evaluation_ms} ms.")
    score = seen.evaluation.score if isinstance(seen.evaluation, Evaluated) else None
    return _proceed(plan, state, Verify(seen.now_ms, score))


def _shortfall(plan: RolloutPlan, evaluated: Evaluated) -> str | None:
    """What the score lacks, as a sentence; None if it is enough."""
    reached = evaluated.score
    if reached.share < plan.evaluation_score_min - _ROUNDING:
        return f"{reached.passed} of {reached.total} cases passed; {plan.evaluation_score_min:.1%} must."
    stable = evaluated.stable
    if stable and stable.share - reached.share > plan.evaluation_drop_max + _ROUNDING:
        return (
            f"{reached.passed} of {reached.total} cases passed, {stable.passed} of {stable.total} with the stable revision; "
            f"at most {plan.evaluation_drop_max:.1%} fewer may."
        )
    return None


def _decide_verified(plan: RolloutPlan, state: Verified, seen: Observation) -> Decision:
    if not seen.carries_share:
        return _hold(seen, _capacity(plan, state, seen))
    return _proceed(plan, state, onward(plan, state, seen.now_ms))


def _decide_on_canary(plan: RolloutPlan, state: OnCanary, seen: Observation) -> Decision:
    step, evidence = plan.steps[state.step], seen.evidence or Evidence()
    elapsed = _elapsed(state.since_ms, seen)
    waits: list[Wait] = []
    if evidence.canary.requests < step.samples_min:
        waits.append(Wait(Awaited.SAMPLES, evidence.canary.requests, step.samples_min))
    if elapsed < step.time_min_ms:
        waits.append(Wait(Awaited.TIME, elapsed, step.time_min_ms))
    if not seen.carries_share:
        waits.append(_capacity(plan, state, seen))
    if waits:
        return _hold(seen, *waits)
    return _proceed(plan, state, onward(plan, state, seen.now_ms, evidence.stable))


def _decide_promoting(plan: RolloutPlan, state: Promoting, seen: Observation) -> Decision:
    elapsed = _elapsed(state.since_ms, seen)
    if elapsed < plan.warm_ms:
        return _hold(seen, Wait(Awaited.WARMTH, elapsed, plan.warm_ms))
    return _proceed(plan, state, Finish(seen.now_ms))


def _decide_rolling_back(plan: RolloutPlan, state: RollingBack, seen: Observation) -> Decision:
    if seen.running and _elapsed(state.since_ms, seen) < plan.back_ms:
        return _hold(seen, Wait(Awaited.RUNNING, seen.running, 0))
    return _proceed(plan, state, Finish(seen.now_ms))


def _breach(plan: RolloutPlan, state: OnCanary, seen: Observation) -> Decision | None:
    """Back, for the first measure that is worse beyond doubt."""
    if seen.evidence is None:
        return None
    for comparison in compare(plan, state.step, seen.evidence, state.baseline):
        if comparison.is_breach:
            reason = RollbackReason(comparison.measure.value)
            return Decision(RollBack(seen.now_ms, reason, f"{comparison}."), Breach(comparison))
    return None


def _lost(plan: RolloutPlan, state: Routable, seen: Observation) -> Decision | None:
    """Hold while no replica is ready, and back if that lasts; nothing is decided by few who were served before."""
    if seen.ready_replicas:
        return None if state.lost_since_ms is None else Decision(Regain(), Hold())
    if seen.is_first_start and (elapsed := _elapsed(seen.seen_since_ms, seen)) < plan.ready_ms:  # not lost: still to come
        return _hold(seen, Wait(Awaited.REPLICA, elapsed, plan.ready_ms))
    if state.lost_since_ms is None:
        return Decision(Lose(seen.now_ms), Hold((Wait(Awaited.REPLICA, 0, plan.lost_ms),), seen.start_fault))
    elapsed = _elapsed(state.lost_since_ms, seen)
    if elapsed < plan.lost_ms:
        return _hold(seen, Wait(Awaited.REPLICA, elapsed, plan.lost_ms))
    return _no_replica(seen, f"No replica was ready for {plan.lost_ms} ms")


def _no_replica(seen: Observation, what: str) -> Decision:
    if seen.start_fault is None:
        return _give_up(seen, RollbackReason.NO_CAPACITY, f"{what}.")
    return _give_up(seen, RollbackReason.START_FAILED, f"{what}: {seen.start_fault}")


def _give_up(seen: Observation, reason: RollbackReason, detail: str) -> Decision:
    detail = detail[:DETAIL_CHARACTERS_MAX]
    return Decision(RollBack(seen.now_ms, reason, detail), GiveUp(reason, detail))


def _proceed(plan: RolloutPlan, state: RolloutState, event: RolloutEvent) -> Decision:
    return Decision(event, Proceed(weight_of(plan, advance(state, event))))


def _hold(seen: Observation, *waits: Wait) -> Decision:
    return Decision(None, Hold(waits, seen.start_fault))


def _capacity(plan: RolloutPlan, state: RolloutState, seen: Observation) -> Wait:
    return Wait(Awaited.CAPACITY, seen.ready_replicas, next_weight(plan, state))


def _elapsed(since_ms: Millis, seen: Observation) -> Millis:
    """At least 0: a wall clock that was set back makes it wait, not hurry."""
    return max(0, seen.now_ms - since_ms)
