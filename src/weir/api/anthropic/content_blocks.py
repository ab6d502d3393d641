"""Turns of Anthropic's messages, made of content blocks, into the conversation that engines read.

Every kind of block is served or refused by its name. A turn may become several messages: each result of a tool is one.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from weir import errors
from weir.api.functions import CALLS_MAX, call_id_of, name_of
from weir.api.generations import MESSAGES_MAX
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import ToolCall
from weir.core.request import Message

ROLES = ("user", "assistant", "system")
BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
"""Role → the kinds of blocks that its turns may have."""
TURN_FIELDS = ("role", "content")
TEXT_FIELDS = ("type", "text", "cache_control")
RESULT_FIELDS = ("type", "tool_use_id", "content", "is_error", "cache_control")
CALL_FIELDS = ("type", "id", "name", "input", "cache_control")
CACHE_FIELDS = ("type", "ttl")
CACHE_TIMES = ("5m", "1h")
FAILED_TOOL = "Error: "
"""What the text of a tool_result with is_error begins with for the model: engines have no other way to tell it."""
_MESSAGES_ACCEPTED = f"a list of 1 to {MESSAGES_MAX} messages; each result of a tool counts as one"


def conversation_of(system: Any, messages: Any) -> tuple[Message, ...]:
    """The system prompt and all turns. Raises InvalidRequest or UnsupportedField."""
    if not isinstance(messages, list) or not messages:
        refuse_field("messages", _MESSAGES_ACCEPTED)
    turns = [Message("system", _joined(system, "system"))] if system is not None else []
    for index, item in enumerate(messages):
        turns += _turn(item, f"messages[{index}]")
        if len(turns) > MESSAGES_MAX:
            refuse_field("messages", _MESSAGES_ACCEPTED)
    if turns[-1].role == "assistant":
        _refuse_prefill(len(messages) - 1)
    return tuple(turns)


def _refuse_prefill(last: int) -> NoReturn:
    """Some engines continue such a turn, others close it and begin another: a caller would get either, by chance."""
    raise errors.UnsupportedField(
        "An answer cannot be begun for the model.",
        members={"field": f"messages[{last}].role", "accepted": "user, in the last one"},
    )


def refuse_cache_control(fields: Fields, prefix: str = "") -> None:
    """Raises InvalidRequest for what Anthropic would refuse too; it changes nothing, because prefixes are cached anyway."""
    value = fields.raw("cache_control")
    if value is None:
        return
    where = f"{prefix}cache_control"
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        refuse_field(where, "an object of type ephemeral")
    Fields(value, f"{where}.").refuse_unknown(CACHE_FIELDS)
    if value.get("ttl") not in (None, *CACHE_TIMES):
        refuse_field(f"{where}.ttl", " or ".join(CACHE_TIMES))


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _turn(item: Any, where: str) -> Iterator[Message]:
    if not isinstance(item, dict):
        refuse_field(where, "an object with role and content")
    Fields(item, f"{where}.").refuse_unknown(TURN_FIELDS)
    role = item.get("role")
    if role not in ROLES:
        refuse_field(f"{where}.role", ", ".join(ROLES))
    content = item.get("content")
    if not isinstance(content, list):
        yield Message(role, checked_text(content, f"{where}.content", "a string, or a list of blocks"))
        return
    blocks = [(_block(block, f"{where}.content[{index}]", BLOCKS[role])) for index, block in enumerate(content)]
    yield from _results(blocks) if role == "user" else [_spoken(role, blocks, f"{where}.content")]


def _block(item: Any, where: str, kinds: tuple[str, ...]) -> tuple[str, Fields, str]:
    """A block's kind, its fields and where it is."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        refuse_field(where, f"a block of type {' or '.join(kinds)}")
    if kind not in kinds:
        raise errors.UnsupportedField(
            "Blocks of this type are not supported here.", members={"field": f"{where}.type", "accepted": list(kinds)}
        )
    return kind, Fields(item, f"{where}."), where


def _results(blocks: list[tuple[str, Fields, str]]) -> Iterator[Message]:
    """A user's turn: the results of tools, each a message, then what the user says."""
    texts: list[str] = []
    for kind, fields, where in blocks:
        if kind == "text":
            texts.append(_text(fields, where))
        elif texts:
            refuse_field(where, "results of tools before text")
        else:
            yield _result(fields, where)
    if texts or not blocks:
        yield Message("user", "".join(texts))


def _result(fields: Fields, where: str) -> Message:
    fields.refuse_unknown(RESULT_FIELDS)
    refuse_cache_control(fields, f"{where}.")
    content = fields.raw("content")
    text = "" if content is None else _joined(content, f"{where}.content")
    failed = FAILED_TOOL if fields.boolean("is_error", default=False) else ""
    return Message("tool", failed + text, tool_call_id=call_id_of(fields.raw("tool_use_id"), f"{where}.tool_use_id"))


def _spoken(role: str, blocks: list[tuple[str, Fields, str]], where: str) -> Message:
    """The model's own turn, or a system's: all text, then what was called."""
    text = "".join(_text(fields, place) for kind, fields, place in blocks if kind == "text")
    calls = tuple(_call(fields, place) for kind, fields, place in blocks if kind == "tool_use")
    if len(calls) > CALLS_MAX:
        refuse_field(where, f"up to {CALLS_MAX} blocks of type tool_use")
    return Message(role, text, calls)


def _call(fields: Fields, where: str) -> ToolCall:
    fields.refuse_unknown(CALL_FIELDS)
    refuse_cache_control(fields, f"{where}.")
    given = fields.raw("input")
    if not isinstance(given, dict):
        refuse_field(f"{where}.input", "an object")
    try:
        arguments = msgspec.json.encode(given).decode()
    except UnicodeEncodeError:
        refuse_field(f"{where}.input", "text that is valid Unicode")
    call_id = call_id_of(fields.raw("id"), f"{where}.id")
    return ToolCall(call_id, name_of(fields.raw("name"), f"{where}.name"), arguments)


def _joined(content: Any, where: str) -> str:
    """A string, or the texts of blocks, joined."""
    if not isinstance(content, list):
        return checked_text(content, where, "a string, or a list of text blocks")
    blocks = [_block(item, f"{where}[{index}]", ("text",)) for index, item in enumerate(content)]
    return "".join(_text(fields, place) for _, fields, place in blocks)


def _text(fields: Fields, where: str) -> str:
    fields.refuse_unknown(TEXT_FIELDS)
    refuse_cache_control(fields, f"{where}.")
    return checked_text(fields.raw("text"), f"{where}.text")
