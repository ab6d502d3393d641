"""What a pool's sums of lanes say through any life of its replicas, and what adapting to a pace leaves of their lanes."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weir.core.endings import FinishReason
from weir.core.routing.concurrency import QUIET_NS
from weir.core.routing.replica import IllegalReplicaTransition, LaneSums, Replica, ReplicaEvent, ReplicaLimits, ReplicaState
from weir.units import ns_from_ms

SIZES = (1, 3, 8)
ONE = st.integers(0, len(SIZES) - 1)
ANSWERED, DOUBTED, TRIED = ReplicaEvent.ANSWERED, ReplicaEvent.DOUBTED, ReplicaEvent.TRIED
DRAIN, STOP, FAIL = ReplicaEvent.DRAIN, ReplicaEvent.STOP, ReplicaEvent.FAIL


class LanesMachine(RuleBasedStateMachine):
    """Three replicas of one pool, and whatever may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = LaneSums()
        self.replicas = [Replica(f"r{size}", "pool", ReplicaLimits(size, 1), 100, self.sums) for size in SIZES]
        self.running: list[tuple[Replica, int]] = []
        self.now_ns = 0

    @rule(one=ONE, event=st.sampled_from([*ReplicaEvent, *4 * [ReplicaEvent.ANSWERED]]))
    def happen(self, one: int, event: ReplicaEvent) -> None:
        """A change of state, or a refused one."""
        replica = self.replicas[one]
        before = replica.state
        try:
            replica.advance(event)
        except IllegalReplicaTransition:
            assert replica.state is before

    @rule(one=ONE, wait_ms=st.sampled_from([0, 50, 200, 120_000]))
    def answer(self, one: int, wait_ms: int) -> None:
        """A probe is answered, after a while."""
        self.now_ns += ns_from_ms(wait_ms)
        if self.replicas[one].state not in (ReplicaState.STOPPED, ReplicaState.FAILED):
            self.replicas[one].answered(self.now_ns)

    @rule(one=ONE)
    def take(self, one: int) -> None:
        """A lane, if there is one."""
        replica = self.replicas[one]
        if replica.free:
            self.running.append((replica, replica.take_lane(10, 5)))

    @rule(one=ONE, named=st.none() | st.integers(-1, 9))
    def take_again(self, one: int, named: int | None) -> None:
        """What runs there since before a takeover gets a lane, wherever its replica is in its life."""
        replica = self.replicas[one]
        taken = {lane for other, lane in self.running if other is replica}
        left = set(range(replica.limits.concurrency)) - taken
        before = replica.state
        lane = replica.retake_lane(named, 10, 5, self.now_ns)
        beyond = 1 + max(replica.limits.concurrency - 1, *taken) if taken else 0
        assert lane == (beyond if not left else named if named in left else min(left))
        assert replica.state is before
        self.running.append((replica, lane))

    @rule(which=st.integers(0, 11))
    def speak(self, which: int) -> None:
        """First output of what runs."""
        if self.running:
            replica, lane = self.running[which % len(self.running)]
            replica.showed_output(lane)

    @rule(which=st.integers(0, 11), reason=st.sampled_from([FinishReason.STOP, FinishReason.STALLED, FinishReason.DISCONNECT]))
    def end(self, which: int, reason: FinishReason) -> None:
        """What runs ends, wherever its replica is in its life."""
        if self.running:
            replica, lane = self.running.pop(which % len(self.running))
            replica.attempt_ended(lane, reason, self.now_ns, showed_output=True)
            replica.free_lane(lane)

    @rule(one=ONE, ratio=st.sampled_from([0.5, 2.0]), answers=st.integers(1, 30))
    def adapt(self, one: int, ratio: float, answers: int) -> None:
        """Answers are in time or late."""
        for _ in range(answers):
            self.replicas[one].answered_at(ratio, self.now_ns, self.now_ns)

    @invariant()
    def each_offers_what_its_state_and_pace_allow(self) -> None:
        """A ready one its allowed lanes less those taken, never below none; a half-open one a single one; others nothing."""
        for replica in self.replicas:
            assert replica.running == sum(other is replica for other, _ in self.running)
            assert 1 <= replica.allowed <= replica.limits.concurrency
            assert replica.room.kv_tokens == 10 * replica.running
            match replica.state:
                case ReplicaState.READY:
                    assert (replica.usable, replica.free) == (replica.allowed, max(0, replica.allowed - replica.running))
                case ReplicaState.HALF_OPEN:
                    assert replica.usable == 1 and 0 <= replica.free <= 1
                case _:
                    assert (replica.usable, replica.free) == (0, 0)

    @invariant()
    def the_pool_is_the_sum_of_its_replicas(self) -> None:
        """However lanes came and went."""
        assert self.sums.usable == sum(replica.usable for replica in self.replicas)
        assert self.sums.free == sum(replica.free for replica in self.replicas)
        assert self.sums.open == {replica.name: replica for replica in self.replicas if replica.free}


TestLanesMachine = LanesMachine.TestCase


