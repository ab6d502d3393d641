"""Tenants' files in a directory: for the processes of one machine, or of a file system on which a write is seen at once.

    <root>/<key>                       as the port's key says; folders have mode 0700, files 0600
          /<folder>/.unfinished-<id>   what is being written, beside where it will lie; no listing shows it

It decides when a file is there: it is written under a name that nobody else has, put on the disk, and then linked (once) or
renamed (again and again) to its own. So readers see a whole file or none, and a process that is killed leaves an unfinished one
at most, which a listing of its folder removes a day after its last write. Every call takes one turn on a thread. Below the root
it never follows a link, and the root is opened anew by each call: a disk that is gone is not taken for an empty one.

Who takes the last file away from a folder, or an unfinished one that could have been it, removes the folder. So one may go
under a call that was about to put a file there, which then makes it again.

A power failure may bring back what was deleted in the last moments before it.
"""

import asyncio
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from weir import errors
from weir.kept_files import StoredFile
from weir.storage.file_names import UNFINISHED, UNFINISHED_MS_MAX, check_folder, check_range, folder_and_name, is_name
from weir.units import NANOS_PER_MILLI, Bytes

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ID_BYTES = 16
_KEY_NAMES_MAX = 4
_TRIES = 16
"""Each time that a folder goes under a call, another one got on; that it happens so often is a fault."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DirectoryFileWriter:
    """Writes an unfinished file, then links it. A call that is cancelled goes on; the next one waits for it, on its thread."""

    def __init__(self, store: "FileDirectory", folder: str, name: str) -> None:
        self._store = store
        self._folder = folder
        self._name = name
        self._turn = threading.Lock()
        self._is_whole = True
        self._unfinished, self._descriptor = store.new_file(folder)

    async def write(self, content: bytes) -> None:
        """As the port says."""
        await _off_loop(self.add, content)

    async def commit(self) -> bool:
        """As the port says."""
        return await _off_loop(self.finish)

    async def abort(self) -> None:
        """As the port says."""
        await asyncio.get_running_loop().run_in_executor(None, self.drop)

    # ── on a thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, content: bytes) -> None:
        """Write a piece. Raises OSError or FileStoreUnavailable; then nothing more is written."""
        with self._turn:
            self._check_open()
            self._is_whole = False
            left = memoryview(content)
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._is_whole = True

    def finish(self) -> bool:
        """Link it; False where another file is there. Raises OSError or FileStoreUnavailable."""
        with self._turn:
            self._check_open()
            try:
                self._sync()
                with self._store.opened(self._folder) as folder:
                    is_ours = self._link(folder)
                    _remove(folder, self._unfinished)
                    os.fsync(folder)
            finally:
                self._drop()
            return is_ours

    def put(self) -> None:
        """Rename it over what may be there. Raises OSError or FileStoreUnavailable."""
        with self._turn:
            self._check_open()
            try:
                self._sync()
                with self._store.opened(self._folder) as folder:
                    os.replace(self._unfinished, self._name, src_dir_fd=folder, dst_dir_fd=folder)
                    os.fsync(folder)
            finally:
                self._drop()

    def drop(self) -> None:
        """Take back what is not finished. Idempotent; never raises."""
        with self._turn:
            self._drop()

    def _check_open(self) -> None:
        if self._descriptor < 0 or not self._is_whole:
            raise errors.FileStoreUnavailable("This file is written or given up already, or a write of it failed.")

    def _sync(self) -> None:
        """On the disk before it has its name."""
        os.fsync(self._descriptor)

    def _link(self, folder: int) -> bool:
        try:
            os.link(self._unfinished, self._name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            status = _status(folder, self._name)
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise errors.FileStoreUnavailable("What has the name of a file is none.") from None
            return False
        return True

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            os.close(descriptor)
        with suppress(OSError, errors.FileStoreUnavailable), self._store.opened(self._folder) as folder:
            _remove(folder, self._unfinished)
        # It may be why somebody who took the last file away could not take the folder.
        self._store.remove_folders(self._folder)


class FileDirectory:
    """The port on a directory, which is made (mode 0700) if it is absent. Raises FileStoreUnavailable."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise _unavailable(fault) from fault

    async def begin(self, key: str) -> DirectoryFileWriter:
        """As the port says. What a caller that is cancelled has begun is dropped."""
        folder, name = folder_and_name(key)
        loop = asyncio.get_running_loop()
        beginning = loop.run_in_executor(None, DirectoryFileWriter, self, folder, name)
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_drop_unwanted)
            raise
        except OSError as fault:
            raise _unavailable(fault) from fault

    async def create(self, key: str, content: bytes) -> bool:
        """As the port says. A caller that is cancelled may have stored it all the same."""
        return await _off_loop(self._create, *folder_and_name(key), content)

    async def replace(self, key: str, content: bytes) -> None:
        """As the port says. A caller that is cancelled may have stored it all the same."""
        await _off_loop(self._replace, *folder_and_name(key), content)

    async def read(self, key: str, start: Bytes = 0, size: Bytes | None = None) -> bytes | None:
        """As the port says."""
        check_range(start, size)
        return await _off_loop(self._read, *folder_and_name(key), start, size)

    async def find(self, key: str) -> StoredFile | None:
        """As the port says."""
        return await _off_loop(self._find, *folder_and_name(key))

    async def files(self, folder: str, after: str = "", limit: int = 10_000) -> list[StoredFile]:
        """As the port says. It removes what killed processes left in the folder."""
        check_folder(folder)
        return await _off_loop(self._files, folder, after, limit)

    async def folders(self) -> list[str]:
        """As the port says."""
        return await _off_loop(self._folders)

    async def delete(self, key: str) -> None:
        """As the port says. Its folders go too if they are empty."""
        await _off_loop(self._delete, *folder_and_name(key))

    async def aclose(self) -> None:
        """Nothing is held between two calls; writers are ended by who asked for them."""

    # ── on a thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def opened(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """An open folder, "" for the root, one name after the other. make: with those that are missing.

        Raises FileNotFoundError where it is missing, and FileStoreUnavailable where the root is: nothing is known then.
        """
        with ExitStack() as held:
            try:
                inner = os.open(self._root, _ROOT)
            except OSError as fault:
                raise _unavailable(fault) from fault
            held.callback(os.close, inner)
            for name in filter(None, folder.split("/")):
                inner = _made_folder(inner, name) if make else os.open(name, _FOLDER, dir_fd=inner)
                held.callback(os.close, inner)
            yield inner

    def new_file(self, folder: str) -> tuple[str, int]:
        """Name and descriptor of a new unfinished file. Raises OSError or FileStoreUnavailable."""
        name = UNFINISHED + os.urandom(_ID_BYTES).hex()
        for _ in range(_TRIES):
            # Until the file is there, whoever takes the last one away may take the folder.
            try:
                with self.opened(folder, make=True) as inner:
                    return name, os.open(name, _NEW, 0o600, dir_fd=inner)
            except FileNotFoundError:
                continue
            except OSError:
                self.remove_folders(folder)
                raise
        raise errors.FileStoreUnavailable("The folder of the file does not stay.")

    def remove_folders(self, folder: str) -> None:
        """A folder and those it lies in, from the inside, as far as they are empty. Never raises: an empty one does no harm."""
        while folder:
            folder, _, name = folder.rpartition("/")
            try:
                with self.opened(folder) as outer:
                    os.rmdir(name, dir_fd=outer)
            except FileNotFoundError:
                continue
            except (OSError, errors.FileStoreUnavailable):
                return

    def _create(self, folder: str, name: str, content: bytes) -> bool:
        writer = DirectoryFileWriter(self, folder, name)
        try:
            writer.add(content)
            return writer.finish()
        finally:
            writer.drop()

    def _replace(self, folder: str, name: str, content: bytes) -> None:
        writer = DirectoryFileWriter(self, folder, name)
        try:
            writer.add(content)
            writer.put()
        finally:
            writer.drop()

    def _read(self, folder: str, name: str, start: Bytes, size: Bytes | None) -> bytes | None:
        try:
            with self.opened(folder) as inner:
                descriptor = os.open(name, _READ, dir_fd=inner)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            left = max(0, status.st_size - start)
            return _read_at(descriptor, start, left if size is None else min(size, left))
        finally:
            os.close(descriptor)

    def _find(self, folder: str, name: str) -> StoredFile | None:
        with suppress(FileNotFoundError), self.opened(folder) as inner:
            status = _file_in(inner, name)
            return None if status is None else _stored(folder, name, status)
        return None

    def _files(self, folder: str, after: str, limit: int) -> list[StoredFile]:
        found: list[StoredFile] = []
        with suppress(FileNotFoundError), self.opened(folder) as inner:
            names = _names_in(inner)
            was_left = [_remove_left(inner, name) for name in names if name.startswith(UNFINISHED)]
            for name in sorted(filter(is_name, names)):
                if len(found) >= limit:
                    break
                if f"{folder}/{name}" > after and (status := _file_in(inner, name)) is not None:
                    found.append(_stored(folder, name, status))
            if any(was_left):
                self.remove_folders(folder)
        return found

    def _folders(self) -> list[str]:
        with self.opened("") as root:
            return [name for name in sorted(filter(is_name, _names_in(root))) if _has_any(root, name, _KEY_NAMES_MAX - 1)]

    def _delete(self, folder: str, name: str) -> None:
        with suppress(FileNotFoundError, IsADirectoryError), self.opened(folder) as inner:
            _remove(inner, name)
        self.remove_folders(folder)


async def _off_loop(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    except OSError as fault:
        raise _unavailable(fault) from fault


# ── one folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _made_folder(outer: int, name: str) -> int:
    """A folder in an open one, which is made if it is missing. Raises FileNotFoundError where the outer one goes meanwhile."""
    with suppress(FileNotFoundError):
        return os.open(name, _FOLDER, dir_fd=outer)
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=outer)
        os.fsync(outer)
    return os.open(name, _FOLDER, dir_fd=outer)


def _names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _status(folder: int, name: str) -> os.stat_result | None:
    """Of whatever has this name; of a link, its own."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _file_in(folder: int, name: str) -> os.stat_result | None:
    """None where there is no such file, as where it is a link."""
    status = _status(folder, name)
    return status if status is not None and stat.S_ISREG(status.st_mode) else None


