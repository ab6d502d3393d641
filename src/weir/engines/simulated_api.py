"""The simulated engine's HTTP face: answers in vLLM's shapes, as a raw ASGI application.

It decides what a request means and what an answer looks like; the batch behind it decides when. A client that leaves, in any
phase and streaming or not, frees its sequence at the next step. Headers of a stream go out at once. Never logs a body.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weir import __version__
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.engines.simulated_text import count_prompt_tokens, invented_token_ids
from weir.messages import ReplicaAddress
from weir.ports import Clock, Delta, EngineCall, EngineEnd, EngineRun, EngineUsage
from weir.units import Tokens

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_BYTES_MAX = 32 * 1024 * 1024
COMPLETION_TOKENS_DEFAULT = 16  # what the completions API takes when max_tokens is absent
_REPLICA = "simulated"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_TEXT = (b"content-type", b"text/plain; charset=utf-8")


class ServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a simulated server is; the first line on its standard input. port 0: any free one."""

    model: str = "demo"
    context_tokens: Tokens = 8_192
    concurrency: int = 256
    row: str = "demo"
    preset: str = "nominal"
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None


class _Turn(msgspec.Struct):
    role: str
    content: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    """The fields that matter here, of all POST endpoints; others are ignored, as vLLM does."""

    model: str | None = None
    prompt: str | None = None
    messages: list[_Turn] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None

    def text(self) -> str | tuple[Message, ...]:
        """Prompt or conversation. Raises _Refusal when there is none."""
        if self.messages:
            return tuple(Message(turn.role, turn.content) for turn in self.messages)
        if self.prompt is None:
            raise _Refusal(400, "BadRequestError", "a prompt or messages are required")
        return self.prompt


class _Refusal(Exception):
    """An answer in OpenAI's error shape instead of the one asked for."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _ClientLeft(Exception):
    """The client closed its connection before its answer was written."""


class _Inbox:
    """A run's sink that a coroutine reads from; holds at most one reply."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._end: EngineEnd | None = None
        self._left = False
        self._news = asyncio.Event()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        self._deltas.extend(deltas)
        self._news.set()

    def on_end(self, end: EngineEnd) -> None:
        self._end = end
        self._news.set()

    def leave(self) -> None:
        """The client is gone: whoever reads gets _ClientLeft."""
        self._left = True
        self._news.set()

    async def take(self) -> tuple[list[Delta], EngineEnd | None]:
        """All output since the last call, and the end once it came. Raises _ClientLeft."""
        await self._news.wait()
        self._news.clear()
        if self._left:
            raise _ClientLeft
        deltas, self._deltas = self._deltas, []
        return deltas, self._end


class _Shape:
    """How one generation is written: chat or plain completion."""

    def __init__(self, serial: int, body: _Body, created_s: int, chat: bool, input_tokens: Tokens) -> None:
        options = body.stream_options or _StreamOptions()
        self.chat = chat
        self.streamed = bool(body.stream)
        self.input_tokens = input_tokens
        self._include_usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{serial}",
            "object": f"{kind}.chunk" if chat and self.streamed else kind,
            "created": created_s,
            "model": body.model,
        }

    def opening(self) -> bytes:
        """What comes before the first token: chat's role chunk."""
        return self._event([self._choice(delta={"role": "assistant", "content": ""})], 0) if self.chat else b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """One event per token."""
        return b"".join(self._event([self._piece(delta.text, None)], delta.tokens or 0) for delta in deltas)

    def closing(self, end: EngineEnd) -> bytes:
        """The finish chunk, the usage chunk if asked for, and the end mark; or the error event."""
        if end.usage is None or end.reason is None:
            return _event({"error": _fault(end).body["error"]}) + b"data: [DONE]\n\n"
        reason = end.reason.value
        last = self._choice(delta={}, reason=reason) if self.chat else self._piece("", reason)
        text = self._event([last], end.usage.output_tokens)
        if self._include_usage:
            text += _event({**self._head, "choices": [], "usage": _usage(end.usage)})
        return text + b"data: [DONE]\n\n"

    def whole(self, text: str, end: EngineEnd) -> bytes:
        """The answer that is not streamed. Raises _Refusal when the run failed."""
        if end.usage is None or end.reason is None:
            raise _fault(end)
        if self.chat:
            choice = self._choice(message={"role": "assistant", "content": text}, reason=end.reason.value)
        else:
            choice = self._choice(text=text, reason=end.reason.value)
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": _usage(end.usage)})

    def _piece(self, text: str, reason: str | None) -> dict[str, Any]:
        return self._choice(delta={"content": text}, reason=reason) if self.chat else self._choice(text=text, reason=reason)

    def _choice(self, *, reason: str | None = None, **content: Any) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def _event(self, choices: list[dict[str, Any]], output_tokens: Tokens) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._continuous:
            chunk["usage"] = {
                "prompt_tokens": self.input_tokens,
                "total_tokens": self.input_tokens + output_tokens,
                "completion_tokens": output_tokens,
            }
        return _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(usage: EngineUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
    }


