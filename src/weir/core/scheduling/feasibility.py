"""Can a request start in time? The wait predicted at the door, from how long a unit of work has occupied a lane lately.

The model is the simplest that is true in both limits: with a free lane and nobody waiting the wait is nothing; behind work w
on k lanes that each need r per unit of it, w · r ÷ k and the time until a lane frees, one k-th of what a request occupies one.

r is Σ occupied time ÷ Σ cost, both decaying with a half-life of ten seconds towards a prior that never decays: a wrong estimate
meets evidence, and evidence from another hour loses to the prior. What runs longer on average than what ended lately lengthens
both: answers of a minute are seen before the first one ends. So a prior that is too pessimistic cannot lock the door for
good: an idle domain admits, whatever r says.
"""

from math import exp, log

from weir.core.admission import EVIDENCE_HALF_LIFE_MS
from weir.core.scheduling.orders import Cost
from weir.units import NANOS_PER_SECOND, Nanos, Tokens, ns_from_ms

_HALF_LIFE_NS = ns_from_ms(EVIDENCE_HALF_LIFE_MS)
_BIAS_HALF_LIFE_NS = 30 * NANOS_PER_SECOND
_BIAS_PER_S = 0.3
_BIAS_MAX = log(4)
_CAUTION_STEP, _CAUTION_PER_S, _CAUTION_MAX = 0.1, 0.3, log(2)
_TURNS_SEEN_NS = NANOS_PER_SECOND // 2
_PREFILL_KEPT = 0.98
"""Of older measurements at each new one: about fifty count."""
_SPREAD_MIN = 0.01
"""Lengths that are all alike say nothing about a token's share."""
_PRIOR_WEIGHT = 0.25
"""Of one request: a few observations outweigh any prior."""


class ServiceRate:
    """Lane time per unit of cost and per request. prior_ns: a request's lane time; prior_cost: its cost, both > 0."""

    __slots__ = (
        "_began_ns",
        "_cost",
        "_last_ns",
        "_occupied_ns",
        "_prior_cost",
        "_prior_ns",
        "_requests",
        "_running",
        "_running_cost",
    )

    def __init__(self, prior_ns: Nanos, prior_cost: Cost) -> None:
        self._prior_ns = _PRIOR_WEIGHT * prior_ns
        self._prior_cost = _PRIOR_WEIGHT * prior_cost
        self._occupied_ns = 0.0
        self._cost = 0.0
        self._requests = 0.0
        self._running = 0
        self._running_cost: Cost = 0
        self._began_ns: Nanos = 0  # the sum over those that run
        self._last_ns: Nanos = 0

    def assume(self, prior_ns: Nanos) -> None:
        """A request's lane time as a warm-up says, > 0; its cost stays."""
        self._prior_ns = _PRIOR_WEIGHT * prior_ns

    def observe(self, cost: Cost, occupied_ns: Nanos, now_ns: Nanos) -> None:
        """A lane was freed after this long by a request of this cost."""
        self._decay(now_ns)
        self._occupied_ns += occupied_ns
        self._cost += cost
        self._requests += 1

    def began(self, cost: Cost, now_ns: Nanos) -> None:
        """A request of this cost took a lane."""
        self._running += 1
        self._running_cost += cost
        self._began_ns += now_ns

    def left(self, cost: Cost, began_ns: Nanos) -> None:
        """A request of this cost that took its lane then holds it no more."""
        self._running -= 1
        self._running_cost -= cost
        self._began_ns -= began_ns

    def lane_ns(self, cost: Cost, now_ns: Nanos) -> float:
        """Expected lane time of work of this cost."""
        self._decay(now_ns)
        return cost * self._lengthened(now_ns) * (self._occupied_ns + self._prior_ns) / (self._cost + self._prior_cost)

    def request_ns(self, now_ns: Nanos) -> float:
        """Expected lane time of one request."""
        self._decay(now_ns)
        return self._lengthened(now_ns) * self._ended_request_ns()

    def _ended_request_ns(self) -> float:
        """The prior's part is that of what runs, whose cost is known: it need not be a typical request."""
        prior_ns = self._prior_ns
        if self._running:
            prior_ns *= _PRIOR_WEIGHT * self._running_cost / self._running / self._prior_cost
        return (self._occupied_ns + prior_ns) / (self._requests + _PRIOR_WEIGHT)

    def _lengthened(self, now_ns: Nanos) -> float:
        """How much longer than what ended lately runs what runs now, on average so far; 1 at least."""
        if not self._running:
            return 1.0
        return max(1.0, (now_ns - self._began_ns / self._running) / self._ended_request_ns())

    def _decay(self, now_ns: Nanos) -> None:
        if now_ns > self._last_ns:
            kept = 0.5 ** ((now_ns - self._last_ns) / _HALF_LIFE_NS)
            self._occupied_ns *= kept
            self._cost *= kept
            self._requests *= kept
            self._last_ns = now_ns


