"""Protects the keys of retained streams: the file's as it is now, and a fault where it cannot be used."""

import asyncio
from pathlib import Path

import pytest

from weir import errors
from weir.app.retained_streams import KeyFile
from weir.clock import SystemEntropy
from weir.gateway.sealing import KeyRing, format_key_ring


async def test_a_key_file_is_read_again_where_it_changed(tmp_path: Path) -> None:
    """Protects rotation without a restart: a new file is used by the next stream, and the same is not read twice."""
    path, keys = tmp_path / "keys", KeyFile(tmp_path / "keys")
    ring = KeyRing.new(SystemEntropy())
    for wanted in (ring, ring.added(SystemEntropy())):
        path.write_text(format_key_ring(wanted))
        first, second = await asyncio.gather(keys(), keys())
        assert first == second == wanted and await keys() is await keys()


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"0a0b0c0d c2VjcmV0"], ids=["absent", "empty", "binary", "short"])
async def test_a_key_file_that_cannot_be_used_is_a_fault(tmp_path: Path, content: bytes | None) -> None:
    """Protects secrets and callers: the stream is refused, without a word of the file, until the file is good again."""
    path, keys = tmp_path / "keys", KeyFile(tmp_path / "keys")
    ring = KeyRing.new(SystemEntropy())
    path.write_text(format_key_ring(ring))
    assert await keys() == ring
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(errors.StreamStoreUnavailable) as refused:
            await keys()
        assert "c2VjcmV0" not in str(refused.value)
    path.write_text(format_key_ring(ring))
    assert await keys() == ring
