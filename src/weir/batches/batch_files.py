"""A worker's view of the store: batches that are open, their input line by line, their progress, result files and ends."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from weir import errors
from weir.batches import file_keys
from weir.batches.line_log import LineLog, Lines, Told
from weir.batches.listing import stored_in
from weir.core.batches.batch_records import (
    BATCH_ID_PREFIX,
    FILE_ID_PREFIX,
    BatchCounts,
    BatchEnd,
    BatchFault,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    CancelMark,
    FileRecord,
    OpenBatch,
    Purpose,
)
from weir.core.batches.input_lines import InputLine, LineSplitter, read_line
from weir.kept_files import FileStore, FileWriter
from weir.ports import Clock
from weir.units import Bytes, Millis

_log = structlog.get_logger("weir.batches")
_READ_BYTES: Bytes = 128 * 1024  # the event loop waits while its lines are cut
_WRITE_BYTES: Bytes = 256 * 1024

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Results:
    """Ids of result files, where they have a line, and the lines in them."""

    output: str | None
    error: str | None
    counts: BatchCounts


class BatchFiles:
    """On one store. line_bytes_max: of an input line; kept_ms: for which result files stay.

    Raises FileStoreUnavailable, and of a batch whose notes are damaged BatchDamaged.
    """

    def __init__(self, store: FileStore, clock: Clock, line_bytes_max: Bytes, kept_ms: Millis) -> None:
        self.store = store
        self._clock = clock
        self._line_bytes_max = line_bytes_max
        self._kept_ms = kept_ms
        self._open: dict[str, BatchRecord | None] = {}  # by mark; None for one that cannot be read

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    async def open_batches(self) -> list[BatchRecord]:
        """Batches that have not ended, the oldest first. None changes, so each is read once.

        One that cannot be read stops no other; a mark without a batch, as of a crash, is left to the upkeep.
        """
        marks = [mark.key async for mark in stored_in(self.store, file_keys.OPEN_FOLDER)]
        self._open = {key: self._open[key] for key in marks if key in self._open}
        for key in marks:
            if key not in self._open:
                try:
                    record = await self._opened(key)
                except (msgspec.DecodeError, ValueError):  # as of a tenant whose name is none
                    _log.error("batch_unreadable", mark=key)
                    self._open[key] = None
                else:
                    if record is not None:
                        self._open[key] = record
        return [record for key in marks if (record := self._open.get(key)) is not None]

    async def _opened(self, key: str) -> BatchRecord | None:
        mark = await self.store.read(key)
        if mark is None:
            return None
        tenant = msgspec.json.decode(mark, type=OpenBatch).tenant
        content = await self.store.read(file_keys.batch_record(tenant, key.rpartition("/")[2]))
        return None if content is None else msgspec.json.decode(content, type=BatchRecord)

    async def has_ended(self, record: BatchRecord) -> bool:
        """Whether it has, by whichever worker."""
        return await self.store.find(file_keys.batch_end(record.tenant, record.id)) is not None

    async def clear(self, record: BatchRecord) -> None:
        """Of one that has ended only what its tenant sees remains. Its mark goes last: until then any worker would do this."""
        folder = file_keys.groups_folder(record.tenant, record.id)
        while page := await self.store.files(folder):
            for group in page:
                await self.store.delete(group.key)
        await self.store.delete(file_keys.open_batch(record.id))

    async def progress(self, record: BatchRecord) -> BatchProgress | None:
        """As it was last shown; of what cannot be read, that it was: it is shown anew."""
        try:
            return await self._read(file_keys.batch_progress(record.tenant, record.id), BatchProgress)
        except errors.BatchDamaged:
            return BatchProgress(BatchCounts(record.lines))

    async def is_cancelled(self, record: BatchRecord) -> bool:
        """Whether its tenant gave it up."""
        return await self.store.find(file_keys.batch_cancel(record.tenant, record.id)) is not None

    async def is_over(self, record: BatchRecord) -> bool:
        """Whether nothing of it begins any more: its time has passed, or it was given up."""
        return self._clock.wall_ms() >= record.expires_ms or await self.is_cancelled(record)

    async def input_record(self, record: BatchRecord) -> FileRecord:
        """What is recorded of its input. Raises InvalidRequest where that is gone."""
        found = await self._read(file_keys.file_record(record.tenant, record.input_file_id), FileRecord)
        if found is None:
            raise _input_gone()
        return found

    async def lines(self, record: BatchRecord) -> AsyncGenerator[InputLine, None]:
        """Its input, which was checked as it was uploaded. Raises InvalidRequest where that is gone, or is not what it was."""
        key, start, number = file_keys.file_content(record.tenant, record.input_file_id), 0, 0
        splitter = LineSplitter(self._line_bytes_max)
        while content := await self._input(key, start):
            start += len(content)
            for raw in splitter.feed(content):
                number += 1
                yield read_line(raw, number)
        for raw in splitter.finish():
            number += 1
            yield read_line(raw, number)

    async def _input(self, key: str, start: Bytes) -> bytes:
        content = await self.store.read(key, start, _READ_BYTES)
        if content is None:
            raise _input_gone()
        return content

    async def _read(self, key: str, kind: type[Record]) -> Record | None:
        content = await self.store.read(key)
        try:
            return msgspec.json.decode(content, type=kind) if content is not None else None
        except msgspec.DecodeError:
            raise errors.BatchDamaged("What is recorded of a batch is damaged.") from None

    # ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────

    async def show(self, record: BatchRecord, progress: BatchProgress) -> None:
        """How far it is."""
        await self.store.replace(file_keys.batch_progress(record.tenant, record.id), msgspec.json.encode(progress))

    async def write_results(self, record: BatchRecord, log: LineLog) -> Results | None:
        """Every line once, in the order in which they were told; None, and no file, where the batch has ended meanwhile.

        All lines are told. Who dies between two files is followed by another reading, and two workers may be here at once: the
        first of them claims the groups that it read, and nobody stores a file that was made of others.
        """
        groups: Sequence[str] = await log.groups()
        while True:
            output, error = (_ResultFile(self.store, record, is_error=is_error) for is_error in (False, True))
            try:
                lines = await self._write_lines(log, groups, output, error)
                # Behind the reading: groups are deleted only after an end, so that without one all of them were read.
                if await self.has_ended(record):
                    return None
                if len(lines.told) != record.lines:
                    raise errors.BatchDamaged("A line that was told is not there.")
                counted = await log.claim(groups)
                if counted == groups:
                    kept_ms = 1_000 * record.output_expires_s if record.output_expires_s is not None else self._kept_ms
                    now_ms, counts = self._clock.wall_ms(), BatchCounts(record.lines, lines.completed, lines.failed)
                    return Results(await output.finish(now_ms, kept_ms), await error.finish(now_ms, kept_ms), counts)
                groups = counted
            finally:
                await output.abort()
                await error.abort()

    async def _write_lines(self, log: LineLog, groups: Sequence[str], output: "_ResultFile", error: "_ResultFile") -> Lines:
        lines = Lines()
        async with aclosing(log.entries(groups)) as entries:
            async for entry in entries:
                if isinstance(entry, Told) and lines.add(entry):
                    await (error if entry.is_error else output).write(entry.text)
        return lines

    async def end(self, record: BatchRecord, status: BatchStatus, progress: BatchProgress, results: Results) -> bool:
        """Let it have ended so; False where it has ended already."""
        cancel = await self._read(file_keys.batch_cancel(record.tenant, record.id), CancelMark)
        end = BatchEnd(
            status=status,
            ended_ms=self._clock.wall_ms(),
            counts=results.counts,
            in_progress_ms=progress.in_progress_ms,
            finalizing_ms=progress.finalizing_ms,
            cancelling_ms=cancel.at_ms if cancel is not None and status is BatchStatus.CANCELLED else None,
            output=results.output,
            error=results.error,
        )
        return await self._end(record, end)

    async def fail(self, record: BatchRecord, fault: BatchFault) -> bool:
        """Let it have failed: nothing of it can be run, or had; False where it has ended already."""
        counts = BatchCounts(record.lines)
        return await self._end(record, BatchEnd(BatchStatus.FAILED, self._clock.wall_ms(), counts, faults=(fault,)))

    async def _end(self, record: BatchRecord, end: BatchEnd) -> bool:
        is_first = await self.store.create(file_keys.batch_end(record.tenant, record.id), msgspec.json.encode(end))
        await self.clear(record)
        return is_first


def _input_gone() -> errors.InvalidRequest:
    return errors.InvalidRequest("The input file is not there any more.", members={"field": "input_file_id"})


class _ResultFile:
    """Begun with its first line. Its id is the batch's own, so that it is written once whoever writes it."""

    def __init__(self, store: FileStore, record: BatchRecord, *, is_error: bool) -> None:
        self._store = store
        self._record = record
        self._kind = "error" if is_error else "output"
        self._id = f"{FILE_ID_PREFIX}{record.id.removeprefix(BATCH_ID_PREFIX)}{int(is_error)}"
        self._writer: FileWriter | None = None
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._size = self._lines = 0

    async def write(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._lines += 1
        if self._waiting_bytes >= _WRITE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._writer is None:
            self._writer = await self._store.begin(file_keys.file_content(self._record.tenant, self._id))
        await self._writer.write(b"".join(self._waiting))
        self._size += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0

    async def finish(self, now_ms: Millis, kept_ms: Millis) -> str | None:
        if not self._lines:
            return None
        await self._flush()
        assert self._writer is not None
        if not await self._writer.commit():  # whoever wrote it before may have died before its record
            there = await self._store.find(file_keys.file_content(self._record.tenant, self._id))
            self._size = there.size if there is not None else self._size
        record = FileRecord(
            id=self._id,
            purpose=Purpose.BATCH_OUTPUT,
            name=f"{self._record.id}_{self._kind}.jsonl",
            size=self._size,
            created_ms=now_ms,
            expires_ms=now_ms + kept_ms,
            application=self._record.application,
            endpoint=self._record.endpoint,
            lines=self._lines,
        )
        await self._store.create(file_keys.file_record(self._record.tenant, self._id), msgspec.json.encode(record))
        return self._id

    async def abort(self) -> None:
        if self._writer is not None:
            await self._writer.abort()
