"""The artifact store keeps exactly what was signed, whole or not at all; everything else is refused with its reason."""

import os
import resource
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    manifest_for,
    ordinary_user,
    signed,
    unfinished,
    write,
)

from weir.core.registry.manifest import FILES_MAX, ArtifactFlaw
from weir.errors import ArtifactRefused, ArtifactsUnavailable, SignatureRefused
from weir.storage.artifact_store import FILE_BYTES_MAX, ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "folder")


# ── registering ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_kept_is_what_was_signed(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Protects: every file is kept under the artifact's digest, read-only, and nothing else lies there."""
    artifact = store.keep(folder, signed(), Trust().of())
    assert (artifact.manifest, artifact.size_bytes) == (manifest_for(), sum(map(len, FILES.values())))
    assert artifact.key == key_of(1)
    copy = tmp_path / "artifacts" / HEX
    files = {str(path.relative_to(copy)): path for path in copy.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in files.items()} == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o444}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (copy, copy / "docs", copy / "docs/deep")} == {0o555}
    assert stat.S_IMODE((tmp_path / "artifacts").stat().st_mode) == 0o700
    assert not unfinished(tmp_path / "artifacts")
    assert load(store) == FILES[MODEL]


def test_the_copy_is_independent_of_the_folder(store: ArtifactStore, folder: Path) -> None:
    """Protects: what becomes of the folder afterwards, also by another name of the same file, does not matter."""
    (folder.parent / "other-name").hardlink_to(folder / MODEL)
    store.keep(folder, signed(), Trust().of())
    (folder.parent / "other-name").write_bytes(b"GGUF evil")
    assert load(store) == FILES[MODEL]


def test_registering_again_changes_nothing(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Protects: the same artifact is kept once, and stays the very files that a replica may have open."""
    store.keep(folder, signed(), Trust().of())
    kept = tmp_path / "artifacts" / HEX
    before = {path: path.stat().st_ino for path in kept.rglob("*")}
    store.keep(folder, signed(), Trust().of())
    assert {path: path.stat().st_ino for path in kept.rglob("*")} == before
    assert not unfinished(kept.parent)


def test_the_same_artifact_registered_at_once(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Protects: registrations that run at the same time all succeed and leave one artifact."""
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(store.keep, folder, signed(), Trust().of()) for _ in range(8)]
        assert {done.result().manifest.digest for done in running} == {DIGEST}
    assert {path.name for path in (tmp_path / "artifacts").iterdir()} == {HEX, "signatures", "files"}
    assert load(store) == FILES[MODEL]


def test_a_signature_may_lie_in_the_folder(store: ArtifactStore, folder: Path) -> None:
    """Protects: the signature file is no part of the artifact where it is named, and a file too many where it is not."""
    (folder / "model.sig").write_bytes(signed())
    with pytest.raises(ArtifactRefused, match=r"model\.sig is of no accepted kind"):
        store.keep(folder, signed(), Trust().of())
    assert store.keep(folder, signed(), Trust().of(), "model.sig").manifest == manifest_for()
    load(store)


@pytest.mark.parametrize("done", CHANGES)
def test_a_folder_that_is_not_what_was_signed(store: ArtifactStore, folder: Path, done: str) -> None:
    """Protects: each difference is refused with its own reason and the file's name, at once, and nothing of it is kept."""
    change, flaw, words = CHANGES[done]
    change(folder)
    before = descriptors()
    with pytest.raises(ArtifactRefused, match=words) as refused:
        store.keep(folder, signed(), Trust().of())
    assert refused.value.members["reason"] == flaw and words.startswith(str(refused.value.members["file"]))
    assert {path.name for path in (folder.parent / "artifacts").iterdir()} == {"signatures", "files"}
    assert descriptors() == before


@pytest.mark.parametrize(
    ("name", "content", "flaw", "words"),
    [
        ("pytorch_model.bin", b"\x80", ArtifactFlaw.RUNS_CODE, "pickle"),
        ("modeling.py", b"", ArtifactFlaw.RUNS_CODE, "Python"),
        (".git/config", b"", ArtifactFlaw.UNKNOWN_KIND, "no accepted kind"),
        ("other.json", b'{"auto_map": {"a": "b"}}', ArtifactFlaw.RUNS_CODE, "auto_map"),
        ("other.gguf", b"\x80\x04", ArtifactFlaw.MALFORMED_FILE, "begin with GGUF"),
    ],
)
def test_a_signed_folder_of_what_may_not_be_served(
    store: ArtifactStore, folder: Path, name: str, content: bytes, flaw: ArtifactFlaw, words: str
) -> None:
    """Protects: a signature does not make code data."""
    write(folder, {name: content})
    with pytest.raises(ArtifactRefused, match=words) as refused:
        store.keep(folder, signed(FILES | {name: content}), Trust().of())
    assert refused.value.members["reason"] == flaw


