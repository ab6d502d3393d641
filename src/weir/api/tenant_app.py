"""The tenant-side ASGI application: routes, authentication, and errors in the shape of the path that was asked.

Raw ASGI, because it is on the path of every token. It knows which surface owns which path and nothing of what they mean.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from weir import errors
from weir.api import generations, openai
from weir.api.exchange import ArrivingBodies, HttpExchange, Receive, Send
from weir.api.generations import NativeAnswer, generation_body, is_request_id, parse_generation
from weir.api.openai import ChatAnswer, model_object, models_body, parse_chat
from weir.api.wire import Headers, Rendered, id_headers, json_object, limit_headers, openai_error, problem, refuse_field
from weir.config import GatewayConfig
from weir.core.tenancy import Principal
from weir.gateway.pipeline import Gateway
from weir.messages import GenerationRecord, StandingView
from weir.ports import Clock, Entropy

_log = structlog.get_logger("weir.api")
_FAILED = "The platform failed while serving this request."
_GENERATION_PATHS = ("/v1/generations", "/v1/chat/completions")
Handler = Callable[["Call"], Awaitable[None]]


@dataclass(slots=True)
class Call:
    """One request on its way through the application. request_id: ours, until the caller's own is known.

    principal: who asks, once authenticated.
    """

    exchange: HttpExchange
    request_id: str
    argument: str = ""
    principal: Principal | None = None

    def take_id(self, given: Any) -> None:
        """Answer with the caller's own request id, whatever else of its request turns out to be wrong."""
        if is_request_id(given):
            self.request_id = given

    @property
    def is_openai(self) -> bool:
        """Whether this path answers in OpenAI's shapes: all of its paths, so that its SDK reads the code everywhere."""
        path = self.exchange.path
        return path.startswith("/v1/") and not path.startswith("/v1/generations")


