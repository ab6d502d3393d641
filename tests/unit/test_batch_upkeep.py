"""What the upkeep of files deletes, and what it never does."""

import msgspec
from tests.contract.admin_stand import ManualClock

from weir.batches import file_keys
from weir.batches.upkeep import Upkeep
from weir.core.batches.batch_records import BatchRecord, FileRecord, OpenBatch, Purpose
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Tenant
from weir.gateway.inbox import Inbox
from weir.storage.file_memory import FileMemory

DAY_MS = 86_400_000


class Stand:
    """A store with one tenant, and its upkeep."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FileMemory(self.clock.wall_ms)
        inbox = Inbox(self.clock)
        inbox.deliver(Snapshot(version=1, tenants={"acme": Tenant("acme")}))
        self.upkeep = Upkeep(self.store, self.clock, inbox)

    async def file(self, number: int, days: int = 30) -> str:
        """A file of so many days."""
        now_ms, file_id = self.clock.wall_ms(), f"file-{number:011x}"
        record = FileRecord(file_id, Purpose.BATCH, "in.jsonl", 1, now_ms, now_ms + days * DAY_MS, "app")
        await self.store.create(file_keys.file_content("acme", file_id), b"x")
        await self.store.create(file_keys.file_record("acme", file_id), msgspec.json.encode(record))
        return file_id

    async def batch(self, file_id: str, number: int) -> str:
        """An open batch that reads a file."""
        now_ms, batch_id = self.clock.wall_ms(), f"batch_{number:011x}"
        record = BatchRecord(batch_id, "acme", "app", "key", file_id, "/v1/generations", "168h", now_ms, now_ms, 1)
        await self.store.create(file_keys.open_batch(batch_id), msgspec.json.encode(OpenBatch("acme")))
        await self.store.create(file_keys.batch_record("acme", batch_id), msgspec.json.encode(record))
        return batch_id


async def test_of_many_files_none_is_taken_for_half_a_file() -> None:
    """Protects tenants' files: however long a listing is, none is parted there from its record and deleted as given up."""
    stand = Stand()
    await stand.store.create(file_keys.file_content("acme", "file-00000000000"), b"given up")
    for number in range(1, 5_002):
        await stand.file(number)
    stand.clock.now_ms += 2 * DAY_MS
    await stand.upkeep.sweep()
    assert len(stand.store.keys) == 2 * 5_001


async def test_the_input_of_any_open_batch_stays() -> None:
    """Protects batches: of many that are open each keeps its input, beyond the first page too."""
    stand = Stand()
    last = await stand.file(1, days=1)
    other = await stand.file(2, days=1)
    for number in range(10_001):
        await stand.store.create(file_keys.open_batch(f"batch_{number:011x}"), msgspec.json.encode(OpenBatch("globex")))
    await stand.batch(last, 20_000)
    stand.clock.now_ms += 1 * DAY_MS
    await stand.upkeep.sweep()
    assert file_keys.file_record("acme", last) in stand.store.keys
    assert file_keys.file_record("acme", other) not in stand.store.keys
    assert [key for key in stand.store.keys if key.startswith(file_keys.OPEN_FOLDER)] == [
        file_keys.open_batch(f"batch_{20_000:011x}")
    ], "marks that stand for nothing go after a day"


async def test_what_is_damaged_stops_nothing_else() -> None:
    """Protects the upkeep of all from one record: what cannot be read is passed over."""
    stand = Stand()
    over = await stand.file(9, days=1)
    await stand.store.create(file_keys.file_record("acme", f"file-{1:011x}"), b"{no")
    await stand.store.create(file_keys.open_batch(f"batch_{1:011x}"), b"{no")
    await stand.store.create(file_keys.open_batch(f"batch_{2:011x}"), msgspec.json.encode(OpenBatch("../up")))
    batch_id = await stand.batch(over, 3)
    await stand.store.replace(file_keys.batch_record("acme", batch_id), b"{no")
    stand.clock.now_ms += 2 * DAY_MS
    await stand.upkeep.sweep()
    assert file_keys.file_record("acme", over) not in stand.store.keys
