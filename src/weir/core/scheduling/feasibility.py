"""Can a request start in time? The wait predicted at the door, from how long a unit of work has occupied a lane lately.

The model is the simplest that is true in both limits: with a free lane and nobody waiting the wait is nothing; behind work w
on k lanes that each need r per unit of it, w · r ÷ k and the time until a lane frees, one k-th of what a request occupies one.

r is Σ occupied time ÷ Σ cost, both decaying with a half-life of ten seconds towards a prior that never decays: a wrong estimate
meets evidence, and evidence from another hour loses to the prior. So a prior that is too pessimistic cannot lock the door for
good: an idle domain admits, whatever r says.
"""

from math import exp, log

from weir.core.scheduling.orders import Cost
from weir.units import NANOS_PER_SECOND, Millis, Nanos, Tokens

_HALF_LIFE_NS = 10 * NANOS_PER_SECOND
_BIAS_HALF_LIFE_NS = 30 * NANOS_PER_SECOND
_BIAS_PER_S = 0.3
_BIAS_MAX = log(4)
_PREFILL_KEPT = 0.98
"""Of older measurements at each new one: about fifty count."""
_SPREAD_MIN = 0.01
"""Lengths that are all alike say nothing about a token's share."""
_PRIOR_WEIGHT = 0.25
"""Of one request: a few observations outweigh any prior."""


class ServiceRate:
    """Lane time per unit of cost and per request. prior_ns: a request's lane time; prior_cost: its cost, both > 0."""

    __slots__ = ("_cost", "_last_ns", "_occupied_ns", "_prior_cost", "_prior_ns", "_requests")

    def __init__(self, prior_ns: Nanos, prior_cost: Cost) -> None:
        self._prior_ns = _PRIOR_WEIGHT * prior_ns
        self._prior_cost = _PRIOR_WEIGHT * prior_cost
        self._occupied_ns = 0.0
        self._cost = 0.0
        self._requests = 0.0
        self._last_ns: Nanos = 0

    def observe(self, cost: Cost, occupied_ns: Nanos, now_ns: Nanos) -> None:
        """A lane was freed after this long by a request of this cost."""
        self._decay(now_ns)
        self._occupied_ns += occupied_ns
        self._cost += cost
        self._requests += 1

    def lane_ns(self, cost: Cost, now_ns: Nanos) -> float:
        """Expected lane time of work of this cost."""
        self._decay(now_ns)
        return cost * (self._occupied_ns + self._prior_ns) / (self._cost + self._prior_cost)

    def request_ns(self, now_ns: Nanos) -> float:
        """Expected lane time of one request."""
        self._decay(now_ns)
        return (self._occupied_ns + self._prior_ns) / (self._requests + _PRIOR_WEIGHT)

    def _decay(self, now_ns: Nanos) -> None:
        if now_ns > self._last_ns:
            kept = 0.5 ** ((now_ns - self._last_ns) / _HALF_LIFE_NS)
            self._occupied_ns *= kept
            self._cost *= kept
            self._requests *= kept
            self._last_ns = now_ns


class PrefillTime:
    """Time from dispatch to first output by input length: a line through what was measured lately, by decayed least squares.

    A ratio would make a long input as slow, per token, as a short one, most of whose time is not its tokens'.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, input_tokens: Tokens, took_ns: Nanos) -> None:
        """A dispatched request showed its first output after this long."""
        x, y = float(input_tokens), float(took_ns)
        self._n = self._n * _PREFILL_KEPT + 1
        self._x = self._x * _PREFILL_KEPT + x
        self._y = self._y * _PREFILL_KEPT + y
        self._xx = self._xx * _PREFILL_KEPT + x * x
        self._xy = self._xy * _PREFILL_KEPT + x * y

    def expected_ns(self, input_tokens: Tokens) -> Nanos:
        """How long this input is expected to take; 0 before anything was measured, and never less than 0."""
        if not self._n:
            return 0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > mean_x * _SPREAD_MIN else 0.0
        return int(max(0.0, mean_y + slope * (input_tokens - mean_x)))


class WaitBias:
    """By what factor one flow's requests wait longer than the work ahead says: others that come later go before them.

    An integral controller on the logarithm of actual ÷ predicted. It moves with time, not with the number of requests, and
    slower than any wait that is admitted lasts, so that it does not swing; unobserved, it returns to 1.
    """

    __slots__ = ("_last_ns", "_log")

    def __init__(self, now_ns: Nanos) -> None:
        self._log = 0.0
        self._last_ns = now_ns

    def factor(self, now_ns: Nanos) -> float:
        """What a prediction is multiplied by, 1/4 … 4."""
        return exp(self._log * 0.5 ** ((now_ns - self._last_ns) / _BIAS_HALF_LIFE_NS))

    def observe(self, predicted_ms: float, waited_ms: float, now_ns: Nanos) -> None:
        """A request waited; predicted_ms > 0: with the factor of its time in it."""
        passed_s = min(now_ns - self._last_ns, NANOS_PER_SECOND) / NANOS_PER_SECOND
        miss = min(max(log(max(waited_ms, 1.0) / predicted_ms), -_BIAS_MAX), _BIAS_MAX)
        kept = log(self.factor(now_ns))
        self._log = min(max(kept + _BIAS_PER_S * passed_s * miss, -_BIAS_MAX), _BIAS_MAX)
        self._last_ns = now_ns


def predicted_wait_ms(work: Cost, lanes: int, rate: ServiceRate, now_ns: Nanos) -> Millis:
    """Time until an entry behind `work` starts on `lanes` ≥ 1 lanes that are all taken, rounded up."""
    behind_ns = rate.request_ns(now_ns) + rate.lane_ns(work, now_ns)
    return int(behind_ns / lanes / 1e6) + 1
