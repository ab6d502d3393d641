"""What a rollout's owner decides beforehand: its steps, what counts as worse, how long it may wait for what.

A plan is fixed as its rollout is proposed, and stored with it. Times are wall-clock milliseconds, because a rollout outlives
the process that watches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from weir import errors
from weir.units import Millis

WEIGHT_MAX = 100
"""The whole of an alias's traffic, in percent."""
STEPS_MIN, STEPS_MAX = 2, 10
"""One below the whole, so that there is a stable revision to compare with; each more makes every test stricter."""
_SECOND: Millis = 1_000
_MINUTE: Millis = 60_000
_DAY: Millis = 86_400_000


@dataclass(frozen=True, slots=True)
class Step:
    """A share of the traffic, and what must have been seen at it before the next. weight: percent, int 1 … 100.

    samples_min: of the canary's requests that count, int ≥ 1. time_min_ms: int ≥ 0.
    """

    weight: int
    samples_min: int
    time_min_ms: Millis


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How much worse a canary may be. Points: added to a rate, in percentage points; percent: of the stable revision's value.

    A fault is a fault, but by one in a hundred two runs of a revision differ when a replica is lost. Clients leave for reasons
    of their own, and often together. Latencies differ by a quarter where a pool is emptier or its caches are colder. Another
    revision may well be somewhat more talkative; half as much again is money.
    """

    errors_points: int = 1
    cancellations_points: int = 5
    first_token_percent: int = 25
    per_token_percent: int = 25
    output_percent: int = 50


# A hundred requests find what is broken, at a hundredth of the traffic; the later steps find what is merely worse. And minutes,
# because a busy alias has its samples in seconds, and what leaks or fills a cache shows that after a while.
DEFAULT_STEPS = (
    Step(1, 100, 5 * _MINUTE),
    Step(10, 500, 10 * _MINUTE),
    Step(50, 1_000, 15 * _MINUTE),
    Step(WEIGHT_MAX, 1_000, 15 * _MINUTE),
)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How an alias moves to another revision; `check_plan` refuses what cannot be followed.

    interval_ms: between analyses. false_alarm_rate: the probability at most that a canary which is no worse than its tolerances
    is rolled back by the comparison, over the whole rollout. evaluation_score_min: share of the evaluation set's cases that has
    to pass; evaluation_drop_max: how much less than the stable revision's share that may be. ready_ms: until the canary's first
    replica is ready; evaluation_ms: for the evaluation, beyond that. lost_ms: without a ready canary replica. warm_ms: how long
    the previous revision stays ready after the promotion. back_ms: for what still runs on a canary that is rolled back.
    """

    steps: tuple[Step, ...] = DEFAULT_STEPS
    interval_ms: Millis = 5 * _SECOND  # what a clear breach costs at most beyond the requests that show it
    false_alarm_rate: float = 0.05  # one rollout in twenty looked at in vain; a smaller rate needs more requests to find less
    tolerances: Tolerances = field(default_factory=Tolerances)
    evaluation_score_min: float = 0.9
    evaluation_drop_max: float = 0.02
    ready_ms: Millis = 10 * _MINUTE  # to load large weights from a slow disk
    evaluation_ms: Millis = 60 * _MINUTE  # a thousand cases, one after the other, at a few seconds each
    lost_ms: Millis = 30 * _SECOND  # a restart of a small model; meanwhile the stable revision serves everybody
    warm_ms: Millis = _MINUTE  # as long as the shortest default deadline: what fails by then goes back at once
    back_ms: Millis = 5 * _MINUTE  # the longest default deadline of interactive requests: all of them end by themselves


RANGES: dict[str, tuple[float, float]] = {
    "interval_ms": (100, 10 * _MINUTE),
    "false_alarm_rate": (0.0001, 0.5),
    "evaluation_score_min": (0, 1),
    "evaluation_drop_max": (0, 1),
    "ready_ms": (_SECOND, _DAY),
    "evaluation_ms": (_SECOND, _DAY),
    "lost_ms": (0, _DAY),
    "warm_ms": (0, _DAY),
    "back_ms": (0, _DAY),
    "errors_points": (0, 100),
    "cancellations_points": (0, 100),
    "first_token_percent": (0, 1_000),
    "per_token_percent": (0, 1_000),
    "output_percent": (0, 1_000),
    "weight": (1, WEIGHT_MAX),
    "samples_min": (1, 1_000_000),
    "time_min_ms": (0, 30 * _DAY),
}
"""What each number may be, by its name."""


def check_plan(plan: RolloutPlan) -> None:
    """Raises InvalidRequest, with the field and what it accepts, unless the plan can be followed."""
    _check_steps(plan.steps)
    _check_fields(plan, "")
    _check_fields(plan.tolerances, "tolerances.")


def _check_steps(steps: Sequence[Step]) -> None:
    if not STEPS_MIN <= len(steps) <= STEPS_MAX:
        raise _refusal("steps", f"{STEPS_MIN} … {STEPS_MAX} steps")
    below = 0
    for number, step in enumerate(steps):
        _check_fields(step, f"steps[{number}].")
        if step.weight <= below:
            raise _refusal(f"steps[{number}].weight", f"more than the step before, so above {below}")
        below = step.weight
    if below != WEIGHT_MAX:
        raise _refusal(f"steps[{len(steps) - 1}].weight", f"{WEIGHT_MAX} in the last step")


def _check_fields(part: RolloutPlan | Tolerances | Step, path: str) -> None:
    for declared in fields(part):
        if declared.name not in RANGES:
            continue
        low, high = RANGES[declared.name]
        value: Any = getattr(part, declared.name)
        is_share = declared.type is float
        kinds = (int, float) if is_share else (int,)
        if type(value) not in kinds or not low <= value <= high:
            number = "a number" if is_share else "an integer"
            raise _refusal(path + declared.name, f"{number} {low} … {high}")


def _refusal(name: str, accepted: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name} must be {accepted}.", members={"field": name, "accepted": accepted})
