"""Anthropic's answers: one terminal event for every ending, error types by status, reasons, usage, unreadable arguments."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from weir import errors
from weir.api.anthropic.message_answer import MessageAnswer
from weir.api.anthropic.message_shapes import UNREADABLE_INPUT
from weir.api.wire import anthropic_error_body
from weir.core.endings import FinishReason, ending
from weir.core.output import Delta, ShapedDelta, ToolCallPart
from weir.gateway.client import Accepted, ClientWatcher
from weir.messages import GenerationRecord, StandingView
from weir.units import Nanos

ACCEPTED = Accepted("gen-abc", "req-1", "assistant", "rev@1", StandingView(), 12)
CALL = ShapedDelta("", tool_calls=(ToolCallPart(0, "t1", "f", '{"a":1}'),))
REASONING = ShapedDelta("", reasoning="hm")


class StillClock:
    """A clock that a test moves."""

    now_ns: Nanos = 5_000_000_000

    def monotonic_ns(self) -> Nanos:
        return self.now_ns

    def wall_ms(self) -> int:
        return 1_767_268_800_000


class Reader:
    """A client that keeps what it is sent."""

    read_ns: Nanos = 0
    written = 0
    is_lost = False
    unsent = 0

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.ends = 0

    def watch(self, watcher: ClientWatcher | None) -> None:
        raise AssertionError("nobody watches here")

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, dict(headers)

    def write(self, body: bytes, events: int = 1) -> None:
        assert body and not self.ends
        self.body += body

    async def finish(self, body: bytes = b"") -> None:
        self.body += body
        self.ends += 1

    def abort(self) -> None:
        raise AssertionError("nothing is cut here")

    @property
    def events(self) -> list[tuple[str, Any]]:
        pairs = (block.split("\n") for block in self.body.decode().split("\n\n")[:-1])
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def record_of(reason: FinishReason) -> GenerationRecord:
    rule = ending(reason)
    return GenerationRecord(
        generation_id="gen-abc",
        request_id="req-1",
        execution=1,
        alias="assistant",
        revision="rev@1",
        status=rule.status,
        finish_reason=reason,
        error_code=rule.error.code if rule.error else None,
        input_tokens=10,
        cached_input_tokens=4,
        output_tokens=3,
        cost_microusd=7,
    )


async def streamed(reason: FinishReason, *groups: list[Delta], told: bool = False) -> Reader:
    """A stream of these pieces to this ending. told: the engine's end is told before."""
    reader = Reader()
    answer = MessageAnswer(reader, StillClock(), "req-1")
    await answer.open(ACCEPTED)
    for group in groups:
        answer.output(group)
    if told:
        answer.finish_reason(record_of(FinishReason.STOP))
    await answer.end(record_of(reason), [], StandingView())
    return reader


async def whole(reason: FinishReason, *pieces: Delta) -> Reader:
    reader = Reader()
    await MessageAnswer(reader, StillClock(), "req-1").end(record_of(reason), pieces, StandingView())
    return reader


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("told", [False, True])
async def test_every_ending_is_told_once_and_last(reason: FinishReason, told: bool) -> None:
    """Protects clients: exactly one terminal event, `message_stop` or `error`, and nothing behind it."""
    reader = await streamed(reason, [Delta("a")], [Delta("b")], told=told)
    names = [name for name, _ in reader.events]
    terminal = "error" if ending(reason).error else "message_stop"
    assert reader.ends == 1 and names[-1] == terminal
    assert sum(name in ("error", "message_stop") for name in names) == 1
    assert names[0] == "message_start" and reader.events[0][1]["message"]["usage"]["input_tokens"] == 12
    assert ("message_delta" in names) == (terminal == "message_stop")
    if terminal == "message_stop":
        assert names.count("content_block_stop") == 1


@pytest.mark.parametrize("reason", FinishReason)
async def test_every_ending_before_the_headers_is_a_plain_answer(reason: FinishReason) -> None:
    """Protects the table of endings: the status of compatible paths, and a failure's code and record."""
    reader = await whole(reason, Delta("a"))
    body = json.loads(reader.body)
    assert reader.status == ending(reason).compatible_http_status and reader.ends == 1
    if ending(reason).error is None:
        assert (body["type"], body["content"]) == ("message", [{"type": "text", "text": "a"}])
        return
    assert body["type"] == "error" and body["request_id"] == "req-1"
    assert body["error"]["generation"]["finish_reason"] == reason
    assert body["error"]["code"] == body["error"]["details"]["error_code"]


