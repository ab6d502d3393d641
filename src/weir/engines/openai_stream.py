"""The stream of an OpenAI-shaped engine as deltas and one end: the upper half of the relay, shared by all real engines.

It decides what a chunk means and how a run ended; it never decides what is delivered, booked or tried again. All deltas of one
read go to the sink in one call. Text of prompts and outputs never enters a fault's detail: an engine's own message is dropped,
and only its type and its numbers are kept.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from weir import errors
from weir.core.output import Delta
from weir.core.sse import SseDecoder
from weir.engines.http_client import Exchange, HttpClient
from weir.engines.http_exchange import UNREADABLE, HttpRequest
from weir.engines.openai_chunks import ChunkReader
from weir.engines.openai_fields import demanded, messages_of
from weir.ports import EngineCall, EngineEnd, EngineSink
from weir.units import Millis

FIRST_OUTPUT_MS = 60_000  # a long prompt is read in silence, perhaps behind others
IDLE_MS = 30_000  # the bound of silence between outputs
REFUSAL_BYTES_MAX = 64 * 1024
_NOT_THE_REQUESTS_FAULT = frozenset({401, 403, 404, 405, 408, 429})
_OF_A_SCHEMA = re.compile(r"\bJSON schema\b|\bgrammar\b", re.IGNORECASE)
_SAFE_WORD = re.compile(r"[A-Za-z_]{1,64}")
ConfirmStop = Callable[[bool], Awaitable[None]]
"""Waits until an engine runs nothing for a call whose connection was cut. The argument: whether output had arrived."""


def generation_request(call: EngineCall, extra: dict[str, Any]) -> HttpRequest:
    """A call as a streamed chat or plain completion. extra: the engine's own fields; of the caller nothing else is sent."""
    sampling = call.sampling
    body: dict[str, Any] = {
        "model": call.replica.model,
        **({"messages": messages_of(call.prompt)} if call.chat else {"prompt": call.prompt}),
        "max_tokens": call.max_output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": sampling.stop or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **demanded(call.demands, chat=call.chat),
        **extra,
    }
    encoded = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
    path = "/v1/chat/completions" if call.chat else "/v1/completions"
    return HttpRequest("POST", call.replica.url, path, encoded, call.replica.api_key)


def reader_of(call: EngineCall, alternatives: int | None = None) -> ChunkReader:
    """What reads the chunks of a call. alternatives: as `ChunkReader` says."""
    each = call.replica.continuous_usage
    return ChunkReader(call.demands.choices, alternatives, _fault_of, counts_each_choice=each)


