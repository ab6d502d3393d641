"""The client of a retained generation: what is written for it is kept first, and then goes to whoever is connected.

It stands between an answer and its HTTP exchange, so that relay and surfaces work as ever, and decides what a lost or slow
client means: the generation goes on. Three manners: a client reads the events; it waits for one answer at the end; or it is
answered as soon as the generation is admitted and goes its way. In all of them the answer writes events, and events are kept.

    write ─ seal ─ store ─ forward         an event is stored before anybody is shown it
    lost ─ grace ─ readers? ─ stop         nobody reads for the grace: the generation ends as `disconnect`
    slow ─ follow                          from here on this client is a reader like those that come later

A stream that can't be kept any further (the store fails, the tenant's bytes are used up) is cut: what was kept of it is
deleted, and it goes on for a client that is connected, as if it had not been retained; without one it ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import structlog

from weir import errors
from weir.gateway.client import Client, ClientWatcher, WholeAnswer
from weir.gateway.kept_reader import Follower, FollowParts, KeptReader, Reading, StreamMeta, StreamShape
from weir.gateway.sealing import StreamSeal
from weir.kept_streams import StreamName, StreamWriter
from weir.messages import GenerationRecord, StandingView
from weir.units import Bytes, Millis, Nanos

_log = structlog.get_logger("weir.gateway")


Headers = Sequence[tuple[bytes, bytes]]
_END_PAUSES_S = (0.1, 0.5)
_OF_STREAMS = (b"content-type", b"cache-control", b"x-accel-buffering")


class Manner(Enum):
    """What the client waits for."""

    EVENTS = "events"
    WHOLE = "whole"
    BEGUN = "begun"


class KeptShape(StreamShape, Protocol):
    """What a surface makes of its events for a client that does not read them."""

    def whole(self, pieces: Sequence[bytes], record: GenerationRecord, standing: StandingView | None) -> WholeAnswer:
        """A generation that has ended, as one answer. pieces: its whole stream."""
        ...

    def begun(self, first: bytes, headers: list[tuple[bytes, bytes]]) -> WholeAnswer:
        """A generation that goes on, as one answer. first: the events that it began with; headers: of ids and limits."""
        ...


class Budget(Protocol):
    """A tenant's bytes."""

    def take(self, tenant: str, size: Bytes) -> bool:
        """Count what is stored now; False where that is too much."""
        ...

    async def make_room(self, tenant: str) -> bool:
        """Delete what may be deleted; whether it fits now."""
        ...


@dataclass(frozen=True, slots=True)
class KeepParts:
    """What every retained generation of a gateway shares. spawn: runs a task of the gateway."""

    follow: FollowParts
    budget: Budget
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    on_cut: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Begun:
    """A stream whose head is stored. grace_ms: for which it goes on without a reader; None: to its end.

    whole_max: of an answer that is shown whole, as events. bytes_max: of all that its tenant keeps.
    """

    name: StreamName
    meta: StreamMeta
    seal: StreamSeal
    writer: StreamWriter
    grace_ms: Millis | None
    whole_max: Bytes
    bytes_max: Bytes


