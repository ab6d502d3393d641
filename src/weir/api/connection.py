"""One tenant connection: uvicorn's HTTP/1.1 protocol with what the relay needs and plain ASGI hides.

It shows what the socket has not accepted, tells at once when the client is gone (half-close counts; pipelined bytes do not hide
it, because reading goes on and at most one further request is buffered), bounds headers, and gives up on a request that never
completes its headers. Uvicorn keeps parsing, keep-alive, pipelining and the response's framing.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from weir import errors
from weir.api.wire import id_headers, problem
from weir.config import GatewayConfig
from weir.gateway.client import ClientWatcher

_HEADER_BYTES_MAX = 64 * 1024
_PIPELINED_BODY_BYTES_MAX = 64 * 1024
_LINGER_S = 1.0
_LINGER_BYTES_MAX = 1024 * 1024
SCOPE_KEY = "weir.connection"


class _HeadersTooLong(Exception):
    """Leaves the parser where the bound was passed."""


class Connection(HttpToolsProtocol):
    """A client's connection. watcher: the running request's, if any. new_request_id: names what no application answers."""

    limits: GatewayConfig = GatewayConfig()
    new_request_id: Callable[[], str]

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
        self._cycles: list[RequestResponseCycle] = []
        self._header_bytes = 0
        self._raw_header_bytes = 0
        self._headers_too_long = False
        self._headers_complete = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._lingered_bytes = 0

    # ── the connection's life ────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: bound its write buffer, and the time until its first request. One too many is closed at once."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections_max:
            transport.abort()
            return
        high = self.limits.stream_buffer_bytes
        transport.set_write_buffer_limits(high=high, low=high // 4)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    @property
    def has_whole_body(self) -> bool:
        """Whether the running request has arrived completely, as it has once another one is read behind it."""
        return bool(self.pipeline) or not self.cycle.more_body

    def eof_received(self) -> None:
        """A half-closed connection is a lost client; the transport closes itself after this."""
        self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._cancel_header_timer()
        if self._lingering is not None:
            self._lingering.cancel()
        self._lose()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Cut the connection: nobody can read an answer any more."""
        self._lose()
        self.transport.abort()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for cycle in self._cycles:  # else the server misses the answers that nobody can read
                cycle.disconnected = True
                cycle.message_event.set()
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

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. Its first ones have a bounded time to become a request; later ones may belong to no request."""
        if self._lingering is not None:
            self._drop(len(data))
            return
        if not self._cycles:
            self._await_headers()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("This is not a valid HTTP/1.1 request.")
        else:
            self._bound_an_endless_line(len(data))

    def _bound_an_endless_line(self, size: int) -> None:
        """The parser keeps a header line until it ends, so what arrives before the headers are complete is counted here too."""
        self._raw_header_bytes = 0 if self._header_timer is None else self._raw_header_bytes + size
        if self._raw_header_bytes > 2 * _HEADER_BYTES_MAX and not self.transport.is_closing():
            self._headers_too_long = True
            self.send_400_response("The headers are too long.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read a request that offers another protocol as if it did not. rest: what the parser left unread where it stopped."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This is no proxy.")
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in (b"connection", b"upgrade")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, self.url, b"".join(lines), rest))

    @property
    def _is_answering(self) -> bool:
        """Whether a request was read whole, or its answer begun, and that answer is not complete."""
        cycle = self.cycle
        if self.pipeline:
            return True
        return cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)

    # ── parser callbacks ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """The first byte of a request, which then has a bounded time to complete its headers."""
        super().on_message_begin()
        self.scope["extensions"] = {SCOPE_KEY: {"connection": self}}
        self._header_bytes = 0
        self._headers_complete = False
        if all(cycle.response_complete for cycle in self._cycles):  # a late one behind a running answer does not cut that off
            self._await_headers()

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line. What follows a chunked body is counted and dropped: it must not pass for a header."""
        self._count_header_bytes(len(name) + len(value))
        if not self._headers_complete:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request may start, or wait behind the running one without hiding a disconnect."""
        if self.parser.should_upgrade():
            return  # it is read again without the offer
        self._headers_complete = True
        self._cancel_header_timer()
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]
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

    def on_message_complete(self) -> None:
        """A request is whole."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP, or too much of it, is refused like everything else; behind a running answer it cuts that off."""
        if self._headers_too_long:
            limit = {"limit_bytes": _HEADER_BYTES_MAX}
            self._refuse(errors.RequestTooLarge(f"The headers exceed {_HEADER_BYTES_MAX} bytes.", members=limit))
        else:
            self._refuse(errors.InvalidRequest(msg))

    def _count_header_bytes(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEADER_BYTES_MAX:
            self._headers_too_long = True
            raise _HeadersTooLong

    def _await_headers(self) -> None:
        self._unset_keepalive_if_required()
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.body_wait_ms / 1e3, self._headers_are_late)

    def _headers_are_late(self) -> None:
        self._header_timer = None
        self._refuse(errors.InvalidRequest(f"The headers did not arrive within {self.limits.body_wait_ms} ms."))

    def _refuse(self, refusal: errors.WeirError) -> None:
        """Answer without the application and close. Bytes of an answer that is on its way are never mixed with another's."""
        self._cancel_header_timer()
        if self._is_answering:
            self.transport.abort()
            return
        rendered = problem(refusal, now_wall_ms=0)  # neither of these refusals has a time of reset
        ids = id_headers(self.new_request_id())
        head = b"".join(b"%b: %b\r\n" % header for header in rendered.head([*ids, (b"connection", b"close")]))
        self.transport.write(b"HTTP/1.1 %d \r\n%b\r\n%b" % (rendered.status, head, rendered.body))
        self._linger()

    def _linger(self) -> None:
        """Close once the client has read: a socket closed on unread bytes is reset, which destroys the answer on its way."""
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self._lingering = self.loop.call_later(_LINGER_S, self.transport.close)

    def _drop(self, size: int) -> None:
        self._lingered_bytes += size
        if self._lingered_bytes > _LINGER_BYTES_MAX:
            self.transport.close()

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
