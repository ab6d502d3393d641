"""A replica loads exactly what was approved: what is kept is verified anew at each load, and whatever was done to it shows."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.artifact_folders import (
    CHANGES,
    DIGEST,
    FILES,
    HEX,
    MODEL,
    Trust,
    descriptors,
    key_of,
    load,
    signed,
    write,
)

from weir.core.registry.key_ring import KeyRole
from weir.core.registry.manifest import ArtifactFlaw
from weir.core.registry.signed_manifest import SignatureFlaw
from weir.errors import ArtifactRefused, SignatureRefused
from weir.storage.artifact_store import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "folder")


@pytest.fixture
def kept(store: ArtifactStore, folder: Path, tmp_path: Path) -> Path:
    """Where the store keeps the files of an artifact that was registered; whoever tampers may write there."""
    store.keep(folder, signed(), Trust().of())
    kept = tmp_path / "artifacts" / HEX
    for path in (kept, kept / "docs", kept / "docs/deep"):
        path.chmod(0o755)
    return kept


def edit_in_place(kept: Path) -> None:
    """Change a byte, and put the times back that can be put back."""
    before = (kept / MODEL).stat()
    (kept / MODEL).chmod(0o644)
    with (kept / MODEL).open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    (kept / MODEL).chmod(0o444)
    os.utime(kept / MODEL, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_name(kept: Path) -> None:
    (kept / "new").write_bytes(FILES[MODEL])
    (kept / "new").replace(kept / MODEL)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("done", CHANGES)
def test_tampering_after_approval_is_refused(store: ArtifactStore, kept: Path, done: str) -> None:
    """Protects what is loaded: each change of what is kept is refused at the next load, with what it was."""
    change, flaw, words = CHANGES[done]
    (kept / MODEL).chmod(0o644)
    change(kept)
    before = descriptors()
    with pytest.raises(ArtifactRefused, match=words) as refused:
        load(store)
    assert refused.value.members["reason"] == flaw
    assert descriptors() == before


def test_an_edit_that_hides_is_refused(store: ArtifactStore, kept: Path) -> None:
    """Protects what is loaded: size and time of writing say nothing, the content does."""
    edit_in_place(kept)
    with pytest.raises(ArtifactRefused, match=r"model\.gguf is not what was signed"):
        load(store)


@pytest.mark.parametrize(
    "change",
    [
        edit_in_place,
        replace_by_name,
        lambda kept: os.truncate(kept / MODEL, 4),
        lambda kept: (kept / MODEL).unlink(),
        lambda kept: (kept / MODEL).chmod(0o640),
    ],
    ids=["edit", "replace", "truncate", "unlink", "mode"],
)
def test_what_changed_since_it_was_verified_is_refused(
    store: ArtifactStore, kept: Path, change: Callable[[Path], object]
) -> None:
    """Protects what was loaded: any touch of the file between verification and the end of the load shows."""
    (kept / MODEL).chmod(0o644)
    with store.opened(DIGEST, [MODEL, "config.json"], Trust().of()) as artifact:
        artifact.check_unchanged()
        change(kept)
        with pytest.raises(ArtifactRefused, match=r"model\.gguf changed while it was read") as refused:
            artifact.check_unchanged()
    assert refused.value.members == {"field": "artifact", "reason": ArtifactFlaw.CHANGED_MEANWHILE, "file": MODEL}


def move_and_back(kept: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.with_name("elsewhere").rename(kept)


def swap_for_a_copy(kept: Path) -> None:
    shutil.copytree(kept, kept.with_name("copy"))
    kept.rename(kept.with_name("elsewhere"))
    kept.with_name("copy").rename(kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit_in_place, r"The file model\.gguf changed"),
        (replace_by_name, r"The file model\.gguf changed"),
        (lambda kept: (kept / "added.json").write_bytes(b"{}"), r"The file added\.json changed"),
        (lambda kept: (kept / "config.json").unlink(), r"The file config\.json changed"),
        (lambda kept: (kept / "docs").rename(kept / "more"), r"The file docs/deep/README\.md changed"),
        (lambda kept: (kept / "added").mkdir(), "The artifact's folder was moved, or changed"),
        (move_and_back, "The artifact's folder was moved, or changed"),
        (swap_for_a_copy, r"The file config\.json changed"),
        (lambda kept: kept.rename(kept.with_name("elsewhere")), "cannot be read: No such file"),
    ],
    ids=["edit", "replace", "add", "unlink", "rename", "folder", "move and back", "copy", "move"],
)
def test_a_folder_that_changed_since_it_was_verified_is_refused(
    store: ArtifactStore, kept: Path, change: Callable[[Path], object], words: str
) -> None:
    """Protects an engine that opens files by their names: any touch of the folder until the end of the load shows."""
    with store.opened(DIGEST, [], Trust().of()) as artifact:
        assert (artifact.folder, artifact.descriptors) == (str(kept), ())
        assert (Path(artifact.folder) / MODEL).read_bytes() == FILES[MODEL]
        artifact.check_unchanged()
        change(kept)
        with pytest.raises(ArtifactRefused, match=words):
            artifact.check_unchanged()


def test_a_replaced_file_is_not_what_is_open(store: ArtifactStore, kept: Path) -> None:
    """Protects what is loaded: whatever takes the file's name, the engine reads the file that was verified."""
    with store.opened(DIGEST, [MODEL], Trust().of()) as artifact:
        (kept / "new").write_bytes(b"GGUF evil")
        (kept / "new").replace(kept / MODEL)
        assert Path(artifact.path_of(MODEL)).read_bytes() == FILES[MODEL]


