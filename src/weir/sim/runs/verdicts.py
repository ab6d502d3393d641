"""Whether the door was right, told afterwards by what happened: who was refused in vain, who admitted in vain, waits foreseen.

A refusal for the wait or the deadline was wrong if a request of the same tenant that arrived no earlier started within the wait
that the refused one was allowed. The first such start judges it; what is too old for one is dropped at the tenant's next start
or refusal, so that no more is kept than may arrive within that wait. Nothing here asks the scheduler what would have been.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from weir.units import NANOS_PER_MILLI, Millis, Nanos, ns_from_ms


class Verdict:
    """Counts of some requests, or a sum of such. wait_error_ms: |predicted − actual| of each that waited, or was to."""

    __slots__ = ("admitted", "refused", "wait_error_ms")

    def __init__(self) -> None:
        self.refused = self.admitted = 0
        self.wait_error_ms = array("d")

    def add(self, other: "Verdict") -> None:
        """Sum another one in."""
        self.refused += other.refused
        self.admitted += other.admitted
        self.wait_error_ms.extend(other.wait_error_ms)


class _Refusal(NamedTuple):
    arrived_ns: Nanos
    until_ns: Nanos
    verdict: Verdict


class Door:
    """Watches the door of a run. now_ns: where the time comes from; requests are known by a number of their own."""

    def __init__(self, now_ns: Callable[[], Nanos]) -> None:
        self._now_ns = now_ns
        self._refused: defaultdict[str, deque[_Refusal]] = defaultdict(deque)
        self._foreseen: dict[int, tuple[Nanos, Millis]] = {}

    def refused(self, tenant: str, arrived_ns: Nanos, allowed_ms: Millis, verdict: Verdict) -> None:
        """A request was refused now that might have waited so long."""
        now_ns, refused = self._now_ns(), self._refused[tenant]
        while refused and refused[0].until_ns < now_ns:
            refused.popleft()
        refused.append(_Refusal(arrived_ns, now_ns + ns_from_ms(allowed_ms), verdict))

    def admitted(self, number: int, predicted_wait_ms: Millis) -> None:
        """A request was admitted with this prediction."""
        self._foreseen[number] = self._now_ns(), predicted_wait_ms

    def started(self, tenant: str, arrived_ns: Nanos) -> None:
        """A request is dispatched for the first time: everybody of its tenant who came before and was refused is judged."""
        refused = self._refused[tenant]
        while refused and refused[0].arrived_ns <= arrived_ns:
            judged = refused.popleft()
            judged.verdict.refused += self._now_ns() <= judged.until_ns

    def waited(self, number: int, verdict: Verdict) -> None:
        """A request's wait is over, by its first start or by its end."""
        admitted_ns, predicted_ms = self._foreseen.pop(number)
        actual_ms = (self._now_ns() - admitted_ns) / NANOS_PER_MILLI
        if predicted_ms or actual_ms:
            verdict.wait_error_ms.append(abs(predicted_ms - actual_ms))
