"""A folder is read as what it was found to be: whatever changes between finding, opening and the last byte is refused."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.artifact_folders import descriptors

from weir.core.registry.manifest import ArtifactFlaw
from weir.errors import ArtifactRefused
from weir.storage.plain_folder import PlainFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/file").write_bytes(bytes(3 * 1024**2))
    (tmp_path / "other").write_bytes(b"other")
    return tmp_path


@pytest.fixture
def opened(folder: Path) -> Iterator[PlainFolder]:
    with PlainFolder(folder) as found:
        yield found


def replace_file(folder: Path) -> None:
    (folder / "other").replace(folder / "deep/er/file")


def link_file(folder: Path) -> None:
    (folder / "deep/er/file").rename(folder / "moved")
    (folder / "deep/er/file").symlink_to(folder / "moved")


def link_folder(folder: Path) -> None:
    (folder / "deep").rename(folder / "moved")
    (folder / "deep").symlink_to("moved")


def become_pipe(folder: Path) -> None:
    (folder / "deep/er/file").unlink()
    os.mkfifo(folder / "deep/er/file")


CHANGES = [
    replace_file,
    link_file,
    link_folder,
    become_pipe,
    lambda folder: (folder / "deep/er/file").unlink(),
    lambda folder: (folder / "deep/er/file").write_bytes(bytes(3 * 1024**2)),
    lambda folder: os.truncate(folder / "deep/er/file", 5),
    lambda folder: os.truncate(folder / "deep/er/file", 2**40),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_opened_is_what_was_found(folder: Path, opened: PlainFolder, change: Callable[[Path], object]) -> None:
    """Protects what is read: another file in its place, or the same one written to, is refused by name and never waited for."""
    files = opened.survey()
    assert list(files) == ["deep/er/file", "other"]
    opened.check_unchanged(files)
    before = descriptors()
    change(folder)
    with pytest.raises(ArtifactRefused, match="deep/er/file changed while it was read"):
        opened.open_file("deep/er/file", files["deep/er/file"])
    with pytest.raises(ArtifactRefused, match="deep") as refused:
        opened.check_unchanged(files)
    assert refused.value.members["reason"] in (
        ArtifactFlaw.CHANGED_MEANWHILE,
        ArtifactFlaw.SYMBOLIC_LINK,
        ArtifactFlaw.SPECIAL_FILE,
    )
    assert descriptors() == before


@pytest.mark.parametrize("change", [change for change in CHANGES if change is not link_folder])
def test_a_file_that_changes_while_it_is_read(folder: Path, opened: PlainFolder, change: Callable[[Path], object]) -> None:
    """Protects what is kept: a change after the first block is refused at the last, and no more is read than was there."""
    identity = opened.survey()["deep/er/file"]
    blocks = opened.blocks("deep/er/file", identity)
    read = [next(blocks)]
    change(folder)
    with pytest.raises(ArtifactRefused, match="changed while it was read"):
        read.extend(blocks)
    assert sum(map(len, read)) <= identity.size_bytes


def test_a_file_is_read_whole(folder: Path, opened: PlainFolder) -> None:
    """Protects the content: all of it, in order, also of an empty file."""
    content = bytes(range(256)) * 9_000
    (folder / "other").write_bytes(content)
    (folder / "empty").touch()
    files = opened.survey()
    assert b"".join(opened.blocks("other", files["other"])) == content
    assert list(opened.blocks("empty", files["empty"])) == []


def test_one_file_is_found_by_its_name(folder: Path, opened: PlainFolder) -> None:
    """Protects look-ups: a file, nothing, and what is no file."""
    assert opened.find("other") == opened.survey()["other"]
    assert opened.find("absent") is None
    (folder / "link").symlink_to("other")
    for name in ("link", "deep"):
        with pytest.raises(ArtifactRefused):
            opened.find(name)
