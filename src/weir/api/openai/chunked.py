"""What chat completions and completions have in common: a stream of chunks of one shape, `[DONE]`, and one whole body.

Endings that are failures take OpenAI's error shape: before the headers as a plain answer, after them as one error event
followed by `[DONE]`, which the official SDK reads. Chunks that are plain text of the only choice are spliced from bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from weir.api.generations import STREAM_HEADERS
from weir.api.openai.shapes import error_event, refusal, usage_object, whole_answer
from weir.api.plain_answer import show, show_refusal
from weir.api.wire import id_headers, limit_headers
from weir.core.output import Delta, Reply, ShapedDelta, replies
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

_MARK = b'"~"'


class ChunkOptions(msgspec.Struct, frozen=True):
    """What only the answer needs. include_usage: the stream ends with a usage chunk. bound_name: of the output's bound."""

    include_usage: bool = False
    bound_name: str = "max_tokens"
    choices: int = 1
    has_logprobs: bool = False


class ChunkedAnswer(ABC):
    """An Answer of either surface; what a chunk and a whole choice look like is the surface's."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    input_name: ClassVar[str]

    def __init__(self, client: Client, clock: Clock, request_id: str, options: ChunkOptions) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self.options = options
        self._created = clock.wall_ms() // 1000
        self._is_open = False
        self._head: dict[str, Any] = {}
        self._before_text = b""
        self._after_text = b""
        self._ended: set[int] = set()

    # ── what a surface decides ───────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def opening(self) -> bytes:
        """What the stream begins with."""

    @abstractmethod
    def text_chunk(self, text: str, index: int = 0, finish: str | None = None) -> bytes:
        """A chunk of text, or of a choice's end."""

    @abstractmethod
    def shaped_chunk(self, piece: ShapedDelta) -> bytes:
        """A chunk of a piece that is more than text; nothing where there is nothing to tell."""

    @abstractmethod
    def whole_choice(self, index: int, reply: Reply, finish: str | None) -> dict[str, Any]:
        """A choice of the whole body."""

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, accepted: Accepted) -> None:
        """Headers and what the stream begins with."""
        self._is_open = True
        headers = [*STREAM_HEADERS, *id_headers(accepted.request_id), *limit_headers(accepted.standing)]
        await self.client.start(200, headers)
        self.generation_id = accepted.generation_id
        self._head = self._head_of(self.chunk_object, accepted.generation_id, accepted.alias, accepted.revision)
        self._before_text, self._after_text = self.text_chunk("~").split(_MARK, 1)
        if opening := self.opening():
            self.client.write(opening)

    def _head_of(self, kind: str, generation_id: str, alias: str, revision: str) -> dict[str, Any]:
        return {
            "id": generation_id,
            "object": kind,
            "created": self._created,
            "model": alias,
            "system_fingerprint": revision,
        }

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        """An event with these choices."""
        return b"data: %b\n\n" % msgspec.json.encode({**self._head, "choices": choices, **more})

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
        if told := b"".join(chunks):
            self.client.write(told)

    def _shaped(self, piece: ShapedDelta) -> bytes:
        if piece.finish is None:
            return self.shaped_chunk(piece)
        self._ended.add(piece.choice)
        return self.shaped_chunk(piece) + self.text_chunk("", piece.choice, piece.finish)

    def finish_reason(self, record: GenerationRecord) -> None:
        """The chunk with the finish reason, of each choice that has not told it; it does not wait for the settlement."""
        left = [index for index in range(self.options.choices) if index not in self._ended]
        if left:
            self.client.write(b"".join([self.text_chunk("", index, record.finish_reason) for index in left]))

    def keep_alive(self) -> None:
        """A comment."""
        self.client.write(b": keep-alive\n\n")

    # ── its end, and whole answers ───────────────────────────────────────────────────────────────────────────────────

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The usage chunk and `[DONE]`, an error event, or the whole body."""
        if not self._is_open:
            body = self._whole(record, pieces) if record.error_code is None else {}
            rendered = whole_answer(record, body, standing, self._clock.wall_ms())
            await show(self.client, rendered)
            return
        if record.error_code is not None:
            self.client.write(error_event(record, self._clock.wall_ms()))
        elif self.options.include_usage:
            self.client.write(self.chunk([], usage=usage_object(record)))
        self.client.write(b"data: [DONE]\n\n")
        await self.client.finish()

    def _whole(self, record: GenerationRecord, pieces: Sequence[Delta]) -> dict[str, Any]:
        made = replies(pieces, self.options.choices, record.generation_id)
        return {
            **self._head_of(self.whole_object, record.generation_id, record.alias, record.revision),
            "choices": [
                self.whole_choice(index, reply, reply.finish or record.finish_reason) for index, reply in enumerate(made)
            ],
            "usage": usage_object(record),
        }

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """OpenAI's error shape, with the names that fields have here."""
        names = {"input": self.input_name, "max_output_tokens": self.options.bound_name}
        rendered = refusal(error, self._clock.wall_ms(), names, generation)
        await show_refusal(self.client, rendered, self._request_id, standing)
