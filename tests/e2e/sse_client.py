"""A tenant's HTTP client for tests: raw asyncio streams, so that a test decides when to read, to stall, and to leave.

It parses just enough HTTP/1.1 and SSE; every wait is bounded. It never retries and hides nothing of what a server sent.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 15.0
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


@dataclass(frozen=True)
class Event:
    """One server-sent event; `data` as it was written."""

    name: str
    id: str
    data: str

    @property
    def json(self) -> Any:
        """The data as JSON."""
        return json.loads(self.data)


@dataclass
class Call:
    """A request that was sent; the answer is read when the test asks for it. seen: the events read so far."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[Event] = field(default_factory=list)
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
        """The stream has shown output: an event that has its own name on most surfaces, else a chunk with text."""
        async for event in self.events():
            if event.name in ("output", "response.output_text.delta", "content_block_delta") or (
                not event.name and '"content":"' in event.data and '"content":""' not in event.data
            ):
                return
        raise AssertionError("the stream ended without output")

    async def _read_events(self) -> AsyncIterator[Event]:
        text = b""
        async for piece in self.pieces():
            text += piece
            *blocks, text = text.split(b"\n\n")
            for block in blocks:
                lines = [line.partition(": ") for line in block.decode().split("\n") if not line.startswith(":")]
                fields = {name: value for name, _, value in lines}
                if "data" in fields:
                    self.seen.append(Event(fields.get("event", ""), fields.get("id", ""), fields["data"]))
                    yield self.seen[-1]
        assert not text, f"{self.status}: it ended within an event, or is none: {text[:200]!r}"

    def leave(self) -> None:
        """Close the connection, whatever was not read."""
        self.writer.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self.writer.write_eof()


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
        writer.write(_request(method, parts.netloc, path, body, headers or {}))
        async with asyncio.timeout(WAIT_S):
            await writer.drain()
        yield Call(reader, writer)
    finally:
        writer.close()
        try:
            async with asyncio.timeout(WAIT_S):
                await writer.wait_closed()
        except ConnectionError:
            pass


def _request(method: str, host: str, path: str, body: Body, headers: Mapping[str, str]) -> bytes:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {len(content)}"]
    lines += ["content-type: application/json", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def bearer(key: str, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """The header that shows a key, and others."""
    return {"authorization": f"Bearer {key}", **(headers or {})}


async def ask(url: str, path: str, *, method: str = "GET", key: str = "", body: Body = None) -> Answer:
    """One request and its whole answer."""
    async with calling(url, path, method=method, body=body, headers=bearer(key) if key else {}) as call:
        return await call.answer()
