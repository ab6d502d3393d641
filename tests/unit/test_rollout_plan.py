"""What a rollout's plan may be: its defaults, and each field's refusal with what it accepts."""

from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from weir import errors
from weir.core.registry.rollout_plan import RANGES, RolloutPlan, Step, Tolerances, check_plan

PLAN = RolloutPlan()
LAST = Step(100, 1, 0)


def _with_steps(*steps: Step) -> RolloutPlan:
    return replace(PLAN, steps=steps)


def test_the_default_plan_can_be_followed_and_stored() -> None:
    """Protects whoever gives no plan: 1, 10, 50 and 100 percent, accepted, and JSON."""
    check_plan(PLAN)
    assert [step.weight for step in PLAN.steps] == [1, 10, 50, 100]
    assert msgspec.json.decode(msgspec.json.encode(PLAN), type=RolloutPlan) == PLAN


def test_every_number_has_a_range() -> None:
    """Protects this table: a field added to the plan needs a range."""
    names = {declared.name for part in (RolloutPlan, Tolerances, Step) for declared in fields(part)}
    assert set(RANGES) == names - {"steps", "tolerances"}


@pytest.mark.parametrize("name", [*RANGES])
def test_what_is_out_of_range_is_refused_with_its_field(name: str) -> None:
    """Protects a plan's owner: below, above, and what is no number at all, each named with what would be accepted."""
    low, high = RANGES[name]

    def plan(value: Any) -> tuple[RolloutPlan, str]:
        if name in {declared.name for declared in fields(Tolerances)}:
            return replace(PLAN, tolerances=replace(Tolerances(), **{name: value})), f"tolerances.{name}"
        if name in {declared.name for declared in fields(Step)}:
            return _with_steps(Step(1, 1, 0), replace(LAST, **{name: value})), f"steps[1].{name}"
        return replace(PLAN, **{name: value}), name

    accepted, _ = plan(high)
    check_plan(accepted)
    for value in (low - 1, high + 1, float("nan"), True, "5", None):
        refused, path = plan(value)
        with pytest.raises(errors.InvalidRequest) as found:
            check_plan(refused)
        assert found.value.members["field"] == path
        assert f"{low} … {high}" in found.value.members["accepted"] and path in found.value.detail


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (_with_steps(), "steps"),
        (_with_steps(LAST), "steps"),
        (_with_steps(*(Step(weight, 1, 0) for weight in range(90, 101))), "steps"),
        (_with_steps(Step(10, 1, 0), Step(10, 1, 0), LAST), "steps[1].weight"),
        (_with_steps(Step(50, 1, 0), Step(10, 1, 0), LAST), "steps[1].weight"),
        (_with_steps(Step(1, 1, 0), Step(50, 1, 0)), "steps[1].weight"),
    ],
)
def test_steps_rise_to_the_whole(plan: RolloutPlan, field: str) -> None:
    """Protects the weights: at least one below the whole, each above the one before, the last is the whole."""
    with pytest.raises(errors.InvalidRequest) as found:
        check_plan(plan)
    assert found.value.members["field"] == field
