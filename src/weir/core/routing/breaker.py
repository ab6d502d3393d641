"""When a replica that fails may be tried again, and when it is trusted in full.

One failure may be its request's: the next probe that is answered makes up for it. A second one, with no generation that ended
well in between, opens the breaker: for a time-out the replica is left alone, then it is tried with one request at a time, and
generations that end well close it. A trial that fails opens it again, for twice as long up to a bound. A probe that is answered
proves that the process lives, not that it generates. It counts and keeps time; which state a replica is in is `replica.py`'s,
and who tries it placement's.
"""

from weir.core.endings import FinishReason, Status, ending
from weir.units import Millis, Nanos, ns_from_ms

BACK_OFF_MS: Millis = 1_000
BACK_OFF_MAX_MS: Millis = 30_000
FAILURES = 2
"""In a row: one tenant's request must not take a replica from the others, whose requests end well on it."""
TRIALS = 3
"""Generations that must end well: one may be luck, and each costs the others' lanes the time of a request."""

_AGAINST = frozenset({FinishReason.REPLICA_LOST, FinishReason.STALLED})


def speaks_against(reason: FinishReason) -> bool:
    """Whether an attempt that ended so puts its replica in doubt: never what it refused, nor what its client did."""
    return reason in _AGAINST


def trial_failed(reason: FinishReason, *, showed_output: bool) -> bool:
    """Whether a trial that ended so speaks against its replica: also an engine's error, and a deadline in silence."""
    is_silent = reason is FinishReason.DEADLINE and not showed_output
    return speaks_against(reason) or reason is FinishReason.ENGINE_ERROR or is_silent


def speaks_for(reason: FinishReason) -> bool:
    """Whether an attempt that ended so shows that its replica generates."""
    return ending(reason).status is Status.COMPLETED


class Breaker:
    """Of one replica, closed at first. back_off_ms: the first time-out; it doubles up to BACK_OFF_MAX_MS; longer stays."""

    __slots__ = ("_back_off_ns", "_ended_well", "_failures", "_first_ns", "_until_ns", "is_open")

    def __init__(self, back_off_ms: Millis = BACK_OFF_MS) -> None:
        self._first_ns = ns_from_ms(back_off_ms)
        self._back_off_ns: Nanos = 0
        self._until_ns: Nanos = 0
        self._failures = 0
        self._ended_well = 0
        self.is_open = False

    def failed(self, now_ns: Nanos) -> None:
        """A generation failed on it."""
        self._failures += 1
        if not self.is_open and self._failures < FAILURES:
            return
        longest_ns = max(self._first_ns, ns_from_ms(BACK_OFF_MAX_MS))
        self._back_off_ns = min(max(self._first_ns, 2 * self._back_off_ns), longest_ns)
        self._until_ns = now_ns + self._back_off_ns
        self._ended_well = 0
        self.is_open = True

    def may_be_tried(self, now_ns: Nanos) -> bool:
        """Whether the time-out is over."""
        return now_ns >= self._until_ns

    def ended_well(self) -> None:
        """A generation ended well on it: after enough of them an open one is closed, and all is forgotten."""
        self._failures = 0
        if self.is_open:
            self._ended_well += 1
            if self._ended_well == TRIALS:
                self._back_off_ns = self._ended_well = 0
                self.is_open = False
