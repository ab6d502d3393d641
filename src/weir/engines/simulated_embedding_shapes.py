"""What the simulated engine is asked for embeddings over HTTP, and its answers: vLLM's JSON.

Pure text from what is given, as `simulated_shapes` for text.
"""

import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from weir.core.demands import DIMENSIONS_MAX, TEXTS_MAX, Demands, Embedding
from weir.core.output import numbers_of, vectors_of
from weir.core.request import Sampling
from weir.engines.simulated_shapes import Refusal, fault_of
from weir.messages import ReplicaAddress
from weir.ports import Delta, EngineCall, EngineEnd


class EmbeddingBody(msgspec.Struct):
    """The fields that matter here; others are ignored, as vLLM does."""

    input: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=TEXTS_MAX)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None

    def call(self, address: ReplicaAddress) -> EngineCall:
        """What the engine is asked."""
        texts = (self.input,) if isinstance(self.input, str) else tuple(self.input)
        demands = Demands(embedding=Embedding(texts, self.dimensions))
        return EngineCall(address, 0, "", False, 1, Sampling(), demands=demands)


def whole_embeddings(body: EmbeddingBody, model: str, deltas: Sequence[Delta], end: EngineEnd) -> bytes:
    """The answer in vLLM's shape. Raises Refusal when the run failed."""
    if end.usage is None:
        raise _refusal_of(end)
    shown: list[Any] = [
        binascii.b2a_base64(vector, newline=False).decode() if body.encoding_format == "base64" else numbers_of(vector)
        for vector in vectors_of(deltas)
    ]
    data = [{"index": index, "object": "embedding", "embedding": each} for index, each in enumerate(shown)]
    tokens = end.usage.input_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return msgspec.json.encode({"object": "list", "model": model, "data": data, "usage": usage})


def _refusal_of(end: EngineEnd) -> Refusal:
    """vLLM answers 400 for a text that is longer than the window."""
    members = end.fault.members if end.fault is not None else {}
    if "limit" not in members:
        return fault_of(end)
    message = f"This model's maximum context length is {members['limit']} tokens. However, you requested more."
    return Refusal(400, "BadRequestError", message, "input_tokens")
