"""What the lines of a batch became, in groups that are each written once: by it a batch goes on after any crash.

    made     the output of a line, before anything is charged for it
    told     the line that a result file gets, after that

A line whose output was made and not told is asked of the ledger: where its execution completed, it was charged for, and its
answer is made of what is here; else it runs again under the same request id. So a line is charged once and told once, and an
engine repeats at most what was in flight. Of two workers that told the same line, each believing the other one dead, the first
in the order of keys counts. A group that comes late may be the first: so who is about to store a result file claims the groups
that it was made of, once, and from then on these and no others count, in every reading.

What waits for a write is written in the next group: one write is under way at a time, however many lines end meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from weir import errors
from weir.batches.file_keys import counted_groups, groups_folder
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
    """What became of the lines so far. made: outputs of those that are not told, by line and generation."""

    told: set[int] = field(default_factory=set)
    failed: int = 0
    made: dict[int, dict[str, Made]] = field(default_factory=dict)

    @property
    def completed(self) -> int:
        """Lines with an answer."""
        return len(self.told) - self.failed

    def output_of(self, line: int, generation_id: str) -> Made | None:
        """What a generation made of a line; None where that is not known, or the line is told."""
        return self.made.get(line, {}).get(generation_id)

    def add(self, entry: Entry) -> bool:
        """Take an entry in its order; False for a line that was told before."""
        if entry.line in self.told:
            return False
        if isinstance(entry, Made):
            self.made.setdefault(entry.line, {})[entry.generation_id] = entry
            return True
        self.told.add(entry.line)
        self.failed += entry.is_error
        self.made.pop(entry.line, None)
        return True


class LineLog:
    """One batch's. worker: a name that no other life of a worker has.

    Raises FileStoreUnavailable, and of what is read BatchDamaged.
    """

    def __init__(self, store: FileStore, tenant: str, batch_id: str, worker: str) -> None:
        self._store = store
        self._folder = groups_folder(tenant, batch_id)
        self._counted = counted_groups(tenant, batch_id)
        self._worker = worker
        self._next = 0
        self._known: set[str] = set()  # groups that were read or written here
        self._reading = asyncio.Lock()
        self._waiting: list[tuple[Entry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def read(self) -> Lines:
        """What is there; what is added from now on comes behind it."""
        lines = Lines()
        await self.catch_up(lines)
        return lines

    async def catch_up(self, lines: Lines) -> None:
        """Add what other workers left since then: of every group that was neither read nor written here."""
        async with self._reading:
            for key in await self.groups():
                if key not in self._known:
                    for entry in await self._read(key):
                        lines.add(entry)
                    self._known.add(key)

    async def groups(self) -> Sequence[str]:
        """Keys of the groups that count, in order: those that were claimed, else all that are there."""
        keys = [group.key async for group in stored_in(self._store, self._folder)]
        return await self._claimed() if self._counted in keys else keys

    async def claim(self, groups: Sequence[str]) -> Sequence[str]:
        """Let these count from now on, and no others; what counts, which is what was claimed first."""
        if await self._store.create(self._counted, msgspec.json.encode(groups)):
            return groups
        return await self._claimed()

    async def _claimed(self) -> Sequence[str]:
        content = await self._store.read(self._counted)
        if content is None:  # or another worker has ended the batch meanwhile
            raise errors.BatchDamaged("It is gone which groups of lines count.")
        try:
            return msgspec.json.decode(content, type=list[str])
        except msgspec.DecodeError:
            raise errors.BatchDamaged("Which groups of lines count is damaged.") from None

    async def entries(self, groups: Sequence[str]) -> AsyncGenerator[Entry, None]:
        """Everything in these groups, in order; of the text of one group at a time."""
        for key in groups:
            for entry in await self._read(key):
                yield entry

    async def _read(self, key: str) -> list[Entry]:
        content = await self._store.read(key)
        self._next = max(self._next, int(key.rpartition("/")[2][:_NUMBER_DIGITS]) + 1)
        return _entries_in(content)

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
        key = f"{self._folder}/{number:0{_NUMBER_DIGITS}d}.{self._worker}"
        self._known.add(key)  # before it is there: what is written here is added by who writes it
        try:
            if not await self._store.create(key, content):
                raise errors.FileStoreUnavailable("A group of lines is stored already.")
        except errors.FileStoreUnavailable:
            self._known.discard(key)  # it may be there all the same
            raise


def _entries_in(content: bytes | None) -> list[Entry]:
    if content is None:  # or another worker has ended the batch meanwhile
        raise errors.BatchDamaged("A group of lines is gone.")
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError:
        raise errors.BatchDamaged("A group of lines is damaged.") from None


def _size_of(entry: Entry) -> Bytes:
    return len(entry.pieces if isinstance(entry, Made) else entry.text)
