"""A generation in the shape of chat completions, streamed and not.

Endings that are failures take OpenAI's error shape: before the headers as a plain answer, after them as one error event
followed by `[DONE]`, which the official SDK reads.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.api.generations import STREAM_HEADERS
from weir.api.openai.chat_request import ChatOptions
from weir.api.openai.shapes import error_event, logprob_entry, refusal, usage_object, whole_answer
from weir.api.wire import id_headers, limit_headers
from weir.core.output import Delta, Reply, ShapedDelta, ToolCallPart, replies, tool_call_id
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "chat.completions"


class ChatAnswer:
    """Answer of chat completions."""

    def __init__(self, client: Client, clock: Clock, request_id: str, options: ChatOptions) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._options = options
        self._created = clock.wall_ms() // 1000
        self._accepted: Accepted | None = None
        self._before_text = b""
        self._after_text = b""
        self._ended: set[int] = set()
        self._begun_calls: set[tuple[int, int]] = set()

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, accepted: Accepted) -> None:
        """Headers and the chunk with the role, of each choice."""
        self._accepted = accepted
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        self._head = {
            "id": accepted.generation_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": accepted.alias,
            "system_fingerprint": accepted.revision,
        }
        chunk = self._chunk({"content": "~"})
        before, self._after_text = chunk.split(b'"content":"~"', 1)
        self._before_text = before + b'"content":'
        role = {"role": "assistant", "content": ""}
        self.client.write(b"".join([self._chunk(role, index) for index in range(self._options.choices)]))

    def output(self, pieces: Sequence[Delta]) -> None:
        """A chunk for each piece, in one write."""
        encode, before, after = msgspec.json.encode, self._before_text, self._after_text
        if len(pieces) == 1 and type(pieces[0]) is Delta:
            self.client.write(b"%b%b%b" % (before, encode(pieces[0].text), after))
            return
        chunks = [
            self._shaped(piece) if isinstance(piece, ShapedDelta) else b"%b%b%b" % (before, encode(piece.text), after)
            for piece in pieces
        ]
        self.client.write(b"".join(chunks))

    def _shaped(self, piece: ShapedDelta) -> bytes:
        delta: dict[str, Any] = {}
        if piece.text or piece.logprobs:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [self._call_part(piece.choice, part) for part in piece.tool_calls]
        reported = {"content": [logprob_entry(entry) for entry in piece.logprobs], "refusal": None} if piece.logprobs else None
        chunks = self._chunk(delta, piece.choice, logprobs=reported) if delta else b""
        if piece.finish is not None:
            self._ended.add(piece.choice)
            chunks += self._chunk({}, piece.choice, piece.finish)
        return chunks

    def _call_part(self, choice: int, part: ToolCallPart) -> dict[str, Any]:
        """A piece of a call; its first names the function and has an id, whatever the engine sent."""
        function: dict[str, Any] = {"arguments": part.arguments}
        if (choice, part.index) in self._begun_calls:
            return {"index": part.index, "function": function}
        assert self._accepted is not None
        self._begun_calls.add((choice, part.index))
        call_id = part.id or tool_call_id(self._accepted.generation_id, choice, part.index)
        return {"index": part.index, "id": call_id, "type": "function", "function": {"name": part.name or "", **function}}

    def _chunk(
        self, delta: dict[str, Any], index: int = 0, finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return b"data: %b\n\n" % msgspec.json.encode({**self._head, "choices": [choice]})

    def finish_reason(self, record: GenerationRecord) -> None:
        """The chunk with the finish reason, of each choice that has not told it; it does not wait for the settlement."""
        left = [index for index in range(self._options.choices) if index not in self._ended]
        if left:
            self.client.write(b"".join([self._chunk({}, index, record.finish_reason) for index in left]))

    def keep_alive(self) -> None:
        """A comment."""
        self.client.write(b": keep-alive\n\n")

    # ── its end, and whole answers ───────────────────────────────────────────────────────────────────────────────────

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The usage chunk and `[DONE]`, an error event, or the whole body."""
        if self._accepted is None:
            await self._end_whole(record, pieces, standing)
            return
        if record.error_code is not None:
            self.client.write(error_event(record, self._clock.wall_ms()))
        elif self._options.include_usage:
            chunk = {**self._head, "choices": [], "usage": usage_object(record)}
            self.client.write(b"data: %b\n\n" % msgspec.json.encode(chunk))
        self.client.write(b"data: [DONE]\n\n")
        await self.client.finish()

    async def _end_whole(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        body = self._completion(record, pieces) if record.error_code is None else {}
        rendered = whole_answer(record, body, standing, self._clock.wall_ms())
        await self.client.start(rendered.status, rendered.head())
        await self.client.finish(rendered.body)

    def _completion(self, record: GenerationRecord, pieces: Sequence[Delta]) -> dict[str, Any]:
        made = replies(pieces, self._options.choices, record.generation_id)
        return {
            "id": record.generation_id,
            "object": "chat.completion",
            "created": self._created,
            "model": record.alias,
            "system_fingerprint": record.revision,
            "choices": [self._choice(index, reply, record) for index, reply in enumerate(made)],
            "usage": usage_object(record),
        }

    def _choice(self, index: int, reply: Reply, record: GenerationRecord) -> dict[str, Any]:
        content = reply.text if reply.text or not reply.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        logprobs = None
        if self._options.has_logprobs:
            logprobs = {"content": [logprob_entry(entry) for entry in reply.logprobs], "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reply.finish or record.finish_reason,
        }

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """OpenAI's error shape, with the names that fields have here."""
        names = {"input": "messages", "max_output_tokens": self._options.bound_name}
        rendered = refusal(error, self._clock.wall_ms(), names, generation)
        await self.client.start(rendered.status, rendered.head([*id_headers(self._request_id), *limit_headers(standing)]))
        await self.client.finish(rendered.body)
