"""The port of retained streams: where a gateway keeps the sealed segments of a stream, so that any gateway can show it again.

It is beside `ports` because gateways alone use it, with a credential of its own that opens no database. What is stored is
ciphertext: an implementation sees names, sizes and times, and never a key or a text. Names are those of tenants and of
generations: `a-z 0-9 . _ -`, at most 63, no mark first; another one is a ValueError, since names are ours. A generation's name
is never used again. In `weir.storage`: `stream_directory`, `stream_bucket` and `stream_memory`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.units import Bytes, Millis


@dataclass(frozen=True, slots=True)
class StreamName:
    """One generation's stream. Two tenants never share one, whatever their generations are called."""

    tenant: str
    generation: str


@dataclass(frozen=True, slots=True)
class StoredStream:
    """What a store knows of a stream. size: of everything stored. changed_ms: wall time of the last write."""

    name: StreamName
    size: Bytes
    changed_ms: Millis
    is_ended: bool


class StreamWriter(Protocol):
    """The one writer of a stream that runs; its owner's. Not for two tasks at once."""

    def append(self, segment: bytes) -> bool:
        """Store the next segment, ≥ 1 byte. True: it is stored. False: it will be, in order; `on_stored` tells.

        Raises StreamStoreUnavailable where it can't be stored; then nothing more may be appended.
        """
        ...

    @property
    def unstored(self) -> Bytes:
        """Bytes of segments that were appended and are not stored yet."""
        ...

    async def flush(self) -> None:
        """Returns once every appended segment is stored. Raises StreamStoreUnavailable."""
        ...

    def close(self) -> None:
        """Let go of whatever is open; what was not stored is dropped. Idempotent."""
        ...


OnStored = Callable[[int], None]
"""Told on the event loop how many segments, of all that were appended so far, are stored, where `append` said False.

-1: the rest cannot be stored any more."""


class StreamStore(Protocol):
    """A directory, a bucket, or memory. Every call raises StreamStoreUnavailable where the store fails it."""

    poll_ms: Millis
    """How often a reader in another process asks for more of a stream that runs."""

    async def create(self, name: StreamName, head: bytes, on_stored: OnStored) -> StreamWriter:
        """Begin a stream. Its head is stored on return. Raises StreamStoreUnavailable also where the stream exists.

        A caller that is cancelled may have begun it all the same.
        """
        ...

    async def head(self, name: StreamName) -> bytes | None:
        """What the stream began with; None where there is no such stream, or it was deleted."""
        ...

    async def read(self, name: StreamName, cursor: int) -> tuple[Sequence[bytes], int]:
        """Whole segments from a cursor on, in order, and the cursor behind them; none where there is nothing more yet.

        cursor: 0 for the first segment, else one that was returned; good in every process, for as long as the stream is
        stored. At most about 256 KiB at once, or one that is larger. A segment that was not stored whole is not there.
        """
        ...

    async def end(self, name: StreamName, last: bytes) -> bytes:
        """Store the end, once: what is stored as the end now, which is an earlier caller's where there was one.

        The owner flushes first. Raises StreamStoreUnavailable also where there is no such stream, or it was deleted.
        """
        ...

    async def ending(self, name: StreamName) -> bytes | None:
        """What it ended with; None while it has no end, and where there is no such stream."""
        ...

    async def find(self, name: StreamName) -> StoredStream | None:
        """What is stored of one stream; None as for `head`."""
        ...

    async def touch(self, name: StreamName) -> None:
        """Somebody reads it; does nothing where there is no such stream. It is no write: `changed_ms` stays."""
        ...

    async def touched(self, name: StreamName) -> int:
        """A number that every touch changes; 0 where there was none."""
        ...

    async def streams(self, tenant: str) -> list[StoredStream]:
        """All of a tenant's streams, the one that changed first first.

        Also what is left of one whose beginning, or deletion, was broken off: it has no head, and `delete` removes it.
        """
        ...

    async def tenants(self) -> list[str]:
        """Tenants for which `streams` has any, in the order of names."""
        ...

    async def delete(self, name: StreamName) -> None:
        """Nothing of it is stored on return. Idempotent. From its first moment on there is no head.

        An owner that goes on may append to what nobody reads, or leave segments without a head; it can't end the stream.
        """
        ...

    async def aclose(self) -> None:
        """Let go of threads and connections. Idempotent."""
        ...
