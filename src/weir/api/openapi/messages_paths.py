"""Anthropic's messages and their token counts as Weir serves them, in Anthropic's shapes with Weir's codes."""

from weir import errors
from weir.api.anthropic import content_blocks, messages_request
from weir.api.openapi import messages_request_schemas as asked
from weir.api.openapi.answers import (
    ADMISSION,
    ANTHROPIC,
    CONNECTION,
    ENDED,
    PROBLEM,
    WITH_KEY,
    answer,
    anthropic_failure,
    event,
    events,
    refusals,
    together,
)
from weir.api.openapi.generation_fields import body_of, record_links, session_header, weir_headers
from weir.api.openapi.json_schema import Json, answer_object, either, listed, only, ref, text, whole, words
from weir.api.openapi.surface_description import SurfaceDescription
from weir.core.metering import InputBasis

_TAG = "Anthropic messages"
_TURNS = [{"role": "user", "content": "What is a weir?"}]
_EXAMPLE: Json = {"model": "assistant", "max_tokens": 16, "messages": _TURNS}
_COUNT_EXAMPLE: Json = {"model": "assistant", "messages": _TURNS}


# ── a message ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text_block() -> Json:
    fields = {"type": only("The kind of the block.", "text", "string"), "text": text("Its text.")}
    return answer_object("A block of text.", fields, list(fields))


def _tool_use() -> Json:
    fields = {
        "type": only("The kind of the block.", "tool_use", "string"),
        "id": text("The call's id: answer with it.", shortest=1),
        "name": text("The tool's name."),
        "input": {
            "type": "object",
            "description": "Its arguments; where they are no JSON object, `INVALID_JSON` alone, with what the model wrote.",
        },
    }
    return answer_object("A call of a tool of yours.", fields, list(fields))


def _usage_fields() -> dict[str, Json]:
    return {
        "input_tokens": whole("Tokens of the input that no cache held; as a stream begins all of them, or their upper bound."),
        "cache_creation_input_tokens": whole("Always 0: filling a cache is not charged."),
        "cache_read_input_tokens": whole("Tokens of the input that the engine had cached."),
        "output_tokens": whole("Tokens of the output."),
    }


def _usage() -> Json:
    cost = whole("What you pay, in millionths of a dollar; 0 where the platform pays.")
    fields = {**_usage_fields(), "cost_microusd": cost}
    return answer_object("What was used, and what it costs.", fields, list(fields))


def _stop_reason() -> Json:
    return words("Why it stopped.", ("end_turn", "max_tokens", "tool_use", "refusal"))


_NO_SEQUENCE: Json = {"type": "null", "description": "Always null: engines do not say which one they met."}


def _message(content: Json, stop_reason: Json, usage: Json) -> Json:
    fields = {
        "id": text("The message's id.", pattern="^msg_."),
        "type": only("What this is.", "message", "string"),
        "role": only("Who says it.", "assistant", "string"),
        "model": text("The alias that was asked for."),
        "model_revision": text("The revision that answers."),
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": _NO_SEQUENCE,
        "usage": usage,
    }
    return answer_object("What the model says.", fields, list(fields))


def _blocks() -> Json:
    return listed("Its text, if there is any, then what it calls.", either("A block.", ref("MessageText"), ref("MessageCall")))


# ── its stream ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _event(name: str, description: str, fields: dict[str, Json]) -> Json:
    told = {"type": only("The event's name.", name, "string"), **fields}
    return event(description, answer_object(description, told, list(told)), name=name)


def _stream() -> Json:
    usage = answer_object("What is known as it begins.", _usage_fields(), list(_usage_fields()))
    begun = _message(listed("Nothing yet.", {}, most=0), {"type": "null", "description": "Not known yet."}, usage)
    index = {"index": whole("Which block.")}
    kinds = [
        _piece("text_delta", "text", "A piece of its text."),
        _piece("input_json_delta", "partial_json", "A piece of a call's arguments, as the model wrote them."),
    ]
    ended = {"stop_reason": _stop_reason(), "stop_sequence": _NO_SEQUENCE}
    end = {"delta": answer_object("How it ended.", ended, list(ended)), "usage": ref("MessageUsage")}
    block = either("The block, still empty.", ref("MessageText"), ref("MessageCall"))
    return events(
        _event("message_start", "Always first.", {"message": begun}),
        _event("content_block_start", "A block begins.", {**index, "content_block": block}),
        _event("content_block_delta", "A piece of it.", {**index, "delta": either("What is new.", *kinds)}),
        _event("content_block_stop", "It ends; one is open at a time.", index),
        _event("message_delta", "Why it stopped, and what it costs, once that is settled.", end),
        _event("message_stop", "Always last, unless there is an error.", {}),
        _event("ping", "Anywhere, after ten seconds of silence.", {}),
        event("A failure after the headers: always last.", anthropic_failure(ref("AnthropicError")), name="error"),
    )


