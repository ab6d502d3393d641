"""Retained streams in memory, with the semantics of the durable stores: for the simulator, and for tests of what is above them.

One object is the store of all gateways that share it, and outlives them. It must never accept what the others refuse.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from weir import errors
from weir.kept_streams import OnStored, StoredStream, StreamName
from weir.ports import Clock
from weir.storage.stream_framing import READ_BYTES, check_name
from weir.units import Bytes, Millis

StreamOperation: TypeAlias = Literal[
    "create", "append", "head", "read", "end", "ending", "find", "touch", "touched", "streams", "tenants", "delete"
]
StreamFault: TypeAlias = Callable[[StreamOperation], bool]
"""Asked before each operation; True: the store fails it."""


@dataclass(slots=True)
class _Kept:
    head: bytes
    changed_ms: Millis
    segments: list[bytes] = field(default_factory=list)
    last: bytes | None = None
    touched: int = 0

    def size(self) -> Bytes:
        return len(self.head) + sum(map(len, self.segments)) + len(self.last or b"")


class MemoryWriter:
    """Appends to a stream in memory: at once, or at the next turn of the event loop."""

    def __init__(self, store: "StreamMemory", kept: _Kept, on_stored: OnStored) -> None:
        self._store = store
        self._kept = kept
        self._on_stored = on_stored
        self._waiting: deque[bytes] = deque()
        self._stored = 0
        self._is_open = True
        self._settled = asyncio.Event()

    def append(self, segment: bytes) -> bool:
        """As the port says: True unless the store defers. Raises StreamStoreUnavailable."""
        assert segment, "a segment has a byte at least"
        if not self._is_open or not self._store.works("append"):
            self._is_open = False
            raise _unavailable()
        if not self._store.deferred:
            self._add(segment)
            return True
        if not self._waiting:
            self._settled.clear()
            asyncio.get_running_loop().call_soon(self._store_waiting)
        self._waiting.append(segment)
        return False

    def _add(self, segment: bytes) -> None:
        self._kept.segments.append(segment)
        self._kept.changed_ms = self._store.now_ms()

    def _store_waiting(self) -> None:
        self._is_open = self._is_open and self._store.works("append")
        self._settled.set()
        if self._is_open:
            while self._waiting:
                self._add(self._waiting.popleft())
                self._stored += 1
            self._on_stored(self._stored)
        else:
            self._on_stored(-1)

    @property
    def unstored(self) -> Bytes:
        """As the port says."""
        return sum(map(len, self._waiting))

    async def flush(self) -> None:
        """As the port says."""
        if self._waiting:
            await self._settled.wait()
        if not self._is_open:
            raise _unavailable()

    def close(self) -> None:
        """As the port says."""
        self._is_open = False


class StreamMemory:
    """The port in memory.

    deferred: `append` answers False, and stores at the next turn of the event loop. fault: makes the store fail.
    """

    def __init__(self, clock: Clock, *, poll_ms: Millis = 5, deferred: bool = False, fault: StreamFault | None = None) -> None:
        self.poll_ms = poll_ms
        self.deferred = deferred
        self._clock = clock
        self._fault = fault
        self._streams: dict[StreamName, _Kept] = {}

    def works(self, operation: StreamOperation) -> bool:
        """Whether the store does this now, by the fault that it was given."""
        return self._fault is None or not self._fault(operation)

    def now_ms(self) -> Millis:
        """Wall time of a write."""
        return self._clock.wall_ms()

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> MemoryWriter:
        """As the port says."""
        check_name(name)
        await self._turn("create")
        if name in self._streams:
            raise errors.StreamStoreUnavailable("A stream of this name is stored already.")
        self._streams[name] = _Kept(head, self.now_ms())
        return MemoryWriter(self, self._streams[name], on_stored)

    async def head(self, name: StreamName) -> bytes | None:
        """As the port says."""
        kept = await self._found("head", name)
        return kept.head if kept else None

    async def read(self, name: StreamName, cursor: int) -> tuple[Sequence[bytes], int]:
        """As the port says; a cursor is the number of segments before it."""
        kept = await self._found("read", name)
        segments: list[bytes] = []
        size = 0
        for segment in kept.segments[cursor:] if kept else ():
            size += len(segment)
            if segments and size > READ_BYTES:
                break
            segments.append(segment)
        return segments, cursor + len(segments)

    async def end(self, name: StreamName, last: bytes) -> bytes:
        """As the port says. Raises StreamStoreUnavailable also where the stream was deleted."""
        kept = await self._found("end", name)
        if kept is None:
            raise errors.StreamStoreUnavailable("The stream is not stored, or not any more.")
        if kept.last is None:
            kept.last, kept.changed_ms = last, self.now_ms()
        return kept.last

    async def ending(self, name: StreamName) -> bytes | None:
        """As the port says."""
        kept = await self._found("ending", name)
        return kept.last if kept else None

    async def find(self, name: StreamName) -> StoredStream | None:
        """As the port says."""
        kept = await self._found("find", name)
        return StoredStream(name, kept.size(), kept.changed_ms, kept.last is not None) if kept else None

    async def touch(self, name: StreamName) -> None:
        """As the port says."""
        if kept := await self._found("touch", name):
            kept.touched += 1

    async def touched(self, name: StreamName) -> int:
        """As the port says."""
        kept = await self._found("touched", name)
        return kept.touched if kept else 0

    async def streams(self, tenant: str) -> list[StoredStream]:
        """As the port says."""
        check_name(StreamName(tenant, "any"))
        await self._turn("streams")
        found = [
            StoredStream(name, kept.size(), kept.changed_ms, kept.last is not None)
            for name, kept in self._streams.items()
            if name.tenant == tenant
        ]
        return sorted(found, key=lambda stream: (stream.changed_ms, stream.name.generation))

    async def tenants(self) -> list[str]:
        """As the port says, in the order of names."""
        await self._turn("tenants")
        return sorted({name.tenant for name in self._streams})

    async def delete(self, name: StreamName) -> None:
        """As the port says."""
        check_name(name)
        await self._turn("delete")
        self._streams.pop(name, None)

    def lose_last(self, name: StreamName, segments: int) -> None:
        """What a broken disk does: the last segments of a stream are gone."""
        del self._streams[name].segments[-segments:]

    async def aclose(self) -> None:
        """Nothing is held; others may share the store."""

    async def _found(self, operation: StreamOperation, name: StreamName) -> _Kept | None:
        check_name(name)
        await self._turn(operation)
        return self._streams.get(name)

    async def _turn(self, operation: StreamOperation) -> None:
        """Let others run, as every real store does. Raises StreamStoreUnavailable by order."""
        await asyncio.sleep(0)
        if not self.works(operation):
            raise _unavailable()


def _unavailable() -> errors.StreamStoreUnavailable:
    return errors.StreamStoreUnavailable("Retained streams cannot be kept or read now.")
