"""Chunks and bodies of OpenAI's chat completions and completions: whatever an engine sends, in the shapes that clients read."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.api.openai.chat import ChatAnswer
from weir.api.openai.chunked import ChunkedAnswer, ChunkOptions
from weir.api.openai.completions import CompletionAnswer
from weir.clock import SystemClock
from weir.core.endings import FinishReason, Status
from weir.core.output import Delta, ShapedDelta, TokenLogprob, ToolCallPart
from weir.gateway.client import Accepted, ClientWatcher
from weir.messages import GenerationRecord, StandingView

ACCEPTED = Accepted("gen-1", "req-1", "assistant", "rev-1", StandingView(), 3)
RECORD = GenerationRecord(
    "gen-1", "req-1", 1, "assistant", "rev-1", Status.COMPLETED, FinishReason.STOP, input_tokens=3, output_tokens=4, posted=True
)


class Recorder:
    """A client that keeps what it is sent."""

    read_ns = 0
    is_lost = False
    unsent = 0

    def __init__(self) -> None:
        self.written = 0
        self.status = 0
        self.body = b""
        self.writes = 0
        self.is_finished = False

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Nobody leaves."""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status

    def write(self, body: bytes, events: int = 1) -> None:
        assert self.status and not self.is_finished
        self.body += body
        self.writes += 1

    async def finish(self, body: bytes = b"") -> None:
        self.body += body
        self.is_finished = True

    def abort(self) -> None:
        raise AssertionError("cut")

    def events(self) -> list[Any]:
        payloads = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n")[:-1]]
        return [msgspec.json.decode(payload) if payload != b"[DONE]" else "[DONE]" for payload in payloads]

    def choices(self, index: int = 0) -> list[Any]:
        """What the chunks say of one choice."""
        chunks = [event for event in self.events() if event != "[DONE]"]
        return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def _answer(kind: type[ChunkedAnswer], **options: Any) -> tuple[ChunkedAnswer, Recorder]:
    client = Recorder()
    return kind(client, SystemClock(), "req-1", ChunkOptions(**options)), client


async def _stream(kind: type[ChunkedAnswer], *writes: Sequence[Delta], **options: Any) -> Recorder:
    answer, client = _answer(kind, **options)
    await answer.open(ACCEPTED)
    for pieces in writes:
        answer.output(pieces)
    answer.finish_reason(RECORD)
    await answer.end(RECORD, [], StandingView())
    return client


async def _whole(kind: type[ChunkedAnswer], pieces: Sequence[Delta], **options: Any) -> Any:
    answer, client = _answer(kind, **options)
    await answer.end(RECORD, pieces, StandingView())
    return msgspec.json.decode(client.body)


PIECES = st.lists(
    st.builds(Delta, st.text(min_size=1))
    | st.builds(ShapedDelta, st.text(), reasoning=st.text(max_size=5), logprobs=st.just((TokenLogprob("a", -0.5),))),
    max_size=12,
)


@given(pieces=PIECES, cuts=st.lists(st.integers(1, 4), max_size=12))
@pytest.mark.parametrize(("kind", "text"), [(ChatAnswer, "content"), (CompletionAnswer, "text")])
async def test_any_grouping_of_pieces_is_the_same_text(
    kind: type[ChunkedAnswer], text: str, pieces: list[Delta], cuts: list[int]
) -> None:
    """Protects the text: streamed in any groups it is the whole answer's, hostile characters included."""
    writes, left = [], list(pieces)
    while left:
        size = cuts.pop() if cuts else 2
        writes.append(left[:size])
        left = left[size:]
    client = await _stream(kind, *writes)
    choices = client.choices()
    shown = "".join((choice.get("delta", choice)).get(text) or "" for choice in choices)
    whole = await _whole(kind, pieces)
    choice = whole["choices"][0]
    assert shown == "".join(piece.text for piece in pieces) == (choice.get("message", choice))[text]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert client.events()[-1] == "[DONE]" and client.is_finished