@pytest.mark.parametrize(
    ("reason", "pieces", "shown"),
    [
        (FinishReason.STOP, [Delta("a")], "end_turn"),
        (FinishReason.LENGTH, [Delta("a")], "max_tokens"),
        (FinishReason.LENGTH, [CALL], "max_tokens"),
        (FinishReason.TOOL_CALLS, [CALL], "tool_use"),
        (FinishReason.STOP, [CALL], "tool_use"),
        (FinishReason.TOOL_CALLS, [Delta("a")], "end_turn"),
        (FinishReason.CONTENT_FILTER, [], "refusal"),
    ],
)
async def test_why_a_message_stopped(reason: FinishReason, pieces: list[Delta], shown: str) -> None:
    """Protects loops that call tools: streamed and whole say the same, also where an engine says `stop` of a call."""
    body = json.loads((await whole(reason, *pieces)).body)
    delta = (await streamed(reason, pieces)).events[-2][1]
    assert body["stop_reason"] == delta["delta"]["stop_reason"] == shown
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
        "cost_microusd": 7,
    }
    assert body["usage"] == delta["usage"] == usage
    assert (body["id"], body["model"], body["model_revision"]) == ("msg_abc", "assistant", "rev@1")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        ("  ", {}),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ('{"a": ', {UNREADABLE_INPUT: '{"a": '}),
        ("[1]", {UNREADABLE_INPUT: "[1]"}),
        ("[" * 100_000, {UNREADABLE_INPUT: "[" * 100_000}),
        ('{"a": 1e999}', {UNREADABLE_INPUT: '{"a": 1e999}'}),
    ],
)
async def test_arguments_that_are_no_object_are_shown(arguments: str, shown: dict[str, Any]) -> None:
    """Protects answers from what a model wrote: no argument crashes one, and none is lost."""
    piece = ShapedDelta("", tool_calls=(ToolCallPart(0, None, "f", arguments),))
    [block] = json.loads((await whole(FinishReason.TOOL_CALLS, piece)).body)["content"]
    assert block == {"type": "tool_use", "id": "call-abc-0-0", "name": "f", "input": shown}


async def test_reasoning_is_not_shown() -> None:
    """Protects proxies' patience: nothing is written for it, so that pings go on as if the model were silent."""
    reader = Reader()
    answer = MessageAnswer(reader, StillClock(), "req-1")
    await answer.open(ACCEPTED)
    answer.output([REASONING])
    answer.keep_alive()
    answer.output([Delta("a")])
    names = [name for name, _ in reader.events]
    assert names == ["message_start", "ping", "content_block_start", "content_block_delta"]


async def test_a_refusal_has_this_surfaces_names() -> None:
    """Protects callers: the field that is wrong is named as they wrote it, and the retry headers are there."""
    reader = Reader()
    refusal = errors.InvalidRequest("Too many.", members={"field": "max_output_tokens", "accepted": "1 to 5"})
    await MessageAnswer(reader, StillClock(), "req-1").refuse(refusal, None, None)
    error = json.loads(reader.body)["error"]
    assert (reader.status, error["type"], error["field"], error["accepted"]) == (
        400,
        "invalid_request_error",
        "max_tokens",
        "1 to 5",
    )
    reader = Reader()
    busy = errors.QueueFull("Full.", retry_after_ms=1_000)
    await MessageAnswer(reader, StillClock(), "req-1").refuse(busy, StandingView(), None)
    assert reader.status == 503 and int(reader.headers[b"retry-after"]) >= 1
    assert json.loads(reader.body)["error"]["type"] == "overloaded_error"


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    410: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize("error", errors.ERROR_BY_CODE.values(), ids=errors.ERROR_BY_CODE)
def test_the_type_of_an_error_follows_its_status(error: type[errors.WeirError]) -> None:
    """Protects clients that decide by Anthropic's types."""
    body = anthropic_error_body(error(), 0, "req-1")
    assert body["error"]["type"] == TYPES[error.http_status] and body["error"]["code"] == error.code
