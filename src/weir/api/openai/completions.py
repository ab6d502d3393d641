"""A generation in the shape of plain completions, streamed and not."""

from collections.abc import Sequence
from typing import Any

from weir.api.openai.chunked import ChunkedAnswer
from weir.core.output import Reply, ShapedDelta, TokenLogprob

SURFACE = "completions"


class CompletionAnswer(ChunkedAnswer):
    """Answer of completions, which have no shape for reasoning and tool calls: what an engine tells of them is not shown."""

    whole_object = chunk_object = "text_completion"
    input_name = "prompt"
    _reported_chars: dict[int, int]

    def opening(self) -> bytes:
        """Nothing: the headers say that it was accepted."""
        self._reported_chars = {}
        return b""

    def text_chunk(self, text: str, index: int = 0, finish: str | None = None) -> bytes:
        """Text, or the end of a choice."""
        return self._choice_chunk(text, index, finish, None)

    def shaped_chunk(self, piece: ShapedDelta) -> bytes:
        """Text of a choice with its log probabilities."""
        if not piece.text and not piece.logprobs:
            return b""
        columns = None
        if piece.logprobs:
            offset = self._reported_chars.get(piece.choice, 0)
            columns, self._reported_chars[piece.choice] = logprob_columns(piece.logprobs, offset)
        return self._choice_chunk(piece.text, piece.choice, None, columns)

    def _choice_chunk(self, text: str, index: int, finish: str | None, logprobs: dict[str, Any] | None) -> bytes:
        return self.chunk([{"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}])

    def whole_choice(self, index: int, reply: Reply, finish: str | None) -> dict[str, Any]:
        """The text."""
        logprobs = logprob_columns(reply.logprobs, 0)[0] if self.options.has_logprobs else None
        return {"text": reply.text, "index": index, "logprobs": logprobs, "finish_reason": finish}


def logprob_columns(entries: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """Log probabilities as columns, and the offset behind them. offset: of the first token, in characters of the output."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    columns = {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{other.token: other.logprob for other in entry.top} for entry in entries],
        "text_offset": offsets,
    }
    return columns, offset
