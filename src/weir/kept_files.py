"""The port of tenants' files: what they upload, what their batches become, and the notes by which a batch survives a crash.

It is beside `ports` because gateways and batch workers use it, with a credential of its own that opens no database. A key is
two to four names joined by `/`: `a-z 0-9 . _ -`, at most 100 each, neither `.` nor `-` first; another one is a ValueError.
The first is a tenant's, or begins with `_` and is the platform's own. What is stored is bound by permissions:
nobody but the platform's own user can read it. In `weir.storage`: `file_directory`, `file_bucket` and `file_memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.units import Bytes, Millis


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a store knows of a file. changed_ms: wall time of its last write."""

    key: str
    size: Bytes
    changed_ms: Millis


class FileWriter(Protocol):
    """One new file on its way; its owner's, not for two tasks at once. Until `commit` nobody sees anything of it."""

    async def write(self, content: bytes) -> None:
        """Add bytes. Raises FileStoreUnavailable; then only `abort` may follow."""
        ...

    async def commit(self) -> bool:
        """Let it be there, whole and durable; False, and nothing changed, where a file of this key is there already.

        Raises FileStoreUnavailable; whether it is there is then not known.
        """
        ...

    async def abort(self) -> None:
        """Drop what was not committed. Idempotent; never raises."""
        ...


class FileStore(Protocol):
    """Files by key, shared by every process that is configured with the same place. Each call raises FileStoreUnavailable."""

    async def begin(self, key: str) -> FileWriter:
        """Write a new file in pieces, of any size in all."""
        ...

    async def create(self, key: str, content: bytes) -> bool:
        """Store a file that nobody has stored before; False, and nothing changed, where there is one. Durable on return."""
        ...

    async def replace(self, key: str, content: bytes) -> None:
        """Store a file in the place of what may be there; readers see one or the other, whole. Durable on return."""
        ...

    async def read(self, key: str, start: Bytes = 0, size: Bytes | None = None) -> bytes | None:
        """Its bytes from start, at most size of them; empty behind its end. None where there is no such file."""
        ...

    async def find(self, key: str) -> StoredFile | None:
        """One file, None where it is not there."""
        ...

    async def files(self, folder: str, after: str = "", limit: int = 10_000) -> Sequence[StoredFile]:
        """Files directly in a folder (one to three names joined by `/`), in the order of their keys, behind the key `after`."""
        ...

    async def folders(self) -> Sequence[str]:
        """The first names of all keys, in order."""
        ...

    async def delete(self, key: str) -> None:
        """It is not there any more. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go of the place; nothing else may be called."""
        ...
