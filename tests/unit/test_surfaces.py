"""The descriptions that tests read surfaces by: what the vendors' types call valid is read, a stream out of order is not."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.e2e.surfaces import ACTIVE, SURFACES, Asked
from tests.event_streams import Event, events_of

TEXTS = ("one ", "two\n")
Fields = dict[str, Any]


# ── the strict parser itself ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_parser_reads_as_the_standard_says() -> None:
    """Protects every test that reads a stream: line ends, comments, several data lines, blanks, a byte order mark."""
    stream = "\ufeff: hi\r\nevent: a\rid: 1\ndata:x\ndata:  y\r\n\r\n:\n\ndata\n\ndata: é\u2028\n\n".encode()
    expected = [Event("a", "1", "x\n y"), Event("", "", ""), Event("", "", "é\u2028")]
    assert events_of(stream) == events_of(stream[at : at + 1] for at in range(len(stream))) == expected


@pytest.mark.parametrize(
    "wrong", [b"data: x\n", b"data: \xff\n\n", b"data: \xc3", b"event: a\n\n", b"date: x\n\n", b"id: 1\nid: 2\n"]
)
def test_the_parser_refuses_what_others_forgive(wrong: bytes) -> None:
    """Protects against a product that only forgiving clients can read."""
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        events_of(wrong)


# ── samples by the specifications ────────────────────────────────────────────────────────────────────────────────────


def chunk_events(kind: str, choice_of: Callable[[str | None], Fields], error: bool) -> list[Event]:
    """A stream of OpenAI's chunks."""
    head = {"id": "gen-1", "object": kind, "created": 1, "model": "assistant"}
    chunks = [{**head, "choices": [{"index": 0, **choice_of(text), "finish_reason": None}]} for text in TEXTS]
    if error:
        chunks.append({"error": {"message": "m", "type": "server_error", "param": None, "code": "engine_error"}})
    else:
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        chunks.append({**head, "choices": [{"index": 0, **choice_of(None), "finish_reason": "stop"}]})
        chunks.append({**head, "choices": [], "usage": usage})
    return [*(Event("", "", json.dumps(chunk)) for chunk in chunks), Event("", "", "[DONE]")]


def native_events(error: bool) -> list[Event]:
    """A native stream."""
    end = {"status": "failed", "finish_reason": "engine_error", "error": {"code": "engine_error"}} if error else {}
    done = {"status": "completed", "finish_reason": "stop", "usage": {"input_tokens": 3, "output_tokens": 2}, **end}
    told = [("accepted", {"id": "gen-1"}), *(("output", {"text": text}) for text in TEXTS), ("done", done)]
    return [Event(name, str(number), json.dumps(content)) for number, (name, content) in enumerate(told)]


def response_of(status: str, **fields: Any) -> Fields:
    """A response object."""
    return {
        "id": "gen-1", "object": "response", "created_at": 1, "model": "assistant", "status": status, "output": [], "tools": [],
        "parallel_tool_calls": True, "tool_choice": "auto", **fields,
    }  # fmt: skip


def responses_events(error: bool) -> list[Event]:
    """A stream of the Responses API."""
    part = {"type": "output_text", "text": "".join(TEXTS), "annotations": []}
    item = {"type": "message", "id": "msg-1", "role": "assistant", "status": "completed", "content": [part]}
    at = {"item_id": "msg-1", "output_index": 0, "content_index": 0}
    told: list[Fields] = [
        {"type": "response.created", "response": response_of("in_progress")},
        {"type": "response.in_progress", "response": response_of("in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **at, "delta": text, "logprobs": []} for text in TEXTS),
    ]
    if error:
        failure = {"code": "server_error", "message": "m"}
        told.append({"type": "response.failed", "response": response_of("failed", error=failure)})
    else:
        usage = {
            "input_tokens": 3, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5,
        }  # fmt: skip
        told += [
            {"type": "response.output_text.done", **at, "text": "".join(TEXTS), "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": response_of("completed", output=[item], usage=usage)},
        ]
    numbered = [{**content, "sequence_number": number} for number, content in enumerate(told)]
    return [Event(content["type"], "", json.dumps(content)) for content in numbered]


def messages_events(error: bool) -> list[Event]:
    """A stream of the Messages API."""
    message: Fields = {
        "id": "gen-1", "type": "message", "role": "assistant", "model": "assistant", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0},
    }  # fmt: skip
    told: list[Fields] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in TEXTS),
    ]
    if error:
        told.append({"type": "error", "error": {"type": "api_error", "message": "m", "code": "engine_error"}})
    else:
        told += [
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": 2},
            },
            {"type": "message_stop"},
        ]
    return [Event(content["type"], "", json.dumps(content)) for content in told]


