"""Exactly-once delivery over links that break: what one side of a session has sent and not yet heard of, and what it has got.

Frames are numbered from 1 for each direction of a session, and kept until the other side says that it has them. A link that is
taken up again repeats those that it has not; the receiver skips what it has. Pure: the channel's shell drives it.
"""

from collections import deque

from weir import errors
from weir.units import Bytes


class Outbox:
    """Bodies sent and not acknowledged, in order. bytes_max: of them together; a peer that falls behind by more is lost."""

    __slots__ = ("_bodies", "_bytes", "_bytes_max", "_number")

    def __init__(self, bytes_max: Bytes) -> None:
        self._bytes_max = bytes_max
        self._bodies: deque[tuple[int, bytes]] = deque()
        self._bytes: Bytes = 0
        self._number = 0

    @property
    def is_overfull(self) -> bool:
        """Whether more waits than is kept."""
        return self._bytes > self._bytes_max

    def add(self, body: bytes) -> int:
        """The number that this body is sent under."""
        self._number += 1
        self._bodies.append((self._number, body))
        self._bytes += len(body)
        return self._number

    def acknowledge(self, number: int) -> None:
        """The other side has everything up to this number. Raises LinkFault for one that was never sent."""
        if number > self._number:
            raise errors.LinkFault("The peer acknowledged a frame that it was never sent.")
        bodies = self._bodies
        while bodies and bodies[0][0] <= number:
            self._bytes -= len(bodies.popleft()[1])

    def unacknowledged(self) -> list[tuple[int, bytes]]:
        """What is sent again on another link, with its numbers."""
        return list(self._bodies)


class Inward:
    """What was received. number: of the last frame."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def accept(self, number: int) -> bool:
        """Whether this frame is the next one; False: it is one that came before. Raises LinkFault for a gap."""
        if number <= self.number:
            return False
        if number != self.number + 1:
            raise errors.LinkFault("A frame is missing on the link.")
        self.number = number
        return True