class PrefillTime:
    """Time from dispatch to first output by input length: a line through what was measured lately, by decayed least squares.

    A ratio would make a long input as slow, per token, as a short one, most of whose time is not its tokens'. Beyond the
    longest input that was seen it goes on as the caller assumes, and it fades towards that with a half-life of ten seconds:
    what was never measured, or not lately, drops nobody, so that a wrong estimate meets evidence.
    """

    __slots__ = ("_last_ns", "_line", "_longest", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._longest = 0.0
        self._last_ns: Nanos = 0
        self._line: tuple[float, float, float] | None = None  # (mean input, mean time, slope); None: not known or out of date

    def observe(self, input_tokens: Tokens, took_ns: Nanos, now_ns: Nanos) -> None:
        """A dispatched request showed its first output after this long."""
        x, y = float(input_tokens), float(took_ns)
        self._n = self._n * _PREFILL_KEPT + 1
        self._x = self._x * _PREFILL_KEPT + x
        self._y = self._y * _PREFILL_KEPT + y
        self._xx = self._xx * _PREFILL_KEPT + x * x
        self._xy = self._xy * _PREFILL_KEPT + x * y
        self._longest = max(self._longest * _PREFILL_KEPT, x)
        self._last_ns = now_ns
        self._line = None

    def expected_ns(self, input_tokens: Tokens, now_ns: Nanos, idle_ns: Nanos = 0, token_ns: float = 0.0) -> Nanos:
        """How long this input is expected to take. On an idle replica, 0 while unknown: idle_ns in all, token_ns per token."""
        if not self._n:
            return idle_ns
        if self._line is None:
            self._line = self._fitted()
        mean_x, mean_y, slope = self._line
        line_ns = mean_y + slope * (min(input_tokens, self._longest) - mean_x)
        line_ns += token_ns * max(0.0, input_tokens - self._longest)
        kept = 0.5 ** ((now_ns - self._last_ns) / _HALF_LIFE_NS)
        return int(max(0.0, line_ns) * kept + idle_ns * (1 - kept))

    def _fitted(self) -> tuple[float, float, float]:
        """The line through what was measured: kept, because every request asks several times."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > mean_x * _SPREAD_MIN else 0.0
        return mean_x, mean_y, slope


class DecodeTime:
    """Time per output token after the first: a decayed mean of what was measured lately, towards what the caller assumes."""

    __slots__ = ("_last_ns", "_mean_ms", "_n")

    def __init__(self) -> None:
        self._n = self._mean_ms = 0.0
        self._last_ns: Nanos = 0

    def observe(self, token_ms: float, now_ns: Nanos) -> None:
        """An answer took this long for each of its later tokens."""
        self._n = self._n * _PREFILL_KEPT + 1
        self._mean_ms += (token_ms - self._mean_ms) / self._n
        self._last_ns = now_ns

    def expected_ms(self, now_ns: Nanos, idle_ms: float) -> float:
        """Per token now. idle_ms: on an idle replica."""
        if not self._n:
            return idle_ms
        kept: float = 0.5 ** ((now_ns - self._last_ns) / _HALF_LIFE_NS)
        return self._mean_ms * kept + idle_ms * (1 - kept)


class FloorPace:
    """How fast the floor of a domain's order rises while somebody waits: how long a lead over it takes to be made up.

    Requests that come later go before one whose flow is ahead; what waits now does not show them, this does.
    """

    __slots__ = ("_passed_ns", "_risen")

    def __init__(self) -> None:
        self._risen = 0.0
        self._passed_ns = 0.0

    def observe(self, risen: Cost, passed_ns: Nanos) -> None:
        """The floor rose by so much, over a time in which somebody waited throughout."""
        kept = 0.5 ** (passed_ns / _HALF_LIFE_NS)
        self._risen = self._risen * kept + max(0, risen)
        self._passed_ns = self._passed_ns * kept + passed_ns

    def wait_ns(self, lead: Cost) -> float:
        """Until the floor has risen by a lead; 0 while it was never seen to rise."""
        return lead * self._passed_ns / self._risen if self._risen else 0.0


class TurnPace:
    """How much of lane time a unit of cost takes while somebody waits: that of all lanes, over what got a turn meanwhile.

    What ended says the same in the mean, but late, and not of a mixture in which a few answers run for minutes beside many that
    run for moments. Time since the last turn counts, so that lanes which do not come free are seen at once, for as long as
    somebody waits for one. What was seen fades with a half-life of ten seconds, also while nobody waits.
    """

    __slots__ = ("_cost", "_lane_ns", "_lanes", "_seen_ns", "_since_ns", "_turns", "_waits")

    def __init__(self) -> None:
        self._lane_ns = self._cost = self._seen_ns = self._turns = 0.0
        self._lanes = 0
        self._since_ns: Nanos = 0
        self._waits = False

    def waits(self, lanes: int, now_ns: Nanos) -> None:
        """Somebody has to wait now, with so many lanes that can be used; said while others wait, it changes nothing."""
        if not self._waits:
            self._pass(now_ns)
            self._waits, self._lanes = True, lanes

    def nobody_waits(self, now_ns: Nanos) -> None:
        """Time that passes from now on says nothing."""
        self._pass(now_ns)
        self._waits = False

    def turn(self, cost: Cost, lanes: int, now_ns: Nanos) -> None:
        """A request of this cost got its turn. lanes: that can be used from now on."""
        if self._waits:
            self._pass(now_ns)
            self._cost += cost
            self._turns += 1
            self._lanes = lanes

    def lane_ns(self, cost: Cost, now_ns: Nanos) -> float | None:
        """Expected lane time of work of this cost; None while too little was seen lately."""
        passed_ns = now_ns - self._since_ns
        kept = 0.5 ** (passed_ns / _HALF_LIFE_NS)
        seen_ns = self._seen_ns * kept + self._waits * passed_ns
        turns = self._turns if self._waits else self._turns * kept
        if turns < 1 or seen_ns < _TURNS_SEEN_NS:
            return None
        return cost * (self._lane_ns + self._waits * passed_ns * self._lanes) / self._cost

    @property
    def mean_cost(self) -> Cost:
        """Of those who got their turn lately; 0 while too few did."""
        return int(self._cost / self._turns) if self._turns >= 1 else 0

    def _pass(self, now_ns: Nanos) -> None:
        passed_ns = now_ns - self._since_ns
        kept = 0.5 ** (passed_ns / _HALF_LIFE_NS)
        self._lane_ns = self._lane_ns * kept + self._waits * passed_ns * self._lanes
        self._seen_ns = self._seen_ns * kept + self._waits * passed_ns
        self._cost *= kept
        self._turns *= kept
        self._since_ns = now_ns


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


class Caution:
    """A factor on every prediction of a domain, 1 … 2, that grows while admitted requests expire in its queue.

    Predictions are right on average, and the more flows there are the wider they spread: this keeps what is admitted in vain to
    a few in a thousand. It rises with each one, bounded per second, and fades with a half-life of thirty seconds.
    """

    __slots__ = ("_last_ns", "_log")

    def __init__(self) -> None:
        self._log = 0.0
        self._last_ns: Nanos = 0

    def factor(self, now_ns: Nanos) -> float:
        """What predictions are multiplied by."""
        return exp(self._log * 0.5 ** ((now_ns - self._last_ns) / _BIAS_HALF_LIFE_NS))

    def expired(self, now_ns: Nanos) -> None:
        """An admitted request waited in vain."""
        passed_s = (now_ns - self._last_ns) / NANOS_PER_SECOND
        self._log = min(log(self.factor(now_ns)) + min(_CAUTION_STEP, _CAUTION_PER_S * passed_s), _CAUTION_MAX)
        self._last_ns = now_ns


def predicted_wait_ms(work: Cost, lanes: float, rate: ServiceRate, now_ns: Nanos) -> float:
    """Time until an entry behind `work` starts on lanes that are all taken. lanes > 0: shared ones count in part."""
    return (rate.request_ns(now_ns) + rate.lane_ns(work, now_ns)) / lanes / 1e6
