"""When a replica that failed may be tried again, and when it is trusted in full.

A probe that is answered proves that the process lives, not that it generates. So a failure opens the breaker for a time-out;
the first answer after that leaves it half-open, and only generations that end well close it. A failure in between opens it
again, for twice as long up to a bound. It counts and keeps time; which state a replica is in is `replica.py`'s, and who tries
it placement's.
"""

from weir.core.endings import FinishReason, Status, ending
from weir.units import Millis, Nanos, ns_from_ms

BACK_OFF_MS: Millis = 1_000
BACK_OFF_MAX_MS: Millis = 30_000
TRIALS = 3
"""Generations that must end well: one may be luck, and each costs the others' lanes the time of a request."""

_AGAINST = frozenset({FinishReason.REPLICA_LOST, FinishReason.STALLED})


def speaks_against(reason: FinishReason) -> bool:
    """Whether an attempt that ended so puts its replica in doubt: never what it refused, nor what its client did."""
    return reason in _AGAINST


def speaks_for(reason: FinishReason) -> bool:
    """Whether an attempt that ended so shows that its replica generates."""
    return ending(reason).status is Status.COMPLETED


class Breaker:
    """Of one replica, closed at first. back_off_ms: the first time-out; it doubles up to BACK_OFF_MAX_MS; longer stays."""

    __slots__ = ("_back_off_ns", "_ended_well", "_first_ns", "_until_ns")

    def __init__(self, back_off_ms: Millis = BACK_OFF_MS) -> None:
        self._first_ns = ns_from_ms(back_off_ms)
        self._back_off_ns: Nanos = 0
        self._until_ns: Nanos = 0
        self._ended_well = 0

    def open(self, now_ns: Nanos) -> None:
        """The replica failed, closed or half-open: leave it alone."""
        longest_ns = max(self._first_ns, ns_from_ms(BACK_OFF_MAX_MS))
        self._back_off_ns = min(max(self._first_ns, 2 * self._back_off_ns), longest_ns)
        self._until_ns = now_ns + self._back_off_ns
        self._ended_well = 0

    def may_half_open(self, now_ns: Nanos) -> bool:
        """Whether the time-out is over, so that an answer makes it half-open."""
        return now_ns >= self._until_ns

    def trial_ended_well(self) -> bool:
        """One more; True for the last one that it takes, and then it is closed and all is forgotten."""
        self._ended_well += 1
        if self._ended_well < TRIALS:
            return False
        self._back_off_ns = self._ended_well = 0
        return True
