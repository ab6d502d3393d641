"""The artifact store as the event loop uses it: each call runs on a thread, because it reads and writes whole models.

The threads are few and its own: what comes into force passes the loop's, and must never wait until models are read. A caller
that is cancelled does not stop work that has begun; what was opened for it is closed all the same.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from weir.ports import KeptArtifact, Verify
from weir.storage.artifact_store import ArtifactStore, OpenArtifact

T = TypeVar("T")

_THREADS = 4
"""A disk and the hash of a few files at once keep each other busy; more only wait for them."""


class ArtifactsOffLoop:
    """The `Artifacts` port on a store, and what a launcher needs of it."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="artifacts")

    def close(self) -> None:
        """Nothing is begun any more; what was begun goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def keep(self, folder: Path, bundle: bytes, verify: Verify, signature_name: str | None = None) -> KeptArtifact:
        """As `ArtifactStore.keep`."""
        return await self._off_loop(lambda: self._store.keep(folder, bundle, verify, signature_name))

    async def keep_file(self, content: bytes) -> str:
        """As `ArtifactStore.keep_file`."""
        return await self._off_loop(lambda: self._store.keep_file(content))

    async def read_file(self, digest: str) -> bytes:
        """As `ArtifactStore.read_file`."""
        return await self._off_loop(lambda: self._store.read_file(digest))

    @asynccontextmanager
    async def opened(self, digest: str, names: Sequence[str], verify: Verify) -> AsyncIterator[OpenArtifact]:
        """As `ArtifactStore.opened`."""
        held = ExitStack()
        opening = self._off_loop(lambda: held.enter_context(self._store.opened(digest, names, verify)))
        try:
            artifact = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(partial(_close_unwanted, held))
            raise
        with held:
            yield artifact

    def _off_loop(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


def _close_unwanted(held: ExitStack, opened: asyncio.Future[OpenArtifact]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        held.close()