class StreamedRun:
    """One generation over one exchange: an EngineRun, and the receiver of its response.

    first_output_ms: bound of silence before its first output, idle_ms: between two; neither counts while paused, and comments
    and roles are silence too. chunks: reads what the engine says. confirm: how the engine confirms that a cut call runs no
    longer; None where the closed connection is the confirmation.
    """

    def __init__(
        self,
        sink: EngineSink,
        first_output_ms: Millis,
        idle_ms: Millis,
        chunks: ChunkReader,
        confirm: ConfirmStop | None = None,
    ) -> None:
        self._sink = sink
        self._confirm = confirm
        self._first_output_s = first_output_ms / 1_000
        self._idle_s = idle_ms / 1_000
        self._decoder = SseDecoder()
        self._status = 0
        self._refusal = b""
        self._chunks = chunks
        self._had_output = False
        self._paused = False
        self._needs_confirmation = False
        self._over = asyncio.Event()

    def begin(self, client: HttpClient, request: HttpRequest) -> "StreamedRun":
        """Send the request; itself. Never raises."""
        self._loop = client.loop
        self._heard_at = self._loop.time()
        self._watch = self._loop.call_later(self._first_output_s, self._check_silence)
        self._exchange: Exchange = client.open(request, self)
        return self

    # ── EngineRun ────────────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self) -> None:
        """Stop reading from the engine; idempotent."""
        self._paused = True
        self._exchange.pause()

    def resume(self) -> None:
        """Read again; idempotent. The bound of silence starts anew."""
        self._paused = False
        self._heard_at = self._loop.time()
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
            await self._confirm(self._had_output)

    # ── ResponseReceiver ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The answer began."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """Bytes of the stream, or of a refusal."""
        if self._over.is_set():
            return
        if self._status != 200:
            self._refusal = (self._refusal + data)[:REFUSAL_BYTES_MAX]
            return
        deltas: list[Delta] = []
        fault: errors.EngineFault | None = None
        done = False
        try:
            done = self._chunks.read(self._decoder.feed(data), deltas)
        except errors.EngineFault as error:
            fault = error
        if deltas:
            self._hear()
            self._sink.on_deltas(deltas)
        if self._over.is_set():  # the sink may have cancelled
            return
        if fault is not None:
            self._fail(fault)
        elif done:
            self._finish(at_mark=True)

    def on_complete(self) -> None:
        """The response ended by the engine's will."""
        self._watch.cancel()
        if not self._over.is_set():
            if self._status == 200:
                self._finish()
            else:
                self._fail(refusal_of(self._status, self._refusal), runs=False)

    def on_lost(self, fault: errors.EngineFault) -> None:
        """The connection is gone. A reply that is complete with its usage stays complete."""
        self._watch.cancel()
        if not self._over.is_set():
            if self._chunks.reason() is not None and self._chunks.usage is not None:
                self._finish()
            else:
                self._fail(fault)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, *, at_mark: bool = False) -> None:
        reason = self._chunks.reason(at_mark=at_mark)
        if reason is None:
            self._fail(errors.EngineError("The engine ended its stream without a finish reason."))
            return
        self._over.set()
        self._exchange.resume()  # the rest of the response has nobody to wait for
        self._sink.on_end(EngineEnd(reason, self._chunks.usage, output_tokens_seen=self._chunks.tokens))

    def _fail(self, fault: errors.EngineFault, *, runs: bool = True) -> None:
        """End with a fault. runs: the engine may still be generating."""
        if not self._over.is_set():
            self._close(needs_confirmation=runs)
            self._sink.on_end(EngineEnd(None, None, fault, self._chunks.tokens))

    def _close(self, *, needs_confirmation: bool) -> None:
        self._needs_confirmation = needs_confirmation
        self._over.set()
        self._watch.cancel()
        self._exchange.close()

    def _hear(self) -> None:
        """Output came."""
        self._heard_at = self._loop.time()
        if not self._had_output:
            self._had_output = True
            self._watch.cancel()
            self._watch = self._loop.call_later(self._idle_s, self._check_silence)

    def _check_silence(self) -> None:
        """Runs once per bound, not per chunk. After the end mark it cuts a response that never ends."""
        bound_s = self._idle_s if self._had_output else self._first_output_s
        now = self._loop.time()
        heard_at = now if self._paused else self._heard_at
        if now - heard_at < bound_s:
            self._watch = self._loop.call_at(heard_at + bound_s, self._check_silence)
        elif self._over.is_set():
            self._exchange.close()
        else:
            self._fail(errors.Stalled("The engine sent no output within the bound."))


class RefusedRun:
    """An EngineRun of a call that no engine was sent: its end is told on the running loop, later."""

    def __init__(self, sink: EngineSink, fault: errors.EngineFault) -> None:
        self._told = asyncio.get_running_loop().call_soon(sink.on_end, EngineEnd(None, None, fault))

    def pause(self) -> None:
        """There is nothing to read."""

    def resume(self) -> None:
        """There is nothing to read."""

    def cancel(self) -> None:
        """No sink call follows."""
        self._told.cancel()

    async def stopped(self) -> None:
        """Returns at once: nothing runs."""


def refusal_of(status: int, body: bytes) -> errors.EngineFault:
    """An answer that is not what was asked for, as the fault that it is."""
    try:
        content = msgspec.json.decode(body)
    except UNREADABLE:
        content = None
    error = content.get("error", content) if isinstance(content, dict) else None
    if 400 <= status < 500 and status not in _NOT_THE_REQUESTS_FAULT:
        return _rejected(status, error)
    return errors.EngineError(f"The engine answered {status}{_kind_of(error)}.")


def _fault_of(error: Any) -> errors.EngineFault:
    """An error object in mid-stream."""
    if isinstance(error, dict) and error.get("type") == "exceed_context_size_error":
        return _rejected(400, error)
    return errors.EngineError(f"The engine reported an error{_kind_of(error)}.")


def _rejected(status: int, error: Any) -> errors.EngineRejected:
    fields = error if isinstance(error, dict) else {}
    numbers = {name: fields[name] for name in ("n_prompt_tokens", "n_ctx") if type(fields.get(name)) is int}
    if len(numbers) == 2:
        detail = f"The input is {numbers['n_prompt_tokens']} tokens; the engine's context window is {numbers['n_ctx']} tokens."
        return errors.EngineRejected(detail, members=numbers)
    message = fields.get("message")
    told = "; it cannot enforce a JSON schema" if isinstance(message, str) and _OF_A_SCHEMA.search(message) else ""
    return errors.EngineRejected(f"The engine refused the request: {status}{_kind_of(error)}{told}.")


def _kind_of(error: Any) -> str:
    """The error's type in brackets, where it is a plain word."""
    kind = error.get("type") if isinstance(error, dict) else None
    return f" ({kind})" if isinstance(kind, str) and _SAFE_WORD.fullmatch(kind) else ""
