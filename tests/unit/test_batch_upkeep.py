"""What the upkeep of files deletes, and what it never does."""

import msgspec
import pytest
from tests.contract.admin_stand import ManualClock

from weir import errors
from weir.batches import file_keys
from weir.batches.upkeep import ENDED_BATCHES_MAX, Upkeep
from weir.core.batches.batch_records import BatchCounts, BatchEnd, BatchRecord, BatchStatus, FileRecord, OpenBatch, Purpose
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Tenant
from weir.gateway.inbox import Inbox
from weir.storage.file_memory import FileMemory

DAY_MS = 86_400_000


class Stand:
    """A store with one tenant, and its upkeep."""

    def __init__(self, ended_max: int = ENDED_BATCHES_MAX) -> None:
        self.clock = ManualClock()
        self.store = FileMemory(self.clock.wall_ms)
        inbox = Inbox(self.clock)
        inbox.deliver(Snapshot(version=1, tenants={"acme": Tenant("acme")}))
        self.upkeep = Upkeep(self.store, self.clock, inbox, ended_max)

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

    async def end(self, batch_id: str) -> None:
        """It has ended, and something of it was left."""
        end = BatchEnd(BatchStatus.COMPLETED, self.clock.wall_ms(), BatchCounts(1, 1))
        await self.store.create(file_keys.batch_end("acme", batch_id), msgspec.json.encode(end))
        await self.store.create(file_keys.counted_groups("acme", batch_id), b"[]")
        await self.store.delete(file_keys.open_batch(batch_id))

    def left_of(self, batch_id: str) -> list[str]:
        """Its keys."""
        return [key for key in self.store.keys if batch_id in key]


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


async def test_of_many_batches_those_whose_end_is_longest_ago_go() -> None:
    """Protects the store and every listing from a tenant's ended batches, and each batch that has not ended from its age."""
    stand = Stand(ended_max=2)
    file_id = await stand.file(1)
    still_open, slow, *others = [await stand.batch(file_id, number) for number in range(1, 6)]
    for batch_id in (*others, slow):  # the last one to end was asked for before the others
        stand.clock.now_ms += 1_000
        await stand.end(batch_id)
    await stand.upkeep.sweep()
    assert [batch_id for batch_id in others if stand.left_of(batch_id)] == others[2:]
    assert len(stand.left_of(slow)) == len(stand.left_of(others[2])) == 3 and len(stand.left_of(still_open)) == 2
    stand.clock.now_ms += 31 * DAY_MS
    await stand.upkeep.sweep()
    assert stand.left_of(slow) == [] and len(stand.left_of(still_open)) == 2


async def test_records_are_read_once() -> None:
    """Protects a bucket from a request for each file in each minute: what was read is known, and still goes in its time."""
    stand, reads = Stand(), 0

    def count(operation: str) -> bool:
        nonlocal reads
        reads += operation == "read"
        return False

    files = [await stand.file(number, days=1 + number % 2) for number in range(20)]
    batch_id = await stand.batch(files[0], 1)
    stand.store.fault = count
    await stand.upkeep.sweep()
    assert reads == 20 - 1 + 2, "all but the input that is read, the mark and its batch"
    await stand.file(20)
    await stand.upkeep.sweep()
    assert reads == 21 + 1
    stand.clock.now_ms += DAY_MS
    await stand.upkeep.sweep()
    assert reads == 22 and [name for name in files if stand.left_of(name)] == [files[0], *files[1::2]]
    await stand.end(batch_id)
    await stand.upkeep.sweep()
    assert reads == 23 and not stand.left_of(files[0])


async def test_a_sweep_that_was_cut_off_is_gone_on_with() -> None:
    """Protects the same where the store fails now and then: what was read before the fault is not read again."""
    stand, reads = Stand(), 0

    def fails_at_ten(operation: str) -> bool:
        nonlocal reads
        reads += operation == "read"
        return operation == "read" and reads == 10

    for number in range(20):
        await stand.file(number)
    stand.store.fault = fails_at_ten
    with pytest.raises(errors.FileStoreUnavailable):
        await stand.upkeep.sweep()
    await stand.upkeep.sweep()
    assert reads == 21
