"""The artifact store as the event loop uses it: each call runs on a thread, because it reads and writes whole models.

It decides nothing. A caller that is cancelled does not stop work that has begun; what was opened for it is closed all the same.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from weir.ports import KeptArtifact, Verify
from weir.storage.artifact_store import ArtifactStore, OpenArtifact


class ArtifactsOffLoop:
    """The `Artifacts` port on a store, and what a launcher needs of it."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def keep(self, folder: Path, bundle: bytes, verify: Verify, signature_name: str | None = None) -> KeptArtifact:
        """As `ArtifactStore.keep`."""
        return await asyncio.to_thread(self._store.keep, folder, bundle, verify, signature_name)

    async def keep_file(self, content: bytes) -> str:
        """As `ArtifactStore.keep_file`."""
        return await asyncio.to_thread(self._store.keep_file, content)

    async def read_file(self, digest: str) -> bytes:
        """As `ArtifactStore.read_file`."""
        return await asyncio.to_thread(self._store.read_file, digest)

    @asynccontextmanager
    async def opened(self, digest: str, names: Sequence[str], verify: Verify) -> AsyncIterator[OpenArtifact]:
        """As `ArtifactStore.opened`."""
        held = ExitStack()
        opening = asyncio.get_running_loop().run_in_executor(
            None, held.enter_context, self._store.opened(digest, names, verify)
        )
        try:
            artifact = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda _: held.close())
            raise
        with held:
            yield artifact
