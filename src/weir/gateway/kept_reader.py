"""Reading a retained stream: its events from any one on, as they were delivered, while it runs and after.

An event's number is its place in the stream, which is also what its surface calls it. Readers in the process that makes a
stream are woken by it (`Wakes`); others ask its store again and again. What a dead gateway left without an end gets one from
the record, once, and then that is the stream's end for everybody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from weir import errors
from weir.core.endings import FinishReason
from weir.gateway.client import Client
from weir.gateway.sealing import StreamSeal
from weir.kept_streams import StreamName, StreamStore
from weir.messages import GenerationRecord
from weir.ports import Clock, Entropy
from weir.units import Bytes, Millis, Nanos, ns_from_ms

EVENT_END = b"\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
OWNER_ENDS_MS: Millis = 30_000
LOST_OWNER_ENDS_MS: Millis = 3_000
"""For so long after a record is terminal its gateway may still be about to write the end; later it is taken for dead.

It waits for the settlement and for its store, each in seconds. Of one whose session was lost, which its record tells, it is not
expected."""
_WAIT_MS_MAX: Millis = 800
"""Readers look so often at whether they may still read: a revocation is to end them within a second."""
READERS_MAX = 512
READERS_PER_TENANT_MAX = 128
"""Of one gateway, at the same time: each asks the store some times a second."""
_RECORD_EVERY_MS: Millis = 1_000
_RETRY_MS: Millis = 1_000
_POLLS_SLOWEST = 8
"""A reader that is woken by nobody asks ever less often, to so many times the store's interval, until there is more."""
_DRAIN_POLL_S = 0.05


class StreamMeta(msgspec.Struct, frozen=True):
    """What a stream's head says, sealed."""

    surface: str


class StreamShape(Protocol):
    """How a surface's events look, as far as keeping them needs it."""

    def closing(self, record: GenerationRecord, pieces: Sequence[bytes]) -> bytes:
        """The last events of an ended generation that its gateway did not end. pieces: all its events so far; where there are
        none, all events of it."""
        ...


class Wakes:
    """Who reads which stream in this process, and is told when there is more of it. is_closed: nobody is to read on."""

    def __init__(self) -> None:
        self.is_closed = False
        self._waiting: dict[StreamName, set[asyncio.Event]] = {}

    def close(self) -> None:
        """Let every reader end where it is."""
        self.is_closed = True
        for name in self._waiting:
            self.wake(name)

    def wake(self, name: StreamName) -> None:
        """There is more of it, or it has ended."""
        if name in self._waiting:
            for waiter in self._waiting[name]:
                waiter.set()

    def readers(self, name: StreamName) -> int:
        """How many read it here."""
        return len(self._waiting.get(name, ()))

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull where one more reader would be one too many."""
        others = sum(len(waiting) for name, waiting in self._waiting.items() if name.tenant == tenant)
        if others >= READERS_PER_TENANT_MAX or sum(map(len, self._waiting.values())) >= READERS_MAX:
            raise errors.QueueFull("Too many readers follow retained streams here.", retry_after_ms=_RETRY_MS)

    def enter(self, name: StreamName) -> asyncio.Event:
        """A reader comes; it is told through this."""
        waiter = asyncio.Event()
        self._waiting.setdefault(name, set()).add(waiter)
        return waiter

    def leave(self, name: StreamName, waiter: asyncio.Event) -> None:
        """It is gone."""
        waiting = self._waiting[name]
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[name]


class KeptReader:
    """One reader's way through a stream. events: how many were read so far, apart from those of the end."""

    def __init__(self, store: StreamStore, entropy: Entropy, name: StreamName, seal: StreamSeal, meta: StreamMeta) -> None:
        self.name = name
        self.meta = meta
        self.events = 0
        self._store = store
        self._entropy = entropy
        self._seal = seal
        self._cursor = 0
        self._segments = 0

    async def more(self) -> list[bytes]:
        """What is stored behind what was read, in pieces of whole events. Raises StreamStoreUnavailable."""
        segments, self._cursor = await self._store.read(self.name, self._cursor)
        pieces = [self._seal.open(number, sealed) for number, sealed in enumerate(segments, self._segments)]
        self._segments += len(pieces)
        self.events += sum(piece.count(EVENT_END) for piece in pieces)
        return pieces

    def again(self) -> "KeptReader":
        """Another reader, from the beginning."""
        return KeptReader(self._store, self._entropy, self.name, self._seal, self.meta)

    async def ending(self) -> tuple[int, bytes] | None:
        """How many events come before the end, and the events of the end; None while it has none."""
        sealed = await self._store.ending(self.name)
        return None if sealed is None else self._seal.open_end(sealed)

    async def end_by(self, record: GenerationRecord, shape: StreamShape) -> tuple[int, bytes]:
        """End it after what was read, unless somebody did: how it ended. Raises StreamStoreUnavailable."""
        again, pieces = self.again(), list[bytes]()
        while again.events < self.events and (found := await again.more()):
            pieces += found
        last = shape.closing(record, pieces)
        sealed = self._seal.seal_end(self.events, last, self._entropy)
        return self._seal.open_end(await self._store.end(self.name, sealed))


