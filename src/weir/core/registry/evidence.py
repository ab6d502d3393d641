"""What is known of a canary and of the stable revision over the same time: counts, and pairs of requests.

`Evidence` is what a rollout is decided by; it holds numbers only, so it crosses a link and is stored. `EvidenceWindow` gathers
it where requests end, for one step of one rollout, in bounded memory, and begins anew with the next.

Why pairs. Load moves over the day, and latencies and lengths have tails that no bound on a mean survives. So a canary's request
is compared with one of the stable revision that ended just before it, of the same workload class: whatever the hour does to
both cancels. Let C and S be their values, independent at that moment, and let the canary be within the tolerance t: C is
distributed no higher than (1 + t) × S. Then P(C > (1 + t) × S) ≤ P(S' > S) ≤ 1/2, where S' is another value of the stable
revision's. That holds for each pair whatever came before. So a lower bound of that probability above 1/2 refutes that the
canary is within its tolerance, without a word about the shape of the distributions.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from weir.core.endings import FinishReason
from weir.core.registry.rollout_plan import Tolerances
from weir.units import Tokens

UNUSED_MAX = 8
"""Stable samples of a class that wait for a canary's, the oldest dropped: so many requests ago is still the same time, and at
equal shares, where it is a draw who comes next, eight in nine of the canary's find one.
"""


class Arm(StrEnum):
    """Which of an alias's two revisions a request was served by."""

    STABLE = "stable"
    CANARY = "canary"


class Outcome(StrEnum):
    """What an ending says about the revision."""

    GOOD = "good"
    ERROR = "error"
    CANCELLED = "cancelled"
    NOT_COUNTED = "not_counted"


# After dispatch. The platform's own troubles and an administrator's acts say nothing about a revision; that it refuses what
# was let through to it does, and so does a deadline that it let pass.
_OUTCOME_BY_REASON: Mapping[FinishReason, Outcome] = {
    FinishReason.STOP: Outcome.GOOD,
    FinishReason.LENGTH: Outcome.GOOD,
    FinishReason.TOOL_CALLS: Outcome.GOOD,
    FinishReason.CONTENT_FILTER: Outcome.GOOD,
    FinishReason.CLIENT: Outcome.CANCELLED,
    FinishReason.DISCONNECT: Outcome.CANCELLED,
    FinishReason.SLOW_CLIENT: Outcome.CANCELLED,
    FinishReason.REVOKED: Outcome.NOT_COUNTED,
    FinishReason.QUEUE_WAIT: Outcome.NOT_COUNTED,
    FinishReason.DEADLINE: Outcome.ERROR,
    FinishReason.ENGINE_ERROR: Outcome.ERROR,
    FinishReason.REPLICA_LOST: Outcome.ERROR,
    FinishReason.STALLED: Outcome.ERROR,
    FinishReason.NO_CAPACITY: Outcome.ERROR,
    FinishReason.LEDGER_UNAVAILABLE: Outcome.NOT_COUNTED,
    FinishReason.COORDINATOR_LOST: Outcome.NOT_COUNTED,
    FinishReason.SHUTDOWN: Outcome.NOT_COUNTED,
    FinishReason.PREEMPTED: Outcome.NOT_COUNTED,
    FinishReason.QUARANTINED: Outcome.ERROR,
    FinishReason.ENGINE_REJECTED: Outcome.ERROR,
}


def outcome_of(reason: FinishReason, *, was_dispatched: bool) -> Outcome:
    """What the ending says about the revision that the request was pinned to.

    Of what never reached a replica only `no_capacity` counts: the revision's replicas left those who waited for them.
    """
    if was_dispatched or reason is FinishReason.NO_CAPACITY:
        return _OUTCOME_BY_REASON[reason]
    return Outcome.NOT_COUNTED


@dataclass(frozen=True, slots=True)
class Sample:
    """One ended request. output_tokens: compared if it completed. tpot_ms: None where it has none.

    first_token_ms: from its dispatch to its first output, None without; how long it waited for a lane before is the pool's
    doing, and comes in bursts of its own.
    """

    workload_class: str
    outcome: Outcome
    first_token_ms: float | None = None
    tpot_ms: float | None = None
    output_tokens: Tokens = 0


