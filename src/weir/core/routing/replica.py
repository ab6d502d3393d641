"""A replica's life and its lanes.

    starting → ready → suspect ⇄ half_open → ready;  ready | suspect | half_open → draining → STOPPED;  any → FAILED

Own in-flight counts are the truth. A lane is one of the replica's `concurrency` places; it is taken at dispatch and returns
when the gateway reports that the engine stopped, or when the replica is confirmed gone, never because something elsewhere
failed. A half-open replica takes one request at a time, a trial, until its breaker has seen enough of them end well.
"""

import heapq
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MS, Breaker, speaks_against, speaks_for
from weir.units import Millis, Nanos


class ReplicaState(StrEnum):
    """Only `ready` takes new work, and `half_open` one request at a time."""

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
    PROVEN = "proven"  # the trials of a half-open replica ended well
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
    (ReplicaState.SUSPECT, ReplicaEvent.ANSWERED): ReplicaState.HALF_OPEN,
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
        case ReplicaEvent.ANSWERED | ReplicaEvent.DOUBTED | ReplicaEvent.PROVEN | ReplicaEvent.DRAIN | ReplicaEvent.STOP:
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

    __slots__ = ("_breaker", "_lanes", "_trial", "free", "limits", "name", "pool", "state")

    def __init__(self, name: str, pool: str, limits: ReplicaLimits, back_off_ms: Millis = BACK_OFF_MS) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.state = ReplicaState.STARTING
        self._breaker = Breaker(back_off_ms)
        self._lanes = list(range(limits.concurrency))
        self.free = 0
        self._trial: int | None = None  # the lane of the trial that runs

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, event: ReplicaEvent) -> None:
        """Change state; raises IllegalReplicaTransition."""
        self.state = advance(self.state, event)
        self._count_free()

    def answered(self, now_ns: Nanos) -> None:
        """The warm-up or a probe succeeded; one that comes within a suspect replica's time-out changes nothing."""
        if self.state is not ReplicaState.SUSPECT or self._breaker.may_half_open(now_ns):
            self.advance(ReplicaEvent.ANSWERED)

    def doubted(self, now_ns: Nanos) -> None:
        """A probe or a request failed in a way that speaks against it."""
        if self.takes_work:
            self._breaker.open(now_ns)
        self.advance(ReplicaEvent.DOUBTED)

    def attempt_ended(self, lane: int | None, reason: FinishReason, now_ns: Nanos) -> None:
        """What ran here ended so: doubt, the success of a trial, or nothing. lane: None if it was given back before."""
        if not self.takes_work:
            return
        if speaks_against(reason):
            self.doubted(now_ns)
        elif self._is_trial(lane) and speaks_for(reason) and self._breaker.trial_ended_well():
            self.advance(ReplicaEvent.PROVEN)

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
            self._trial = lane
        self._count_free()
        return lane

    def free_lane(self, lane: int) -> None:
        """Give a lane back; it must be taken."""
        assert 0 <= lane < self.limits.concurrency and lane not in self._lanes
        heapq.heappush(self._lanes, lane)
        if lane == self._trial:
            self._trial = None
        self._count_free()

    def _count_free(self) -> None:
        if self.state is ReplicaState.READY:
            self.free = len(self._lanes)
        else:
            is_tried = self.state is ReplicaState.HALF_OPEN and self._trial is None
            self.free = min(len(self._lanes), int(is_tried))

    def _is_trial(self, lane: int | None) -> bool:
        return self.state is ReplicaState.HALF_OPEN and lane is not None and lane == self._trial
