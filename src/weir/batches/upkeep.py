"""Deletes what is over: files and batches whose time has come, what a crash left half, all of tenants that are no more."""

import msgspec

from weir.batches import file_keys
from weir.core.batches.batch_records import BatchRecord, FileRecord
from weir.gateway.inbox import Inbox
from weir.kept_files import FileStore
from weir.ports import Clock
from weir.units import Millis

_DAY_MS: Millis = 86_400_000
BATCH_DAYS = 30
"""For which a batch is shown after its end. Its files have times of their own."""


class Upkeep:
    """Of one store. inbox: whose snapshot says who is a tenant."""

    def __init__(self, store: FileStore, clock: Clock, inbox: Inbox) -> None:
        self._store = store
        self._clock = clock
        self._inbox = inbox
        self._deleted: set[str] = set()  # tenants that were no more at the last sweep

    async def sweep(self) -> None:
        """Once. Raises FileStoreUnavailable."""
        snapshot = self._inbox.snapshot
        if not snapshot.version or self._inbox.fresh_ms == 0 or self._inbox.is_lost:
            return  # who is a tenant is not known
        deleted = set()
        for tenant in await self._store.folders():
            owner = snapshot.tenants.get(tenant)
            if owner is None:
                continue  # another cell's, or the platform's own
            if owner.deleted:
                deleted.add(tenant)
                if tenant in self._deleted:  # twice in a row: a snapshot may be older for a moment
                    await self._delete_all(tenant)
            else:
                await self._sweep_files(tenant)
                await self._sweep_batches(tenant)
        self._deleted = deleted

    async def _sweep_files(self, tenant: str) -> None:
        now_ms = self._clock.wall_ms()
        inputs = await self._open_inputs(tenant)
        stored = {file.key: file for file in await self._store.files(file_keys.files_folder(tenant))}
        for key, file in stored.items():
            file_id = key.rpartition("/")[2].rpartition(".")[0]
            record_key = file_keys.file_record(tenant, file_id)
            if key == record_key:
                content = await self._store.read(key)
                record = msgspec.json.decode(content, type=FileRecord) if content is not None else None
                is_over = record is not None and record.expires_ms <= now_ms and file_id not in inputs
            else:  # content comes before its record: one that is old and has none was given up
                is_over = record_key not in stored and file.changed_ms + _DAY_MS <= now_ms
            if is_over:
                await self._store.delete(record_key)
                await self._store.delete(file_keys.file_content(tenant, file_id))

    async def _open_inputs(self, tenant: str) -> set[str]:
        """Input files of batches that have not ended."""
        inputs = set()
        for mark in await self._store.files(file_keys.OPEN_FOLDER):
            batch_id = mark.key.rpartition("/")[2]
            content = await self._store.read(file_keys.batch_record(tenant, batch_id))
            if content is not None:
                inputs.add(msgspec.json.decode(content, type=BatchRecord).input_file_id)
        return inputs

    async def _sweep_batches(self, tenant: str) -> None:
        now_ms = self._clock.wall_ms()
        for file in await self._store.files(file_keys.batches_folder(tenant)):
            batch_id, _, kind = file.key.rpartition("/")[2].rpartition(".")
            if kind == "end" and file.changed_ms + BATCH_DAYS * _DAY_MS <= now_ms:
                for key in (
                    file_keys.batch_record(tenant, batch_id),
                    file_keys.batch_progress(tenant, batch_id),
                    file_keys.batch_cancel(tenant, batch_id),
                    file_keys.batch_end(tenant, batch_id),
                ):
                    await self._store.delete(key)

    async def _delete_all(self, tenant: str) -> None:
        for mark in await self._store.files(file_keys.OPEN_FOLDER):
            batch_id = mark.key.rpartition("/")[2]
            if await self._store.find(file_keys.batch_record(tenant, batch_id)) is not None:
                await self._store.delete(mark.key)
        batches = await self._store.files(file_keys.batches_folder(tenant))
        names = {file.key.rpartition("/")[2].rpartition(".")[0] for file in batches}
        folders = [file_keys.groups_folder(tenant, name) for name in names]
        for folder in (*folders, file_keys.batches_folder(tenant), file_keys.files_folder(tenant)):
            for file in await self._store.files(folder):
                await self._store.delete(file.key)
