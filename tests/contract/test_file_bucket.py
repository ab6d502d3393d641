"""Protects files in a bucket: a request that fails is tried again, what is there once stays so, and no fault shows a secret."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore
from tests.contract.file_places import KEY, keys_in, stored

from weir import errors
from weir.storage import file_bucket
from weir.storage.file_bucket import PART_BYTES, FileBucket
from weir.storage.file_names import UNFINISHED

FOLDER = "acme/files"
SECRET = "GET https://bucket/x?signature=secret failed\nauthorization: secret"

T = TypeVar("T")


class FlakyFiles:
    """A client of objects whose next requests fail, by order: before they are carried out, or after."""

    def __init__(self) -> None:
        self.objects = MemoryStore()
        self.failing: list[Exception] = []
        self.losing: list[Exception] = []
        self.asked = 0

    async def put_async(self, path: str, file: bytes, *, mode: Any, attributes: Any = None) -> Any:
        return await self._through(lambda: self.objects.put_async(path, file, mode=mode, attributes=attributes))

    async def get_async(self, path: str, *, options: Any = None) -> Any:
        return await self._through(lambda: self.objects.get_async(path, options=options))

    async def head_async(self, path: str) -> Any:
        return await self._through(lambda: self.objects.head_async(path))

    async def copy_async(self, from_: str, to: str, *, overwrite: bool = True) -> Any:
        return await self._through(lambda: self.objects.copy_async(from_, to, overwrite=overwrite))

    async def delete_async(self, paths: str | Sequence[str]) -> Any:
        return await self._through(lambda: self.objects.delete_async(paths))

    def list(self, prefix: str, *, chunk_size: int) -> Any:
        return self.objects.list(prefix, chunk_size=chunk_size)

    async def list_with_delimiter_async(self, prefix: str | None = None) -> Any:
        return await self._through(lambda: self.objects.list_with_delimiter_async(prefix))

    async def _through(self, request: Callable[[], Awaitable[T]]) -> T:
        self.asked += 1
        if self.failing:
            raise self.failing.pop(0)
        answer = await request()
        if self.losing:
            raise self.losing.pop(0)
        return answer


@pytest.fixture
def objects() -> FlakyFiles:
    return FlakyFiles()


@pytest.fixture
def store(objects: FlakyFiles) -> FileBucket:
    return FileBucket(objects, uploads=objects.objects)


def calls_of(store: FileBucket) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: store.create("acme/new", b"x"),
        lambda: store.replace(KEY, b"x"),
        lambda: store.read(KEY),
        lambda: store.read(KEY, 1, 2),
        lambda: store.find(KEY),
        lambda: store.files(FOLDER),
        store.folders,
        lambda: store.delete(KEY),
    ]


async def large(store: FileBucket) -> file_bucket.BucketFileWriter:
    writer = await store.begin(KEY)
    await writer.write(bytes(PART_BYTES))
    await writer.write(b"x")
    return writer


async def test_every_request_is_tried_again(objects: FlakyFiles, store: FileBucket) -> None:
    """Protects batches from a bucket's passing faults, each of which another try outlives."""
    await stored(store, KEY)
    for call in calls_of(store):
        objects.failing = [GenericError("busy")] * 2
        await call()
        assert objects.failing == []


async def test_what_fails_for_good_is_unavailable_and_shows_no_secret(objects: FlakyFiles, store: FileBucket) -> None:
    """Protects callers from a fault taken for an answer, and credentials from logs."""
    await stored(store, KEY)
    for call in calls_of(store):
        for faults in ([GenericError(SECRET)] * 10, [PermissionDeniedError(SECRET), *[GenericError("busy")] * 10]):
            objects.failing, objects.asked = list(faults), 0
            with pytest.raises(errors.FileStoreUnavailable) as told:
                await call()
            assert objects.asked <= 6
            assert (
                "secret" not in f"{told.value} {told.value.detail} {told.value.__cause__}" and "bucket" not in told.value.detail
            )
    objects.failing = []
    assert await store.read(KEY) == KEY.encode()


async def test_an_answer_that_was_lost_is_not_taken_for_another_owner(objects: FlakyFiles, store: FileBucket) -> None:
    """Protects who was first: the second try finds its own file, and tells it from that of another with the same content."""
    objects.losing = [GenericError("lost")]
    assert await store.create(KEY, b"x")
    objects.failing = [GenericError("busy")]
    assert not await store.create(KEY, b"x")


async def test_a_large_file_whose_answer_was_lost_is_not_called_anybodys(objects: FlakyFiles, store: FileBucket) -> None:
    """Protects commits: a copy does not tell whose it is, so the writer is told that it is not known, and leaves nothing."""
    writer = await large(store)
    copy = objects.copy_async

    async def copy_and_lose(from_: str, to: str, *, overwrite: bool = True) -> Any:
        objects.losing = [GenericError("lost")]
        return await copy(from_, to, overwrite=overwrite)

    objects.copy_async = copy_and_lose  # type: ignore[method-assign]
    with pytest.raises(errors.FileStoreUnavailable):
        await writer.commit()
    objects.losing = []
    await writer.abort()
    found = await store.find(KEY)
    assert found is not None and found.size == PART_BYTES + 1
    assert [each["path"] for each in (await objects.objects.list_with_delimiter_async(FOLDER))["objects"]] == [KEY]


async def test_what_a_killed_process_left_goes_a_day_later(
    objects: FlakyFiles, store: FileBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects the bill: an unfinished file is not listed, and a listing removes it once nobody can be writing it."""
    await objects.objects.put_async(f"{FOLDER}/{UNFINISHED}1", b"half")
    await stored(store, KEY)
    for age_ms, left in ((86_400_000, 2), (0, 1)):
        monkeypatch.setattr(file_bucket, "UNFINISHED_MS_MAX", age_ms)
        assert await keys_in(store, FOLDER) == [KEY]
        assert len((await objects.objects.list_with_delimiter_async(FOLDER))["objects"]) == left


async def test_a_large_file_that_is_given_up_leaves_nothing(objects: FlakyFiles, store: FileBucket) -> None:
    """Protects the bill: what went up already is taken away again, and nothing more is taken."""
    writer = await large(store)
    await writer.abort()
    assert (await objects.objects.list_with_delimiter_async(FOLDER))["objects"] == []
    with pytest.raises(errors.FileStoreUnavailable):
        await writer.write(b"x")


@pytest.mark.parametrize("url", ["", "nonsense", "s3://", "ftp://x/y", "https://x/y", "file://"])
def test_an_address_that_is_none_is_refused_in_a_sentence(url: str) -> None:
    """Protects operators: a wrong address is told at start."""
    with pytest.raises(errors.InvalidRequest):
        FileBucket.from_url(url)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an installation without the extra: it says what to install, and the module is there without it."""
    for module in ("obstore", "obstore.exceptions", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.InvalidRequest, match=r"weir\[objects\]"):
        FileBucket.from_url("s3://files")
