"""Retained streams in a directory: for the gateways of one machine, or of a file system on which a write is seen at once.

    <root>/<tenant>/<generation>.segments   the head, then the segments, one behind the other, see `stream_framing`
                   /<generation>.end        framed too; appears whole, once
                   /<generation>.touched    empty; its time is that of the last touch

It decides in which order these appear and go, so that no reader sees half of a stream as a whole one: there is a stream where
there is a whole head. `append` is the only call that writes on the event loop, since it lies on the path of every token: one
system call into the page cache, 1 to 3 µs. The others take one turn on a thread and as few system calls as they can: making a
file is what costs, so a stream has two. Below the root it never follows a link.

What was stored outlives the process at once. A power failure may take a stream that runs, or the back of it; of one that has
ended it may take the end, for as long as the file system keeps that in memory (ext4: up to 30 s). The stream then has none, or
a torn one, which readers take for none and which is replaced by who ends it next.
"""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from weir import errors
from weir.kept_streams import OnStored, StoredStream, StreamName
from weir.storage.stream_framing import (
    LENGTH_BYTES,
    READ_BYTES,
    check_name,
    framed,
    is_name,
    length_of,
    segments_of,
    whole_bytes,
)
from weir.units import NANOS_PER_MILLI, Bytes, Millis

SEGMENTS, END, TOUCHED = ".segments", ".end", ".touched"
_KINDS = (SEGMENTS, END, TOUCHED)
_UNFINISHED = ".end-"
"""An end before it is linked: a dot, the generation, this, and a number that nobody else has."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOUCH = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_FIRST_BYTES: Bytes = 4_096
_TRIES = 16
"""Each time that a folder goes or is filled under a call, another one got on; that it happens so often is a fault."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DirectoryWriter:
    """Appends to a new file, the head first. Where the stream was deleted meanwhile, it writes to what nobody reads."""

    __slots__ = ("_descriptor", "_size")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = 0

    def append(self, segment: bytes) -> bool:
        """Stored on return. Raises StreamStoreUnavailable; what was written of the segment is then taken back."""
        length = length_of(segment)
        try:
            written = os.writev(self._descriptor, (length, segment))  # not joined first: a segment may be large
            if written < len(length) + len(segment):
                written += _write_all(self._descriptor, (length + segment)[written:])
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
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise _unavailable(fault) from fault

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> DirectoryWriter:
        """As the port says. A caller that is cancelled may have begun the stream all the same."""
        check_name(name)
        making = asyncio.get_running_loop().run_in_executor(None, self._create, name, head)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_unwanted)
            raise
        except OSError as fault:
            raise _unavailable(fault) from fault

    async def head(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await _off_loop(self._head, name)

    async def read(self, name: StreamName, cursor: int) -> tuple[Sequence[bytes], int]:
        """As the port says; a cursor is an offset in the file, and 0 stands for the one behind the head."""
        check_name(name)
        return await _off_loop(self._read, name, cursor)

    async def end(self, name: StreamName, last: bytes) -> bytes:
        """As the port says. Raises StreamStoreUnavailable also where the stream was deleted, if need be while it is ended.

        Head and segments are on the disk before an end is there. The end itself is not on return: a power failure may take it.
        """
        check_name(name)
        return await _off_loop(self._end, name, last)

    async def ending(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await _off_loop(self._ending, name)

    async def find(self, name: StreamName) -> StoredStream | None:
        """As the port says."""
        check_name(name)
        return await _off_loop(self._find, name)

    async def touch(self, name: StreamName) -> None:
        """As the port says; a touch is the time of an empty file."""
        check_name(name)
        await _off_loop(self._touch, name)

    async def touched(self, name: StreamName) -> int:
        """As the port says."""
        check_name(name)
        return await _off_loop(self._touched, name)

    async def streams(self, tenant: str) -> list[StoredStream]:
        """As the port says."""
        check_name(StreamName(tenant, "any"))
        return await _off_loop(self._streams, tenant)

    async def tenants(self) -> list[str]:
        """As the port says, in the order of names."""
        return await _off_loop(self._tenants)

    async def delete(self, name: StreamName) -> None:
        """As the port says. The tenant's folder goes too if it is empty."""
        check_name(name)
        await _off_loop(self._delete, name)

    async def aclose(self) -> None:
        """Nothing is held between two calls; writers are closed by who asked for them."""

    # ── on a thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _folder(self, tenant: str) -> Iterator[int]:
        """A tenant's open folder. It is opened anew each time, so that a disk that is gone is not taken for an empty one.

        Raises FileNotFoundError where it is missing, and StreamStoreUnavailable where the root is: nothing is known then.
        """
        try:
            folder = os.open(f"{self._root}/{tenant}", _FOLDER)
        except FileNotFoundError as missing:
            if not self._root.is_dir():
                raise _unavailable(missing) from missing
            raise
        try:
            yield folder
        finally:
            os.close(folder)

    def _create(self, name: StreamName, head: bytes) -> DirectoryWriter:
        writer = DirectoryWriter(self._new_file(name))
        try:
            writer.append(head)
        except BaseException:
            writer.close()
            with suppress(OSError, errors.StreamStoreUnavailable):
                self._delete(name)
            raise
        return writer

    def _new_file(self, name: StreamName) -> int:
        for _ in range(_TRIES):
            # Until the file is there, a delete of the tenant's last stream may take the tenant's folder.
            try:
                with self._folder(name.tenant) as folder:
                    return os.open(name.generation + SEGMENTS, _NEW, 0o600, dir_fd=folder)
            except FileExistsError as taken:
                raise errors.StreamStoreUnavailable("A stream of this name is stored already.") from taken
            except FileNotFoundError:
                with suppress(FileExistsError):
                    (self._root / name.tenant).mkdir(0o700)
        raise errors.StreamStoreUnavailable("The folder of the tenant's streams does not stay.")

    def _head(self, name: StreamName) -> bytes | None:
        with suppress(FileNotFoundError), self._folder(name.tenant) as folder:
            return _first_in(folder, name.generation + SEGMENTS)
        return None

    def _read(self, name: StreamName, cursor: int) -> tuple[list[bytes], int]:
        try:
            with self._folder(name.tenant) as folder, _opened(folder, name.generation + SEGMENTS) as descriptor:
                start = cursor or _behind_first(descriptor)
                content = _some_segments(descriptor, start) if start else b""
        except FileNotFoundError:
            return [], cursor
        segments, size = segments_of(content)
        return segments, start + size if segments else cursor

    def _end(self, name: StreamName, last: bytes) -> bytes:
        file = name.generation + SEGMENTS
        try:
            with self._folder(name.tenant) as folder:
                with _opened(folder, file) as descriptor:
                    if not 0 < _behind_first(descriptor) <= os.fstat(descriptor).st_size:
                        raise errors.StreamStoreUnavailable("The stream was never begun.")
                    os.fsync(descriptor)
                    stored = _end_once(folder, name.generation, framed(last), descriptor)
                if _status(folder, file) is not None:
                    return last if stored is None else stored
                # It was deleted meanwhile, maybe before the end was there to be deleted too.
                _remove(folder, name.generation + END)
        except FileNotFoundError:
            pass
        # What this call had put there may be why the deletion could not take the folder, even if another call took that away.
        self._remove_folder(name.tenant)
        raise errors.StreamStoreUnavailable("The stream is not stored, or not any more.")

    def _ending(self, name: StreamName) -> bytes | None:
        with suppress(FileNotFoundError), self._folder(name.tenant) as folder:
            last = _first_in(folder, name.generation + END)
            return last if _status(folder, name.generation + SEGMENTS) is not None else None
        return None

    def _find(self, name: StreamName) -> StoredStream | None:
        with suppress(FileNotFoundError), self._folder(name.tenant) as folder:
            with _opened(folder, name.generation + SEGMENTS) as descriptor:
                status = os.fstat(descriptor)
                if not 0 < _behind_first(descriptor) <= status.st_size:
                    return None
            end = _status(folder, name.generation + END)
            if end is None:
                return StoredStream(name, status.st_size, status.st_mtime_ns // NANOS_PER_MILLI, False)
            changed_ns = max(status.st_mtime_ns, end.st_mtime_ns)
            return StoredStream(name, status.st_size + end.st_size, changed_ns // NANOS_PER_MILLI, True)
        return None

    def _touch(self, name: StreamName) -> None:
        file = name.generation + TOUCHED
        with suppress(FileNotFoundError), self._folder(name.tenant) as folder:
            os.stat(name.generation + SEGMENTS, dir_fd=folder, follow_symlinks=False)
            try:
                os.utime(file, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                os.close(os.open(file, _TOUCH, 0o600, dir_fd=folder))

    def _touched(self, name: StreamName) -> int:
        with suppress(FileNotFoundError), self._folder(name.tenant) as folder:
            return os.stat(name.generation + TOUCHED, dir_fd=folder, follow_symlinks=False).st_mtime_ns
        return 0

    def _streams(self, tenant: str) -> list[StoredStream]:
        found: dict[str, tuple[Bytes, int, int, bool]] = {}  # size, change and touch in nanoseconds, whether it has ended
        with suppress(FileNotFoundError), self._folder(tenant) as folder:
            for generation, kind, status in _files_in(folder):
                size, changed_ns, touched_ns, is_ended = found.get(generation, (0, 0, 0, False))
                if kind in (SEGMENTS, END):
                    size, changed_ns = size + status.st_size, max(changed_ns, status.st_mtime_ns)
                else:
                    touched_ns = max(touched_ns, status.st_mtime_ns)
                found[generation] = size, changed_ns, touched_ns, is_ended or kind == END
        streams = [
            StoredStream(StreamName(tenant, generation), size, (changed_ns or touched_ns) // NANOS_PER_MILLI, is_ended)
            for generation, (size, changed_ns, touched_ns, is_ended) in found.items()
        ]
        return sorted(streams, key=lambda stream: (stream.changed_ms, stream.name.generation))

    def _tenants(self) -> list[str]:
        with os.scandir(self._root) as entries:
            tenants = [entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False)]
        return sorted(tenant for tenant in tenants if self._has_any(tenant))

    def _has_any(self, tenant: str) -> bool:
        with suppress(FileNotFoundError), self._folder(tenant) as folder, os.scandir(folder) as entries:
            return any(_part_of(entry)[1] for entry in entries)
        return False

    def _delete(self, name: StreamName) -> None:
        try:
            with self._folder(name.tenant) as folder:
                was_stored = _remove(folder, name.generation + SEGMENTS)  # from here on it is no stream
                _remove(folder, name.generation + END)
                _remove(folder, name.generation + TOUCHED)
                for number in count():
                    was_there = _remove(folder, _unfinished(name.generation, number))
                    # Of what a listing found left over, a killed gateway's number may lie above one that is free again.
                    if not was_there and (was_stored or number >= _TRIES):
                        break
            self._remove_folder(name.tenant)
        except FileNotFoundError:
            pass

    def _remove_folder(self, tenant: str) -> None:
        try:
            (self._root / tenant).rmdir()
        except OSError as fault:
            if fault.errno not in (*_NOT_EMPTY, errno.ENOENT):
                raise


async def _off_loop(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    except OSError as fault:
        raise _unavailable(fault) from fault


# ── one tenant's folder ──────────────────────────────────────────────────────────────────────────────────────────────


def _part_of(entry: os.DirEntry[str]) -> tuple[str, str]:
    """The generation whose file it is, and of which kind; "" as the kind of what is no file of a stream, as of a link."""
    generation, dot, kind = entry.name.rpartition(".")
    kind = dot + kind
    if kind.startswith(_UNFINISHED):
        generation = generation.removeprefix(".")
    elif kind not in _KINDS:
        return "", ""
    return (generation, kind) if is_name(generation) and entry.is_file(follow_symlinks=False) else ("", "")


def _files_in(folder: int) -> Iterator[tuple[str, str, os.stat_result]]:
    """Generation, kind and status of every file of a stream."""
    with os.scandir(folder) as entries:
        for entry in entries:
            generation, kind = _part_of(entry)
            if not kind:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted meanwhile
                continue
            yield generation, kind, status


def _unfinished(generation: str, number: int) -> str:
    return f".{generation}{_UNFINISHED}{number}"


def _remove(folder: int, file: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(file, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _status(folder: int, file: str) -> os.stat_result | None:
    try:
        return os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextmanager
def _opened(folder: int, file: str) -> Iterator[int]:
    descriptor = os.open(file, _READ, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _first_in(folder: int, file: str) -> bytes | None:
    """What a file begins with, without its length; None where it is not whole. Raises FileNotFoundError."""
    with _opened(folder, file) as descriptor:
        content = os.pread(descriptor, _FIRST_BYTES, 0)
        whole = whole_bytes(content)
        if len(content) < whole <= os.fstat(descriptor).st_size:
            content = os.pread(descriptor, whole, 0)
    return content[LENGTH_BYTES:whole] if 0 < whole <= len(content) else None


def _behind_first(descriptor: int) -> Bytes:
    """Where the second segment of a file begins, beyond its end where the first is not whole; 0 where that has no length."""
    return whole_bytes(os.pread(descriptor, LENGTH_BYTES, 0))


def _some_segments(descriptor: int, start: Bytes) -> bytes:
    """About READ_BYTES, or one segment that is longer."""
    left = max(0, os.fstat(descriptor).st_size - start)
    content = os.pread(descriptor, min(left, READ_BYTES), start)
    longer = whole_bytes(content)
    return os.pread(descriptor, longer, start) if len(content) < longer <= left else content


def _end_once(folder: int, generation: str, content: bytes, segments: int) -> bytes | None:
    """Store a framed end unless there is one: the one that there is, or None. Raises FileNotFoundError where it is deleted.

    segments: the stream's open file, whose lock lets one caller at a time take a torn end away.
    """
    file, own = generation + END, _write_unfinished(folder, generation, content)
    try:
        for _ in range(_TRIES):
            try:
                os.link(own, file, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                return None
            except FileExistsError:
                pass
            with suppress(FileNotFoundError):
                if (stored := _first_in(folder, file)) is not None:
                    return stored
                fcntl.flock(segments, fcntl.LOCK_EX)
                if _first_in(folder, file) is None:
                    os.unlink(file, dir_fd=folder)
            fcntl.flock(segments, fcntl.LOCK_UN)
    finally:
        _remove(folder, own)
    raise errors.StreamStoreUnavailable("The end of the stream does not stay.")


def _write_unfinished(folder: int, generation: str, content: bytes) -> str:
    """A new file, under a name that nobody else has, not even another gateway that was killed while it had it."""
    for number in count():
        name = _unfinished(generation, number)
        with suppress(FileExistsError):
            descriptor = os.open(name, _NEW, 0o600, dir_fd=folder)
            break
    try:
        _write_all(descriptor, content)
    except BaseException:
        _remove(folder, name)
        raise
    finally:
        os.close(descriptor)
    return name


def _write_all(descriptor: int, content: bytes) -> Bytes:
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])
    return written


def _close_unwanted(made: asyncio.Future[DirectoryWriter]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _unavailable(fault: OSError) -> errors.StreamStoreUnavailable:
    return errors.StreamStoreUnavailable(f"Retained streams cannot be kept or read now: {fault.strerror}.")
