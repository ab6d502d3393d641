"""Deletes what is over: files and batches whose time has come, what a crash left half, all of tenants that are no more."""

from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import structlog

from weir.batches import file_keys
from weir.batches.listing import stored_in
from weir.core.batches.batch_records import BatchRecord, FileRecord, OpenBatch
from weir.gateway.inbox import Inbox
from weir.kept_files import FileStore, StoredFile
from weir.ports import Clock
from weir.units import Millis

_log = structlog.get_logger("weir.batches")
T = TypeVar("T")
_DAY_MS: Millis = 86_400_000
BATCH_DAYS = 30
"""For which a batch is shown after its end. Its files have times of their own."""
ORDER_DAYS = BATCH_DAYS + 8
"""For which a key of an order stays that no batch takes along: longer than any batch, whose window is a week at most."""
ENDED_BATCHES_MAX = 10_000
"""Of a tenant: each is four notes that every listing of its batches reads the names of, so they may not grow without end."""
_REMEMBERED_MAX = 100_000
"""Records whose content is remembered, about 25 MB; of more, each is read in every sweep."""


class _Remembered(Generic[T]):
    """What records said, by key: a bounded number of them, for as long as each sweep asks for them."""

    def __init__(self) -> None:
        self._before: dict[str, T] = {}
        self._now: dict[str, T] = {}

    def get(self, key: str) -> T | None:
        """None where it has to be read."""
        value = self._now.get(key, self._before.get(key))  # the last sweep may have been cut off
        if value is not None:
            self.keep(key, value)
        return value

    def keep(self, key: str, value: T) -> None:
        """Remember it for the next sweep, if there is room."""
        if len(self._now) < _REMEMBERED_MAX:
            self._now[key] = value

    def forget(self) -> None:
        """A sweep is over: what it did not ask for is not there any more."""
        self._before, self._now = self._now, {}


