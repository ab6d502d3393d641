"""One HTTP exchange: the request's body within its bounds, and the gateway's `Client` on top of a connection.

Headers and the last bytes go through the ASGI server; chunks between them go straight to the transport, which never blocks, so
that a relayed chunk costs no task switch.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from weir import errors
from weir.api.connection import SCOPE_KEY, Connection
from weir.api.wire import refuse_field
from weir.config import GatewayConfig
from weir.gateway.client import ClientWatcher
from weir.ports import Clock
from weir.units import Bytes, Nanos

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_IDENTIFYING = (b"authorization", b"x-api-key", b"idempotency-key", b"last-event-id")
_RETRY_AFTER_MS = 1_000
_DISCARD_BYTES_MAX = 64 * 1024 * 1024
_DISCARD_S = 10.0
_FLUSH_POLL_S = 0.05


class ArrivingBodies:
    """Bytes of all bodies that are still arriving, under one bound for every connection. size: what is held now."""

    def __init__(self, limit: Bytes) -> None:
        self._limit = limit
        self.size: Bytes = 0

    def take(self, size: Bytes) -> None:
        """Count bytes that must wait for the rest of their body. Raises QueueFull, and counts nothing, beyond the bound."""
        if self.size + size > self._limit:
            raise errors.QueueFull("Too many bodies are arriving at once.", retry_after_ms=_RETRY_AFTER_MS)
        self.size += size

    def give_back(self, size: Bytes) -> None:
        """Their body is whole, refused or lost."""
        assert size <= self.size
        self.size -= size


class HttpExchange:
    """scope, receive and send are the ASGI server's; the connection rides in the scope. bodies: the process has one."""

    def __init__(
        self, scope: dict[str, Any], receive: Receive, send: Send, clock: Clock, config: GatewayConfig, bodies: ArrivingBodies
    ) -> None:
        self._bodies = bodies
        self._receive = receive
        self._send = send
        self._clock = clock
        self._config = config
        # Taken out: a scope that keeps its connection, which keeps its scope, waits for the garbage collector.
        self._connection: Connection = scope["extensions"].pop(SCOPE_KEY)["connection"]
        self._transport = self._connection.transport
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self._frames_chunks = scope["http_version"] != "1.0"
        self._watcher: ClientWatcher | None = None
        self._header_lines: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(self._header_lines)
        self.read_ns: Nanos = clock.monotonic_ns()
        self.written: Bytes = 0
        self.is_started = False
        self._discard_bytes_max, self._discard_s = _DISCARD_BYTES_MAX, _DISCARD_S

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse_repeated_headers(self) -> None:
        """Raises InvalidRequest for a header that names who asks, or for what, and came twice: two readers could take two."""
        if len(self.headers) == len(self._header_lines):
            return
        names = [name for name, _ in self._header_lines]
        for name in self.headers:
            if (name in _IDENTIFYING or name.startswith(b"weir-")) and names.count(name) > 1:
                refuse_field(name.decode("latin-1"), "one header of this name")

    async def body(self) -> bytes:
        """The whole body.

        Raises RequestTooLarge, QueueFull while too many bodies are arriving, and InvalidRequest when it does not arrive in time
        or the client left.
        """
        limit = self._config.body_bytes_max
        self._refuse_declared(limit)
        body = await (self._read_up_to(limit) if self._connection.has_whole_body else self._read_in_time(limit))
        self.read_ns = self._clock.monotonic_ns()
        return body

    async def body_pieces(self, limit: Bytes) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, for what does not keep it whole: each piece is counted until the next is asked for.

        limit: of all of it, whatever the bound of other bodies. Close it where it is left early.

        Raises RequestTooLarge, QueueFull while too many bodies are arriving, and InvalidRequest when nothing came for a body's
        wait or the client left.
        """
        self._discard_bytes_max, self._discard_s = max(limit, _DISCARD_BYTES_MAX), self._config.body_wait_ms / 1e3
        self._refuse_declared(limit)
        size, has_more = 0, True
        while has_more:
            piece, has_more = await self._next_piece()
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            self._bodies.take(len(piece))
            try:
                yield piece
            finally:
                self._bodies.give_back(len(piece))

    async def _next_piece(self) -> tuple[bytes, bool]:
        """What came, and whether more will."""
        try:
            async with asyncio.timeout(self._config.body_wait_ms / 1e3):
                message = await self._receive()
        except TimeoutError as late:
            raise errors.InvalidRequest(
                f"Nothing of the body arrived for {self._config.body_wait_ms} ms.", members={"field": "body"}
            ) from late
        self.read_ns = self._clock.monotonic_ns()
        if message["type"] != "http.request":
            raise errors.InvalidRequest("The client left while sending its body.", members={"field": "body"})
        return message["body"], message["more_body"]

    def _refuse_declared(self, limit: Bytes) -> None:
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)

    async def _read_in_time(self, limit: Bytes) -> bytes:
        try:
            async with asyncio.timeout(self._config.body_wait_ms / 1e3):
                return await self._read_up_to(limit)
        except TimeoutError as late:
            raise errors.InvalidRequest(
                f"The body did not arrive within {self._config.body_wait_ms} ms.", members={"field": "body"}
            ) from late

    async def _read_up_to(self, limit: Bytes) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            while size <= limit:
                message = await self._receive()
                if message["type"] != "http.request":
                    raise errors.InvalidRequest("The client left while sending its body.", members={"field": "body"})
                parts.append(message["body"])
                if not message["more_body"] and size + len(parts[-1]) <= limit:
                    return b"".join(parts)
                self._bodies.take(len(parts[-1]))
                size += len(parts[-1])
            raise _too_large(limit)
        finally:
            self._bodies.give_back(size)
            parts.clear()  # the traceback of a refusal would keep them until it is answered

    async def discard_body(self) -> None:
        """Read on for a while, so that a refusal reaches a client that sends everything before it reads."""
        if self._connection.has_whole_body or self._connection.cycle.waiting_for_100_continue:
            return
        discarded = 0
        waited_s = (self._clock.monotonic_ns() - self.read_ns) / 1e9
        try:
            async with asyncio.timeout(min(self._discard_s, self._config.body_wait_ms / 1e3 - waited_s)):
                while discarded < self._discard_bytes_max:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message["more_body"]:
                        return
                    discarded += len(message["body"])
        except TimeoutError:
            return

    # ── the gateway's Client ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_lost(self) -> bool:
        """Whether nobody can read an answer any more."""
        return self._connection.is_lost

    @property
    def unsent(self) -> Bytes:
        """Bytes in the transport's buffer."""
        size: int = self._transport.get_write_buffer_size()
        return size

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Tell this watcher about the client's fate; None ends what this exchange asked for, never what a later one did."""
        if watcher is not None or self._connection.watcher is self._watcher:
            self._connection.watcher = watcher
        self._watcher = watcher

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Status line and headers. Behind a body that was not read whole no next request can be found: the connection ends."""
        self.is_started = True
        if self.is_lost:
            return
        if not self._connection.has_whole_body:
            headers = [*headers, (b"connection", b"close")]
        if not self._frames_chunks and all(name != b"content-length" for name, _ in headers):
            self._connection.cycle.chunked_encoding = False  # HTTP/1.0: the end of the connection ends the body
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, events: int = 1) -> None:
        """One chunk, straight to the transport; nothing is none, for an empty one would end the body."""
        if body and not self.is_lost:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._frames_chunks else body)
            self.written += len(body)

    async def send_piece(self, body: bytes) -> None:
        """Some of a body whose length the headers told, once the socket has room. Cuts a client that takes nothing any more."""
        while not self.is_lost:
            unsent = self.unsent
            try:
                async with asyncio.timeout(self._config.slow_client_grace_ms / 1e3):  # waits before it writes, never behind
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                if self.unsent >= unsent:
                    self.abort()
            else:
                self.written += len(body)
                return

    async def finish(self, body: bytes = b"") -> None:
        """The last bytes; waits until the socket took them or the slow-client grace is over, and then cuts."""
        if self.is_lost:
            return
        self.written += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        deadline_ns = self._clock.monotonic_ns() + self._config.slow_client_grace_ms * 1_000_000
        while not self.is_lost and self.unsent:
            if self._clock.monotonic_ns() > deadline_ns:
                self.abort()
                return
            await asyncio.sleep(_FLUSH_POLL_S)

    def abort(self) -> None:
        """Cut the connection."""
        self._connection.abort()


def _too_large(limit: Bytes) -> errors.RequestTooLarge:
    return errors.RequestTooLarge(f"The body exceeds {limit} bytes.", members={"limit_bytes": limit})
