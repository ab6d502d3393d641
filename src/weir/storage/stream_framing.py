"""How segments lie one behind the other in a file or an object, and which names may become parts of a path or a key.

A segment lies behind its length, 4 bytes, big-endian. What is cut off at the end is not there: it was not stored whole. No name
that this lets through can leave the place that it is joined to.
"""

import re

from weir.kept_streams import StreamName
from weir.units import Bytes

READ_BYTES: Bytes = 256 * 1024
"""About how much one read returns; more only where a single segment is longer."""

LENGTH_BYTES: Bytes = 4

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def framed(segment: bytes) -> bytes:
    """A segment behind its length. segment: 1 … 2³² − 1 bytes."""
    return length_of(segment) + segment


def length_of(segment: bytes) -> bytes:
    """What a segment lies behind. segment: 1 … 2³² − 1 bytes."""
    assert segment, "an empty segment cannot be told from zeros that a crash left"
    return len(segment).to_bytes(LENGTH_BYTES, "big")


def segments_of(content: bytes) -> tuple[list[bytes], Bytes]:
    """The whole segments at the beginning of content, and how many bytes they take with their lengths."""
    segments: list[bytes] = []
    start = 0
    while (whole := whole_bytes(content, start)) and start + whole <= len(content):
        segments.append(content[start + LENGTH_BYTES : start + whole])
        start += whole
    return segments, start


def whole_bytes(content: bytes, start: int = 0) -> Bytes:
    """What the segment that begins at start takes with its length; 0 where its length is not there, or is none."""
    length = content[start : start + LENGTH_BYTES]
    size = int.from_bytes(length, "big") if len(length) == LENGTH_BYTES else 0
    return LENGTH_BYTES + size if size else 0


def is_name(word: str) -> bool:
    """Whether it may name a tenant or a generation."""
    return _NAME.fullmatch(word) is not None


def check_name(name: StreamName) -> None:
    """Raises ValueError unless both parts are names: they are ours, so another one is a bug."""
    if not (is_name(name.tenant) and is_name(name.generation)):
        raise ValueError("a stream is named by a tenant and a generation: a-z 0-9 . _ -, at most 63, no mark first")
