"""What an engine streams means the same however it is cut, and whatever else it sends is one fault that says nothing of it."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir import errors
from weir.core.endings import FinishReason
from weir.core.output import Delta, ShapedDelta, ToolCallPart, replies
from weir.core.sse import SseDecoder
from weir.core.stream import TokenStream
from weir.engines.openai_chunks import ChunkReader

CHOICES = 3
DONE = b"[DONE]"
FAULT = errors.EngineError("The engine reported an error.")
TEXT = st.sampled_from(["", "a", " übrig", "水\n", "🌊", "data: x"])
CALL = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "function": st.fixed_dictionaries({"arguments": TEXT}, optional={"name": TEXT})},
    optional={"id": st.none() | TEXT, "type": st.just("function")},
)
ENTRY = st.fixed_dictionaries(
    {"token": TEXT, "logprob": st.floats(-20, 0)}, optional={"bytes": st.none() | st.lists(st.integers(0, 255), max_size=3)}
)
CONTENT = st.lists(
    st.tuples(ENTRY, st.lists(ENTRY, max_size=2)).map(lambda pair: {**pair[0], "top_logprobs": pair[1]}), max_size=2
)
COLUMNS = st.lists(TEXT, max_size=3).map(
    lambda tokens: {
        "tokens": tokens,
        "token_logprobs": [None, *(-1.0 for _ in tokens[1:])],
        "top_logprobs": [None, *({token: -1.0} for token in tokens[1:])],
        "text_offset": list(range(len(tokens))),
    }
)
LOGPROBS = st.none() | st.fixed_dictionaries({"content": CONTENT}, optional={"refusal": st.none()}) | COLUMNS
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": st.none() | TEXT,
        "reasoning": st.none() | TEXT,
        "reasoning_content": st.none() | TEXT,
        "tool_calls": st.none() | st.lists(CALL, max_size=2),
    },
)
FINISH = st.none() | st.sampled_from(["stop", "length", "tool_calls", "content_filter", "", "none", "null"])
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, CHOICES - 1), "delta": DELTA}, optional={"finish_reason": FINISH, "logprobs": LOGPROBS}
)
USAGE = st.none() | st.fixed_dictionaries({"prompt_tokens": st.just(7), "completion_tokens": st.integers(0, 50)})
CHUNK = st.fixed_dictionaries({"choices": st.lists(CHOICE, max_size=2)}, optional={"usage": USAGE, "id": st.just("x")})

_LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def _reader(choices: int = CHOICES, *, counts_each_choice: bool = False) -> ChunkReader:
    return ChunkReader(choices, None, lambda error: FAULT, counts_each_choice=counts_each_choice)


def _read(reader: ChunkReader, payloads: list[bytes]) -> list[Delta]:
    deltas: list[Delta] = []
    reader.read(payloads, deltas)
    return deltas


def _encoded(chunks: list[Any]) -> list[bytes]:
    return [msgspec.json.encode(chunk) for chunk in chunks]


@given(chunks=st.lists(CHUNK, max_size=6), line_end=_LINE_ENDS, cuts=st.lists(st.integers(1, 40), max_size=60))
def test_any_cut_and_line_end_is_the_same_output(chunks: list[Any], line_end: bytes, cuts: list[int]) -> None:
    """Protects output of every kind: pieces, counts and ends do not depend on how the bytes arrive."""
    payloads = _encoded(chunks)
    whole = _reader()
    expected = _read(whole, payloads)
    stream = b"".join(b"data: " + payload + 2 * line_end for payload in (*payloads, DONE))
    cut, decoder, found, is_done = _reader(), SseDecoder(), list[Delta](), False
    while stream:
        size = cuts.pop() if cuts else 1
        head, stream = stream[:size], stream[size:]
        is_done |= cut.read(decoder.feed(head), found)
    assert is_done and found == expected
    assert (cut.tokens, cut.usage, cut.reason(at_mark=True)) == (whole.tokens, whole.usage, whole.reason(at_mark=True))


@given(chunks=st.lists(CHUNK, max_size=8))
def test_each_choice_keeps_its_order_and_is_put_together(chunks: list[Any]) -> None:
    """Protects choices: what each one says, put together, is what was sent for it, and it ends as it said first."""
    reader = _reader()
    made = replies(_read(reader, _encoded(chunks)), CHOICES, "gen-x")
    sent = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, reply in enumerate(made):
        own = [choice for choice in sent if choice["index"] == index]
        assert reply.text == "".join(choice["delta"].get("content") or "" for choice in own)
        ends = [choice["finish_reason"] for choice in own if choice.get("finish_reason") not in (None, "", "none", "null")]
        assert reply.finish == (FinishReason(ends[0]) if ends else None)
        assert all(call.id for call in reply.tool_calls)
    assert (reader.reason() is None) is any(reply.finish is None for reply in made)


@given(counts=st.lists(st.tuples(st.integers(0, CHOICES - 1), st.integers(0, 9)), max_size=30))
def test_counts_of_choices_add_up(counts: list[tuple[int, int]]) -> None:
    """Protects the charge of a cancelled stream: each choice's chunks count its own tokens, and together they are the sum."""
    reader, largest, seen = _reader(counts_each_choice=True), [0] * CHOICES, 0
    for index, count in counts:
        chunk = {
            "choices": [{"index": index, "delta": {"content": "a"}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": count},
        }
        [piece] = _read(reader, _encoded([chunk]))
        largest[index] = max(largest[index], count)
        seen = max(seen, sum(largest))
        assert piece.tokens == seen == reader.tokens and reader.usage is None
    _read(reader, _encoded([{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 99 * CHOICES}}]))
    assert reader.usage is not None and reader.usage.output_tokens == reader.tokens == 99 * CHOICES


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_counts_of_all_choices_are_taken_as_they_are(counts: list[int]) -> None:
    """Protects tenants from servers that tell the total on each chunk, also beside the last choice: it is counted once."""
    reader = _reader()
    for number, count in enumerate(counts):
        both = [{"index": index, "delta": {"content": "a"}} for index in range(1 + number % 2)]
        _read(reader, _encoded([{"choices": both, "usage": {"prompt_tokens": 5, "completion_tokens": count}}]))
        assert reader.tokens == max(counts[: number + 1])
    assert reader.usage is not None and (reader.usage.input_tokens, reader.usage.output_tokens) == (5, counts[-1])


# ── what is no chunk ─────────────────────────────────────────────────────────────────────────────────────────────────

SECRET = "zebra"
HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 10**9, 2**63, 2**64, 10**30, -(10**30), 1.5, 1e308]),
    st.sampled_from(["", SECRET, "stop", "\u0000", "\ud7ff"]),
    st.sampled_from([[], {}, [None], [SECRET], {SECRET: SECRET}, [[]], [{}]]),
)
_RAW = st.sampled_from(
    [b"", b"{", b"null", b"[]", b"7", b'"zebra"', b"\xff", b'{"choices":[{"text":"\\ud800"}]}', b"[" * 3_000]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every member of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *_places(item, (*path, key)))]


