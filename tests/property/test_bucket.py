"""The per-minute bucket against a fluid model of it, and the bound of policy 1 by brute force over every window."""

import copy
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.ledger.bucket import SCALE, Bucket
from weir.units import NANOS_PER_SECOND, ceil_div


@dataclass(frozen=True)
class TakeStep:
    units: int


@dataclass(frozen=True)
class SettleStep:
    pick: int
    used_units: int


@dataclass(frozen=True)
class RateStep:
    rate: int


Step: TypeAlias = TakeStep | SettleStep | RateStep

UNITS = st.integers(0, 12)
ELAPSED_NS = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 90 * NANOS_PER_SECOND))
TAKES = st.builds(TakeStep, UNITS)
SETTLES = st.builds(SettleStep, st.integers(0, 5), UNITS)
RATES = st.builds(RateStep, st.integers(0, 12))
HISTORIES = st.lists(st.tuples(ELAPSED_NS, st.one_of(TAKES, TAKES, SETTLES, SETTLES, RATES)), max_size=40)


@dataclass
class Segment:
    """What one take put into the queue: its size, and what of it has not drained; volumes."""

    size: int
    left: int


@dataclass
class FluidQueue:
    """The specification: takes stand in a queue that drains from the front at the rate."""

    rate: int
    segments: list[Segment] = field(default_factory=list)

    def level(self) -> int:
        return sum(segment.left for segment in self.segments)

    def drain(self, elapsed_ns: int) -> None:
        volume = self.rate * elapsed_ns
        for segment in self.segments:
            drained = min(segment.left, volume)
            segment.left -= drained
            volume -= drained

    def clamp(self, rate: int) -> None:
        self.rate = rate
        excess = max(0, self.level() - rate * SCALE)
        for segment in reversed(self.segments):
            cut = min(segment.left, excess)
            segment.left -= cut
            segment.size -= cut
            excess -= cut


@dataclass
class Admitted:
    at_ns: int
    lowered: int  # how often the rate had been lowered before
    rate: int
    volume: int  # rate · time, integrated up to now
    units: int  # settled, or taken while it is open
    segment: Segment
    open: bool = True


