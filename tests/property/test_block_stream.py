"""Protects the shape of Anthropic's streams: blocks follow each other, and their deltas are the text and the arguments."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from weir.api.anthropic.block_stream import BlockStream
from weir.api.anthropic.message_shapes import blocks_of
from weir.core.output import Delta, ShapedDelta, ToolCallPart, replies, text_of

GENERATION = "gen-abc"
INPUTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.just({"in": ["{", "}"]}), max_size=3)
TEXTS = st.text(max_size=4)


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = sorted(min(place, len(text)) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@st.composite
def outputs(draw: st.DrawFn) -> list[Delta]:
    """An output: text, reasoning and up to three calls, whose parts may be mixed in any way."""
    queues: list[list[Delta]] = []
    texts = draw(st.lists(TEXTS, max_size=4))
    queues.append([Delta(text) for text in texts])
    queues.append([ShapedDelta("", reasoning=draw(TEXTS)) for _ in range(draw(st.integers(0, 1)))])
    for index in range(draw(st.integers(0, 3))):
        pieces = cut(msgspec.json.encode(draw(INPUTS)).decode(), draw(st.lists(st.integers(0, 30), max_size=3)))
        first = ToolCallPart(index, draw(st.none() | st.just(f"id{index}")), f"f{index}", pieces[0])
        parts = [first, *(ToolCallPart(index, arguments=piece) for piece in pieces[1:])]
        queues.append([ShapedDelta(draw(st.just("") | TEXTS), tool_calls=(part,)) for part in parts])
    mixed: list[Delta] = []
    while left := [queue for queue in queues if queue]:
        mixed.append(draw(st.sampled_from(left)).pop(0))
    return mixed


def events_of(told: bytes) -> Iterator[tuple[str, Any]]:
    for block in told.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def content_of(told: bytes) -> list[dict[str, Any]]:
    """The blocks as a client puts them together, and the check that they follow each other."""
    content: list[dict[str, Any]] = []
    open_block = None
    for name, data in events_of(told):
        assert name == data["type"]
        if name == "content_block_start":
            assert open_block is None and data["index"] == len(content)
            open_block = data["index"]
            content.append({**data["content_block"], "told": ""})
        assert data["index"] == open_block
        if name == "content_block_delta":
            delta = data["delta"]
            assert delta["type"] == ("text_delta" if content[-1]["type"] == "text" else "input_json_delta")
            content[-1]["told"] += delta.get("text", "") + delta.get("partial_json", "")
        if name == "content_block_stop":
            open_block = None
    assert open_block is None
    return content


def told_of(pieces: Sequence[Delta], places: Sequence[int]) -> bytes:
    """The whole stream of these pieces, handed over in groups that end at these places."""
    blocks = BlockStream(GENERATION)
    ends = sorted(min(place, len(pieces)) for place in places)
    groups = [pieces[start:end] for start, end in zip([0, *ends], [*ends, len(pieces)], strict=True)]
    return b"".join([blocks.events(group) for group in groups if group]) + blocks.close() + blocks.close()


@given(outputs(), st.lists(st.integers(0, 20), max_size=6))
def test_blocks_follow_each_other_and_have_everything(pieces: list[Delta], places: list[int]) -> None:
    """Whatever an engine mixes, a client reads the text and each call whole, the same as in an answer that is not streamed."""
    content = content_of(told_of(pieces, places))
    assert "".join(block["told"] for block in content if block["type"] == "text") == text_of(pieces)
    calls = sorted((block for block in content if block["type"] == "tool_use"), key=lambda block: block["name"])
    whole = json.loads(msgspec.json.encode(blocks_of(replies(pieces, 1, GENERATION)[0])))
    expected = [block for block in whole if block["type"] == "tool_use"]
    assert [(call["id"], call["name"], json.loads(call["told"])) for call in calls] == [
        (block["id"], block["name"], block["input"]) for block in expected
    ]


@given(outputs(), st.lists(st.integers(0, 20), max_size=6))
def test_grouping_changes_nothing(pieces: list[Delta], places: list[int]) -> None:
    """However pieces arrive together, the bytes are the same."""
    assert told_of(pieces, places) == told_of(pieces, range(len(pieces)))


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1))
def test_text_is_one_block_told_piece_by_piece(texts: list[str]) -> None:
    """Nothing of a text waits: each piece is an event at once."""
    blocks = BlockStream(GENERATION)
    for text in texts:
        [*_, (name, data)] = events_of(blocks.events([Delta(text)]))
        assert (name, data["delta"]) == ("content_block_delta", {"type": "text_delta", "text": text})


def test_calls_in_order_are_told_as_they_come() -> None:
    """The second call of an engine that makes one after the other does not wait for the end of the output."""
    blocks = BlockStream(GENERATION)
    first = blocks.events([ShapedDelta("", tool_calls=(ToolCallPart(0, "a", "f", '{"x":'), ToolCallPart(0, arguments="1}")))])
    second = blocks.events([ShapedDelta("", tool_calls=(ToolCallPart(1, "b", "g", "{"),))])
    assert [name for name, _ in events_of(first)] == ["content_block_start", "content_block_delta", "content_block_delta"]
    assert [name for name, _ in events_of(second)] == ["content_block_stop", "content_block_start", "content_block_delta"]