class KeptClient:
    """A Client in front of another. `begin` comes before anything is written; `expect_end` before the last events.

    is_background: the generation goes on to its end, whoever reads it.
    """

    def __init__(self, inner: Client, shape: KeptShape, manner: Manner, *, is_background: bool = False) -> None:
        self.written: Bytes = 0
        self.is_background = is_background
        self._inner = inner
        self._shape = shape
        self._manner = manner
        self._attached = True
        self._parts: KeepParts | None = None
        self._begun: Begun | None = None
        self._watcher: ClientWatcher | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._touched = 0
        self._opened = self._is_cut = self._is_relieving = False
        self._segments = self._events = self._stored = self._collected = self._kept = 0
        self._shown = 0  # events that were forwarded
        self._waiting: deque[tuple[bytes, int]] = deque()  # what is not stored yet, and how many events it has
        self._pieces: list[bytes] = []  # of an answer that is shown whole
        self._told: asyncio.Future[None] | None = None  # that it has begun
        self._behind: asyncio.Future[bool] | None = None  # whether it was shown everything
        self._record: GenerationRecord | None = None
        self._standing: StandingView | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._last: list[bytes] = []

    def begin(self, parts: KeepParts, begun: Begun) -> None:
        """From now on the generation outlives its client."""
        self._parts, self._begun = parts, begun

    def expect_end(self, record: GenerationRecord, standing: StandingView) -> None:
        """What is written from now on is the end of the stream."""
        self._record, self._standing = record, standing

    def on_stored(self, segments: int) -> None:
        """The store has so many segments now; -1: it will have no more."""
        if segments < 0:
            self._cut("store")
        while self._stored < segments and self._waiting:
            self._stored += 1
            self._forward(*self._waiting.popleft())
        if self._watcher is not None:
            self._watcher.client_writable()

    # ── the gateway's Client ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def read_ns(self) -> Nanos:
        """When the last byte of the request was read."""
        return self._inner.read_ns

    @property
    def is_lost(self) -> bool:
        """Whether nobody can ever read an answer."""
        return self._inner.is_lost and (self._begun is None or self._is_cut)

    @property
    def unsent(self) -> Bytes:
        """What holds the engine back: bytes that are not stored yet; what a client does not take is read from the store."""
        if self._begun is None or self._is_cut:
            return self._inner.unsent
        return self._begun.writer.unstored

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Tell this watcher when the generation is to end for want of a reader."""
        self._watcher = watcher
        self._inner.watch(self if watcher is not None else None)
        if watcher is None:
            self._let_go()
        elif self._inner.is_lost:
            self.client_lost()

    async def start(self, status: int, headers: Headers) -> None:
        """The headers of a stream go to a client that reads it; those of a plain answer to any."""
        self._opened = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
        self._headers = [header for header in headers if header[0] not in _OF_STREAMS]
        if not self._opened or self._manner is Manner.EVENTS:
            await self._inner.start(status, headers)

    def write(self, body: bytes, events: int = 1) -> None:
        """Whole events, or a comment, which nobody keeps."""
        if body.startswith(b":"):
            if self._manner is Manner.EVENTS and self._behind is None:
                self._inner.write(body)
            return
        self.written += len(body)
        if self._record is not None:
            self._last.append(body)
        else:
            self._keep(body, events)

    async def finish(self, body: bytes = b"") -> None:
        """Store the end, show it, and let go. A plain answer needs no stream: what is kept is its ending alone."""
        if self._opened:
            await self._end_stream()
            return
        if self._begun is not None and self._record is not None and not self._is_cut:
            self._last = [self._shape.closing(self._record, ())]
            await self._store_end(self._begun, self._last[0])
        await self._inner.finish(body)

    def abort(self) -> None:
        """Cut the connection."""
        self._inner.abort()

    # ── the connection's watcher ─────────────────────────────────────────────────────────────────────────────────────

    def client_lost(self) -> None:
        """The generation goes on for the grace, and then for as long as others read it."""
        if self._begun is None or self._is_cut:
            if self._watcher is not None:
                self._watcher.client_lost()
        elif self._attached:
            self._attached = False
            self._wait_for_readers()

    def client_blocked(self) -> None:
        """Noticed when there is more to write."""
        if self._is_cut and self._watcher is not None:
            self._watcher.client_blocked()

    def client_writable(self) -> None:
        """The same."""
        if self._is_cut and self._watcher is not None:
            self._watcher.client_writable()

    def client_not_kept(self) -> None:
        """An exchange never says so."""

    def _wait_for_readers(self) -> None:
        assert self._begun is not None and self._parts is not None
        if self._begun.grace_ms is not None and self._watcher is not None:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._begun.grace_ms / 1e3, lambda: self._spawn(self._look_for_readers()))

    async def _look_for_readers(self) -> None:
        """The grace is over: it begins again where somebody read within it, here or elsewhere."""
        assert self._begun is not None and self._parts is not None
        follow, name = self._parts.follow, self._begun.name
        try:
            touched = await follow.store.touched(name)
        except errors.StreamStoreUnavailable:
            touched = self._touched
        if follow.wakes.readers(name) or touched != self._touched:
            self._touched = touched
            self._wait_for_readers()
        elif self._watcher is not None:
            self._watcher.client_lost()

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, body: bytes, events: int) -> None:
        begun = self._begun
        if begun is None or self._is_cut:
            self._forward(body, events)
            return
        segment = begun.seal.seal(self._segments, body)
        try:
            is_stored = begun.writer.append(segment)
        except errors.StreamStoreUnavailable:
            self._cut("store")
            self._forward(body, events)
            return
        self._segments += 1
        self._events += events
        if is_stored:
            self._stored += 1
            self._forward(body, events)
        else:
            self._waiting.append((body, events))
        self._kept += len(segment)
        assert self._parts is not None
        if self._kept > begun.bytes_max:  # by itself: no look makes room for it
            self._cut("bytes")
        elif not self._parts.budget.take(begun.name.tenant, len(segment)) and not self._is_relieving:
            self._is_relieving = True
            self._spawn(self._relieve(begun.name.tenant))

    async def _relieve(self, tenant: str) -> None:
        assert self._parts is not None
        fits = await self._parts.budget.make_room(tenant)
        self._is_relieving = False
        if not fits:
            self._cut("bytes")

    def _cut(self, reason: str) -> None:
        """Nothing more can be kept, and half a stream is of no use."""
        if self._is_cut or self._begun is None or self._parts is None:
            return
        self._is_cut = True
        _log.warning("retained_stream_cut", reason=reason, tenant=self._begun.name.tenant)
        self._parts.on_cut(reason)
        self._begun.writer.close()
        self._spawn(self._delete(self._begun.name))
        while self._waiting:
            self._forward(*self._waiting.popleft())
        if self._watcher is not None and (self._manner is Manner.BEGUN or self._behind is not None or not self._attached):
            if reason == "store":
                self._watcher.client_not_kept()
            else:
                self._watcher.client_lost()
        if self._behind is not None:
            self._inner.abort()

    async def _delete(self, name: StreamName) -> None:
        assert self._parts is not None
        try:
            await self._parts.follow.store.delete(name)
        except errors.StreamStoreUnavailable:
            return  # its time runs out in any case

    # ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, body: bytes, events: int) -> None:
        """What is stored goes to who reads it."""
        if self._parts is not None and self._begun is not None:
            self._parts.follow.wakes.wake(self._begun.name)
        if self._manner is Manner.EVENTS:
            if self._behind is None and self._attached:
                if not self._is_cut and self._parts is not None and self._inner.unsent > self._parts.follow.buffer:
                    self._fall_behind()
                else:
                    self._inner.write(body)
                    self._shown += events
        elif self._manner is Manner.WHOLE:
            self._collect(body)
        elif self._shown == 0:
            self._shown = 1
            self._told = asyncio.get_running_loop().create_future()
            self._spawn(self._tell_begun(self._shape.begun(body, self._headers), self._told))

    def _collect(self, body: bytes) -> None:
        """For an answer that is shown whole; one that is longer than any that was asked for is given up."""
        self._pieces.append(body)
        self._collected += len(body)
        if self._begun is not None and self._collected > self._begun.whole_max:
            self._inner.abort()
        if self._inner.is_lost:
            self._pieces.clear()

    def _fall_behind(self) -> None:
        """A client that takes too little reads from the store, at its own pace, and is dropped where it takes nothing."""
        assert self._parts is not None and self._begun is not None
        self._behind = asyncio.get_running_loop().create_future()
        follow = self._parts.follow
        reader = KeptReader(follow.store, follow.entropy, self._begun.name, self._begun.seal, self._begun.meta)
        follower = Follower(follow, reader, self._inner, self._shape, Reading(self._shown - 1, follow.keep_alive_ms))
        self._spawn(self._follow(follower, self._behind))

    async def _follow(self, follower: Follower, over: asyncio.Future[bool]) -> None:
        is_whole = False
        try:
            is_whole = await follower.run()
        except errors.StreamStoreUnavailable:
            self._inner.abort()
        finally:
            if not over.done():
                over.set_result(is_whole)

    async def _tell_begun(self, answer: WholeAnswer, told: asyncio.Future[None]) -> None:
        try:
            await self._answer(answer)
        finally:
            if not told.done():
                told.set_result(None)

    async def _answer(self, answer: WholeAnswer) -> None:
        await self._inner.start(answer.status, answer.head())
        await self._inner.finish(answer.body)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _end_stream(self) -> None:
        last = b"".join(self._last)
        begun = self._begun
        ours = True
        if begun is not None and not self._is_cut:
            ours = await self._store_end(begun, last)
        if not ours and self._manner is not Manner.BEGUN:
            self._inner.abort()  # it was ended elsewhere, while this process was taken for dead: not two different ends
        elif self._behind is not None:
            if await self._behind:
                await self._inner.finish()
            else:
                self._inner.abort()
        elif self._manner is Manner.EVENTS:
            self._inner.write(last)
            await self._inner.finish()
        elif self._manner is Manner.WHOLE:
            await self._show_whole(last)
        elif self._told is not None:
            await self._told

    async def _store_end(self, begun: Begun, last: bytes) -> bool:
        """Whether this is how it ends; True also where it was cut instead."""
        assert self._parts is not None
        sealed = begun.seal.seal_end(self._events, last, self._parts.follow.entropy)
        try:
            await begun.writer.flush()
        except errors.StreamStoreUnavailable:
            self._cut("store")
            return True
        stored = await self._tried_end(begun.name, sealed)
        if stored is None:
            if self._behind is not None:  # it waits in the store for an end
                self._inner.abort()
            return True
        self._parts.budget.take(begun.name.tenant, len(sealed))
        self._parts.follow.wakes.wake(begun.name)
        return stored == sealed

    async def _tried_end(self, name: StreamName, sealed: bytes) -> bytes | None:
        """What is stored as the end; None where that fails again and again: readers then end it by its record."""
        assert self._parts is not None
        for pause_s in (*_END_PAUSES_S, None):
            try:
                return await self._parts.follow.store.end(name, sealed)
            except errors.StreamStoreUnavailable:
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
        _log.warning("retained_stream_without_end", tenant=name.tenant)
        self._parts.on_cut("end")
        return None

    async def _show_whole(self, last: bytes) -> None:
        assert self._record is not None
        await self._answer(self._shape.whole([*self._pieces, last], self._record, self._standing))

    def _let_go(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        if self._begun is not None:
            self._begun.writer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._parts is not None
        self._parts.spawn(work)
