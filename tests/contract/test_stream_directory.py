"""Protects streams in a directory: what is half written is not there, only its owner reads it, and no link leads out of it."""

import asyncio
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.stream_places import HEAD, STREAM, all_of, ended, started

from weir import errors
from weir.kept_streams import StreamName
from weir.storage.stream_directory import StreamDirectory

WAY = ("acme", "gen-1")
OPEN_FILES = Path("/proc/self/fd")


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A disk that is full once a file has this many bytes: the kernel writes up to there, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_only_the_owner_may_look(tmp_path: Path) -> None:
    """Protects names and sizes from other users of the machine."""
    await ended(StreamDirectory(tmp_path / "streams"), STREAM, b"x")
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "streams", *(tmp_path / "streams").rglob("*"))}
    assert sorted(path.name for path in found) == ["acme", "end", "gen-1", "head", "segments", "streams"]
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items())


async def test_a_segment_that_was_cut_off_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    """Protects readers from half a segment, wherever a crash cut it, and from zeros that a lost disk cache leaves."""
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM, b"one", b"second")).close()
    file = tmp_path.joinpath(*WAY, "segments")
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert await all_of(store) == ([b"one"] if size >= 7 else [])
    file.write_bytes(whole + bytes(20))
    assert await all_of(store) == [b"one", b"second"]


async def test_a_full_disk_takes_back_what_it_did_not_take_whole(tmp_path: Path) -> None:
    """Protects what was stored before: the append fails, half a segment is removed, and nothing follows it."""
    store = StreamDirectory(tmp_path)
    writer = await started(store, STREAM, b"one")
    with files_at_most(50), pytest.raises(errors.StreamStoreUnavailable):
        writer.append(b"x" * 100)
    assert tmp_path.joinpath(*WAY, "segments").stat().st_size == 7
    with pytest.raises(errors.StreamStoreUnavailable):
        writer.append(b"two")
    assert await all_of(store) == [b"one"] and await store.end(STREAM, b"end") == b"end"


async def test_a_stream_that_could_not_begin_leaves_nothing(tmp_path: Path) -> None:
    """Protects a name whose head the disk did not take: no half of a stream is left, and it may begin later."""
    store = StreamDirectory(tmp_path)
    with files_at_most(10), pytest.raises(errors.StreamStoreUnavailable):
        await store.create(STREAM, b"h" * 100, lambda _: None)
    assert await store.streams("acme") == [] and await store.tenants() == [] and names_in(tmp_path) == []
    (await started(store, STREAM)).close()


async def test_a_half_made_stream_is_none_and_can_be_removed(tmp_path: Path) -> None:
    """Protects readers and the disk from what a crash left between the folder and its head."""
    store = StreamDirectory(tmp_path)
    folder = tmp_path.joinpath(*WAY)
    folder.mkdir(parents=True)
    (folder / ".head").write_bytes(b"half")
    assert await store.head(STREAM) is None and await store.read(STREAM, 0) == ([], 0)
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.end(STREAM, b"end")
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.create(STREAM, HEAD, lambda _: None)
    (left,) = await store.streams("acme")
    assert left.name == STREAM and left.size == 4 and left.changed_ms > 0
    await store.delete(STREAM)
    assert names_in(tmp_path) == []


async def test_a_gateway_that_was_killed_while_it_ended_does_not_stop_the_next(tmp_path: Path) -> None:
    """Protects an ending: another gateway's unfinished one lies there, under a name that stays free."""
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM)).close()
    tmp_path.joinpath(*WAY, ".end.0").write_bytes(b"unfinis")
    assert await store.end(STREAM, b"end") == b"end"
    await store.delete(STREAM)
    assert names_in(tmp_path) == []


async def test_streams_are_listed_by_the_time_of_their_last_change(tmp_path: Path) -> None:
    """Protects the order of deletion: the stream that was left alone for longest is first, whichever of its files is newest."""
    store = StreamDirectory(tmp_path)
    for number, seconds in enumerate((3_000, 1_000, 2_000)):
        await ended(store, StreamName("acme", f"gen-{number}"), b"x")
        for file, back in (("head", 500), ("segments", 0), ("end", 7)):
            os.utime(tmp_path / "acme" / f"gen-{number}" / file, (seconds - back, seconds - back))
    listed = await store.streams("acme")
    assert [(stream.name.generation, stream.changed_ms) for stream in listed] == [
        ("gen-1", 1_000_000),
        ("gen-2", 2_000_000),
        ("gen-0", 3_000_000),
    ]


async def test_no_link_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    """Protects other files of the machine: a link in place of a tenant, a stream or a file shows nothing and loses nothing."""
    outside = StreamDirectory(tmp_path / "outside")
    await ended(outside, STREAM, b"secret")
    inside = tmp_path / "inside"
    store = StreamDirectory(inside)
    await ended(store, StreamName("own", "gen-1"), b"x")
    (inside / "acme").symlink_to(tmp_path / "outside" / "acme")
    (inside / "own" / "gen-2").symlink_to(tmp_path / "outside" / "acme" / "gen-1")
    (inside / "own" / "gen-1" / "segments").unlink()
    (inside / "own" / "gen-1" / "segments").symlink_to(tmp_path / "outside" / "acme" / "gen-1" / "segments")
    for asked in (store.head(STREAM), store.delete(STREAM), store.head(StreamName("own", "gen-2"))):
        with pytest.raises(errors.StreamStoreUnavailable):
            await asked
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.read(StreamName("own", "gen-1"), 0)
    assert await store.tenants() == ["own"] and [stream.name.generation for stream in await store.streams("own")] == ["gen-1"]
    await store.delete(StreamName("own", "gen-1"))
    assert await all_of(outside) == [b"secret"]


async def test_files_of_others_are_no_streams(tmp_path: Path) -> None:
    """Protects a listing from what else lies in the directory, and keeps it there."""
    store = StreamDirectory(tmp_path)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes").write_text("x")
    await ended(store, STREAM, b"x")
    (tmp_path / "acme" / "README").write_text("x")
    assert await store.tenants() == ["acme"] and [stream.name for stream in await store.streams("acme")] == [STREAM]
    await store.delete(STREAM)
    assert await store.tenants() == [] and (tmp_path / "acme" / "README").exists()


async def test_a_directory_that_went_away_is_a_fault_and_not_an_empty_store(tmp_path: Path) -> None:
    """Protects retained streams from an unmounted disk: they are unavailable, not gone."""
    store = StreamDirectory(tmp_path / "streams")
    await ended(store, STREAM, b"x")
    (tmp_path / "streams").rename(tmp_path / "away")
    for asked in (store.head(STREAM), store.streams("acme"), store.tenants(), store.delete(STREAM)):
        with pytest.raises(errors.StreamStoreUnavailable):
            await asked
    (tmp_path / "away").rename(tmp_path / "streams")
    assert await all_of(store) == [b"x"]
    with pytest.raises(errors.StreamStoreUnavailable):
        StreamDirectory(tmp_path / "streams" / "acme" / "gen-1" / "head")


async def test_a_caller_that_leaves_while_a_stream_begins_leaves_no_open_file(tmp_path: Path) -> None:
    """Protects the process from running out of files: the writer that nobody took is closed."""
    store = StreamDirectory(tmp_path)
    before = len(names_in(OPEN_FILES))
    for number in range(20):
        task = asyncio.get_running_loop().create_task(store.create(StreamName("acme", f"gen-{number}"), HEAD, print))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(10):
        while len(await store.streams("acme")) < 20 or len(names_in(OPEN_FILES)) > before:
            await store.tenants()
