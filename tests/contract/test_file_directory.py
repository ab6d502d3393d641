"""Protects files in a directory: what is half written is not there, only its owner reads it, and no link leads out of it."""

import asyncio
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.file_places import KEY, keys_in, stored

from weir import errors
from weir.storage.file_directory import FileDirectory
from weir.storage.file_names import UNFINISHED, UNFINISHED_MS_MAX

FOLDER = "acme/files"
OPEN_FILES = Path("/proc/self/fd")
WRITER = """
import asyncio, sys
from pathlib import Path
from weir.storage.file_directory import FileDirectory

async def main():
    writer = await FileDirectory(Path(sys.argv[1])).begin(sys.argv[2])
    await writer.write(b"half")
    print("written", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A disk that is full once a file has this many bytes: the kernel writes up to there, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def killed_while_writing(root: Path) -> None:
    """A process of its own begins a file, writes to it, and is killed."""
    with subprocess.Popen([sys.executable, "-c", WRITER, root, KEY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        process.kill()


async def test_only_the_owner_may_look(tmp_path: Path) -> None:
    """Protects tenants' files from other users of the machine, also while they are written."""
    store = FileDirectory(tmp_path / "root")
    await stored(store, "acme/a", "acme/b/c/d")
    await store.replace("acme/r", b"x")
    writer = await store.begin("acme/w")
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "root", *(tmp_path / "root").rglob("*"))}
    assert len(found) == 1 + 3 + 4
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items())
    await writer.abort()


async def test_a_process_that_is_killed_leaves_nothing_to_see(tmp_path: Path) -> None:
    """Protects readers from half a file: the key stays free, and what is left on the disk goes a day later."""
    store = FileDirectory(tmp_path)
    await asyncio.to_thread(killed_while_writing, tmp_path)
    (left,) = (tmp_path / FOLDER).iterdir()
    assert left.name.startswith(UNFINISHED) and left.read_bytes() == b"half"
    assert await store.find(KEY) is None and await keys_in(store, FOLDER) == [] and await store.folders() == []
    assert await store.create(KEY, b"whole") and await store.read(KEY) == b"whole" and left.exists()
    await store.delete(KEY)
    long_ago = time.time() - UNFINISHED_MS_MAX / 1_000 - 1
    os.utime(left, (long_ago, long_ago))
    assert await store.files(FOLDER) == [] and names_in(tmp_path) == []


async def test_a_writer_whose_file_was_taken_for_left_over_is_told(tmp_path: Path) -> None:
    """Protects a file from a writer that slept for days: it stores nothing, least of all what another one is writing."""
    store = FileDirectory(tmp_path)
    slow, other = await store.begin(KEY), await store.begin("acme/files/other")
    await slow.write(b"slow")
    for left in (tmp_path / FOLDER).iterdir():
        if left.read_bytes() == b"slow":
            os.utime(left, (1_000, 1_000))
    assert await store.files(FOLDER) == []
    with pytest.raises(errors.FileStoreUnavailable):
        await slow.commit()
    assert await other.commit() and await keys_in(store, FOLDER) == ["acme/files/other"]
    assert names_in(tmp_path / FOLDER) == ["other"]


async def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """Protects readers and the disk: what was not taken whole is not there, and what was there before stays."""
    store = FileDirectory(tmp_path)
    writer = await store.begin("acme/files/pieces")
    with files_at_most(50):
        for call in (store.create(KEY, b"x" * 100), writer.write(b"x" * 100)):
            with pytest.raises(errors.FileStoreUnavailable):
                await call
    with pytest.raises(errors.FileStoreUnavailable):
        await writer.commit()
    await writer.abort()
    assert names_in(tmp_path) == []
    await stored(store, KEY)
    with files_at_most(50), pytest.raises(errors.FileStoreUnavailable):
        await store.replace(KEY, b"x" * 100)
    assert await store.read(KEY) == KEY.encode() and names_in(tmp_path / FOLDER) == ["file-1.data"]


