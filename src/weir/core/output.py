"""What an engine's output is made of, piece by piece, before any surface gives it a shape.

Nearly all pieces are text of the only choice: a `Delta`. What else there is comes as a `ShapedDelta`: another choice,
reasoning, parts of a tool call, log probabilities, the end of one of several choices. `replies` puts a whole answer together.
Where embeddings were asked for, the only piece is `Vectors`.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from weir.core.demands import DIMENSIONS_MAX, ToolCall
from weir.core.endings import FinishReason
from weir.units import Bytes, Tokens

_LOGPROB_BYTES: Bytes = 256
"""What one reported probability occupies here, about, apart from its token."""

NUMBER_BYTES: Bytes = 4
VECTOR_BYTES_MAX: Bytes = NUMBER_BYTES * DIMENSIONS_MAX


@dataclass(slots=True)
class Delta:
    """A piece of output. text: may be empty. tokens: the engine's cumulative output count, None where chunks carry none."""

    text: str
    tokens: Tokens | None = None

    extra_bytes: ClassVar[Bytes] = 0


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of a choice's index-th tool call. id and name come with its first piece; arguments: a piece of JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log probability. token_bytes: its UTF-8 bytes where the engine tells. top: the likeliest ones."""

    token: str
    logprob: float
    token_bytes: tuple[int, ...] | None = None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(slots=True)
class ShapedDelta(Delta):
    """A piece that is more than text of the only choice. finish: the choice ended so."""

    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None

    @property
    def generated_bytes(self) -> Bytes:
        """UTF-8 bytes that the model made beside the text."""
        made = len(self.reasoning.encode())
        return made + sum(len(part.arguments.encode()) + len((part.name or "").encode()) for part in self.tool_calls)

    @property
    def extra_bytes(self) -> Bytes:  # type: ignore[override]
        """What it occupies beside its text; above 0 for what must reach the client even without text."""
        named = sum(1 + len(part.id or "") for part in self.tool_calls)
        reported = sum(_size_of(entry) for entry in self.logprobs)
        return (self.finish is not None) + named + self.generated_bytes + reported


def _size_of(entry: TokenLogprob) -> Bytes:
    return sum(_LOGPROB_BYTES + len(other.token) + 8 * len(other.token_bytes or ()) for other in (entry, *entry.top))


_WEIGHTIEST_LAST = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH, FinishReason.CONTENT_FILTER)


def end_of_all(ends: Iterable[FinishReason]) -> FinishReason:
    """How a reply of several choices ended: the reason that a caller must know of first; a stop where none is told."""
    return max(ends, key=_WEIGHTIEST_LAST.index, default=FinishReason.STOP)


@dataclass(slots=True)
class Vectors(Delta):
    """All embeddings of an answer, in the order of their texts, each as little-endian float32."""

    vectors: tuple[bytes, ...] = ()

    @property
    def extra_bytes(self) -> Bytes:  # type: ignore[override]
        """What it occupies."""
        return sum(len(vector) for vector in self.vectors)


def vector_of(numbers: Sequence[float]) -> bytes:
    """Numbers as little-endian float32. Raises OverflowError for one that is too large."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector, exactly."""
    return struct.unpack(f"<{len(vector) // NUMBER_BYTES}f", vector)


def vectors_of(pieces: Sequence[Delta]) -> tuple[bytes, ...]:
    """The embeddings of a whole answer."""
    return tuple(vector for piece in pieces if isinstance(piece, Vectors) for vector in piece.vectors)


def text_of(pieces: Sequence[Delta]) -> str:
    """The text of the first choice."""
    return "".join(piece.text for piece in pieces if not isinstance(piece, ShapedDelta) or piece.choice == 0)


@dataclass(slots=True)
class Reply:
    """One choice of a whole answer. finish: where the engine told it of each choice."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


def replies(pieces: Sequence[Delta], choices: int, generation_id: str) -> list[Reply]:
    """The choices of a whole answer, each put together from its pieces. generation_id: names calls that the engine did not."""
    made = [Reply() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in made]
    calls: list[dict[int, list[ToolCallPart]]] = [{} for _ in made]
    for piece in pieces:
        if not isinstance(piece, ShapedDelta):
            texts[0].append(piece.text)
            continue
        reply = made[piece.choice]
        texts[piece.choice].append(piece.text)
        reply.reasoning += piece.reasoning
        reply.logprobs += piece.logprobs
        reply.finish = piece.finish or reply.finish
        for part in piece.tool_calls:
            calls[piece.choice].setdefault(part.index, []).append(part)
    for choice, reply in enumerate(made):
        reply.text = "".join(texts[choice])
        reply.tool_calls = [_call_of(calls[choice][index], generation_id, choice) for index in sorted(calls[choice])]
    return made


def _call_of(parts: list[ToolCallPart], generation_id: str, choice: int) -> ToolCall:
    given = next((part.id for part in parts if part.id), None)
    name = next((part.name for part in parts if part.name), "")
    arguments = "".join(part.arguments for part in parts)
    return ToolCall(given or tool_call_id(generation_id, choice, parts[0].index), name, arguments)


def tool_call_id(generation_id: str, choice: int, index: int) -> str:
    """The id of a tool call that the engine gave none."""
    return f"call-{generation_id.rpartition('-')[2]}-{choice}-{index}"