def _remove(folder: int, name: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _remove_left(folder: int, unfinished: str) -> bool:
    """Remove an unfinished file that nobody wrote to for a day; whether this did. An owner that lives cannot link it then."""
    status = _file_in(folder, unfinished)
    if status is None or time.time_ns() - status.st_mtime_ns < UNFINISHED_MS_MAX * NANOS_PER_MILLI:
        return False
    return _remove(folder, unfinished)


def _has_any(outer: int, name: str, depth: int) -> bool:
    """Whether a file lies in a folder, at most so many folders deep."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=outer)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    try:
        names = list(filter(is_name, _names_in(folder)))
        if any(_file_in(folder, each) is not None for each in names):
            return True
        return depth > 1 and any(_has_any(folder, each, depth - 1) for each in names)
    finally:
        os.close(folder)


def _read_at(descriptor: int, start: Bytes, size: Bytes) -> bytes:
    """So many bytes, fewer only at the end of the file."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.pread(descriptor, size, start)):
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return b"".join(pieces)


def _stored(folder: str, name: str, status: os.stat_result) -> StoredFile:
    return StoredFile(f"{folder}/{name}", status.st_size, status.st_mtime_ns // NANOS_PER_MILLI)


def _drop_unwanted(begun: asyncio.Future[DirectoryFileWriter]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.get_loop().run_in_executor(None, begun.result().drop)


def _unavailable(fault: OSError) -> errors.FileStoreUnavailable:
    return errors.FileStoreUnavailable(f"Files cannot be kept or read now: {os.strerror(fault.errno or 0)}.")
