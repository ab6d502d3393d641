"""How many requests a replica may run at once: bounds, the rules, and where it ends on a replica that slows with its load."""

import heapq
from itertools import pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.concurrency import PATIENCE, QUIET_NS, WINDOW, AdaptiveLimit
from weir.units import NANOS_PER_SECOND, Nanos

LATE, IN_TIME = 1.01, 1.0
MOST, LANES = 64, 128
seen = st.tuples(st.floats(0, 4), st.integers(0, 300 * NANOS_PER_SECOND), st.integers(1, 80), st.integers(0, QUIET_NS))


@given(st.integers(1, 64), st.integers(1, 64), st.lists(seen, max_size=200))
def test_any_evidence_keeps_the_bounds_and_decides_the_limit(
    one: int, other: int, evidence: list[tuple[float, Nanos, int, Nanos]]
) -> None:
    """Protects replicas and their callers: least ≤ allowed ≤ most, changes are told, the same evidence gives the same limit."""
    least, most = sorted((one, other))
    limit, again, now_ns = AdaptiveLimit(most, least), AdaptiveLimit(most, least), 0
    for ratio, took_ns, running, passed_ns in evidence:
        now_ns += passed_ns
        before, began_ns = limit.allowed, max(0, now_ns - took_ns)
        assert limit.observe(ratio, began_ns, running, now_ns) == (limit.allowed != before)
        again.observe(ratio, began_ns, running, now_ns)
        assert least <= limit.allowed == again.allowed <= most


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _complete(limit: AdaptiveLimit, number: int, ratio: float, at_ns: Nanos, running: int | None = None) -> list[bool]:
    """So many requests begin and complete then; every time, whether the limit changed. running: None for all it allows."""
    return [limit.observe(ratio, at_ns, limit.allowed if running is None else running, at_ns) for _ in range(number)]


def _lowered(at_ns: Nanos = 1) -> AdaptiveLimit:
    """A limit of MOST that fell to 8 of 10 that ran."""
    limit = AdaptiveLimit(MOST, 2)
    _complete(limit, 2, LATE, at_ns, running=10)
    assert limit.allowed == 8
    return limit


def test_one_late_request_in_twenty_is_within_the_target_and_two_are_not() -> None:
    """Protects the meaning of p95: 19 of 20 in time keep the limit, and the second late one lowers it at once."""
    limit = AdaptiveLimit(10, 1)
    _complete(limit, 1, LATE, 0)
    assert not any(_complete(limit, WINDOW - 1, IN_TIME, 0)) and limit.allowed == 10
    assert _complete(limit, 2, LATE, 0) == [False, True] and limit.allowed == 8


def test_a_generation_is_judged_as_one() -> None:
    """Protects a large replica from noise: of a hundred that ran at once, five may be late wherever they come."""
    limit = AdaptiveLimit(100, 1)
    assert not any(_complete(limit, 90, IN_TIME, 0))
    assert _complete(limit, 6, LATE, 0) == [False] * 5 + [True] and limit.allowed == 80


def test_it_falls_below_what_ran_and_never_below_the_least() -> None:
    """Protects a replica that is late far below its limit, and those who wait for it: there is always a lane to try."""
    limit = _lowered()
    for at_ns, allowed in ((2, 6), (3, 4), (4, 3), (5, 2), (6, 2)):
        assert _complete(limit, 2, LATE, at_ns)[-1] == (at_ns < 6)
        assert limit.allowed == allowed


def test_what_began_before_a_decrease_lowers_it_no_further() -> None:
    """Protects throughput: all that is in flight is late for one reason, and that is answered once."""
    limit = _lowered(at_ns=5)
    assert not any(limit.observe(LATE, 4, 10, 9) for _ in range(100)) and limit.allowed == 8
    assert [limit.observe(LATE, 5, 8, 9) for _ in range(2)] == [False, True] and limit.allowed == 6


def test_only_a_limit_that_was_reached_rises() -> None:
    """Protects the target: what never ran at once was never seen to be in time."""
    limit = _lowered()
    assert not any(_complete(limit, 5 * WINDOW, IN_TIME, 2, running=7)) and limit.allowed == 8
    assert _complete(limit, WINDOW, IN_TIME, 2) == [False] * (WINDOW - 1) + [True] and limit.allowed == 9


def test_a_limit_that_failed_is_tried_less_often() -> None:
    """Protects the target of a replica with few lanes, where one more is much: after five good windows, then as any other."""
    limit = _lowered()
    assert _complete(limit, WINDOW, IN_TIME, 2)[-1] and limit.allowed == 9
    assert not any(_complete(limit, PATIENCE * WINDOW - 1, IN_TIME, 2))
    assert _complete(limit, 1, IN_TIME, 2) == [True] and limit.allowed == 10
    for allowed in (11, 12, 13):
        assert _complete(limit, WINDOW, IN_TIME, 2)[-1] and limit.allowed == allowed


