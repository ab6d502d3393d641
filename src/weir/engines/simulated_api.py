"""The simulated engine's HTTP face: answers in vLLM's shapes, as a raw ASGI application.

It decides what a request means and what an answer looks like; the batch behind it decides when. A client that leaves, in any
phase and streaming or not, frees its sequence at the next step. Headers of a stream go out at once. Never logs a body.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from weir import __version__
from weir.core.registry.model import EngineKind
from weir.core.request import Sampling
from weir.engines.simulated import SimulatedEngine, SimulatedReplica, count_input_tokens
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.engines.simulated_bodies import Body
from weir.engines.simulated_embedding_shapes import EmbeddingBody, whole_embeddings
from weir.engines.simulated_faults import NO_FAULTS, FaultOrder, Faults
from weir.engines.simulated_shapes import Refusal, Shape, StreamOptions, exposition
from weir.engines.simulated_text import invented_token_ids
from weir.engines.step_time import step_time
from weir.messages import ReplicaAddress
from weir.ports import Clock, Delta, EngineCall, EngineEnd, EngineRun
from weir.units import Millis, Tokens

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_T = TypeVar("_T")

BODY_BYTES_MAX = 32 * 1024 * 1024
COMPLETION_TOKENS_DEFAULT = 16  # what the completions API takes when max_tokens is absent
_REPLICA = "simulated"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_TEXT = (b"content-type", b"text/plain; charset=utf-8")


class ServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a simulated server is; the first line on its standard input. port 0: any free one.

    kv_tokens: what its KV blocks have room for, None for the row's. prefix_cache: whether it reuses what prompts of one salt
    begin with; only then it says that it is vLLM, which is what a client takes as the promise to keep salts apart.
    start_ms: time until it listens. faults: in force from its start. embeddings: its model makes vectors, and no text.
    """

    model: str = "demo"
    context_tokens: Tokens = 8_192
    concurrency: int = 256
    row: str = "demo"
    preset: str = "nominal"
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    kv_tokens: Tokens | None = None
    prefix_cache: bool = False
    start_ms: Annotated[Millis, msgspec.Meta(ge=0)] = 0
    faults: Faults = NO_FAULTS
    embeddings: bool = False

    def replica(self, on_crash: Callable[[], None]) -> SimulatedReplica:
        """The replica behind it. Raises LookupError for an unknown row or preset, ValueError for a window beyond its blocks."""
        kv_tokens = step_time(self.row, self.preset).row.kv_tokens if self.kv_tokens is None else self.kv_tokens
        if self.context_tokens > kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS:
            raise ValueError(f"the window of {self.context_tokens} tokens is larger than the KV blocks, {kv_tokens} tokens")
        return SimulatedReplica(
            self.row,
            self.preset,
            self.concurrency,
            self.context_tokens,
            self.seed,
            kv_tokens=kv_tokens,
            prefix_cache=self.prefix_cache,
            faults=self.faults,
            on_crash=on_crash,
        )


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


