"""A generation in the shape of OpenAI's responses, streamed and not.

Every event of a stream has its name, its type and a number, 0, 1, 2, … without a gap. Exactly one terminal event ends it:
`response.completed`, `response.incomplete` or `response.failed`, with the whole response in it, and nothing behind it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.api.generations import STREAM_HEADERS
from weir.api.openai.response_items import OutputItems
from weir.api.openai.response_shapes import response_object, settings_of, status_of
from weir.api.openai.responses_request import ResponseOptions
from weir.api.openai.shapes import refusal, whole_answer
from weir.api.plain_answer import show, show_refusal
from weir.api.wire import id_headers, limit_headers
from weir.core.endings import Status
from weir.core.output import Delta, text_of
from weir.core.request import InferenceRequest
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "responses"
_NAMES = {"response_format": "text.format", "logprobs": "include", "deadline_ms": "weir-deadline-ms"}
"""Our fields' names → what this surface calls them, where they differ."""


class ResponseAnswer:
    """Answer of responses."""

    def __init__(
        self, client: Client, clock: Clock, request_id: str, request: InferenceRequest, options: ResponseOptions
    ) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._settings = settings_of(request, options)
        self._has_logprobs = request.demands.top_logprobs is not None
        self._created = clock.wall_ms() // 1000
        self._next_number = 0
        self._events: list[bytes] = []
        self._items: OutputItems | None = None

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, accepted: Accepted) -> None:
        """Headers, and the two events that say that it began."""
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        self._items = OutputItems(accepted.generation_id, self._tell, has_logprobs=self._has_logprobs)
        running = GenerationRecord(
            accepted.generation_id, accepted.request_id, 0, accepted.alias, accepted.revision, Status.RUNNING
        )
        # Once for both: it repeats instructions and tools, which may be long.
        response = msgspec.Raw(msgspec.json.encode(response_object(running, self._settings, self._created, None, [])))
        self._tell("response.created", {"response": response})
        self._tell("response.in_progress", {"response": response})
        self._flush()

    def output(self, pieces: Sequence[Delta]) -> None:
        """A delta for each piece, with what begins before it, in one write."""
        items, encode = self._items, msgspec.json.encode
        assert items is not None
        for piece in pieces:
            if type(piece) is not Delta:
                items.add(piece)
            elif piece.text:
                message = items.message()
                message.text.write(piece.text)
                self._events.append(b'%b%d,"delta":%b}\n\n' % (message.delta_head, self._next_number, encode(piece.text)))
                self._next_number += 1
        self._flush()

    def finish_reason(self, record: GenerationRecord) -> None:
        """The ends of all items, which do not wait for the settlement."""
        assert self._items is not None
        self._items.close("completed" if status_of(record) == "completed" else "incomplete")
        self._flush()

    def keep_alive(self) -> None:
        """A comment."""
        self.client.write(b": keep-alive\n\n")

    def _tell(self, name: str, fields: dict[str, Any]) -> None:
        event = {"type": name, "sequence_number": self._next_number, **fields}
        self._next_number += 1
        self._events.append(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event)))

    def _flush(self) -> None:
        if self._events:
            self.client.write(self._events[0] if len(self._events) == 1 else b"".join(self._events), len(self._events))
            self._events.clear()

    # ── its end, and whole answers ───────────────────────────────────────────────────────────────────────────────────

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The terminal event, or the whole body."""
        if self._items is None:
            await self._end_whole(record, pieces, standing)
            return
        if record.status is Status.COMPLETED:
            self.finish_reason(record)
        status = status_of(record)
        name = status if status in ("completed", "incomplete") else "failed"
        self._tell(f"response.{name}", {"response": self._response(record, self._items)})
        self._flush()
        await self.client.finish()

    async def _end_whole(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        body: dict[str, Any] = {}
        if record.error_code is None:
            items = OutputItems(record.generation_id, _tell_nobody, has_logprobs=self._has_logprobs)
            for piece in _joined(pieces):
                items.add(piece)
            items.close("completed" if status_of(record) == "completed" else "incomplete")
            body = self._response(record, items)
        rendered = whole_answer(record, body, standing, self._clock.wall_ms())
        await show(self.client, rendered)

    def _response(self, record: GenerationRecord, items: OutputItems) -> dict[str, Any]:
        now = self._clock.wall_ms() // 1000
        return response_object(record, self._settings, self._created, now, items.shown())

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """OpenAI's error shape, with the names that fields have here."""
        rendered = refusal(error, self._clock.wall_ms(), _NAMES, generation)
        await show_refusal(self.client, rendered, self._request_id, standing)


def _joined(pieces: Sequence[Delta]) -> Sequence[Delta]:
    """The same in one piece where it is nothing but text, as nearly always."""
    return [Delta(text_of(pieces))] if all(type(piece) is Delta for piece in pieces) else pieces


def _tell_nobody(name: str, fields: dict[str, Any]) -> None:
    """A whole answer has no events."""
