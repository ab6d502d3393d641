"""A replica's life and its lanes.

    starting → ready ⇄ suspect ⇄ half_open → ready;  ready | suspect | half_open → draining → STOPPED;  any → FAILED

Own in-flight counts are the truth. A lane is one of the replica's `concurrency` places; it is taken at dispatch and returns
when the gateway reports that the engine stopped, or when the replica is confirmed gone, never because something elsewhere
failed. A suspect replica is ready again once it answers, but half-open if its breaker is open: then it takes trials, the next
one when the last has output, until enough generations ended well.
"""

import heapq
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MS, Breaker, speaks_against, speaks_for, trial_failed
from weir.units import Millis, Nanos


class ReplicaState(StrEnum):
    """Only `ready` takes new work, and `half_open` trials."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class ReplicaEvent(StrEnum):
    """What happens to a replica."""

    ANSWERED = "answered"  # a probe or the warm-up succeeded
    DOUBTED = "doubted"  # a passive signal or a probe failed
    TRIED = "tried"  # a probe succeeded, and its breaker's time-out is over
    PROVEN = "proven"  # enough generations of a half-open replica ended well
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
    (ReplicaState.SUSPECT, ReplicaEvent.TRIED): ReplicaState.HALF_OPEN,
    (ReplicaState.SUSPECT, ReplicaEvent.DOUBTED): ReplicaState.SUSPECT,
    (ReplicaState.SUSPECT, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
    (ReplicaState.HALF_OPEN, ReplicaEvent.ANSWERED): ReplicaState.HALF_OPEN,
    (ReplicaState.HALF_OPEN, ReplicaEvent.DOUBTED): ReplicaState.SUSPECT,
    (ReplicaState.HALF_OPEN, ReplicaEvent.PROVEN): ReplicaState.READY,
    (ReplicaState.HALF_OPEN, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
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
        case (
            ReplicaEvent.ANSWERED
            | ReplicaEvent.DOUBTED
            | ReplicaEvent.TRIED
            | ReplicaEvent.PROVEN
            | ReplicaEvent.DRAIN
            | ReplicaEvent.STOP
        ):
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
    """The coordinator's view of one replica. name: unique in the cell, never reused. back_off_ms: its breaker's.

    free: lanes that new work may take now; kept, not computed, because placement reads it of every replica of a pool.
    """

    __slots__ = ("_breaker", "_lanes", "_silent_trial", "_trials", "free", "limits", "name", "pool", "state")

    def __init__(self, name: str, pool: str, limits: ReplicaLimits, back_off_ms: Millis = BACK_OFF_MS) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.state = ReplicaState.STARTING
        self._breaker = Breaker(back_off_ms)
        self._lanes = list(range(limits.concurrency))
        self._trials: set[int] = set()  # lanes taken since it is half-open
        self._silent_trial: int | None = None  # the one of them without output so far
        self.free = 0

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, event: ReplicaEvent) -> None:
        """Change state; raises IllegalReplicaTransition."""
        before, self.state = self.state, advance(self.state, event)
        if self.state is not before:
            self._trials.clear()
            self._silent_trial = None
        self._count_free()

    def answered(self, now_ns: Nanos) -> None:
        """The warm-up or a probe succeeded: one that is suspect is ready again, or tried once its time-out is over."""
        if self.state is not ReplicaState.SUSPECT or not self._breaker.is_open:
            self.advance(ReplicaEvent.ANSWERED)
        elif self._breaker.may_be_tried(now_ns):
            self.advance(ReplicaEvent.TRIED)

    def doubted(self) -> None:
        """A probe failed: the next one that is answered settles it."""
        self.advance(ReplicaEvent.DOUBTED)

    def showed_output(self, lane: int) -> None:
        """The request on this lane has output: if it is a trial, the next one may start."""
        if lane == self._silent_trial:
            self._silent_trial = None
            self._count_free()

    def attempt_ended(self, lane: int | None, reason: FinishReason, now_ns: Nanos, *, showed_output: bool) -> None:
        """What ran here ended so: doubt, trust, or nothing. lane: None if it was given back before."""
        if speaks_for(reason):
            self._breaker.ended_well()
            if self.state is ReplicaState.HALF_OPEN and not self._breaker.is_open:
                self.advance(ReplicaEvent.PROVEN)
        elif self._failed_here(lane, reason, showed_output=showed_output):
            self._breaker.failed(now_ns)
            self.advance(ReplicaEvent.DOUBTED)

    def _failed_here(self, lane: int | None, reason: FinishReason, *, showed_output: bool) -> bool:
        """Of a half-open replica only trials count: what began before it was doubted says nothing new."""
        if self.state is ReplicaState.HALF_OPEN:
            return lane in self._trials and trial_failed(reason, showed_output=showed_output)
        return self.state is ReplicaState.READY and speaks_against(reason)

    @property
    def takes_work(self) -> bool:
        """Whether it is ready or half-open."""
        return self.state in (ReplicaState.READY, ReplicaState.HALF_OPEN)

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """Lanes taken."""
        return self.limits.concurrency - len(self._lanes)

    @property
    def usable(self) -> int:
        """Lanes that work may use now, taken or free: all of a ready replica, one of a half-open one."""
        return self.limits.concurrency if self.state is ReplicaState.READY else int(self.takes_work)

    def take_lane(self) -> int:
        """The lowest free lane, taken."""
        assert self.free > 0
        lane = heapq.heappop(self._lanes)
        if self.state is ReplicaState.HALF_OPEN:
            self._trials.add(lane)
            self._silent_trial = lane
        self._count_free()
        return lane

    def free_lane(self, lane: int) -> None:
        """Give a lane back; it must be taken."""
        assert 0 <= lane < self.limits.concurrency and lane not in self._lanes
        heapq.heappush(self._lanes, lane)
        self._trials.discard(lane)
        if lane == self._silent_trial:
            self._silent_trial = None
        self._count_free()

    def _count_free(self) -> None:
        if self.state is ReplicaState.READY:
            self.free = len(self._lanes)
        else:
            is_tried = self.state is ReplicaState.HALF_OPEN and self._silent_trial is None
            self.free = min(len(self._lanes), int(is_tried))
