"""Protects streams in a directory: what is half written is not there, only its owner reads it, and no link leads out of it."""

import asyncio
import fcntl
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
from weir.storage.stream_framing import framed

SEGMENTS, END, TOUCHED = (f"acme/gen-1.{kind}" for kind in ("segments", "end", "touched"))
UNFINISHED = "acme/.gen-1.end-0"
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
    store = StreamDirectory(tmp_path / "streams")
    await ended(store, STREAM, b"x")
    await store.touch(STREAM)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "streams", *(tmp_path / "streams").rglob("*"))}
    assert sorted(path.name for path in found) == ["acme", "gen-1.end", "gen-1.segments", "gen-1.touched", "streams"]
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items())


async def test_a_segment_that_was_cut_off_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    """Protects readers from half a segment, wherever a crash cut it, and from zeros that a lost disk cache leaves."""
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM, b"one", b"second")).close()
    file = tmp_path / SEGMENTS
    whole = file.read_bytes()
    first = len(framed(HEAD) + framed(b"one"))
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert await all_of(store) == ([b"one"] if size >= first else [])
    file.write_bytes(whole + bytes(20))
    assert await all_of(store) == [b"one", b"second"]


async def test_a_full_disk_takes_back_what_it_did_not_take_whole(tmp_path: Path) -> None:
    """Protects what was stored before: the append fails, half a segment is removed, and nothing follows it."""
    store = StreamDirectory(tmp_path)
    writer = await started(store, STREAM, b"one")
    before = (tmp_path / SEGMENTS).stat().st_size
    with files_at_most(50), pytest.raises(errors.StreamStoreUnavailable):
        writer.append(b"x" * 100)
    assert (tmp_path / SEGMENTS).stat().st_size == before
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


@pytest.mark.parametrize("torn", [b"", b"\0\0", bytes(8), framed(HEAD)[:-1]], ids=["empty", "short", "zeros", "no end"])
async def test_a_stream_without_a_whole_head_is_none_and_can_be_removed(tmp_path: Path, torn: bytes) -> None:
    """Protects readers and the disk from what a crash left before the head was whole; the name is not free until it is gone."""
    store = StreamDirectory(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / SEGMENTS).write_bytes(torn)
    assert await store.head(STREAM) is None and await store.find(STREAM) is None and await store.read(STREAM, 0) == ([], 0)
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.end(STREAM, b"end")
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.create(STREAM, HEAD, lambda _: None)
    (left,) = await store.streams("acme")
    assert left.name == STREAM and left.size == len(torn) and left.changed_ms > 0 and not left.is_ended
    assert await store.tenants() == ["acme"]
    await store.delete(STREAM)
    assert names_in(tmp_path) == []


async def test_a_head_of_any_length_comes_before_the_segments(tmp_path: Path) -> None:
    """Protects cursors: the head is no segment, however long, and 0 is the first segment behind it."""
    store = StreamDirectory(tmp_path)
    for number, size in enumerate((1, 4_092, 4_093, 600_000)):
        name, head = StreamName("acme", f"gen.{number}"), os.urandom(size)
        writer = await store.create(name, head, lambda _: None)
        assert await store.head(name) == head and await store.read(name, 0) == ([], 0)
        writer.append(b"one")
        segments, cursor = await store.read(name, 0)
        assert segments == [b"one"] and cursor == (tmp_path / "acme" / f"gen.{number}.segments").stat().st_size
        writer.close()


@pytest.mark.parametrize("left", [END, TOUCHED, UNFINISHED, "acme/.gen-1.end-3"])
async def test_what_is_left_of_a_stream_is_listed_and_removed(tmp_path: Path, left: str) -> None:
    """Protects disks: what a crash left of a stream that was deleted is none, and goes when its time is over."""
    store = StreamDirectory(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / left).write_bytes(framed(b"end") if left == END else b"")
    os.utime(tmp_path / left, (1_000, 1_000))
    assert await store.tenants() == ["acme"]
    assert await store.find(STREAM) is None and await store.ending(STREAM) is None
    (stream,) = await store.streams("acme")
    assert (stream.name, stream.changed_ms, stream.is_ended) == (STREAM, 1_000_000, left == END)
    await store.delete(STREAM)
    assert names_in(tmp_path) == []


async def test_names_with_dots_are_told_apart(tmp_path: Path) -> None:
    """Protects streams whose names end like a file's kind, from each other and from the files of a shorter name."""
    store = StreamDirectory(tmp_path)
    names = [StreamName("a.end", word) for word in ("gen", "gen.end", "gen.segments", "gen.end.end-0", "gen.touched")]
    for name in names:
        await ended(store, name, name.generation.encode())
    assert {stream.name for stream in await store.streams("a.end")} == set(names)
    for number, name in enumerate(names, 1):
        assert await all_of(store, name) == [name.generation.encode()]
        await store.delete(name)
        assert {stream.name for stream in await store.streams("a.end")} == set(names[number:])
    assert names_in(tmp_path) == []


