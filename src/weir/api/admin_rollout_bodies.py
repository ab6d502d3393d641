"""What requests about rollouts may hold: what moves where, and how much of its plan is another one than the default.

Shapes are checked here; ranges by `check_plan`, in one with the types, so that every refusal names what is accepted.
"""

from dataclasses import fields
from typing import Annotated, Any

from pydantic import WithJsonSchema

from weir.api.admin_bodies import Body, Parameters
from weir.core.registry.rollout_plan import RANGES, RolloutPlan, Step, Tolerances

_Whole = Annotated[Any, WithJsonSchema({"type": "integer"})]
_Share = Annotated[Any, WithJsonSchema({"type": "number"})]


def _ranges(schema: dict[str, Any]) -> None:
    """The document says what each number may be."""
    for name, described in schema["properties"].items():
        if name in RANGES:
            described["minimum"], described["maximum"] = RANGES[name]


class StepBody(Body, json_schema_extra=_ranges):
    """A share of the traffic in percent, and what must have been seen at it before the next."""

    weight: _Whole
    samples_min: _Whole
    time_min_ms: _Whole


class TolerancesBody(Body, json_schema_extra=_ranges):
    """How much worse the new revision may be; absent ones are the defaults."""

    errors_points: _Whole = None
    cancellations_points: _Whole = None
    first_token_percent: _Whole = None
    per_token_percent: _Whole = None
    output_percent: _Whole = None


class PlanBody(Body, json_schema_extra=_ranges):
    """A plan; absent fields are the defaults."""

    steps: list[StepBody] | None = None
    interval_ms: _Whole = None
    false_alarm_rate: _Share = None
    tolerances: TolerancesBody | None = None
    evaluation_score_min: _Share = None
    evaluation_drop_max: _Share = None
    ready_ms: _Whole = None
    evaluation_ms: _Whole = None
    lost_ms: _Whole = None
    warm_ms: _Whole = None
    back_ms: _Whole = None

    def plan(self) -> RolloutPlan:
        """As the command takes it; not checked yet."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(RolloutPlan)}
        if self.steps is not None:
            given["steps"] = tuple(Step(step.weight, step.samples_min, step.time_min_ms) for step in self.steps)
        if self.tolerances is not None:
            given["tolerances"] = Tolerances(**self.tolerances.model_dump(exclude_none=True))
        return RolloutPlan(**{name: value for name, value in given.items() if value is not None})


class NewRollout(Body):
    """An alias to move to a revision. tenant: whose alias; absent: the shared one."""

    alias: str
    revision: str
    tenant: str | None = None
    plan: PlanBody | None = None


class RollBackBody(Body):
    """detail: why, one line for people."""

    detail: str | None = None


class RolloutQuery(Parameters):
    """Which rollouts: of aliases of this name; only those that are not over, or only those that are."""

    alias: str | None = None
    open: bool | None = None
