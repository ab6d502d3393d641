"""How an alias moves from one revision to another: the rollout as a state machine, and why it is decided as it is.

    proposed ──▶ verified ──▶ canary(step) ──▶ promoting ──▶ LIVE
       ▲            ▲            ▲   └─ next step ─┘
       └────────────┴── paused ──┘        every state in small letters ──▶ rolling back ──▶ ROLLED_BACK

What it is for. A revision that was approved may still be wrong: it refuses what the old one took, it is slow under real load,
it talks twice as long. So it gets a small share of the traffic first, and more only after enough requests showed that it is no
worse than the stable revision over the same time. If it is, the alias goes back by itself.

Invariants (property-tested).
  1. What the alias says follows from the state alone (`route_of`, `weight_of`): up to `verified` the old revision, at a step
     both, from `promoting` on the new one; on the way back and after it the old one again. So one write changes both.
  2. The weight rises only with `RaiseWeight` and `Promote`; nothing raises it without the step's samples and time, and ready
     replicas that carry the next share. Going back is a change of routing: what runs keeps the revision that it began with.
  3. Whatever is not over can be rolled back, also while it is paused. Nothing follows a state in capitals.
  4. A canary that is worse beyond doubt is rolled back by the first decision that sees the evidence.
  5. Every wait has a bound, except one for people, for capacity and for traffic: those harm nobody, and are shown.

Why this test. One looks at a rollout every few seconds and stops at the first bad sign. A test at a fixed level that is asked
so often cries wolf in most rollouts; one that is asked only at the end lets a broken revision serve until then. The bounds of
`sequential.py` hold at all looks at once. They are exact for yes-or-no observations, and that is all that is made of a
request: an error or not, a cancellation or not, worse than its partner of the same moment or not (`evidence.py`). Rates differ
beyond doubt once the canary's lower bound is above the stable revision's upper bound and what is tolerated. Pairs are worse
than tolerated once more than half of them are, beyond doubt.

The false-alarm rate. A rollout makes steps × six such comparisons, each with an even part of the plan's `false_alarm_rate`,
because evidence begins anew with each step. By the union bound a canary that is within its tolerances is rolled back by them
with no more than that probability (default 5 %), however long the rollout lasts and however often it is looked at. Simulated,
0 of 400 rollouts of an unchanged revision went back, and 3 of 400 of one that is exactly at every tolerance: the parts add up
only there, and only over a long time. What it takes for granted:

  - Both revisions serve the same mix at the same time: keys are assigned by hash, so they do, except at the last step. There
    the stable revision serves nobody, its tally of the step before stands in, and only rates are compared.
  - Requests are independent of each other. They are not where one session is much of a canary's traffic, or where the canary's
    replicas have busy times of their own: why waiting for a lane is left out of the time to the first token.
  - Pairs need no more than that: each has its own moment. The bounds of a rate are proved for one that is constant; where it
    drifts they are about its mean over the step, which is the same for both, and what they keep then is simulated.

What was rejected. Thresholds ("error rate above 2 % for five minutes"): they have no false-alarm rate that anybody could state,
and need a number for every model. Comparing means or p95s with a t-test or bootstrap: heavy tails, and neither survives being
looked at again and again. Group-sequential boundaries: they fix the number of looks beforehand, and traffic does not come in
portions. A Bayesian "probability to be better": its error rate is not bounded by what it says. Alpha spent unevenly on the
early steps: it would find a little earlier what is found early anyway. Score of the answers while serving: there is nobody
who could tell in general which answer is right, so the evaluation set stands before the first request.
"""

from enum import StrEnum
from typing import TypeAlias, assert_never

import msgspec

from weir.core.registry.evidence import Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout_plan import WEIGHT_MAX, RolloutPlan
from weir.units import Millis


class RollbackReason(StrEnum):
    """Why a rollout went back; a closed set, used as a metric label. The first six are the measures of `comparison.py`."""

    ERRORS = "errors"
    CANCELLATIONS = "cancellations"
    FIRST_TOKEN = "first_token"
    PER_TOKEN = "per_token"
    LONGER_OUTPUT = "longer_output"
    SHORTER_OUTPUT = "shorter_output"
    EVALUATION = "evaluation"
    NO_CAPACITY = "no_capacity"
    START_FAILED = "start_failed"
    REVOKED = "revoked"
    OPERATOR = "operator"


class Route(StrEnum):
    """What the alias says: the old revision, both by weight, or the new one."""

    OLD = "old"
    SPLIT = "split"
    NEW = "new"


# ── states: times are wall-clock milliseconds, and each state is stored as it is ─────────────────────────────────────


