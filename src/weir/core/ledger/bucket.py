"""A per-minute limit as a token bucket, exact in integers (the generic cell rate algorithm, ITU-T I.371, in volume form).

The bucket's capacity is the whole per-minute number and it refills continuously. Instead of a level there is a clock that runs
at the refill rate and a mark, the *tat* (theoretical arrival time); `tat − clock` is what is used. Both are volumes: one unit
is `SCALE`, and the clock advances by `rate` per nanosecond, so that nothing is ever rounded and a changed rate leaves every
volume as it is.

An honest return. Each take occupies an interval of the volume axis, [start, end). What lies behind the clock has refilled
already and cannot be given back; giving it back would let more through in a window than capacity + rate · window. A return
shortens its own interval and moves every later take's interval down, which is exactly the bucket that would have been if
the take had been smaller from the start; the bound then holds for what was settled.
"""

import msgspec

from weir.units import NANOS_PER_MINUTE, Nanos, ceil_div

SCALE = NANOS_PER_MINUTE
"""Volume of one unit (a request or a token)."""


class Take(msgspec.Struct, gc=False):
    """What one hold occupies: volumes on the bucket's axis, start ≤ end. A lowered rate cuts it, so any volume may be left."""

    start: int
    end: int


class Bucket:
    """rate: units per minute, ≥ 0, which is the capacity too. Times are nanoseconds of one monotonic clock."""

    __slots__ = ("_clock", "_now_ns", "_takes", "_tat", "rate")

    def __init__(self, rate: int, now_ns: Nanos) -> None:
        self.rate = rate
        self._clock = 0
        self._now_ns = now_ns
        self._tat = 0
        self._takes: dict[object, Take] = {}

    def _run_to(self, now_ns: Nanos) -> None:
        if now_ns > self._now_ns:
            self._clock += self.rate * (now_ns - self._now_ns)
            self._now_ns = now_ns

    def used(self, now_ns: Nanos) -> int:
        """Units used now, rounded up; 0 … rate."""
        self._run_to(now_ns)
        return ceil_div(max(0, self._tat - self._clock), SCALE)

    def remaining(self, now_ns: Nanos) -> int:
        """Whole units that can be taken now."""
        return max(0, self.rate - self.used(now_ns))

    def wait_ns(self, units: int, now_ns: Nanos) -> Nanos | None:
        """Time until `units` fit if nothing else is taken: 0 when they fit now, None when they never will."""
        self._run_to(now_ns)
        if units > self.rate:
            return None
        excess = max(self._tat, self._clock) + units * SCALE - (self._clock + self.rate * SCALE)
        return max(0, ceil_div(excess, self.rate)) if self.rate else 0

    def full_again_ns(self, now_ns: Nanos) -> Nanos:
        """Time until nothing is used if nothing is taken meanwhile; 0 for a bucket of rate 0."""
        self._run_to(now_ns)
        return ceil_div(max(0, self._tat - self._clock), self.rate) if self.rate else 0

    def take(self, owner: object, units: int, now_ns: Nanos) -> None:
        """Occupy `units` for `owner`, unconditionally: callers asked `wait_ns` first, in the same step."""
        self._run_to(now_ns)
        start = max(self._tat, self._clock)
        self._tat = start + units * SCALE
        self._takes[owner] = Take(start, self._tat)

    def restore(self, units: int, at_ns: Nanos, owner: object | None = None) -> None:
        """Count a take of an earlier process; one made under a higher rate is clamped to this one's.

        owner: whoever will settle it; None: nobody will.
        """
        self._run_to(at_ns)
        start = max(self._tat, self._clock)
        self._tat = min(start + units * SCALE, self._clock + self.rate * SCALE)
        if owner is not None and self._tat > start:
            self._takes[owner] = Take(start, self._tat)

    def settle(self, owner: object, used_units: int, now_ns: Nanos) -> int:
        """End the take of `owner` that used `used_units`; returns the units given back: min(unused, not refilled yet)."""
        self._run_to(now_ns)
        take = self._takes.get(owner)
        if take is None:
            return 0
        taken = (take.end - take.start) // SCALE
        not_refilled = max(0, take.end - max(take.start, self._clock)) // SCALE
        returned = min(max(0, taken - used_units), not_refilled)
        if returned:
            self._move_down_after(owner, returned * SCALE)
        del self._takes[owner]
        self._forget_refilled()
        return returned

    def _move_down_after(self, owner: object, volume: int) -> None:
        """Shift every take made after `owner`'s, and the mark, down by `volume`."""
        for later, take in reversed(self._takes.items()):  # pragma: no branch - the owner is among them
            if later == owner:
                break
            take.start -= volume
            take.end -= volume
        self._tat -= volume

    def _forget_refilled(self) -> None:
        """Drop takes that lie wholly behind the clock from the front: they can return nothing."""
        while self._takes and (first := next(iter(self._takes))) is not None:
            if self._takes[first].end > self._clock:
                return
            del self._takes[first]

    def change_rate(self, rate: int, now_ns: Nanos) -> None:
        """A new per-minute number keeps what is used, clamped to the new capacity."""
        self._run_to(now_ns)
        self.rate = rate
        self._tat = min(self._tat, self._clock + rate * SCALE)
        for take in self._takes.values():
            take.end = min(take.end, max(self._tat, take.start))
