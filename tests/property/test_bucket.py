"""The per-minute bucket against a fluid model of it, and the bound of policy 1 by brute force over every window."""

import copy
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.ledger.bucket import SCALE, Bucket
from weir.units import NANOS_PER_MINUTE, NANOS_PER_SECOND, ceil_div


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


@dataclass(frozen=True)
class RestoreStep:
    """A take of an earlier process. is_open: whoever made it will settle it."""

    units: int
    is_open: bool


Step: TypeAlias = TakeStep | SettleStep | RateStep | RestoreStep

UNITS = st.integers(0, 12)
ELAPSED_NS = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 90 * NANOS_PER_SECOND))
TAKES = st.builds(TakeStep, UNITS)
SETTLES = st.builds(SettleStep, st.integers(0, 5), UNITS)
RATES = st.builds(RateStep, st.integers(0, 12))
HISTORIES = st.lists(st.tuples(ELAPSED_NS, st.one_of(TAKES, TAKES, SETTLES, SETTLES, RATES)), max_size=40)
STEADY = st.lists(st.tuples(ELAPSED_NS, st.one_of(TAKES, TAKES, SETTLES)), max_size=20)
"""Histories in which the rate stays."""
RESTORES = st.builds(RestoreStep, st.integers(0, 30), st.booleans())
REPLAYS = st.lists(st.tuples(ELAPSED_NS, RESTORES), max_size=8)


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
                case RestoreStep(units, is_open):
                    self._restore(units, is_open=is_open)
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

    def _restore(self, units: int, *, is_open: bool) -> None:
        """It fits whatever there is: what is above the capacity is forgotten."""
        room = self.model.rate * SCALE - self.model.level()
        segment = Segment(min(units * SCALE, room), min(units * SCALE, room))
        self.model.segments.append(segment)
        self.bucket.restore(units, self.now_ns, len(self.admitted) if is_open else None)
        taken = Admitted(self.now_ns, self.lowered, self.model.rate, self.volume, units, segment, open=is_open)
        self.admitted.append(taken)

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


# ── after a restart ──────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=300)
@given(rate=st.integers(0, 12), replay=REPLAYS, history=HISTORIES)
def test_restored_takes_stand_in_the_queue_as_if_they_had_been_made_here(
    rate: int, replay: list[tuple[int, Step]], history: list[tuple[int, Step]]
) -> None:
    """Protects rates through a takeover: what is replayed drains, returns and clamps as the fluid model says, never more."""
    Comparison(rate).run([*replay, *history])


@dataclass
class Made:
    """A take before a takeover. net: less what it gave back."""

    at_ns: int
    units: int
    net: int
    open: bool = True


def settled_at_random(bucket: Bucket, made: list[Made], step: SettleStep, now_ns: int) -> None:
    """One of those that are open ends."""
    running = [(owner, taken) for owner, taken in enumerate(made) if taken.open]
    if running:
        owner, taken = running[step.pick % len(running)]
        taken.open = False
        taken.net -= bucket.settle(owner, min(step.used_units, taken.units), now_ns)


def played(history: list[tuple[int, Step]], bucket: Bucket, made: list[Made]) -> int:
    """A history on a bucket, and what it made; when it is over, ns."""
    now_ns = 0
    for elapsed_ns, step in history:
        now_ns += elapsed_ns
        if isinstance(step, TakeStep) and bucket.wait_ns(step.units, now_ns) == 0:
            bucket.take(len(made), step.units, now_ns)
            made.append(Made(now_ns, step.units, step.units))
        elif isinstance(step, SettleStep):
            settled_at_random(bucket, made, step, now_ns)
    return now_ns


def rebuilt_at(now_ns: int, rate: int, made: list[Made]) -> Bucket:
    """Another process's bucket, of the takes of the last two minutes."""
    bucket = Bucket(rate, now_ns - 2 * NANOS_PER_MINUTE)
    for owner, taken in enumerate(made):
        if now_ns - taken.at_ns < 2 * NANOS_PER_MINUTE and taken.net:
            bucket.restore(taken.net, taken.at_ns, owner if taken.open else None)
    return bucket


@settings(deadline=None, max_examples=300)
@given(rate=st.integers(1, 12), before=STEADY, after=HISTORIES)
def test_a_rebuilt_bucket_is_the_one_that_would_have_been(
    rate: int, before: list[tuple[int, Step]], after: list[tuple[int, Step]]
) -> None:
    """Protects tenants through a takeover: takes replayed net of their returns, with their owners, change nothing."""
    unbroken, made = Bucket(rate, 0), list[Made]()
    now_ns = played(before, unbroken, made)
    rebuilt = rebuilt_at(now_ns, rate, made)
    for elapsed_ns, step in after:
        now_ns += elapsed_ns
        match step:
            case TakeStep(units) if unbroken.wait_ns(units, now_ns) == 0:
                unbroken.take(len(made), units, now_ns)
                rebuilt.take(len(made), units, now_ns)
                made.append(Made(now_ns, units, units))
            case SettleStep():
                again = [Made(each.at_ns, each.units, each.net, each.open) for each in made]
                settled_at_random(unbroken, made, step, now_ns)
                settled_at_random(rebuilt, again, step, now_ns)
                assert again == made
            case RateStep(changed):
                unbroken.change_rate(changed, now_ns)
                rebuilt.change_rate(changed, now_ns)
        assert rebuilt.used(now_ns) == unbroken.used(now_ns)
        assert rebuilt.full_again_ns(now_ns) == unbroken.full_again_ns(now_ns)
        assert rebuilt.wait_ns(3, now_ns) == unbroken.wait_ns(3, now_ns)


@pytest.mark.parametrize(("units", "used_units", "returned"), [(30, 10, 20), (300, 10, 50), (300, 80, 0), (0, 0, 0)])
def test_a_restored_take_gives_back_what_it_occupies_at_most(units: int, used_units: int, returned: int) -> None:
    """Protects the rate: a take that was clamped to a lower limit returns no more than it took of that one."""
    bucket = Bucket(60, 0)
    bucket.restore(units, 0, "hold")
    bucket.restore(5, 0)
    level = bucket.used(0)
    assert bucket.settle("hold", used_units, 0) == returned
    assert bucket.used(0) == level - returned
    assert bucket.settle("hold", 0, 0) == 0


def test_what_nobody_will_settle_returns_nothing() -> None:
    """Protects the rate: a take whose hold has ended stays as it was replayed, and moves down with the one before it."""
    bucket = Bucket(60, 0)
    bucket.restore(30, 0, "hold")
    bucket.restore(20, 0)
    bucket.restore(10, 0, "later")
    assert bucket.settle("hold", 0, 0) == 30
    assert bucket.used(0) == 30
    assert bucket.settle("later", 0, 0) == 10
