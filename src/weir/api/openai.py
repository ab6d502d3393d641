"""The OpenAI-compatible surface: chat completions, streamed and not, and models.

Fields that this version does not pass on are refused by name, never dropped silently. Endings that are failures take OpenAI's
error shape: before the headers as a plain answer, after them as one error event followed by `[DONE]`, which the official SDK
reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weir import errors
from weir.api.generations import (
    MESSAGES_MAX,
    OUTPUT_TOKENS_MAX,
    SAMPLING_FIELDS,
    STREAM_HEADERS,
    ending_retry_headers,
    error_of_record,
    generation_body,
    messages_of,
    request_id_of,
    sampling_of,
)
from weir.api.wire import (
    Fields,
    checked_text,
    id_headers,
    limit_headers,
    openai_error,
    openai_error_body,
    refuse_field,
)
from weir.core.endings import ending
from weir.core.registry.model import Alias
from weir.core.request import DEADLINE_MS_MAX, InferenceRequest, Message
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "chat.completions"
_LABEL_CHARS_MAX = 256
_METADATA_MAX = 16
_METADATA_ACCEPTED = "an object of up to 16 names of 1 to 64 characters with strings of up to 512 characters"
_ROLE = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

FIELDS = (
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    *SAMPLING_FIELDS,
    "n",
    "user",
    "metadata",
    "store",
)
"""`user`, `metadata` and `store: false` change nothing in what is generated and are accepted; identity comes from the key."""


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChatOptions(msgspec.Struct, frozen=True):
    """What only this surface needs: whether the stream ends with a usage chunk, and which name bounded the output."""

    include_usage: bool = False
    bound_name: str = "max_completion_tokens"


def parse_chat(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[InferenceRequest, ChatOptions]:
    """A chat completion's body and Weir's headers. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = fields.string("model", longest=256)
    if model is None:
        refuse_field("model", "the name of a model alias")
    _refuse_unsupported_values(fields)
    _check_ignored_values(fields)
    stream = fields.boolean("stream", default=False)
    request = InferenceRequest(
        model_alias=model,
        prompt=messages_of(fields.raw("messages"), "messages", f"a list of 1 to {MESSAGES_MAX} messages", _message),
        max_output_tokens=_max_tokens(fields),
        deadline_ms=_deadline(headers.get(b"weir-deadline-ms")),
        stream=stream,
        sampling=sampling_of(fields, stop_field="stop"),
        session=_session(headers.get(b"weir-session")),
        request_id=request_id_of(_text(headers.get(b"idempotency-key"), "Idempotency-Key"), "Idempotency-Key"),
    )
    return request, ChatOptions(include_usage=_include_usage(fields, stream), bound_name=_bound_name(fields))


def _refuse_unsupported_values(fields: Fields) -> None:
    if fields.integer("n", 1, 128) not in (None, 1):
        raise errors.UnsupportedField("Only one choice per request is supported.", members={"field": "n", "accepted": "1"})
    if fields.boolean("store", default=False):
        raise errors.UnsupportedField("Completions are not stored.", members={"field": "store", "accepted": "false"})


def _check_ignored_values(fields: Fields) -> None:
    fields.string("user", longest=_LABEL_CHARS_MAX)
    metadata = fields.raw("metadata")
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > _METADATA_MAX:
        refuse_field("metadata", _METADATA_ACCEPTED)
    for name, value in metadata.items():
        if not 1 <= len(name) <= 64 or not isinstance(value, str) or len(value) > 512:
            refuse_field("metadata", _METADATA_ACCEPTED)


def _max_tokens(fields: Fields) -> int | None:
    if fields.has("max_tokens") and fields.has("max_completion_tokens"):
        raise errors.ConflictingFields(
            "Give max_completion_tokens or max_tokens, not both.",
            members={"field": "max_tokens", "accepted": "one of max_tokens and max_completion_tokens"},
        )
    return fields.integer(_bound_name(fields), 1, OUTPUT_TOKENS_MAX)


def _bound_name(fields: Fields) -> str:
    """What this request calls the bound of its output."""
    return "max_tokens" if fields.has("max_tokens") else "max_completion_tokens"


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        refuse_field("stream_options", "an object")
    if not stream:
        raise errors.ConflictingFields(
            "stream_options is for streams.", members={"field": "stream_options", "accepted": "only with stream: true"}
        )
    nested = Fields(options, "stream_options.")
    nested.refuse_unknown(("include_usage", "include_obfuscation"))
    if nested.boolean("include_obfuscation", default=False):
        raise errors.UnsupportedField(
            "Streams are not obfuscated.", members={"field": "stream_options.include_obfuscation", "accepted": "false"}
        )
    return nested.boolean("include_usage", default=False)


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        refuse_field(where, "an object with role and content")
    fields = Fields(item, f"{where}.")
    fields.refuse_unknown(("role", "content", "name"))
    fields.string("name", longest=_LABEL_CHARS_MAX)
    given = item.get("role")
    role = _ROLE.get(given) if isinstance(given, str) else None
    if role is None:
        refuse_field(f"{where}.role", ", ".join(_ROLE))
    return Message(role, _content(item.get("content"), f"{where}.content"))


