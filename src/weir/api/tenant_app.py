"""The tenant-side ASGI application: finds the surface that owns a path, and answers what no handler answered.

Raw ASGI, because it is on the path of every token. It knows which surface owns which path and nothing of what they mean.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from weir import errors
from weir.api.anthropic.anthropic_surface import AnthropicSurface
from weir.api.door import Call, Door, Methods, Surface
from weir.api.exchange import ArrivingBodies, HttpExchange, Receive, Send
from weir.api.native import NativeSurface
from weir.api.openai.batches import BatchesSurface
from weir.api.openai.files import FilesSurface
from weir.api.openai.response_paths import ResponsesSurface
from weir.api.openai.surface import OpenAISurface
from weir.api.openapi.document import document_answer
from weir.api.wire import Headers, Rendered
from weir.config import GatewayConfig
from weir.gateway.pipeline import Gateway
from weir.ports import Clock, Entropy

_log = structlog.get_logger("weir.api")
_FAILED = "The platform failed while serving this request."


class TenantApp:
    """ASGI 3 application of a gateway. is_ready: whether new work is welcome (`/readyz`). door: how callers are told
    apart, and who keeps their files."""

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
        self.door = Door(gateway, clock)
        self._native = NativeSurface(self.door)
        self._anthropic = AnthropicSurface(self.door)
        kept = (FilesSurface(self.door), BatchesSurface(self.door))
        openai = (*kept, ResponsesSurface(self.door), OpenAISurface(self.door))
        self._surfaces: tuple[Surface, ...] = (self._native, self._anthropic, *openai)
        self._open: dict[str, Methods] = {
            "/healthz": {"GET": self._healthz},
            "/readyz": {"GET": self._readyz},
            "/openapi.json": {"GET": self._document},
        }
        self.arriving = ArrivingBodies(config.bodies_bytes_max)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send, self._clock, self._config, self.arriving)
        call = Call(exchange, self.new_request_id())
        surface = self._surface_of(exchange)
        try:
            await self._serve(call, surface)
        except asyncio.CancelledError:  # the server's grace is over, or the cell's end came first
            await self._refuse(call, surface, errors.Shutdown(retry_after_ms=1_000))
        except AssertionError as broken:
            self._on_broken(broken)
            await self._refuse(call, surface, errors.InternalError(_FAILED))
            raise
        except Exception as fault:
            _log.error("request_failed", path=_safe_path(exchange.path), fault=type(fault).__name__, exc_info=fault)
            await self._refuse(call, surface, errors.InternalError(_FAILED))

    def new_request_id(self) -> str:
        """A request id for whatever brought none."""
        return f"req-{self._entropy.token(12).hex()}"

    # ── routing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _surface_of(self, exchange: HttpExchange) -> Surface:
        if self._anthropic.is_meant(exchange):
            return self._anthropic
        return next((surface for surface in self._surfaces if surface.owns(exchange.path)), self._native)

    async def _serve(self, call: Call, surface: Surface) -> None:
        try:
            await self._route(call, surface)
        except errors.WeirError as refusal:
            if call.exchange.method == "POST" and call.exchange.path in surface.generating:
                self._gateway.count_refusal(refusal)
            await self._refuse(call, surface, refusal)

    async def _route(self, call: Call, surface: Surface) -> None:
        call.exchange.refuse_repeated_headers()
        methods = self._open.get(call.exchange.path) or surface.methods(call)
        if methods is None:
            raise errors.NotFound("There is nothing at this path.")
        handler = methods.get(call.exchange.method)
        if handler is None:
            allowed = sorted(methods)
            raise errors.MethodNotAllowed(f"This path takes {', '.join(allowed)}.", members={"allowed": allowed})
        await self.door.sign_in.wait_for_keys(call.credential)
        await handler(call)

    # ── what needs no key ────────────────────────────────────────────────────────────────────────────────────────────

    async def _healthz(self, call: Call) -> None:
        await self.door.send(call, Rendered(200, b"application/json", b'{"status":"ok"}', []), None)

    async def _readyz(self, call: Call) -> None:
        ready = self._is_ready()
        body = b'{"status":"ready"}' if ready else b'{"status":"not_ready"}'
        await self.door.send(call, Rendered(200 if ready else 503, b"application/json", body, []), None)

    async def _document(self, call: Call) -> None:
        await self.door.send(call, document_answer(), None)

    # ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _refuse(self, call: Call, surface: Surface, refusal: errors.WeirError) -> None:
        if call.exchange.is_started:  # nothing fits behind a started answer
            call.exchange.abort()
            return
        standing = None
        if not isinstance(refusal, errors.PlatformFault):  # a part is broken or stopping: ask and wait for nothing
            await call.exchange.discard_body()
            standing = await self.door.standing(call.principal) if call.principal else None
        headers: Headers = []
        if isinstance(refusal, errors.MethodNotAllowed):
            headers.append((b"allow", ", ".join(refusal.members["allowed"]).encode()))
        if isinstance(refusal, errors.Unauthenticated):
            headers.append((b"www-authenticate", b"Bearer"))
        rendered = surface.refusal(refusal, self._clock.wall_ms(), call.request_id)
        await self.door.send(call, rendered, standing, call.request_id, headers)


def _safe_path(path: str) -> str:
    """The beginning of a path that is served, which is ours: what a client put behind it is left out."""
    return "/".join(path.split("/")[:3])
