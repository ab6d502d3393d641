"""Protects streams in a bucket: few objects, in order; a request that fails is tried again, and a fault is never silent."""

import sys

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore
from tests.contract.stream_places import HEAD, STREAM, FlakyObjects, all_of, started
from tests.s3_server import BUCKET, s3_endpoint

from weir import errors
from weir.storage import stream_bucket
from weir.storage.stream_bucket import StreamBucket, segments_key
from weir.storage.stream_framing import READ_BYTES


@pytest.fixture
def objects() -> FlakyObjects:
    return FlakyObjects(MemoryStore())


def fault(reason: str = "the store is busy") -> GenericError:
    return GenericError(reason)


async def test_what_is_appended_while_a_write_is_under_way_shares_the_next_object(objects: FlakyObjects) -> None:
    """Protects cost and latency: a slow bucket gets fewer, larger objects, one at a time, in order."""
    store = StreamBucket(objects)
    told: list[int] = []
    writer = await store.create(STREAM, HEAD, told.append)
    objects.gate.clear()
    writer.append(b"0")
    await objects.has_put(2)
    for number in range(1, 40):
        writer.append(b"%d" % number)
    assert writer.unstored == 70 and told == []
    objects.gate.set()
    await writer.flush()
    assert objects.puts == ["acme/gen-1/head", segments_key(STREAM, 0), segments_key(STREAM, 1)] and told == [1, 40]
    assert await all_of(store) == [b"%d" % number for number in range(40)]
    await store.aclose()


async def test_an_object_holds_about_what_one_read_returns(objects: FlakyObjects) -> None:
    """Protects readers from an object larger than they may take at once, however much waited."""
    store = StreamBucket(objects)
    segments = [b"x" * (READ_BYTES // 3)] * 7
    writer = await started(store, STREAM, *segments)
    assert len(objects.puts) == 1 + 4 and await all_of(store) == segments
    writer.close()


@pytest.mark.parametrize("faults", [1, 2])
async def test_a_write_is_tried_again(objects: FlakyObjects, faults: int) -> None:
    """Protects a stream from a bucket's passing faults, each of which another try outlives."""
    store = StreamBucket(objects)
    writer = await started(store, STREAM, b"one")
    objects.failing = [fault()] * faults
    writer.append(b"two")
    await writer.flush()
    assert await all_of(store) == [b"one", b"two"]
    await store.aclose()


async def test_a_write_that_fails_for_good_fails_the_stream(objects: FlakyObjects) -> None:
    """Protects callers from a silent gap: the next append and every flush say it, and no later segment is stored."""
    store = StreamBucket(objects)
    writer = await started(store, STREAM, b"one")
    objects.failing = [fault("PUT https://bucket/x?signature=secret failed\nauthorization: secret")] * 3
    writer.append(b"two")
    with pytest.raises(errors.StreamStoreUnavailable) as told:
        await writer.flush()
    with pytest.raises(errors.StreamStoreUnavailable):
        writer.append(b"three")
    assert writer.unstored == 3 and await all_of(store) == [b"one"]
    reason = told.value.__cause__ and told.value.__cause__.__cause__
    assert "https://bucket/x failed" in str(reason) and "secret" not in str(reason) and "bucket" not in told.value.detail
    await store.aclose()


async def test_what_may_not_be_done_is_not_tried_again(objects: FlakyObjects) -> None:
    """Protects a bucket's account: a credential that is refused is refused once per request."""
    store = StreamBucket(objects)
    objects.failing = [PermissionDeniedError("no"), fault(), fault()]
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.create(STREAM, HEAD, print)
    assert len(objects.puts) == 1


async def test_a_write_ends_within_its_time(objects: FlakyObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a stream from a bucket that answers nothing: its writer fails within a bound."""
    store = StreamBucket(objects)
    writer = await started(store, STREAM, b"one")
    monkeypatch.setattr(stream_bucket, "WRITE_SECONDS", 0.01)
    objects.gate.clear()
    writer.append(b"two")
    with pytest.raises(errors.StreamStoreUnavailable):
        await writer.flush()
    await store.aclose()


async def test_an_answer_that_was_lost_is_not_taken_for_another_owner(objects: FlakyObjects) -> None:
    """Protects a stream that did begin, and an end that was stored: the second try finds what the first one wrote."""
    store = StreamBucket(objects)
    objects.losing = [fault()]
    writer = await store.create(STREAM, HEAD, print)
    objects.losing = [fault()]
    assert await store.end(STREAM, b"mine") == b"mine" == await store.end(STREAM, b"another")
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.create(STREAM, HEAD, print)
    writer.close()


async def test_a_half_deleted_stream_is_none_and_is_deleted_again(objects: FlakyObjects) -> None:
    """Protects readers and the bill: without its head it is not shown, and it is listed until all of it is gone."""
    store = StreamBucket(objects)
    (await started(store, STREAM, b"one")).close()
    await store.end(STREAM, b"end")
    delete = objects.delete_async

    async def delete_once(paths: str) -> None:
        await delete(paths)
        objects.failing = [fault()] * 3

    objects.delete_async = delete_once  # type: ignore[assignment, method-assign]
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.delete(STREAM)
    objects.delete_async = delete  # type: ignore[method-assign]
    assert await store.head(STREAM) is None and [stream.name for stream in await store.streams("acme")] == [STREAM]
    await store.delete(STREAM)
    assert await store.streams("acme") == [] and await store.tenants() == []


async def test_an_end_beside_a_deletion_leaves_nothing_behind(objects: FlakyObjects) -> None:
    """Protects deletion: an end that comes after it is refused, and is not left in the bucket."""
    store = StreamBucket(objects)
    (await started(store, STREAM, b"one")).close()
    await store.delete(STREAM)
    with pytest.raises(errors.StreamStoreUnavailable):
        await store.end(STREAM, b"late")
    assert await store.streams("acme") == []


async def test_a_damaged_object_is_a_fault(objects: FlakyObjects) -> None:
    """Protects readers from half a segment: an object is whole or it is damaged."""
    store = StreamBucket(objects)
    (await started(store, STREAM, b"one")).close()
    await objects.put_async(segments_key(STREAM, 1), b"\0\0\0\x09half", mode="overwrite")
    with pytest.raises(errors.StreamStoreUnavailable):
        await all_of(store)


@pytest.mark.parametrize("url", ["", "nonsense", "s3://", "ftp://x/y", "https://x/y", "file://"])
def test_an_address_that_is_none_is_refused_in_a_sentence(url: str) -> None:
    """Protects operators: a wrong address is told at start."""
    with pytest.raises(errors.InvalidRequest):
        StreamBucket.from_url(url)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an installation without the extra: it says what to install, and the module is there without it."""
    for module in ("obstore", "obstore.exceptions", "obstore.store"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.InvalidRequest, match=r"weir\[objects\]"):
        StreamBucket.from_url("s3://streams")


async def test_credentials_and_endpoint_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the documented variables: with them alone, a bucket of another provider works."""
    named = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
    for name, value in {**named, "ENDPOINT": s3_endpoint(), "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = StreamBucket.from_url(f"s3://{BUCKET}/by-environment")
    (await started(store, STREAM, b"one")).close()
    assert await all_of(store) == [b"one"] and await store.tenants() == ["acme"]
    await store.delete(STREAM)
