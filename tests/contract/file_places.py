"""Every implementation of the stores of files behind one way to open it, again and again, as the processes of a cell do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from obstore.store import MemoryStore
from tests.contract.admin_stand import ManualClock
from tests.s3_server import OPTIONS, s3_endpoint, s3_url

from weir.kept_files import FileStore
from weir.storage.file_bucket import FileBucket
from weir.storage.file_directory import FileDirectory
from weir.storage.file_memory import FileMemory

KINDS = ("memory", "directory", "bucket-memory", "bucket-folder", "bucket-s3")
KEY = "acme/files/file-1.data"


@dataclass
class FilePlace:
    """Where files are stored; every `opened` is another process's store on it."""

    kind: str
    directory: Path
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self._memory = FileMemory(self.clock.wall_ms)
        self._objects = MemoryStore()
        self._url = s3_url()

    def open(self) -> FileStore:
        """Another store on the same place; who opens it closes it."""
        match self.kind:
            case "directory":
                return FileDirectory(self.directory / "files")
            case "bucket-memory":
                return FileBucket(self._objects)
            case "bucket-folder":
                return FileBucket.from_url(f"file://{self.directory}/bucket")
            case "bucket-s3":
                return FileBucket.from_url(self._url, endpoint=s3_endpoint(), **OPTIONS)
            case _:
                return self._memory

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[FileStore]:
        """Another store on the same place, closed at the end."""
        store = self.open()
        try:
            yield store
        finally:
            await store.aclose()


async def stored(store: FileStore, *keys: str) -> None:
    """Files of these keys, whose content is the key."""
    for key in keys:
        assert await store.create(key, key.encode())


async def keys_in(store: FileStore, folder: str, after: str = "", limit: int = 10_000) -> list[str]:
    """The keys of one listing."""
    return [found.key for found in await store.files(folder, after, limit)]
