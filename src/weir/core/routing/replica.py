"""A replica's life and its lanes.

    starting → ready ⇄ suspect ⇄ half_open → ready;  ready | suspect | half_open → draining → STOPPED;  any → FAILED

Own in-flight counts are the truth. A lane is one of the replica's `concurrency` places; it is taken at dispatch and returns
when the gateway reports that the engine stopped, or when the replica is confirmed gone, never because something elsewhere
failed. How many of them may be taken adapts to how fast answers come. A suspect replica is ready again once it answers, but
half-open if its breaker is open: then it takes trials, the next one when the last has output, until enough generations ended
well.
"""

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MS, Breaker, speaks_against, speaks_for, trial_failed
from weir.core.routing.capacity import Room
from weir.core.routing.concurrency import AdaptiveLimit
from weir.units import Millis, Nanos, Tokens


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
    """concurrency: requests that it may run at once, ≥ 1. least: how few of them adaptation may leave; None: all of them."""

    concurrency: int
    least: int | None = None


@dataclass(slots=True)
class LaneSums:
    """Sums over the replicas of a pool. usable: lanes that work may use now, taken or free; free: those of them not taken.

    open: the replicas that have a free one, by name. Of a busy fleet they are few, and placement looks at no others.
    """

    usable: int = 0
    free: int = 0
    open: dict[str, "Replica"] = field(default_factory=dict)


class Replica:
    """The coordinator's view of one replica. name: unique in the cell, never reused. back_off_ms: its breaker's.

    lanes: the sums of its pool. free, usable and running: of its own lanes; share: of those allowed, taken; kept, not computed,
    because placement reads them of every replica of a pool. room: its memory and the prompts that it has still to read.
    """

    __slots__ = (
        "_beyond",
        "_breaker",
        "_free_lanes",
        "_pace",
        "_silent_trial",
        "_sums",
        "_trials",
        "free",
        "limits",
        "name",
        "pool",
        "room",
        "running",
        "share",
        "state",
        "usable",
    )

    def __init__(
        self, name: str, pool: str, limits: ReplicaLimits, back_off_ms: Millis = BACK_OFF_MS, sums: LaneSums | None = None
    ) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.state = ReplicaState.STARTING
        self.room = Room()
        self._sums = sums or LaneSums()
        self._breaker = Breaker(back_off_ms)
        self._pace = AdaptiveLimit(limits.concurrency, limits.concurrency if limits.least is None else limits.least)
        self._free_lanes = list(range(limits.concurrency))
        self._beyond: set[int] = set()  # lanes that it has no more, of what ran before it had so few
        self._trials: set[int] = set()  # lanes taken since it is half-open
        self._silent_trial: int | None = None  # the one of them without output so far
        self.running = 0
        self.share = 0.0
        self.free = 0
        self.usable = 0

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
        if self._pace.age(now_ns):
            self._count_free()
        if self.state is not ReplicaState.SUSPECT or not self._breaker.is_open:
            self.advance(ReplicaEvent.ANSWERED)
        elif self._breaker.may_be_tried(now_ns):
            self.advance(ReplicaEvent.TRIED)

    def doubted(self) -> None:
        """A probe failed: the next one that is answered settles it."""
        self.advance(ReplicaEvent.DOUBTED)

    def showed_output(self, lane: int, now_ns: Nanos = 0) -> None:
        """The request on this lane has output: its input is read, and if it is a trial, the next one may start."""
        self.room.prefilled(lane, now_ns)
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
    def allowed(self) -> int:
        """How many requests it may run at once now, if it is ready: what keeps its answers at the pace of their class."""
        return self._pace.allowed

    def answered_at(self, ratio: float, began_ns: Nanos, now_ns: Nanos) -> None:
        """An answer that was dispatched then took this many times its class's target for each output token."""
        if self._pace.observe(ratio, began_ns, self.running, now_ns):
            self._count_free()

    def take_lane(self, kv_tokens: Tokens = 0, prefill_tokens: Tokens = 0, now_ns: Nanos = 0) -> int:
        """The lowest free lane, taken, for what takes this much of its room."""
        assert self.free > 0
        lane = heapq.heappop(self._free_lanes)
        self.room.take(lane, kv_tokens, prefill_tokens, now_ns)
        if self.state is ReplicaState.HALF_OPEN:
            self._trials.add(lane)
            self._silent_trial = lane
        self._count_free()
        return lane

    def retake_lane(self, lane: int | None, kv_tokens: Tokens, prefill_tokens: Tokens, now_ns: Nanos) -> int:
        """A lane for what runs here already, whatever the state: the one that it was given if that is free, else the lowest.

        lane: None where that is not known. Where all are taken, because they are fewer now, it is one beyond them.
        """
        free = self._free_lanes
        if not free:
            taken = 1 + max(self._beyond, default=self.limits.concurrency - 1)
            self._beyond.add(taken)
        else:
            taken = lane if lane in free else min(free)
            free.remove(taken)
            heapq.heapify(free)
        self.room.take(taken, kv_tokens, prefill_tokens, now_ns)
        self._count_free()
        return taken

    def free_lane(self, lane: int) -> None:
        """Give a lane back; it must be taken."""
        if lane in self._beyond:
            self._beyond.remove(lane)
        else:
            assert 0 <= lane < self.limits.concurrency and lane not in self._free_lanes
            heapq.heappush(self._free_lanes, lane)
        self.room.free(lane)
        self._trials.discard(lane)
        if lane == self._silent_trial:
            self._silent_trial = None
        self._count_free()

    def _count_free(self) -> None:
        self.running = self.limits.concurrency - len(self._free_lanes) + len(self._beyond)
        self.share = self.running / self._pace.allowed
        if self.state is ReplicaState.READY:
            usable = self._pace.allowed
            free = max(0, usable - self.running)
        else:
            is_tried = self.state is ReplicaState.HALF_OPEN
            usable = int(is_tried)
            free = min(len(self._free_lanes), int(is_tried and self._silent_trial is None))
        sums = self._sums
        sums.usable += usable - self.usable
        sums.free += free - self.free
        if free and not self.free:
            sums.open[self.name] = self
        elif self.free and not free:
            del sums.open[self.name]
        self.usable, self.free = usable, free
