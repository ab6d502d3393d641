"""How often a rollout goes back for nothing, and after how many requests it does for a reason.

The bounded version runs always; the full one, whose figures are in `docs/explanation/rollouts.md`, with WEIR_SOAK=1 and
`-m slow`. The figures are printed (`-s`). Each rollout is a seed.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import median

import pytest
from tests.simulation.canary_traffic import Behaviour, Course, calm, daily, roll_out

from weir.core.registry.rollout import RollbackReason
from weir.core.registry.rollout_plan import RolloutPlan
from weir.units import Millis

FULL = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("WEIR_SOAK") != "1", reason="a full run is asked for by WEIR_SOAK=1"),
]
PLAN = RolloutPlan()
HASTY = replace(PLAN, steps=tuple(replace(step, time_min_ms=0) for step in PLAN.steps))
"""Fewer requests, for a bounded run: each step ends with its samples."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "rollouts.md"

USUAL = Behaviour()
HEAVY = replace(USUAL, first_token_tail=1.0)
AT_TOLERANCE = replace(USUAL, fault_rate=0.01, cancellation_rate=0.08, first_token_ms=375.0, tpot_ms=25.0, output_tokens=225.0)
SHORT_AT_TOLERANCE = replace(AT_TOLERANCE, output_tokens=100.0)
LoadOf = Callable[[Millis], float]

ALIKE: dict[str, tuple[Behaviour, Behaviour, LoadOf]] = {
    "the same revision": (USUAL, USUAL, calm),
    "the same, first tokens with a tail that has no mean": (HEAVY, HEAVY, calm),
    "the same, load and errors four times as high at noon": (USUAL, USUAL, daily),
    "every measure at its tolerance": (USUAL, AT_TOLERANCE, calm),
    "every measure at its tolerance, shorter answers, by day": (USUAL, SHORT_AT_TOLERANCE, daily),
}

BUSY = {"busy times, first tokens × 1.2": 0.2, "busy times, first tokens × 1.6": 0.5}


@dataclass(frozen=True)
class Regression:
    """A revision that is worse, and why it must go back."""

    canary: Behaviour
    reason: RollbackReason
    stable: Behaviour = USUAL


REGRESSIONS = {
    "errors +50 points": Regression(replace(USUAL, fault_rate=0.5), RollbackReason.ERRORS),
    "errors +5 points": Regression(replace(USUAL, fault_rate=0.05), RollbackReason.ERRORS),
    "cancellations +20 points": Regression(replace(USUAL, cancellation_rate=0.23), RollbackReason.CANCELLATIONS),
    "first token × 3": Regression(replace(USUAL, first_token_ms=900.0), RollbackReason.FIRST_TOKEN),
    "first token × 3, tail without a mean": Regression(replace(HEAVY, first_token_ms=900.0), RollbackReason.FIRST_TOKEN, HEAVY),
    "first token × 1.5": Regression(replace(USUAL, first_token_ms=450.0), RollbackReason.FIRST_TOKEN),
    "time per token × 2": Regression(replace(USUAL, tpot_ms=40.0), RollbackReason.PER_TOKEN),
    "outputs half as long": Regression(replace(USUAL, output_tokens=75.0), RollbackReason.SHORTER_OUTPUT),
    "outputs twice as long": Regression(replace(USUAL, output_tokens=300.0), RollbackReason.LONGER_OUTPUT),
}


def _most_alarms(rollouts: int, rate: float) -> int:
    """So many that more, at this rate, are a matter of one in a thousand."""
    below = 0.0
    for alarms in range(rollouts + 1):
        below += comb(rollouts, alarms) * rate**alarms * (1 - rate) ** (rollouts - alarms)
        if below > 0.999:
            return alarms
    return rollouts


@pytest.mark.parametrize(("plan", "rollouts"), [(HASTY, 5), pytest.param(PLAN, 400, marks=FULL)], ids=["bounded", "full"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_no_worse_than_tolerated_is_promoted(name: str, plan: RolloutPlan, rollouts: int) -> None:
    """Protects whoever rolls out: the share that goes back for nothing is within the plan's rate of false alarms."""
    stable, canary, load = ALIKE[name]
    courses = [roll_out(plan, stable, canary, seed, load) for seed in range(rollouts)]
    alarms = [course.reason for course in courses if course.reason is not None]
    print(f"\n| {name} | {len(alarms)} of {rollouts} |", *sorted(alarms))  # noqa: T201
    assert len(alarms) <= _most_alarms(rollouts, plan.false_alarm_rate)
    assert all(course.weight == 100 for course in courses if course.reason is None)


@pytest.mark.parametrize(("plan", "rollouts"), [(HASTY, 4), pytest.param(PLAN, 400, marks=FULL)], ids=["bounded", "full"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_is_worse_goes_back(name: str, plan: RolloutPlan, rollouts: int) -> None:
    """Protects the canary's customers: a regression is found, for its own reason, before the last step."""
    regression = REGRESSIONS[name]
    courses = [roll_out(plan, regression.stable, regression.canary, seed) for seed in range(rollouts)]
    found = [course for course in courses if course.reason is not None]
    print(f"\n{_row(name, found, rollouts)}")  # noqa: T201
    assert len(found) >= 0.99 * rollouts
    assert sum(course.reason is regression.reason for course in found) >= 0.99 * len(found)
    assert all(course.weight < 100 for course in found)


def _row(name: str, found: Sequence[Course], rollouts: int) -> str:
    samples = sorted(course.samples for course in found)
    at = {weight: sum(course.weight == weight for course in found) / rollouts for weight in (1, 10, 50)}
    shares = " | ".join(f"{share:.0%}" for share in at.values())
    return f"| {name} | {median(samples):,.0f} | {samples[int(0.9 * (len(samples) - 1))]:,} | {shares} |"


@pytest.mark.parametrize(("plan", "rollouts"), [(HASTY, 5), pytest.param(PLAN, 400, marks=FULL)], ids=["bounded", "full"])
@pytest.mark.parametrize("name", BUSY)
def test_pools_with_busy_times_of_their_own_raise_more_alarms(name: str, plan: RolloutPlan, rollouts: int) -> None:
    """Protects the page's honesty: what breaks the test's assumption is measured, and its rate is not promised there."""
    courses = [roll_out(plan, USUAL, USUAL, seed, busy_spread=BUSY[name]) for seed in range(rollouts)]
    alarms = {course.reason for course in courses if course.reason is not None}
    print(f"\n| {name} | {sum(course.reason is not None for course in courses)} of {rollouts} |")  # noqa: T201
    assert alarms <= {RollbackReason.FIRST_TOKEN, RollbackReason.PER_TOKEN}


def test_a_blatant_regression_is_found_within_the_first_requests() -> None:
    """Protects against a clear breach that lingers: half of the requests fail, and few of the first step's samples suffice."""
    courses = [roll_out(PLAN, USUAL, REGRESSIONS["errors +50 points"].canary, seed) for seed in range(20)]
    assert all(course.weight == 1 and course.samples <= 30 for course in courses)


@pytest.mark.parametrize("name", [*ALIKE, *BUSY, *REGRESSIONS])
def test_the_page_has_a_row_for_each(name: str) -> None:
    """Protects the page: what is measured here is what people read there."""
    assert f"| {name} |" in PAGE.read_text(encoding="utf-8")
