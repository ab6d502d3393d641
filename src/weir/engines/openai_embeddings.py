"""Embeddings of an OpenAI-shaped engine: one request, one answer with a vector for each text, shared by all real engines.

It decides what such an answer means and how the call ended. What is wrong in an answer, be it a vector too many, an index twice
or a number that is none, is the engine's fault: nobody could tell from the vectors. Texts never enter a fault's detail.
"""

import asyncio
import binascii
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Annotated, Any

import msgspec

from weir import errors
from weir.core.demands import Embedding
from weir.core.endings import FinishReason
from weir.core.output import NUMBER_BYTES, VECTOR_BYTES_MAX, Vectors, numbers_of, vector_of
from weir.engines.http_client import Exchange, HttpClient
from weir.engines.http_exchange import UNREADABLE, HttpRequest
from weir.engines.openai_stream import REFUSAL_BYTES_MAX, ConfirmStop, refusal_of
from weir.ports import EngineCall, EngineEnd, EngineSink, EngineUsage
from weir.units import Bytes, Millis

ANSWER_BYTES: Bytes = 64 * 1024
ANSWER_BYTES_PER_VECTOR: Bytes = 6 * VECTOR_BYTES_MAX
"""A server that knows no base64 writes a number in up to 24 characters."""

_UNREADABLE = "The engine's embeddings cannot be read."

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Item(msgspec.Struct):
    index: _Count
    embedding: str | list[float]


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None


class _Answer(msgspec.Struct):
    data: list[_Item]
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def embedding_request(call: EngineCall, embedding: Embedding, extra: dict[str, Any]) -> HttpRequest:
    """A call for vectors. extra: the engine's own fields; of the caller nothing but texts and dimensions is sent.

    base64 is a third of the bytes of written numbers, and exact.
    """
    body: dict[str, Any] = {
        "model": call.replica.model,
        "input": embedding.texts,
        "encoding_format": "base64",
        "dimensions": embedding.dimensions,
        **extra,
    }
    encoded = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
    return HttpRequest("POST", call.replica.url, "/v1/embeddings", encoded, call.replica.api_key)


class EmbeddingRun:
    """One call for vectors: an EngineRun and a ResponseReceiver. All its output comes in one piece, with its end.

    bound_ms: from the request to the whole answer, after which it ends as Stalled: engines say nothing before. confirm: waits
    until it runs nothing for a call whose connection was cut, None where that is enough. refused: reads what is no answer.
    """

    def __init__(
        self,
        sink: EngineSink,
        embedding: Embedding,
        bound_ms: Millis,
        confirm: ConfirmStop | None = None,
        refused: Callable[[int, bytes], errors.EngineFault] = refusal_of,
    ) -> None:
        self._sink = sink
        self._embedding = embedding
        self._bound_s = bound_ms / 1_000
        self._confirm = confirm
        self._refused = refused
        self._status = 0
        self._body = bytearray()
        self._needs_confirmation = False
        self._over = asyncio.Event()

    def begin(self, client: HttpClient, request: HttpRequest) -> "EmbeddingRun":
        """Send the request; itself. Never raises."""
        self._watch = client.loop.call_later(self._bound_s, self._give_up)
        self._exchange: Exchange = client.open(request, self)
        return self

    # ── EngineRun ────────────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self) -> None:
        """Stop reading from the engine; idempotent."""
        self._exchange.pause()

    def resume(self) -> None:
        """Read again; idempotent."""
        self._exchange.resume()

    def cancel(self) -> None:
        """Cut the connection; idempotent, also after the end. No sink call follows."""
        if not self._over.is_set():
            self._close(needs_confirmation=True)

    async def stopped(self) -> None:
        """Returns once the engine runs nothing for this call. Raises ReplicaLost when the engine cannot confirm that."""
        await self._over.wait()
        if not self._needs_confirmation:
            return
        await self._exchange.wait_closed()
        if self._confirm is not None and self._exchange.sent:
            await self._confirm(False)

    # ── ResponseReceiver ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The answer began."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """Bytes of the answer, or of a refusal."""
        if self._over.is_set():
            return
        self._body += data
        if self._status != 200:
            del self._body[REFUSAL_BYTES_MAX:]
        elif len(self._body) > ANSWER_BYTES + ANSWER_BYTES_PER_VECTOR * len(self._embedding.texts):
            self._fail(errors.EngineError("The engine sent more than the vectors that were asked for can take."))

    def on_complete(self) -> None:
        """The whole answer is there."""
        if self._over.is_set():
            return
        body, self._body = bytes(self._body), bytearray()
        if self._status != 200:
            self._fail(self._refused(self._status, body), runs=False)
            return
        try:
            vectors, usage = _read(body, self._embedding)
        except errors.EngineFault as fault:
            self._fail(fault, runs=False)
            return
        self._watch.cancel()
        self._sink.on_deltas((Vectors("", vectors=vectors),))
        if not self._over.is_set():  # the sink may have cancelled
            self._over.set()
            self._sink.on_end(EngineEnd(FinishReason.STOP, usage))

    def on_lost(self, fault: errors.EngineFault) -> None:
        """The connection is gone, and with it what would have come."""
        self._fail(fault)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _give_up(self) -> None:
        self._fail(errors.Stalled("The engine sent no embeddings within the bound."))

    def _fail(self, fault: errors.EngineFault, *, runs: bool = True) -> None:
        """End with a fault. runs: the engine may still be at it."""
        if not self._over.is_set():
            self._close(needs_confirmation=runs)
            self._sink.on_end(EngineEnd(None, None, fault))

    def _close(self, *, needs_confirmation: bool) -> None:
        self._needs_confirmation = needs_confirmation
        self._over.set()
        self._watch.cancel()
        self._exchange.close()