class Proposed(msgspec.Struct, frozen=True, tag="proposed"):
    """The canary's replicas start and its evaluation runs; nothing is routed to it."""

    since_ms: Millis


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """It passed its evaluation and waits for the capacity of the first step. score: None where there is no set.

    lost_since_ms: since when it has no ready replica; None while it has one.
    """

    since_ms: Millis
    score: Score | None
    lost_since_ms: Millis | None = None


class OnCanary(msgspec.Struct, frozen=True, tag="canary"):
    """It has the weight of the plan's step, an index from 0. baseline: the stable revision's tally of the step before.

    lost_since_ms: since when it has no ready replica; None while it has one.
    """

    step: int
    since_ms: Millis
    baseline: Tally | None = None
    lost_since_ms: Millis | None = None


class Promoting(msgspec.Struct, frozen=True, tag="promoting"):
    """The alias says the new revision; the previous one stays warm. lost_since_ms: as above."""

    since_ms: Millis
    lost_since_ms: Millis | None = None


class Live(msgspec.Struct, frozen=True, tag="live"):
    """The new revision is the alias's; the previous one is free."""

    at_ms: Millis


Pausable: TypeAlias = Proposed | Verified | OnCanary


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """Somebody holds it where it was: the weight stays, and so does what is compared."""

    was: Pausable
    since_ms: Millis


class RollingBack(msgspec.Struct, frozen=True, tag="rolling_back"):
    """The alias says the old revision; what still runs on the canary may end. detail: one sentence for people."""

    since_ms: Millis
    reason: RollbackReason
    detail: str


class RolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    """The old revision is the alias's; the canary is free."""

    at_ms: Millis
    reason: RollbackReason
    detail: str


Terminal: TypeAlias = Live | RolledBack
Routable: TypeAlias = Verified | OnCanary | Promoting
RolloutState: TypeAlias = Pausable | Promoting | Paused | RollingBack | Terminal


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Verify(msgspec.Struct, frozen=True):
    """A replica is ready, and the evaluation passed or there is none."""

    now_ms: Millis
    score: Score | None


class RaiseWeight(msgspec.Struct, frozen=True):
    """To the first step, or to the next one. baseline: the stable revision's tally of the step that ends."""

    now_ms: Millis
    baseline: Tally | None = None


class Promote(msgspec.Struct, frozen=True):
    """The alias says the new revision from now on."""

    now_ms: Millis


class Finish(msgspec.Struct, frozen=True):
    """The previous revision was warm for long enough; or nothing runs on a canary that is rolled back."""

    now_ms: Millis


class Pause(msgspec.Struct, frozen=True):
    """Somebody stops it where it is."""

    now_ms: Millis


class Resume(msgspec.Struct, frozen=True):
    """Somebody lets it go on; what it waited for before its first step, and without a replica, begins anew."""

    now_ms: Millis


class Lose(msgspec.Struct, frozen=True):
    """The canary has no ready replica any more."""

    now_ms: Millis


class Regain(msgspec.Struct, frozen=True):
    """It has one again."""


class RollBack(msgspec.Struct, frozen=True):
    """The alias goes back to the old revision. detail: one sentence for people, without anybody's text."""

    now_ms: Millis
    reason: RollbackReason
    detail: str


RolloutEvent: TypeAlias = Verify | RaiseWeight | Promote | Finish | Pause | Resume | Lose | Regain | RollBack


class IllegalRolloutTransition(AssertionError):
    """A broken invariant: this event cannot happen in this state."""

    def __init__(self, state: RolloutState, event: RolloutEvent) -> None:
        super().__init__(f"{type(event).__name__} is illegal in {type(state).__name__}")


def advance(state: RolloutState, event: RolloutEvent) -> RolloutState:
    """The state after `event`. Raises IllegalRolloutTransition for a pair that the machine does not allow."""
    match state:
        case Proposed():
            return _advance_proposed(state, event)
        case Verified():
            return _advance_verified(state, event)
        case OnCanary():
            return _advance_on_canary(state, event)
        case Promoting():
            return _advance_promoting(state, event)
        case Paused():
            return _advance_paused(state, event)
        case RollingBack():
            return _advance_rolling_back(state, event)
        case Live() | RolledBack():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(state)