@pytest.mark.parametrize("path", ["absent", "folder/model.gguf", "link", "x" * 300, "a\0b", "a\ud800"], ids=ascii)
def test_what_is_no_folder(store: ArtifactStore, folder: Path, path: str) -> None:
    """Protects whoever mistypes: what is not a folder, or leads to one by a link, is refused as that."""
    (folder.parent / "link").symlink_to(folder)
    with pytest.raises(ArtifactRefused, match="cannot be read") as refused:
        store.keep(folder.parent / path, signed(), Trust().of())
    assert refused.value.members["reason"] == ArtifactFlaw.UNREADABLE


def test_nothing_is_read_that_is_not_vouched_for(store: ArtifactStore, folder: Path) -> None:
    """Protects time and disk: a signature that is refused, or not whole, is refused before the folder is looked at."""
    bundle, revoked = signed(), Trust([key_of(1, revoked=True)])
    for wrong, trust in ((bundle[:-9], Trust()), (b"", Trust()), (bundle, Trust([])), (bundle, revoked)):
        with pytest.raises(SignatureRefused):
            store.keep(folder / "absent", wrong, trust.of())


@pytest.mark.parametrize(("beyond", "flaw"), [(0, ArtifactFlaw.RUNS_CODE), (1, ArtifactFlaw.TOO_MANY_FILES)])
def test_files_and_folders_are_bounded(store: ArtifactStore, folder: Path, beyond: int, flaw: ArtifactFlaw) -> None:
    """Protects the disk: an artifact of too many files is refused as they are counted, before their kinds are looked at."""
    (folder / "more").mkdir()
    (folder / "x.py").touch()
    for number in range(FILES_MAX - len(list(folder.rglob("*"))) + beyond):
        (folder / "more" / f"{number}.txt").touch()
    with pytest.raises(ArtifactRefused) as refused:
        store.keep(folder, signed(), Trust().of())
    assert refused.value.members["reason"] == flaw


def test_bytes_are_bounded(folder: Path, tmp_path: Path) -> None:
    """Protects the disk: an artifact that is too large is refused before it is copied; one of exactly the bound is kept."""
    size_bytes = sum(map(len, FILES.values()))
    with pytest.raises(ArtifactRefused, match=f"may have {size_bytes - 1} bytes; this one has {size_bytes}") as refused:
        ArtifactStore(tmp_path / "small", bytes_max=size_bytes - 1).keep(folder, signed(), Trust().of())
    assert refused.value.members == {"field": "artifact", "reason": ArtifactFlaw.TOO_LARGE}
    ArtifactStore(tmp_path / "small", bytes_max=size_bytes).keep(folder, signed(), Trust().of())


# ── as an ordinary user ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_user_without_special_rights_keeps_and_repairs() -> None:
    """Protects: what the store makes read-only it can still move, replace and clear away without a superuser's rights."""
    with ordinary_user() as home:
        folder, store = write(home / "folder"), ArtifactStore(home / "artifacts")
        for _ in range(2):
            store.keep(folder, signed(), Trust().of())
        (home / "artifacts" / HEX / MODEL).chmod(0o644)
        (home / "artifacts" / HEX / MODEL).write_bytes(b"GGUF other")
        store.keep(folder, signed(), Trust().of())
        assert load(store) == FILES[MODEL]
        assert {path.name for path in (home / "artifacts").iterdir()} == {HEX, "signatures", "files"}
        (home / "artifacts" / HEX).rename(home / "artifacts" / ".unfinished-left")
        ArtifactStore(home / "artifacts")
        assert {path.name for path in (home / "artifacts").iterdir()} == {"signatures", "files"}


