"""A folder of plain files, read so that nobody can make a reader read something else.

It decides what is a plain file, and which fault is the folder's and which the machine's. Everything is opened below the
folder's own descriptor, one part of a path at a time and never through a symbolic link, and compared with what was found there.
It must never block on a pipe or open a device.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from weir import errors
from weir.core.registry.manifest import FILES_MAX, ArtifactFlaw, artifact_refused, check_path, shown
from weir.units import Bytes, Nanos

_BLOCK_BYTES: Bytes = 1024**2
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)
_CLOSED_TO_US = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file it is and when it last changed in any way; the time of change cannot be set back by who changes it."""

    device: int
    inode: int
    size_bytes: Bytes
    modified_ns: Nanos
    changed_ns: Nanos


def identity_of(status: os.stat_result) -> FileIdentity:
    """The identity of an open file, or of one that was found."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class PlainFolder:
    """An open folder, closed at the end of its context. Raises ArtifactRefused where path is no folder that can be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, _FOLDER)
        except ValueError as fault:
            raise _no_folder(path, "it is not a path") from fault
        except OSError as fault:
            if fault.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _no_folder(path, "it is no folder, or a link to one") from fault
            if fault.errno in (errno.ENOENT, errno.ENAMETOOLONG, *_CLOSED_TO_US):
                raise _no_folder(path, os.strerror(fault.errno)) from fault
            raise _unavailable(fault) from fault

    def __enter__(self) -> "PlainFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def identity(self) -> FileIdentity:
        """Which folder it is, and when it was moved or its entries last changed."""
        return identity_of(os.fstat(self._descriptor))

    def survey(self) -> dict[str, FileIdentity]:
        """Every file by its path, in the order of paths. Raises ArtifactRefused for a link, a special file, or too many."""
        files: dict[str, FileIdentity] = {}
        folders, seen = [""], 0
        while folders:
            prefix = folders.pop()
            for name, status in self._entries(prefix, FILES_MAX + 1 - seen):
                path, seen = prefix + name, seen + 1
                check_path(path)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{path}/")
                else:
                    _check_plain(path, status)
                    files[path] = identity_of(status)
            if seen > FILES_MAX:
                detail = f"The artifact has more than {FILES_MAX} files and folders."
                raise artifact_refused(ArtifactFlaw.TOO_MANY_FILES, detail)
        return dict(sorted(files.items()))

    def check_unchanged(self, files: Mapping[str, FileIdentity]) -> None:
        """Raises ArtifactRefused, naming the first file, unless a survey finds the same once more."""
        now = self.survey()
        for path in (*files, *now):
            if files.get(path) != now.get(path):
                raise changed_meanwhile(path)

    def _entries(self, prefix: str, most: int) -> list[tuple[str, os.stat_result]]:
        """Names of a folder, not more than so many, each with what it is."""
        path = prefix.rstrip("/") or "."
        folder = self._open(path, _FOLDER)
        try:
            with _faults(path), os.scandir(folder) as entries:
                return [(entry.name, entry.stat(follow_symlinks=False)) for entry in islice(entries, most)]
        finally:
            os.close(folder)

    def find(self, path: str) -> FileIdentity | None:
        """One file, None where nothing has this name. Raises ArtifactRefused for a link or a special file."""
        with _faults(path):
            try:
                status = os.stat(path, dir_fd=self._descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None
        _check_plain(path, status)
        return identity_of(status)

    def open_file(self, path: str, identity: FileIdentity) -> int:
        """A descriptor of a file that was found, for reading, to be closed. Raises ArtifactRefused unless it is that still."""
        descriptor = self._open(path, _FILE)
        try:
            check_identity(path, descriptor, identity)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def blocks(self, path: str, identity: FileIdentity) -> Iterator[bytes]:
        """All of a file that was found, block by block. Raises ArtifactRefused unless it stays the same meanwhile."""
        descriptor = self.open_file(path, identity)
        try:
            yield from blocks_of(path, descriptor, identity)
        finally:
            os.close(descriptor)

    def _open(self, path: str, flags: int) -> int:
        """Open part by part, so that no part is a link."""
        *folders, name = path.split("/")
        with _faults(path):
            below = os.dup(self._descriptor)
            try:
                for folder in folders:
                    above, below = below, os.open(folder, _FOLDER, dir_fd=below)
                    os.close(above)
                return os.open(name, flags, dir_fd=below)
            finally:
                os.close(below)


def blocks_of(path: str, descriptor: int, identity: FileIdentity) -> Iterator[bytes]:
    """All of an open file from where it stands, as `PlainFolder.blocks`."""
    left = identity.size_bytes
    with _faults(path):
        while left > 0 and (block := os.read(descriptor, min(_BLOCK_BYTES, left))):
            left -= len(block)
            yield block
    check_identity(path, descriptor, identity)


def check_identity(path: str, descriptor: int, identity: FileIdentity) -> None:
    """Raises ArtifactRefused unless an open file is the one it was, unchanged."""
    if identity_of(os.fstat(descriptor)) != identity:
        raise changed_meanwhile(path)


def changed_meanwhile(path: str) -> errors.ArtifactRefused:
    """The refusal of a file that did not stay as it was while it was read."""
    return artifact_refused(ArtifactFlaw.CHANGED_MEANWHILE, f"The file {shown(path)} changed while it was read.", path)


def _check_plain(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        detail = f"The file {shown(path)} is a symbolic link: an artifact has none."
        raise artifact_refused(ArtifactFlaw.SYMBOLIC_LINK, detail, path)
    if not stat.S_ISREG(status.st_mode):
        detail = f"The file {shown(path)} is a pipe, a socket or a device: an artifact has none."
        raise artifact_refused(ArtifactFlaw.SPECIAL_FILE, detail, path)


@contextmanager
def _faults(path: str) -> Iterator[None]:
    """Turns a fault of the system into the refusal of a file, or into one of the machine's own."""
    try:
        yield
    except OSError as fault:
        if fault.errno in _GONE:
            raise changed_meanwhile(path) from fault
        if fault.errno in _CLOSED_TO_US:
            detail = f"The file {shown(path)} cannot be read: {fault.strerror}."
            raise artifact_refused(ArtifactFlaw.UNREADABLE, detail, path) from fault
        raise _unavailable(fault) from fault


def _no_folder(path: Path, why: str) -> errors.ArtifactRefused:
    return artifact_refused(ArtifactFlaw.UNREADABLE, f"The folder {shown(path.name)} cannot be read: {why}.")


def _unavailable(fault: OSError) -> errors.ArtifactsUnavailable:
    return errors.ArtifactsUnavailable(f"The artifact's files cannot be read now: {fault.strerror}.")
