"""A generation in the shape of chat completions, streamed and not."""

from typing import Any

from weir.api.openai.chunked import ChunkedAnswer
from weir.api.openai.shapes import logprob_entry
from weir.core.output import Reply, ShapedDelta, ToolCallPart, tool_call_id

SURFACE = "chat.completions"


class ChatAnswer(ChunkedAnswer):
    """Answer of chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    input_name = "messages"
    _begun_calls: set[tuple[int, int]]

    def opening(self) -> bytes:
        """The role of each choice."""
        self._begun_calls = set()
        role = {"role": "assistant", "content": ""}
        return b"".join([self._delta_chunk(role, index) for index in range(self.options.choices)])

    def text_chunk(self, text: str, index: int = 0, finish: str | None = None) -> bytes:
        """Content; the end of a choice has none."""
        return self._delta_chunk({"content": text} if finish is None else {}, index, finish)

    def shaped_chunk(self, piece: ShapedDelta) -> bytes:
        """Content with its log probabilities, reasoning, parts of tool calls."""
        delta: dict[str, Any] = {}
        if piece.text or piece.logprobs:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [self._call_part(piece.choice, part) for part in piece.tool_calls]
        return self._delta_chunk(delta, piece.choice, piece=piece) if delta else b""

    def _delta_chunk(
        self, delta: dict[str, Any], index: int, finish: str | None = None, piece: ShapedDelta | None = None
    ) -> bytes:
        logprobs = None
        if piece is not None and piece.logprobs:
            logprobs = {"content": [logprob_entry(entry) for entry in piece.logprobs], "refusal": None}
        return self.chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    def _call_part(self, choice: int, part: ToolCallPart) -> dict[str, Any]:
        """A piece of a call; its first names the function and has an id, whatever the engine sent."""
        function: dict[str, Any] = {"arguments": part.arguments}
        if (choice, part.index) in self._begun_calls:
            return {"index": part.index, "function": function}
        self._begun_calls.add((choice, part.index))
        call_id = part.id or tool_call_id(self.generation_id, choice, part.index)
        return {"index": part.index, "id": call_id, "type": "function", "function": {"name": part.name or "", **function}}

    def whole_choice(self, index: int, reply: Reply, finish: str | None) -> dict[str, Any]:
        """The assistant's message."""
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
        if self.options.has_logprobs:
            logprobs = {"content": [logprob_entry(entry) for entry in reply.logprobs], "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