async def test_no_link_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    """Protects other files of the machine: a link in place of a folder or a file shows nothing and loses nothing."""
    outside = FileDirectory(tmp_path / "outside")
    await stored(outside, KEY)
    inside = tmp_path / "inside"
    store = FileDirectory(inside)
    await stored(store, "own/x")
    (inside / "acme").symlink_to(tmp_path / "outside" / "acme")
    (inside / "own" / "files").symlink_to(tmp_path / "outside" / "acme" / "files")
    (inside / "own" / "link").symlink_to(tmp_path / "outside" / KEY)
    for key in (KEY, "own/files/file-1.data"):
        calls = (store.read(key), store.find(key), store.create(key, b"x"), store.replace(key, b"x"), store.begin(key))
        for call in (*calls, store.delete(key), store.files(key.rpartition("/")[0])):
            with pytest.raises(errors.FileStoreUnavailable):
                await call
    for call in (store.read("own/link"), store.create("own/link", b"x")):
        with pytest.raises(errors.FileStoreUnavailable):
            await call
    assert await store.find("own/link") is None and await keys_in(store, "own") == ["own/x"]
    assert await store.folders() == ["own"]
    await store.replace("own/link", b"mine")
    assert await store.read("own/link") == b"mine" and await outside.read(KEY) == KEY.encode()
    assert names_in(tmp_path / "outside" / FOLDER) == ["file-1.data"]


async def test_files_of_others_are_none(tmp_path: Path) -> None:
    """Protects a listing from what else lies in the directory, and keeps it there."""
    store = FileDirectory(tmp_path)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes").write_text("x")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    await stored(store, KEY)
    (tmp_path / FOLDER / "README").write_text("x")
    (tmp_path / FOLDER / ".x.swp").write_text("x")
    (tmp_path / FOLDER / "folder").mkdir()
    os.mkfifo(tmp_path / FOLDER / "pipe")
    assert await store.folders() == ["acme"] and await keys_in(store, FOLDER) == [KEY]
    for key in ("acme/files/folder", "acme/files/pipe", "acme/files"):
        assert await store.read(key) is None and await store.find(key) is None
        with pytest.raises(errors.FileStoreUnavailable):
            await store.create(key, b"x")
    await store.delete("acme/files/folder")
    await store.delete(KEY)
    assert names_in(tmp_path / FOLDER) == [".x.swp", "README", "folder", "pipe"]


async def test_a_directory_that_went_away_is_a_fault_and_not_an_empty_store(tmp_path: Path) -> None:
    """Protects files from an unmounted disk: they are unavailable, not gone."""
    store = FileDirectory(tmp_path / "root")
    await stored(store, KEY)
    writer = await store.begin("acme/x")
    (tmp_path / "root").rename(tmp_path / "away")
    calls = (store.read(KEY), store.find(KEY), store.create(KEY, b"x"), store.replace(KEY, b"x"), store.begin(KEY))
    for call in (*calls, store.delete(KEY), store.files(FOLDER), store.folders(), writer.commit()):
        with pytest.raises(errors.FileStoreUnavailable):
            await call
    await writer.abort()
    (tmp_path / "away").rename(tmp_path / "root")
    assert await store.read(KEY) == KEY.encode()
    with pytest.raises(errors.FileStoreUnavailable):
        FileDirectory(tmp_path / "root" / KEY)


async def test_writes_and_deletions_at_once_leave_no_folder(tmp_path: Path) -> None:
    """Protects a disk from empty folders, and writes from the folders' removal, where both meet again and again."""
    stores = [FileDirectory(tmp_path) for _ in range(2)]
    key = "acme/one/two/x"
    for _ in range(30):
        writers = [await store.begin(key) for store in stores]
        await asyncio.gather(*(writer.commit() for writer in writers), *(store.delete(key) for store in stores))
        await stores[0].delete(key)
        assert names_in(tmp_path) == []


async def test_a_caller_that_leaves_while_a_file_begins_leaves_nothing(tmp_path: Path) -> None:
    """Protects the process from running out of files, and the disk: the writer that nobody took is dropped."""
    store = FileDirectory(tmp_path)
    before = len(names_in(OPEN_FILES))
    for number in range(20):
        task = asyncio.get_running_loop().create_task(store.begin(f"acme/files/{number}"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(10):
        while names_in(tmp_path) or len(names_in(OPEN_FILES)) > before:
            await store.folders()


async def test_a_writer_may_be_aborted_while_it_is_written_to(tmp_path: Path) -> None:
    """Protects an upload whose client leaves: the write that is under way ends before its file is taken away."""
    store = FileDirectory(tmp_path)
    before = len(names_in(OPEN_FILES))
    for _ in range(20):
        writer = await store.begin(KEY)
        task = asyncio.get_running_loop().create_task(writer.write(bytes(1_000_000)))
        await asyncio.sleep(0)
        task.cancel()
        await writer.abort()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names_in(tmp_path) == [] and len(names_in(OPEN_FILES)) <= before