def _read(body: bytes, embedding: Embedding) -> tuple[tuple[bytes, ...], EngineUsage | None]:
    """The vectors in the order of their texts, and the usage where the answer has one. Raises EngineFault."""
    try:
        answer = _decode_answer(body)
    except UNREADABLE:
        raise errors.EngineError(_UNREADABLE) from None
    vectors = _in_order(answer.data, len(embedding.texts))
    _check_size(vectors, embedding.dimensions)
    tokens = answer.usage.prompt_tokens if answer.usage is not None else None
    return vectors, EngineUsage(tokens, 0, 0) if tokens is not None else None


def _in_order(items: Sequence[_Item], texts: int) -> tuple[bytes, ...]:
    """One vector for each text, whatever the order they came in. Raises EngineError."""
    if len(items) != texts:
        raise errors.EngineError(f"The engine sent {len(items)} vectors for {texts} texts.")
    placed = sorted(items, key=lambda item: item.index)
    if any(item.index != place for place, item in enumerate(placed)):
        raise errors.EngineError("The engine's vectors do not say which text each belongs to.")
    return tuple(_vector_of(item.embedding) for item in placed)


def _vector_of(embedding: str | list[float]) -> bytes:
    """A vector of finite numbers. Raises EngineError."""
    try:
        vector = binascii.a2b_base64(embedding, strict_mode=True) if isinstance(embedding, str) else vector_of(embedding)
    except (ValueError, OverflowError):
        raise errors.EngineError(_UNREADABLE) from None
    if not vector or len(vector) % NUMBER_BYTES or len(vector) > VECTOR_BYTES_MAX:
        raise errors.EngineError(_UNREADABLE)
    if not isfinite(sum(numbers_of(vector))):  # the sum of finite ones always is: they are float32, added as doubles
        raise errors.EngineError("The engine sent a vector with a number that is not finite.")
    return vector


def _check_size(vectors: Sequence[bytes], dimensions: int | None) -> None:
    """Raises EngineError for vectors of several sizes, EngineRejected for another size than was asked for.

    Many servers do not know `dimensions` and ignore it; their vectors would pass for what they are not.
    """
    sizes = {len(vector) // NUMBER_BYTES for vector in vectors}
    if len(sizes) > 1:
        raise errors.EngineError("The engine sent vectors of several sizes.")
    if dimensions is not None and sizes != {dimensions}:
        raise errors.EngineRejected(f"The engine makes vectors of {sizes.pop()} dimensions, not of {dimensions}.")
