"""What a replica of a registered artifact loads, as the key ring trusts it at that moment.

It decides for which role and tenant a signature must vouch, and which model an adapter is put on: each is verified for itself.
Keys and models are read from the catalog at each start of a replica, so that what was revoked a moment ago starts nothing.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from weir import errors
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import EngineKind, Revision
from weir.core.registry.signatures import verify
from weir.ports import Catalog, Clock, ControlStore
from weir.storage.artifact_store import OpenArtifact
from weir.storage.artifacts_off_loop import ArtifactsOffLoop


@dataclass(frozen=True, slots=True)
class LoadedArtifact:
    """An open artifact. path: what the engine loads of it."""

    path: str
    artifact: OpenArtifact


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a replica loads: a model, and an adapter where its revision is one."""

    parts: tuple[LoadedArtifact, ...]

    @property
    def model(self) -> str:
        """The model's path for a child that inherits the descriptors."""
        return self.parts[0].path

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters' paths, likewise."""
        return tuple(part.path for part in self.parts[1:])

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the child must inherit."""
        return tuple(descriptor for part in self.parts for descriptor in part.artifact.descriptors)

    def check_unchanged(self) -> None:
        """Raises ArtifactRefused unless nothing was touched since it was verified."""
        for part in self.parts:
            part.artifact.check_unchanged()


class CatalogTrustedFiles:
    """Artifacts of a store, on the signatures of keys that the catalog trusts."""

    def __init__(self, artifacts: ArtifactsOffLoop, catalog: ControlStore, clock: Clock) -> None:
        self._artifacts = artifacts
        self._catalog = catalog
        self._clock = clock

    @asynccontextmanager
    async def opened(self, revision: Revision) -> AsyncIterator[LoadedModel]:
        """What a revision with an artifact loads.

        Raises SignatureRefused, ArtifactRefused, NotAllowedNow for an adapter whose model does not serve it, or a StoreFault.
        """
        catalog = await self._catalog.load()
        needed = [revision] if revision.adapter_of is None else [_changed_by(catalog, revision), revision]
        async with AsyncExitStack() as held:
            parts = []
            for each in needed:
                with _named(each, revision):
                    parts.append(await self._opened(each, catalog, held))
            yield LoadedModel(tuple(parts))

    async def _opened(self, revision: Revision, catalog: Catalog, held: AsyncExitStack) -> LoadedArtifact:
        assert revision.artifact_digest is not None
        role = KeyRole.MODEL if revision.adapter_of is None else KeyRole.ADAPTER
        trusted = partial(verify, keys=catalog.signing_keys, role=role, tenant=revision.tenant, now_ms=self._clock.wall_ms())
        is_folder = revision.engine is EngineKind.VLLM
        names = [] if is_folder else [revision.artifact]
        artifact = await held.enter_async_context(self._artifacts.opened(revision.artifact_digest, names, trusted))
        return LoadedArtifact(artifact.folder if is_folder else artifact.path_of(revision.artifact), artifact)


@contextmanager
def _named(part: Revision, whole: Revision) -> Iterator[None]:
    """Whose fault it is, where that is not what was asked for: both may have a file of one name."""
    try:
        yield
    except errors.CallerFault as refused:
        if part == whole:
            raise
        raise type(refused)(f"Its model {part.id}: {refused.detail}", members=refused.members) from refused


def _changed_by(catalog: Catalog, adapter: Revision) -> Revision:
    """The revision whose model an adapter changes."""
    model = next((each for each in catalog.revisions if each.id == adapter.adapter_of), None)
    if model is None or not model.serves or model.tenant not in (None, adapter.tenant):
        raise errors.NotAllowedNow(f"Its model {adapter.adapter_of!r} does not serve it.", members={})
    return model
