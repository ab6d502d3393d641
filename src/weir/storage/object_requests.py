"""Requests to an object store: tried three times within a time, and what the client says of a fault shows no secret.

It is what the stores on buckets share. The client is an extra (obstore), imported here only once a bucket is asked for. It
takes credentials and the endpoint from the environment, by its own names.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from weir import errors

_PAUSES_SECONDS = (0.05, 0.25)
"""Between the three tries of one request."""

_ADDRESS = re.compile(r"(s3|gs|az)://[^/].*|file:///.+")
_QUERY = re.compile(r"[?]\S*")

T = TypeVar("T")


class ObjectClient(Protocol):
    """What the stores need of obstore's, all of which have it."""

    async def put_async(self, path: str, file: bytes, *, mode: Any) -> Any: ...

    async def get_async(self, path: str) -> Any: ...

    async def head_async(self, path: str) -> Any: ...

    async def delete_async(self, paths: str | Sequence[str]) -> Any: ...

    def list(self, prefix: str, *, chunk_size: int) -> Any: ...

    async def list_with_delimiter_async(self, prefix: str | None = None) -> Any: ...


class BucketFault(Exception):
    """What the client said, in a line without what may be a credential."""


class ObjectRequests:
    """How a store asks its client. detail: of the errors that it raises. fault: their class."""

    def __init__(self, detail: str, fault: type[errors.StoreFault]) -> None:
        from obstore import exceptions

        self._detail = detail
        self._fault = fault
        self.taken = exceptions.AlreadyExistsError
        self.unsupported = exceptions.NotSupportedError
        self.faults: tuple[type[Exception], ...] = (exceptions.BaseError, OSError, ValueError)
        self._final = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.NotSupportedError,
            exceptions.InvalidPathError,
        )

    async def tried(self, request: Callable[[], Awaitable[T]], seconds: float, answer: type[Exception] | None = None) -> T:
        """A request, tried up to three times. answer: an exception that is no fault. Raises the store's error."""

        async def repeated() -> T:
            for pause in _PAUSES_SECONDS:
                try:
                    return await request()
                except self.faults as fault:
                    if isinstance(fault, self._final) or (answer is not None and isinstance(fault, answer)):
                        raise
                await asyncio.sleep(pause)
            return await request()

        return await self.once(repeated, seconds, answer)

    async def once(self, request: Callable[[], Awaitable[T]], seconds: float, answer: type[Exception] | None = None) -> T:
        """A request that is not repeated here. Raises the store's error."""
        try:
            async with asyncio.timeout(seconds):
                return await request()
        except self.faults as fault:
            if answer is not None and isinstance(fault, answer):
                raise
            raise self._fault(self._detail) from _shown(fault)


def object_client(url: str, purpose: str, **options: Any) -> Any:
    """obstore's client of a bucket: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`.

    purpose: what the bucket is for, in the plural. options: of obstore's `from_url`, instead of the environment. Raises
    InvalidRequest, naming the scheme only, where the client is not installed or refuses the address or an option.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as missing:
        raise errors.InvalidRequest(f"A bucket for {purpose} needs its client: install weir[objects].") from missing
    scheme = url.partition("://")[0]
    # The tries are counted here; a folder has no such setting.
    own: Mapping[str, Any] = (
        {"automatic_cleanup": True, "mkdir": True} if scheme == "file" else {"retry_config": {"max_retries": 0}}
    )
    if _ADDRESS.fullmatch(url) is None:
        raise errors.InvalidRequest("The address of a bucket is s3://NAME, gs://NAME, az://NAME or file:///FOLDER.")
    try:
        return from_url(url, **{**own, **options})
    except (BaseError, OSError, ValueError, TypeError):
        # What the client says may quote a credential.
        raise errors.InvalidRequest(f"This is no address of a bucket, or an option of it is wrong ({scheme}://…).") from None


def _shown(fault: Exception) -> BucketFault:
    """The first line, which has no header; a signature may be in the query of an address."""
    line = _QUERY.sub("", next(iter(str(fault).splitlines()), ""))
    return BucketFault(f"{type(fault).__name__}: {line}")
