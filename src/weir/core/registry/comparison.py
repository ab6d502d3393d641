"""Whether a canary is worse than the stable revision, measure by measure, with what is known of each.

A comparison names the share that speaks against the canary: of its requests that were errors, or of its pairs in which it was
worse. `at_least` is what that share truly is, however often one looked; above `at_most` it is a breach. Why these bounds, and
what they cost: `rollout.py`.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from weir.core.registry.evidence import Evidence, Pairs, Tally
from weir.core.registry.rollout_plan import WEIGHT_MAX, RolloutPlan
from weir.core.registry.sequential import lower_bound, upper_bound


class Measure(StrEnum):
    """What is compared."""

    ERRORS = "errors"
    CANCELLATIONS = "cancellations"
    FIRST_TOKEN = "first_token"
    PER_TOKEN = "per_token"
    LONGER_OUTPUT = "longer_output"
    SHORTER_OUTPUT = "shorter_output"


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """One measure. samples: the canary's requests, or pairs; hits: those that speak against it. at_least, at_most: 0 … 1.

    stable_samples, stable_hits: the stable revision's; 0 where pairs are compared, which have both in them.
    """

    measure: Measure
    samples: int
    hits: int
    at_least: float
    at_most: float
    stable_samples: int = 0
    stable_hits: int = 0

    @property
    def is_breach(self) -> bool:
        """Whether the canary is worse than the plan tolerates, beyond doubt."""
        return self.at_least > self.at_most

    @property
    def is_paired(self) -> bool:
        """Whether pairs are compared, not rates."""
        return self.measure not in _COUNTED

    def __str__(self) -> str:
        what = f"{self.measure.replace('_', ' ')}: {self.hits} of {self.samples}"
        bounds = f"at least {self.at_least:.1%} where at most {self.at_most:.1%} may be"
        if self.is_paired:
            return f"{what} pairs are worse; {bounds}"
        return f"{what} requests; {bounds} (stable: {self.stable_hits} of {self.stable_samples})"


def compare(plan: RolloutPlan, step: int, evidence: Evidence, baseline: Tally | None) -> tuple[Comparison, ...]:
    """Every measure of a step that has it. baseline: the stable revision's tally of the last step that had one.

    At the last step no traffic is stable: rates are compared with the baseline, and there are no pairs. Each comparison gets
    an even part of the plan's false-alarm rate, and of that each of its bounds.
    """
    alpha = plan.false_alarm_rate / (len(plan.steps) * len(Measure))
    tolerances = plan.tolerances
    points = {Measure.ERRORS: tolerances.errors_points, Measure.CANCELLATIONS: tolerances.cancellations_points}
    if plan.steps[step].weight == WEIGHT_MAX:
        stable = baseline or Tally()
        return tuple(_rate(measure, evidence.canary, stable, points[measure], alpha) for measure in _COUNTED)
    return (
        *(_rate(measure, evidence.canary, evidence.stable, points[measure], alpha) for measure in _COUNTED),
        _pairs(Measure.FIRST_TOKEN, evidence.first_token, alpha),
        _pairs(Measure.PER_TOKEN, evidence.per_token, alpha),
        _pairs(Measure.LONGER_OUTPUT, evidence.longer_output, alpha),
        _pairs(Measure.SHORTER_OUTPUT, evidence.shorter_output, alpha),
    )


_COUNTED: dict[Measure, Callable[[Tally], int]] = {
    Measure.ERRORS: lambda tally: tally.errors,
    Measure.CANCELLATIONS: lambda tally: tally.cancellations,
}


def _rate(measure: Measure, canary: Tally, stable: Tally, points: int, alpha: float) -> Comparison:
    hits, stable_hits = _COUNTED[measure](canary), _COUNTED[measure](stable)
    at_least = lower_bound(hits, canary.requests, alpha / 2)
    at_most = upper_bound(stable_hits, stable.requests, alpha / 2) + points / 100
    return Comparison(measure, canary.requests, hits, at_least, min(1.0, at_most), stable.requests, stable_hits)


def _pairs(measure: Measure, pairs: Pairs, alpha: float) -> Comparison:
    return Comparison(measure, pairs.pairs, pairs.worse, lower_bound(pairs.worse, pairs.pairs, alpha), 0.5)
