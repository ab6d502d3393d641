"""One tenant connection: uvicorn's HTTP/1.1 protocol with what the relay needs and plain ASGI hides.

It shows what the socket has not accepted, tells at once when the client is gone (half-close counts; pipelined bytes do not hide
it, because reading goes on and at most one further request is buffered), bounds headers, and gives up on a request that never
completes its headers. Uvicorn keeps parsing, keep-alive, pipelining and the response's framing.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from weir.config import GatewayConfig
from weir.gateway.client import ClientWatcher

_HEADER_BYTES_MAX = 64 * 1024
_PIPELINED_BODY_BYTES_MAX = 64 * 1024
SCOPE_KEY = "weir.connection"


class Connection(HttpToolsProtocol):
    """A client's connection. watcher: the running request's, if any."""

    limits: GatewayConfig = GatewayConfig()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.watcher: ClientWatcher | None = None
        self.is_lost = False
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    # ── the connection's life ────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: bound its write buffer, and the time until its first request."""
        super().connection_made(transport)
        high = self.limits.stream_buffer_bytes
        transport.set_write_buffer_limits(high=high, low=high // 4)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def eof_received(self) -> None:
        """A half-closed connection is a lost client; the transport closes itself after this."""
        self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._cancel_header_timer()
        self._lose()
        super().connection_lost(exc)

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            if self.watcher is not None:
                self.watcher.client_lost()

    def pause_writing(self) -> None:
        """The write buffer is above its bound."""
        super().pause_writing()
        if self.watcher is not None:
            self.watcher.client_blocked()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        super().resume_writing()
        if self.watcher is not None:
            self.watcher.client_writable()

    # ── parser callbacks ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.scope["extensions"] = {SCOPE_KEY: {"connection": self}}
        self._header_bytes = 0
        self._cancel_header_timer()
        self._header_timer = self.loop.call_later(self.limits.body_wait_ms / 1e3, self.transport.abort)

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self._count_header_bytes(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request may start, or wait behind the running one without hiding a disconnect."""
        self._cancel_header_timer()
        super().on_headers_complete()
        if len(self.pipeline) > 1:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Body bytes: of the running request with backpressure, of a pipelined one within a small bound."""
        if self.pipeline and len(self.cycle.body) + len(body) > _PIPELINED_BODY_BYTES_MAX:
            self.transport.abort()
            return
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets the same shape as every other refusal, then the connection closes."""
        self._refuse(400, b"invalid_request", msg.encode("ascii", "replace"))

    def _count_header_bytes(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEADER_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, b"request_too_large", b"The request's headers exceed 65536 bytes.")

    def _refuse(self, status: int, code: bytes, detail: bytes) -> None:
        body = b'{"type":"about:blank","title":"The request is not valid","status":%d,"code":"%b","detail":"%b"}'
        content = body % (status, code, detail)
        head = b"HTTP/1.1 %d \r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(content)) + content)
        self.transport.close()

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
