"""Whatever a model says, each surface's bytes are events that a strict parser reads, and its texts come out byte for byte.

The answer classes write to a client that only records; a parser of the standard that is not ours (`tests/event_streams.py`)
reads what they wrote, cut anywhere. A surface that has landed needs a row in `ANSWER_OF`.
"""

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.e2e.surfaces import ACTIVE, SURFACES, Shown
from tests.event_streams import events_of

from weir.api.anthropic.message_answer import MessageAnswer
from weir.api.generations import NativeAnswer
from weir.api.openai.chat import ChatAnswer
from weir.api.openai.chunked import ChunkOptions
from weir.api.openai.completions import CompletionAnswer
from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import parse_response
from weir.clock import SystemClock
from weir.core.endings import FinishReason, Status
from weir.core.output import Delta, ShapedDelta, ToolCallPart
from weir.gateway.client import Accepted, Answer, Client, ClientWatcher
from weir.messages import GenerationRecord, StandingView

EXAMPLES = 1_000 if os.environ.get("WEIR_SOAK") == "1" else 150
COMPLETED = GenerationRecord(
    "gen-1", "it", 1, "assistant", "revision", Status.COMPLETED, FinishReason.STOP, 7, 0, 5, 3, posted=True
)
FAILED = msgspec.structs.replace(
    COMPLETED, status=Status.FAILED, finish_reason=FinishReason.ENGINE_ERROR, error_code="engine_error", cost_microusd=0
)


class RecordingClient:
    """Takes everything at once. sent: all body bytes; each write is a piece. counts: the events that each was said to be."""

    def __init__(self) -> None:
        self.written = 0
        self.read_ns = 0
        self.is_lost = False
        self.unsent = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.sent: list[bytes] = []
        self.counts: list[int] = []
        self.finished = False

    def watch(self, watcher: ClientWatcher | None) -> None: ...

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert self.status == 0
        self.status, self.headers = status, {name.decode(): value.decode("latin-1") for name, value in headers}

    def write(self, body: bytes, events: int = 1) -> None:
        assert self.status and not self.finished and body, "an empty chunk would end the body"
        self.sent.append(body)
        self.counts.append(0 if body.startswith(b":") else events)

    async def finish(self, body: bytes = b"") -> None:
        assert self.status and not self.finished
        self.finished = True
        self.sent += [body] if body else []

    def abort(self) -> None:
        raise AssertionError("no answer cuts its client off")


def response_answer(client: Client) -> Answer:
    """Of a request without any settings."""
    request, options = parse_response({"model": "assistant", "input": "x"}, {})
    return ResponseAnswer(client, SystemClock(), "it", request, options)


WITH_USAGE = ChunkOptions(include_usage=True)
ANSWER_OF: Mapping[str, Callable[[Client], Answer]] = {
    "native": lambda client: NativeAnswer(client, SystemClock(), "it"),
    "chat": lambda client: ChatAnswer(client, SystemClock(), "it", WITH_USAGE),
    "completions": lambda client: CompletionAnswer(client, SystemClock(), "it", WITH_USAGE),
    "responses": response_answer,
    "messages": lambda client: MessageAnswer(client, SystemClock(), "it"),
}

KEPT = ("native", "responses")
"""Surfaces whose streams can be kept."""

# ── what a model may say ─────────────────────────────────────────────────────────────────────────────────────────────

FRAGMENTS = [
    "\n", "\r", "\r\n", "\n\n", "\r\r", "\x00", "\x1b[0m", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffd", "\uffff",
    "data: {}\n\n", "data: [DONE]\n\n", "event: done\n", "id: 9\n", ": comment\n\n", "retry: 1\n", "[DONE]", '"}\n\n', "\\",
    '"', "\\u0000", "\\ud800", "</script>", "é", "\xc3\xa9", "\xff\xfe", "𝄞", "👩\u200d👩", "\u200d", "👧", "\ufe0f", "e\u0301",
    "~", '"content":"~"',
]  # fmt: skip
"""Framing inside of text, every line end, and characters whose bytes, marks or joiners fall into pieces of their own."""

TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(FRAGMENTS), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


@dataclass(frozen=True)
class Said:
    """What a model says, in the groups that arrive together. None: a keep-alive between them."""

    groups: tuple[tuple[str, ...] | None, ...]
    cuts: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for group in self.groups if group is not None for text in group)


