"""Protects Anthropic's surface from bodies that nobody thought of: each one parses, or is refused by a field's name."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.api.anthropic.messages_request import FIELDS, parse_count, parse_message
from weir.core.request import InferenceRequest

NAMES = st.sampled_from(
    [
        *FIELDS,
        "type",
        "text",
        "content",
        "role",
        "name",
        "id",
        "input",
        "tool_use_id",
        "is_error",
        "input_schema",
        "format",
        "ttl",
    ]
)
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "system",
        "text",
        "tool_use",
        "tool_result",
        "image",
        "custom",
        "auto",
        "tool",
        "json_schema",
        "ephemeral",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.text(max_size=4) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
BLOCKS = st.fixed_dictionaries(
    {"type": WORDS},
    optional={
        "text": LEAVES,
        "id": LEAVES,
        "tool_use_id": st.just("t") | LEAVES,
        "name": st.just("f") | LEAVES,
        "input": VALUES,
        "content": VALUES,
        "is_error": LEAVES,
    },
)
TURNS = st.fixed_dictionaries({"role": WORDS, "content": st.text(max_size=4) | st.lists(BLOCKS, max_size=3) | VALUES})
NEARLY = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.just(1) | LEAVES, "messages": st.lists(TURNS, max_size=4)},
    optional={name: VALUES for name in FIELDS if name not in ("model", "max_tokens", "messages")},
)


def outcome(parse: Any, document: dict[str, Any]) -> InferenceRequest | errors.WeirError:
    try:
        parsed: InferenceRequest = parse(document, {})
    except errors.WeirError as refusal:
        return refusal
    return parsed


def beginning(name: str) -> str:
    """What a refusal that names this field begins with."""
    return name[:100].split(".")[0].split("[")[0]


@given(st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=6) | NEARLY, st.sampled_from([parse_message, parse_count]))
def test_any_body_parses_or_is_refused_by_a_fields_name(document: dict[str, Any], parse: Any) -> None:
    """Protects callers from a 500 and from a refusal that says nothing."""
    found = outcome(parse, document)
    if isinstance(found, errors.WeirError):
        assert isinstance(found, errors.InvalidRequest | errors.UnsupportedField | errors.ConflictingFields)
        assert found.members["accepted"]
        assert beginning(found.members["field"]) in {*FIELDS, *map(beginning, document)}
    else:
        assert found.prompt
        msgspec.json.encode((found.prompt, found.demands, found.sampling))  # an engine can be sent it
