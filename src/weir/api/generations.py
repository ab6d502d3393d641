"""The native surface: `POST /v1/generations`, JSON or SSE, and its records.

Parses a body into an InferenceRequest and shows a generation as the public contract pins it: events `accepted`, `output`,
`done` with ids 0, 1, 2, … and no gap, or one JSON body with the HTTP status of its ending.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from weir import errors
from weir.api.plain_answer import show, show_refusal
from weir.api.wire import (
    Fields,
    Headers,
    Rendered,
    checked_text,
    id_headers,
    limit_headers,
    problem,
    refuse_field,
    retry_headers,
)
from weir.core.endings import ending
from weir.core.output import Delta, text_of
from weir.core.request import DEADLINE_MS_MAX, InferenceRequest, Message, Sampling
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "generations"
OUTPUT_TOKENS_MAX = 2**31 - 1
REQUEST_ID_CHARS_MAX = 128
_REQUEST_ID_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-")
_REQUEST_ID_ACCEPTED = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
MESSAGES_MAX = 10_000
ROLES = ("system", "user", "assistant")

SAMPLING_FIELDS = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty")
TEMPERATURE_MAX = 2
PENALTY_MAX = 2
SEED_MAX = 2**32 - 1
STOPS_MAX, STOP_CHARS_MAX = 4, 1_000
ALIAS_CHARS_MAX = 256
SESSION_CHARS_MAX = 128
MESSAGE_FIELDS = ("role", "content")

FIELDS = (
    "request_id",
    "model_alias",
    "input",
    "max_output_tokens",
    "deadline_ms",
    "stream",
    *SAMPLING_FIELDS,
    "session",
    "retain",
)

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_generation(document: Mapping[str, Any]) -> InferenceRequest:
    """A native body. Raises InvalidRequest or UnsupportedField naming the field."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    alias = fields.string("model_alias", longest=ALIAS_CHARS_MAX)
    if alias is None:
        refuse_field("model_alias", "the name of a model alias")
    return InferenceRequest(
        model_alias=alias,
        prompt=_prompt(fields.raw("input")),
        max_output_tokens=fields.integer("max_output_tokens", 1, OUTPUT_TOKENS_MAX),
        deadline_ms=fields.integer("deadline_ms", 1, DEADLINE_MS_MAX),
        stream=fields.boolean("stream", default=False),
        sampling=sampling_of(fields, stop_field="stop"),
        session=fields.string("session", longest=SESSION_CHARS_MAX),
        request_id=request_id_of(fields.raw("request_id"), "request_id"),
        retain=fields.boolean("retain", default=False),
    )


