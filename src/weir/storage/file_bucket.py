"""Tenants' files in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure, or a local folder for tests.

    <prefix>/<key>                       as the port's key says
            /<folder>/.unfinished-<id>   a large file on its way, beside where it will lie; no listing shows it

It decides how a file comes to be there once. One of up to 8 MiB is a single write on condition that there is none. A larger
one goes up in parts, as an unfinished object, which `commit` copies on that same condition: S3 completes a copy in parts only
where the key is free; Google and Azure have such a copy. What a killed process left is removed by a listing of the folder, a
day later. Parts that never became an object, as of an upload that failed half-way, are the bucket's to expire, by a rule there.

So all of it holds where the store knows `If-None-Match: *`, for a write and for the completion of an upload in parts. With a
provider that ignores it for the latter, two commits of one large file that end in the same moment may both answer True; for one
that has a header for copies instead, AWS_COPY_IF_NOT_EXISTS names it. Credentials are those of `stream_bucket`.
"""

import os
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from weir import errors
from weir.kept_files import StoredFile
from weir.storage.file_names import UNFINISHED, UNFINISHED_MS_MAX, check_folder, check_key, check_range, is_name
from weir.storage.object_requests import ObjectClient, ObjectRequests, object_client
from weir.units import NANOS_PER_MILLI, Bytes, Millis

PART_BYTES: Bytes = 8 * 1024 * 1024
"""A file up to here is one request; a larger one goes up in parts of this. A writer holds up to four of them in memory."""

REQUEST_SECONDS = 30.0
LIST_SECONDS = 60.0
COPY_SECONDS = 300.0
_PARTS_AT_ONCE = 2
_PART_TRIES = 3
_ID_BYTES = 16
_OWNER = "writer"
"""Who stored an object: what tells a write whose answer was lost from that of another."""


class FileObjects(ObjectClient, Protocol):
    """What this needs of obstore's stores, all of which have it."""

    async def put_async(self, path: str, file: bytes, *, mode: Any, attributes: Any = None) -> Any: ...

    async def get_async(self, path: str, *, options: Any = None) -> Any: ...

    async def copy_async(self, from_: str, to: str, *, overwrite: bool = True) -> Any: ...