def _content(value: Any, where: str) -> str:
    """A string, or text parts joined."""
    if not isinstance(value, list):
        return checked_text(value, where, "a string, or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            refuse_field(f"{where}[{index}]", "a part of type text")
        Fields(part, f"{where}[{index}].").refuse_unknown(("type", "text"))
        texts.append(checked_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _text(value: bytes | None, field: str) -> str | None:
    if value is None:
        return None
    try:
        return value.decode("ascii")
    except UnicodeDecodeError:
        refuse_field(field, "ASCII text")


def _deadline(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 7 or not 1 <= int(value) <= DEADLINE_MS_MAX:
        refuse_field("weir-deadline-ms", f"a whole number from 1 to {DEADLINE_MS_MAX}")
    return int(value)


def _session(value: bytes | None) -> str | None:
    text = _text(value, "weir-session")
    if text is not None and not 1 <= len(text) <= 128:
        refuse_field("weir-session", "1 to 128 characters")
    return text


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def usage_object(record: GenerationRecord) -> dict[str, Any]:
    """OpenAI's usage, with what the tenant pays beside it."""
    return {
        "prompt_tokens": record.input_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.input_tokens + record.output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_input_tokens},
        "cost_microusd": record.cost_microusd,
    }


class ChatAnswer:
    """Answer of chat completions."""

    def __init__(self, client: Client, clock: Clock, request_id: str, options: ChatOptions) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._options = options
        self._created = clock.wall_ms() // 1000
        self._open = False
        self._before_text = b""
        self._after_text = b""

    async def open(self, accepted: Accepted) -> None:
        """Headers and the chunk with the role."""
        self._open = True
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        self._before_text, self._after_text = self._splice(accepted)
        self.client.write(self._chunk(accepted, {"role": "assistant", "content": ""}, None))

    def _head(self, accepted: Accepted) -> dict[str, Any]:
        return {
            "id": accepted.generation_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": accepted.alias,
            "system_fingerprint": accepted.revision,
        }

    def _chunk(self, accepted: Accepted, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return b"data: %b\n\n" % msgspec.json.encode({**self._head(accepted), "choices": [choice]})

    def _splice(self, accepted: Accepted) -> tuple[bytes, bytes]:
        """The bytes before and after the text of every content chunk of this stream."""
        mark = "~"
        chunk = self._chunk(accepted, {"content": mark}, None)
        self._accepted = accepted
        before, after = chunk.split(b'"content":"~"', 1)
        return before + b'"content":', after

    def output(self, texts: Sequence[str]) -> None:
        """Content chunks, one per text, in one write."""
        encode, before, after = msgspec.json.encode, self._before_text, self._after_text
        if len(texts) == 1:
            self.client.write(b"%b%b%b" % (before, encode(texts[0]), after))
        else:
            self.client.write(b"".join([b"%b%b%b" % (before, encode(text), after) for text in texts]))

    def finish_reason(self, record: GenerationRecord) -> None:
        """The chunk with the finish reason, which does not wait for the settlement."""
        self.client.write(self._chunk(self._accepted, {}, record.finish_reason))

    def keep_alive(self) -> None:
        """A comment."""
        self.client.write(b": keep-alive\n\n")

    async def end(self, record: GenerationRecord, text: str, standing: StandingView) -> None:
        """The usage chunk and `[DONE]`, an error event, or the whole body."""
        if not self._open:
            await self._end_whole(record, text, standing)
            return
        if record.error_code is not None:
            body = {"error": openai_error_body(error_of_record(record), self._clock.wall_ms())}
            self.client.write(b"data: %b\n\n" % msgspec.json.encode(body))
        elif self._options.include_usage:
            chunk = {**self._head(self._accepted), "choices": [], "usage": usage_object(record)}
            self.client.write(b"data: %b\n\n" % msgspec.json.encode(chunk))
        self.client.write(b"data: [DONE]\n\n")
        await self.client.finish()

    async def _end_whole(self, record: GenerationRecord, text: str, standing: StandingView) -> None:
        assert record.finish_reason is not None
        headers = [*id_headers(record.request_id), *limit_headers(standing), *ending_retry_headers(record)]
        if record.error_code is not None:
            extra = {"generation": generation_body(record)}
            rendered = openai_error(error_of_record(record), self._clock.wall_ms(), extra=extra)
            status, body = ending(record.finish_reason).compatible_http_status, rendered.body
        else:
            status, body = 200, msgspec.json.encode(self._completion(record, text))
        length = (b"content-length", str(len(body)).encode())
        await self.client.start(status, [(b"content-type", b"application/json"), length, *headers])
        await self.client.finish(body)

    def _completion(self, record: GenerationRecord, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": record.finish_reason}
        return {
            "id": record.generation_id,
            "object": "chat.completion",
            "created": self._created,
            "model": record.alias,
            "system_fingerprint": record.revision,
            "choices": [choice],
            "usage": usage_object(record),
        }

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """OpenAI's error shape."""
        extra = {"generation": generation_body(generation)} if generation else {}
        if (field := error.members.get("field")) is not None:  # as this surface calls it
            name = {"input": "messages", "max_output_tokens": self._options.bound_name}.get(field, field)
            extra |= {"field": name, "param": name}
        rendered = openai_error(error, self._clock.wall_ms(), extra=extra)
        await self.client.start(rendered.status, rendered.head([*id_headers(self._request_id), *limit_headers(standing)]))
        await self.client.finish(rendered.body)


def model_object(alias: Alias) -> dict[str, Any]:
    """An alias as OpenAI's model."""
    return {"id": alias.name, "object": "model", "created": 0, "owned_by": "weir", "root": alias.revision}


def models_body(aliases: Sequence[Alias]) -> bytes:
    """OpenAI's list of models."""
    return msgspec.json.encode({"object": "list", "data": [model_object(alias) for alias in aliases]})
