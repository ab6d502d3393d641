"""What surfaces do with retained streams: make a client that keeps, show events again, and show what has ended as one answer.

A surface brings the shape of its events and nothing else. A stream that another surface made is not shown in this one's shape.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from weir import errors
from weir.api.door import Call
from weir.api.exchange import HttpExchange
from weir.api.generations import STREAM_HEADERS, generation_body
from weir.api.plain_answer import show
from weir.api.wire import Headers, id_headers, limit_headers
from weir.core.request import InferenceRequest
from weir.core.tenancy import Principal
from weir.gateway.client import ClientWatcher
from weir.gateway.kept_client import KeptClient, KeptShape, Manner
from weir.gateway.kept_reader import KeptReader, RecordOf
from weir.gateway.pipeline import Gateway, Replay
from weir.gateway.retention import RetentionDesk
from weir.messages import GenerationRecord, StandingView
from weir.units import Bytes, Nanos

T = TypeVar("T")
REPLAYED: Headers = [(b"weir-replayed", b"true")]


class KeptAnswers:
    """One surface's, on one gateway. surface: its name."""

    def __init__(self, gateway: Gateway, surface: str, shape: KeptShape) -> None:
        self._gateway = gateway
        self._surface = surface
        self._shape = shape

    def check(self, principal: Principal, field: str) -> None:
        """Raises UnsupportedField where nothing may be kept for this caller. field: which asks for it."""
        desk = self._gateway.retained
        if desk is None or desk.policy(principal.tenant) is None:
            raise errors.UnsupportedField("This tenant keeps no streams.", members={"field": field, "accepted": "false"})

    def kept(
        self, exchange: HttpExchange, request: InferenceRequest, *, is_background: bool = False
    ) -> tuple[KeptClient, InferenceRequest]:
        """The client that keeps for this exchange, and the request that it serves, whose events are made in any case."""
        manner = Manner.EVENTS if request.stream else Manner.BEGUN if is_background else Manner.WHOLE
        client = KeptClient(exchange, self._shape, manner, is_background=is_background)
        return client, replace(request, stream=True, retain=True)

    def replay(self, call: Call, *, stream: bool) -> Replay:
        """Answers a call whose request id has been served, as this call wants it."""

        async def replayed(record: GenerationRecord, standing: StandingView) -> bool:
            assert call.principal is not None
            reader = await self.find(call.principal, record)
            if reader is None:
                return False
            if stream:
                await self._show_events(call, reader, record, standing, -1, REPLAYED)
                return True
            pieces = await self.pieces(reader, record)
            rendered = await off_loop(lambda: self._shape.whole(pieces, record, standing))
            await show(call.exchange, rendered, REPLAYED)
            return True

        return replayed

    async def find(self, principal: Principal, record: GenerationRecord) -> KeptReader | None:
        """The stream of a generation; None where it was not kept, is no more, or is another surface's."""
        desk = self._gateway.retained
        if desk is None:
            return None
        reader = await desk.find(principal.tenant, record.generation_id, has_ended=record.finish_reason is not None)
        return reader if reader is not None and reader.meta.surface == self._surface else None

    async def pieces(self, reader: KeptReader, record: GenerationRecord) -> Sequence[bytes]:
        """All events of a generation that has ended. Raises QueueFull, StreamStoreUnavailable, also where they were deleted."""
        self._desk.check_room(reader.name.tenant)
        collected = _Collected()
        if not await self._desk.follow(reader, collected, self._shape, _told(record)):
            raise errors.StreamStoreUnavailable("The stream was deleted while it was read.")
        return collected.pieces

    async def show_events(self, call: Call, record: GenerationRecord, after: int, field: str) -> None:
        """The events behind `after`, until the end. Raises StreamNotRetained, with the record, or InvalidRequest.

        field: what the caller named the event with; -1: none was named.
        """
        assert call.principal is not None
        reader = await self.find(call.principal, record)
        if reader is None:
            raise _not_kept(call, record)
        self._desk.check_room(reader.name.tenant)
        await self._check_event(reader, after, field)
        standing = await self._gateway.standing(call.principal, record.alias)
        await self._show_events(call, reader.again(), record, standing, after, [])

    async def delete(self, call: Call, record: GenerationRecord) -> None:
        """Delete what is kept of a generation that has ended, whatever opens it.

        Raises StreamNotRetained, with the record, or NotAllowedNow while it runs.
        """
        desk, principal = self._gateway.retained, call.principal
        assert principal is not None
        if desk is None or not await desk.has(principal.tenant, record.generation_id):
            raise _not_kept(call, record)
        if record.finish_reason is None:
            raise errors.NotAllowedNow(
                "A stream is deleted when its generation has ended: cancel that first.",
                members={"state": record.status.value, "accepted": "an ended generation"},
            )
        await desk.delete(principal.tenant, record.generation_id)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _desk(self) -> RetentionDesk:
        assert self._gateway.retained is not None
        return self._gateway.retained

    def _may_read(self, principal: Principal) -> bool:
        """Whether the caller's credential still stands: what is revoked reads no further."""
        snapshot = self._gateway.inbox.snapshot
        return not snapshot.is_revoked(principal.tenant, principal.application, principal.key)

    async def _check_event(self, reader: KeptReader, after: int, field: str) -> None:
        """Raises InvalidRequest for an event that the stream does not have."""
        if after < 0:
            return
        ending = await reader.ending()
        while await reader.more():
            pass
        known = reader.events if ending is None else ending[0] + ending[1].count(b"\n\n")
        if after >= known:
            accepted = f"0 to {known - 1}" if known else "absent: there is no event yet"
            raise errors.InvalidRequest("The stream has no such event.", members={"field": field, "accepted": accepted})

    async def _show_events(
        self,
        call: Call,
        reader: KeptReader,
        record: GenerationRecord,
        standing: StandingView,
        after: int,
        headers: Headers,
    ) -> None:
        exchange, principal = call.exchange, call.principal
        assert principal is not None
        self._desk.check_room(reader.name.tenant)
        await exchange.start(200, [*STREAM_HEADERS, *id_headers(record.request_id), *limit_headers(standing), *headers])
        tenant, request_id = reader.name.tenant, record.request_id

        async def record_now() -> GenerationRecord | None:
            found = (await self._gateway.inbox.lookup(tenant, request_id)).record
            return found if found is not None and found.generation_id == record.generation_id else None

        try:
            is_whole = await self._desk.follow(
                reader, exchange, self._shape, record_now, after, lambda: self._may_read(principal)
            )
        except (errors.StoreFault, errors.CoordinatorLost):
            is_whole = False
        if is_whole:
            await exchange.finish()
        else:
            exchange.abort()  # it can be resumed: nothing that was shown is wrong


async def off_loop(work: Callable[[], T]) -> T:
    """What reads a whole stream's JSON takes a while: on a thread."""
    return await asyncio.to_thread(work)


def _not_kept(call: Call, record: GenerationRecord) -> errors.StreamNotRetained:
    """There is nothing to show but the record."""
    call.take_id(record.request_id)
    detail = "The events of this request were not kept, or not for so long."
    return errors.StreamNotRetained(detail, members={"generation": generation_body(record)})


def _told(record: GenerationRecord) -> RecordOf:
    async def told() -> GenerationRecord:
        return record

    return told


class _Collected:
    """A client that takes everything at once."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.written: Bytes = 0
        self.read_ns: Nanos = 0
        self.unsent: Bytes = 0
        self.is_lost = False

    def watch(self, watcher: ClientWatcher | None) -> None:
        """There is nothing to watch."""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Headers are of no interest."""

    def write(self, body: bytes, events: int = 1) -> None:
        """Keep it, unless it is a comment."""
        if not body.startswith(b":"):
            self.pieces.append(body)

    async def finish(self, body: bytes = b"") -> None:
        """Nothing follows."""

    def abort(self) -> None:
        """What it was to get is gone."""
        self.is_lost = True