@dataclass(frozen=True, slots=True)
class FollowParts:
    """What every follower of a gateway shares. buffer: bytes that may wait for a client; grace_ms: for how long they may."""

    store: StreamStore
    wakes: Wakes
    clock: Clock
    entropy: Entropy
    buffer: Bytes
    slow_client_grace_ms: Millis
    keep_alive_ms: Millis


RecordOf = Callable[[], Awaitable[GenerationRecord | None]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader may see and for how long. after: the last event that is not wanted, -1: all are.

    touch_ms: how often the stream is told that it has a reader. is_allowed: whether this one may read on.
    """

    after: int
    touch_ms: Millis
    is_allowed: Callable[[], bool] = lambda: True


class Follower:
    """Shows a stream to one client, to its end. Not before the client got its headers."""

    def __init__(self, parts: FollowParts, reader: KeptReader, client: Client, shape: StreamShape, reading: Reading) -> None:
        self._parts = parts
        self._reader = reader
        self._client = client
        self._shape = shape
        self._reading = reading
        self._number = 0  # of the next event that is read
        self._touched_ns: Nanos | None = None
        self._idle = 0
        self._asked_ns = self._written_ns = self._now()
        self._ended_ns: Nanos | None = None

    async def run(self, record_of: RecordOf | None = None) -> bool:
        """Whether everything was shown; False where the client is lost, may read no more, or the gateway closes.

        record_of: the generation's record as it is now; None where it is not to be asked, because whoever makes the stream is
        here. Raises StreamStoreUnavailable, also where the stream was deleted or has lost a part.
        """
        reader, waiter = self._reader, self._parts.wakes.enter(self._reader.name)
        try:
            while self._goes_on():
                waiter.clear()
                await self._touch()
                ending = await reader.ending()
                pieces = await reader.more()
                for piece in pieces:
                    if not await self._show(piece, ending[0] if ending is not None else None):
                        return False
                if pieces:
                    self._idle = 0
                    continue
                if ending is None and record_of is not None:
                    ending = await self._ending_by_record(record_of)
                if ending is not None:
                    if reader.events < ending[0]:
                        raise errors.StreamStoreUnavailable("The stored stream has lost its last events, or was deleted.")
                    return await self._show(ending[1])
                await self._wait(waiter)
            return False
        finally:
            self._parts.wakes.leave(reader.name, waiter)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> Nanos:
        return self._parts.clock.monotonic_ns()

    def _goes_on(self) -> bool:
        return not self._client.is_lost and not self._parts.wakes.is_closed and self._reading.is_allowed()

    async def _touch(self) -> None:
        now_ns = self._now()
        if self._touched_ns is None or now_ns - self._touched_ns >= ns_from_ms(self._reading.touch_ms):
            self._touched_ns = now_ns
            await self._parts.store.touch(self._reader.name)

    async def _show(self, piece: bytes, before: int | None = None) -> bool:
        """Write the wanted ones of a piece's events; False once the client is lost, or too slow. before: the first too many."""
        first = self._number
        events = piece.split(EVENT_END)[:-1]
        if before is not None:
            events = events[: max(0, before - first)]
        self._number += len(events)
        wanted = events[max(0, self._reading.after + 1 - first) :]
        if wanted:
            self._client.write(b"".join([event + EVENT_END for event in wanted]))
            self._written_ns = self._now()
        return await self._is_taken()

    async def _is_taken(self) -> bool:
        """Wait until little enough is left to be written; a client that takes nothing for a while is dropped."""
        left, since_ns = self._client.unsent, self._now()
        while self._goes_on() and self._client.unsent > self._parts.buffer:
            await asyncio.sleep(_DRAIN_POLL_S)
            await self._touch()
            if self._client.unsent < left:
                left, since_ns = self._client.unsent, self._now()
            elif self._now() - since_ns > ns_from_ms(self._parts.slow_client_grace_ms):
                self._client.abort()
        return self._goes_on()

    async def _ending_by_record(self, record_of: RecordOf) -> tuple[int, bytes] | None:
        """The end of a stream whose gateway is gone, made of its record; None while that is not known."""
        now_ns = self._now()
        if self._ended_ns is None and now_ns - self._asked_ns < ns_from_ms(_RECORD_EVERY_MS):
            return None
        self._asked_ns = now_ns
        record = await record_of()
        if record is None or await self._parts.store.head(self._reader.name) is None:
            self._client.abort()
            return None
        if record.finish_reason is None:
            return None
        if self._ended_ns is None:
            self._ended_ns = now_ns
        is_lost = record.finish_reason is FinishReason.COORDINATOR_LOST
        if now_ns - self._ended_ns < ns_from_ms(LOST_OWNER_ENDS_MS if is_lost else OWNER_ENDS_MS):
            return None
        return await self._reader.end_by(record, self._shape)

    async def _wait(self, waiter: asyncio.Event) -> None:
        self._idle = min(self._idle + 1, _POLLS_SLOWEST)
        try:
            async with asyncio.timeout(min(self._idle * self._parts.store.poll_ms, _WAIT_MS_MAX, self._reading.touch_ms) / 1e3):
                await waiter.wait()
        except TimeoutError:
            pass
        if self._now() - self._written_ns > ns_from_ms(self._parts.keep_alive_ms):
            self._client.write(KEEP_ALIVE)
            self._written_ns = self._now()