class Upkeep:
    """Of one store. inbox: whose snapshot says who is a tenant. ended_max: batches of a tenant that are shown after their end.

    A sweep lists everything and reads what is new: records never change, and in a bucket each reading is a request.
    """

    def __init__(self, store: FileStore, clock: Clock, inbox: Inbox, ended_max: int = ENDED_BATCHES_MAX) -> None:
        self._store = store
        self._clock = clock
        self._inbox = inbox
        self._ended_max = ended_max
        self._deleted: set[str] = set()  # tenants that were no more at the last sweep
        self._expiries = _Remembered[Millis]()  # by key of a file's record
        self._inputs = _Remembered[str]()  # by mark of an open batch

    async def sweep(self) -> None:
        """Once. Raises FileStoreUnavailable."""
        snapshot = self._inbox.snapshot
        if not snapshot.version or self._inbox.fresh_ms == 0 or self._inbox.is_lost:
            return  # who is a tenant is not known
        deleted = set()
        # Before it is known which files are read: a batch that begins later took none that is over.
        now_ms = self._clock.wall_ms()
        inputs = await self._open_inputs()
        for tenant in await self._store.folders():
            owner = snapshot.tenants.get(tenant)
            if owner is None:
                continue  # another cell's, or the platform's own
            if owner.deleted:
                deleted.add(tenant)
                if tenant in self._deleted:  # twice in a row: a snapshot may be older for a moment
                    await self._delete_all(tenant)
            else:
                await self._sweep_files(tenant, inputs, now_ms)
                await self._sweep_batches(tenant)
        self._deleted = deleted
        self._expiries.forget()
        self._inputs.forget()

    async def _sweep_files(self, tenant: str, inputs: set[str], now_ms: Millis) -> None:
        stored = {file.key: file async for file in stored_in(self._store, file_keys.files_folder(tenant))}
        for key, file in stored.items():
            file_id = key.rpartition("/")[2].rpartition(".")[0]
            record_key = file_keys.file_record(tenant, file_id)
            if key == record_key:
                is_over = file_id not in inputs and await self._is_over(file, now_ms)
            else:  # content comes before its record: one that is old and has none was given up
                is_over = record_key not in stored and file.changed_ms + _DAY_MS <= now_ms
            if is_over:
                await self._store.delete(record_key)
                await self._store.delete(file_keys.file_content(tenant, file_id))

    async def _is_over(self, file: StoredFile, now_ms: Millis) -> bool:
        """Whether the time of a file with this record has come; of a record that is damaged, the longest there is."""
        expires_ms = self._expiries.get(file.key)
        if expires_ms is not None:
            return expires_ms <= now_ms
        content = await self._store.read(file.key)
        if content is None:
            return False
        try:
            expires_ms = msgspec.json.decode(content, type=FileRecord).expires_ms
        except msgspec.DecodeError:  # somebody may restore it, so it is read again
            _log.error("file_unreadable", key=file.key)
            return file.changed_ms + BATCH_DAYS * _DAY_MS <= now_ms
        self._expiries.keep(file.key, expires_ms)
        return expires_ms <= now_ms

    async def _open_inputs(self) -> set[str]:
        """Input files of batches that have not ended. What cannot be read nobody runs.

        A mark is written just before its batch: one that is old and has none stands for nothing, and goes.
        """
        inputs = set()
        async for mark in stored_in(self._store, file_keys.OPEN_FOLDER):
            known = self._inputs.get(mark.key)
            if known is not None:
                inputs.add(known)
                continue
            try:
                said = await self._store.read(mark.key)
                content = await self._batch_of(mark.key, said) if said is not None else None
                if content is not None:
                    known = msgspec.json.decode(content, type=BatchRecord).input_file_id
                    inputs.add(known)
                    self._inputs.keep(mark.key, known)
                elif said is not None and mark.changed_ms + _DAY_MS <= self._clock.wall_ms():
                    await self._delete_mark(mark.key, said)
            except (msgspec.DecodeError, ValueError):  # as of a tenant whose name is none
                _log.error("batch_unreadable", mark=mark.key)
        return inputs

    async def _delete_mark(self, mark: str, said: bytes) -> None:
        """Unless its batch comes just now, as where an order is sent again under its key after days."""
        await self._store.delete(mark)
        if await self._batch_of(mark, said) is not None:
            await self._store.create(mark, said)

    async def _batch_of(self, mark: str, said: bytes) -> bytes | None:
        """What is recorded of the batch of a mark that says this."""
        tenant = msgspec.json.decode(said, type=OpenBatch).tenant
        return await self._store.read(file_keys.batch_record(tenant, mark.rpartition("/")[2]))

    async def _sweep_batches(self, tenant: str) -> None:
        """Batches whose days are over, and, of too many that have ended, the first that ended; and keys that are left."""
        now_ms = self._clock.wall_ms()
        stored = [file async for file in stored_in(self._store, file_keys.batches_folder(tenant))]
        for file in stored:
            if file.key.endswith(".order") and file.changed_ms + ORDER_DAYS * _DAY_MS <= now_ms:
                await self._store.delete(file.key)
        ends = [file for file in stored if file.key.endswith(".end")]
        ends.sort(key=lambda end: (end.changed_ms, end.key))
        for place, end in enumerate(ends):
            if place < len(ends) - self._ended_max or end.changed_ms + BATCH_DAYS * _DAY_MS <= now_ms:
                await self._delete_batch(tenant, end.key.rpartition("/")[2].removesuffix(".end"))

    async def _delete_batch(self, tenant: str, batch_id: str) -> None:
        """Its key first, which could begin it again; its end last: until then the next sweep would do this."""
        content = await self._store.read(file_keys.batch_record(tenant, batch_id))
        with suppress(msgspec.DecodeError):  # then the key goes by its age
            order = msgspec.json.decode(content, type=BatchRecord).order if content is not None else ""
            if order:
                await self._store.delete(file_keys.batch_order(tenant, order))
        await self._delete_folder(file_keys.groups_folder(tenant, batch_id))
        for key in (
            file_keys.batch_record(tenant, batch_id),
            file_keys.batch_progress(tenant, batch_id),
            file_keys.batch_cancel(tenant, batch_id),
            file_keys.batch_end(tenant, batch_id),
        ):
            await self._store.delete(key)

    async def _delete_all(self, tenant: str) -> None:
        async for mark in stored_in(self._store, file_keys.OPEN_FOLDER):
            batch_id = mark.key.rpartition("/")[2]
            if await self._store.find(file_keys.batch_record(tenant, batch_id)) is not None:
                await self._store.delete(mark.key)
        batches = [file.key async for file in stored_in(self._store, file_keys.batches_folder(tenant))]
        for name in {key.rpartition("/")[2].rpartition(".")[0] for key in batches}:
            await self._delete_folder(file_keys.groups_folder(tenant, name))
        await self._delete_folder(file_keys.batches_folder(tenant))
        await self._delete_folder(file_keys.files_folder(tenant))

    async def _delete_folder(self, folder: str) -> None:
        async for file in stored_in(self._store, folder):
            await self._store.delete(file.key)