def chat_delta(text: str | None) -> Fields:
    """What a chunk of chat has."""
    return {"delta": {} if text is None else {"content": text}}


def plain_text(text: str | None) -> Fields:
    """What a chunk of legacy completions has."""
    return {"text": text or "", "logprobs": None}


SAMPLES: Mapping[str, Callable[[bool], list[Event]]] = {
    "native": native_events,
    "chat": lambda error: chunk_events("chat.completion.chunk", chat_delta, error),
    "completions": lambda error: chunk_events("text_completion", plain_text, error),
    "responses": responses_events,
    "messages": messages_events,
}
TYPES: Mapping[str, Any] = {
    "chat": ChatCompletionChunk,
    "responses": ResponseStreamEvent,
    "messages": RawMessageStreamEvent,
}
"""Of a stream's events; the type of legacy completions is that of whole answers, whose finish reason is never null."""


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("error", [False, True], ids=["completed", "failed"])
def test_a_stream_by_the_specification_is_read(name: str, error: bool) -> None:
    """Protects the table: what the vendor's own types accept is read, with its text, its end and its usage."""
    events = SAMPLES[name](error)
    for event in events:
        is_ours = event.data == "[DONE]" or '"error": {' in event.data or event.name == "ping"
        if name in TYPES and not is_ours:
            TypeAdapter(TYPES[name]).validate_json(event.data)
    shown = SURFACES[name].shown_stream(events)
    assert shown.text == "".join(TEXTS)
    if error:
        assert shown.code in ("engine_error", "server_error")
    else:
        assert (shown.status, shown.reason, shown.code) == ("completed", "stop", None)
        assert shown.usage is not None and (shown.usage["input_tokens"], shown.usage["output_tokens"]) == (3, 2)


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("error", [False, True], ids=["completed", "failed"])
def test_a_stream_out_of_order_is_refused(name: str, error: bool) -> None:
    """Protects the suite from readers that let a bare cut, a second end, or output behind an end pass."""
    events = SAMPLES[name](error)
    text = next(event for event in events if SURFACES[name].text_in(event))
    for wrong in (events[:-1], [*events, events[-1]], [*events, text], [text, *events[1:]][: len(events) - 1]):
        with pytest.raises((AssertionError, KeyError)):
            SURFACES[name].shown_stream(wrong)


def test_whole_answers_by_the_specification_are_read() -> None:
    """Protects the same for answers that are not streamed, of surfaces that have one type for both."""
    completion: Fields = {
        "id": "gen-1", "object": "text_completion", "created": 1, "model": "assistant",
        "choices": [{"index": 0, "text": "one", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    Completion.model_validate(completion)
    assert SURFACES["completions"].shown_whole(200, {}, completion).reason == "length"
    response = json.loads(responses_events(False)[-1].data)["response"]
    response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    Response.model_validate(response)
    shown = SURFACES["responses"].shown_whole(200, {}, response)
    assert (shown.text, shown.reason) == ("".join(TEXTS), "length")
    message = json.loads(messages_events(False)[0].data)["message"]
    message |= {"content": [{"type": "text", "text": "one"}], "stop_reason": "max_tokens"}
    Message.model_validate(message)
    shown = SURFACES["messages"].shown_whole(200, {}, message)
    assert (shown.text, shown.reason) == ("one", "length")


def test_the_table_is_whole() -> None:
    """Protects whoever adds a surface: each has a path of its own, and asks for what it is told to."""
    assert set(ACTIVE) <= set(SURFACES) == set(SAMPLES)
    assert len({surface.path for surface in SURFACES.values()}) == len(SURFACES)
    for surface in SURFACES.values():
        body = surface.body(Asked("the prompt", "an-id", stream=True, most=9))
        assert body["stream"] is True and 9 in body.values() and "the prompt" in json.dumps(body)
