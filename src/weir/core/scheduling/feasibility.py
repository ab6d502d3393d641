"""Can a request start in time? The wait predicted at the door, from how long a replica's lane has been occupied lately.

The model is the simplest that is true in both limits: with a free lane the wait is nothing; with n ahead of it on k lanes that
each stay occupied for s, a lane frees every s ÷ k. s is an exponentially decayed mean of what was measured, started from a
prior, so that a wrong estimate meets evidence.
"""

from weir.units import Millis, Nanos

_DECAY = 0.2
"""Weight of the newest observation: about ten requests set the estimate."""


class LaneOccupancy:
    """Mean time a request occupies a lane. prior_ms: the estimate before anything was measured, > 0."""

    __slots__ = ("_mean_ms",)

    def __init__(self, prior_ms: float) -> None:
        self._mean_ms = prior_ms

    @property
    def mean_ms(self) -> float:
        """The present estimate in milliseconds."""
        return self._mean_ms

    def observe(self, occupied_ns: Nanos) -> None:
        """A lane was freed after this long."""
        self._mean_ms += _DECAY * (occupied_ns / 1e6 - self._mean_ms)


def predicted_wait_ms(waiting: int, lanes: int, free: int, occupancy: LaneOccupancy) -> Millis:
    """Time until a new entry behind `waiting` others starts on `lanes` ≥ 1 lanes of which `free` are free, rounded up."""
    behind = waiting + 1 - free
    if behind <= 0:
        return 0
    return int(behind * occupancy.mean_ms / lanes) + 1
