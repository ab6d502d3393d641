"""A response whose stream is kept: what its events say, for those who do not read all of them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.api.openai.response_shapes import UNKNOWN_SETTINGS, response_object, status_of
from weir.api.openai.shapes import whole_answer
from weir.api.wire import Headers, Rendered
from weir.core.endings import Status
from weir.gateway.kept_reader import EVENT_END
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

_CREATED_UNKNOWN = 0
_BEGINNING = ("response.created", "response.in_progress")


class ResponsesShape:
    """Events of responses, for those who keep them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def closing(self, record: GenerationRecord, pieces: Sequence[bytes]) -> bytes:
        """The terminal event, behind the two that say that it began where nothing came. A complete one has what was made."""
        response = retrieved(record, pieces[0] if pieces else b"")
        if record.status is Status.COMPLETED:
            response["output"] = output_in(pieces, status_of(record))
        status = status_of(record)
        last = f"response.{status if status in ('completed', 'incomplete') else 'failed'}"
        number = sum(piece.count(EVENT_END) for piece in pieces)
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


def output_in(pieces: Sequence[bytes], status: str) -> list[dict[str, Any]]:
    """The items of a response as far as its events tell them. status: of those that were not ended."""
    items: dict[int, dict[str, Any]] = {}
    for event in b"".join(pieces).split(EVENT_END):
        data = event.partition(b"\ndata: ")[2]
        told: dict[str, Any] = msgspec.json.decode(data) if data else {"type": ""}
        match told["type"]:
            case "response.output_item.added" | "response.output_item.done":
                items[told["output_index"]] = told["item"]
            case "response.content_part.added":
                items[told["output_index"]]["content"].append(told["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[told["output_index"]]["content"][told["content_index"]]["text"] += told["delta"]
            case "response.function_call_arguments.delta":
                items[told["output_index"]]["arguments"] += told["delta"]
    for item in items.values():
        if item["status"] == "in_progress":
            item["status"] = status
    return [items[index] for index in sorted(items)]
