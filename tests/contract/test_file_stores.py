"""Protects tenants' files and batches: every store keeps a file whole, once where it is said, and shows it to every process."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.contract.file_places import KEY, KINDS, FilePlace, keys_in, stored

from weir import errors
from weir.kept_files import FileStore, StoredFile
from weir.storage.file_bucket import PART_BYTES
from weir.storage.file_memory import FileMemory, FileOperation

FOLDER = "acme/files"
WRONG_NAMES = ("", ".", "..", "-a", ".hidden", "Acme", "a\\b", "a b", "a\n", "a\0", "ä", "a" * 101)
WRONG_KEYS = (
    "a",
    "a/b/c/d/e",
    "/a/b",
    "a/b/",
    "a//b",
    *(f"acme/{name}" for name in WRONG_NAMES),
    *(f"{name}/x" for name in WRONG_NAMES),
)
LARGE = bytes(range(256)) * (PART_BYTES // 256 + 4_096)
"""More than goes up in one request, less than two."""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> FilePlace:
    return FilePlace(request.param, tmp_path)


@pytest.fixture
async def store(place: FilePlace) -> AsyncIterator[FileStore]:
    async with place.opened() as opened:
        yield opened


@pytest.fixture
async def elsewhere(place: FilePlace) -> AsyncIterator[FileStore]:
    async with place.opened() as opened:
        yield opened


async def test_a_file_is_shown_elsewhere_as_it_was_stored(store: FileStore, elsewhere: FileStore) -> None:
    """Protects a batch that another process goes on with: what one stored, the others read and find."""
    assert await elsewhere.read(KEY) is None and await elsewhere.find(KEY) is None
    assert await store.create(KEY, b"content") and await elsewhere.read(KEY) == b"content"
    found = await elsewhere.find(KEY)
    assert found == StoredFile(KEY, 7, found.changed_ms if found else 0) and [found] == list(await store.files(FOLDER))


async def test_an_empty_file_is_a_file(store: FileStore) -> None:
    """Protects marks, which say something by being there."""
    assert await store.create(KEY, b"") and not await store.create(KEY, b"x")
    found = await store.find(KEY)
    assert found is not None and found.size == 0 and await keys_in(store, FOLDER) == [KEY]
    assert await store.read(KEY) == b"" == await store.read(KEY, 0, 10) == await store.read(KEY, 5)


async def test_the_time_of_a_file_is_that_of_its_last_write(place: FilePlace, store: FileStore) -> None:
    """Protects what expires: a file is as old as its content. A bucket may tell whole seconds."""
    now_ms = place.clock.wall_ms() if place.kind == "memory" else time.time() * 1_000
    await store.create(KEY, b"x")
    found = await store.find(KEY)
    assert found is not None and now_ms - 1_000 <= found.changed_ms <= now_ms + 60_000


async def test_a_file_is_created_once(store: FileStore, elsewhere: FileStore) -> None:
    """Protects what happens once, as the end of a batch: of all that say it at once one does, and the others change nothing."""
    for content in (b"%d", b"same"):
        key = f"acme/batches/{len(content)}.end"
        contents = [content % number if b"%" in content else content for number in range(20)]
        told = await asyncio.gather(
            *(one.create(key, each) for one, each in zip((store, elsewhere) * 10, contents, strict=True))
        )
        assert told.count(True) == 1 and await store.read(key) == contents[told.index(True)]
        assert not await elsewhere.create(key, b"later") and await store.read(key) == contents[told.index(True)]


async def test_a_file_in_pieces_is_there_once_it_is_committed(store: FileStore, elsewhere: FileStore) -> None:
    """Protects readers from half a file: until the commit there is nothing, not in a listing either, and then all of it."""
    writer = await store.begin(KEY)
    for piece in (b"one", b"", b"two"):
        await writer.write(piece)
    assert await elsewhere.read(KEY) is None and await elsewhere.find(KEY) is None and await keys_in(elsewhere, FOLDER) == []
    assert await writer.commit() and await elsewhere.read(KEY) == b"onetwo" and await keys_in(elsewhere, FOLDER) == [KEY]
    await writer.abort()
    assert await elsewhere.read(KEY) == b"onetwo"
    empty = await store.begin("acme/files/empty")
    assert await empty.commit() and await store.read("acme/files/empty") == b""


async def test_a_file_in_pieces_is_committed_once(store: FileStore, elsewhere: FileStore) -> None:
    """Protects a file from a second writer of its key: one commit holds, the others are told so and leave nothing."""
    writers = [await one.begin(KEY) for one in (store, elsewhere) * 10]
    for number, writer in enumerate(writers):
        await writer.write(b"%d" % number)
    told = await asyncio.gather(*(writer.commit() for writer in writers))
    assert told.count(True) == 1 and await store.read(KEY) == b"%d" % told.index(True)
    assert await keys_in(store, FOLDER) == [KEY]
    await store.delete(KEY)
    assert await store.folders() == []


async def test_a_large_file_is_as_a_small_one(place: FilePlace, store: FileStore, elsewhere: FileStore) -> None:
    """Protects uploads of many parts: nothing before the commit, all of it after, once, and nothing of those given up."""
    one, two, three = [await each.begin(KEY) for each in (store, elsewhere, store)]
    for writer in (one, two, three):
        for start in range(0, len(LARGE), PART_BYTES // 3):
            await writer.write(LARGE[start : start + PART_BYTES // 3])
    assert await elsewhere.find(KEY) is None and await keys_in(store, FOLDER) == []
    await three.abort()
    if place.kind == "bucket-s3":  # the server of the tests looks and completes in two steps, unlike the real ones
        told = [await one.commit(), await two.commit()]
    else:
        told = list(await asyncio.gather(one.commit(), two.commit()))
    assert sorted(told) == [False, True] and await elsewhere.read(KEY) == LARGE
    assert await elsewhere.read(KEY, PART_BYTES - 3, 6) == LARGE[PART_BYTES - 3 : PART_BYTES + 3]
    assert await keys_in(store, FOLDER) == [KEY]
    await store.delete(KEY)
    assert await store.folders() == []


async def test_what_is_aborted_leaves_nothing(store: FileStore) -> None:
    """Protects disks and the key: it stays free, however often somebody gives up, and a writer that gave up writes no more."""
    writer = await store.begin(KEY)
    await writer.write(b"half")
    for _ in range(2):
        await writer.abort()
    with pytest.raises(errors.FileStoreUnavailable):
        await writer.write(b"more")
    with pytest.raises(errors.FileStoreUnavailable):
        await writer.commit()
    assert await store.find(KEY) is None and await store.folders() == [] and await store.create(KEY, b"x")


async def test_a_file_is_committed_by_one_call(store: FileStore) -> None:
    """Protects a file from a writer that goes on: after the commit it takes nothing more."""
    writer = await store.begin(KEY)
    assert await writer.commit()
    for again in (writer.write(b"x"), writer.commit()):
        with pytest.raises(errors.FileStoreUnavailable):
            await again
    assert await store.read(KEY) == b""


async def test_a_file_that_is_replaced_is_whole_at_any_time(store: FileStore, elsewhere: FileStore) -> None:
    """Protects the progress of a batch: readers see the content before or the one after, and the last one stays."""
    contents = [bytes([number]) * (50_000 - 4_000 * number) for number in range(8)]
    await store.replace(KEY, contents[0])
    is_done = asyncio.Event()

    async def replace() -> None:
        for content in contents[1:]:
            await store.replace(KEY, content)
        is_done.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(replace())
        while not is_done.is_set():
            seen = await elsewhere.read(KEY)
            assert seen in contents
    assert await elsewhere.read(KEY) == contents[-1] and await keys_in(store, FOLDER) == [KEY]
    assert not await store.create(KEY, b"x")


async def test_a_part_of_a_file_is_read(store: FileStore) -> None:
    """Protects answers in pieces: from a place on, so many bytes, fewer at the end, none behind it."""
    await store.create(KEY, b"0123456789")
    parts = {(0, None): b"0123456789", (4, None): b"456789", (0, 3): b"012", (8, 5): b"89", (3, 0): b"", (10, 5): b""}
    for (start, size), content in {**parts, (10, None): b"", (500, 1): b"", (500, None): b"", (500, 0): b""}.items():
        assert await store.read(KEY, start, size) == content
        assert await store.read("acme/files/none", start, size) is None
    for start, size in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="a part of a file"):
            await store.read(KEY, start, size)


async def test_files_are_listed_in_the_order_of_their_keys_in_pages(store: FileStore) -> None:
    """Protects lists that go on where they were: each file once, whatever lies beside the folder, above it or below it."""
    keys = sorted(f"acme/files/{name}" for name in ("10", "9", "_a", "a", "a-b", "a.b", "a_b", "b", "file-1", "z" * 100))
    await stored(store, *reversed(keys))
    await stored(store, "acme/record", "acme/files2/x", "acme/files/deep/x", "acme2/files/x", "acme/batches/files")
    assert await keys_in(store, FOLDER) == keys
    for size in (1, 3, 10, 11):
        pages: list[str] = []
        while page := await keys_in(store, FOLDER, pages[-1] if pages else "", size):
            assert len(page) <= size
            pages += page
        assert pages == keys
    assert await keys_in(store, FOLDER, "acme/files/a0") == [key for key in keys if key > "acme/files/a0"]
    assert await keys_in(store, "acme") == ["acme/record"] and await keys_in(store, "acme/files/deep") == ["acme/files/deep/x"]
    assert await keys_in(store, "nobody") == [] == await keys_in(store, "acme/files/none")


async def test_folders_are_the_first_names_of_what_is_stored(store: FileStore) -> None:
    """Protects the sweep of all tenants: each is named once, in order, for as long as it has a file."""
    assert await store.folders() == []
    await stored(store, "acme/files/a", "acme/x", "_open/batches/b", "b2/one/two/three", "b/x")
    assert await store.folders() == ["_open", "acme", "b", "b2"]
    for key in ("b2/one/two/three", "acme/x", "b/x"):
        await store.delete(key)
    assert await store.folders() == ["_open", "acme"]


async def test_what_is_deleted_is_gone_and_may_be_stored_again(store: FileStore, elsewhere: FileStore) -> None:
    """Protects deletion: for everybody, however often it is asked for, and of this file alone."""
    await stored(store, KEY, "acme/files/file-1.json", "acme/files/file-10.data")
    for one in (store, elsewhere, store):
        await one.delete(KEY)
    await store.delete("nobody/none")
    assert await elsewhere.read(KEY) is None and await elsewhere.find(KEY) is None
    assert await keys_in(elsewhere, FOLDER) == ["acme/files/file-1.json", "acme/files/file-10.data"]
    assert await elsewhere.create(KEY, b"again") and await store.read(KEY) == b"again"


async def test_files_come_and_go_beside_each_other(store: FileStore, elsewhere: FileStore) -> None:
    """Protects a write from the deletion of the folder's last file: it is stored, whichever of them is first."""

    async def come_and_go(one: FileStore, key: str) -> None:
        for _ in range(10):
            assert await one.create(key, b"x") and await one.read(key) == b"x"
            await one.delete(key)

    await asyncio.gather(*(come_and_go(one, f"acme/files/{n}") for n, one in enumerate((store, elsewhere) * 3)))
    assert await store.folders() == [] and await keys_in(store, FOLDER) == []