class TenantApp:
    """ASGI 3 application of a gateway. is_ready: whether new work is welcome (`/readyz`)."""

    def __init__(
        self,
        gateway: Gateway,
        clock: Clock,
        entropy: Entropy,
        config: GatewayConfig,
        is_ready: Callable[[], bool],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._gateway = gateway
        self._clock = clock
        self._entropy = entropy
        self._config = config
        self._is_ready = is_ready
        self._on_broken = on_broken
        self.arriving = ArrivingBodies(config.bodies_bytes_max)
        self._fixed: dict[str, dict[str, Handler]] = {
            "/v1/generations": {"POST": self._generate},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/models": {"GET": self._models},
            "/healthz": {"GET": self._healthz},
            "/readyz": {"GET": self._readyz},
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send, self._clock, self._config, self.arriving)
        call = Call(exchange, self.new_request_id())
        try:
            await self._serve(call)
        except asyncio.CancelledError:  # the server's grace is over, or the cell's end came first
            await self._refuse(call, errors.Shutdown(retry_after_ms=1_000))
        except AssertionError as broken:
            self._on_broken(broken)
            await self._refuse(call, errors.InternalError(_FAILED))
            raise
        except Exception as fault:
            _log.error("request_failed", path=_safe_path(exchange.path), fault=type(fault).__name__, exc_info=fault)
            await self._refuse(call, errors.InternalError(_FAILED))

    def new_request_id(self) -> str:
        """A request id for whatever brought none."""
        return f"req-{self._entropy.token(12).hex()}"

    # ── routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, call: Call) -> None:
        try:
            await self._route(call)
        except errors.WeirError as refusal:
            if call.exchange.method == "POST" and call.exchange.path in _GENERATION_PATHS:
                self._gateway.count_refusal(refusal)
            await self._refuse(call, refusal)

    async def _route(self, call: Call) -> None:
        call.exchange.refuse_repeated_headers()
        methods = self._fixed.get(call.exchange.path) or self._route_with_argument(call)
        if methods is None:
            raise errors.NotFound("There is nothing at this path.")
        handler = methods.get(call.exchange.method)
        if handler is None:
            allowed = sorted(methods)
            raise errors.MethodNotAllowed(f"This path takes {', '.join(allowed)}.", members={"allowed": allowed})
        await handler(call)

    def _route_with_argument(self, call: Call) -> dict[str, Handler] | None:
        path = call.exchange.path
        if path.startswith("/v1/models/"):
            call.argument = path.removeprefix("/v1/models/")
            return {"GET": self._model}
        if not path.startswith("/v1/generations/"):
            return None
        call.argument, _, action = path.removeprefix("/v1/generations/").partition("/")
        routes: dict[str, dict[str, Handler]] = {
            "": {"GET": self._lookup},
            "cancel": {"POST": self._cancel},
            "events": {"GET": self._events},
        }
        return routes.get(action)

    def _authenticate(self, call: Call) -> Principal:
        headers = call.exchange.headers
        bearer = headers.get(b"authorization", b"")
        presented = bearer[7:] if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        principal = self._gateway.inbox.snapshot.authenticate(presented.decode("latin-1").strip())
        call.principal = principal
        return principal

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, call: Call) -> None:
        principal = self._authenticate(call)
        document = json_object(await call.exchange.body())
        call.take_id(document.get("request_id"))
        request = parse_generation(document)
        answer = NativeAnswer(call.exchange, self._clock, call.request_id)
        await self._gateway.generate(principal, request, answer, generations.SURFACE)

    async def _chat(self, call: Call) -> None:
        call.take_id(call.exchange.headers.get(b"idempotency-key", b"").decode("latin-1"))
        principal = self._authenticate(call)
        document = json_object(await call.exchange.body())
        request, options = parse_chat(document, call.exchange.headers)
        answer = ChatAnswer(call.exchange, self._clock, call.request_id, options)
        await self._gateway.generate(principal, request, answer, openai.SURFACE)

    async def _lookup(self, call: Call) -> None:
        principal = self._authenticate(call)
        found = await self._gateway.inbox.lookup(principal.tenant, _checked_id(call.argument))
        await self._show(call, _known(found.record), await self._standing(principal), status=200)

    async def _cancel(self, call: Call) -> None:
        principal = self._authenticate(call)
        found = await self._gateway.inbox.cancel(principal.tenant, _checked_id(call.argument))
        await self._show(call, _known(found.record), await self._standing(principal), status=200)

    async def _events(self, call: Call) -> None:
        principal = self._authenticate(call)
        found = await self._gateway.inbox.lookup(principal.tenant, _checked_id(call.argument))
        record = _known(found.record)
        if not call.exchange.headers.get(b"last-event-id", b"0").isdigit():
            refuse_field("Last-Event-ID", "the id of an event: a whole number from 0")
        refusal = errors.StreamNotRetained("The events of this request were not kept.")
        rendered = problem(refusal, self._clock.wall_ms(), {"generation": generation_body(record)})
        await self._send(call, rendered, await self._standing(principal), record.request_id)

    async def _show(self, call: Call, record: GenerationRecord, standing: StandingView, *, status: int) -> None:
        rendered = Rendered(status, b"application/json", msgspec.json.encode(generation_body(record)), [])
        await self._send(call, rendered, standing, record.request_id)

    # ── models, health ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _models(self, call: Call) -> None:
        principal = self._authenticate(call)
        aliases = self._gateway.inbox.snapshot.aliases_for(principal)
        await self._send(call, Rendered(200, b"application/json", models_body(aliases), []), await self._standing(principal))

    async def _model(self, call: Call) -> None:
        principal = self._authenticate(call)
        alias, _ = self._gateway.inbox.snapshot.resolve(principal, call.argument)
        body = msgspec.json.encode(model_object(alias))
        await self._send(call, Rendered(200, b"application/json", body, []), await self._standing(principal))

    async def _healthz(self, call: Call) -> None:
        await self._send(call, Rendered(200, b"application/json", b'{"status":"ok"}', []), None)

    async def _readyz(self, call: Call) -> None:
        ready = self._is_ready()
        body = b'{"status":"ready"}' if ready else b'{"status":"not_ready"}'
        await self._send(call, Rendered(200 if ready else 503, b"application/json", body, []), None)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _standing(self, principal: Principal, alias: str = "") -> StandingView:
        return await self._gateway.standing(principal, alias)

    async def _refuse(self, call: Call, refusal: errors.WeirError) -> None:
        if call.exchange.is_started:  # nothing fits behind a started answer
            call.exchange.abort()
            return
        standing = None
        if not isinstance(refusal, errors.PlatformFault):  # a part is broken or stopping: ask and wait for nothing
            await call.exchange.discard_body()
            standing = await self._standing(call.principal) if call.principal else None
        now_ms = self._clock.wall_ms()
        rendered = openai_error(refusal, now_ms) if call.is_openai else problem(refusal, now_ms)
        headers: Headers = []
        if isinstance(refusal, errors.MethodNotAllowed):
            headers.append((b"allow", ", ".join(refusal.members["allowed"]).encode()))
        if isinstance(refusal, errors.Unauthenticated):
            headers.append((b"www-authenticate", b"Bearer"))
        await self._send(call, rendered, standing, call.request_id, headers)

    async def _send(
        self,
        call: Call,
        rendered: Rendered,
        standing: StandingView | None,
        request_id: str = "",
        headers: Headers | None = None,
    ) -> None:
        extra = [*id_headers(request_id or call.request_id), *limit_headers(standing), *(headers or [])]
        await call.exchange.start(rendered.status, rendered.head(extra))
        await call.exchange.finish(rendered.body)


def _checked_id(argument: str) -> str:
    if not is_request_id(argument):
        raise errors.NotFound("No request has this id.")
    return argument


def _known(record: GenerationRecord | None) -> GenerationRecord:
    if record is None:
        raise errors.NotFound("No request has this id.")
    return record


def _safe_path(path: str) -> str:
    """A path without anything a client chose: its first three parts."""
    return "/".join(path.split("/")[:3])