def test_a_step_is_a_sixteenth_and_ends_at_the_most() -> None:
    """Protects large replicas from minutes of idle lanes, and every replica from more than it has."""
    limit = AdaptiveLimit(40, 1)
    _complete(limit, 3, LATE, 1, running=44)
    assert limit.allowed == 32
    limits = []
    for _ in range(3 * PATIENCE):
        _complete(limit, limit.allowed, IN_TIME, 2)
        limits.append(limit.allowed)
    assert sorted(set(limits)) == [34, 36, 38, 40] and limits[-1] == 40


def test_without_evidence_it_rises_a_step_a_minute() -> None:
    """Protects a replica from a verdict that is old: none stays low for ever, also one that nobody uses."""
    limit = _lowered(at_ns=0)
    allowed: list[int] = []
    for minute in range(1, 200):
        assert not limit.age(minute * QUIET_NS - 1)
        assert limit.age(minute * QUIET_NS) == (limit.allowed > (allowed[-1] if allowed else 8))
        allowed.append(limit.allowed)
    assert allowed[:3] == [9, 10, 11] and allowed[-1] == MOST
    assert all(0 <= later - sooner <= 3 for sooner, later in pairwise(allowed))


def test_evidence_after_a_silence_is_the_first_of_a_new_window() -> None:
    """Protects the limit from being judged by two times at once; a silence is noticed also where nobody asked."""
    limit = _lowered(at_ns=0)
    _complete(limit, 1, LATE, 1)
    assert _complete(limit, 1, LATE, 1 + QUIET_NS) == [True] and limit.allowed == 9
    assert _complete(limit, WINDOW - 1, IN_TIME, 1 + QUIET_NS)[-1] and limit.allowed == 10


def test_what_runs_for_minutes_is_no_silence() -> None:
    """Protects the target of long answers: nothing completes for minutes, and a request that takes those says why."""
    limit, took_ns = _lowered(at_ns=0), 5 * QUIET_NS
    assert not limit.observe(IN_TIME, 0, 8, took_ns)
    assert not limit.age(3 * took_ns - 1) and limit.age(3 * took_ns)


# ── a replica that slows with its load ───────────────────────────────────────────────────────────────────────────────


class Plant:
    """A replica under more work than it can do, whose tokens take alone + each · running seconds; the target is one second.

    What it reports of a request is its mean time per token, with noise. ratios and limits: of every completed request.
    """

    def __init__(self, limit: AdaptiveLimit, alone: float, each: float, noise: float) -> None:
        self.limit, self.alone, self.each, self.noise = limit, alone, each, noise
        self.ratios: list[float] = []
        self.limits: list[int] = []
        self._random = Random(1)
        self._now_s = self._tokens = 0.0  # the time, and how many tokens each one that ran so long has
        self._running: list[tuple[float, int, int, float]] = []  # tokens then, number, tokens of its own, began

    @property
    def ideal(self) -> float:
        """The limit at which one in twenty is late."""
        return min(LANES, (exp(-1.645 * self.noise) - self.alone) / self.each)

    def run(self, requests: int) -> None:
        """Until so many more have completed."""
        for number in range(requests):
            while len(self._running) < self.limit.allowed:
                tokens = self._random.randint(50, 400)
                heapq.heappush(self._running, (self._tokens + tokens, len(self.ratios) + number, tokens, self._now_s))
            self._complete_first()

    def _complete_first(self) -> None:
        until, _, tokens, began_s = self._running[0]
        self._now_s += (until - self._tokens) * (self.alone + self.each * len(self._running))
        self._tokens = until
        ratio = (self._now_s - began_s) / tokens * self._random.lognormvariate(0, self.noise)
        self.limit.observe(ratio, round(began_s * 1e9), len(self._running), round(self._now_s * 1e9))
        heapq.heappop(self._running)
        self.ratios.append(ratio)
        self.limits.append(self.limit.allowed)

    def check_since(self, number: int) -> None:
        """Since then it kept to the target, near what would be best, and wasted little."""
        ratios, limits = self.ratios[number:], self.limits[number:]
        blocks = [sorted(ratios[first : first + 100])[94] for first in range(0, len(ratios), 100)]
        assert 0.8 <= sum(blocks) / len(blocks) <= 1.05
        assert sum(ratio > 1 for ratio in ratios) <= 0.06 * len(ratios)
        assert min(limits) >= self.ideal / 2
        assert 0.75 * self.ideal <= sum(limits) / len(limits) <= 1.05 * self.ideal


@pytest.mark.parametrize("is_low", [False, True], ids=["from above", "from below"])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize(("alone", "each"), [(0.5, 0.05), (0.2, 0.14), (0.3, 0.012), (0.6, 0.006)])
def test_it_converges_and_follows_a_replica_that_becomes_faster(alone: float, each: float, noise: float, is_low: bool) -> None:
    """Protects latency and throughput: the p95 ends at the target from any start, and again after the load costs half."""
    limit = AdaptiveLimit(LANES, 1)
    while is_low and limit.allowed > 1:
        _complete(limit, 4, LATE, 0)
    plant = Plant(limit, alone, each, noise)
    plant.run(5_000)
    plant.check_since(2_000)
    plant.each /= 2
    plant.run(7_000)
    plant.check_since(9_000)
