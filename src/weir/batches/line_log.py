"""What the lines of a batch became, in groups that are each written once: by it a batch goes on after any crash.

    made     the output of a line, before anything is charged for it
    told     the line that a result file gets, after that

A line whose output was made and not told is asked of the ledger: where its execution completed, it was charged for, and its
answer is made of what is here; else it runs again under the same request id. So a line is charged once and told once, and an
engine repeats at most what was in flight. Of two workers that told the same line, each believing the other one dead, the first
in the order of keys counts, in every reading.

What waits for a write is written in the next group: one write is under way at a time, however many lines end meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from weir import errors
from weir.batches.file_keys import groups_folder
from weir.batches.listing import stored_in
from weir.kept_files import FileStore
from weir.units import Bytes

_GROUP_BYTES: Bytes = 8 * 1024 * 1024
_NUMBER_DIGITS = 9


class Made(msgspec.Struct, frozen=True, tag="made", array_like=True):
    """A line's output. pieces: as `pack_pieces` gives them."""

    line: int
    generation_id: str
    pieces: bytes


class Told(msgspec.Struct, frozen=True, tag="told", array_like=True):
    """A line of a result file. is_error: of the error file."""

    line: int
    is_error: bool
    text: bytes


Entry: TypeAlias = Made | Told
_decoder = msgspec.msgpack.Decoder(list[Entry])


@dataclass(slots=True)
class Lines:
    """What became of the lines so far. made: the last output of those that are not told."""

    told: set[int] = field(default_factory=set)
    failed: int = 0
    made: dict[int, Made] = field(default_factory=dict)

    @property
    def completed(self) -> int:
        """Lines with an answer."""
        return len(self.told) - self.failed

    def add(self, entry: Entry) -> bool:
        """Take an entry in its order; False for a line that was told before."""
        if entry.line in self.told:
            return False
        if isinstance(entry, Made):
            self.made[entry.line] = entry
            return True
        self.told.add(entry.line)
        self.failed += entry.is_error
        self.made.pop(entry.line, None)
        return True


class LineLog:
    """One batch's. worker: a name that no other life of a worker has. Raises FileStoreUnavailable."""

    def __init__(self, store: FileStore, tenant: str, batch_id: str, worker: str) -> None:
        self._store = store
        self._folder = groups_folder(tenant, batch_id)
        self._worker = worker
        self._next = 0
        self._waiting: list[tuple[Entry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def read(self) -> Lines:
        """What is there; what is added from now on comes behind it."""
        lines = Lines()
        async with aclosing(self.entries()) as entries:
            async for entry in entries:
                lines.add(entry)
        return lines

    async def find_made(self, line: int, generation_id: str) -> Made | None:
        """The output of a generation, as another worker may have left it."""
        async with aclosing(self.entries()) as entries:
            async for entry in entries:
                if isinstance(entry, Made) and (entry.line, entry.generation_id) == (line, generation_id):
                    return entry
        return None

    async def entries(self) -> AsyncGenerator[Entry, None]:
        """Everything, in order; of the text of one group at a time."""
        async with aclosing(stored_in(self._store, self._folder)) as groups:
            async for group in groups:
                content = await self._store.read(group.key)
                name = group.key.rpartition("/")[2]
                self._next = max(self._next, int(name[:_NUMBER_DIGITS]) + 1)
                for entry in _entries_in(content):
                    yield entry

    async def add(self, entry: Entry) -> None:
        """Durable on return."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, stored))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())
        await stored

    async def add_all(self, entries: Sequence[Entry]) -> None:
        """The same of many, in groups."""
        await asyncio.gather(*map(self.add, entries))

    async def _write_all(self) -> None:
        """Groups, until nothing waits."""
        try:
            while self._waiting:
                group = self._take_group()
                fault: Exception | None = None
                try:
                    await self._write([entry for entry, _ in group])
                except Exception as failed:  # whatever it is, nobody may wait for ever
                    fault = failed
                for _, stored in group:
                    if not stored.done():
                        stored.set_result(None) if fault is None else stored.set_exception(fault)
        finally:
            self._writing = None

    def _take_group(self) -> list[tuple[Entry, asyncio.Future[None]]]:
        size = taken = 0
        while taken < len(self._waiting) and (taken == 0 or size < _GROUP_BYTES):
            size += _size_of(self._waiting[taken][0])
            taken += 1
        group, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return group

    async def _write(self, entries: list[Entry]) -> None:
        content = msgspec.msgpack.encode(entries)
        number, self._next = self._next, self._next + 1
        if not await self._store.create(f"{self._folder}/{number:0{_NUMBER_DIGITS}d}.{self._worker}", content):
            raise errors.FileStoreUnavailable("A group of lines is stored already.")


def _entries_in(content: bytes | None) -> list[Entry]:
    if content is None:  # another worker has ended the batch meanwhile
        raise errors.FileStoreUnavailable("A group of lines is gone.")
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError:
        raise errors.FileStoreUnavailable("A group of lines is damaged.") from None


def _size_of(entry: Entry) -> Bytes:
    return len(entry.pieces if isinstance(entry, Made) else entry.text)