SAYINGS = st.builds(
    Said,
    st.lists(st.one_of(st.none(), st.lists(TEXTS, min_size=1, max_size=5).map(tuple)), max_size=8).map(tuple),
    st.lists(st.integers(1, 40), max_size=20).map(tuple),
)
HUGE = Said((("x" * 2**20,), None, ("\n\u2028𝄞" * 2**16, "end")), (1, 2**19))


def finished(work: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


def opened(surface: str) -> tuple[RecordingClient, Answer]:
    """A stream that said accepted."""
    client = RecordingClient()
    answer = ANSWER_OF[surface](client)
    finished(answer.open(Accepted("gen-1", "it", "assistant", "revision", StandingView(), 7)))
    return client, answer


def streamed(surface: str, said: Said, record: GenerationRecord, delta_of: Callable[[str], Delta]) -> RecordingClient:
    """Everything that a stream of it sends."""
    client, answer = opened(surface)
    for group in said.groups:
        if group is None:
            answer.keep_alive()
        else:
            answer.output([delta_of(text) for text in group])
    if record.status is Status.COMPLETED:
        answer.finish_reason(record)
    finished(answer.end(record, [], StandingView()))
    assert client.finished and client.status == 200
    return client


def cut(stream: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The stream in pieces of these sizes, again and again."""
    pieces, at, turn = [], 0, 0
    while at < len(stream):  # each turn takes at least a byte
        size = sizes[turn % len(sizes)] if sizes else len(stream)
        pieces.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


@pytest.mark.parametrize("record", [COMPLETED, FAILED], ids=["completed", "failed"])
@pytest.mark.parametrize("surface", ACTIVE)
@settings(max_examples=EXAMPLES)
@example(HUGE)
@given(SAYINGS)
def test_a_stream_is_read_by_a_strict_parser(surface: str, record: GenerationRecord, said: Said) -> None:
    """Protects every client's parser: valid events with JSON, the text byte for byte, and one terminal event at the end."""
    client = streamed(surface, said, record, Delta)
    assert client.headers["content-type"].startswith("text/event-stream")
    events = events_of(cut(b"".join(client.sent), said.cuts if said is not HUGE else ()))
    if surface in KEPT:
        assert client.counts == [len(events_of([piece])) for piece in client.sent], "of a stream that is kept, each is counted"
    shown = SURFACES[surface].shown_stream(events)
    assert shown.text.encode() == said.text.encode()
    assert (shown.code, shown.status or "failed") == (record.error_code, record.status)
    assert events == events_of(cut(b"".join(client.sent).replace(b"\n", b"\r\n"), ())), "a proxy's line ends change nothing"


TOOLED = [name for name in ACTIVE if SURFACES[name].has_tools]


@pytest.mark.parametrize("surface", TOOLED)
@settings(max_examples=EXAMPLES)
@given(SAYINGS)
def test_arguments_of_tool_calls_come_out_byte_for_byte(surface: str, said: Said) -> None:
    """Protects tools: arguments are text of the model too, and nothing in them reaches the framing."""
    begun = False

    def part(text: str) -> Delta:
        nonlocal begun
        first, begun = not begun, True
        return ShapedDelta("", tool_calls=(ToolCallPart(0, "call-1" if first else None, "look_up" if first else None, text),))

    record = msgspec.structs.replace(COMPLETED, finish_reason=FinishReason.TOOL_CALLS)
    client = streamed(surface, said, record, part)
    events = events_of(b"".join(client.sent))
    assert "".join(map(SURFACES[surface].arguments_in, events)).encode() == said.text.encode()
    assert SURFACES[surface].shown_stream(events).text == ""


@pytest.mark.parametrize("record", [COMPLETED, FAILED], ids=["completed", "failed"])
@pytest.mark.parametrize("surface", ACTIVE)
@settings(max_examples=EXAMPLES)
@example(HUGE)
@given(SAYINGS)
def test_a_whole_answer_has_the_same_text(surface: str, record: GenerationRecord, said: Said) -> None:
    """Protects clients that do not stream: the same bytes of text in one JSON body; of a failure none."""
    client = RecordingClient()
    pieces = [Delta(text) for group in said.groups if group is not None for text in group]
    finished(ANSWER_OF[surface](client).end(record, pieces if record is COMPLETED else [], StandingView()))
    shown: Shown = SURFACES[surface].shown_whole(client.status, client.headers, msgspec.json.decode(b"".join(client.sent)))
    assert shown.text == (said.text if record is COMPLETED else "") and shown.code == record.error_code
    assert client.finished and int(client.headers["content-length"]) == sum(map(len, client.sent))
