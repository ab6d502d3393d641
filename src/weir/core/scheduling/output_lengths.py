"""How long will the answer be? Decayed histograms of what was produced, per (tenant, application, revision).

A young histogram is shrunk to that of its revision, and that one to the length which the revision's registrant declared as
typical. Only lengths are kept, never text. The expectation is of min(length, limit): a request cannot exceed what it asked for.
"""

from collections import OrderedDict
from typing import TypeAlias

from weir.units import Tokens, ceil_div

Caller: TypeAlias = tuple[str, str, str]
"""(tenant, application, revision)."""

_OBSERVATIONS_MAX = 256
"""At this many, all counts are halved: older answers fade."""
_PRIOR_OBSERVATIONS = 8
"""How many own answers weigh as much as what is expected without them."""
_CALLERS_MAX = 10_000
_BUCKETS = 21
"""The last one is of a million tokens and more."""


class _Histogram:
    """Buckets of powers of two: number n is of lengths whose binary form has n digits. Sums make the means exact.

    longest: the highest bucket that anything was counted in; total: of all lengths.
    """

    __slots__ = ("counts", "longest", "observations", "sums", "total")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.sums = [0] * _BUCKETS
        self.observations = self.total = self.longest = 0

    def observe(self, tokens: Tokens) -> None:
        bucket = min(tokens.bit_length(), _BUCKETS - 1)
        self.counts[bucket] += 1
        self.sums[bucket] += tokens
        self.total += tokens
        self.longest = max(self.longest, bucket)
        self.observations += 1
        if self.observations >= _OBSERVATIONS_MAX:
            self._halve()

    def _halve(self) -> None:
        """Keep half of each bucket, and its mean; one that is alone stays, or rare long answers would be forgotten first."""
        pairs = list(zip(self.counts, self.sums, strict=True))
        self.sums = [total * ((count + 1) // 2) // count if count else 0 for count, total in pairs]
        self.counts = [(count + 1) // 2 for count, _ in pairs]
        self.observations, self.total = sum(self.counts), sum(self.sums)

    def total_up_to(self, limit: Tokens) -> Tokens:
        """The sum over observations of min(length, limit) ≥ 1; in the limit's own bucket lengths count as its mean."""
        own = min(limit.bit_length(), _BUCKETS - 1)
        within = min(self.sums[own], self.counts[own] * limit)
        if own >= self.longest:  # no answer was longer than its limit: mostly so, and every request asks
            return self.total - self.sums[own] + within
        return sum(self.sums[:own]) + within + limit * sum(self.counts[own + 1 :])


class OutputLengths:
    """Histograms of the callers seen last, and of every revision."""

    def __init__(self) -> None:
        self._callers: OrderedDict[Caller, _Histogram] = OrderedDict()
        self._revisions: dict[str, _Histogram] = {}

    def observe(self, caller: Caller, tokens: Tokens) -> None:
        """One choice of an answer that ended by itself had this many tokens, ≥ 0."""
        own = self._callers.get(caller)
        if own is None:
            own = self._callers[caller] = _Histogram()
            if len(self._callers) > _CALLERS_MAX:
                self._callers.popitem(last=False)
        else:
            self._callers.move_to_end(caller)
        own.observe(tokens)
        self._revisions.setdefault(caller[2], _Histogram()).observe(tokens)

    def expected(self, caller: Caller, limit: Tokens, typical: Tokens) -> Tokens:
        """Expected tokens of one choice, 1 … limit. typical: declared for the revision; used while nothing was seen."""
        expected = min(typical, limit)
        for histogram in (self._revisions.get(caller[2]), self._callers.get(caller)):
            if histogram is not None:
                total = histogram.total_up_to(limit) + _PRIOR_OBSERVATIONS * expected
                expected = ceil_div(total, histogram.observations + _PRIOR_OBSERVATIONS)
        return max(1, min(expected, limit))