def _changed(value: Any, path: tuple[Any, ...], put: Any) -> Any:
    """The same with another value at a path."""
    if not path:
        return put
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _changed(value[path[0]], path[1:], put)
    return copy


def _survives(payload: bytes, choices: int) -> None:
    """It is output that can be passed on, or a fault that does not name what it was."""
    reader, fault = _reader(choices), None
    try:
        pieces = _read(reader, [payload])
    except errors.EngineFault as found:
        fault, pieces = found, []
    assert fault is None or SECRET not in fault.detail + repr(fault.members)
    stream = TokenStream(100, 100)
    stream.book(100)
    msgspec.json.encode(stream.arrive(pieces, 1))
    msgspec.json.encode(replies(pieces, choices, "gen-x"))
    assert reader.reason() is None or reader.usage is None or reader.usage.output_tokens >= 0


@given(chunk=CHUNK, data=st.data(), choices=st.sampled_from([1, CHOICES]))
def test_a_wrong_value_anywhere_is_a_fault_or_harmless(chunk: Any, data: st.DataObject, choices: int) -> None:
    """Protects the gateway: no index, name, number or nesting that an engine sends can crash it, nor reach a fault's text."""
    places = _places(chunk)
    if places:
        chunk = _changed(chunk, data.draw(st.sampled_from(places)), data.draw(HOSTILE))
    payload = re.sub(rb"\b1e308\b", b"1e999", _big_json(chunk))
    _survives(payload, choices)


