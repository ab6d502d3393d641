"""The packaged models as signed artifacts: this cell vouches for them with a key of its own, which says no more than that.

It decides how a packaged file becomes an artifact. The key is made from a secret of the state directory, so that each start has
the same one; what it signed is loaded as long as the key ring trusts it.
"""

import asyncio
import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

from weir import errors
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.manifest import FileDigest, Manifest, manifest_of
from weir.core.registry.signatures import private_key_from, public_key_of, sign, verify
from weir.storage.artifacts_off_loop import ArtifactsOffLoop

_NAME = "development"
_NAME_DIGITS = 8


class PackagedArtifacts:
    """secret: 32 random bytes that nobody else has. staging: a directory for folders on their way into the store."""

    def __init__(self, artifacts: ArtifactsOffLoop, secret: bytes, staging: Path) -> None:
        self._artifacts = artifacts
        self._private_key = private_key_from(secret)
        self._staging = staging
        public_key = public_key_of(self._private_key)
        named = SigningKey(_NAME, public_key, frozenset({KeyRole.MODEL}), None, 0)
        self.signing_key = SigningKey(f"{_NAME}-{named.fingerprint[:_NAME_DIGITS]}", public_key, named.roles, None, 0)
        """What the key ring has to trust; its name is another one for each state directory."""

    async def keep(self, path: Path) -> str:
        """The digest of the artifact that consists of this one file, which is kept now. Raises ArtifactRefused."""
        manifest = await asyncio.to_thread(_manifest_of, path)
        trusted = partial(verify, keys=(self.signing_key,), role=KeyRole.MODEL, tenant=None, now_ms=0)
        try:
            async with self._artifacts.opened(manifest.digest, (), trusted):
                return manifest.digest
        except (errors.ArtifactRefused, errors.SignatureRefused):
            pass  # it is not kept yet, or is damaged
        folder = self._staging / manifest.digest.replace(":", "-")
        try:
            await asyncio.to_thread(_stage, path, folder)
            await self._artifacts.keep(folder, sign(manifest, path.name, self._private_key), trusted)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return manifest.digest


def _manifest_of(path: Path) -> Manifest:
    with path.open("rb") as file:
        return manifest_of([FileDigest(path.name, hashlib.file_digest(file, "sha256").hexdigest())])


def _stage(path: Path, folder: Path) -> None:
    """A folder with this file alone: a second name of it where that is possible, else a copy."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        os.link(path, folder / path.name)
    except OSError:
        shutil.copyfile(path, folder / path.name)