async def test_a_gateway_that_was_killed_while_it_ended_does_not_stop_the_next(tmp_path: Path) -> None:
    """Protects an ending: another gateway's unfinished one lies there, under a name that stays free."""
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM)).close()
    (tmp_path / UNFINISHED).write_bytes(b"unfinis")
    assert await store.find(STREAM) == (await store.streams("acme"))[0]
    assert await store.end(STREAM, b"end") == b"end"
    await store.delete(STREAM)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("torn", [b"", bytes(20), framed(b"lost")[:-1]], ids=["empty", "zeros", "cut"])
async def test_an_end_that_a_power_failure_tore_is_stored_again_once(tmp_path: Path, torn: bytes) -> None:
    """Protects a stream whose end was not on the disk: it has none, until whoever comes first ends it for everybody."""
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM, b"x")).close()
    (tmp_path / END).write_bytes(torn)
    assert await store.ending(STREAM) is None and await all_of(store) == [b"x"]
    lasts = [b"end %d" % number for number in range(6)]
    told = await asyncio.gather(*(store.end(STREAM, last) for last in lasts))
    assert len(set(told)) == 1 and told[0] == await store.ending(STREAM)
    assert sorted(names_in(tmp_path / "acme")) == ["gen-1.end", "gen-1.segments"]


@pytest.mark.parametrize("gone", [(SEGMENTS,), (SEGMENTS, END, UNFINISHED)], ids=["deleted", "and its own file taken"])
async def test_an_end_behind_a_deletion_leaves_nothing(gone: tuple[str, ...], tmp_path: Path) -> None:
    """Protects deletion: an end that appears behind it goes again, whoever stored it is told, and the folder goes too.

    The torn end keeps the call waiting for a lock, so that the stream goes while it is under way. A deletion cannot take
    a folder in which an end is made; where two ends meet it, the first takes the other's unfinished end, which had its name.
    """
    store = StreamDirectory(tmp_path)
    (await started(store, STREAM, b"x")).close()
    (tmp_path / END).write_bytes(b"")
    with (tmp_path / SEGMENTS).open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        ending = asyncio.get_running_loop().create_task(store.end(STREAM, b"end"))
        async with asyncio.timeout(10):
            while not (tmp_path / UNFINISHED).exists():
                await store.tenants()
        for file in gone:
            (tmp_path / file).unlink()
    with pytest.raises(errors.StreamStoreUnavailable):
        await ending
    assert names_in(tmp_path) == []


async def test_ends_and_deletions_at_once_leave_nothing(tmp_path: Path) -> None:
    """Protects deletion wherever it meets an end: that was stored before, or it fails; nothing lies there afterwards."""
    store = StreamDirectory(tmp_path)
    for number in range(50):
        name = StreamName("acme", f"gen-{number}")
        (await started(store, name, b"x")).close()
        ends = [store.end(name, b"end") for _ in range(2)]
        outcomes = await asyncio.gather(*ends, store.delete(name), return_exceptions=True)
        assert all(one in (b"end", None) or isinstance(one, errors.StreamStoreUnavailable) for one in outcomes)
        assert names_in(tmp_path) == []


async def test_streams_are_listed_by_the_time_of_their_last_change(tmp_path: Path) -> None:
    """Protects the order of deletion: the stream that was left alone for longest is first, whichever of its files is newest."""
    store = StreamDirectory(tmp_path)
    for number, seconds in enumerate((3_000, 1_000, 2_000)):
        await ended(store, StreamName("acme", f"gen-{number}"), b"x")
        newest, other = ("segments", "end") if number else ("end", "segments")
        for kind, back in ((newest, 0), (other, 7)):
            os.utime(tmp_path / "acme" / f"gen-{number}.{kind}", (seconds - back, seconds - back))
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
    (inside / "own" / "gen-1.segments").unlink()
    for file in ("gen-1.segments", "gen-2.segments", "gen-2.end", "gen-2.touched"):
        (inside / "own" / file).symlink_to(tmp_path / "outside" / "acme" / file.replace("gen-2", "gen-1"))
    one, two = StreamName("own", "gen-1"), StreamName("own", "gen-2")
    links = (store.head(two), store.find(two), store.ending(two), store.end(two, b"x"), store.create(two, HEAD, print))
    for asked in (store.head(STREAM), store.delete(STREAM), store.read(one, 0), *links):
        with pytest.raises(errors.StreamStoreUnavailable):
            await asked
    assert await store.tenants() == ["own"] and [stream.name.generation for stream in await store.streams("own")] == ["gen-1"]
    await store.delete(one)
    await store.delete(two)
    assert names_in(inside) == ["acme"] and await all_of(outside) == [b"secret"] and await outside.ending(STREAM) == b"end"


async def test_files_of_others_are_no_streams(tmp_path: Path) -> None:
    """Protects a listing from what else lies in the directory, and keeps it there."""
    store = StreamDirectory(tmp_path)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes").write_text("x")
    await ended(store, STREAM, b"x")
    (tmp_path / "acme" / "README").write_text("x")
    (tmp_path / "acme" / ".gen-2.swp").write_text("x")
    (tmp_path / "acme" / "gen-3.end").mkdir()
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
        StreamDirectory(tmp_path / "streams" / SEGMENTS)


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
