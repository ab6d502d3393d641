"""A rollout without a cell: requests drawn for both revisions, and the core's decisions about them.

Requests end one by one at a fixed rate, in two workload classes; each goes to the canary by a draw with the weight. Their
values are log-normal or, where asked, have a Pareto tail; the hour moves both revisions alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from weir.core.registry.evidence import Arm, EvidenceWindow, Outcome, Sample
from weir.core.registry.rollout import (
    OnCanary,
    RollbackReason,
    RollingBack,
    RolloutState,
    Verified,
    advance,
    weight_of,
)
from weir.core.registry.rollout_decision import Observation, decide
from weir.core.registry.rollout_plan import RolloutPlan
from weir.units import Millis

REQUESTS_PER_SECOND = 10
LONG_SHARE = 0.2
LONG_FIRST_TOKEN = 6.0
DAY_MS: Millis = 20 * 60_000
"""The day is shortened to less than a rollout, so that every rollout meets its rise and its fall."""
BUSY_MS: Millis = 30_000
"""How long a pool's own busy times last, where it has them."""


@dataclass(frozen=True)
class Behaviour:
    """What a revision does. Medians in ms and tokens, spreads as standard deviations of the logarithm.

    fault_rate: errors beside the usual ones, at any hour. first_token_tail: exponent of a Pareto tail in place of the
    log-normal; at 1 it has no mean.
    """

    error_rate: float = 0.004
    fault_rate: float = 0.0
    cancellation_rate: float = 0.03
    first_token_ms: float = 300.0
    first_token_spread: float = 0.6
    first_token_tail: float | None = None
    tpot_ms: float = 20.0
    tpot_spread: float = 0.2
    output_tokens: float = 150.0
    output_spread: float = 0.9

    def sample(self, random: Random, load: float) -> Sample:
        """One request. load: 1 in quiet hours; the time to the first token and errors rise with it, TPOT with its root."""
        is_long = random.random() < LONG_SHARE
        drawn = random.random()
        error_rate = self.error_rate * load + self.fault_rate
        outcome = (
            Outcome.ERROR
            if drawn < error_rate
            else Outcome.CANCELLED
            if drawn < error_rate + self.cancellation_rate
            else Outcome.GOOD
        )
        first_token_ms = self.first_token_ms * load * (LONG_FIRST_TOKEN if is_long else 1.0)
        if self.first_token_tail is None:
            first_token_ms *= random.lognormvariate(0.0, self.first_token_spread)
        else:
            first_token_ms *= random.paretovariate(self.first_token_tail)
        return Sample(
            "long" if is_long else "short",
            outcome,
            first_token_ms,
            self.tpot_ms * math.sqrt(load) * random.lognormvariate(0.0, self.tpot_spread),
            1 + int(self.output_tokens * random.lognormvariate(0.0, self.output_spread)),
        )

    def busy(self, log_load: float) -> "Behaviour":
        """The same on replicas that are this much busier."""
        load = math.exp(log_load)
        return replace(self, first_token_ms=self.first_token_ms * load, tpot_ms=self.tpot_ms * math.sqrt(load))


def calm(now_ms: Millis) -> float:
    """The load of a day without hours."""
    return 1.0


def daily(now_ms: Millis) -> float:
    """Load between 1 and 4, twice up and down in the time of a rollout."""
    return 2.5 - 1.5 * math.cos(2 * math.pi * now_ms / DAY_MS)


@dataclass(frozen=True)
class Course:
    """How a rollout went. reason: None if it was promoted. samples: the canary's requests that counted. weight: its last."""

    reason: RollbackReason | None
    samples: int
    weight: int
    lasted_ms: Millis


def roll_out(
    plan: RolloutPlan,
    stable: Behaviour,
    canary: Behaviour,
    seed: int,
    load: Callable[[Millis], float] = calm,
    busy_spread: float = 0.0,
) -> Course:
    """One rollout from its first step to the promotion or to the way back.

    busy_spread: of the logarithm of the load that each pool has by itself, for about BUSY_MS at a time.
    """
    random, now_ms, samples = Random(seed), 0, 0
    busy, kept = [0.0, 0.0], math.exp(-plan.interval_ms / BUSY_MS)
    state: RolloutState = Verified(0, None)
    window = EvidenceWindow(plan.tolerances)
    while isinstance(state, Verified | OnCanary):
        weight = weight_of(plan, state)
        if busy_spread:
            busy = [kept * was + math.sqrt(1 - kept * kept) * random.gauss(0.0, busy_spread) for was in busy]
        if isinstance(state, OnCanary):
            samples -= window.evidence().canary.requests
            behaviours = (stable.busy(busy[0]), canary.busy(busy[1]))
            _serve(window, random, behaviours, weight, (now_ms, plan.interval_ms, load))
            samples += window.evidence().canary.requests
        now_ms += plan.interval_ms
        decision = decide(plan, state, Observation(now_ms, 1, carries_share=True, evidence=window.evidence()))
        if decision.event is not None:
            state = advance(state, decision.event)
            window = EvidenceWindow(plan.tolerances)
    return Course(state.reason if isinstance(state, RollingBack) else None, samples, weight, now_ms)


def _serve(
    window: EvidenceWindow,
    random: Random,
    behaviours: tuple[Behaviour, Behaviour],
    weight: int,
    span: tuple[Millis, Millis, Callable[[Millis], float]],
) -> None:
    from_ms, lasts_ms, load = span
    apart_ms = 1_000 // REQUESTS_PER_SECOND
    for now_ms in range(from_ms, from_ms + lasts_ms, apart_ms):
        is_canary = random.random() * 100 < weight
        sample = behaviours[is_canary].sample(random, load(now_ms))
        window.add(Arm.CANARY if is_canary else Arm.STABLE, sample)
