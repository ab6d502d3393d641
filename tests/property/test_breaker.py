"""A replica that failed: left alone, tried one request at a time, and trusted again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason
from weir.core.routing.breaker import (
    BACK_OFF_MAX_MS,
    BACK_OFF_MS,
    FAILURES,
    TRIALS,
    Breaker,
    speaks_against,
    speaks_for,
    trial_failed,
)
from weir.core.routing.replica import Replica, ReplicaLimits, ReplicaState
from weir.units import ns_from_ms

FIRST_NS, LONGEST_NS = ns_from_ms(BACK_OFF_MS), ns_from_ms(BACK_OFF_MAX_MS)
LANES = 3
GOOD, LOST, SILENT, REFUSED, LEFT, BROKEN, LATE = (
    FinishReason.STOP,
    FinishReason.REPLICA_LOST,
    FinishReason.STALLED,
    FinishReason.ENGINE_REJECTED,
    FinishReason.DISCONNECT,
    FinishReason.ENGINE_ERROR,
    FinishReason.DEADLINE,
)
moves = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 40_000)),
    st.tuples(st.sampled_from(["take", "answer", "probe fails"]), st.just(0)),
    st.tuples(st.just("output"), st.integers(0, LANES)),
    st.tuples(st.sampled_from([GOOD, LOST, SILENT, REFUSED, LEFT, BROKEN, LATE]), st.integers(0, LANES)),
)


class Stand:
    """A replica under random load beside a plain account of it.

    trials: running requests that began since it is half-open, by lane: whether they have output. in_a_row: failures since a
    generation ended well. opened: how often the breaker opened since it was closed; 0: it is closed.
    """

    def __init__(self) -> None:
        self.replica = Replica("r", "pool", ReplicaLimits(LANES))
        self.replica.answered(0)
        self.now_ns = 0
        self.running: dict[int, bool] = {}
        self.trials: set[int] = set()
        self.in_a_row = self.opened = self.ended_well = 0
        self.alone_until_ns = 0

    @property
    def state(self) -> ReplicaState:
        return self.replica.state

    def play(self, move: str, number: int) -> None:
        """One move; number: milliseconds of a wait, or which of the running requests it is about."""
        if move == "wait":
            self.now_ns += ns_from_ms(number)
        elif move == "take":
            self._take()
        elif move == "answer":
            self._answer()
        elif move == "probe fails":
            self.replica.doubted()
            self._is_doubted()
        elif self.running:
            lane = list(self.running)[number % len(self.running)]
            if move == "output":
                self.running[lane] = True
                self.replica.showed_output(lane)
            else:
                self._end(lane, FinishReason(move))

    def _take(self) -> None:
        if not self.replica.free:
            return
        lane = self.replica.take_lane()
        self.running[lane] = False
        if self.state is ReplicaState.HALF_OPEN:
            assert all(self.running[trial] for trial in self.trials), "a trial begins before the last one has output"
            self.trials.add(lane)

    def _answer(self) -> None:
        before = self.state
        self.replica.answered(self.now_ns)
        if before is not ReplicaState.SUSPECT:
            assert self.state is before
        elif not self.opened:
            assert self.state is ReplicaState.READY
        else:
            is_over = self.now_ns >= self.alone_until_ns
            assert self.state is (ReplicaState.HALF_OPEN if is_over else ReplicaState.SUSPECT)

    def _is_doubted(self) -> None:
        assert self.state is ReplicaState.SUSPECT
        self.trials.clear()

    def _end(self, lane: int, reason: FinishReason) -> None:
        before, showed_output = self.state, self.running.pop(lane)
        self.replica.attempt_ended(lane, reason, self.now_ns, showed_output=showed_output)
        if reason is GOOD:
            self._ended_well(before)
        elif self._counts(before, lane, reason, showed_output):
            self._failed()
        else:
            assert self.state is before
        self.replica.free_lane(lane)
        self.trials.discard(lane)

    def _counts(self, before: ReplicaState, lane: int, reason: FinishReason, showed_output: bool) -> bool:
        if before is ReplicaState.HALF_OPEN:
            return lane in self.trials and (reason in (LOST, SILENT, BROKEN) or (reason is LATE and not showed_output))
        return before is ReplicaState.READY and reason in (LOST, SILENT)

    def _ended_well(self, before: ReplicaState) -> None:
        self.in_a_row = 0
        self.ended_well += bool(self.opened)
        if self.ended_well == TRIALS:
            self.opened = self.ended_well = 0
        proven = before is ReplicaState.HALF_OPEN and not self.opened
        assert self.state is (ReplicaState.READY if proven else before)
        if proven:
            self.trials.clear()

    def _failed(self) -> None:
        self._is_doubted()
        self.in_a_row += 1
        if self.opened or self.in_a_row == FAILURES:
            self.opened += 1
            self.ended_well = 0
            self.alone_until_ns = self.now_ns + min(FIRST_NS * 2 ** (self.opened - 1), LONGEST_NS)

    def check(self) -> None:
        """What can be used is what the state allows."""
        free, taken = self.replica.free, len(self.running)
        usable = {ReplicaState.READY: LANES, ReplicaState.HALF_OPEN: 1, ReplicaState.SUSPECT: 0}[self.state]
        assert self.replica.usable == usable and self.replica.running == taken
        silent = sum(not self.running[trial] for trial in self.trials)
        assert silent <= 1
        assert free == {LANES: LANES - taken, 1: min(1 - silent, LANES - taken), 0: 0}[usable]


HALF_OPENED = [*FAILURES * [("take", 0), (LOST, 0), ("answer", 0)], ("wait", BACK_OFF_MS), ("answer", 0)]


@given(st.sampled_from([[], HALF_OPENED]), st.lists(moves, max_size=120))
def test_any_order_of_events_keeps_the_rules_and_success_brings_it_back(
    before: list[tuple[str, int]], played: list[tuple[str, int]]
) -> None:
    """Protects clients from a replica that fails: tried gently, a bounded back-off, full again after three good ones."""
    stand = Stand()
    for move, number in before:
        stand.play(move, number)
    assert stand.state is (ReplicaState.HALF_OPEN if before else ReplicaState.READY)
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


def _opened(breaker: Breaker) -> Breaker:
    for _ in range(1 if breaker.is_open else FAILURES):
        breaker.failed(0)
    return breaker


def test_the_back_off_doubles_to_its_bound_and_starts_anew() -> None:
    """Protects the stated figures: 1, 2, 4, 8, 16, 30 and 30 s; success forgets them."""
    breaker, seen = Breaker(), []
    for _ in range(7):
        _opened(breaker)
        seen.append(next(second for second in range(60) if breaker.may_be_tried(ns_from_ms(1_000 * second))))
    assert seen == [1, 2, 4, 8, 16, 30, 30]
    for _ in range(TRIALS):
        assert breaker.is_open
        breaker.ended_well()
    assert not breaker.is_open
    _opened(breaker)
    assert breaker.may_be_tried(FIRST_NS) and not breaker.may_be_tried(FIRST_NS - 1)


@pytest.mark.parametrize(("back_off_ms", "second_ms"), [(10, 20), (20_000, 30_000), (60_000, 60_000)])
def test_a_configured_back_off(back_off_ms: int, second_ms: int) -> None:
    """Protects operators: the first time-out is theirs, also where it is longer than the bound."""
    breaker = _opened(Breaker(back_off_ms))
    assert breaker.may_be_tried(ns_from_ms(back_off_ms)) and not breaker.may_be_tried(ns_from_ms(back_off_ms) - 1)
    _opened(breaker)
    assert breaker.may_be_tried(ns_from_ms(second_ms)) and not breaker.may_be_tried(ns_from_ms(second_ms) - 1)


def test_one_tenants_failing_request_takes_no_replica_from_the_others() -> None:
    """Protects tenants from each other: failures with successes in between never open the breaker."""
    replica = Replica("r", "pool", ReplicaLimits(LANES))
    replica.answered(0)
    for _ in range(20):
        replica.attempt_ended(None, SILENT, 0, showed_output=False)
        assert not replica.free
        replica.answered(0)
        assert replica.free == LANES
        replica.attempt_ended(None, GOOD, 0, showed_output=True)


def test_only_a_loss_or_silence_speaks_against_a_replica() -> None:
    """Protects replicas from what clients do and engines refuse, and trust from anything but whole answers."""
    assert {reason for reason in FinishReason if speaks_against(reason)} == {LOST, SILENT}
    assert {reason for reason in FinishReason if trial_failed(reason, showed_output=True)} == {LOST, SILENT, BROKEN}
    assert {reason for reason in FinishReason if trial_failed(reason, showed_output=False)} == {LOST, SILENT, BROKEN, LATE}
    completed = {GOOD, FinishReason.LENGTH, FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER}
    assert {reason for reason in FinishReason if speaks_for(reason)} == completed


def test_what_ends_on_a_replica_that_takes_no_work_changes_nothing() -> None:
    """Protects a drain: requests that are lost with a replica that is being stopped do not bring it back."""
    replica = Replica("r", "pool", ReplicaLimits(2))
    replica.attempt_ended(None, LOST, 0, showed_output=False)
    assert replica.state is ReplicaState.STARTING and replica.usable == 0
    replica.doubted()
    replica.answered(0)
    assert (replica.state, replica.usable) == (ReplicaState.READY, 2)


def test_output_lets_the_next_trial_begin() -> None:
    """Protects recovery: what ran before says nothing, a trial that speaks makes room for the next one."""
    stand = Stand()
    for move, number in [("take", 0), ("output", 0), *HALF_OPENED]:
        stand.play(move, number)
        stand.check()
    stand.play("take", 0)
    assert stand.replica.free == 0
    stand.replica.showed_output(next(lane for lane in range(LANES) if lane not in stand.trials))
    assert stand.replica.free == 0
    stand.replica.showed_output(next(iter(stand.trials)))
    assert stand.replica.free == 1


def test_trials_that_end_well_bring_it_back() -> None:
    """Protects capacity: after the third good one in a row every lane is used again."""
    stand = Stand()
    for move, number in [*HALF_OPENED, *TRIALS * [("take", 0), (GOOD, 0)]]:
        assert stand.state is not ReplicaState.READY or not stand.opened
        stand.play(move, number)
    assert (stand.state, stand.replica.free) == (ReplicaState.READY, LANES)


def test_a_trial_that_fails_or_leaves_makes_room_for_nothing_and_for_the_next_one() -> None:
    """Protects recovery: a trial whose client left in silence lets the next begin, one that breaks opens the breaker again."""
    stand = Stand()
    for move, number in HALF_OPENED:
        stand.play(move, number)
    stand.play("take", 0)
    assert stand.replica.free == 0
    stand.play(LEFT, 0)
    assert (stand.state, stand.replica.free) == (ReplicaState.HALF_OPEN, 1)
    stand.play("take", 0)
    stand.play(BROKEN, 0)
    assert stand.state is ReplicaState.SUSPECT
