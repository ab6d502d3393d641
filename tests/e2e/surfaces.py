"""The surfaces that tenants reach, each as a table row: what to send, and how to read what comes back.

A reader is strict: it asserts the order of a stream's events, that exactly one of them is terminal, and that nothing follows it
but what its own clients need. What it reads it gives as `Shown`, the same for all, so that one test speaks of every surface.

`ACTIVE` names those that the product serves. A description without a surface is complete, and checked against the types of the
vendor's SDK by `tests/unit/test_surfaces.py`; to test a surface that has landed, add its name to `ACTIVE`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.event_streams import Event

ACTIVE: tuple[str, ...] = ("native", "chat", "completions", "responses", "messages")
"""The surfaces under test, of those in `SURFACES`."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One generation as every surface can ask for it."""

    prompt: str
    request_id: str = ""
    stream: bool = True
    most: int = 1_000
    deadline_ms: int | None = None


@dataclass(frozen=True)
class Shown:
    """How an ending was told to the caller. http: 0 for a stream whose headers were sent.

    status, reason: in native words, None where a surface does not tell. usage: native fields, those that the surface shows.
    """

    http: int
    status: str | None
    reason: str | None
    code: str | None
    text: str
    usage: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class SurfaceUnderTest:
    """One surface. id_header: the header that its SDK reads a request id from. has_tools: whether it takes tools."""

    name = ""
    path = ""
    id_header = "x-request-id"
    has_tools = False

    def body(self, asked: Asked) -> Fields:
        """The body that asks for a generation."""
        raise NotImplementedError

    def headers(self, asked: Asked) -> dict[str, str]:
        """What is asked for in headers: nearly all surfaces take the request id and the deadline there."""
        headers = {"idempotency-key": asked.request_id} if asked.request_id else {}
        return headers | ({"weir-deadline-ms": str(asked.deadline_ms)} if asked.deadline_ms else {})

    def text_in(self, event: Event) -> str:
        """The output text that an event brings; empty for any other."""
        raise NotImplementedError

    def arguments_in(self, event: Event) -> str:
        """The piece of a tool call's arguments that an event brings; empty for any other."""
        return ""

    def shown_stream(self, events: Sequence[Event]) -> Shown:
        """A whole stream. Raises AssertionError where it is not as the surface's specification says."""
        raise NotImplementedError

    def shown_whole(self, http: int, headers: Mapping[str, str], body: Fields) -> Shown:
        """A plain answer: the generation, its failure, or a refusal."""
        raise NotImplementedError

    def refusal(self, body: Fields) -> Fields:
        """The members of a refusal, among them its `code`, in the surface's own shape."""
        raise NotImplementedError

    def text(self, events: Sequence[Event]) -> str:
        """The output of a stream, as far as it came."""
        return "".join(map(self.text_in, events))

    def opening(self, events: Sequence[Event]) -> bool:
        """Whether these events, the first of a stream, say that the request was accepted."""
        return bool(events)


class Native(SurfaceUnderTest):
    """`accepted`, `output`, `done`, numbered from 0."""

    name = "native"
    path = "/v1/generations"

    def body(self, asked: Asked) -> Fields:
        return {
            "request_id": asked.request_id or None,
            "model_alias": "assistant",
            "input": asked.prompt,
            "max_output_tokens": asked.most,
            "stream": asked.stream,
            "deadline_ms": asked.deadline_ms,
        }

    def headers(self, asked: Asked) -> dict[str, str]:
        return {}

    def text_in(self, event: Event) -> str:
        return str(event.json["text"]) if event.name == "output" else ""

    def shown_stream(self, events: Sequence[Event]) -> Shown:
        assert [event.id for event in events] == [str(number) for number in range(len(events))]
        assert [event.name for event in events] == ["accepted", *["output"] * (len(events) - 2), "done"]
        done = events[-1].json
        code = done.get("error", {}).get("code")
        return Shown(0, done["status"], done["finish_reason"], code, self.text(events), done["usage"])

    def shown_whole(self, http: int, headers: Mapping[str, str], body: Fields) -> Shown:
        code = body["code"] if "code" in body else body.get("error", {}).get("code")
        reason, usage = body.get("finish_reason"), body.get("usage")
        return Shown(http, body["status"], reason, code, body.get("output", ""), usage, headers)

    def refusal(self, body: Fields) -> Fields:
        assert {"type", "title", "status", "detail", "code"} <= set(body)
        return body


