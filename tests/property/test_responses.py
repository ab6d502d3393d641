"""Protects OpenAI's responses for any body and any output: refusals have names, and a stream adds up however it is cut."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.response_stand import BODY, streamed, whole

from weir import errors
from weir.api.openai.response_input import CALL_FIELDS, CALL_OUTPUT_FIELDS, ITEM_TYPES, MESSAGE_FIELDS
from weir.api.openai.response_shapes import settings_of
from weir.api.openai.responses_request import FIELDS, LOGPROBS, parse_response
from weir.api.wire import json_object
from weir.core.endings import FinishReason, ending
from weir.core.output import Delta, ShapedDelta, TokenLogprob, ToolCallPart

WORDS = ("user", "assistant", "function", "input_text", "output_text", "json_schema", "auto", "disabled", LOGPROBS, *ITEM_TYPES)
NAMES = sorted({*MESSAGE_FIELDS, *CALL_FIELDS, *CALL_OUTPUT_FIELDS, "text", "format", "schema", "parameters", "strict"})
scalars = st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.sampled_from(WORDS) | st.text(max_size=6)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | texts, inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), values, max_size=6)

logprobs = st.lists(st.builds(TokenLogprob, st.text(max_size=3), st.floats(-9, 0)), max_size=2).map(tuple)
parts = st.builds(ToolCallPart, st.integers(0, 2), st.none() | st.just("call_x"), st.none() | st.just("f"), st.text(max_size=4))
pieces = st.one_of(
    st.builds(Delta, st.text(max_size=4)),
    st.builds(
        ShapedDelta,
        st.text(max_size=4),
        reasoning=st.text(max_size=3),
        tool_calls=st.lists(parts, max_size=2).map(tuple),
        logprobs=logprobs,
    ),
)
outputs = st.lists(pieces, max_size=12)
completed = st.sampled_from([reason for reason in FinishReason if ending(reason).error is None])


def refusal_of(document: dict[str, Any]) -> errors.WeirError | None:
    """Why a body is refused; None where it is served, and then what its answer repeats can be written."""
    try:
        json.loads(msgspec.json.encode(settings_of(*parse_response(document, {}))))
    except errors.WeirError as refusal:
        return refusal
    return None


@given(bodies)
def test_any_body_is_served_or_refused_by_a_name(body: dict[str, Any]) -> None:
    """Nothing fails inside, and whatever is refused is named with what is accepted in its place."""
    refusal = refusal_of(json_object(json.dumps({**BODY, **body}).encode()))
    if refusal is None:
        assert not {name for name, value in body.items() if value is not None} - set(FIELDS)
    else:
        assert refusal.http_status == 400 and "field" in refusal.members and refusal.members["accepted"]


def cut(written: Sequence[Delta], lengths: Sequence[int]) -> list[list[Delta]]:
    """The pieces in writes of these lengths, and the rest in one."""
    writes, left = [], list(written)
    for length in lengths:
        writes.append(left[:length])
        left = left[length:]
    return [write for write in [*writes, left] if write]


@given(outputs, st.lists(st.integers(1, 4), max_size=6), completed)
def test_a_stream_is_the_same_however_its_pieces_are_grouped(
    output: list[Delta], lengths: list[int], reason: FinishReason
) -> None:
    """Events do not depend on what arrived together, only their writes do."""
    together, apart = streamed([output] if output else [], reason), streamed(cut(output, lengths), reason)
    timeless = [{**event, "response": None} for event in together.events]
    assert [{**event, "response": None} for event in apart.events] == timeless


@given(outputs, completed)
def test_deltas_add_up_to_what_is_done_and_to_a_whole_answer(output: list[Delta], reason: FinishReason) -> None:
    """What a client puts together of the deltas of each item is the item, in the last event and in a whole answer alike."""
    events = streamed([output] if output else [], reason).events
    final = events[-1]["response"]
    assert final["output"] == whole(output, reason).json["output"]
    joined = [""] * len(final["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["output_index"]] += event["delta"]
    shown = [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in final["output"]]
    assert joined == shown
    assert "".join(piece.text for piece in output) == "".join(
        text for text, item in zip(shown, final["output"], strict=True) if item["type"] == "message"
    )


@given(outputs, st.sampled_from(FinishReason))
def test_numbers_have_no_gap_and_one_terminal_event_is_last(output: list[Delta], reason: FinishReason) -> None:
    """However it ends and whatever came before."""
    events = streamed([output] if output else [], reason).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = [event["type"] in ("response.completed", "response.incomplete", "response.failed") for event in events]
    assert ends == [False] * (len(events) - 1) + [True]
    begun = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert begun == list(range(len(begun))) == list(range(len(events[-1]["response"]["output"])))
