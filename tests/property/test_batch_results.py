"""The result files of a batch, whoever writes them and whatever dies meanwhile: each line is in one of them, once."""

import asyncio
import itertools
from contextlib import suppress

import msgspec
import pytest
from tests.contract.admin_stand import ManualClock

from weir import errors
from weir.batches import file_keys
from weir.batches.batch_files import BatchFiles, Results
from weir.batches.line_log import LineLog, Told
from weir.core.batches.batch_records import BatchProgress, BatchRecord, BatchStatus
from weir.storage.file_memory import FileMemory

LINES = 3
RECORD = BatchRecord("batch_1", "acme", "app", "key", "file-1", "/v1/generations", "24h", 0, 10**15, LINES)
OPERATIONS = 24
"""More than it takes to write the files of this batch."""


class Stand:
    """A store with a batch whose lines are told, and a worker that is slow: what it writes comes late and sorts first."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.store = FileMemory(clock.wall_ms)
        self.files = BatchFiles(self.store, clock, 1_000, 1_000_000)
        self.slow = self.log("a-slow")

    def log(self, worker: str) -> LineLog:
        """A worker's."""
        return LineLog(self.store, RECORD.tenant, RECORD.id, worker)

    async def tell(self) -> LineLog:
        """All lines by one worker: the last one ends with an error."""
        log = self.log("worker")
        for line in range(1, LINES + 1):
            await log.add(Told(line, line == LINES, b"%d\n" % line))
        return log

    async def written(self, results: Results) -> list[bytes]:
        """The lines of both files."""
        names = [name for name in (results.output, results.error) if name is not None]
        return [line for name in names for line in (await self.content(name)).splitlines()]

    async def content(self, name: str) -> bytes:
        """Of a file."""
        content = await self.store.read(file_keys.file_content(RECORD.tenant, name))
        assert content is not None
        return content


@pytest.mark.parametrize("at", range(OPERATIONS))
@pytest.mark.parametrize("is_error", [False, True])
async def test_a_group_that_comes_late_changes_no_result(at: int, is_error: bool) -> None:
    """Protects lines that were paid for: a second try at the files after a death at any step is made of what the first was."""
    stand = Stand()
    log, operations = await stand.tell(), itertools.count()
    stand.store.fault = lambda operation: next(operations) >= at
    with suppress(errors.FileStoreUnavailable):
        await stand.files.write_results(RECORD, log)
    stand.store.fault = None
    for line in (1, LINES):
        await stand.slow.add(Told(line, is_error, b"%d\n" % line))
    results = await stand.files.write_results(RECORD, stand.log("next"))
    assert results is not None and sorted(await stand.written(results)) == [b"1", b"2", b"3"]
    assert results.counts.completed == len((await stand.content(results.output)).splitlines() if results.output else [])


@pytest.mark.parametrize("steps", range(OPERATIONS))
async def test_two_that_finish_at_once_store_one_reading(steps: int) -> None:
    """Protects the same where nobody died: one worker begins when the other one has gone so far, and a group came between."""
    stand = Stand()
    log = await stand.tell()
    first = asyncio.get_running_loop().create_task(stand.files.write_results(RECORD, log))
    for _ in range(steps):
        await asyncio.sleep(0)
    await stand.slow.add(Told(1, True, b"1\n"))
    second = await stand.files.write_results(RECORD, stand.log("other"))
    assert second is not None and await first == second
    assert sorted(await stand.written(second)) == [b"1", b"2", b"3"]


async def test_what_counted_is_deleted_with_the_groups() -> None:
    """Protects stores: of a batch that has ended nothing is left but what its tenant sees."""
    stand = Stand()
    results = await stand.files.write_results(RECORD, await stand.tell())
    assert results is not None
    counted = await stand.store.read(file_keys.counted_groups(RECORD.tenant, RECORD.id))
    assert counted is not None and len(msgspec.json.decode(counted)) == LINES
    await stand.files.end(RECORD, BatchStatus.COMPLETED, BatchProgress(results.counts), results)
    assert [key for key in stand.store.keys if key.startswith(file_keys.groups_folder(RECORD.tenant, RECORD.id))] == []
