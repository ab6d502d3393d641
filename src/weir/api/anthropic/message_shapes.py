"""What messages show beside their text: usage, why they stopped, calls of tools, errors, and models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weir.api.generations import error_of_record, generation_body
from weir.api.wire import Rendered, anthropic_error, anthropic_error_body
from weir.core.demands import ToolCall
from weir.core.endings import FinishReason
from weir.core.output import Reply
from weir.core.registry.model import Alias
from weir.errors import WeirError
from weir.messages import GenerationRecord
from weir.units import Millis, Tokens

UNREADABLE_INPUT = "INVALID_JSON"
"""The only member of a call's input where the model wrote no JSON object: its value is what the model wrote."""
_NAMES = {
    "model_alias": "model",
    "input": "messages",
    "max_output_tokens": "max_tokens",
    "deadline_ms": "weir-deadline-ms",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Our fields' names → what this surface calls them."""


def message_id(generation_id: str) -> str:
    """A generation's id as a message's."""
    return f"msg_{generation_id.rpartition('-')[2]}"


def stop_reason(reason: FinishReason | None, *, has_calls: bool) -> str:
    """Why a completed message stopped. Engines call an end `stop` also where a tool that had to be called was called."""
    match reason:
        case FinishReason.LENGTH:
            return "max_tokens"
        case FinishReason.CONTENT_FILTER:
            return "refusal"
        case _:
            return "tool_use" if has_calls else "end_turn"


def usage_at_first(input_tokens: Tokens) -> dict[str, Any]:
    """The usage as a message begins: what the input counts as; nothing is known yet of what caches held."""
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }


def message_usage(record: GenerationRecord) -> dict[str, Any]:
    """Anthropic's usage, whose input is what no cache held, with what the tenant pays beside it."""
    return {
        "input_tokens": record.input_tokens - record.cached_input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": record.cached_input_tokens,
        "output_tokens": record.output_tokens,
        "cost_microusd": record.cost_microusd,
    }


def blocks_of(reply: Reply) -> list[dict[str, Any]]:
    """The content of a whole message: its text, then what it calls."""
    text = [{"type": "text", "text": reply.text}] if reply.text else []
    return text + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)} for call in reply.tool_calls
    ]


def _input_of(call: ToolCall) -> Any:
    """A call's arguments, digit by digit as the model wrote them."""
    if not call.arguments.strip():
        return {}
    try:
        is_object = isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return msgspec.Raw(call.arguments.encode()) if is_object else {UNREADABLE_INPUT: call.arguments}


def message_refusal(
    error: WeirError, now_wall_ms: Millis, request_id: str, generation: GenerationRecord | None = None
) -> Rendered:
    """A refusal in Anthropic's error shape, with the names that fields have here."""
    extra: dict[str, Any] = {"generation": generation_body(generation)} if generation else {}
    if (field := error.members.get("field")) is not None:
        extra["field"] = _NAMES.get(field, field)
    return anthropic_error(error, now_wall_ms, request_id, extra)


def ended_error(record: GenerationRecord, now_wall_ms: Millis) -> dict[str, Any]:
    """A failure after the headers: the content of the event that the official SDK raises as an error."""
    return anthropic_error_body(error_of_record(record), now_wall_ms, record.request_id)


def model_entry(alias: Alias) -> dict[str, Any]:
    """An alias as Anthropic's model; when it was made is not told, so it is the epoch."""
    return {
        "type": "model",
        "id": alias.name,
        "display_name": alias.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "model_revision": alias.revision,
    }


def models_page(aliases: Sequence[Alias], has_more: bool) -> Mapping[str, Any]:
    """A page of Anthropic's list of models."""
    return {
        "data": [model_entry(alias) for alias in aliases],
        "has_more": has_more,
        "first_id": aliases[0].name if aliases else None,
        "last_id": aliases[-1].name if aliases else None,
    }
