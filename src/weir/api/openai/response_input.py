"""The input of a response into a conversation: messages, calls that a model made, and what those calls returned.

A call belongs to the turn before it where that turn is the model's own: engines know turns with calls, not calls alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weir import errors
from weir.api.functions import CALLS_MAX, call_id_of, name_of
from weir.api.generations import MESSAGES_MAX
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import ToolCall
from weir.core.request import Message

MESSAGE_FIELDS = ("type", "id", "status", "role", "content")
CALL_FIELDS = ("type", "id", "status", "call_id", "name", "arguments")
CALL_OUTPUT_FIELDS = ("type", "id", "status", "call_id", "output")
ITEM_TYPES = ("message", "function_call", "function_call_output")
STATUSES = ("in_progress", "completed", "incomplete")
ITEM_ID_CHARS_MAX = 256
_INPUT_ACCEPTED = f"a non-empty string, or a list of 1 to {MESSAGES_MAX} items"
_ROLE = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PART_FIELDS = {"input_text": ("type", "text"), "output_text": ("type", "text", "annotations", "logprobs")}
_PARTS_OF_ROLE = {"assistant": ("input_text", "output_text")}
_PARTS_OF_OTHERS = ("input_text",)


def prompt_of(value: Any, instructions: str | None) -> str | tuple[Message, ...]:
    """The conversation, with the instructions as its first system message. Raises InvalidRequest or UnsupportedField."""
    if isinstance(value, str):
        if not value:
            refuse_field("input", _INPUT_ACCEPTED)
        text = checked_text(value, "input")
        return (Message("system", instructions), Message("user", text)) if instructions else text
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES_MAX:
        refuse_field("input", _INPUT_ACCEPTED)
    turns = [Message("system", instructions)] if instructions else []
    for index, item in enumerate(value):
        _add_item(turns, item, f"input[{index}]")
    return tuple(turns)


def _add_item(turns: list[Message], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        refuse_field(where, "an object with type, or with role and content")
    given = item.get("type")
    kind = "message" if given is None and "role" in item else given
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise errors.UnsupportedField(
            "An item of this type is not served; leave it out.",
            members={"field": f"{where}.type", "accepted": list(ITEM_TYPES)},
        )
    reader(turns, Fields(item, f"{where}."), where)


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_message(turns: list[Message], fields: Fields, where: str) -> None:
    _check_echoed(fields, MESSAGE_FIELDS, where)
    given = fields.raw("role")
    role = _ROLE.get(given) if isinstance(given, str) else None
    if role is None:
        refuse_field(f"{where}.role", ", ".join(_ROLE))
    parts = _PARTS_OF_ROLE.get(role, _PARTS_OF_OTHERS)
    turns.append(Message(role, _text_of(fields.raw("content"), f"{where}.content", parts)))


def _add_call(turns: list[Message], fields: Fields, where: str) -> None:
    _check_echoed(fields, CALL_FIELDS, where)
    call = ToolCall(
        call_id_of(fields.raw("call_id"), f"{where}.call_id"),
        name_of(fields.raw("name"), f"{where}.name"),
        checked_text(fields.raw("arguments"), f"{where}.arguments"),
    )
    if not turns or turns[-1].role != "assistant":
        turns.append(Message("assistant", "", (call,)))
        return
    if len(turns[-1].tool_calls) == CALLS_MAX:
        refuse_field(where, f"up to {CALLS_MAX} calls of one turn")
    turns[-1] = replace(turns[-1], tool_calls=(*turns[-1].tool_calls, call))


def _add_call_output(turns: list[Message], fields: Fields, where: str) -> None:
    _check_echoed(fields, CALL_OUTPUT_FIELDS, where)
    text = _text_of(fields.raw("output"), f"{where}.output", _PARTS_OF_OTHERS)
    turns.append(Message("tool", text, tool_call_id=call_id_of(fields.raw("call_id"), f"{where}.call_id")))


_READERS: dict[str, Callable[[list[Message], Fields, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_call_output,
}


def _check_echoed(fields: Fields, known: tuple[str, ...], where: str) -> None:
    """What items of an earlier answer carry too, and what changes nothing: an id and a status."""
    fields.refuse_unknown(known)
    fields.string("id", longest=ITEM_ID_CHARS_MAX)
    if fields.has("status") and fields.raw("status") not in STATUSES:
        refuse_field(f"{where}.status", ", ".join(STATUSES))


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text_of(value: Any, where: str, kinds: tuple[str, ...]) -> str:
    """A string, or text parts joined."""
    if not isinstance(value, list):
        return checked_text(value, where, f"a string, or a list of parts of type {' or '.join(kinds)}")
    return "".join(_part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(value))


def _part_text(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        refuse_field(where, f"a part of type {' or '.join(kinds)}")
    if kind not in kinds:
        raise errors.UnsupportedField(
            "A part of this type is not served here.", members={"field": f"{where}.type", "accepted": list(kinds)}
        )
    fields = Fields(part, f"{where}.")
    fields.refuse_unknown(PART_FIELDS[kind])
    if fields.has("annotations") and fields.raw("annotations") != []:
        raise errors.UnsupportedField(
            "Annotations are not told again.", members={"field": f"{where}.annotations", "accepted": "an empty list"}
        )
    if fields.has("logprobs") and not isinstance(fields.raw("logprobs"), list):
        refuse_field(f"{where}.logprobs", "a list, which changes nothing")
    return checked_text(fields.raw("text"), f"{where}.text")