def _fault(end: EngineEnd) -> _Refusal:
    return _Refusal(500, "InternalServerError", end.fault.detail if end.fault else "the engine failed")


class SimulatedApi:
    """The ASGI application around one simulated replica. clock: for the `created` member."""

    def __init__(self, spec: ServerSpec, clock: Clock) -> None:
        replica = SimulatedReplica(spec.row, spec.preset, spec.concurrency, spec.context_tokens, spec.seed)
        self._spec = spec
        self._clock = clock
        self._engine = SimulatedEngine(replica)
        self._address = ReplicaAddress(
            _REPLICA, _REPLICA, _REPLICA, EngineKind.SIMULATED, "", spec.model, spec.context_tokens, counts_tokens=True
        )
        self._serial = 0
        self._routes: dict[tuple[str, str], Callable[[Receive, Send], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/completions"): lambda receive, send: self._generate(receive, send, chat=False),
            ("POST", "/v1/chat/completions"): lambda receive, send: self._generate(receive, send, chat=True),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP exchange."""
        assert scope["type"] == "http"
        try:
            if scope["path"].startswith("/v1/"):
                self._authenticate(scope)
            route = self._routes.get((scope["method"], scope["path"]))
            if route is None:
                raise _Refusal(404, "NotFoundError", "no such path")
            await route(receive, send)
        except _Refusal as refusal:
            await _answer(send, refusal.status, _JSON, msgspec.json.encode(refusal.body))
        except _ClientLeft:
            return

    def _authenticate(self, scope: Scope) -> None:
        if self._spec.api_key is None:
            return
        presented = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(presented, f"Bearer {self._spec.api_key}".encode()):
            raise _Refusal(401, "AuthenticationError", "Unauthorized")

    # ── what is asked beside generations ─────────────────────────────────────────────────────────────────────────────

    async def _health(self, _: Receive, send: Send) -> None:
        await _answer(send, 200, _TEXT, b"")

    async def _version(self, _: Receive, send: Send) -> None:
        await _answer(send, 200, _JSON, msgspec.json.encode({"version": f"{__version__}+simulated"}))

    async def _models(self, _: Receive, send: Send) -> None:
        card = {
            "id": self._spec.model,
            "object": "model",
            "created": self._clock.wall_ms() // 1_000,
            "owned_by": "weir",
            "root": self._spec.model,
            "max_model_len": self._spec.context_tokens,
        }
        await _answer(send, 200, _JSON, msgspec.json.encode({"object": "list", "data": [card]}))

    async def _tokenize(self, receive: Receive, send: Send) -> None:
        body = await self._read(receive)
        text, chat = body.text(), body.messages is not None
        count = count_prompt_tokens(text, chat)
        shape = {
            "count": count,
            "max_model_len": self._spec.context_tokens,
            "tokens": invented_token_ids(text, count),
            "token_strs": None,
        }
        await _answer(send, 200, _JSON, msgspec.json.encode(shape))

    async def _metrics(self, _: Receive, send: Send) -> None:
        load = self._engine.load(_REPLICA)
        rows = (
            ("num_requests_running", "gauge", load.running),
            ("num_requests_waiting", "gauge", load.waiting),
            ("kv_cache_usage_perc", "gauge", 0),  # KV blocks are not simulated
            ("prompt_tokens_total", "counter", load.prompt_tokens),
            ("generation_tokens_total", "counter", load.generation_tokens),
        )
        model = msgspec.json.encode(self._spec.model).decode()
        labels = f'{{engine="0",model_name={model}}}'
        text = "".join(f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {float(value)}\n" for name, kind, value in rows)
        await _answer(send, 200, _TEXT, text.encode())

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, receive: Receive, send: Send, *, chat: bool) -> None:
        body = await self._read(receive)
        call = self._call(body, chat)
        self._serial += 1
        input_tokens = count_prompt_tokens(call.prompt, chat)
        shape = _Shape(self._serial, body, self._clock.wall_ms() // 1_000, chat, input_tokens)
        inbox = _Inbox()
        run = self._engine.start(call, inbox)
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive, run, inbox))
            try:
                await (_stream(send, shape, inbox) if shape.streamed else _write_whole(send, shape, inbox))
            except _ClientLeft:
                return
            finally:
                run.cancel()
                watcher.cancel()

    def _call(self, body: _Body, chat: bool) -> EngineCall:
        """What the engine is asked. Raises _Refusal where vLLM answers 400."""
        if (body.messages is not None) is not chat:
            raise _Refusal(400, "BadRequestError", "messages are required" if chat else "a prompt is required")
        prompt = body.text()
        room = self._spec.context_tokens - count_prompt_tokens(prompt, chat)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        max_tokens = asked if asked is not None else (max(1, room) if chat else COMPLETION_TOKENS_DEFAULT)
        if max_tokens < 1:
            raise _Refusal(400, "BadRequestError", "max_tokens must be at least 1", "max_tokens")
        if max_tokens > room:
            message = (
                f"This model's maximum context length is {self._spec.context_tokens} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {self._spec.context_tokens - room} input tokens."
            )
            raise _Refusal(400, "BadRequestError", message, "input_tokens")
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return EngineCall(self._address, 0, prompt, chat, max_tokens, Sampling(seed=body.seed, stop=stop))

    async def _read(self, receive: Receive) -> _Body:
        """The request's body. Raises _Refusal for what is malformed, too large, or for another model."""
        try:
            body = msgspec.json.decode(await _read_bytes(receive), type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Refusal(400, "BadRequestError", f"the body is not valid: {error}") from None
        if body.model is None:
            body.model = self._spec.model
        if body.model != self._spec.model:
            raise _Refusal(404, "NotFoundError", "The model does not exist.", "model")
        return body


async def _stream(send: Send, shape: _Shape, inbox: _Inbox) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
    text = shape.opening()
    end: EngineEnd | None = None
    while end is None:  # bounded by the reply's length
        deltas, end = await inbox.take()
        text += shape.deltas(deltas) + (shape.closing(end) if end else b"")
        await send({"type": "http.response.body", "body": text, "more_body": end is None})
        text = b""


async def _write_whole(send: Send, shape: _Shape, inbox: _Inbox) -> None:
    pieces: list[str] = []
    end: EngineEnd | None = None
    while end is None:  # bounded by the reply's length
        deltas, end = await inbox.take()
        pieces += [delta.text for delta in deltas]
    try:
        status, body = 200, shape.whole("".join(pieces), end)
    except _Refusal as refusal:
        status, body = refusal.status, msgspec.json.encode(refusal.body)
    await _answer(send, status, _JSON, body)


async def _watch(receive: Receive, run: EngineRun, inbox: _Inbox) -> None:
    """Cancel the run when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    run.cancel()
    inbox.leave()


async def _read_bytes(receive: Receive) -> bytes:
    chunks = bytearray()
    more = True
    while more:  # bounded by the largest body
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        chunks += message.get("body", b"")
        if len(chunks) > BODY_BYTES_MAX:
            raise _Refusal(413, "BadRequestError", "the body is too large")
        more = message.get("more_body", False)
    return bytes(chunks)


async def _answer(send: Send, status: int, content_type: tuple[bytes, bytes], body: bytes) -> None:
    headers = [content_type, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