class SimulatedApi:
    """The ASGI application around one simulated replica. clock: for the `created` member.

    crash: ends its process, when a fault says so; refuse: makes it refuse connections for so many milliseconds. Raises what
    `ServerSpec.replica` raises.
    """

    def __init__(self, spec: ServerSpec, clock: Clock, crash: Callable[[], None], refuse: Callable[[Millis], None]) -> None:
        self._spec = spec
        self._clock = clock
        self._refuse = refuse
        self._engine = SimulatedEngine(spec.replica(crash))
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
            ("PUT", "/faults"): self._order,
            ("POST", "/v1/embeddings"): self._embed,
            ("POST", "/v1/completions"): lambda receive, send: self._generate(receive, send, chat=False),
            ("POST", "/v1/chat/completions"): lambda receive, send: self._generate(receive, send, chat=True),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP exchange."""
        assert scope["type"] == "http"
        try:
            if scope["path"].startswith("/v1/") or scope["path"] == "/faults":
                self._authenticate(scope)
            route = self._routes.get((scope["method"], scope["path"]))
            if route is None:
                raise Refusal(404, "NotFoundError", "no such path")
            await route(receive, send)
        except Refusal as refusal:
            await _answer(send, refusal.status, _JSON, msgspec.json.encode(refusal.body))
        except _ClientLeft:
            return

    def _authenticate(self, scope: Scope) -> None:
        if self._spec.api_key is None:
            return
        presented = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(presented, f"Bearer {self._spec.api_key}".encode()):
            raise Refusal(401, "AuthenticationError", "Unauthorized")

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
            "owned_by": "vllm" if self._spec.prefix_cache else "weir",
            "root": self._spec.model,
            "max_model_len": self._spec.context_tokens,
        }
        await _answer(send, 200, _JSON, msgspec.json.encode({"object": "list", "data": [card]}))

    async def _tokenize(self, receive: Receive, send: Send) -> None:
        body = await self._read(receive)
        text, chat = body.text(), body.messages is not None
        demands = body.demands()
        count = count_input_tokens(text, chat, demands)
        shape = {
            "count": count,
            "max_model_len": self._spec.context_tokens,
            "tokens": invented_token_ids(text, count),
            "token_strs": None,
        }
        await _answer(send, 200, _JSON, msgspec.json.encode(shape))

    async def _metrics(self, _: Receive, send: Send) -> None:
        await _answer(send, 200, _TEXT, exposition(self._spec.model, self._engine.load(_REPLICA)).encode())

    async def _order(self, receive: Receive, send: Send) -> None:
        """The control route: from now on the faults of the body, and no others."""
        order = await _decoded(receive, FaultOrder)
        self._engine.order(_REPLICA, order)
        if order.refuse_ms:
            self._refuse(order.refuse_ms)
        await _answer(send, 200, _JSON, b"{}")

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, receive: Receive, send: Send, *, chat: bool) -> None:
        body = await self._read(receive)
        self._refuse_unless(makes="text")
        call = self._call(body, chat)
        self._serial += 1
        input_tokens = count_input_tokens(call.prompt, chat, call.demands)
        head = (self._serial, self._spec.model, self._clock.wall_ms() // 1_000)
        options = body.stream_options or StreamOptions() if body.stream else None
        shape = Shape(head, chat, input_tokens, options, choices=call.demands.choices)
        await self._carry(
            receive, call, lambda inbox: _stream(send, shape, inbox) if shape.streamed else _write_whole(send, shape, inbox)
        )

    async def _embed(self, receive: Receive, send: Send) -> None:
        body = await _decoded(receive, EmbeddingBody)
        self._check_model(body.model)
        self._refuse_unless(makes="embeddings")

        async def write(inbox: _Inbox) -> None:
            await _write_vectors(send, body, self._spec.model, inbox)

        await self._carry(receive, body.call(self._address), write)

    def _refuse_unless(self, makes: str) -> None:
        if self._spec.embeddings is not (makes == "embeddings"):
            raise Refusal(400, "BadRequestError", f"The model does not make {makes}.", "model")

    async def _carry(self, receive: Receive, call: EngineCall, write: Callable[[_Inbox], Awaitable[None]]) -> None:
        """A call from its start to its answer, or until its client leaves."""
        inbox = _Inbox()
        run = self._engine.start(call, inbox)
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive, run, inbox))
            try:
                await write(inbox)
            except _ClientLeft:
                return
            finally:
                run.cancel()
                watcher.cancel()

    def _call(self, body: Body, chat: bool) -> EngineCall:
        """What the engine is asked. Raises Refusal where vLLM answers 400."""
        if (body.messages is not None) is not chat:
            raise Refusal(400, "BadRequestError", "messages are required" if chat else "a prompt is required")
        prompt, demands = body.text(), body.demands()
        room = self._spec.context_tokens - count_input_tokens(prompt, chat, demands)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        max_tokens = asked if asked is not None else (max(1, room) if chat else COMPLETION_TOKENS_DEFAULT)
        if max_tokens < 1:
            raise Refusal(400, "BadRequestError", "max_tokens must be at least 1", "max_tokens")
        if max_tokens > room:
            message = (
                f"This model's maximum context length is {self._spec.context_tokens} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {self._spec.context_tokens - room} input tokens."
            )
            raise Refusal(400, "BadRequestError", message, "input_tokens")
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        sampling = Sampling(seed=body.seed, stop=stop)
        return EngineCall(self._address, 0, prompt, chat, max_tokens, sampling, body.salt(), demands)

    async def _read(self, receive: Receive) -> Body:
        """The request's body. Raises Refusal for what is malformed, too large, or for another model."""
        body = await _decoded(receive, Body)
        self._check_model(body.model)
        return body

    def _check_model(self, model: str | None) -> None:
        """Raises Refusal where another model is named."""
        if model not in (None, self._spec.model):
            raise Refusal(404, "NotFoundError", "The model does not exist.", "model")


async def _stream(send: Send, shape: Shape, inbox: _Inbox) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
    text = shape.opening()
    end: EngineEnd | None = None
    while end is None:  # bounded by the reply's length
        deltas, end = await inbox.take()
        text += shape.deltas(deltas) + (shape.closing(end) if end else b"")
        await send({"type": "http.response.body", "body": text, "more_body": end is None})
        text = b""


async def _write_whole(send: Send, shape: Shape, inbox: _Inbox) -> None:
    pieces: list[Delta] = []
    end: EngineEnd | None = None
    while end is None:  # bounded by the reply's length
        deltas, end = await inbox.take()
        pieces += deltas
    try:
        status, body = 200, shape.whole(pieces, end)
    except Refusal as refusal:
        status, body = refusal.status, msgspec.json.encode(refusal.body)
    await _answer(send, status, _JSON, body)


async def _write_vectors(send: Send, asked: EmbeddingBody, model: str, inbox: _Inbox) -> None:
    pieces: list[Delta] = []
    end: EngineEnd | None = None
    while end is None:  # bounded: the vectors come in one piece
        deltas, end = await inbox.take()
        pieces += deltas
    try:
        status, body = 200, whole_embeddings(asked, model, pieces, end)
    except Refusal as refusal:
        status, body = refusal.status, msgspec.json.encode(refusal.body)
    await _answer(send, status, _JSON, body)


async def _watch(receive: Receive, run: EngineRun, inbox: _Inbox) -> None:
    """Cancel the run when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    run.cancel()
    inbox.leave()


async def _decoded(receive: Receive, kind: type[_T]) -> _T:
    """The body as a value. Raises Refusal where it is none."""
    try:
        return msgspec.json.decode(await _read_bytes(receive), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, "BadRequestError", f"the body is not valid: {error}") from None


async def _read_bytes(receive: Receive) -> bytes:
    chunks = bytearray()
    more = True
    while more:  # bounded by the largest body
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        chunks += message.get("body", b"")
        if len(chunks) > BODY_BYTES_MAX:
            raise Refusal(413, "BadRequestError", "the body is too large")
        more = message.get("more_body", False)
    return bytes(chunks)


async def _answer(send: Send, status: int, content_type: tuple[bytes, bytes], body: bytes) -> None:
    headers = [content_type, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