class OpenAIChunks(SurfaceUnderTest):
    """What chat and legacy completions share: chunks without names, a chunk with usage, `[DONE]`, OpenAI's errors."""

    kind = ""

    def piece_of(self, choice: Fields) -> str:
        """The text that a choice of a chunk brings."""
        raise NotImplementedError

    def text_in(self, event: Event) -> str:
        chunk = {} if event.data == "[DONE]" else event.json
        return "".join(map(self.piece_of, chunk.get("choices", ())))

    def shown_stream(self, events: Sequence[Event]) -> Shown:
        assert not any(event.name or event.id for event in events)
        assert [event.data == "[DONE]" for event in events] == [*[False] * (len(events) - 1), True]
        *chunks, last = [event.json for event in events[:-1]]
        assert not any("error" in chunk for chunk in chunks), "nothing but the end mark follows an error"
        reasons = self._reasons(chunks)
        if "error" in last:
            assert not any(reasons)
            return Shown(0, None, None, self.refusal(last)["code"], self.text(events))
        self._reasons([*chunks, last])
        assert last["choices"] == [], "usage is the last chunk's"
        assert reasons[-1] and not any(reasons[:-1]), "one finish reason, on the last chunk of its choice"
        return Shown(0, "completed", reasons[-1], None, self.text(events), _chunk_usage(last["usage"]))

    def _reasons(self, chunks: Sequence[Fields]) -> list[str | None]:
        """The finish reason of each choice of each chunk; all are chunks of one completion."""
        assert {chunk["object"] for chunk in chunks} <= {self.kind}
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) <= 1
        return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]

    def shown_whole(self, http: int, headers: Mapping[str, str], body: Fields) -> Shown:
        if "error" in body:
            return _failed_whole(http, headers, self.refusal(body))
        [choice] = body["choices"]
        text, usage = self.whole_text(choice), _chunk_usage(body["usage"])
        return Shown(http, "completed", choice["finish_reason"], None, text, usage, headers)

    def whole_text(self, choice: Fields) -> str:
        """The text of a choice of a whole answer."""
        raise NotImplementedError

    def refusal(self, body: Fields) -> Fields:
        return openai_refusal(body)


class Chat(OpenAIChunks):
    """A chunk with the role plays `accepted`."""

    name = "chat"
    path = "/v1/chat/completions"
    kind = "chat.completion.chunk"
    has_tools = True

    def body(self, asked: Asked) -> Fields:
        return {
            "model": "assistant",
            "messages": [{"role": "user", "content": asked.prompt}],
            "max_completion_tokens": asked.most,
            "stream": asked.stream,
            "stream_options": {"include_usage": True} if asked.stream else None,
        }

    def piece_of(self, choice: Fields) -> str:
        return choice["delta"].get("content") or ""

    def arguments_in(self, event: Event) -> str:
        choices = [] if event.data == "[DONE]" else event.json.get("choices", ())
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        return "".join(call["function"]["arguments"] for call in calls)

    def whole_text(self, choice: Fields) -> str:
        return choice["message"]["content"] or ""

    def opening(self, events: Sequence[Event]) -> bool:
        return bool(events) and events[0].json["choices"][0]["delta"]["role"] == "assistant"