@pytest.mark.parametrize("name", ["config.json", "docs", "."])
def test_what_cannot_be_read_is_named(name: str) -> None:
    """Protects whoever registers: a file or folder that the platform may not read is refused as that."""
    with ordinary_user() as home:
        folder, store = write(home / "folder"), ArtifactStore(home / "artifacts")
        (folder / name).chmod(0)
        with pytest.raises(ArtifactRefused, match="cannot be read: Permission denied") as refused:
            store.keep(folder, signed(), Trust().of())
        assert refused.value.members["reason"] == ArtifactFlaw.UNREADABLE
        assert refused.value.members.get("file", ".") == name
        assert not unfinished(home / "artifacts")


# ── single files ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_single_file_is_kept_under_its_digest(store: ArtifactStore, tmp_path: Path) -> None:
    """Protects evaluation sets: what is read back is what was kept, or it is refused."""
    for content in (b"", b"{}\n" * 1_000, bytes(FILE_BYTES_MAX)):
        digest = store.keep_file(content)
        assert store.keep_file(content) == digest
        assert store.read_file(digest) == content
        path = tmp_path / "artifacts" / "files" / digest.removeprefix("sha256:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
    with pytest.raises(ArtifactRefused, match=f"may have {FILE_BYTES_MAX} bytes"):
        store.keep_file(bytes(FILE_BYTES_MAX + 1))


def test_a_single_file_that_was_changed(store: ArtifactStore, tmp_path: Path) -> None:
    """Protects evaluation sets: a change is refused with its reason, and keeping the same file again brings it back."""
    digest = store.keep_file(b"case")
    path = tmp_path / "artifacts" / "files" / digest.removeprefix("sha256:")
    path.chmod(0o600)
    path.write_bytes(b"base")
    with pytest.raises(ArtifactRefused, match="is not what was kept"):
        store.read_file(digest)
    os.truncate(path, FILE_BYTES_MAX + 1)
    with pytest.raises(ArtifactRefused, match=f"has more than {FILE_BYTES_MAX} bytes"):
        store.read_file(digest)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactRefused, match="is a symbolic link"):
        store.read_file(digest)
    assert store.keep_file(b"case") == digest and store.read_file(digest) == b"case"
    assert not (tmp_path / "elsewhere").exists()


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """Within one of the system's limits."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_disk_that_fails(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Protects: a fault of the disk is said as that, leaves nothing behind, and the next attempt succeeds."""
    with limited(resource.RLIMIT_FSIZE, 64):
        with pytest.raises(ArtifactsUnavailable, match="File too large"):
            store.keep(folder, signed(), Trust().of())
        with pytest.raises(ArtifactsUnavailable, match="File too large"):
            store.keep_file(bytes(100))
    assert not unfinished(tmp_path / "artifacts")
    store.keep(folder, signed(), Trust().of())
    assert load(store) == FILES[MODEL]


def test_descriptors_that_run_out(store: ArtifactStore, folder: Path) -> None:
    """Protects: what is wrong with the machine is not said of the artifact, however far a load came."""
    store.keep(folder, signed(), Trust().of())
    outcomes, highest = [], max(map(int, descriptors()))
    for number in range(3, highest + 12):
        with limited(resource.RLIMIT_NOFILE, number):
            outcomes.append(outcome_of_load(store))
    refused = {outcome for outcome in outcomes if outcome != FILES[MODEL]}
    assert outcomes[-1] == FILES[MODEL] and refused
    assert all(str(outcome).endswith("now: Too many open files.") for outcome in refused)


def outcome_of_load(store: ArtifactStore) -> bytes | str:
    """What was loaded, or the fault of the machine."""
    try:
        return load(store)
    except ArtifactsUnavailable as fault:
        return fault.detail


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    """Protects the start: a store that cannot be made says so."""
    (tmp_path / "artifacts").write_bytes(b"")
    with pytest.raises(ArtifactsUnavailable):
        ArtifactStore(tmp_path / "artifacts")


def test_what_a_dead_process_left_is_removed(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Protects the disk: the unfinished work of a process that died goes at the next start, and nothing that is kept."""
    store.keep(folder, signed(), Trust().of())
    left = tmp_path / "artifacts" / ".unfinished-dead" / "artifact" / "deep"
    left.mkdir(parents=True)
    (left / "file").touch()
    left.chmod(0o555)
    assert load(ArtifactStore(tmp_path / "artifacts")) == FILES[MODEL]
    assert not unfinished(tmp_path / "artifacts")
