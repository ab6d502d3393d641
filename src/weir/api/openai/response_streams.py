"""A response whose stream is kept: what its events say, for those who do not read all of them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.api.openai.response_shapes import UNKNOWN_SETTINGS, response_object, status_of
from weir.api.openai.shapes import whole_answer
from weir.api.wire import Headers, Rendered
from weir.gateway.kept_reader import EVENT_END
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

_CREATED_UNKNOWN = 0
_BEGINNING = ("response.created", "response.in_progress")


class ResponsesShape:
    """Events of responses, for those who keep them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def closing(self, record: GenerationRecord, first: bytes, number: int) -> bytes:
        """The terminal event, behind the two that say that it began where nothing came."""
        response = retrieved(record, first)
        status = status_of(record)
        last = f"response.{status if status in ('completed', 'incomplete') else 'failed'}"
        names = (last,) if number else (*_BEGINNING, last)
        events = [{"type": name, "sequence_number": place, "response": response} for place, name in enumerate(names, number)]
        return b"".join(
            b"event: %b\ndata: %b%b" % (name.encode(), msgspec.json.encode(event), EVENT_END)
            for name, event in zip(names, events, strict=True)
        )

    def whole(self, pieces: Sequence[bytes], record: GenerationRecord, standing: StandingView | None) -> Rendered:
        """The response that the terminal event has in it, or the error that it ended as."""
        return whole_answer(record, response_in(pieces[-1], last=True), standing or StandingView(), self._clock.wall_ms())

    def begun(self, first: bytes, headers: Headers) -> Rendered:
        """The response as it begins."""
        return Rendered(200, b"application/json", msgspec.json.encode(response_in(first)), headers)


def response_in(piece: bytes, *, last: bool = False) -> dict[str, Any]:
    """The response in the first of some events, or in the last."""
    events = piece.split(EVENT_END)
    event = events[-2] if last else events[0]
    response: dict[str, Any] = msgspec.json.decode(event.partition(b"\ndata: ")[2])["response"]
    return response


def retrieved(record: GenerationRecord, first: bytes) -> dict[str, Any]:
    """A response as its record has it, with what its first event says of the request. first: empty where that is not known."""
    begun = response_in(first) if first else {"created_at": _CREATED_UNKNOWN, **UNKNOWN_SETTINGS}
    known = response_object(record, {}, begun["created_at"], None, [])
    return {**known, **begun, **known}  # the second one for its values, the first for the order of fields
