"""What must hold at every message of a run, on its own count and never by asking the coordinator; at the end, all empty.

Each check costs a constant. A failure is an AssertionError that names the request, and ends the run.
"""

from collections import defaultdict

from weir.core.request import ATTEMPTS_MAX
from weir.messages import Granted
from weir.sim.runs.courses import Course


class Oversight:
    """Its own count of a run. concurrency: of each replica."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._lanes: defaultdict[str, set[int]] = defaultdict(set)
        self._gone: set[str] = set()
        self._asked = 0
        self._ended = 0

    def asked(self) -> None:
        """One more request was put to the coordinator."""
        self._asked += 1

    def admitted(self, course: Course) -> None:
        """It was admitted: once, and nothing ended it before."""
        assert not course.is_admitted and not course.is_ended, f"request {course.ref} is admitted twice, or after its end"

    def granted(self, course: Course, granted: Granted) -> None:
        """Only what was admitted and goes on, twice at most, before any output, on a free lane of a live replica."""
        name, lanes = granted.replica.name, self._lanes[granted.replica.name]
        assert course.is_admitted and not course.is_ended, f"request {course.ref} is granted and not admitted"
        assert granted.attempt == course.attempt + 1 <= ATTEMPTS_MAX, f"request {course.ref}: attempt {granted.attempt}"
        assert course.handed_ns is None, f"request {course.ref} runs again after its client got output"
        assert name not in self._gone, f"request {course.ref} is granted on {name}, which is gone"
        assert granted.lane not in lanes and 0 <= granted.lane < self._concurrency, f"{name} runs above its concurrency"
        lanes.add(granted.lane)

    def lane_freed(self, replica: str, lane: int) -> None:
        """A lane returns, once."""
        if replica not in self._gone:
            self._lanes[replica].remove(lane)

    def replica_gone(self, replica: str) -> None:
        """Its lanes are no more."""
        self._gone.add(replica)
        self._lanes.pop(replica, None)

    def ended(self, course: Course, *, admitted: bool) -> None:
        """A terminal word: the only one, a rejection before admission, an end after it."""
        assert not course.is_ended, f"request {course.ref} ended twice"
        assert course.is_admitted is admitted, f"request {course.ref} ended on the wrong side of admission"
        self._ended += 1

    def at_rest(self, left: dict[str, int]) -> None:
        """At the end: everything asked has ended, no lane is taken, and nothing is left. left: what should be 0, by name."""
        assert self._asked == self._ended, f"{self._asked} requests were asked for and {self._ended} have ended"
        taken = {name: len(lanes) for name, lanes in self._lanes.items() if lanes}
        assert not taken, f"lanes are taken and nothing runs: {taken}"
        found = {name: number for name, number in left.items() if number}
        assert not found, f"left at the end: {found}"
