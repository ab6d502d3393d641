"""Embeddings: texts in, a vector for each out, in OpenAI's shape. Never streamed.

A number leaves as the engine made it: as float32 in base64, or written out as exactly that number. A model is told by its
revision too, because vectors of two revisions are not to be compared.
"""

import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from weir import errors
from weir.api.compatible_fields import LABEL_CHARS_MAX, deadline_of, key_of, model_of, session_of
from weir.api.openai.shapes import refusal, whole_answer
from weir.api.plain_answer import show, show_refusal
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import DIMENSIONS_MAX, TEXTS_MAX, Demands, Embedding
from weir.core.output import Delta, numbers_of, vectors_of
from weir.core.request import InferenceRequest
from weir.errors import WeirError
from weir.gateway.client import Accepted, Client
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock

SURFACE = "embeddings"
FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
FORMATS = ("float", "base64")
_INPUT_ACCEPTED = f"a non-empty string, or a list of 1 to {TEXTS_MAX} of them"
_NEVER_STREAMED = "embeddings are never streamed"


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_embeddings(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[InferenceRequest, str]:
    """A body and Weir's headers as a request and the format of its answer. Raises InvalidRequest or UnsupportedField."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = model_of(fields)
    fields.string("user", longest=LABEL_CHARS_MAX)
    embedding = Embedding(_texts(fields.raw("input")), fields.integer("dimensions", 1, DIMENSIONS_MAX))
    request = InferenceRequest(
        model_alias=model,
        prompt="",
        deadline_ms=deadline_of(headers),
        session=session_of(headers),
        request_id=key_of(headers),
        demands=Demands(embedding=embedding),
        is_plain=True,
    )
    return request, _format(fields.raw("encoding_format"))


def _texts(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not 1 <= len(items) <= TEXTS_MAX:
        refuse_field("input", _INPUT_ACCEPTED)
    if isinstance(items[0], int | list):
        raise errors.UnsupportedField(
            "Tokens are not embedded, texts are.", members={"field": "input", "accepted": _INPUT_ACCEPTED}
        )
    return tuple(_text(item, f"input[{index}]" if items is value else "input") for index, item in enumerate(items))


def _text(item: Any, where: str) -> str:
    accepted = "a non-empty string"
    if not item:
        refuse_field(where, accepted)
    return checked_text(item, where, accepted)


def _format(value: Any) -> str:
    if value is None:
        return FORMATS[0]
    if value not in FORMATS:
        refuse_field("encoding_format", " or ".join(FORMATS))
    return str(value)


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EmbeddingsAnswer:
    """An Answer that is always whole. encoding: one of FORMATS."""

    def __init__(self, client: Client, clock: Clock, request_id: str, encoding: str) -> None:
        self.client = client
        self._clock = clock
        self._request_id = request_id
        self._encoding = encoding

    async def open(self, accepted: Accepted) -> None:
        """Does not happen."""
        raise AssertionError(_NEVER_STREAMED)

    def output(self, pieces: Sequence[Delta]) -> None:
        """Does not happen."""
        raise AssertionError(_NEVER_STREAMED)

    def finish_reason(self, record: GenerationRecord) -> None:
        """Does not happen."""
        raise AssertionError(_NEVER_STREAMED)

    def keep_alive(self) -> None:
        """Does not happen."""
        raise AssertionError(_NEVER_STREAMED)

    async def end(self, record: GenerationRecord, pieces: Sequence[Delta], standing: StandingView) -> None:
        """The vectors, or the error that it ended as."""
        body = self._body(record, vectors_of(pieces)) if record.error_code is None else {}
        rendered = whole_answer(record, body, standing, self._clock.wall_ms())
        await show(self.client, rendered)

    def _body(self, record: GenerationRecord, vectors: Sequence[bytes]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": self._shown(each)} for index, each in enumerate(vectors)]
        return {
            "id": record.generation_id,
            "object": "list",
            "model": record.alias,
            "system_fingerprint": record.revision,
            "data": data,
            "usage": {
                "prompt_tokens": record.input_tokens,
                "total_tokens": record.input_tokens,
                "cost_microusd": record.cost_microusd,
            },
        }

    def _shown(self, vector: bytes) -> str | tuple[float, ...]:
        if self._encoding == "base64":
            return binascii.b2a_base64(vector, newline=False).decode()
        return numbers_of(vector)

    async def refuse(self, error: WeirError, standing: StandingView | None, generation: GenerationRecord | None) -> None:
        """OpenAI's error shape."""
        rendered = refusal(error, self._clock.wall_ms(), {}, generation)
        await show_refusal(self.client, rendered, self._request_id, standing)
