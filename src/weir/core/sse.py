"""Server-sent events, incrementally: bytes in any pieces → the payloads of whole events, and events → bytes.

It decides where an event ends; it never looks inside a payload, waits, or grows beyond its bound. Engine adapters feed it what
they read; LF, CRLF, CR, comments, several data lines and cuts anywhere (also inside a line end or a UTF-8 sequence) are fine.
Names, ids and retry times of received events are dropped: no engine says anything in them that its payload does not.
"""

from weir import errors
from weir.units import Bytes

EVENT_BYTES_MAX = 1024 * 1024


class SseDecoder:
    """One stream's decoder. event_bytes_max: the largest event, its field names included. An unfinished event is dropped."""

    __slots__ = ("_after_cr", "_event_bytes_max", "_rest")

    def __init__(self, event_bytes_max: Bytes = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._rest = b""
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data payloads of the events that this piece completes, in order. Raises EngineError above the bound."""
        if self._after_cr or b"\r" in chunk:
            chunk = self._with_line_feeds(chunk)
        blocks = (self._rest + chunk if self._rest else chunk).split(b"\n\n")
        self._rest = blocks.pop()
        if len(self._rest) > self._event_bytes_max + 1:  # + 1: half of the empty line that ends the event
            raise _too_large()
        payloads: list[bytes] = []
        for block in blocks:
            if len(block) > self._event_bytes_max:
                raise _too_large()
            if block.startswith(b"data: ") and b"\n" not in block:
                payloads.append(block[6:])
            elif (payload := _payload(block)) is not None:
                payloads.append(payload)
        return payloads

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        """The piece with LF as its only line end: a CR ends its line at once, and the LF of a CRLF is then skipped."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _payload(block: bytes) -> bytes | None:
    """The data lines of a block joined, None when it has none."""
    values = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:") or line == b"data"]
    return b"\n".join(values) if values else None


def _too_large() -> errors.EngineError:
    return errors.EngineError("The engine sent an event above the bound.")
