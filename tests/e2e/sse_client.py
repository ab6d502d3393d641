"""A tenant's HTTP client for tests: raw asyncio streams, so that a test decides when to read, to stall, and to leave.

It parses just enough HTTP/1.1 and SSE; every wait is bounded. It never retries and hides nothing of what a server sent.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.surfaces import SURFACES
from tests.event_streams import Event, EventReader

WAIT_S = 30.0
Body = Mapping[str, Any] | bytes | None


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Call:
    """A request that was sent; the answer is read when the test asks for it. seen: the events read so far.

    surface: the name of the one that was asked.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    surface: str = "native"
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[Event] = field(default_factory=list)
    parsed: EventReader = field(default_factory=EventReader)
    _events: AsyncIterator[Event] | None = None

    async def head(self) -> int:
        """The status, once the headers are here."""
        if not self.status:
            async with asyncio.timeout(WAIT_S):
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            self.status = int(head[0].split()[1])
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises IncompleteReadError where the connection is cut."""
        await self.head()
        async with asyncio.timeout(2 * WAIT_S):
            if "content-length" in self.headers:
                yield await self.reader.readexactly(int(self.headers["content-length"]))
                return
            if "transfer-encoding" not in self.headers:  # HTTP/1.0: ended by the connection
                while piece := await self.reader.read(2**16):
                    yield piece
                return
            while size := int(await self.reader.readuntil(b"\r\n"), 16):  # ended by the chunk of size 0
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)

    async def answer(self) -> Answer:
        """The whole answer."""
        body = b"".join([piece async for piece in self.pieces()])
        return Answer(self.status, self.headers, body)

    def events(self) -> AsyncIterator[Event]:
        """Events as they arrive, comments left out; a second loop goes on where the first one stopped."""
        if self._events is None:
            self._events = self._read_events()
        return self._events

    async def output_begun(self) -> None:
        """The stream has shown output text."""
        async for event in self.events():
            if SURFACES[self.surface].text_in(event):
                return
        raise AssertionError("the stream ended without output")

    async def _read_events(self) -> AsyncIterator[Event]:
        async for piece in self.pieces():
            for event in self.parsed.feed(piece):
                self.seen.append(event)
                yield event
        self.parsed.close()

    def leave(self) -> None:
        """Close the connection, whatever was not read."""
        self.writer.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Cut the connection with a RST."""
        link = self.writer.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(url: str, receive_bytes: int | None = None) -> AsyncIterator[Call]:
    """A connection on which nothing was sent; closed with the block. receive_bytes: the socket's receive buffer."""
    parts = urlsplit(url)
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    link.setblocking(False)
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_connect(link, (parts.hostname, parts.port))
        # A reader of a slow client must not read ahead of its test either.
        limit = receive_bytes or 2**20
        reader, writer = await asyncio.open_connection(sock=link, limit=limit)
    except BaseException:
        link.close()
        raise
    try:
        yield Call(reader, writer)
    finally:
        writer.close()
        try:
            async with asyncio.timeout(WAIT_S):
                await writer.wait_closed()
        except ConnectionError:
            pass


@asynccontextmanager
async def calling(
    url: str,
    path: str,
    *,
    method: str = "POST",
    body: Body = None,
    headers: Mapping[str, str] | None = None,
    receive_bytes: int | None = None,
) -> AsyncIterator[Call]:
    """Send one request; the connection is closed with the block. receive_bytes: the socket's receive buffer."""
    async with connected(url, receive_bytes) as call:
        call.writer.write(request_bytes(method, path, body, headers or {}))
        async with asyncio.timeout(WAIT_S):
            await call.writer.drain()
        yield call


def request_bytes(method: str, path: str, body: Body, headers: Mapping[str, str]) -> bytes:
    """A request as it is sent."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: weir", f"content-length: {len(content)}"]
    lines += ["content-type: application/json", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def bearer(key: str, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """The header that shows a key, and others."""
    return {"authorization": f"Bearer {key}", **(headers or {})}


async def ask(url: str, path: str, *, method: str = "GET", key: str = "", body: Body = None) -> Answer:
    """One request and its whole answer."""
    async with calling(url, path, method=method, body=body, headers=bearer(key) if key else {}) as call:
        return await call.answer()