def test_a_limit_below_what_runs_takes_nothing_away_and_offers_nothing() -> None:
    """Protects what runs: late answers lower the limit, running requests stay, and lanes return to use as they end."""
    sums = LaneSums()
    replica = Replica("r", "pool", ReplicaLimits(10, 2), sums=sums)
    replica.answered(0)
    lanes = [replica.take_lane() for _ in range(10)]
    for _ in range(2):
        replica.answered_at(2.0, 1, 5)
    assert (replica.allowed, replica.running, replica.free, replica.usable) == (8, 10, 0, 8)
    assert (sums.usable, sums.free) == (8, 0)
    for lane in lanes[:3]:
        replica.free_lane(lane)
    assert (replica.free, sums.free) == (1, 1)


def test_a_probe_after_a_quiet_time_gives_a_lane_back() -> None:
    """Protects an idle replica from an old limit: once nothing was heard for long, a probe that is answered raises it."""
    replica = Replica("r", "pool", ReplicaLimits(10, 2))
    replica.answered(0)
    for _ in range(10):
        replica.take_lane()
    for _ in range(2):
        replica.answered_at(2.0, 1, 5)
    replica.answered(QUIET_NS // 2)
    assert replica.allowed == 8
    replica.answered(2 * QUIET_NS)
    assert replica.allowed == 9


def test_without_a_least_nothing_adapts() -> None:
    """Protects fleets whose lanes are to stay as configured: late answers change nothing."""
    replica = Replica("r", "pool", ReplicaLimits(10))
    replica.answered(0)
    for _ in range(100):
        replica.answered_at(9.0, 1, 5)
    assert (replica.allowed, replica.free) == (10, 10)


# ── lanes of what runs since before a takeover ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path",
    [[], [ANSWERED], [ANSWERED, DOUBTED], [ANSWERED, DOUBTED, TRIED], [ANSWERED, DRAIN], [ANSWERED, DRAIN, STOP], [FAIL]],
)
@pytest.mark.parametrize(
    ("named", "lane"),
    [(1, 0), (2, 2), (3, 3), (None, 0), (4, 0), (-1, 0)],
    ids=["taken", "free", "last", "none", "above", "below"],
)
def test_a_lane_is_taken_again_in_every_state(path: list[ReplicaEvent], named: int | None, lane: int) -> None:
    """Protects engines at a takeover: what runs keeps its own lane if that is free, whatever its replica is."""
    sums = LaneSums()
    replica = Replica("r", "pool", ReplicaLimits(4), sums=sums)
    assert replica.retake_lane(1, 10, 5, 0) == 1
    for event in path:
        replica.advance(event)
    state = replica.state
    assert replica.retake_lane(named, 100, 50, 0) == lane
    assert (replica.state, replica.running, replica.room.kv_tokens, replica.room.prefill_tokens) == (state, 2, 110, 55)
    assert (sums.usable, sums.free) == (replica.usable, replica.free)
    replica.free_lane(lane)
    assert (replica.running, replica.room.kv_tokens, replica.room.prefill_tokens) == (1, 10, 5)
    with pytest.raises(AssertionError):
        replica.free_lane(lane)


def test_more_than_there_are_lanes_is_beyond_them() -> None:
    """Protects a replica whose lanes are fewer now: what ran before counts, and new work waits until it has stopped."""
    replica = Replica("r", "pool", ReplicaLimits(2))
    replica.answered(0)
    assert [replica.retake_lane(lane, 10, 5, 0) for lane in (1, 1, 0, None)] == [1, 0, 2, 3]
    assert (replica.running, replica.free, replica.room.kv_tokens) == (4, 0, 40)
    for lane in (1, 2):
        replica.free_lane(lane)
    assert (replica.running, replica.free) == (2, 0)
    replica.free_lane(3)
    assert replica.take_lane() == 1


def test_new_work_gets_the_lanes_that_are_left() -> None:
    """Protects engines from two requests on one lane: after any lane was taken again the lowest free one is next."""
    replica = Replica("r", "pool", ReplicaLimits(5))
    replica.answered(0)
    assert [replica.retake_lane(lane, 0, 0, 0) for lane in (2, 0)] == [2, 0]
    assert [replica.take_lane() for _ in range(3)] == [1, 3, 4]
    for lane in (3, 0, 4):
        replica.free_lane(lane)
    assert replica.retake_lane(4, 0, 0, 0) == 4
    assert [replica.take_lane() for _ in range(2)] == [0, 3]


def test_what_ran_before_a_takeover_is_no_trial() -> None:
    """Protects a half-open replica: a lane taken again leaves room for its one trial, and its failure says nothing new."""
    replica = Replica("r", "pool", ReplicaLimits(3), back_off_ms=0)
    for event in (ANSWERED, DOUBTED, TRIED):
        replica.advance(event)
    lane = replica.retake_lane(2, 0, 0, 0)
    assert (lane, replica.free, replica.running) == (2, 1, 1)
    replica.attempt_ended(lane, FinishReason.STALLED, 0, showed_output=False)
    assert replica.takes_work and replica.usable == 1
    trial = replica.take_lane()
    assert replica.free == 0
    replica.attempt_ended(trial, FinishReason.STALLED, 0, showed_output=False)
    assert replica.state is ReplicaState.SUSPECT
