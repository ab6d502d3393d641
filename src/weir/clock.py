"""The machine's clocks and randomness behind their ports: the only place that reads them."""

import os
import time

from weir.units import NANOS_PER_MILLI, Millis, Nanos


class SystemClock:
    """The operating system's clocks."""

    def monotonic_ns(self) -> Nanos:
        """Nanoseconds that never go back; meaningless between processes."""
        return time.monotonic_ns()

    def wall_ms(self) -> Millis:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // NANOS_PER_MILLI


class SystemEntropy:
    """The operating system's random bytes."""

    def token(self, size: int) -> bytes:
        """size unpredictable bytes."""
        return os.urandom(size)
