"""The output of a line as bytes, from which its answer can be made after a crash."""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir import errors
from weir.core.output import Delta, ShapedDelta, Vectors

_SHAPED, _VECTORS = 0, 1


def pack_pieces(pieces: Sequence[Delta]) -> bytes:
    """Everything that an answer is made of; neighbouring texts become one."""
    packed: list[Any] = []
    for piece in pieces:
        if isinstance(piece, ShapedDelta):
            packed.append((_SHAPED, msgspec.to_builtins(piece)))
        elif isinstance(piece, Vectors):
            packed.append((_VECTORS, piece.vectors))
        elif packed and isinstance(packed[-1], list):
            packed[-1].append(piece.text)
        else:
            packed.append([piece.text])
    return msgspec.msgpack.encode(["".join(part) if isinstance(part, list) else part for part in packed])


def unpack_pieces(content: bytes) -> list[Delta]:
    """What was packed. Raises BatchDamaged."""
    try:
        return [_piece(part) for part in msgspec.msgpack.decode(content)]
    except (msgspec.DecodeError, TypeError, ValueError):
        raise errors.BatchDamaged("The output of a line is damaged.") from None


def _piece(part: Any) -> Delta:
    if isinstance(part, str):
        return Delta(part)
    kind, value = part
    if kind == _VECTORS:
        return Vectors("", None, tuple(value))
    return msgspec.convert(value, ShapedDelta)