def _piece(kind: str, name: str, description: str) -> Json:
    fields = {"type": only("The kind of the piece.", kind, "string"), name: text(description)}
    return answer_object(description, fields, list(fields))


# ── paths ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _create() -> Json:
    made = answer(
        "The message; with `stream`, its events.",
        {"application/json": {"schema": ref("Message")}, "text/event-stream": _stream()},
    )
    return {
        "tags": [_TAG],
        "operationId": "createMessage",
        "summary": "Make a message",
        "description": "Anthropic's message; `anthropic-version` may be absent or anything, and `anthropic-beta` is without"
        " effect. A field that is not described here is refused by name.",
        "parameters": weir_headers(),
        "requestBody": body_of("MessageRequest", "What to answer.", _EXAMPLE),
        "responses": together(
            {"200": {**made, "links": record_links()}},
            refusals(ANTHROPIC, (*ADMISSION, errors.ConflictingFields, *ENDED)),
            refusals(PROBLEM, CONNECTION),
        ),
    }


def _count() -> Json:
    fields = {
        "input_tokens": whole("Tokens of the input."),
        "basis": words("Counted by a replica, or bounded by its bytes where none could count at once.", InputBasis),
    }
    counted = answer_object("What the input counts as.", fields, list(fields))
    tree = (
        *WITH_KEY,
        errors.UnsupportedField,
        errors.ConflictingFields,
        errors.UnknownAlias,
        errors.QueueFull,
        errors.SnapshotExpired,
        errors.Draining,
        errors.CoordinatorLost,
    )
    return {
        "tags": [_TAG],
        "operationId": "countMessageTokens",
        "summary": "Count a message's input",
        "description": "Nothing is admitted, held, limited or recorded. A field that is not described here is refused by name.",
        "parameters": [session_header()],
        "requestBody": body_of("MessageCountRequest", "What to count.", _COUNT_EXAMPLE),
        "responses": together(
            {"200": answer("The count.", {"application/json": {"schema": counted}})},
            refusals(ANTHROPIC, tree),
            refusals(PROBLEM, CONNECTION),
        ),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="Anthropic's messages, for its SDKs and for tools that speak its API.",
    page="anthropic-messages.md",
    paths={"/v1/messages": {"post": _create()}, "/v1/messages/count_tokens": {"post": _count()}},
    schemas={
        "MessageRequest": asked.request(),
        "MessageCountRequest": asked.count_request(),
        "MessageTurn": asked.turn(),
        "MessageTextBlock": asked.text_block(),
        "MessageToolResult": asked.tool_result(),
        "MessageToolUse": asked.tool_use(),
        "MessageCacheControl": asked.cache_control(),
        "MessageTool": asked.tool(),
        "MessageToolChoice": asked.tool_choice(),
        "MessageOutputConfig": asked.output_config(),
        "MessageForm": asked.form(),
        "MessageThinking": asked.thinking(),
        "MessageMetadata": asked.metadata(),
        "Message": _message(_blocks(), _stop_reason(), ref("MessageUsage")),
        "MessageText": _text_block(),
        "MessageCall": _tool_use(),
        "MessageUsage": _usage(),
    },
    parsed={
        "MessageRequest": messages_request.FIELDS,
        "MessageCountRequest": messages_request.INPUT_FIELDS,
        "MessageTurn": content_blocks.TURN_FIELDS,
        "MessageTextBlock": content_blocks.TEXT_FIELDS,
        "MessageToolResult": content_blocks.RESULT_FIELDS,
        "MessageToolUse": content_blocks.CALL_FIELDS,
        "MessageCacheControl": content_blocks.CACHE_FIELDS,
        "MessageTool": messages_request.TOOL_FIELDS,
        "MessageToolChoice": messages_request.CHOICE_FIELDS,
        "MessageOutputConfig": messages_request.CONFIG_FIELDS,
        "MessageForm": messages_request.FORM_FIELDS,
        "MessageThinking": messages_request.THINKING_FIELDS,
        "MessageMetadata": messages_request.METADATA_FIELDS,
    },
)