async def test_a_tool_call_in_pieces_is_one_call() -> None:
    """Protects agents: the first piece of a call has its id and name, the others its arguments, streamed as whole."""
    pieces = [
        ShapedDelta("", tool_calls=(ToolCallPart(0, "call_7", "find", ""),)),
        ShapedDelta("", tool_calls=(ToolCallPart(0, None, None, '{"a":'), ToolCallPart(1, None, "add", "{}"))),
        ShapedDelta("", tool_calls=(ToolCallPart(0, None, None, " 1}"),)),
    ]
    parts = [part for choice in (await _stream(ChatAnswer, pieces)).choices() for part in choice["delta"].get("tool_calls", ())]
    assert parts == [
        {"index": 0, "id": "call_7", "type": "function", "function": {"name": "find", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 1, "id": "call-1-0-1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": " 1}"}},
    ]
    message = (await _whole(ChatAnswer, pieces))["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_7", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}},
        {"id": "call-1-0-1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
async def test_each_choice_ends_for_its_own_reason(kind: type[ChunkedAnswer]) -> None:
    """Protects n > 1: a choice that told its end ends once; the others end as the generation did."""
    pieces = [
        ShapedDelta("b", choice=1),
        ShapedDelta("a", choice=0),
        ShapedDelta("c", choice=1, finish=FinishReason.LENGTH),
        ShapedDelta("d", choice=2),
    ]
    client = await _stream(kind, pieces, choices=3)
    reasons = [[choice["finish_reason"] for choice in client.choices(index)] for index in range(3)]
    assert [[reason for reason in told if reason] for told in reasons] == [["stop"], ["length"], ["stop"]]
    assert all(told[-1] for told in reasons)
    choices = (await _whole(kind, pieces, choices=3))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]
    assert [choice.get("text") or choice["message"]["content"] for choice in choices] == ["a", "bc", "d"]


async def test_log_probabilities_have_each_surfaces_shape() -> None:
    """Protects whoever reads them: entries with alternatives for chat, columns with offsets for completions."""
    top = (TokenLogprob("é", -0.1), TokenLogprob("x", -2.5, (120,)))
    pieces = [
        ShapedDelta("é", logprobs=(TokenLogprob("é", -0.1, None, top),)),
        ShapedDelta("y", logprobs=(TokenLogprob("y", -1.0),)),
    ]
    entries = [
        {
            "token": "é",
            "logprob": -0.1,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.1, "bytes": [195, 169]},
                {"token": "x", "logprob": -2.5, "bytes": [120]},
            ],
        },
        {"token": "y", "logprob": -1.0, "bytes": [121], "top_logprobs": []},
    ]
    choice = (await _whole(ChatAnswer, pieces, has_logprobs=True))["choices"][0]
    assert choice["logprobs"] == {"content": entries, "refusal": None}
    shown = [choice["logprobs"] for choice in (await _stream(ChatAnswer, pieces, has_logprobs=True)).choices()]
    assert [told["content"] for told in shown if told] == [[entries[0]], [entries[1]]]
    columns = (await _whole(CompletionAnswer, pieces, has_logprobs=True))["choices"][0]["logprobs"]
    assert columns == {
        "tokens": ["é", "y"],
        "token_logprobs": [-0.1, -1.0],
        "top_logprobs": [{"é": -0.1, "x": -2.5}, {}],
        "text_offset": [0, 1],
    }
    streamed = [choice["logprobs"] for choice in (await _stream(CompletionAnswer, pieces, has_logprobs=True)).choices()]
    assert [told["text_offset"] for told in streamed if told] == [[0], [1]]


async def test_what_a_surface_has_no_shape_for_is_not_written() -> None:
    """Protects framing: a piece that completions do not show is no write at all."""
    answer, client = _answer(CompletionAnswer)
    await answer.open(ACCEPTED)
    answer.output([ShapedDelta("", reasoning="hm")])
    assert client.writes == 0


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
async def test_a_failure_after_the_headers_is_one_error_event(kind: type[ChunkedAnswer]) -> None:
    """Protects clients: an error event, then `[DONE]`, and neither a finish reason nor usage."""
    answer, client = _answer(kind, include_usage=True)
    await answer.open(ACCEPTED)
    answer.output([Delta("a")])
    failed = msgspec.structs.replace(
        RECORD, status=Status.FAILED, finish_reason=FinishReason.ENGINE_ERROR, error_code="engine_error"
    )
    await answer.end(failed, [], StandingView())
    events = client.events()
    assert events[-2]["error"]["code"] == "engine_error" and events[-1] == "[DONE]"
    assert sum("error" in event for event in events if event != "[DONE]") == 1
    assert all(choice["finish_reason"] is None for event in events[:-2] for choice in event["choices"])
