"""Retained streams in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure, or a local folder for tests.

    <prefix>/<tenant>/<generation>/head          written only where it is absent; without it there is no stream
                                  /s/00000000    some segments, one behind the other, see `stream_framing`; a cursor is the
                                  /s/00000001    number of the next such object
                                  /end           written only where it is absent
                                  /touched       when somebody last read it, as a number; written again and again

It decides how segments are gathered into objects: one write of a stream is under way at a time, and what is appended meanwhile
goes into the next object together. So objects appear in order: a reader that meets a missing one has seen all that is stored.

A write is tried three times within two seconds in all; then its stream fails. The client is an extra (obstore), imported here
only once a bucket is asked for. It takes credentials and the endpoint from the environment:

    S3      AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; AWS_ENDPOINT for another provider,
            AWS_ALLOW_HTTP where that has no TLS; AWS_DISABLE_BULK_DELETE where it cannot delete many objects in one request.
            On AWS machines the instance's or the container's role
    GCS     GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS: the path of a key file. On its machines their account
    Azure   AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, or AZURE_CLIENT_ID, AZURE_CLIENT_SECRET, AZURE_TENANT_ID
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from weir import errors
from weir.kept_streams import OnStored, StoredStream, StreamName
from weir.storage.object_requests import ObjectClient, ObjectRequests, object_client
from weir.storage.stream_framing import LENGTH_BYTES, READ_BYTES, check_name, framed, is_name, segments_of
from weir.units import Bytes, Millis

WRITE_SECONDS = 2.0
READ_SECONDS = 5.0
LIST_SECONDS = 60.0

_GETS_MAX = 16
_TOUCH_DIGITS_MAX = 20
_LISTED_AT_ONCE = 1_000
_DELETE_ROUNDS = 4


class BucketWriter:
    """Gathers appended segments into objects and stores these one after the other, in a task of its own."""

    def __init__(self, bucket: "StreamBucket", name: StreamName, on_stored: OnStored) -> None:
        self._bucket = bucket
        self._name = name
        self._on_stored = on_stored
        self._waiting: deque[bytes] = deque()
        self._unstored: Bytes = 0
        self._objects = 0
        self._segments = 0
        self._storing: asyncio.Task[None] | None = None
        self._fault: errors.StreamStoreUnavailable | None = None

    def append(self, segment: bytes) -> bool:
        """False: it is stored later, and `on_stored` tells. Raises StreamStoreUnavailable once an earlier one could not be."""
        self._check()
        self._waiting.append(framed(segment))
        self._unstored += len(segment)
        if self._storing is None:
            self._storing = asyncio.get_running_loop().create_task(self._store())
        return False

    async def _store(self) -> None:
        try:
            while self._waiting:
                frames = self._next_object()
                content = b"".join(frames)
                await self._bucket.put(segments_key(self._name, self._objects), content)
                self._objects += 1
                self._segments += len(frames)
                self._unstored -= len(content) - LENGTH_BYTES * len(frames)
                self._on_stored(self._segments)
        except errors.StreamStoreUnavailable as fault:
            self._fault = fault
            self._waiting.clear()
            self._on_stored(-1)
        finally:
            self._storing = None

    def _next_object(self) -> list[bytes]:
        """What waits, in order, up to what one read returns; one segment at least."""
        frames = [self._waiting.popleft()]
        size = len(frames[0])
        while self._waiting and (size := size + len(self._waiting[0])) <= READ_BYTES:
            frames.append(self._waiting.popleft())
        return frames

    @property
    def unstored(self) -> Bytes:
        """As the port says."""
        return self._unstored

    async def flush(self) -> None:
        """As the port says."""
        while self._storing is not None:
            await asyncio.wait([self._storing])
        self._check()

    def _check(self) -> None:
        if self._fault is not None:
            raise errors.StreamStoreUnavailable(self._fault.detail) from self._fault

    def close(self) -> None:
        """As the port says. The object that is under way may still be stored: readers see a whole one or none."""
        if self._storing is not None:
            self._storing.cancel()
            self._storing = None  # a task that never began ends without a word
        self._waiting.clear()
        self._fault = self._fault or errors.StreamStoreUnavailable("The stream's writer is closed.")
        self._bucket.forget(self)


class StreamBucket:
    """The port on an object store's client. Generation ids are not used twice: a deleted stream's name is never taken again."""

    poll_ms: Millis = 500

    def __init__(self, objects: ObjectClient) -> None:
        self._objects = objects
        self._requests = ObjectRequests("Retained streams cannot be kept or read now.", errors.StreamStoreUnavailable)
        self._taken = self._requests.taken
        self._writers: set[BucketWriter] = set()

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "StreamBucket":
        """A bucket by its address: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`.

        options: of obstore's `from_url`, instead of the environment. Raises InvalidRequest, as `object_client` does.
        """
        return cls(object_client(url, "retained streams", **options))

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> BucketWriter:
        """As the port says."""
        check_name(name)
        if not await self._put_new(f"{folder_key(name)}head", head):
            raise errors.StreamStoreUnavailable("A stream of this name is stored already.")
        writer = BucketWriter(self, name, on_stored)
        self._writers.add(writer)
        return writer

    async def head(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await self._get(f"{folder_key(name)}head")

    async def read(self, name: StreamName, cursor: int) -> tuple[Sequence[bytes], int]:
        """As the port says; a cursor is the number of the next object.

        Asks for one object, then for more and more at once: to follow a stream costs one request, to catch up few round trips.
        """
        check_name(name)
        found: list[bytes] = []
        size, largest, at_once = 0, 1, 1
        while size < READ_BYTES:
            keys = [segments_key(name, cursor + number) for number in range(at_once)]
            for content in await asyncio.gather(*map(self._get, keys)):
                if content is None:
                    return found, cursor
                if size and size + len(content) > READ_BYTES:
                    return found, cursor
                segments, whole = segments_of(content)
                if whole != len(content):
                    raise errors.StreamStoreUnavailable("The stored stream is damaged.")
                found += segments
                size, largest, cursor = size + len(content), max(largest, len(content)), cursor + 1
            at_once = max(1, min(2 * at_once, _GETS_MAX, (READ_BYTES - size) // largest))
        return found, cursor

    async def end(self, name: StreamName, last: bytes) -> bytes:
        """As the port says. Raises StreamStoreUnavailable also where the stream was deleted, whose end is not left behind."""
        check_name(name)
        key = f"{folder_key(name)}end"
        is_ours = await self._put_new(key, last)
        # A delete takes the head before it looks for the rest, so either it finds this end, or its loss shows here.
        if not await self._exists(f"{folder_key(name)}head"):
            if is_ours:
                await self._remove(key)
            raise errors.StreamStoreUnavailable("The stream is not stored, or not any more.")
        stored = last if is_ours else await self._get(key)
        if stored is None:
            raise errors.StreamStoreUnavailable("The stream is not stored, or not any more.")
        return stored

    async def ending(self, name: StreamName) -> bytes | None:
        """As the port says."""
        check_name(name)
        return await self._get(f"{folder_key(name)}end")

    async def find(self, name: StreamName) -> StoredStream | None:
        """As the port says."""
        check_name(name)
        is_stream = await self._exists(f"{folder_key(name)}head")
        found = await self._stored(name.tenant, folder_key(name)) if is_stream else []
        return found[0] if found else None

    async def touch(self, name: StreamName) -> None:
        """As the port says. One that is deleted meanwhile may leave this behind, which `streams` lists."""
        check_name(name)
        if await self._exists(f"{folder_key(name)}head"):
            await self.put(f"{folder_key(name)}touched", str(time.time_ns()).encode())

    async def touched(self, name: StreamName) -> int:
        """As the port says."""
        check_name(name)
        told = await self._get(f"{folder_key(name)}touched") or b"0"
        if not told.isdigit() or len(told) > _TOUCH_DIGITS_MAX:
            raise errors.StreamStoreUnavailable("The stored stream is damaged.")
        return int(told)

    async def streams(self, tenant: str) -> list[StoredStream]:
        """As the port says. Times are the store's own: on S3, whole seconds."""
        check_name(StreamName(tenant, "any"))
        return await self._stored(tenant, f"{tenant}/")

    async def _stored(self, tenant: str, prefix: str) -> list[StoredStream]:
        found: dict[str, StoredStream] = {}
        async for key, size, changed_ms in self._listed(prefix):
            generation, _, file = key.removeprefix(f"{tenant}/").partition("/")
            if is_name(generation):
                known = found.get(generation) or StoredStream(StreamName(tenant, generation), 0, 0, False)
                newest = max(known.changed_ms, changed_ms if file != "touched" else 0)
                found[generation] = StoredStream(known.name, known.size + size, newest, known.is_ended or file == "end")
        return sorted(found.values(), key=lambda stream: (stream.changed_ms, stream.name.generation))

    async def tenants(self) -> list[str]:
        """As the port says, in the order of names."""
        listed = await self._requests.tried(self._objects.list_with_delimiter_async, LIST_SECONDS)
        return sorted(filter(is_name, (prefix.strip("/") for prefix in listed["common_prefixes"])))

    async def delete(self, name: StreamName) -> None:
        """As the port says. The head goes first: from then on it is no stream.

        An owner that still writes leaves objects without a head, which `streams` lists until they are deleted, too.
        """
        check_name(name)
        await self._remove(f"{folder_key(name)}head")
        await self._remove(f"{folder_key(name)}end")
        for _ in range(_DELETE_ROUNDS):
            keys = [key async for key, _, _ in self._listed(folder_key(name))]
            if not keys or await self._remove(keys):
                return
        raise errors.StreamStoreUnavailable("The stream is written to while it is deleted.")

    async def aclose(self) -> None:
        """As the port says: its writers are closed."""
        for writer in tuple(self._writers):
            writer.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, writer: BucketWriter) -> None:
        """A writer that is closed."""
        self._writers.discard(writer)

    async def put(self, key: str, content: bytes) -> None:
        """Store an object. Raises StreamStoreUnavailable."""
        await self._requests.tried(lambda: self._objects.put_async(key, content, mode="overwrite"), WRITE_SECONDS)

    async def _put_new(self, key: str, content: bytes) -> bool:
        """Store an object where there is none; False where there is one."""
        tries = 0

        async def put() -> None:
            nonlocal tries
            tries += 1
            await self._objects.put_async(key, content, mode="create")

        try:
            await self._requests.tried(put, WRITE_SECONDS, self._taken)
        except self._taken:
            # An earlier try may have been stored and its answer lost; sealed content is never the same by chance.
            return tries > 1 and await self._get(key) == content
        return True

    async def _get(self, key: str) -> bytes | None:
        async def get() -> bytes:
            content: bytes = (await (await self._objects.get_async(key)).bytes_async()).to_bytes()
            return content

        with suppress(FileNotFoundError):
            return await self._requests.tried(get, READ_SECONDS, FileNotFoundError)
        return None

    async def _exists(self, key: str) -> bool:
        with suppress(FileNotFoundError):
            await self._requests.tried(lambda: self._objects.head_async(key), READ_SECONDS, FileNotFoundError)
            return True
        return False

    async def _remove(self, keys: str | Sequence[str]) -> bool:
        """Whether all are gone: some stores end at the first one that is missing."""
        with suppress(FileNotFoundError):
            await self._requests.tried(lambda: self._objects.delete_async(keys), LIST_SECONDS, FileNotFoundError)
            return True
        return isinstance(keys, str)

    async def _listed(self, prefix: str) -> AsyncIterator[tuple[str, Bytes, Millis]]:
        """Key, size and time of the last write of every object below a prefix."""

        async def listed() -> list[Any]:
            objects: list[Any] = await self._objects.list(prefix, chunk_size=_LISTED_AT_ONCE).collect_async()
            return objects

        for each in await self._requests.tried(listed, LIST_SECONDS):
            modified: datetime = each["last_modified"]
            yield each["path"], each["size"], int(modified.timestamp() * 1_000)


def folder_key(name: StreamName) -> str:
    """What the keys of a stream's objects begin with."""
    return f"{name.tenant}/{name.generation}/"


def segments_key(name: StreamName, number: int) -> str:
    """The key of an object of segments. number: 0 … 99,999,999."""
    return f"{folder_key(name)}s/{number:08d}"
