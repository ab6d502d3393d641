"""What the management API answers about rollouts: how far one is, by which plan, and what was seen of it at last.

Read from the core's values: numbers, names and sentences for people, never anybody's text. A field whose default is None is
absent when it is None.
"""

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from weir.api.admin_views import AuditEntryView, Changed, View, audit_view
from weir.api.wire import rfc3339
from weir.control.rollout_loop import Look
from weir.core.registry.comparison import Comparison
from weir.core.registry.rollout import Live, OnCanary, Paused, RolledBack, RollingBack, RolloutState, name_of, weight_of
from weir.core.registry.rollout_decision import Breach, Verdict
from weir.core.registry.rollout_record import Rollout
from weir.ports import AuditEntry
from weir.units import Millis


class StepView(View):
    """A share of the traffic in percent, and what must have been seen at it before the next."""

    weight: int
    samples_min: int
    time_min_ms: int


class TolerancesView(View):
    """How much worse the new revision may be: points are added to a rate, percent is of the stable revision's value."""

    errors_points: int
    cancellations_points: int
    first_token_percent: int
    per_token_percent: int
    output_percent: int


class PlanView(View):
    """The whole plan, as it was fixed when the rollout was proposed."""

    steps: list[StepView]
    interval_ms: int
    false_alarm_rate: float
    tolerances: TolerancesView
    evaluation_score_min: float
    evaluation_drop_max: float
    ready_ms: int
    evaluation_ms: int
    lost_ms: int
    warm_ms: int
    back_ms: int


class ScoreView(View):
    """How the evaluation ended. failed_ids: of the first cases that did not pass."""

    passed: int
    total: int
    failed_ids: list[str]


class RolloutView(Changed):
    """A rollout. since: when its state began. was: the state that a paused one goes on from.

    step: the index from 0 of the plan's step that it is at, also while it is paused there; step_since: when that began.
    weight: the new revision's share of the alias's traffic now, in percent. reason, detail: why it went back.
    pools: those that it made for the new revision; former_pools: the stable one's, which end with its promotion.
    """

    id: str
    alias: str
    tenant: str | None
    stable: str
    canary: str
    state: str
    since: str
    is_over: bool
    was: str | None = None
    step: int | None
    step_since: str | None = None
    weight: int
    reason: str | None = None
    detail: str | None = None
    score: ScoreView | None
    proposed_by: str
    proposed_at: str
    pools: list[str]
    former_pools: list[str]
    plan: PlanView

    @classmethod
    def of(cls, rollout: Rollout, **more: Any) -> Self:
        """A rollout as it is stored. more: fields of a richer view."""
        state = rollout.state
        at = state.was if isinstance(state, Paused) else state
        back = state if isinstance(state, RollingBack | RolledBack) else None
        shown = ("id", "alias", "tenant", "stable", "canary", "is_over", "step", "score", "proposed_by", "plan")
        return cls.model_validate(
            {
                **{name: getattr(rollout, name) for name in shown},
                "state": name_of(state),
                "since": rfc3339(_since_ms(state)),
                "was": name_of(state.was) if isinstance(state, Paused) else None,
                "step_since": rfc3339(at.since_ms) if isinstance(at, OnCanary) else None,
                "weight": weight_of(rollout.plan, state),
                "reason": back.reason.value if back else None,
                "detail": back.detail if back else None,
                "proposed_at": rfc3339(rollout.proposed_at_ms),
                "pools": list(rollout.pools),
                "former_pools": list(rollout.former_pools),
                **more,
            }
        )


def _since_ms(state: RolloutState) -> Millis:
    return state.at_ms if isinstance(state, Live | RolledBack) else state.since_ms


class TallyView(View):
    """Requests of one revision that count, and how many of them were errors and cancellations."""

    requests: int
    errors: int
    cancellations: int


class PairsView(View):
    """Pairs of a canary's and a stable request, and in how many the canary's was worse by more than the tolerance."""

    pairs: int
    worse: int


class EvidenceView(View):
    """What is known of both revisions over the same time, at the present step."""

    stable: TallyView
    canary: TallyView
    first_token: PairsView
    per_token: PairsView
    longer_output: PairsView
    shorter_output: PairsView


class ComparisonView(View):
    """One measure: the share that speaks against the canary. hits of samples; at_least: what it truly is, beyond doubt.

    at_most: what is tolerated; at_least above it is a breach. stable_samples, stable_hits: 0 where pairs are compared.
    """

    measure: str
    samples: int
    hits: int
    at_least: float
    at_most: float
    stable_samples: int
    stable_hits: int
    is_paired: bool
    is_breach: bool


class WaitView(View):
    """One thing that is not there yet; the unit of have and need is the one of `what`."""

    what: str
    have: int
    need: int


class VerdictView(View):
    """What the analysis said. kind: hold, proceed, breach or give_up, each with its own fields.

    waits: what it waits for; fault: why the canary's last start failed; weight: the share it went on to; comparison: the
    measure that is worse; reason, detail: why it went back otherwise.
    """

    kind: str
    waits: list[WaitView] | None = None
    fault: str | None = None
    weight: int | None = None
    comparison: ComparisonView | None = None
    reason: str | None = None
    detail: str | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """A verdict of the core."""
        said: dict[str, Any] = msgspec.to_builtins(verdict)
        if isinstance(verdict, Breach):
            said["comparison"] = verdict.comparison
        return cls.model_validate({"kind": said.pop("type"), **said})


class LookView(View):
    """The latest look at a rollout. running: requests on the canary. evidence: null where it is not known.

    ready_replicas: of the canary.
    """

    at: str
    verdict: VerdictView
    ready_replicas: int
    running: int
    evidence: EvidenceView | None
    comparisons: list[ComparisonView]

    @classmethod
    def of(cls, look: Look) -> Self:
        """A look of the loop."""
        comparisons: Sequence[Comparison] = look.comparisons
        return cls.model_validate(
            {
                "at": rfc3339(look.at_ms),
                "verdict": VerdictView.of(look.verdict),
                "ready_replicas": look.ready_replicas,
                "running": look.running,
                "evidence": look.evidence,
                "comparisons": list(comparisons),
            }
        )


class RolloutDetailView(RolloutView):
    """A rollout with its latest look, null where there was none since control started, and its history, newest first."""

    look: LookView | None
    history: list[AuditEntryView]

    @classmethod
    def with_history(cls, rollout: Rollout, look: Look | None, entries: Sequence[AuditEntry]) -> Self:
        """A rollout with all that is known of it."""
        seen = None if look is None else LookView.of(look)
        return cls.of(rollout, look=seen, history=[audit_view(entry) for entry in entries])


class RolloutList(View):
    """Rollouts, newest first."""

    rollouts: list[RolloutView]
