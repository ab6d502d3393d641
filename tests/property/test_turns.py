"""The pace of turns: what a wait is predicted from while somebody waits, right for mixtures, at once, and deaf to silence."""

from heapq import heapify, heapreplace
from math import log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weir.core.scheduling.feasibility import TurnPace
from weir.units import NANOS_PER_SECOND as SECOND
from weir.units import Nanos

COST = 1_000
TENTH: Nanos = SECOND // 10
FADING_S = 10 / log(2)
"""Of evidence that fades with a half-life of ten seconds so much counts in the long run."""


def steady(turns: int = 1_000, lanes: int = 8) -> tuple[TurnPace, Nanos]:
    """A pace of ten turns a second while somebody always waits, and the time of the last one."""
    pace = TurnPace()
    pace.waits(lanes, 0)
    for number in range(1, turns + 1):
        pace.turn(COST, lanes, number * TENTH)
    return pace, turns * TENTH


def wait_s(pace: TurnPace, turns: int, lanes: int, now_ns: Nanos) -> float:
    """Until so many more have had their turns."""
    lane_ns = pace.lane_ns(turns * COST, now_ns)
    assert lane_ns is not None
    return lane_ns / lanes / SECOND


class Mixture:
    """Lanes that are never idle, two thirds of them on answers of a minute: one in six hundred, among moments."""

    LANES, SHORT_NS, LONG_NS, EVERY = 30, SECOND // 20, 60 * SECOND, 600

    def __init__(self) -> None:
        busy = [(3 * SECOND * number, 3 * SECOND * number - self.LONG_NS) for number in range(1, 21)]
        self.running = busy + [(number * self.SHORT_NS // 10, 0) for number in range(1, 11)]  # (until, since)
        heapify(self.running)
        self.pace = TurnPace()
        self.pace.waits(self.LANES, 0)
        self.turns: list[Nanos] = []
        self.ended_ns = 0

    def turn(self) -> Nanos:
        """A lane comes free, and the next one takes it."""
        now_ns, since_ns = self.running[0]
        self.ended_ns += now_ns - since_ns
        self.turns.append(now_ns)
        took_ns = self.LONG_NS if len(self.turns) % self.EVERY == 0 else self.SHORT_NS
        heapreplace(self.running, (now_ns + took_ns, now_ns))
        self.pace.turn(COST, self.LANES, now_ns)
        return now_ns

    @property
    def mean_age_s(self) -> float:
        """Of what runs."""
        return sum(self.turns[-1] - since for _, since in self.running) / len(self.running) / SECOND


def test_a_mixture_of_a_few_long_answers_and_many_short_ones() -> None:
    """Protects the door of a busy pool: a few answers of a minute beside many of a moment make no prediction wrong."""
    world, predicted = Mixture(), list[tuple[int, float]]()
    for number in range(8_000):
        now_ns = world.turn()
        if 1_000 <= number < 7_000 and number % 50 == 0:
            predicted.append((number, wait_s(world.pace, 200, world.LANES, now_ns)))
            shorts = [until - since for until, since in world.running if until - since < SECOND]
            assert world.mean_age_s > 100 * sum(shorts) / len(shorts) / SECOND
    assert world.mean_age_s > 100 * world.ended_ns / len(world.turns) / SECOND
    for number, expected_s in predicted:
        took_s = (world.turns[number + 200] - world.turns[number]) / SECOND
        assert 1 / 1.5 < expected_s / took_s < 1.5, number


@pytest.mark.parametrize("quiet_s", [1, 5, 15])
def test_lanes_that_come_free_no_more_are_seen_at_once(quiet_s: int) -> None:
    """Protects the door from a pool that hangs: every moment without a turn lengthens what is predicted, before any ends."""
    pace, now_ns = steady()
    before_s = wait_s(pace, 20, 8, now_ns)
    assert before_s == pytest.approx(2.0)
    after_s = wait_s(pace, 20, 8, now_ns + quiet_s * SECOND)
    assert after_s == pytest.approx(before_s * (1 + quiet_s / FADING_S), rel=0.01)
    assert wait_s(pace, 20, 8, now_ns + 1) > before_s


def test_the_loss_of_a_replica_scales_it() -> None:
    """Protects admitted requests: from the moment of a loss work is done on what is left, and evidence agrees with that."""
    pace, now_ns = steady()
    assert wait_s(pace, 20, 8, now_ns) == pytest.approx(2.0)
    assert wait_s(pace, 20, 4, now_ns) == pytest.approx(4.0), "at once"
    for number in range(1, 200):
        pace.turn(COST, 4, now_ns + 2 * number * TENTH)
        assert wait_s(pace, 20, 4, now_ns + 2 * number * TENTH) == pytest.approx(4.0, rel=0.02), "and for good"


def test_silence_does_not_count() -> None:
    """Protects the first ones after a quiet time: nobody waited, so it says nothing, and nor does a turn without a wait."""
    pace, now_ns = steady()
    before = pace.lane_ns(COST, now_ns)
    pace.nobody_waits(now_ns)
    later_ns = now_ns + 20 * SECOND
    pace.turn(7 * COST, 8, later_ns)
    assert pace.lane_ns(COST, later_ns) == before
    pace.waits(8, later_ns)
    assert pace.lane_ns(COST, later_ns) == pytest.approx(before)


def test_what_was_long_ago_is_forgotten() -> None:
    """Protects the first ones after a quiet hour from the pace before it, and makes no lanes hang that only were not needed."""
    pace, now_ns = steady()
    pace.nobody_waits(now_ns)
    hour_ns = now_ns + 3_600 * SECOND
    assert pace.lane_ns(COST, hour_ns) is None
    pace.waits(8, hour_ns)
    assert pace.lane_ns(COST, hour_ns + SECOND // 4) is None
    for number in range(1, 11):
        pace.turn(COST, 8, hour_ns + number * TENTH)
    assert wait_s(pace, 10, 8, hour_ns + SECOND) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("quiet_s", [60, 600, 10_500])
def test_one_wait_without_a_turn_is_no_pace(quiet_s: int) -> None:
    """Protects the door after a quiet time: one that waits a second in vain leaves what it would have on a new pool."""
    pace, now_ns = steady()
    pace.nobody_waits(now_ns)
    now_ns += quiet_s * SECOND
    pace.waits(8, now_ns)
    pace.nobody_waits(now_ns + SECOND)
    lane_ns = pace.lane_ns(COST, now_ns + SECOND)
    assert lane_ns is None or lane_ns < 60 * 8 * SECOND


def test_only_the_first_of_those_who_wait_begins_it() -> None:
    """Protects the measure: who joins a queue that is there already makes its time no shorter."""
    pace, now_ns = steady()
    later_ns = now_ns + SECOND
    before = pace.lane_ns(COST, later_ns)
    pace.waits(1, later_ns)
    assert pace.lane_ns(COST, later_ns) == before


def test_too_little_says_nothing() -> None:
    """Protects an idle fleet from its first burst: before half a second of waiting was seen there is no pace."""
    pace = TurnPace()
    assert pace.lane_ns(COST, 0) is None
    pace.waits(8, 0)
    assert pace.lane_ns(COST, SECOND) is None
    for number in range(1, 5):
        pace.turn(COST, 8, number * TENTH)
        assert pace.lane_ns(COST, number * TENTH) is None
    for number in range(5, 7):
        pace.turn(COST, 8, number * TENTH)
    assert wait_s(pace, 1, 8, 6 * TENTH) == pytest.approx(0.1)


@example([(1, SECOND // 2, 1)], 1, 1)
@example([(1, SECOND, 1)] * 5, 1, 60 * SECOND)
@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 5 * SECOND), st.integers(1, 64)), min_size=1, max_size=60),
    st.integers(1, 10_000),
    st.integers(0, 60 * SECOND),
)
def test_the_pace_stays_among_what_was_seen(seen: list[tuple[int, int, int]], asked: int, quiet_ns: Nanos) -> None:
    """Protects predictions: a mean of what turns took, in proportion to the work, and longer for every moment without one."""
    pace, now_ns, before_lanes, taken = TurnPace(), 0, 1, list[float]()
    pace.waits(before_lanes, 0)
    for cost, passed_ns, lanes in seen:
        now_ns += passed_ns
        pace.turn(cost, lanes, now_ns)
        taken.append(passed_ns * before_lanes / cost)
        before_lanes = lanes
    each_ns, whole_ns = pace.lane_ns(1, now_ns), pace.lane_ns(asked, now_ns)
    if each_ns is None or whole_ns is None:
        assert now_ns < SECOND  # waits that are forgotten count less
        return
    assert min(taken) * 0.999 <= each_ns <= max(taken) * 1.001
    assert whole_ns == pytest.approx(asked * each_ns)
    later_ns = pace.lane_ns(asked, now_ns + quiet_ns)
    assert later_ns is not None and later_ns >= whole_ns
