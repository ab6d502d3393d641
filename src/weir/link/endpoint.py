"""One side of a session: messages go out in one frame per turn of the event loop, and come in each once, whatever links break.

The session outlives its links. While there is none, messages wait. What is too much, or cannot be written, read or worked on,
breaks the session, because from there on the two sides would not know the same; the owner hears it by `on_broken`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weir import errors
from weir.link.delivery import Inward, Outbox
from weir.link.frames import FRAME_BYTES_MAX, Frame, Kind, encode, frame
from weir.ports import Clock
from weir.units import Bytes, Millis, Nanos, ns_from_ms

OUTBOX_BYTES_MAX: Bytes = 64 * 1024 * 1024
"""A snapshot of 100,000 keys twice, or the messages of a second at the highest rate many times over."""
_BEATS_MISSED = 3
_TELL_EVERY = 64
"""Frames received after which the other side is told, should there be nothing else to say."""
_MESSAGES_PER_FRAME = 512
"""Of a few hundred bytes each; a part of a snapshot travels alone."""


class Wire(Protocol):
    """What a link writes to: an asyncio transport, as far as it is needed here."""

    def write(self, piece: bytes) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Endpoint:
    """A session's own side. epoch: of the coordinator. on_messages: takes what arrives, in order, on the event loop."""

    def __init__(
        self, clock: Clock, decode: Callable[[bytes], Sequence[Any]], on_messages: Callable[[Sequence[Any]], None]
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._decode = decode
        self._on_messages = on_messages
        self._outbox = Outbox(OUTBOX_BYTES_MAX)
        self._inward = Inward()
        self._waiting: list[Any] = []
        self._wire: Wire | None = None
        self._told = 0  # the number that the other side knows we have
        self._heard_ns: Nanos = clock.monotonic_ns()
        self.epoch = 0
        self.on_broken: Callable[[str], None] = lambda why: None

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Any) -> None:
        """Never blocks. It leaves with everything else that is sent in this turn of the loop."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(message)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            for start in range(0, len(waiting), _MESSAGES_PER_FRAME):
                for body in _bodies(waiting[start : start + _MESSAGES_PER_FRAME]):
                    self._write(self._outbox.add(body), body)
        except Exception:
            self.on_broken("a message cannot be written")
            raise
        if self._outbox.is_overfull:
            self.on_broken("too much waits for the other side")

    def _write(self, number: int, body: bytes) -> None:
        if self._wire is not None:
            self._told = self._inward.number
            self._wire.write(frame(Kind.BATCH, body, epoch=self.epoch, number=number, received=self._told))

    def beat(self) -> None:
        """Say that this side lives, and what it has."""
        self._write(0, b"")

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, found: Frame) -> None:
        """One frame of the link in use. Raises LinkFault, and whatever `on_messages` does; then the link is to be given up."""
        self._heard_ns = self._clock.monotonic_ns()
        try:
            self._outbox.acknowledge(found.received)
            if not found.number or not self._inward.accept(found.number):
                return
            self._on_messages(self._decode(found.body))
        except Exception:
            self.on_broken("a frame cannot be worked on")  # no repetition on another link mends it
            raise
        if self._inward.number - self._told >= _TELL_EVERY:
            self.beat()  # the other side keeps what it does not know to be here

    @property
    def received(self) -> int:
        """The number of the last frame that came in."""
        return self._inward.number

    @property
    def silent_ns(self) -> Nanos:
        """How long nothing was heard of the other side."""
        return self._clock.monotonic_ns() - self._heard_ns

    def fell_silent(self, heartbeat_ms: Millis) -> bool:
        """Whether the other side, which says something at least so often, is not there any more."""
        return self.silent_ns > ns_from_ms(_BEATS_MISSED * heartbeat_ms)

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, wire: Wire, received: int) -> None:
        """Use this link from now on. received: what the other side has; the rest is sent again. Raises LinkFault."""
        self.detach()
        self._heard_ns = self._clock.monotonic_ns()
        try:
            self._outbox.acknowledge(received)
        except errors.LinkFault:
            self.on_broken("the other side has more than was sent")
            raise
        self._wire = wire
        for number, body in self._outbox.unacknowledged():
            self._write(number, body)

    def detach(self) -> None:
        """Give the link up, if there is one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def finish(self) -> None:
        """Give the link up once what was written has left."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.finish()

    @property
    def is_attached(self) -> bool:
        """Whether there is a link."""
        return self._wire is not None

    def uses(self, wire: Wire) -> bool:
        """Whether that is the link in use."""
        return self._wire is wire


def _bodies(messages: Sequence[Any]) -> list[bytes]:
    """Messages as bodies: one, or where that is too large one for each half."""
    body = encode(messages)
    if len(body) <= FRAME_BYTES_MAX:
        return [body]
    assert len(messages) > 1, "a message is larger than a frame"
    half = len(messages) // 2
    return _bodies(messages[:half]) + _bodies(messages[half:])
