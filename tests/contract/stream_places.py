"""Every implementation of the stream stores behind one way to open it, again and again, as gateways of one cell do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from obstore.store import MemoryStore
from tests.contract.admin_stand import ManualClock
from tests.s3_server import OPTIONS, s3_endpoint, s3_url

from weir.kept_streams import StreamName, StreamStore, StreamWriter
from weir.storage.object_requests import ObjectClient
from weir.storage.stream_bucket import StreamBucket
from weir.storage.stream_directory import StreamDirectory
from weir.storage.stream_memory import StreamMemory

T = TypeVar("T")

KINDS = ("memory", "memory-deferred", "directory", "bucket-memory", "bucket-folder", "bucket-s3")
STREAM = StreamName("acme", "gen-1")
HEAD = b"head"


@dataclass
class StreamPlace:
    """Where streams are stored; every `opened` is another gateway's store on it."""

    kind: str
    directory: Path
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self._memory = StreamMemory(self.clock, deferred=self.kind == "memory-deferred")
        self._objects = MemoryStore()
        self._url = s3_url()

    def open(self) -> StreamStore:
        """Another store on the same place; who opens it closes it."""
        match self.kind:
            case "directory":
                return StreamDirectory(self.directory / "streams")
            case "bucket-memory":
                return StreamBucket(self._objects)
            case "bucket-folder":
                return StreamBucket.from_url(f"file://{self.directory}/bucket")
            case "bucket-s3":
                return StreamBucket.from_url(self._url, endpoint=s3_endpoint(), **OPTIONS)
            case _:
                return self._memory

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[StreamStore]:
        """Another store on the same place, closed at the end."""
        store = self.open()
        try:
            yield store
        finally:
            await store.aclose()


class FlakyObjects:
    """A client of objects whose next requests fail, by order: before they are carried out, or after."""

    def __init__(self, objects: ObjectClient) -> None:
        self._objects = objects
        self.failing: list[Exception] = []
        self.losing: list[Exception] = []
        self.puts: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._asked = asyncio.Condition()

    async def has_put(self, requests: int) -> None:
        """Wait until so many objects were asked to be stored."""
        async with self._asked, asyncio.timeout(10):
            await self._asked.wait_for(lambda: len(self.puts) >= requests)

    async def put_async(self, path: str, file: bytes, *, mode: Any) -> Any:
        async with self._asked:
            self.puts.append(path)
            self._asked.notify_all()
        await self.gate.wait()
        return await self._through(lambda: self._objects.put_async(path, file, mode=mode))

    async def get_async(self, path: str) -> Any:
        return await self._through(lambda: self._objects.get_async(path))

    async def head_async(self, path: str) -> Any:
        return await self._through(lambda: self._objects.head_async(path))

    async def delete_async(self, paths: str | Sequence[str]) -> Any:
        return await self._through(lambda: self._objects.delete_async(paths))

    def list(self, prefix: str, *, chunk_size: int) -> Any:
        return self._objects.list(prefix, chunk_size=chunk_size)

    async def list_with_delimiter_async(self, prefix: str | None = None) -> Any:
        return await self._through(lambda: self._objects.list_with_delimiter_async(prefix))

    async def _through(self, request: Callable[[], Awaitable[T]]) -> T:
        if self.failing:
            raise self.failing.pop(0)
        answer = await request()
        if self.losing:
            raise self.losing.pop(0)
        return answer


async def started(store: StreamStore, name: StreamName = STREAM, *segments: bytes) -> StreamWriter:
    """A stream with these segments stored; its writer is open."""
    writer = await store.create(name, HEAD, lambda _: None)
    for segment in segments:
        writer.append(segment)
    await writer.flush()
    return writer


async def ended(store: StreamStore, name: StreamName = STREAM, *segments: bytes) -> None:
    """A whole stream."""
    writer = await started(store, name, *segments)
    writer.close()
    await store.end(name, b"end")


async def all_of(store: StreamStore, name: StreamName = STREAM, cursor: int = 0) -> list[bytes]:
    """Every segment that is stored from a cursor on."""
    found: list[bytes] = []
    while True:
        segments, after = await store.read(name, cursor)
        if not segments:
            assert after == cursor
            return found
        found += segments
        cursor = after
