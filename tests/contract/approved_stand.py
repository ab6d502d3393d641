"""A store with registered artifacts, a catalog with a key ring, and a launcher on both; and somebody who meddles with files."""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.contract.artifact_folders import DIGEST, FILES, MODEL, NOW_MS, Trust, key_of, signed, write

from weir.app.approved_files import CatalogTrustedFiles, LoadedModel
from weir.core.metering import Price
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.engines.launcher import LocalLauncher
from weir.ports import AuditEntry, CatalogChange
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop
from weir.storage.memory import MemoryCatalog

POOL = Pool("p", "v", 1, 2)
REVISION = Revision("v", EngineKind.LLAMACPP, MODEL, 512, 128, 64, Price(1, 1, 1, 1), artifact_digest=DIGEST)


class StandingClock:
    """Always the same moment."""

    def monotonic_ns(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return NOW_MS


class Stand:
    """options: of the launcher."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.directory = path / "artifacts"
        self._path = path
        self.artifacts = ArtifactsOffLoop(ArtifactStore(self.directory))
        self.catalog = MemoryCatalog()
        self.files = CatalogTrustedFiles(self.artifacts, self.catalog, StandingClock())
        self.options = {"threads": 2, "files": self.files, **options}
        self.launcher = LocalLauncher(**self.options)

    async def trust(self, *keys: SigningKey) -> None:
        """Put keys into the key ring."""
        await self._change(signing_keys=keys)

    async def put(self, *revisions: Revision) -> None:
        """Put revisions into the catalog, as they are."""
        await self._change(revisions=revisions)

    async def _change(self, **rows: Any) -> None:
        await self.catalog.apply(await self.catalog.version(), CatalogChange(AuditEntry(0, "a", "b", "c", "{}"), **rows))

    async def keep(self, files: Mapping[str, bytes] = FILES, number: int = 1, role: KeyRole = KeyRole.MODEL) -> str:
        """Keep an artifact of these files on the numbered key, with the files in reach of whoever tampers; its digest."""
        folder = write(Path(mkdtemp(dir=self._path)), files)
        kept = await self.artifacts.keep(folder, signed(files, number), Trust([key_of(number)]).of(role=role))
        for path in self.directory.rglob("*"):
            path.chmod(0o755)
        return kept.manifest.digest

    def kept(self, digest: str) -> Path:
        """Where an artifact is kept."""
        return self.directory / digest.removeprefix("sha256:")


class Meddler:
    """Files that somebody touches as they are handed over."""

    def __init__(self, files: CatalogTrustedFiles, meddle: Callable[[], object]) -> None:
        self._files = files
        self._meddle = meddle

    @asynccontextmanager
    async def opened(self, revision: Revision) -> AsyncIterator[LoadedModel]:
        """The same, once they were touched."""
        async with self._files.opened(revision) as files:
            self._meddle()
            yield files


def children() -> set[int]:
    """The processes that this one started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
