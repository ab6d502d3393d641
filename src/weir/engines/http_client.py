"""A thin HTTP/1.1 client for engines on asyncio.Protocol and httptools: the lower half of the relay.

It decides which connection carries a request and when one may be used again; it never looks inside a body. Everything is a
callback on the event loop: no task, queue or iterator per piece, and all body bytes of one read arrive in one call. Closing an
exchange cuts its socket at once, which is how an engine is told to stop.
"""

import asyncio
import socket
import ssl
from contextlib import suppress
from functools import partial
from typing import cast

import httptools

from weir import errors
from weir.engines.http_exchange import HttpRequest, HttpResponse, Origin, ResponseReceiver, parse_origin
from weir.units import Bytes, Millis

HEAD_BYTES_MAX = 64 * 1024
CONTROL_BODY_BYTES_MAX = 1024 * 1024
CLOSE_MS = 1_000
IDLE_CLOSE_MS: Millis = 100
"""A peer that closes a kept connection as idle crosses our request on the wire. Later than this it may have begun to work."""

IDLE_PER_ORIGIN_MAX = 1_024
"""Above the lanes of any one engine, so that no request pays for a handshake; idle_ms ends what a quiet hour leaves."""


class Exchange:
    """One request and its response. sent: the request was handed to a connection at least once."""

    __slots__ = (
        "_client",
        "_connecting",
        "_connection",
        "_over",
        "_paused",
        "_retried",
        "origin",
        "payload",
        "receiver",
        "sent",
    )

    def __init__(self, client: "HttpClient", receiver: ResponseReceiver, origin: Origin, payload: bytes) -> None:
        self.origin = origin
        self.payload = payload
        self.receiver = receiver
        self.sent = False
        self._client = client
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._over = False
        self._paused = False
        self._retried = False

    def pause(self) -> None:
        """Stop reading; idempotent."""
        self._paused = True
        self._pause_if_wanted()

    def resume(self) -> None:
        """Read again; idempotent."""
        self._paused = False
        if self._connection is not None and not self._over:
            self._connection.resume()

    def close(self) -> None:
        """Cut the connection at once unless the response is complete; no callback follows. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._connection is not None:
            self._connection.abort()
        elif self._connecting is not None:
            self._connecting.cancel()

    async def wait_closed(self) -> None:
        """Returns once the socket of a closed exchange is gone."""
        if self._connection is not None and self._over:
            await self._connection.gone.wait()

    # ── for the client and its connections ───────────────────────────────────────────────────────────────────────────

    @property
    def over(self) -> bool:
        """True when no callback may follow."""
        return self._over

    @property
    def bound(self) -> bool:
        """Whether a connection carries it now."""
        return self._connection is not None

    def lose(self, fault: errors.EngineFault) -> None:
        """Connecting was given up. uvloop then closes a connection that was just made without telling it; this does."""
        if self._connection is not None:
            self._connection.connection_lost(None)
        self.fail(fault)

    def begin(self) -> None:
        """Send on an idle connection, or on a new one."""
        idle = None if self._retried else self._client.take_idle(self.origin)
        if idle is not None:
            self.bind(idle)
        else:
            self._connecting = self._client.connect(self)

    def bind(self, connection: "_Connection") -> None:
        """Send on this connection."""
        self._connection = connection
        self.sent = True
        connection.carry(self)
        if self._paused:  # one event loop starts to read only after connection_made
            self._client.loop.call_soon(self._pause_if_wanted)

    def unbind(self) -> None:
        """The response is complete: the connection belongs to the pool again."""
        self._over = True
        self._connection = None

    def retry_fresh(self) -> bool:
        """Send again, once, when a kept connection turned out to be closed already. False when that was done or is too late."""
        if self._retried or self._client.closing:
            return False
        self._retried = True
        self._connection = None
        self.begin()
        return True

    def _pause_if_wanted(self) -> None:
        if self._paused and self._connection is not None and not self._over:
            self._connection.pause()

    def fail(self, fault: errors.EngineFault) -> None:
        """End without a whole response; nothing happens if it is over."""
        if not self._over:
            self._over = True
            self.receiver.on_lost(fault)


class _Connection(asyncio.Protocol):
    """A socket that carries one exchange at a time. Collects during a read and calls the receiver after it."""

    def __init__(self, client: "HttpClient", exchange: Exchange) -> None:
        self.gone = asyncio.Event()
        self.idle_since = 0.0
        self._sent_at = 0.0
        self._client = client
        self._origin = exchange.origin
        self._first: Exchange | None = exchange
        self._exchange: Exchange | None = None
        self._used = 0
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._fragments: list[bytes] = []
        self._head_bytes = self._status = 0
        self._head_ready = self._head_told = self._complete = self._keep_alive = self._surplus = False

    # ── asyncio.Protocol ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client.connections.add(self)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange, self._first = self._first, None
        assert exchange is not None
        if exchange.over:
            self._transport.abort()
        else:
            exchange.bind(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over:
            self._transport.abort()  # an idle connection has nothing to say
            return
        if not self._head_ready:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._complete:
                self._break(exchange)
                return
            self._surplus = True
        if not self._head_ready:
            if self._head_bytes > HEAD_BYTES_MAX:
                self._break(exchange)
            return
        self._deliver(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self._client.forget(self, self._origin)
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.over:
            return
        if self._head_ready and exc is None and self._ends_with_connection:
            exchange.unbind()
            exchange.receiver.on_complete()
        elif not (self._was_closed_as_idle and exchange.retry_fresh()):
            exchange.fail(errors.ReplicaLost("The connection to the replica was lost."))

    # ── httptools ────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._surplus = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}  # an interim answer, another follows
        elif not self._complete:
            self._head_ready, self._status = True, status

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._fragments.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._head_ready
        self._keep_alive = self._parser.should_keep_alive()

    # ── for exchanges and the pool ───────────────────────────────────────────────────────────────────────────────────

    @property
    def is_open(self) -> bool:
        """Whether a request may still be sent."""
        return not self._transport.is_closing()

    def carry(self, exchange: Exchange) -> None:
        """Send an exchange's request and give it the response."""
        self._reset()
        self._used += 1
        self._exchange = exchange
        self._sent_at = self._client.loop.time()
        self._transport.write(exchange.payload)

    def pause(self) -> None:
        """Stop reading."""
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.is_open:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Cut the socket."""
        self._transport.abort()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _was_closed_as_idle(self) -> bool:
        """Whether nothing can have come of the request: a kept connection, lost at once and without a byte of an answer."""
        waited_ms = 1_000 * (self._client.loop.time() - self._sent_at)
        return self._used > 1 and not self._head_bytes and waited_ms <= IDLE_CLOSE_MS

    @property
    def _ends_with_connection(self) -> bool:
        return b"content-length" not in self._headers and b"transfer-encoding" not in self._headers

    def _deliver(self, exchange: Exchange) -> None:
        if not self._head_told:
            self._head_told = True
            exchange.receiver.on_head(self._status, self._headers)
        if self._fragments and not exchange.over:
            fragments, self._fragments = self._fragments, []
            exchange.receiver.on_body(fragments[0] if len(fragments) == 1 else b"".join(fragments))
        if self._complete and not exchange.over:
            self._exchange = None
            exchange.unbind()
            if self._keep_alive and not self._surplus and self.is_open:
                self._transport.resume_reading()
                self._client.keep(self, self._origin)
            else:
                self._transport.abort()
            exchange.receiver.on_complete()

    def _break(self, exchange: Exchange) -> None:
        self._transport.abort()
        exchange.fail(errors.EngineError("The replica's answer is not HTTP."))


class HttpClient:
    """Exchanges with any number of replicas. Keeps at most idle_per_origin_max unused connections each, for idle_ms."""

    def __init__(
        self, *, connect_ms: Millis = 2_000, idle_per_origin_max: int = IDLE_PER_ORIGIN_MAX, idle_ms: Millis = 60_000
    ) -> None:
        self.connections: set[_Connection] = set()
        self.closing = False
        self._connect_ms = connect_ms
        self._idle_per_origin_max = idle_per_origin_max
        self._idle_ms = idle_ms
        self._idle: dict[Origin, list[_Connection]] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this client runs on. Asked once: asking costs a system call in Python 3.11."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def open(self, request: HttpRequest, receiver: ResponseReceiver) -> Exchange:
        """Send a request; its response goes to the receiver, later. Never raises: what cannot be sent arrives as on_lost."""
        try:
            if self.closing:
                raise errors.EngineError("The engine client is closed.")
            origin = parse_origin(request.url)
            exchange = Exchange(self, receiver, origin, request.encode(origin))
        except errors.EngineError as fault:
            exchange = Exchange(self, receiver, Origin("", 0, False, ""), b"")
            self.loop.call_soon(exchange.fail, fault)
            return exchange
        exchange.begin()
        return exchange

    async def request(
        self, request: HttpRequest, *, timeout_ms: Millis, body_bytes_max: Bytes = CONTROL_BODY_BYTES_MAX
    ) -> HttpResponse:
        """A small call's whole response. Raises ReplicaLost, EngineError (not HTTP, too large) or Stalled (timeout_ms)."""
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        exchange = self.open(request, _Collector(answer, body_bytes_max))
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                return await answer
        except TimeoutError:
            raise errors.Stalled("The replica did not answer in time.") from None
        finally:
            exchange.close()

    async def aclose(self) -> None:
        """Cut every connection; exchanges that run end as ReplicaLost."""
        self.closing = True
        self._idle.clear()
        for task in self._connecting:
            task.cancel()
        for connection in self.connections:
            connection.abort()
        gone = [connection.gone.wait() for connection in self.connections]
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_MS / 1_000):
                await asyncio.gather(*self._connecting, *gone, return_exceptions=True)

    # ── for exchanges and connections ────────────────────────────────────────────────────────────────────────────────

    def take_idle(self, origin: Origin) -> _Connection | None:
        """The connection used last, or None."""
        kept = self._idle.get(origin, [])
        expired_at = self.loop.time() - self._idle_ms / 1_000
        while kept:
            connection = kept.pop()
            if not kept:
                del self._idle[origin]
            if connection.is_open and connection.idle_since > expired_at:
                return connection
            connection.abort()
        return None

    def keep(self, connection: _Connection, origin: Origin) -> None:
        """Keep a connection for the next request, or close it when enough are kept."""
        kept = self._idle.setdefault(origin, [])
        if len(kept) >= self._idle_per_origin_max or self.closing:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        kept.append(connection)

    def forget(self, connection: _Connection, origin: Origin) -> None:
        """The connection is gone."""
        self.connections.discard(connection)
        kept = self._idle.get(origin, [])
        if connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[origin]

    def connect(self, exchange: Exchange) -> asyncio.Task[None]:
        """Open a connection that carries the exchange; the task belongs to this client."""
        task = self.loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, exchange))
        return task

    async def _connect(self, exchange: Exchange) -> None:
        loop, origin = self.loop, exchange.origin
        tls = self._tls_context() if origin.tls else None
        try:
            async with asyncio.timeout(self._connect_ms / 1_000):
                await loop.create_connection(lambda: _Connection(self, exchange), origin.host, origin.port, ssl=tls)
        except (OSError, TimeoutError):
            exchange.lose(errors.ReplicaLost("The replica cannot be reached.", reached=exchange.sent))

    def _connected(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            exchange.lose(errors.ReplicaLost("The engine client was closed.", reached=exchange.sent))
        elif (failure := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "connecting to a replica failed", "exception": failure})

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Collector:
    """Gathers a whole response into a future."""

    def __init__(self, answer: asyncio.Future[HttpResponse], body_bytes_max: Bytes) -> None:
        self._answer = answer
        self._body_bytes_max = body_bytes_max
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._body_bytes_max and not self._answer.done():
            self._answer.set_exception(errors.EngineError("The replica's answer is above the bound."))

    def on_complete(self) -> None:
        if not self._answer.done():
            self._answer.set_result(HttpResponse(self._status, self._headers, bytes(self._body)))

    def on_lost(self, fault: errors.EngineFault) -> None:
        if not self._answer.done():
            self._answer.set_exception(fault)