def _prompt(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            refuse_field("input", "a non-empty string, or a list of {role, content}")
        return checked_text(value, "input")
    return messages_of(value, "input", f"a non-empty string, or a list of 1 to {MESSAGES_MAX} of {{role, content}}", _message)


def messages_of(value: Any, field: str, accepted: str, message_of: Callable[[Any, str], Message]) -> tuple[Message, ...]:
    """A list of 1 to MESSAGES_MAX messages, each read by its surface. Raises InvalidRequest and what `message_of` raises."""
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES_MAX:
        refuse_field(field, accepted)
    return tuple(message_of(item, f"{field}[{index}]") for index, item in enumerate(value))


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        refuse_field(where, "an object with role and content")
    Fields(item, f"{where}.").refuse_unknown(MESSAGE_FIELDS)
    role = item.get("role")
    if role not in ROLES:
        refuse_field(f"{where}.role", ", ".join(ROLES))
    return Message(role, checked_text(item.get("content"), f"{where}.content"))


def sampling_of(fields: Fields, *, stop_field: str) -> Sampling:
    """Sampling parameters with OpenAI's names and ranges."""
    return Sampling(
        temperature=fields.number("temperature", 0, TEMPERATURE_MAX),
        top_p=fields.number("top_p", 0, 1),
        seed=fields.integer("seed", 0, SEED_MAX),
        stop=fields.strings(stop_field, most=STOPS_MAX, longest=STOP_CHARS_MAX),
        presence_penalty=fields.number("presence_penalty", -PENALTY_MAX, PENALTY_MAX),
        frequency_penalty=fields.number("frequency_penalty", -PENALTY_MAX, PENALTY_MAX),
    )


def request_id_of(value: Any, field: str) -> str | None:
    """A caller's request id. Raises InvalidRequest naming the accepted characters."""
    if value is not None and not is_request_id(value):
        refuse_field(field, _REQUEST_ID_ACCEPTED)
    return value


def is_request_id(value: Any) -> TypeGuard[str]:
    """Whether this has the form of a request id."""
    return isinstance(value, str) and 1 <= len(value) <= REQUEST_ID_CHARS_MAX and set(value) <= _REQUEST_ID_CHARS


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def generation_body(record: GenerationRecord, text: str | None = None) -> dict[str, Any]:
    """The public shape of a generation. text: its output, None where it is not shown."""
    body: dict[str, Any] = {
        "id": record.generation_id,
        "request_id": record.request_id,
        "model_alias": record.alias,
        "model_revision": record.revision,
        "status": record.status,
        "finish_reason": record.finish_reason,
    }
    if text is not None:
        body["output"] = text
    if record.finish_reason is not None:
        body |= terminal_fields(record)
    return body


def terminal_fields(record: GenerationRecord) -> dict[str, Any]:
    """usage, timing, and error where there is one."""
    timing = record.timing
    fields: dict[str, Any] = {
        "usage": {
            "input_tokens": record.input_tokens,
            "cached_input_tokens": record.cached_input_tokens,
            "output_tokens": record.output_tokens,
            "cost_microusd": record.cost_microusd,
            "basis": record.basis,
            "settlement": "posted" if record.posted else "pending",
        },
        "timing": {
            name: None if value is None else round(value, 3)
            for name, value in (
                ("queue_ms", timing.queue_ms),
                ("ttft_ms", timing.ttft_ms),
                ("tpot_ms", timing.tpot_ms),
                ("total_ms", timing.total_ms),
            )
        },
    }
    if record.error_code is not None:
        fields["error"] = {"code": record.error_code, "detail": record.error_detail or error_of_record(record).detail}
    return fields


def error_of_record(record: GenerationRecord) -> WeirError:
    """An ending as the error that surfaces show; only for endings that have one."""
    assert record.error_code is not None
    error = errors.ERROR_BY_CODE[record.error_code]
    waiting_helps = error.http_status == 503
    return error(record.error_detail or "", retry_after_ms=1_000 if waiting_helps else None)


def ending_retry_headers(record: GenerationRecord) -> Headers:
    """Whether an SDK should send an ended request again."""
    if record.error_code is None or record.finish_reason is None:
        return []
    rule = ending(record.finish_reason)
    if not rule.retry_if_nothing_generated:
        error = error_of_record(record)
        return [*retry_headers(error, generated=True)] if error.http_status != 200 else []
    return retry_headers(error_of_record(record), generated=record.output_tokens > 0)


def render_record(record: GenerationRecord, text: str | None, standing: StandingView | None) -> Rendered:
    """An ended generation as a plain answer, with the HTTP status of its ending."""
    assert record.finish_reason is not None
    status = ending(record.finish_reason).http_status
    headers = [*id_headers(record.request_id), *limit_headers(standing), *ending_retry_headers(record)]
    return Rendered(status, b"application/json", msgspec.json.encode(generation_body(record, text)), headers)


def accepted_event(generation_id: str, request_id: str, alias: str, revision: str) -> bytes:
    """The first event of a stream, number 0."""
    data = {"id": generation_id, "request_id": request_id, "model_alias": alias, "model_revision": revision}
    return b"id: 0\nevent: accepted\ndata: %b\n\n" % msgspec.json.encode(data)


def done_event(number: int, record: GenerationRecord) -> bytes:
    """The last event of a stream."""
    data = {"status": record.status, "finish_reason": record.finish_reason, **terminal_fields(record)}
    return b"id: %d\nevent: done\ndata: %b\n\n" % (number, msgspec.json.encode(data))


class NativeAnswer:
    """Answer of the native surface. request_id: known from the body, or None until the request is admitted."""

    def __init__(self, client: Client, clock: Clock, request_id: str) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._next_id = 0
        self._open = False

    async def open(self, accepted: Accepted) -> None:
        """Headers and `accepted`."""
        self._open = True
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        self.client.write(accepted_event(accepted.generation_id, accepted.request_id, accepted.alias, accepted.revision))
        self._next_id = 1

    def output(self, pieces: Sequence[Delta]) -> None:
        """`output` events, one per text, in one write; a model's reasoning is not shown here."""
        encode = msgspec.json.encode
        number = self._next_id
        texts = [piece.text for piece in pieces if piece.text]
        parts = [
            b'id: %d\nevent: output\ndata: {"text":%b}\n\n' % (index, encode(text)) for index, text in enumerate(texts, number)
        ]
        self._next_id = number + len(parts)
        if parts:
            self.client.write(parts[0] if len(parts) == 1 else b"".join(parts), len(parts))

    def finish_reason(self, record: GenerationRecord) -> None:
        """Nothing: `done` tells it, with the usage."""

    def keep_alive(self) -> None:
        """A comment."""
        self.client.write(b": keep-alive\n\n")

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """`done`, or the whole body."""
        if self._open:
            self.client.write(done_event(self._next_id, record))
            await self.client.finish()
            return
        completed = record.error_code is None
        rendered = render_record(record, text_of(pieces) if completed else None, standing)
        await show(self.client, rendered)

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """problem+json."""
        extra = {"generation": generation_body(generation)} if generation else None
        rendered = problem(error, self._clock.wall_ms(), extra)
        await show_refusal(self.client, rendered, self._request_id, standing)