@pytest.mark.parametrize("key", WRONG_KEYS)
async def test_a_key_that_is_none_is_refused(store: FileStore, key: str) -> None:
    """Protects what lies beside the store: no key leads out of it, and none is cut or changed to fit."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.begin(key),
        lambda: store.create(key, b"x"),
        lambda: store.replace(key, b"x"),
        lambda: store.read(key),
        lambda: store.find(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a key is two to four names"):
            await call()


@pytest.mark.parametrize("folder", ["a/b/c/d", "a/", "/a", *WRONG_NAMES])
async def test_a_folder_that_is_none_is_refused(store: FileStore, folder: str) -> None:
    """Protects what lies beside the store from being listed."""
    with pytest.raises(ValueError, match="a folder is one to three names"):
        await store.files(folder)


async def test_a_store_in_memory_fails_by_order() -> None:
    """Protects the simulator: whatever is made to fail is the store's error, and changes nothing."""
    failing = set[FileOperation]()
    store = FileMemory(lambda: 5, fault=failing.__contains__)
    writer = await store.begin(KEY)
    await store.create("acme/x", b"x")
    failing |= {"begin", "create", "replace", "read", "find", "files", "folders", "delete", "write"}
    calls = [store.begin(KEY), store.create(KEY, b""), store.replace("acme/x", b""), store.read(KEY), store.find(KEY)]
    for call in (*calls, store.files("acme"), store.folders(), store.delete("acme/x"), writer.write(b"x"), writer.commit()):
        with pytest.raises(errors.FileStoreUnavailable):
            await call
    failing.clear()
    assert await store.read("acme/x") == b"x" and await store.files("acme") == [StoredFile("acme/x", 1, 5)]
    assert await store.find(KEY) is None
