"""The stream of an OpenAI-shaped engine as deltas and one end: the upper half of the relay, shared by all real engines.

It decides what a chunk means and how a run ended; it never decides what is delivered, booked or tried again. All deltas of one
read go to the sink in one call. Text of prompts and outputs never enters a fault's detail: an engine's own message is dropped,
and only its type and its numbers are kept.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any

import msgspec

from weir import errors
from weir.core.endings import FinishReason
from weir.core.output import Delta, ShapedDelta, ToolCallPart
from weir.core.sse import SseDecoder
from weir.engines.http_client import Exchange, HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.engines.openai_fields import demanded, messages_of
from weir.engines.openai_logprobs import ReportedLogprobs, logprobs_of
from weir.ports import EngineCall, EngineEnd, EngineSink, EngineUsage
from weir.units import Millis, Tokens

FIRST_OUTPUT_MS = 60_000  # a long prompt is read in silence, perhaps behind others
IDLE_MS = 30_000  # the bound of silence between outputs
REFUSAL_BYTES_MAX = 64 * 1024
_DONE = b"[DONE]"
_NOT_THE_REQUESTS_FAULT = frozenset({401, 403, 404, 405, 408, 429})
_OF_A_SCHEMA = re.compile(r"\bJSON schema\b|\bgrammar\b", re.IGNORECASE)
_SAFE_WORD = re.compile(r"[A-Za-z_]{1,64}")
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_NO_REASON = ("", "none", "null")  # what some servers write where OpenAI has null
_WEIGHTIEST_LAST = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
"""Of several choices: the reason of the whole is the one that a caller must know of first."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=1_023)]

ConfirmStop = Callable[[bool], Awaitable[None]]
"""Waits until an engine runs nothing for a call whose connection was cut. The argument: whether output had arrived."""


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: _Index = 0
    id: str | None = None
    function: _Function | None = None


class _Text(msgspec.Struct, gc=False):
    """Reasoning comes under either name; a role alone is no output."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: _Count = 0
    delta: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: ReportedLogprobs | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """A count that is absent is unknown, not zero: without both it is no usage."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct, gc=False):
    predicted_n: _Count | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _parts_of(calls: Iterable[_ToolCall]) -> tuple[ToolCallPart, ...]:
    return tuple(
        ToolCallPart(
            call.index,
            call.id,
            call.function.name if call.function else None,
            (call.function.arguments if call.function else None) or "",
        )
        for call in calls
    )


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