class Comparison:
    """Runs one history on the bucket and on the model, and compares after every step."""

    def __init__(self, rate: int) -> None:
        self.now_ns, self.lowered, self.volume = 0, 0, 0
        self.bucket, self.model = Bucket(rate, 0), FluidQueue(rate)
        self.admitted: list[Admitted] = []

    def run(self, history: list[tuple[int, Step]]) -> None:
        for elapsed_ns, step in history:
            self.now_ns += elapsed_ns
            self.volume += self.model.rate * elapsed_ns
            self.model.drain(elapsed_ns)
            match step:
                case TakeStep(units):
                    self._take(units)
                case SettleStep(pick, used_units):
                    self._settle(pick, used_units)
                case RateStep(rate):
                    self._change_rate(rate)
            used = self.bucket.used(self.now_ns)
            assert used == ceil_div(self.model.level(), SCALE)
            assert 0 <= used <= self.bucket.rate
            assert self.bucket.remaining(self.now_ns) == self.bucket.rate - used

    def _take(self, units: int) -> None:
        fits = self.model.level() + units * SCALE <= self.model.rate * SCALE
        assert (self.bucket.wait_ns(units, self.now_ns) == 0) == fits
        if not fits:
            return
        segment = Segment(units * SCALE, units * SCALE)
        self.model.segments.append(segment)
        self.bucket.take(len(self.admitted), units, self.now_ns)
        self.admitted.append(Admitted(self.now_ns, self.lowered, self.model.rate, self.volume, units, segment))

    def _settle(self, pick: int, used_units: int) -> None:
        running = [(owner, taken) for owner, taken in enumerate(self.admitted) if taken.open]
        if not running:
            assert self.bucket.settle(object(), used_units, self.now_ns) == 0
            return
        owner, taken = running[pick % len(running)]
        used_units = min(used_units, taken.units)
        unused = taken.segment.size // SCALE - used_units
        returned = self.bucket.settle(owner, used_units, self.now_ns)
        assert returned == max(0, min(unused, taken.segment.left // SCALE))
        assert returned <= taken.units - used_units
        taken.segment.left -= returned * SCALE
        taken.units, taken.open = used_units, False
        assert self.bucket.settle(owner, 0, self.now_ns) == 0

    def _change_rate(self, rate: int) -> None:
        before = self.bucket.used(self.now_ns)
        self.lowered += rate < self.model.rate
        self.model.clamp(rate)
        self.bucket.change_rate(rate, self.now_ns)
        assert self.bucket.used(self.now_ns) == min(before, rate)


@settings(deadline=None, max_examples=300)
@given(rate=st.integers(0, 12), history=HISTORIES)
def test_the_bucket_is_a_queue_that_drains_from_the_front(rate: int, history: list[tuple[int, Step]]) -> None:
    """Protects the bucket's meaning: use, fit, returns and changed rates equal the fluid model's after every step."""
    Comparison(rate).run(history)


@settings(deadline=None, max_examples=300)
@given(rate=st.integers(1, 12), history=HISTORIES)
def test_no_window_lets_more_through_than_capacity_plus_refill(rate: int, history: list[tuple[int, Step]]) -> None:
    """Protects policy 1's bound: Σ settled units of takes admitted in any window w ≤ capacity + rate · w.

    Raising the rate inside a window counts what it refilled; lowering it forgives what is above the new capacity, so windows
    across a lowered rate have no bound.
    """
    comparison = Comparison(rate)
    comparison.run(history)
    for index, first in enumerate(comparison.admitted):
        settled = 0
        for last in comparison.admitted[index:]:
            if last.lowered != first.lowered:
                break
            settled += last.units
            assert settled * SCALE <= last.rate * SCALE + last.volume - first.volume


@settings(deadline=None, max_examples=300)
@given(rate=st.integers(0, 12), history=HISTORIES, units=st.integers(1, 14), elapsed_ns=ELAPSED_NS)
def test_the_wait_is_exact(rate: int, history: list[tuple[int, Step]], units: int, elapsed_ns: int) -> None:
    """Protects Retry-After: after the wait the units fit, one nanosecond earlier they do not; None means never."""
    comparison = Comparison(rate)
    comparison.run(history)
    now_ns, bucket = comparison.now_ns + elapsed_ns, comparison.bucket
    wait_ns = bucket.wait_ns(units, now_ns)
    assert (wait_ns is None) == (units > bucket.rate)
    if wait_ns:
        assert copy.deepcopy(bucket).wait_ns(units, now_ns + wait_ns - 1) == 1
    if wait_ns is not None:
        assert bucket.wait_ns(units, now_ns + wait_ns) == 0


@settings(deadline=None, max_examples=200)
@given(rate=st.integers(0, 12), history=HISTORIES)
def test_the_reset_time_is_exact(rate: int, history: list[tuple[int, Step]]) -> None:
    """Protects the reset headers: nothing is used after the time shown, and something still is one nanosecond earlier."""
    comparison = Comparison(rate)
    comparison.run(history)
    bucket, now_ns = comparison.bucket, comparison.now_ns
    reset_ns = bucket.full_again_ns(now_ns)
    if reset_ns:
        assert copy.deepcopy(bucket).used(now_ns + reset_ns - 1) > 0
    assert bucket.used(now_ns + reset_ns) == 0


def test_what_refilled_already_is_never_given_back() -> None:
    """Protects the honest return: half a minute after a full take only the half that is still missing comes back."""
    bucket = Bucket(100, 0)
    bucket.take("hold", 100, 0)
    assert bucket.settle("hold", 10, SCALE // 2) == 50
    assert bucket.used(SCALE // 2) == 0


def test_a_return_moves_later_takes_so_that_they_return_theirs_in_full() -> None:
    """Protects returns out of order: the later take keeps its own claim after an earlier one gave back."""
    bucket = Bucket(100, 0)
    bucket.take("early", 60, 0)
    bucket.take("late", 40, 0)
    assert bucket.settle("early", 20, 0) == 40
    assert bucket.settle("late", 0, 0) == 40
    assert bucket.used(0) == 20


@pytest.mark.parametrize("later_ns", [0, -1, -SCALE])
def test_time_never_runs_back(later_ns: int) -> None:
    """Protects the clock: an earlier time than the last one seen refills nothing and takes nothing away."""
    bucket = Bucket(10, 0)
    bucket.take("hold", 10, 0)
    assert bucket.used(later_ns) == 10
