"""A replica that failed: left alone, tried one request at a time, and trusted again."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MAX_MS, BACK_OFF_MS, TRIALS, Breaker, speaks_against, speaks_for
from weir.core.routing.replica import Replica, ReplicaLimits, ReplicaState
from weir.units import ns_from_ms

FIRST_NS, LONGEST_NS = ns_from_ms(BACK_OFF_MS), ns_from_ms(BACK_OFF_MAX_MS)
LANES = 3
GOOD, LOST, SILENT, REFUSED, LEFT = (
    FinishReason.STOP,
    FinishReason.REPLICA_LOST,
    FinishReason.STALLED,
    FinishReason.ENGINE_REJECTED,
    FinishReason.DISCONNECT,
)
moves = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 40_000)),
    st.tuples(st.sampled_from(["take", "answer", "probe fails"]), st.just(0)),
    st.tuples(st.sampled_from([GOOD, LOST, SILENT, REFUSED, LEFT]), st.integers(0, LANES)),
)


class Stand:
    """A replica under random load beside a plain account of it. trials: running requests that began while it was half-open."""

    def __init__(self) -> None:
        self.replica = Replica("r", "pool", ReplicaLimits(LANES))
        self.replica.answered(0)
        self.now_ns = 0
        self.running: list[int] = []
        self.trials: set[int] = set()
        self.failures = 0  # since it was last ready
        self.alone_until_ns = 0
        self.ended_well = 0

    @property
    def state(self) -> ReplicaState:
        return self.replica.state

    def play(self, move: str, number: int) -> None:
        """One move; number: milliseconds of a wait, or which of the running requests ends."""
        if move == "wait":
            self.now_ns += ns_from_ms(number)
        elif move == "take":
            self._take()
        elif move == "answer":
            self._answer()
        elif move == "probe fails":
            self._failed(lambda: self.replica.doubted(self.now_ns))
        elif self.running:
            self._end(self.running[number % len(self.running)], FinishReason(move))

    def _take(self) -> None:
        if not self.replica.free:
            return
        lane = self.replica.take_lane()
        self.running.append(lane)
        if self.state is ReplicaState.HALF_OPEN:
            assert not self.trials, "more than one request in half-open"
            self.trials.add(lane)

    def _answer(self) -> None:
        before = self.state
        self.replica.answered(self.now_ns)
        if before is ReplicaState.SUSPECT:
            is_over = self.now_ns >= self.alone_until_ns
            assert self.state is (ReplicaState.HALF_OPEN if is_over else ReplicaState.SUSPECT)
            self.ended_well = 0
        else:
            assert self.state is before

    def _failed(self, fail: Callable[[], None]) -> None:
        took_work = self.state is not ReplicaState.SUSPECT
        fail()
        assert self.state is ReplicaState.SUSPECT
        if took_work:
            self.failures += 1
            self.alone_until_ns = self.now_ns + min(FIRST_NS * 2 ** (self.failures - 1), LONGEST_NS)

    def _end(self, lane: int, reason: FinishReason) -> None:
        before = self.state
        if reason in (LOST, SILENT):
            self._failed(lambda: self.replica.attempt_ended(lane, reason, self.now_ns))
        else:
            self.replica.attempt_ended(lane, reason, self.now_ns)
            self.ended_well += reason is GOOD and before is ReplicaState.HALF_OPEN and lane in self.trials
            proven = before is ReplicaState.HALF_OPEN and self.ended_well == TRIALS
            assert self.state is (ReplicaState.READY if proven else before)
            self.failures = 0 if proven else self.failures
        self.replica.free_lane(lane)
        self.running.remove(lane)
        self.trials.discard(lane)

    def check(self) -> None:
        """What can be used is what the state allows."""
        free, taken = self.replica.free, len(self.running)
        usable = {ReplicaState.READY: LANES, ReplicaState.HALF_OPEN: 1, ReplicaState.SUSPECT: 0}[self.state]
        assert self.replica.usable == usable and self.replica.running == taken
        assert free == {LANES: LANES - taken, 1: min(1 - len(self.trials), LANES - taken), 0: 0}[usable]


@given(st.lists(moves, max_size=120))
def test_any_order_of_events_keeps_the_rules_and_success_brings_it_back(played: list[tuple[str, int]]) -> None:
    """Protects clients from a replica that fails: one trial at a time, a bounded back-off, full again after three good ones."""
    stand = Stand()
    for move, number in played:
        stand.play(move, number)
        stand.check()
    while stand.running:
        stand.play(LEFT, 0)
    stand.play("wait", BACK_OFF_MAX_MS)
    stand.play("answer", 0)
    for _ in range(TRIALS):
        stand.play("take", 0)
        stand.play(GOOD, 0)
    assert stand.state is ReplicaState.READY and stand.replica.free == LANES


def test_the_back_off_doubles_to_its_bound_and_starts_anew() -> None:
    """Protects the stated figures: 1, 2, 4, 8, 16, 30 and 30 s; success forgets them."""
    breaker, seen = Breaker(), []
    for _ in range(7):
        breaker.open(0)
        seen.append(next(second for second in range(60) if breaker.may_half_open(ns_from_ms(1_000 * second))))
    assert seen == [1, 2, 4, 8, 16, 30, 30]
    assert [breaker.trial_ended_well() for _ in range(TRIALS)] == [False] * (TRIALS - 1) + [True]
    breaker.open(0)
    assert breaker.may_half_open(FIRST_NS) and not breaker.may_half_open(FIRST_NS - 1)


@pytest.mark.parametrize(("back_off_ms", "second_ms"), [(10, 20), (20_000, 30_000), (60_000, 60_000)])
def test_a_configured_back_off(back_off_ms: int, second_ms: int) -> None:
    """Protects operators: the first time-out is theirs, also where it is longer than the bound."""
    breaker = Breaker(back_off_ms)
    breaker.open(0)
    assert breaker.may_half_open(ns_from_ms(back_off_ms)) and not breaker.may_half_open(ns_from_ms(back_off_ms) - 1)
    breaker.open(0)
    assert breaker.may_half_open(ns_from_ms(second_ms)) and not breaker.may_half_open(ns_from_ms(second_ms) - 1)


def test_only_a_loss_or_silence_speaks_against_a_replica() -> None:
    """Protects replicas from what clients do and engines refuse, and trust from anything but whole answers."""
    assert {reason for reason in FinishReason if speaks_against(reason)} == {LOST, SILENT}
    completed = {GOOD, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER}
    assert {reason for reason in FinishReason if speaks_for(reason)} == completed


def test_what_ends_on_a_replica_that_takes_no_work_changes_nothing() -> None:
    """Protects a drain: requests that are lost with a replica that is being stopped do not bring it back."""
    replica = Replica("r", "pool", ReplicaLimits(2))
    replica.attempt_ended(None, LOST, 0)
    assert replica.state is ReplicaState.STARTING and replica.usable == 0
    replica.doubted(0)
    replica.answered(0)
    assert (replica.state, replica.usable) == (ReplicaState.READY, 2)
