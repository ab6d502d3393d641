"""A tap in front of an engine, on a free port and a thread of its own: it passes every byte on and keeps what was asked.

So a test sees what an engine was sent, byte for byte, and the engine stays the real one. It changes nothing.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived. raw: head and body; headers: by lower-case name."""

    path: str
    headers: dict[str, str]
    body: bytes
    raw: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The body as an object."""
        return msgspec.json.decode(self.body, type=dict[str, Any])


class EngineTap:
    """Context manager around the tap. asked: every request since it started, in order of arrival."""

    def __init__(self, engine_url: str) -> None:
        self._engine = urlsplit(engine_url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-tap", daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._served: set[asyncio.Task[Any]] = set()
        self.asked: list[Asked] = []
        self.url = ""

    @property
    def generations(self) -> list[Asked]:
        """The requests that generate something."""
        return [asked for asked in self.asked if asked.path.endswith("/completions")]

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._served:
            await asyncio.wait(self._served, timeout=WAIT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.add(task)
        self._writers.add(writer)
        try:
            from_engine, to_engine = await asyncio.open_connection(self._engine.hostname, self._engine.port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_back(from_engine, writer))
                await self._pass_on(reader, to_engine)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            self._served.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, to_engine: asyncio.StreamWriter) -> None:
        """Requests, one after the other, until either side closes."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:  # ends with the connection
                head = await reader.readuntil(b"\r\n\r\n")
                line, *fields = head.decode("latin-1").rstrip("\r\n").split("\r\n")
                headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.asked.append(Asked(line.split(" ")[1], headers, body, head + body))
                to_engine.write(head + body)
                await to_engine.drain()
        to_engine.close()


async def _pass_back(from_engine: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as they come, until either side closes."""
    with suppress(ConnectionError):
        while piece := await from_engine.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()
