"""A strict reader of server-sent events by the standard's algorithm, independent of the product's own codec.

Where the standard forgives, this refuses: bytes that are no UTF-8, fields that it does not name, a field that comes twice in
one event, and a stream that ends within an event.
"""

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ONCE = ("event", "id", "retry")


@dataclass(frozen=True)
class Event:
    """One server-sent event; `data` as it was written, its lines joined. name, id: empty where it had none."""

    name: str
    id: str
    data: str

    @property
    def json(self) -> Any:
        """The data as JSON."""
        return json.loads(self.data)


class EventReader:
    """Bytes in any pieces → events. comments: how many comment lines there were."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._rest = ""
        self._begun = False
        self._after_cr = False
        self._fields: dict[str, list[str]] = {}
        self.comments = 0

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes."""
        text = self._decoder.decode(piece)
        if text and not self._begun:
            self._begun, text = True, text.removeprefix("\ufeff")
        if text and self._after_cr:
            self._after_cr, text = False, text.removeprefix("\n")
        self._after_cr |= text.endswith("\r")
        *lines, self._rest = (self._rest + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def close(self) -> None:
        """The stream ended, which it may do only between two events."""
        self._decoder.decode(b"", final=True)
        assert not self._rest and not self._fields, f"it ended within an event, or is none: {self._rest[:200]!r} {self._fields}"

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self.comments += 1
            return None
        name, _, value = line.partition(":")
        assert name in ("data", *_ONCE), f"not a field of the standard: {name[:80]!r}"
        values = self._fields.setdefault(name, [])
        assert name == "data" or not values, f"{name} came twice"
        values.append(value.removeprefix(" "))
        return None

    def _dispatch(self) -> Event | None:
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            assert not fields, f"an event without data: {fields}"
            return None
        name, number = (fields.get(field, [""])[0] for field in ("event", "id"))
        assert "\0" not in number
        return Event(name, number, "\n".join(fields["data"]))


def events_of(stream: bytes | Iterable[bytes]) -> list[Event]:
    """The events of a whole stream."""
    reader = EventReader()
    pieces = [stream] if isinstance(stream, bytes) else stream
    events = [event for piece in pieces for event in reader.feed(piece)]
    reader.close()
    return events
