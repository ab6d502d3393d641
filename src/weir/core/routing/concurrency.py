"""How many requests a replica may run at once, so that the p95 of their time per output token meets their classes' targets.

Source: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
Congestion Avoidance in Computer Networks", 1989), with a generation of requests in the place of a round trip. Each request
slows all that run beside it: too many show as late tokens, too few as nothing at all, and are found only by trying more. It
counts and keeps time; who gets a lane is the scheduler's. It must never lower a limit for what ran under an earlier one.
"""

from weir.units import NANOS_PER_SECOND, Nanos

WINDOW = 20
"""Completed requests that a verdict speaks of at least: the fewest of which one in twenty is a whole one."""
PATIENCE = 5
"""Good windows before a limit that was too high is tried again: all that is late meanwhile then stays below one in twenty."""
QUIET_NS: Nanos = 60 * NANOS_PER_SECOND
_LATE_SHARE = 20
"""One in so many may be late: p95."""
_STEP_SHARE = 16
"""An increase is this part of the limit, one lane at least. Its effect shows a generation later, so that a limit may be 12 %
too high by then, whatever its size; single lanes would take minutes to find a hundred more.
"""


class AdaptiveLimit:
    """Of one replica. most: its lanes; least: what it may always use, 1 … most. allowed: lanes that may be taken now.

    A window is a generation: as many completed requests as ran at once, or WINDOW if that is more. As soon as more than one in
    twenty of it are late, the limit falls to 0.8 of what ran. At its end the limit rises by a step if it was used in full; to
    one that failed before only after PATIENCE such windows. When nothing completed for QUIET_NS, or for twice as long as the
    last one took if that is more, what is known is old: the limit rises by a step, and by another after as long again.
    """

    __slots__ = (
        "_counted",
        "_failed",
        "_heard_ns",
        "_held",
        "_late",
        "_least",
        "_lowered_ns",
        "_most",
        "_peak",
        "_quiet_ns",
        "allowed",
    )

    def __init__(self, most: int, least: int) -> None:
        self._most = most
        self._least = least
        self._lowered_ns: Nanos = 0
        self._heard_ns: Nanos = 0
        self._quiet_ns: Nanos = QUIET_NS
        self._counted = self._late = self._peak = 0  # of the window
        self._held = 0  # good windows under this limit
        self._failed = most + 1  # the latest limit that was too high
        self.allowed = most

    def observe(self, ratio: float, began_ns: Nanos, running: int, now_ns: Nanos) -> bool:
        """A request completed; whether `allowed` changed. What was dispatched before the last decrease does not count.

        ratio: its time per output token ÷ its class's target; began_ns: its dispatch; running: lanes taken, its own among them.
        """
        self._quiet_ns = max(QUIET_NS, 2 * (now_ns - began_ns))
        has_grown = self.age(now_ns)
        self._heard_ns = now_ns
        if began_ns < self._lowered_ns:
            return has_grown
        self._counted += 1
        self._late += ratio > 1
        self._peak = max(self._peak, min(running, self.allowed))
        return self._judge(now_ns) or has_grown

    def age(self, now_ns: Nanos) -> bool:
        """Time passed; whether `allowed` rose because nothing was heard for so long. Asked from time to time."""
        if now_ns - self._heard_ns < self._quiet_ns:
            return False
        self._heard_ns = now_ns
        self._failed = self._most + 1
        return self._set(self._raised())

    def _judge(self, now_ns: Nanos) -> bool:
        generation = max(WINDOW, self._peak)
        if self._late * _LATE_SHARE > generation:
            self._lowered_ns = now_ns
            self._failed = self._peak
            return self._set(max(self._least, self._peak * 4 // 5))
        if self._counted < generation:
            return False
        return self._set(self._tried() if self._peak == self.allowed else self.allowed)

    def _tried(self) -> int:
        """The limit after a window that used it in full and was in time."""
        if self.allowed >= self._failed:
            self._failed = self._most + 1
        self._held += 1
        raised = self._raised()
        return self.allowed if raised >= self._failed and self._held < PATIENCE else raised

    def _raised(self) -> int:
        return min(self._most, self.allowed + max(1, self.allowed // _STEP_SHARE))

    def _set(self, allowed: int) -> bool:
        """A new window begins, under this limit."""
        changed = allowed != self.allowed
        if changed:
            self.allowed, self._held = allowed, 0
        self._counted = self._late = self._peak = 0
        return changed