class Tally(msgspec.Struct, frozen=True, gc=False):
    """Requests of one arm that count, and how many of them were errors and cancellations."""

    requests: int = 0
    errors: int = 0
    cancellations: int = 0


class Pairs(msgspec.Struct, frozen=True, gc=False):
    """Pairs of a canary's and a stable request, and in how many the canary's was worse by more than the tolerance."""

    pairs: int = 0
    worse: int = 0


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """Both arms over the same time. Of a rate the tallies tell, of what is measured the pairs."""

    stable: Tally = Tally()
    canary: Tally = Tally()
    first_token: Pairs = Pairs()
    per_token: Pairs = Pairs()
    longer_output: Pairs = Pairs()
    shorter_output: Pairs = Pairs()


class _Count(msgspec.Struct):
    """Trials and hits that grow."""

    trials: int = 0
    hits: int = 0

    def add(self, *, hit: bool) -> None:
        self.trials += 1
        self.hits += hit


class _Unused:
    """Of one workload class, the stable samples' values that no canary's sample was compared with yet, newest last."""

    __slots__ = ("first_token", "output", "tpot")

    def __init__(self) -> None:
        self.first_token = deque[float](maxlen=UNUSED_MAX)
        self.tpot = deque[float](maxlen=UNUSED_MAX)
        self.output = deque[float](maxlen=UNUSED_MAX)


class EvidenceWindow:
    """Gathers the evidence of one step. tolerances: what makes the canary's request of a pair worse.

    Only requests that were admitted at this step belong here, of both arms: else the first of a canary to end, which are its
    short ones, would be compared with stable ones of every length.

    A canary's value is compared with the newest unused one of its workload class, not the oldest: the stable revision has up to
    99 times as many, and an old one is from another time. Each is used once, so that no two pairs share one. A canary's
    value that finds none is compared with nothing.
    """

    def __init__(self, tolerances: Tolerances) -> None:
        self._tolerances = tolerances
        self._tallies = {arm: Tally() for arm in Arm}
        self._unused = defaultdict[str, _Unused](_Unused)  # as many as there are workload classes: a few rows of policy
        self._first_token, self._per_token, self._longer, self._shorter = _Count(), _Count(), _Count(), _Count()

    def add(self, arm: Arm, sample: Sample) -> None:
        """An ended request of this arm; in the order in which they ended."""
        if sample.outcome is Outcome.NOT_COUNTED:
            return
        known = self._tallies[arm]
        self._tallies[arm] = Tally(
            known.requests + 1,
            known.errors + (sample.outcome is Outcome.ERROR),
            known.cancellations + (sample.outcome is Outcome.CANCELLED),
        )
        unused = self._unused[sample.workload_class]
        if arm is Arm.STABLE:
            self._keep(sample, unused)
        else:
            self._compare(sample, unused)

    def evidence(self) -> Evidence:
        """What is known now."""
        counts = (self._first_token, self._per_token, self._longer, self._shorter)
        return Evidence(
            self._tallies[Arm.STABLE], self._tallies[Arm.CANARY], *(Pairs(count.trials, count.hits) for count in counts)
        )

    def _keep(self, sample: Sample, unused: _Unused) -> None:
        if sample.first_token_ms is not None:
            unused.first_token.append(sample.first_token_ms)
        if sample.tpot_ms is not None:
            unused.tpot.append(sample.tpot_ms)
        if sample.outcome is Outcome.GOOD:
            unused.output.append(sample.output_tokens)

    def _compare(self, sample: Sample, unused: _Unused) -> None:
        tolerances = self._tolerances
        if sample.first_token_ms is not None and unused.first_token:
            self._first_token.add(hit=_exceeds(sample.first_token_ms, unused.first_token.pop(), tolerances.first_token_percent))
        if sample.tpot_ms is not None and unused.tpot:
            self._per_token.add(hit=_exceeds(sample.tpot_ms, unused.tpot.pop(), tolerances.per_token_percent))
        if sample.outcome is Outcome.GOOD and unused.output:
            stable = unused.output.pop()
            self._longer.add(hit=_exceeds(sample.output_tokens, stable, tolerances.output_percent))
            self._shorter.add(hit=_exceeds(stable, sample.output_tokens, tolerances.output_percent))


def _exceeds(value: float, other: float, percent: int) -> bool:
    """Whether it is more than this much above the other; equal values never are."""
    return value * 100 > other * (100 + percent)
