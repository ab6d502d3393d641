"""The machine's clocks and randomness behind their ports: the only place that reads them."""

import os
import time

from weir.units import NANOS_PER_MILLI, Millis

_BLOCK_BYTES = 4096


class SystemClock:
    """The operating system's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)  # a request reads it 26 times, so nothing is called in between
    """Nanoseconds that never go back; meaningless between processes."""

    def wall_ms(self) -> Millis:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // NANOS_PER_MILLI


class SystemEntropy:
    """The operating system's random bytes, read in blocks: a system call costs more than an id. For one thread."""

    def __init__(self) -> None:
        self._block = b""
        self._used = 0

    def token(self, size: int) -> bytes:
        """size unpredictable bytes, never given twice."""
        if self._used + size > len(self._block):
            self._block, self._used = os.urandom(max(_BLOCK_BYTES, size)), 0
        start, self._used = self._used, self._used + size
        return self._block[start : self._used]
