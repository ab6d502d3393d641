"""A per-minute limit the slow way: every take from the first one on is laid out again for each question.

It is the bucket as the policy states it, for the checkers: takes queue up on an axis of volume that refills at the limit's
rate, and a settlement makes its own take smaller by what is unused and not refilled. It keeps nothing that could drift.
"""

from collections.abc import Hashable

from weir.units import NANOS_PER_MINUTE, Nanos, ceil_div


class NaiveBucket:
    """rate: units per minute ≥ 1, and the capacity. A take is remembered as when it came and the volume that still counts."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._takes: dict[Hashable, list[int]] = {}

    def _laid_out(self) -> dict[Hashable, tuple[int, int]]:
        ends_at: int | None = None  # times of an earlier process may be negative
        places = {}
        for owner, (at_ns, volume) in self._takes.items():
            begins_at = self.rate * at_ns if ends_at is None else max(ends_at, self.rate * at_ns)
            ends_at = begins_at + volume
            places[owner] = (begins_at, ends_at)
        return places

    def _ahead(self, now_ns: Nanos) -> int:
        """The volume that is used and has not refilled."""
        places = self._laid_out()
        return max(0, next(reversed(places.values()))[1] - self.rate * now_ns) if places else 0

    def used(self, now_ns: Nanos) -> int:
        """Units used, rounded up."""
        return ceil_div(self._ahead(now_ns), NANOS_PER_MINUTE)

    def wait_ns(self, units: int, now_ns: Nanos) -> Nanos:
        """Time until units fit, with nothing else taken; units and rate: 1 … rate."""
        excess = self._ahead(now_ns) + units * NANOS_PER_MINUTE - self.rate * NANOS_PER_MINUTE
        return max(0, ceil_div(excess, self.rate))

    def full_again_ns(self, now_ns: Nanos) -> Nanos:
        """Time until nothing is used."""
        return ceil_div(self._ahead(now_ns), self.rate)

    def take(self, owner: Hashable, units: int, now_ns: Nanos) -> None:
        """One more take."""
        self._takes[owner] = [now_ns, units * NANOS_PER_MINUTE]

    def restore(self, owner: Hashable, units: int, at_ns: Nanos) -> None:
        """A take of an earlier process: never before another that came before it, and cut to what the bucket holds."""
        at_ns = max([at_ns, *(before_ns for before_ns, _ in self._takes.values())])
        room = self.rate * NANOS_PER_MINUTE - self._ahead(at_ns)
        self._takes[owner] = [at_ns, min(units * NANOS_PER_MINUTE, room)]

    def settle(self, owner: Hashable, used: int, now_ns: Nanos) -> int:
        """What a take gets back that used this much."""
        if owner not in self._takes:
            return 0
        begins_at, ends_at = self._laid_out()[owner]
        not_refilled = max(0, ends_at - max(begins_at, self.rate * now_ns)) // NANOS_PER_MINUTE
        returned = min(max(0, self._takes[owner][1] // NANOS_PER_MINUTE - used), not_refilled)
        self._takes[owner][1] -= returned * NANOS_PER_MINUTE
        return returned