@given(payload=_RAW | st.binary(max_size=40), choices=st.sampled_from([1, CHOICES]))
def test_what_is_no_json_is_a_fault_or_harmless(payload: bytes, choices: int) -> None:
    """Protects the gateway from bytes."""
    _survives(payload, choices)


def _big_json(value: Any) -> bytes:
    """JSON with numbers of any size, which msgspec does not write."""
    if isinstance(value, dict):
        return b"{%b}" % b",".join(msgspec.json.encode(str(key)) + b":" + _big_json(item) for key, item in value.items())
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(_big_json, value))
    return str(value).encode() if type(value) is int else msgspec.json.encode(value)


@given(chunk=CHUNK, data=st.data())
def test_unknown_members_change_nothing(chunk: Any, data: st.DataObject) -> None:
    """Protects against newer engines: members that we do not know are ignored, wherever they are."""
    holders = [(), *(path for path in _places(chunk) if _is_ours(chunk, path))]
    path = data.draw(st.sampled_from(holders))
    target: Any = chunk
    for key in path:
        target = target[key]
    more = _changed(chunk, path, {**target, "weir_unknown": data.draw(HOSTILE)}) if path else {**chunk, "weir_unknown": SECRET}
    one, other = _reader(), _reader()
    assert _read(one, _encoded([chunk])) == _read(other, [_big_json(more)])


def _is_ours(chunk: Any, path: tuple[Any, ...]) -> bool:
    """Whether an object with fixed members is there; the columns of alternatives have tokens as names."""
    value: Any = chunk
    for key in path:
        value = value[key]
    return isinstance(value, dict) and not (
        "top_logprobs" in path and "tokens" in _at(chunk, path[: path.index("top_logprobs")])
    )


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.booleans(), TEXT), max_size=8), st.integers(1, 3))
def test_a_call_is_told_with_its_name_first(parts: list[tuple[int, bool, bool, str]], per_chunk: int) -> None:
    """Protects callers of tools from engines that name a call late, or again and again: name once and first, every argument."""
    told = _told([_calls(parts[start : start + per_chunk]) for start in range(0, len(parts), per_chunk)])
    for index in {each[0] for each in parts}:
        sent, own = [each for each in parts if each[0] == index], [part for part in told if part.index == index]
        assert (own[0].id, own[0].name) == _known_by_its_name(sent)
        assert {(part.id, part.name) for part in own[1:]} <= {(None, None)}
        assert "".join(part.arguments for part in own) == "".join(each[3] for each in sent)


def _told(chunks: list[dict[str, Any]]) -> list[ToolCallPart]:
    """The parts of calls that come of these chunks and an end."""
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    deltas = _read(_reader(1), [msgspec.json.encode(chunk) for chunk in [*chunks, ended]])
    return [part for delta in deltas if isinstance(delta, ShapedDelta) for part in delta.tool_calls]


def _calls(parts: list[tuple[int, bool, bool, str]]) -> dict[str, Any]:
    """A chunk with these parts of calls: index, whether it has an id and a name, arguments."""
    calls = [
        {"index": index, "id": "id" if has_id else None, "function": {"name": "n" if has_name else None, "arguments": text}}
        for index, has_id, has_name, text in parts
    ]
    return {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}


def _known_by_its_name(sent: list[tuple[int, bool, bool, str]]) -> tuple[str | None, str | None]:
    """Id and name of one call, as far as they came before or with its name, or at all where that never came."""
    named = next((place for place, each in enumerate(sent, 1) if each[2]), None)
    return "id" if any(each[1] for each in sent[:named]) else None, "n" if named is not None else None


def test_a_call_that_never_gets_a_name_is_bounded() -> None:
    """Protects memory: arguments that wait for a name are held up to a bound, and beyond it are a fault of the engine."""
    piece = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 1_000}}]}}]}
    reader = _reader(1)
    with pytest.raises(errors.EngineError, match="without a name"):
        _read(reader, [msgspec.json.encode(piece)] * 100)
