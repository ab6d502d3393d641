"""Signed folders for the tests of artifacts, all that may be done to one, and an ordinary user to read them."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.signing_keys import private_key

from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.manifest import ArtifactFlaw, FileDigest, Manifest, manifest_of
from weir.core.registry.signatures import public_key_of, sign, verify
from weir.ports import Verify
from weir.storage.artifact_store import ArtifactStore
from weir.units import Millis

NOW_MS = 1_000
NOBODY = 65_534
MODEL = "model.gguf"
FILES: dict[str, bytes] = {
    MODEL: b"GGUF" + bytes(range(256)) * 20,
    "config.json": b'{"a": 1}',
    "docs/deep/README.md": b"# Words\n",
}


def key_of(number: int, **fields: Any) -> SigningKey:
    """The numbered test key as a trusted one, for everything unless fields say less."""
    return replace(SigningKey(f"key-{number}", public_key_of(private_key(number)), frozenset(KeyRole), None, 0), **fields)


def write(folder: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """A folder with these files."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def manifest_for(files: Mapping[str, bytes] = FILES) -> Manifest:
    """The manifest of these files."""
    return manifest_of(FileDigest(path, sha256(content).hexdigest()) for path, content in files.items())


DIGEST = manifest_for().digest
HEX = DIGEST.removeprefix("sha256:")


def signed(files: Mapping[str, bytes] = FILES, number: int = 1) -> bytes:
    """A signature file for these files by the numbered key."""
    return sign(manifest_for(files), "demo", private_key(number))


@dataclass
class Trust:
    """Who is trusted, for a test to change."""

    keys: list[SigningKey] = field(default_factory=lambda: [key_of(1)])
    now_ms: Millis = NOW_MS

    def of(self, tenant: str | None = None, role: KeyRole = KeyRole.MODEL) -> Verify:
        """The judgement of a signature as it is at this moment."""
        return partial(verify, keys=tuple(self.keys), role=role, tenant=tenant, now_ms=self.now_ms)


def load(store: ArtifactStore, trust: Trust | None = None, digest: str = DIGEST, tenant: str | None = None) -> bytes:
    """What a replica would read of the model."""
    with store.opened(digest, [MODEL], (trust or Trust()).of(tenant)) as artifact:
        content = Path(artifact.path_of(MODEL)).read_bytes()
        artifact.check_unchanged()
        return content


def descriptors() -> set[str]:
    """What this process has open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def unfinished(directory: Path) -> list[Path]:
    """Work that the store has not cleared away."""
    return list(directory.glob(".unfinished-*"))


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """Run as somebody without a superuser's rights, who has a folder of his own."""
    home = Path(tempfile.mkdtemp(prefix="weir-test-"))
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(home, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield home
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(home, onerror=lambda *_: None)


# ── what may be done to a folder ─────────────────────────────────────────────────────────────────────────────────────


def rename(folder: Path) -> None:
    (folder / "config.json").rename(folder / "settings.json")


def swap_for_link(folder: Path) -> None:
    (folder / MODEL).rename(folder.parent / "elsewhere")
    (folder / MODEL).symlink_to(folder.parent / "elsewhere")


def swap_folder_for_link(folder: Path) -> None:
    (folder / "docs").rename(folder.parent / "elsewhere")
    (folder / "docs").symlink_to(folder.parent / "elsewhere")


def swap_for_pipe(folder: Path) -> None:
    (folder / MODEL).unlink()
    os.mkfifo(folder / MODEL)


def swap_for_socket(folder: Path) -> None:
    (folder / MODEL).unlink()
    place = os.open(folder, os.O_RDONLY)  # a socket's own path may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{place}/{MODEL}")
    os.close(place)


def swap_for_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def empty(folder: Path) -> None:
    for path in FILES:
        (folder / path).unlink()


CHANGES: Mapping[str, tuple[Callable[[Path], object], ArtifactFlaw, str]] = {
    "changed": (lambda at: (at / MODEL).write_bytes(FILES[MODEL] + b"\0"), ArtifactFlaw.CHANGED_FILE, "model.gguf is not what"),
    "added": (lambda at: (at / "more.txt").write_bytes(b""), ArtifactFlaw.ADDED_FILE, "more.txt was not signed"),
    "missing": (lambda at: (at / "config.json").unlink(), ArtifactFlaw.MISSING_FILE, "config.json is missing"),
    "renamed": (rename, ArtifactFlaw.RENAMED_FILE, "config.json was renamed to settings.json"),
    "link": (swap_for_link, ArtifactFlaw.SYMBOLIC_LINK, "model.gguf is a symbolic link"),
    "folder's link": (swap_folder_for_link, ArtifactFlaw.SYMBOLIC_LINK, "docs is a symbolic link"),
    "dangling link": (lambda at: (at / "l.txt").symlink_to("nowhere"), ArtifactFlaw.SYMBOLIC_LINK, "l.txt is a symbolic link"),
    "pipe": (swap_for_pipe, ArtifactFlaw.SPECIAL_FILE, "model.gguf is a pipe"),
    "socket": (swap_for_socket, ArtifactFlaw.SPECIAL_FILE, "model.gguf is a pipe, a socket"),
    "folder": (swap_for_folder, ArtifactFlaw.MISSING_FILE, "config.json is missing"),
    "empty": (empty, ArtifactFlaw.MISSING_FILE, "config.json is missing, and 2 more"),
}
"""What is done to a folder, the flaw, and a part of its sentence that begins with the file's name."""
