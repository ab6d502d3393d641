"""The one retry: which failed attempt may run again, and how many may in a pool before retries would make an outage worse.

A retry is for an attempt that failed on the platform's side with nothing delivered, so that nobody can tell it from a first
one. Whether another replica can still meet the deadline is asked at the scheduler's door; who pays is the ledger's. It must
never let an execution run a third time, nor once output was handed to its client.
"""

from collections import deque

from weir.core.endings import FinishReason
from weir.core.request import ATTEMPTS_MAX
from weir.units import Nanos

_RETRYABLE = frozenset({FinishReason.ENGINE_ERROR, FinishReason.REPLICA_LOST, FinishReason.STALLED})
_SLOTS = 10


def is_retryable(reason: FinishReason, attempt: int, *, delivered: bool) -> bool:
    """Whether an attempt that ended so may be followed by another. attempt: 0 is none; delivered: the client got output."""
    return reason in _RETRYABLE and 0 < attempt < ATTEMPTS_MAX and not delivered


class RetryBudget:
    """Retries of one pool: at most max(least, percent of what was admitted) within any window_ns ≥ 10. Both may be 0."""

    def __init__(self, least: int, percent: int, window_ns: Nanos) -> None:
        self._least = least
        self._percent = percent
        self._window_ns = window_ns
        self._slot_ns = window_ns // _SLOTS
        self._admitted: deque[tuple[int, int]] = deque()  # (slot, number) of the window's slots, oldest first
        self._retried: deque[Nanos] = deque()

    def admitted(self, now_ns: Nanos) -> None:
        """One more request was admitted to the pool."""
        slot, slots = now_ns // self._slot_ns, self._admitted
        while slots and slots[0][0] <= slot - _SLOTS:
            slots.popleft()
        if slots and slots[-1][0] == slot:
            slots[-1] = (slot, slots[-1][1] + 1)
        else:
            slots.append((slot, 1))

    def take(self, now_ns: Nanos) -> bool:
        """Spend one retry; False, and nothing is spent, when the budget is exhausted."""
        oldest = now_ns // self._slot_ns - _SLOTS
        admitted = sum(number for slot, number in self._admitted if slot > oldest)
        while self._retried and self._retried[0] <= now_ns - self._window_ns:
            self._retried.popleft()
        if len(self._retried) >= max(self._least, admitted * self._percent // 100):
            return False
        self._retried.append(now_ns)
        return True
