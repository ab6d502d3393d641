"""Files and batches as their tenants see them: uploaded, listed, read, asked for, given up. Nothing is run here.

Everything lies below its tenant's own name in the store, and every call looks only there: what is another tenant's is not
found, and the applications of one tenant share. A file is there once its record is, a batch likewise. The bounds are exact at
one gateway; what several take in at the same time may be above them by no more than that.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from weir import errors
from weir.batches import file_keys
from weir.batches.kept_orders import BatchOrder, KeptOrders, order_name
from weir.batches.listing import stored_in
from weir.core.batches.batch_records import (
    BATCH_ID_PREFIX,
    FILE_ID_PREFIX,
    BatchEnd,
    BatchProgress,
    BatchRecord,
    CancelMark,
    FileRecord,
    OpenBatch,
    Purpose,
    id_pattern,
    new_id,
)
from weir.core.batches.batch_view import BatchView, view_of
from weir.core.batches.completion_window import window_ms
from weir.core.batches.demand_sum import DemandSum
from weir.core.batches.input_lines import InputBounds, InputLine, InputReader
from weir.core.batches.worst_case import refuse_unaffordable
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest
from weir.core.tenancy import Principal
from weir.kept_files import FileStore, FileWriter, StoredFile
from weir.ports import Clock, Entropy
from weir.units import Bytes, Millis

T = TypeVar("T")
ReadRequest = Callable[[str, bytes], InferenceRequest]
"""Endpoint and body of a line → its request. Raises a WeirError."""

MIBIBYTE = 1024 * 1024
ARRIVING_BYTES: Bytes = 64 * 1024
"""What of a file is checked and stored at once: on a thread, but while it is checked the event loop may have to wait for it."""
PIECE_BYTES: Bytes = 256 * 1024
"""What of a file is read at once."""
_READS_AT_ONCE = 32
_TOKEN_BYTES = 8
_RETRY_AFTER_MS: Millis = 1_000
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class DeskBounds:
    """What is taken in. Defaults carry their reason. file_days: for which a file is kept that nothing else was asked for."""

    file_bytes_max: Bytes = 200 * MIBIBYTE  # as OpenAI's
    tenant_bytes_max: Bytes = 10 * 1024 * MIBIBYTE  # of all files of a tenant, results included
    files_max: int = 10_000  # of a tenant: what one listing shows
    open_batches_max: int = 100  # of a tenant, not ended
    file_days: int = 30  # as OpenAI's
    uploads_max: int = 64  # at a time at one gateway: each holds a line and a piece
    tenant_uploads_max: int = 4  # of them, for one tenant
    lines: InputBounds = field(default_factory=InputBounds)


@dataclass(slots=True)
class _Room:
    """A tenant's files while some of them are on their way here. used: bytes there, as last looked up; arriving: by file."""

    used: Bytes = 0
    files: int = 0
    arriving: dict[str, Bytes] = field(default_factory=dict)

    def take(self, file_id: str, size: Bytes, limit: Bytes) -> None:
        """Count bytes of a file. Raises NotAllowedNow beyond the limit."""
        used = self.used + sum(self.arriving.values())
        if used + size > limit:
            raise errors.NotAllowedNow(
                f"The files of this tenant take {used} of {limit} bytes: delete some first.",
                members={"limit": limit, "used": used},
            )
        self.arriving[file_id] += size


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an upload goes, and by which bounds."""

    store: FileStore
    writer: FileWriter
    room: _Room
    bounds: DeskBounds
    read_request: ReadRequest
    tenant: str
    left: Callable[[], None]


class Upload:
    """A file on its way: each line is checked as it arrives, and stored. One task's. expires_after_s: until `finish`.

    `abort` must follow whatever happens; behind a `finish` that returned it does nothing.
    """

    def __init__(self, place: _Place, record: FileRecord, expires_after_s: int | None) -> None:
        self.expires_after_s = expires_after_s
        self._place = place
        self._record = record
        self._reader = InputReader(place.bounds.lines)
        self._demands = DemandSum()
        self._size: Bytes = 0
        self._pending = bytearray()
        self._is_open = True

    async def write(self, content: bytes) -> None:
        """Take in some bytes, in pieces of any size.

        Raises InvalidRequest for a line that is none, RequestTooLarge, NotAllowedNow where the tenant's files take too much, or
        FileStoreUnavailable.
        """
        self._size += len(content)
        limit = self._place.bounds.file_bytes_max
        if self._size > limit:
            raise errors.RequestTooLarge(f"The file exceeds {limit} bytes.", members={"limit_bytes": limit})
        self._place.room.take(self._record.id, len(content), self._place.bounds.tenant_bytes_max)
        self._pending += content  # small pieces would be joined to an unfinished line again and again
        if len(self._pending) >= ARRIVING_BYTES:
            await self._store_pending()

    async def _store_pending(self) -> None:
        piece = bytes(self._pending)
        self._pending.clear()
        await asyncio.to_thread(lambda: self._check(self._reader.feed(piece)))
        await self._place.writer.write(piece)

    def _check(self, lines: Iterable[InputLine]) -> None:
        """Count what lines ask for. One that is no request is accepted and counted under nothing: it ends in the error file."""
        for line in lines:
            request = None
            with suppress(errors.WeirError):
                request = self._place.read_request(line.url, line.body)
            if request is not None:
                self._count(line.number, request)

    def _count(self, number: int, request: InferenceRequest) -> None:
        try:
            self._demands.add(request)
        except errors.InvalidRequest as refused:  # which counts requests, and not the lines that are none
            members = {**refused.members, "line": number}
            raise errors.InvalidRequest(f"Line {number} asks for one model too many.", members=members) from refused

    async def finish(self) -> FileRecord:
        """The file is whole, and there. Raises what `write` raises."""
        place = self._place
        if self._pending:
            await self._store_pending()
        await asyncio.to_thread(lambda: self._check(self._reader.finish()))
        kept_s = place.bounds.file_days * _DAY_S if self.expires_after_s is None else self.expires_after_s
        record = msgspec.structs.replace(
            self._record,
            size=self._size,
            expires_ms=self._record.created_ms + 1_000 * kept_s,
            endpoint=self._reader.endpoint,
            lines=self._reader.lines,
            demands=self._demands.result(),
        )
        key = file_keys.file_record(place.tenant, record.id)
        if not (await place.writer.commit() and await place.store.create(key, msgspec.json.encode(record))):
            raise errors.InternalError("A file of this id is there already.")
        place.room.used += self._size
        place.room.files += 1
        self._leave()
        return record

    async def abort(self) -> None:
        """Drop it, whatever is there of it. Never raises."""
        if self._is_open:
            self._leave()
            await self._place.writer.abort()
            tenant, file_id = self._place.tenant, self._record.id
            with suppress(errors.FileStoreUnavailable):  # whether it is there is not known where the store failed at its end
                await self._place.store.delete(file_keys.file_record(tenant, file_id))
                await self._place.store.delete(file_keys.file_content(tenant, file_id))

    def _leave(self) -> None:
        self._is_open = False
        del self._place.room.arriving[self._record.id]
        self._place.left()


class BatchDesk:
    """One gateway's. read_request: the parsers of the endpoints, by which lines are counted."""

    def __init__(self, store: FileStore, clock: Clock, entropy: Entropy, bounds: DeskBounds, read_request: ReadRequest) -> None:
        self.bounds = bounds
        self._store = store
        self._orders = KeptOrders(store)
        self._clock = clock
        self._entropy = entropy
        self._read_request = read_request
        self._rooms: dict[str, _Room] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def arriving(self) -> int:
        """Files on their way here."""
        return sum(len(each.arriving) for each in self._rooms.values())

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def upload(self, principal: Principal, name: str, purpose: Purpose, expires_after_s: int | None) -> Upload:
        """Begin a file. purpose: BATCH. Raises QueueFull, NotAllowedNow where too many are there, FileStoreUnavailable."""
        assert purpose is Purpose.BATCH
        tenant, now_ms = principal.tenant, self._clock.wall_ms()
        file_id = self._new_id(FILE_ID_PREFIX)
        room = self._room_for_another(tenant, file_id)

        def left() -> None:
            if not room.arriving:
                self._rooms.pop(tenant, None)

        try:
            await self._look_up(tenant, room)
            writer = await self._store.begin(file_keys.file_content(tenant, file_id))
        except BaseException:
            del room.arriving[file_id]
            left()
            raise
        place = _Place(self._store, writer, room, self.bounds, self._read_request, tenant, left)
        record = FileRecord(file_id, purpose, name, 0, now_ms, now_ms, principal.application)
        return Upload(place, record, expires_after_s)

    def _room_for_another(self, tenant: str, file_id: str) -> _Room:
        """The tenant's, with this file on its way. Raises QueueFull."""
        room = self._rooms.get(tenant) or _Room()
        if self.arriving >= self.bounds.uploads_max or len(room.arriving) >= self.bounds.tenant_uploads_max:
            raise errors.QueueFull("Too many files are arriving at once.", retry_after_ms=_RETRY_AFTER_MS)
        self._rooms[tenant] = room
        room.arriving[file_id] = 0
        return room

    async def _look_up(self, tenant: str, room: _Room) -> None:
        """What the tenant has now. Raises NotAllowedNow where that is as much as may be."""
        found = await self._stored(file_keys.files_folder(tenant))
        room.used = sum(each.size for each in found)
        room.files = sum(each.key.endswith(".json") for each in found)
        limit, files = self.bounds.files_max, room.files + len(room.arriving) - 1
        if files >= limit:
            raise errors.NotAllowedNow(
                f"This tenant has {files} of {limit} files: delete some first.", members={"limit": limit, "used": files}
            )

    async def file(self, principal: Principal, file_id: str) -> FileRecord:
        """A file that has not expired. Raises NotFound, also for another tenant's, and FileStoreUnavailable."""
        record = await self._find_file(principal.tenant, file_id)
        if record is None:
            raise errors.NotFound("No file has this id.")
        return record

    async def files(
        self, principal: Principal, purpose: Purpose | None, after: str, limit: int, *, is_rising: bool
    ) -> tuple[Sequence[FileRecord], bool]:
        """Files by age, behind the id `after` where there is one, and whether more follow. purpose: None for any.

        Raises FileStoreUnavailable.
        """
        stored = await self._stored(file_keys.files_folder(principal.tenant))
        ids = _page_of((_id_in(each) for each in stored if each.key.endswith(".json")), after, is_rising=is_rising)
        found: list[FileRecord] = []
        for start in range(0, len(ids), _READS_AT_ONCE):
            group = ids[start : start + _READS_AT_ONCE]
            records = await asyncio.gather(*(self._find_file(principal.tenant, each) for each in group))
            found += [record for record in records if record is not None and purpose in (None, record.purpose)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    async def content(self, principal: Principal, file_id: str) -> tuple[FileRecord, AsyncGenerator[bytes, None]]:
        """A file, and its content in pieces, which raise FileStoreUnavailable, also where it is deleted meanwhile.

        Raises what `file` raises.
        """
        record = await self.file(principal, file_id)
        return record, self._pieces(file_keys.file_content(principal.tenant, file_id), record.size)

    async def _pieces(self, key: str, size: Bytes) -> AsyncGenerator[bytes, None]:
        start = 0
        while start < size:
            piece = await self._store.read(key, start, min(PIECE_BYTES, size - start))
            if not piece:
                raise errors.FileStoreUnavailable("The file was deleted while it was read.")
            start += len(piece)
            yield piece

    async def delete_file(self, principal: Principal, file_id: str) -> None:
        """It is not there any more.

        Raises NotFound, FileStoreUnavailable, or NotAllowedNow for the input of a batch that has not ended.
        """
        tenant = principal.tenant
        async with self._turn(tenant):
            await self.file(principal, file_id)
            open_ids = _open_ids(await self._stored(file_keys.batches_folder(tenant)))
            for start in range(0, len(open_ids), _READS_AT_ONCE):
                group = open_ids[start : start + _READS_AT_ONCE]
                for record in await asyncio.gather(*(self._record(tenant, each) for each in group)):
                    if record is not None and record.input_file_id == file_id:
                        raise errors.NotAllowedNow(
                            f"Batch {record.id} reads this file: cancel it, or wait for its end.",
                            members={"accepted": "a file that no batch reads"},
                        )
            await self._store.delete(file_keys.file_record(tenant, file_id))
            await self._store.delete(file_keys.file_content(tenant, file_id))

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, principal: Principal, snapshot: Snapshot, order: BatchOrder, key: str | None = None) -> BatchView:
        """Ask for a batch, which a worker then runs; or, with the key of an order that is kept, for the batch that it became.

        Raises NotFound for the file, InvalidRequest, what an unaffordable file raises, NotAllowedNow where too many of the
        tenant's batches are open, RequestIdReused, FileStoreUnavailable: then it may be there or not.
        """
        tenant = principal.tenant
        window_ms(order.window)  # refused before anything is looked up
        async with self._turn(tenant):
            known = await self._orders.find(tenant, key, order) if key is not None else None
            view = await self._view(tenant, known) if known is not None else None
            if view is None:
                file = await self._input(principal, order)
                refuse_unaffordable(file, principal, snapshot)
                await self._refuse_too_many(tenant)
                batch_id = known or self._new_id(BATCH_ID_PREFIX)
                if key is not None and known is None:
                    batch_id = await self._orders.keep(tenant, key, order, batch_id)
                view = await self._begin(principal, order, file, batch_id, order_name(key) if key is not None else "")
            if key is not None and view.end is None:  # a mark without a batch goes after a day, and perhaps went just now
                await self._mark_open(view.record)
        return view

    async def _begin(self, principal: Principal, order: BatchOrder, file: FileRecord, batch_id: str, note: str) -> BatchView:
        now_ms = self._clock.wall_ms()
        record = BatchRecord(
            id=batch_id,
            tenant=principal.tenant,
            application=principal.application,
            key=principal.key,
            input_file_id=file.id,
            endpoint=file.endpoint,
            window=order.window,
            created_ms=now_ms,
            expires_ms=now_ms + window_ms(order.window),
            lines=file.lines,
            metadata=order.metadata,
            output_expires_s=order.output_expires_s,
            order=note,
        )
        # The mark first: without it nobody would run the batch; without the batch nobody minds the mark.
        await self._mark_open(record)
        is_first = await self._store.create(file_keys.batch_record(record.tenant, batch_id), msgspec.json.encode(record))
        return view_of(record, None, None, None) if is_first else await self.batch(principal, batch_id)

    async def _mark_open(self, record: BatchRecord) -> None:
        await self._store.create(file_keys.open_batch(record.id), msgspec.json.encode(OpenBatch(record.tenant)))

    async def _input(self, principal: Principal, order: BatchOrder) -> FileRecord:
        file = await self.file(principal, order.input_file_id)
        if file.purpose is not Purpose.BATCH:
            accepted = "the id of a file with purpose batch"
            members = {"field": "input_file_id", "accepted": accepted}
            raise errors.InvalidRequest("This file is no input of a batch.", members=members)
        if file.endpoint != order.endpoint:
            members = {"field": "endpoint", "accepted": file.endpoint}
            raise errors.InvalidRequest("The lines of the file are for another endpoint.", members=members)
        return file

    async def _refuse_too_many(self, tenant: str) -> None:
        used = len(_open_ids(await self._stored(file_keys.batches_folder(tenant))))
        limit = self.bounds.open_batches_max
        if used >= limit:
            raise errors.NotAllowedNow(
                f"{used} of {limit} batches of this tenant have not ended: wait for one, or cancel it.",
                members={"limit": limit, "used": used},
            )

    async def batch(self, principal: Principal, batch_id: str) -> BatchView:
        """A batch as it is now. Raises NotFound, also for another tenant's, and FileStoreUnavailable."""
        view = await self._view(principal.tenant, batch_id)
        if view is None:
            raise errors.NotFound("No batch has this id.")
        return view

    async def batches(self, principal: Principal, after: str, limit: int) -> tuple[Sequence[BatchView], bool]:
        """Batches, the youngest first, older than the id `after` where there is one, and whether more follow.

        Raises FileStoreUnavailable.
        """
        stored = await self._stored(file_keys.batches_folder(principal.tenant))
        ids = _page_of((_id_in(each) for each in stored if each.key.endswith(".json")), after, is_rising=False)
        views: list[BatchView] = []
        for start in range(0, min(len(ids), limit), _READS_AT_ONCE):
            group = ids[start : min(start + _READS_AT_ONCE, limit)]
            found = await asyncio.gather(*(self._view(principal.tenant, each) for each in group))
            views += [view for view in found if view is not None]
        return views, len(ids) > limit

    async def cancel(self, principal: Principal, batch_id: str) -> BatchView:
        """Give a batch up: lines that run end, none begins. Again is the same.

        Raises NotFound, FileStoreUnavailable, or NotAllowedNow for one that has ended.
        """
        view = await self.batch(principal, batch_id)
        if view.end is not None:
            raise errors.NotAllowedNow(
                f"The batch is {view.status.value}.",
                members={"state": view.status.value, "accepted": "a batch that has not ended"},
            )
        mark = msgspec.json.encode(CancelMark(self._clock.wall_ms()))
        await self._store.create(file_keys.batch_cancel(principal.tenant, batch_id), mark)
        return await self.batch(principal, batch_id)

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_id(self, prefix: str) -> str:
        return new_id(prefix, self._clock.wall_ms(), self._entropy.token(_TOKEN_BYTES))

    def _turn(self, tenant: str) -> asyncio.Lock:
        """What decides by what a tenant has waits for its turn, so that two never decide by the same."""
        lock = self._turns.get(tenant)
        if lock is None:
            lock = self._turns[tenant] = asyncio.Lock()
        return lock

    async def _stored(self, folder: str) -> Sequence[StoredFile]:
        """All of a folder, by key."""
        return [each async for each in stored_in(self._store, folder)]

    async def _read(self, key: str, kind: type[T]) -> T | None:
        content = await self._store.read(key)
        try:
            return None if content is None else msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError:
            raise errors.FileStoreUnavailable("What is recorded of it is damaged.") from None

    async def _find_file(self, tenant: str, file_id: str) -> FileRecord | None:
        if not re.fullmatch(id_pattern(FILE_ID_PREFIX), file_id):
            return None
        record = await self._read(file_keys.file_record(tenant, file_id), FileRecord)
        return record if record is not None and record.expires_ms > self._clock.wall_ms() else None

    async def _record(self, tenant: str, batch_id: str) -> BatchRecord | None:
        return await self._read(file_keys.batch_record(tenant, batch_id), BatchRecord)

    async def _view(self, tenant: str, batch_id: str) -> BatchView | None:
        if not re.fullmatch(id_pattern(BATCH_ID_PREFIX), batch_id):
            return None
        record = await self._record(tenant, batch_id)
        if record is None:
            return None
        progress, cancel, end = await asyncio.gather(
            self._read(file_keys.batch_progress(tenant, batch_id), BatchProgress),
            self._read(file_keys.batch_cancel(tenant, batch_id), CancelMark),
            self._read(file_keys.batch_end(tenant, batch_id), BatchEnd),
        )
        return view_of(record, progress, cancel, end)


def _id_in(stored: StoredFile) -> str:
    """What a key below a tenant's files or batches is about."""
    return stored.key.rpartition("/")[2].rpartition(".")[0]


def _open_ids(stored: Iterable[StoredFile]) -> list[str]:
    """Batches of a folder that have not ended."""
    batches = [(_id_in(each), each.key.rpartition(".")[2]) for each in stored]
    ended = {batch_id for batch_id, suffix in batches if suffix == "end"}
    return [batch_id for batch_id, suffix in batches if suffix == "json" and batch_id not in ended]


def _page_of(rising: Iterable[str], after: str, *, is_rising: bool) -> list[str]:
    """The ids behind `after` in this direction."""
    if is_rising:
        return [each for each in rising if each > after]
    return [each for each in reversed(list(rising)) if not after or each < after]