class StreamedRun:
    """One generation over one exchange: an EngineRun, and the receiver of its response.

    first_output_ms: bound of silence before its first output, idle_ms: between two; neither counts while paused, and comments
    and roles are silence too. confirm: how the engine confirms that a cut call runs no longer; None where the closed connection
    is the confirmation. choices: how many are asked for. alternatives: to each token that are reported at most; None: as many
    as come.
    """

    def __init__(
        self,
        sink: EngineSink,
        first_output_ms: Millis,
        idle_ms: Millis,
        confirm: ConfirmStop | None = None,
        *,
        choices: int = 1,
        alternatives: int | None = None,
    ) -> None:
        self._sink = sink
        self._confirm = confirm
        self._first_output_s = first_output_ms / 1_000
        self._idle_s = idle_ms / 1_000
        self._decoder = SseDecoder()
        self._status = 0
        self._refusal = b""
        self._reason: FinishReason | None = None
        self._usage: _Usage | None = None
        self._tokens_seen: Tokens | None = None
        self._without_reason = False
        self._choices = choices
        self._alternatives = alternatives
        self._ended: dict[int, FinishReason] = {}
        self._tokens_of: dict[int, Tokens] = {}
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
            done = self._read(self._decoder.feed(data), deltas)
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
                self._fail(_refusal(self._status, self._refusal), runs=False)

    def on_lost(self, fault: errors.EngineFault) -> None:
        """The connection is gone. A reply that is complete with its usage stays complete."""
        self._watch.cancel()
        if not self._over.is_set():
            if self._reason is not None and self._usage is not None and self._all_ended:
                self._finish()
            else:
                self._fail(fault)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, payloads: list[bytes], deltas: list[Delta]) -> bool:
        """Append what the chunks say; True at the end mark. Raises EngineFault where they are no chunks or say so."""
        seen = self._tokens_seen
        for payload in payloads:
            if payload == _DONE:
                return True
            try:
                chunk = _decode_chunk(payload)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise errors.EngineError("The engine sent a chunk that cannot be read.") from None
            if chunk.error is not None:
                raise _fault_of(chunk.error)
            pieces = [self._piece_of(choice) for choice in chunk.choices]
            tokens = self._count_of(chunk)
            grew = tokens is not None and (seen is None or tokens > seen)
            if grew:
                self._tokens_seen = seen = tokens
                if tokens and not pieces:
                    deltas.append(Delta("", tokens))
            for piece in pieces:
                piece.tokens = seen if tokens is not None else None
                if piece.text or piece.extra_bytes or (grew and tokens):
                    deltas.append(piece)
        return False

    def _piece_of(self, choice: _Choice) -> Delta:
        """What a choice brings; its finish reason is noted. Raises EngineError for a reason or an index that is not known."""
        finish = self._finish_of(choice.finish_reason) if choice.finish_reason is not None else None
        if choice.index >= self._choices:
            raise errors.EngineError("The engine sent a choice that was not asked for.")
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        reported = choice.logprobs
        is_shaped = delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls)
        if not is_shaped and reported is None and self._choices == 1:
            return Delta(text)
        ended = None
        if finish is not None and self._choices > 1:
            ended = self._ended[choice.index] = finish
        return ShapedDelta(
            text,
            choice=choice.index,
            reasoning=(delta.reasoning_content or delta.reasoning or "") if delta is not None else "",
            tool_calls=_parts_of(delta.tool_calls or ()) if delta is not None else (),
            logprobs=logprobs_of(reported, self._alternatives) if reported is not None else (),
            finish=ended,
        )

    def _finish_of(self, word: str) -> FinishReason | None:
        reason = _REASONS.get(word)
        if reason is None:
            if word not in _NO_REASON:
                raise errors.EngineError("The engine ended the reply for an unknown finish reason.")
            self._without_reason = True
        else:
            self._reason = reason
        return reason

    def _count_of(self, chunk: _Chunk) -> Tokens | None:
        """The cumulative output count, of all choices, that a chunk tells; its usage is noted.

        Of several choices a chunk of vLLM's tells only the count of its own, and the chunk without a choice that of all.
        """
        usage = chunk.usage
        if usage is not None and usage.prompt_tokens is not None and usage.completion_tokens is not None:
            if self._choices > 1 and chunk.choices:
                for choice in chunk.choices:
                    self._tokens_of[choice.index] = max(self._tokens_of.get(choice.index, 0), usage.completion_tokens)
                return sum(self._tokens_of.values())
            self._usage = usage
            return usage.completion_tokens
        return chunk.timings.predicted_n if chunk.timings is not None else None

    def _finish(self, *, at_mark: bool = False) -> None:
        reason = self._reason
        if reason is None and self._without_reason and at_mark:
            reason = FinishReason.STOP
        if self._choices > 1 and self._ended:
            reason = max(self._ended.values(), key=_WEIGHTIEST_LAST.index)
        if reason is None or not (self._all_ended or (self._without_reason and at_mark)):
            self._fail(errors.EngineError("The engine ended its stream without a finish reason."))
            return
        self._over.set()
        self._exchange.resume()  # the rest of the response has nobody to wait for
        self._sink.on_end(EngineEnd(reason, _usage_of(self._usage), output_tokens_seen=self._tokens_seen))

    @property
    def _all_ended(self) -> bool:
        """Of several choices, whether each told how it ended."""
        return self._choices == 1 or len(self._ended) == self._choices

    def _fail(self, fault: errors.EngineFault, *, runs: bool = True) -> None:
        """End with a fault. runs: the engine may still be generating."""
        if not self._over.is_set():
            self._close(needs_confirmation=runs)
            self._sink.on_end(EngineEnd(None, None, fault, self._tokens_seen))

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


def _usage_of(usage: _Usage | None) -> EngineUsage | None:
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    return EngineUsage(usage.prompt_tokens, min(cached, usage.prompt_tokens), usage.completion_tokens)


def _refusal(status: int, body: bytes) -> errors.EngineFault:
    """An answer that is no stream."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
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
