"""A replica's life and its lanes.

    starting → ready ⇄ suspect;  ready | suspect → draining → STOPPED;  any → FAILED

Own in-flight counts are the truth. A lane is one of the replica's `concurrency` places; it is taken at dispatch and returns
when the gateway reports that the engine stopped, or when the replica is confirmed gone, never because something elsewhere
failed.
"""

import heapq
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class ReplicaState(StrEnum):
    """Only `ready` takes new work."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class ReplicaEvent(StrEnum):
    """What happens to a replica."""

    ANSWERED = "answered"  # a probe or the warm-up succeeded
    DOUBTED = "doubted"  # a passive signal or a probe failed
    DRAIN = "drain"
    STOP = "stop"  # drained and gone as asked
    FAIL = "fail"  # gone or unusable


_NEXT: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (ReplicaState.STARTING, ReplicaEvent.ANSWERED): ReplicaState.READY,
    (ReplicaState.STARTING, ReplicaEvent.DOUBTED): ReplicaState.STARTING,
    (ReplicaState.STARTING, ReplicaEvent.STOP): ReplicaState.STOPPED,
    (ReplicaState.READY, ReplicaEvent.ANSWERED): ReplicaState.READY,
    (ReplicaState.READY, ReplicaEvent.DOUBTED): ReplicaState.SUSPECT,
    (ReplicaState.READY, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.SUSPECT, ReplicaEvent.ANSWERED): ReplicaState.READY,
    (ReplicaState.SUSPECT, ReplicaEvent.DOUBTED): ReplicaState.SUSPECT,
    (ReplicaState.SUSPECT, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.ANSWERED): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.DOUBTED): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaEvent.STOP): ReplicaState.STOPPED,
}


class IllegalReplicaTransition(AssertionError):
    """A broken invariant: this event cannot happen in this state."""

    def __init__(self, state: ReplicaState, event: ReplicaEvent) -> None:
        super().__init__(f"{event} is illegal in {state}")


def advance(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """The state after `event`. Raises IllegalReplicaTransition; only what has ended refuses to fail."""
    match event:
        case ReplicaEvent.FAIL:
            following = None if state in (ReplicaState.STOPPED, ReplicaState.FAILED) else ReplicaState.FAILED
        case ReplicaEvent.ANSWERED | ReplicaEvent.DOUBTED | ReplicaEvent.DRAIN | ReplicaEvent.STOP:
            following = _NEXT.get((state, event))
        case _:
            assert_never(event)
    if following is None:
        raise IllegalReplicaTransition(state, event)
    return following


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """concurrency: requests that it may run at once, ≥ 1."""

    concurrency: int


class Replica:
    """The coordinator's view of one replica. name: unique in the cell, never reused."""

    __slots__ = ("_free", "limits", "name", "pool", "state")

    def __init__(self, name: str, pool: str, limits: ReplicaLimits) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.state = ReplicaState.STARTING
        self._free = list(range(limits.concurrency))

    def advance(self, event: ReplicaEvent) -> None:
        """Change state; raises IllegalReplicaTransition."""
        self.state = advance(self.state, event)

    @property
    def running(self) -> int:
        """Lanes taken."""
        return self.limits.concurrency - len(self._free)

    @property
    def free(self) -> int:
        """Lanes that new work may take now: none unless ready."""
        return len(self._free) if self.state is ReplicaState.READY else 0

    def take_lane(self) -> int:
        """The lowest free lane, taken."""
        assert self.free > 0
        return heapq.heappop(self._free)

    def free_lane(self, lane: int) -> None:
        """Give a lane back; it must be taken."""
        assert 0 <= lane < self.limits.concurrency and lane not in self._free
        heapq.heappush(self._free, lane)
