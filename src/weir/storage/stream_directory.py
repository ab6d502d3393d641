"""Retained streams in a directory: for the gateways of one machine, or of a file system on which a write is seen at once.

    <root>/<tenant>/<generation>/head        appears whole; a folder without it is no stream (yet, or any more)
                                /segments    one behind the other, see `stream_framing`; a cursor is an offset in it
                                /end         appears whole, once

It decides in which order these appear and go, so that no reader sees half of a stream as a whole one. `append` is the only call
that writes on the event loop, since it lies on the path of every token: one system call into the page cache, 1 to 3 µs. What
was appended outlives the process at once, and the machine once the stream has ended. Below the root it never follows a link.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from weir import errors
from weir.kept_streams import OnStored, StoredStream, StreamName
from weir.storage.stream_framing import READ_BYTES, check_name, framed, is_name, segments_of, whole_bytes
from weir.units import NANOS_PER_MILLI, Bytes, Millis

HEAD, SEGMENTS, END, TOUCHED = "head", "segments", "end", "touched"
_NEW_HEAD, _NEW_END = ".head", ".end"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOUCH = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_TRIES = 16
"""Each time that a folder goes or is filled under a call, another one got on; that it happens so often is a fault."""

T = TypeVar("T")


class DirectoryWriter:
    """Appends to the segments of one stream. Where the stream was deleted meanwhile, it writes to what nobody reads."""

    __slots__ = ("_descriptor", "_size")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = 0

    def append(self, segment: bytes) -> bool:
        """Stored on return. Raises StreamStoreUnavailable; what was written of the segment is then taken back."""
        content = framed(segment)
        try:
            written = os.write(self._descriptor, content)
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError as fault:
            self._take_back()
            raise _unavailable(fault) from fault
        self._size += written
        return True

    def _take_back(self) -> None:
        """Best effort: readers skip a segment that is cut off anyway."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
        self.close()

    @property
    def unstored(self) -> Bytes:
        """Always 0: what was appended is stored."""
        return 0

    async def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class StreamDirectory:
    """The port on a directory, which is made (mode 0700) if it is absent. Raises StreamStoreUnavailable."""

    poll_ms: Millis = 50

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        with _faults():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> DirectoryWriter:
        """As the port says. A caller that is cancelled may have begun the stream all the same."""
        check_name(name)
        making = asyncio.get_running_loop().run_in_executor(None, self._create, name, head)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_unwanted)
            raise

    async def head(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await self._off_loop(lambda: self._content(name, HEAD))

    async def read(self, name: StreamName, cursor: int) -> tuple[Sequence[bytes], int]:
        """As the port says; a cursor is an offset in the file of segments."""
        check_name(name)
        return await self._off_loop(lambda: self._read(name, cursor))

    async def end(self, name: StreamName, last: bytes) -> bytes:
        """As the port says. Raises StreamStoreUnavailable also where the stream was deleted.

        Segments are on the disk before an end is, and the end on return.
        """
        check_name(name)
        return await self._off_loop(lambda: self._end(name, last))

    async def ending(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await self._off_loop(lambda: self._content(name, END))

    async def find(self, name: StreamName) -> StoredStream | None:
        """As the port says."""
        check_name(name)
        return await self._off_loop(lambda: self._find(name))

    async def touch(self, name: StreamName) -> None:
        """As the port says; a touch is the time of an empty file."""
        check_name(name)
        await self._off_loop(lambda: self._touch(name))

    async def touched(self, name: StreamName) -> int:
        """As the port says."""
        check_name(name)
        return await self._off_loop(lambda: self._touched(name))

    async def streams(self, tenant: str) -> list[StoredStream]:
        """As the port says."""
        check_name(StreamName(tenant, "any"))
        return await self._off_loop(lambda: self._streams(tenant))

    async def tenants(self) -> list[str]:
        """As the port says, in the order of names."""
        return await self._off_loop(self._tenants)

    async def delete(self, name: StreamName) -> None:
        """As the port says. Its folder goes too, and the tenant's if it is empty."""
        check_name(name)
        await self._off_loop(lambda: self._delete(name))

    async def aclose(self) -> None:
        """Nothing is held between two calls; writers are closed by who asked for them."""

    async def _off_loop(self, work: Callable[[], T]) -> T:
        with _faults():
            return await asyncio.to_thread(work)

    # ── on a thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _folder(self, *parts: str) -> Iterator[int]:
        """An open folder below the root.

        Raises FileNotFoundError where it is missing, and StreamStoreUnavailable where the root is: nothing is known then.
        """
        try:
            below = os.open(self._root, _FOLDER)
        except OSError as fault:
            raise _unavailable(fault) from fault
        try:
            for part in parts:
                above, below = below, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=below)
                os.close(above)
            yield below
        finally:
            os.close(below)

    def _create(self, name: StreamName, head: bytes) -> DirectoryWriter:
        with _faults():
            self._make_folder(name)
            try:
                with self._folder(name.tenant, name.generation) as folder:
                    writer = DirectoryWriter(os.open(SEGMENTS, _NEW, 0o600, dir_fd=folder))
                    try:
                        os.close(_write_new(folder, _NEW_HEAD, head))
                        os.rename(_NEW_HEAD, HEAD, src_dir_fd=folder, dst_dir_fd=folder)
                    except BaseException:
                        writer.close()
                        raise
                return writer
            except OSError:
                with suppress(OSError, errors.StreamStoreUnavailable):
                    self._delete(name)
                raise

    def _make_folder(self, name: StreamName) -> None:
        for _ in range(_TRIES):
            # Between the two, a delete of the tenant's last stream may take the tenant's folder.
            with self._folder() as root, suppress(FileExistsError):
                os.mkdir(name.tenant, 0o700, dir_fd=root)
            try:
                with self._folder(name.tenant) as tenant:
                    os.mkdir(name.generation, 0o700, dir_fd=tenant)
            except FileNotFoundError:
                continue
            except FileExistsError as taken:
                raise errors.StreamStoreUnavailable("A stream of this name is stored already.") from taken
            return
        raise errors.StreamStoreUnavailable("The folder of the tenant's streams does not stay.")

    def _content(self, name: StreamName, file: str) -> bytes | None:
        with suppress(FileNotFoundError), self._folder(name.tenant, name.generation) as folder:
            return _content(folder, file)
        return None

    def _read(self, name: StreamName, cursor: int) -> tuple[list[bytes], int]:
        try:
            with self._folder(name.tenant, name.generation) as folder:
                descriptor = os.open(SEGMENTS, _READ, dir_fd=folder)
        except FileNotFoundError:
            return [], cursor
        try:
            content = os.pread(descriptor, READ_BYTES, cursor)
            longer = whole_bytes(content)
            if longer > len(content) and cursor + longer <= os.fstat(descriptor).st_size:
                content = os.pread(descriptor, longer, cursor)
        finally:
            os.close(descriptor)
        segments, size = segments_of(content)
        return segments, cursor + size

    def _end(self, name: StreamName, last: bytes) -> bytes:
        try:
            with self._folder(name.tenant, name.generation) as folder:
                for file in (HEAD, SEGMENTS):
                    _sync(folder, file)
                own = _write_unique(folder, _NEW_END, last)
                try:
                    with suppress(FileExistsError):
                        os.link(own, END, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(own, dir_fd=folder)
                os.fsync(folder)
                return _content(folder, END)
        except FileNotFoundError as gone:
            raise errors.StreamStoreUnavailable("The stream is not stored, or not any more.") from gone

    def _find(self, name: StreamName) -> StoredStream | None:
        with suppress(FileNotFoundError):
            return self._stored(name) if self._content(name, HEAD) is not None else None
        return None

    def _touch(self, name: StreamName) -> None:
        with suppress(FileNotFoundError), self._folder(name.tenant, name.generation) as folder:
            os.stat(HEAD, dir_fd=folder, follow_symlinks=False)
            os.close(os.open(TOUCHED, _TOUCH, 0o600, dir_fd=folder))
            os.utime(TOUCHED, dir_fd=folder, follow_symlinks=False)

    def _touched(self, name: StreamName) -> int:
        with suppress(FileNotFoundError), self._folder(name.tenant, name.generation) as folder:
            return os.stat(TOUCHED, dir_fd=folder, follow_symlinks=False).st_mtime_ns
        return 0

    def _streams(self, tenant: str) -> list[StoredStream]:
        found: list[StoredStream] = []
        with suppress(FileNotFoundError), self._folder(tenant) as folder:
            for generation in _folders_in(folder):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(self._stored(StreamName(tenant, generation)))
        return sorted(found, key=lambda stream: (stream.changed_ms, stream.name.generation))

    def _stored(self, name: StreamName) -> StoredStream:
        with self._folder(name.tenant, name.generation) as folder:
            changed_ns, size = 0, 0
            is_ended = False
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name == TOUCHED:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    size += status.st_size
                    changed_ns = max(changed_ns, status.st_mtime_ns)
                    is_ended = is_ended or entry.name == END
            changed_ns = changed_ns or os.fstat(folder).st_mtime_ns
        return StoredStream(name, size, changed_ns // NANOS_PER_MILLI, is_ended)

    def _tenants(self) -> list[str]:
        tenants: list[str] = []
        with self._folder() as root:
            for tenant in _folders_in(root):
                with suppress(FileNotFoundError), self._folder(tenant) as folder:
                    if _folders_in(folder):
                        tenants.append(tenant)
        return sorted(tenants)

    def _delete(self, name: StreamName) -> None:
        for _ in range(_TRIES):
            try:
                with self._folder(name.tenant, name.generation) as folder:
                    _empty(folder)
                with self._folder(name.tenant) as tenant:
                    os.rmdir(name.generation, dir_fd=tenant)
            except FileNotFoundError:
                break
            except OSError as fault:
                if fault.errno not in _NOT_EMPTY:
                    raise
            else:
                break
        else:
            raise errors.StreamStoreUnavailable("The stream is written to while it is deleted.")
        try:
            with self._folder() as root:
                os.rmdir(name.tenant, dir_fd=root)
        except FileNotFoundError:
            pass
        except OSError as fault:
            if fault.errno not in _NOT_EMPTY:
                raise


def _folders_in(folder: int) -> list[str]:
    """Names of the folders in one that may be a tenant's or a stream's; a link is none."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False)]


def _empty(folder: int) -> None:
    """Remove all files of a stream, the head first: from then on it is no stream."""
    for file in (HEAD, END, SEGMENTS, *os.listdir(folder)):
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=folder)


def _content(folder: int, file: str) -> bytes:
    with os.fdopen(os.open(file, _READ, dir_fd=folder), "rb") as opened:
        return opened.read()


def _write_new(folder: int, file: str, content: bytes) -> int:
    """The descriptor of a new file with this content, to be closed. Raises FileExistsError."""
    descriptor = os.open(file, _NEW, 0o600, dir_fd=folder)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_unique(folder: int, beginning: str, content: bytes) -> str:
    """A new file on the disk, under a name that nobody else has, not even another gateway that was killed while it had it."""
    for number in count():
        name = f"{beginning}.{number}"
        with suppress(FileExistsError):
            descriptor = _write_new(folder, name, content)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return name
    raise AssertionError("unreachable")


def _sync(folder: int, file: str) -> None:
    descriptor = os.open(file, _READ, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _close_unwanted(made: asyncio.Future[DirectoryWriter]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _unavailable(fault: OSError) -> errors.StreamStoreUnavailable:
    return errors.StreamStoreUnavailable(f"Retained streams cannot be kept or read now: {fault.strerror}.")


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise _unavailable(fault) from fault
