"""Tenants' files in memory, with the semantics of the durable stores: for the simulator, and for tests of what is above them.

One object is the store of all that share it, and outlives them. It must never accept what the others refuse.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, TypeAlias

from weir import errors
from weir.kept_files import StoredFile
from weir.storage.file_names import check_folder, check_key, check_range
from weir.units import Bytes, Millis

FileOperation: TypeAlias = Literal[
    "begin", "write", "commit", "create", "replace", "read", "find", "files", "folders", "delete"
]
FileFault: TypeAlias = Callable[[FileOperation], bool]
"""Asked before each operation; True: the store fails it."""


class MemoryFileWriter:
    """Gathers pieces; nobody sees them before `commit`."""

    def __init__(self, store: "FileMemory", key: str) -> None:
        self._store = store
        self._key = key
        self._pieces: list[bytes] | None = []

    async def write(self, content: bytes) -> None:
        """As the port says."""
        try:
            await self._store.turn("write")
        except errors.FileStoreUnavailable:
            self._pieces = None
            raise
        self._open_pieces().append(bytes(content))

    async def commit(self) -> bool:
        """As the port says."""
        pieces, self._pieces = self._open_pieces(), None
        await self._store.turn("commit")
        return self._store.add(self._key, b"".join(pieces))

    def _open_pieces(self) -> list[bytes]:
        if self._pieces is None:
            raise errors.FileStoreUnavailable("This file is written or given up already.")
        return self._pieces

    async def abort(self) -> None:
        """As the port says."""
        self._pieces = None


class FileMemory:
    """The port in memory. clock_ms: wall time. fault: makes the store fail; it may be exchanged at any time."""

    def __init__(self, clock_ms: Callable[[], Millis], *, fault: FileFault | None = None) -> None:
        self.fault = fault
        self._clock_ms = clock_ms
        self._files: dict[str, tuple[bytes, Millis]] = {}

    @property
    def keys(self) -> list[str]:
        """All there is, in order."""
        return sorted(self._files)

    async def begin(self, key: str) -> MemoryFileWriter:
        """As the port says."""
        check_key(key)
        await self.turn("begin")
        return MemoryFileWriter(self, key)

    async def create(self, key: str, content: bytes) -> bool:
        """As the port says."""
        check_key(key)
        await self.turn("create")
        return self.add(key, bytes(content))

    async def replace(self, key: str, content: bytes) -> None:
        """As the port says."""
        check_key(key)
        await self.turn("replace")
        self._files[key] = bytes(content), self._clock_ms()

    async def read(self, key: str, start: Bytes = 0, size: Bytes | None = None) -> bytes | None:
        """As the port says."""
        check_key(key)
        check_range(start, size)
        await self.turn("read")
        found = self._files.get(key)
        if found is None:
            return None
        return found[0][start:] if size is None else found[0][start : start + size]

    async def find(self, key: str) -> StoredFile | None:
        """As the port says."""
        check_key(key)
        await self.turn("find")
        return self._stored(key) if key in self._files else None

    async def files(self, folder: str, after: str = "", limit: int = 10_000) -> list[StoredFile]:
        """As the port says."""
        check_folder(folder)
        await self.turn("files")
        keys = sorted(key for key in self._files if key.rpartition("/")[0] == folder and key > after)
        return [self._stored(key) for key in keys[:limit]]

    async def folders(self) -> list[str]:
        """As the port says."""
        await self.turn("folders")
        return sorted({key.partition("/")[0] for key in self._files})

    async def delete(self, key: str) -> None:
        """As the port says."""
        check_key(key)
        await self.turn("delete")
        self._files.pop(key, None)

    async def aclose(self) -> None:
        """Nothing is held; others may share the store."""

    # ── for its writers ──────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, key: str, content: bytes) -> bool:
        """Store a file where there is none; False where there is one."""
        if key in self._files:
            return False
        self._files[key] = content, self._clock_ms()
        return True

    async def turn(self, operation: FileOperation) -> None:
        """Let others run, as every real store does. Raises FileStoreUnavailable by order."""
        await asyncio.sleep(0)
        if self.fault is not None and self.fault(operation):
            raise errors.FileStoreUnavailable("Files cannot be kept or read now.")

    def _stored(self, key: str) -> StoredFile:
        content, changed_ms = self._files[key]
        return StoredFile(key, len(content), changed_ms)