class Completions(OpenAIChunks):
    """Legacy completions: a plain prompt, and chunks in the shape of whole answers."""

    name = "completions"
    path = "/v1/completions"
    kind = "text_completion"

    def body(self, asked: Asked) -> Fields:
        return {
            "model": "assistant",
            "prompt": asked.prompt,
            "max_tokens": asked.most,
            "stream": asked.stream,
            "stream_options": {"include_usage": True} if asked.stream else None,
        }

    def piece_of(self, choice: Fields) -> str:
        return str(choice["text"])

    def whole_text(self, choice: Fields) -> str:
        return str(choice["text"])


class Responses(SurfaceUnderTest):
    """Named events with sequence numbers; the terminal one carries the whole response, and no end mark follows."""

    name = "responses"
    path = "/v1/responses"
    terminal = ("response.completed", "response.incomplete", "response.failed", "error")
    delta = "response.output_text.delta"
    has_tools = True

    def body(self, asked: Asked) -> Fields:
        return {"model": "assistant", "input": asked.prompt, "max_output_tokens": asked.most, "stream": asked.stream}

    def text_in(self, event: Event) -> str:
        return str(event.json["delta"]) if event.name == self.delta else ""

    def arguments_in(self, event: Event) -> str:
        return str(event.json["delta"]) if event.name == "response.function_call_arguments.delta" else ""

    def shown_stream(self, events: Sequence[Event]) -> Shown:
        told = [event.json for event in events]
        assert [event.name for event in events] == [content["type"] for content in told]
        assert [content["sequence_number"] for content in told] == list(range(len(told)))
        assert [event.name in self.terminal for event in events] == [*[False] * (len(events) - 1), True]
        assert self.opening(events) and sum(event.name == "response.created" for event in events) == 1
        text, last = self.text(events), told[-1]
        if last["type"] == "error":
            return Shown(0, None, None, last["code"], text)
        shown = self._of_response(0, {}, last["response"])
        if shown.code is not None:
            return Shown(0, None, None, shown.code, text)
        assert shown.text == text, "the terminal event has what the deltas brought"
        assert text == "".join(content["text"] for content in told if content["type"] == "response.output_text.done")
        return shown

    def shown_whole(self, http: int, headers: Mapping[str, str], body: Fields) -> Shown:
        if body.get("object") != "response":
            return _failed_whole(http, headers, self.refusal(body))
        return self._of_response(http, headers, body)

    def _of_response(self, http: int, headers: Mapping[str, str], response: Fields) -> Shown:
        if response["status"] not in ("completed", "incomplete"):
            return Shown(http, None, None, response["error"]["code"], "", None, headers)
        items = [item for item in response["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in items for part in item["content"])
        why = (response.get("incomplete_details") or {}).get("reason")
        reason = {None: "stop", "max_output_tokens": "length"}.get(why, why)
        told = response["usage"]
        assert told["total_tokens"] == told["input_tokens"] + told["output_tokens"]
        usage = _plain_usage(told, told["input_tokens"], told["input_tokens_details"]["cached_tokens"])
        return Shown(http, "completed", reason, None, text, usage, headers)

    def refusal(self, body: Fields) -> Fields:
        return openai_refusal(body)

    def opening(self, events: Sequence[Event]) -> bool:
        return bool(events) and events[0].name == "response.created"


_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class Messages(SurfaceUnderTest):
    """Anthropic's: a message of content blocks, each opened, filled and closed; `ping` may come anywhere; an error ends it."""

    name = "messages"
    path = "/v1/messages"
    id_header = "request-id"
    has_tools = True

    def body(self, asked: Asked) -> Fields:
        turns = [{"role": "user", "content": asked.prompt}]
        return {"model": "assistant", "max_tokens": asked.most, "messages": turns, "stream": asked.stream}

    def headers(self, asked: Asked) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01", **super().headers(asked)}

    def text_in(self, event: Event) -> str:
        delta = event.json["delta"] if event.name == "content_block_delta" else {}
        return delta.get("text", "") if delta.get("type") == "text_delta" else ""

    def arguments_in(self, event: Event) -> str:
        delta = event.json["delta"] if event.name == "content_block_delta" else {}
        return delta.get("partial_json", "") if delta.get("type") == "input_json_delta" else ""

    def shown_stream(self, events: Sequence[Event]) -> Shown:
        told = [event.json for event in events if event.name != "ping"]
        assert [event.name for event in events] == [event.json["type"] for event in events]
        kinds = [content["type"] for content in told]
        ends = [kind in ("message_stop", "error") for kind in kinds]
        assert ends == [*[False] * (len(kinds) - 1), True] and events[-1].name != "ping"
        assert kinds[0] == "message_start" and kinds.count("message_start") == 1
        text = self.text(events)
        self._check_blocks(told[1:-1])
        if kinds[-1] == "error":
            return Shown(0, None, None, self.refusal(told[-1])["code"], text)
        assert kinds[-2] == "message_delta" and kinds.count("message_delta") == 1
        begun, ended = told[0]["message"]["usage"], told[-2]["usage"]
        cached = ended.get("cache_read_input_tokens") or 0
        own = begun["input_tokens"] if ended.get("input_tokens") is None else ended["input_tokens"]
        reason = _STOP_REASONS[told[-2]["delta"]["stop_reason"]]
        return Shown(0, "completed", reason, None, text, _plain_usage(ended, own + cached, cached))

    def _check_blocks(self, told: Sequence[Fields]) -> None:
        """Blocks follow one another, numbered from 0; an error may leave the last one open."""
        index, is_open = -1, False
        for content in told:
            kind = content["type"].removeprefix("content_block_")
            if kind == "message_delta":
                assert not is_open
                continue
            if kind == "start":
                assert not is_open
                index, is_open = index + 1, True
            assert is_open and content["index"] == index, content
            is_open = kind != "stop"

    def shown_whole(self, http: int, headers: Mapping[str, str], body: Fields) -> Shown:
        if body["type"] == "error":
            return _failed_whole(http, headers, self.refusal(body))
        text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
        told = body["usage"]
        cached = told.get("cache_read_input_tokens") or 0
        usage = _plain_usage(told, told["input_tokens"] + cached, cached)
        return Shown(http, "completed", _STOP_REASONS[body["stop_reason"]], None, text, usage, headers)

    def refusal(self, body: Fields) -> Fields:
        assert body["type"] == "error" and {"type", "message", "code"} <= set(body["error"]), body
        return dict(body["error"])

    def opening(self, events: Sequence[Event]) -> bool:
        return bool(events) and events[0].name == "message_start"


def openai_refusal(body: Fields) -> Fields:
    """The members of an error in OpenAI's shape."""
    error: Fields = body["error"]
    assert {"message", "type", "param", "code"} <= set(error) and error["message"], body
    return error


def _failed_whole(http: int, headers: Mapping[str, str], error: Fields) -> Shown:
    record = error.get("generation", {})
    return Shown(http, record.get("status"), record.get("finish_reason"), error["code"], "", None, headers)


def _chunk_usage(told: Fields) -> Fields:
    assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]
    cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return _plain_usage({**told, "output_tokens": told["completion_tokens"]}, told["prompt_tokens"], cached)


def _plain_usage(told: Fields, input_tokens: int, cached: int) -> Fields:
    usage = {"input_tokens": input_tokens, "cached_input_tokens": cached, "output_tokens": told["output_tokens"]}
    return usage | ({"cost_microusd": told["cost_microusd"]} if "cost_microusd" in told else {})


SURFACES: Mapping[str, SurfaceUnderTest] = {
    surface.name: surface for surface in (Native(), Chat(), Completions(), Responses(), Messages())
}
ANSWERS: list[tuple[str, bool]] = [(name, stream) for name in ACTIVE for stream in (True, False)]
"""Every way to be answered: surface and whether it is streamed."""
