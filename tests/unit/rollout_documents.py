"""Rollouts as the management API answers them, for the tests of what people see of one."""

import json
from dataclasses import replace
from typing import Any

from weir.api.admin_rollout_views import RolloutDetailView
from weir.control.rollout_loop import Look
from weir.core.registry.comparison import Comparison, compare
from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.rollout import OnCanary, Paused, RolloutState
from weir.core.registry.rollout_decision import Verdict
from weir.core.registry.rollout_plan import RolloutPlan, Step
from weir.core.registry.rollout_record import Rollout
from weir.ports import AuditEntry

NOON_MS = 1_700_049_600_000
PLAN = RolloutPlan((Step(1, 100, 300_000), Step(10, 500, 600_000), Step(100, 0, 0)))
ROLLOUT = Rollout("ro-1", "assistant", "small@1", "small@2", PLAN, OnCanary(1, NOON_MS), "ann", NOON_MS - 60_000)
GOOD = Evidence(Tally(2_811, 3, 90), Tally(312, 1, 8), Pairs(300, 151), Pairs(290, 120), Pairs(280, 80), Pairs(280, 90))
BAD = Evidence(Tally(2_811, 3, 90), Tally(312, 80, 8))


def look_at(rollout: Rollout, verdict: Verdict, evidence: Evidence | None = None) -> Look:
    """A look 192 seconds after noon."""
    at = rollout.state.was if isinstance(rollout.state, Paused) else rollout.state
    comparisons: tuple[Comparison, ...] = ()
    if evidence is not None and isinstance(at, OnCanary):
        comparisons = compare(rollout.plan, at.step, evidence, at.baseline)
    return Look(NOON_MS + 192_000, verdict, evidence, 2, 1, comparisons)


def act(number: int, action: str = "raise_weight", **summary: Any) -> AuditEntry:
    """An act, so many seconds after noon."""
    return AuditEntry(NOON_MS + number * 1_000, "rollout", f"rollout.{action}", "ro-1", json.dumps(summary))


def document(
    state: RolloutState, verdict: Verdict | None = None, evidence: Evidence | None = None, acts: int = 0, **fields: Any
) -> dict[str, Any]:
    """A rollout in a state, with its latest look if a verdict is given, and with acts, newest first."""
    rollout = replace(ROLLOUT, state=state, **fields)
    look = None if verdict is None else look_at(rollout, verdict, evidence)
    entries = [act(number, weight=number) for number in reversed(range(acts))]
    shown = RolloutDetailView.with_history(rollout, look, entries).model_dump(mode="json", exclude_defaults=True)
    assert isinstance(shown, dict)
    return shown