class BucketFileWriter:
    """Gathers pieces; from PART_BYTES on it sends them up as an unfinished object."""

    def __init__(self, bucket: "FileBucket", key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._unfinished = f"{key.rpartition('/')[0]}/{UNFINISHED}{_new_id()}"
        self._pieces: list[bytes] = []
        self._size: Bytes = 0
        self._upload: Any = None
        self._is_open = True

    async def write(self, content: bytes) -> None:
        """As the port says."""
        self._check_open()
        self._pieces.append(bytes(content))
        self._size += len(content)
        if self._size <= PART_BYTES:
            return
        self._is_open = False
        pieces, self._pieces = self._pieces, []
        if self._upload is None:
            self._upload = self._bucket.upload(self._unfinished)
        for piece in pieces:
            await self._bucket.requests.once(partial(self._upload.write, piece), REQUEST_SECONDS)
        self._is_open = True

    async def commit(self) -> bool:
        """As the port says."""
        self._check_open()
        self._is_open = False
        if self._upload is None:
            pieces, self._pieces = self._pieces, []
            return await self._bucket.put_new(self._key, b"".join(pieces))
        try:
            await self._bucket.requests.once(self._upload.close, REQUEST_SECONDS)
            self._upload = None
            return await self._bucket.copy_new(self._unfinished, self._key)
        finally:
            await self._drop()

    async def abort(self) -> None:
        """As the port says. An upload in parts is completed and deleted: the client has no other end for it."""
        self._is_open = False
        self._pieces.clear()
        if self._upload is not None:
            await self._drop()

    async def _drop(self) -> None:
        upload, self._upload = self._upload, None
        with suppress(errors.FileStoreUnavailable):
            if upload is not None:
                await self._bucket.requests.once(upload.close, REQUEST_SECONDS)
        with suppress(errors.FileStoreUnavailable):
            await self._bucket.remove(self._unfinished)

    def _check_open(self) -> None:
        if not self._is_open:
            raise errors.FileStoreUnavailable("This file is written or given up already, or a write of it failed.")


class FileBucket:
    """The port on an object store's client.

    uploads: one that repeats parts by itself. copies: one that can copy on condition that there is none. Without, `objects` is.
    """

    def __init__(self, objects: FileObjects, uploads: Any = None, copies: FileObjects | None = None) -> None:
        self._objects = objects
        self._uploads: Any = uploads or objects
        self._copies = copies or objects
        self.requests = ObjectRequests("Files cannot be kept or read now.", errors.FileStoreUnavailable)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "FileBucket":
        """A bucket by its address: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`.

        options: of obstore's `from_url`, instead of the environment. Raises InvalidRequest, as `object_client` does.
        """
        objects = object_client(url, "files", **options)
        if url.startswith("file:"):
            return cls(objects)
        uploads = object_client(url, "files", **{"retry_config": {"max_retries": _PART_TRIES - 1}, **options})
        copying = {"copy_if_not_exists": "multipart", **options} if url.startswith("s3:") else options
        return cls(objects, uploads, object_client(url, "files", **copying))

    async def begin(self, key: str) -> BucketFileWriter:
        """As the port says. It asks for nothing yet."""
        check_key(key)
        return BucketFileWriter(self, key)

    async def create(self, key: str, content: bytes) -> bool:
        """As the port says."""
        check_key(key)
        return await self.put_new(key, bytes(content))

    async def replace(self, key: str, content: bytes) -> None:
        """As the port says."""
        check_key(key)
        await self.requests.tried(lambda: self._objects.put_async(key, bytes(content), mode="overwrite"), REQUEST_SECONDS)

    async def read(self, key: str, start: Bytes = 0, size: Bytes | None = None) -> bytes | None:
        """As the port says."""
        check_key(key)
        check_range(start, size)
        if size == 0:
            return None if await self.find(key) is None else b""
        part = {"offset": start} if size is None else (start, start + size)
        with suppress(FileNotFoundError):
            return await self.requests.tried(lambda: self._read(key, start, part), REQUEST_SECONDS, FileNotFoundError)
        return None

    async def _read(self, key: str, start: Bytes, part: Any) -> bytes:
        try:
            return await self._got(key, {"range": part} if part != {"offset": 0} else None)
        except self.requests.faults as fault:
            # A part behind the end is refused, each store with a reason of its own.
            if isinstance(fault, FileNotFoundError) or start < (await self._objects.head_async(key))["size"]:
                raise
            return b""

    async def _got(self, key: str, options: Any) -> bytes:
        content: bytes = (await (await self._objects.get_async(key, options=options)).bytes_async()).to_bytes()
        return content

    async def find(self, key: str) -> StoredFile | None:
        """As the port says. Its time is the store's own: on S3, a whole second."""
        check_key(key)
        with suppress(FileNotFoundError):
            return _stored(await self.requests.tried(lambda: self._objects.head_async(key), REQUEST_SECONDS, FileNotFoundError))
        return None

    async def files(self, folder: str, after: str = "", limit: int = 10_000) -> list[StoredFile]:
        """As the port says. It reads the whole folder each time, and removes what killed processes left there."""
        check_folder(folder)
        listed = await self.requests.tried(lambda: self._objects.list_with_delimiter_async(folder), LIST_SECONDS)
        found: list[StoredFile] = []
        for each in map(_stored, listed["objects"]):
            name = each.key.rpartition("/")[2]
            if is_name(name) and each.key > after:
                found.append(each)
            elif name.startswith(UNFINISHED) and _now_ms() - each.changed_ms >= UNFINISHED_MS_MAX:
                await self.remove(each.key)
        return sorted(found, key=lambda each: each.key)[:limit]

    async def folders(self) -> list[str]:
        """As the port says; also one in which there is only an unfinished file."""
        listed = await self.requests.tried(self._objects.list_with_delimiter_async, LIST_SECONDS)
        return sorted(filter(is_name, (prefix.strip("/") for prefix in listed["common_prefixes"])))

    async def delete(self, key: str) -> None:
        """As the port says."""
        check_key(key)
        await self.remove(key)

    async def aclose(self) -> None:
        """Nothing is held; writers are ended by who asked for them."""

    # ── requests, for its writers too ────────────────────────────────────────────────────────────────────────────────

    async def put_new(self, key: str, content: bytes) -> bool:
        """Store an object where there is none; False where there is one. Raises FileStoreUnavailable."""
        owner = _new_id()
        tries = 0

        async def put() -> None:
            nonlocal tries
            tries += 1
            try:
                await self._objects.put_async(key, content, mode="create", attributes={_OWNER: owner})
            except NotImplementedError:  # a local folder, which loses no answers
                await self._objects.put_async(key, content, mode="create")

        try:
            await self.requests.tried(put, REQUEST_SECONDS, self.requests.taken)
        except self.requests.taken:
            return tries > 1 and await self._owner(key) == owner
        return True

    async def _owner(self, key: str) -> str | None:
        with suppress(FileNotFoundError):
            found = await self.requests.tried(
                lambda: self._objects.get_async(key, options={"head": True}), REQUEST_SECONDS, FileNotFoundError
            )
            owner: str | None = found.attributes.get(_OWNER)
            return owner
        return None

    def upload(self, key: str) -> Any:
        """An object in parts: `write` and `close` are awaited, and it is there once it is closed."""
        from obstore import open_writer_async

        return open_writer_async(self._uploads, key, buffer_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    async def copy_new(self, source: str, key: str) -> bool:
        """Copy an object to where there is none; False where there is one. Raises FileStoreUnavailable."""
        if await self.find(key) is not None:
            return False
        tries = 0

        async def copy() -> None:
            nonlocal tries
            tries += 1
            try:
                await self._objects.copy_async(source, key, overwrite=False)
            except self.requests.unsupported:  # S3, unless the environment says how
                await self._copies.copy_async(source, key, overwrite=False)

        try:
            await self.requests.tried(copy, COPY_SECONDS, self.requests.taken)
        except self.requests.taken as taken:
            if tries > 1:  # an earlier try may have been carried out and its answer lost; a copy does not tell whose it is
                raise errors.FileStoreUnavailable("Whether the file is stored is not known.") from taken
            return False
        return True

    async def remove(self, key: str) -> None:
        """Delete an object that may be there. Raises FileStoreUnavailable."""
        with suppress(FileNotFoundError):
            await self.requests.tried(lambda: self._objects.delete_async(key), REQUEST_SECONDS, FileNotFoundError)


def _new_id() -> str:
    return os.urandom(_ID_BYTES).hex()


def _now_ms() -> Millis:
    return time.time_ns() // NANOS_PER_MILLI


def _stored(found: Any) -> StoredFile:
    modified: datetime = found["last_modified"]
    return StoredFile(found["path"], found["size"], int(modified.timestamp() * 1_000))
