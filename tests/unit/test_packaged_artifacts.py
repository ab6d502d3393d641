"""The packaged models as artifacts: signed by this cell's own key, kept once, and loaded only as long as they are whole."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from weir import errors
from weir.app.packaged_artifacts import PackagedArtifacts
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.signatures import verify
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop

SECRET = bytes(range(32))
MODEL = b"GGUF" + bytes(1_000)


@pytest.fixture
def packaged(tmp_path: Path) -> Callable[[bytes], PackagedArtifacts]:
    def with_secret(secret: bytes) -> PackagedArtifacts:
        return PackagedArtifacts(ArtifactsOffLoop(ArtifactStore(tmp_path / "artifacts")), secret, tmp_path / "models")

    return with_secret


async def read(tmp_path: Path, digest: str, packaged: PackagedArtifacts) -> None:
    """As a launcher does. Raises what it would."""
    trusted = partial(verify, keys=(packaged.signing_key,), role=KeyRole.MODEL, tenant=None, now_ms=1)
    async with ArtifactsOffLoop(ArtifactStore(tmp_path / "artifacts")).opened(digest, ("small.gguf",), trusted):
        pass


async def test_a_packaged_file_becomes_an_artifact(packaged: Callable[[bytes], PackagedArtifacts], tmp_path: Path) -> None:
    """Protects the first start: the same file and key give the same artifact at each start, and nothing is left staged."""
    file = tmp_path / "small.gguf"
    file.write_bytes(MODEL)
    first, second = packaged(SECRET), packaged(SECRET)
    digest = await first.keep(file)
    await read(tmp_path, digest, second)
    assert await second.keep(file) == digest and second.signing_key == first.signing_key
    assert list((tmp_path / "models").iterdir()) == [] and file.read_bytes() == MODEL


async def test_each_state_directory_has_a_key_of_its_own(
    packaged: Callable[[bytes], PackagedArtifacts], tmp_path: Path
) -> None:
    """Protects a shared key ring: another directory's key has another name, and vouches for nothing of this one's."""
    file = tmp_path / "small.gguf"
    file.write_bytes(MODEL)
    one, other = packaged(SECRET), packaged(bytes(32))
    digest = await one.keep(file)
    assert one.signing_key.name != other.signing_key.name and one.signing_key.name.startswith("development-")
    with pytest.raises(errors.SignatureRefused):
        await read(tmp_path, digest, other)
    assert await other.keep(file) == digest
    await read(tmp_path, digest, other)
    await read(tmp_path, digest, one)


async def test_a_damaged_copy_is_replaced(packaged: Callable[[bytes], PackagedArtifacts], tmp_path: Path) -> None:
    """Protects a start from what happened to the disk: the package is whole, so the copy is made again."""
    file = tmp_path / "small.gguf"
    file.write_bytes(MODEL)
    cell = packaged(SECRET)
    digest = await cell.keep(file)
    [copy] = (tmp_path / "artifacts").glob("*/small.gguf")
    copy.chmod(0o600)
    copy.write_bytes(b"GGUF, and something else")
    with pytest.raises(errors.ArtifactRefused):
        await read(tmp_path, digest, cell)
    assert await cell.keep(file) == digest
    await read(tmp_path, digest, cell)