def test_only_what_was_asked_for_stays_open(store: ArtifactStore, kept: Path) -> None:
    """Protects descriptors: those of the named files are handed out, not to every child, and none is left open."""
    before = descriptors()
    with store.opened(DIGEST, [MODEL], Trust().of()) as artifact:
        [descriptor] = artifact.descriptors
        assert artifact.path_of(MODEL) == f"/proc/self/fd/{descriptor}"
        assert not os.get_inheritable(descriptor)
        assert len(descriptors()) == len(before) + 1
    with pytest.raises(ArtifactRefused, match=r"has no file other\.gguf"), store.opened(DIGEST, ["other.gguf"], Trust().of()):
        pass
    assert descriptors() == before


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, HEX, "", "sha256:../../x", "sha256:" + "A" * 64])
def test_what_was_never_kept(store: ArtifactStore, digest: str) -> None:
    """Protects: an unknown digest, and what is none, is refused as not kept."""
    with pytest.raises(ArtifactRefused, match="Nothing of the digest") as refused:
        load(store, digest=digest)
    assert refused.value.members["reason"] == ArtifactFlaw.NOT_KEPT
    with pytest.raises(ArtifactRefused, match="Nothing of the digest"):
        store.read_file(digest)


def test_files_that_are_gone(store: ArtifactStore, kept: Path, folder: Path, tmp_path: Path) -> None:
    """Protects: an artifact whose files were removed is refused as that, and registering it again brings it back."""
    kept.rename(tmp_path / "taken")
    with pytest.raises(ArtifactRefused, match="cannot be read: No such file"):
        load(store)
    store.keep(folder, signed(), Trust().of())
    assert load(store) == FILES[MODEL]


@pytest.mark.parametrize("shape", ["link", "file"])
def test_what_stands_in_an_artifacts_place(store: ArtifactStore, kept: Path, folder: Path, tmp_path: Path, shape: str) -> None:
    """Protects: something else under the artifact's name is not loaded, is left untouched, and makes room for the artifact."""
    kept.rename(tmp_path / "taken")
    if shape == "link":
        kept.symlink_to(folder)
    else:
        kept.write_bytes(b"")
    with pytest.raises(ArtifactRefused, match="no folder, or a link to one"):
        load(store)
    mode = folder.stat().st_mode
    store.keep(folder, signed(), Trust().of())
    assert load(store) == FILES[MODEL] and folder.stat().st_mode == mode and not kept.is_symlink()


# ── signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_trust_is_asked_at_each_load(store: ArtifactStore, kept: Path) -> None:
    """Protects: a key that was revoked, expired, restricted or removed since registration vouches for nothing more."""
    assert load(store) == FILES[MODEL]
    for trust, flaw in (
        (Trust([key_of(1, revoked=True)]), SignatureFlaw.REVOKED_KEY),
        (Trust([key_of(1, not_after_ms=5_000)], now_ms=5_001), SignatureFlaw.EXPIRED),
        (Trust([key_of(1, roles=frozenset([KeyRole.ADAPTER]))]), SignatureFlaw.WRONG_ROLE),
        (Trust([key_of(1, tenant="acme")]), SignatureFlaw.OTHER_TENANT),
        (Trust([key_of(2)]), SignatureFlaw.UNKNOWN_KEY),
        (Trust([]), SignatureFlaw.UNKNOWN_KEY),
    ):
        with pytest.raises(SignatureRefused) as refused:
            load(store, trust)
        assert refused.value.members["reason"] == flaw


def test_two_tenants_may_keep_the_same_files(store: ArtifactStore, folder: Path) -> None:
    """Protects tenants from each other: each one's own key vouches for the same content, and neither takes that away."""
    trust = Trust([key_of(1, tenant="acme"), key_of(2, tenant="globex")])
    store.keep(folder, signed(number=1), trust.of("acme"))
    store.keep(folder, signed(number=2), trust.of("globex"))
    for tenant in ("acme", "globex"):
        assert load(store, trust, tenant=tenant) == FILES[MODEL]
    with pytest.raises(SignatureRefused, match="vouches only for"):
        load(store, trust)
    trust.keys[0] = key_of(1, tenant="acme", revoked=True)
    assert load(store, trust, tenant="globex") == FILES[MODEL]
    with pytest.raises(SignatureRefused):
        load(store, trust, tenant="acme")


def test_a_new_signature_follows_an_old_key(store: ArtifactStore, kept: Path, folder: Path) -> None:
    """Protects the change of a key: the same artifact signed anew loads again; the newest signature's refusal is told."""
    trust = Trust([key_of(1, revoked=True), key_of(2)])
    store.keep(folder, signed(number=2), trust.of())
    assert load(store, trust) == FILES[MODEL]
    newest = kept.parent / "signatures" / HEX / key_of(2).fingerprint
    os.utime(newest, ns=(2**62, 2**62))
    with pytest.raises(SignatureRefused, match=f"of fingerprint {key_of(2).fingerprint}"):
        load(store, Trust([key_of(1, revoked=True)]))


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (lambda bundle: bundle[: len(bundle) // 2], SignatureFlaw.MALFORMED),
        (lambda bundle: b"", SignatureFlaw.MALFORMED),
        (lambda bundle: signed({MODEL: b"GGUF"}), SignatureFlaw.MISMATCH),
        (lambda bundle: signed(number=9), SignatureFlaw.UNKNOWN_KEY),
        (lambda bundle: bundle.replace(b'"sig":"ME', b'"sig":"MF'), SignatureFlaw.MISMATCH),
    ],
    ids=["cut", "empty", "another artifact's", "another key's", "edited"],
)
def test_a_kept_signature_that_was_changed(
    store: ArtifactStore, kept: Path, change: Callable[[bytes], bytes], flaw: SignatureFlaw
) -> None:
    """Protects what is loaded: a signature that was exchanged, cut or edited since is refused with its reason."""
    [path] = (kept.parent / "signatures" / HEX).iterdir()
    assert path.name == key_of(1).fingerprint
    bundle = path.read_bytes()
    assert bundle == signed()
    path.chmod(0o600)
    path.write_bytes(change(bundle))
    with pytest.raises(SignatureRefused) as refused:
        load(store)
    assert refused.value.members["reason"] == flaw


def test_signatures_that_are_gone(store: ArtifactStore, kept: Path) -> None:
    """Protects what is loaded: without anything that vouches for it nothing is."""
    [path] = (kept.parent / "signatures" / HEX).iterdir()
    path.unlink()
    with pytest.raises(SignatureRefused, match="Nothing vouches") as refused:
        load(store)
    assert refused.value.members["reason"] == SignatureFlaw.UNSIGNED
    path.symlink_to(kept / MODEL)
    with pytest.raises(ArtifactRefused, match="symbolic link"):
        load(store)
