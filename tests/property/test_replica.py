"""A replica's states and lanes, and which replica takes a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.placement import place
from weir.core.routing.replica import (
    IllegalReplicaTransition,
    Replica,
    ReplicaEvent,
    ReplicaLimits,
    ReplicaState,
    advance,
)

ANSWERED, DOUBTED, TRIED, PROVEN, DRAIN, STOP, FAIL = ReplicaEvent
STARTING, READY, SUSPECT, HALF_OPEN, DRAINING, STOPPED, FAILED = ReplicaState

# state: the state after answered, doubted, tried, proven, drain, stop, fail; None where the event is illegal
TABLE = {
    STARTING: (READY, STARTING, None, None, None, STOPPED, FAILED),
    READY: (READY, SUSPECT, None, None, DRAINING, None, FAILED),
    SUSPECT: (READY, SUSPECT, HALF_OPEN, None, DRAINING, None, FAILED),
    HALF_OPEN: (HALF_OPEN, SUSPECT, None, READY, DRAINING, None, FAILED),
    DRAINING: (DRAINING, DRAINING, None, None, DRAINING, STOPPED, FAILED),
    STOPPED: (None, None, None, None, None, None, None),
    FAILED: (None, None, None, None, None, None, None),
}


@pytest.mark.parametrize("state", list(ReplicaState))
@pytest.mark.parametrize("event", list(ReplicaEvent))
def test_every_pair_is_allowed_or_refused_on_purpose(state: ReplicaState, event: ReplicaEvent) -> None:
    """Protects the machine: states × events, one row each."""
    following = TABLE[state][list(ReplicaEvent).index(event)]
    if following is None:
        with pytest.raises(IllegalReplicaTransition, match=f"{event} is illegal in {state}"):
            advance(state, event)
    else:
        assert advance(state, event) is following


def _ready(name: str, concurrency: int, taken: int = 0) -> Replica:
    replica = Replica(name, "pool", ReplicaLimits(concurrency))
    replica.advance(ANSWERED)
    for _ in range(taken):
        replica.take_lane()
    return replica


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=60), st.randoms(use_true_random=False))
def test_lanes_are_distinct_and_within_concurrency(concurrency: int, takes: list[bool], random: object) -> None:
    """Protects replicas from overload: never more lanes than places, the lowest free one first, each taken once."""
    replica = _ready("r", concurrency)
    taken: list[int] = []
    for take in takes:
        if take and replica.free:
            lane = replica.take_lane()
            assert lane == min(set(range(concurrency)) - set(taken))
            taken.append(lane)
        elif taken:
            replica.free_lane(taken.pop(len(taken) // 2))
        assert replica.running == len(taken) and replica.free == concurrency - len(taken)


@pytest.mark.parametrize("lane", [-1, 2, 1])
def test_a_lane_that_is_not_taken_cannot_return(lane: int) -> None:
    """Protects capacity from being given back twice."""
    replica = _ready("r", 2, taken=1)
    with pytest.raises(AssertionError):
        replica.free_lane(lane)


def test_only_ready_replicas_take_work() -> None:
    """Protects placement: a suspect or draining replica keeps its lanes and offers none."""
    replica = _ready("r", 2, taken=1)
    replica.advance(DOUBTED)
    assert (replica.running, replica.free) == (1, 0)
    with pytest.raises(AssertionError):
        replica.take_lane()
    assert place([replica]) is None
