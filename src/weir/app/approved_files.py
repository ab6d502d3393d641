"""What a replica of a registered artifact loads, as the key ring trusts it at that moment.

It decides for which role and tenant a signature must vouch. The keys are read from the catalog at each start of a replica, so
that one that was revoked a moment ago starts nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import Revision
from weir.core.registry.signatures import verify
from weir.ports import Clock, ControlStore
from weir.storage.artifact_store import OpenArtifact
from weir.storage.artifacts_off_loop import ArtifactsOffLoop


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The one file of an open artifact that a revision names."""

    name: str
    artifact: OpenArtifact

    @property
    def model(self) -> str:
        """Its path for a child that inherits the descriptors."""
        return self.artifact.path_of(self.name)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the child must inherit."""
        return self.artifact.descriptors

    def check_unchanged(self) -> None:
        """Raises ArtifactRefused unless nothing was touched since it was verified."""
        self.artifact.check_unchanged()


class CatalogTrustedFiles:
    """Artifacts of a store, on the signatures of keys that the catalog trusts."""

    def __init__(self, artifacts: ArtifactsOffLoop, catalog: ControlStore, clock: Clock) -> None:
        self._artifacts = artifacts
        self._catalog = catalog
        self._clock = clock

    @asynccontextmanager
    async def opened(self, revision: Revision) -> AsyncIterator[LoadedModel]:
        """What a revision with an artifact loads. Raises SignatureRefused, ArtifactRefused, or a StoreFault."""
        assert revision.artifact_digest is not None
        keys = (await self._catalog.load()).signing_keys
        role = KeyRole.MODEL if revision.adapter_of is None else KeyRole.ADAPTER
        trusted = partial(verify, keys=keys, role=role, tenant=revision.tenant, now_ms=self._clock.wall_ms())
        async with self._artifacts.opened(revision.artifact_digest, [revision.artifact], trusted) as artifact:
            yield LoadedModel(revision.artifact, artifact)
