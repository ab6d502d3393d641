"""A scripted server's side of a connection, a receiver and a client for tests of the engine client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.errors import EngineFault

BOUND_S = 10
LONG_MS = 10_000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """A server's side of one connection. number: 1 for the first connection of the server."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._reader, self._writer = reader, writer

    async def request(self) -> bytes:
        """The next request's head and body, b"" when the client is gone."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def cut(self) -> None:
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def peer_server(serve: Serve) -> AsyncIterator[str]:
    """A server on loopback whose every connection is served by `serve`; its URL."""
    writers: list[asyncio.StreamWriter] = []
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.append(writer)
        await serve(Peer(len(writers), reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks)


class Receiver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.bodies: list[bytes] = []
        self.fault: EngineFault | None = None
        self.complete = False
        self.got_body, self.ended = asyncio.Event(), asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.bodies.append(data)
        self.got_body.set()

    def on_complete(self) -> None:
        self.complete = True
        self.ended.set()

    def on_lost(self, fault: EngineFault) -> None:
        self.fault = fault
        self.ended.set()


Run = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def http_client(**options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(**options)
    try:
        yield client
    finally:
        await client.aclose()
        assert not client.connections


def get(url: str, path: str = "/x", **fields: Any) -> HttpRequest:
    return HttpRequest("GET", url, path, **fields)
