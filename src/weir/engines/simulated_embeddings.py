"""Embeddings of the simulated engine: vectors that a text determines, made in the time that a prompt of that length takes.

A vector has unit length and says nothing about meaning: equal texts have equal vectors, all others have unlike ones. As many
dimensions as are asked for are the first of a longer vector, brought to unit length again, as models are that allow it.
"""

import hashlib
from math import sqrt

from weir.core.demands import Embedding
from weir.core.output import Vectors, vector_of
from weir.core.request import Message
from weir.engines.simulated_run import SimulatedRun
from weir.engines.simulated_text import ReplyBounds, count_prompt_tokens, script
from weir.ports import Delta, EngineSink, EngineUsage
from weir.units import Millis, Tokens

DIMENSIONS = 64
_DIGEST_BYTES = 64
_ONE_STEP = ReplyBounds(1, 1)


def embedding_of(text: str, dimensions: int | None) -> bytes:
    """The vector of a text, of DIMENSIONS where none are asked for."""
    size = dimensions or DIMENSIONS
    state = hashlib.blake2b(text.encode()).digest()
    drawn = bytearray()
    while len(drawn) < size:  # bounded: each turn adds a digest
        drawn += hashlib.blake2b(state + len(drawn).to_bytes(4, "big"), digest_size=_DIGEST_BYTES).digest()
    numbers = [byte - 127.5 for byte in drawn[:size]]  # none is 0, so that every vector has a length
    length = sqrt(sum(number * number for number in numbers))
    return vector_of([number / length for number in numbers])


def text_tokens(embedding: Embedding) -> list[Tokens]:
    """Input tokens of each text."""
    return [count_prompt_tokens(text, chat=False) for text in embedding.texts]


def as_turns(embedding: Embedding) -> tuple[Message, ...]:
    """The texts as what faults look for their markers in."""
    return tuple(Message("user", text) for text in embedding.texts)


class SimulatedEmbeddingRun(SimulatedRun):
    """A run whose only token of output stands for all vectors, and is not counted."""

    def __init__(self, sink: EngineSink, embedding: Embedding, stop_ms: Millis) -> None:
        super().__init__(sink, script("", 0, _ONE_STEP), sum(text_tokens(embedding)), stop_ms)
        self._embedding = embedding

    def piece_of(self, tokens: Tokens) -> Delta:
        """The vectors."""
        made = tuple(embedding_of(text, self._embedding.dimensions) for text in self._embedding.texts)
        return Vectors("", vectors=made)

    def usage(self) -> EngineUsage:
        """Input alone."""
        return EngineUsage(self.input_tokens, 0, 0)