def _advance_proposed(state: Proposed, event: RolloutEvent) -> RolloutState:
    match event:
        case Verify():
            return Verified(event.now_ms, event.score)
        case Pause():
            return Paused(state, event.now_ms)
        case RollBack():
            return _rolling_back(event)
        case RaiseWeight() | Promote() | Finish() | Resume() | Lose() | Regain():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _advance_verified(state: Verified, event: RolloutEvent) -> RolloutState:
    match event:
        case RaiseWeight():
            return OnCanary(0, event.now_ms, event.baseline)
        case Pause():
            return Paused(state, event.now_ms)
        case Lose() | Regain():
            return _with_loss(state, event)
        case RollBack():
            return _rolling_back(event)
        case Verify() | Promote() | Finish() | Resume():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _advance_on_canary(state: OnCanary, event: RolloutEvent) -> RolloutState:
    match event:
        case RaiseWeight():
            return OnCanary(state.step + 1, event.now_ms, event.baseline)
        case Promote():
            return Promoting(event.now_ms, state.lost_since_ms)
        case Pause():
            return Paused(state, event.now_ms)
        case Lose() | Regain():
            return _with_loss(state, event)
        case RollBack():
            return _rolling_back(event)
        case Verify() | Finish() | Resume():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _advance_promoting(state: Promoting, event: RolloutEvent) -> RolloutState:
    match event:
        case Finish():
            return Live(event.now_ms)
        case Lose() | Regain():
            return _with_loss(state, event)
        case RollBack():
            return _rolling_back(event)
        case Verify() | RaiseWeight() | Promote() | Pause() | Resume():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _advance_paused(state: Paused, event: RolloutEvent) -> RolloutState:
    match event:
        case Resume():
            return _resumed(state.was, event.now_ms)
        case RollBack():
            return _rolling_back(event)
        case Verify() | RaiseWeight() | Promote() | Finish() | Pause() | Lose() | Regain():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _advance_rolling_back(state: RollingBack, event: RolloutEvent) -> RolloutState:
    match event:
        case Finish():
            return RolledBack(event.now_ms, state.reason, state.detail)
        case Verify() | RaiseWeight() | Promote() | Pause() | Resume() | Lose() | Regain() | RollBack():
            raise IllegalRolloutTransition(state, event)
        case _:
            assert_never(event)


def _rolling_back(event: RollBack) -> RollingBack:
    return RollingBack(event.now_ms, event.reason, event.detail)


def _with_loss(state: Routable, event: Lose | Regain) -> Routable:
    lost_since_ms = event.now_ms if isinstance(event, Lose) else None
    if (state.lost_since_ms is None) == (lost_since_ms is None):
        raise IllegalRolloutTransition(state, event)
    return msgspec.structs.replace(state, lost_since_ms=lost_since_ms)


def _resumed(was: Pausable, now_ms: Millis) -> RolloutState:
    match was:
        case Proposed():
            return Proposed(now_ms)
        case Verified():
            return Verified(now_ms, was.score)
        case OnCanary():  # it had its weight all the time, and what it did then counts
            return OnCanary(was.step, was.since_ms, was.baseline)
        case _:
            assert_never(was)


# ── what a state means ───────────────────────────────────────────────────────────────────────────────────────────────


def name_of(state: RolloutState) -> str:
    """The state's name, as it is stored and shown."""
    name = type(state).__struct_config__.tag
    assert isinstance(name, str)
    return name


def is_terminal(state: RolloutState) -> bool:
    """True for the states written in capitals: nothing follows them."""
    return isinstance(state, Terminal)


def route_of(state: RolloutState) -> Route:
    """What the alias must say in this state."""
    match state:
        case Proposed() | Verified() | RollingBack() | RolledBack():
            return Route.OLD
        case OnCanary():
            return Route.SPLIT
        case Promoting() | Live():
            return Route.NEW
        case Paused():
            return route_of(state.was)
        case _:
            assert_never(state)


def weight_of(plan: RolloutPlan, state: RolloutState) -> int:
    """The new revision's share of the alias's traffic in this state, 0 … 100 percent."""
    at = state.was if isinstance(state, Paused) else state
    if isinstance(at, OnCanary):
        return plan.steps[at.step].weight
    return WEIGHT_MAX if route_of(at) is Route.NEW else 0


def next_weight(plan: RolloutPlan, state: RolloutState) -> int:
    """The share that its ready replicas must carry before it goes on from this state."""
    match state:
        case Proposed() | Verified():
            return plan.steps[0].weight
        case OnCanary():
            return plan.steps[min(state.step + 1, len(plan.steps) - 1)].weight
        case Paused():
            return next_weight(plan, state.was)
        case Promoting() | Live() | RollingBack() | RolledBack():
            return weight_of(plan, state)
        case _:
            assert_never(state)


def onward(plan: RolloutPlan, state: Verified | OnCanary, now_ms: Millis, stable: Tally | None = None) -> RaiseWeight | Promote:
    """What goes on from here: the first step, the next one, or the promotion after the last.

    stable: the stable revision's tally of the step that ends, the baseline of the next one; None before the first.
    """
    if isinstance(state, OnCanary) and state.step + 1 == len(plan.steps):
        return Promote(now_ms)
    return RaiseWeight(now_ms, stable)
