"""LoRA adapters for SmolLM2 in GGUF, written here byte by byte: random, and so strong that every answer differs."""

import random
import struct
from collections.abc import Sequence

LAYERS, WIDTH, RANK = 30, 576, 4
"""Of SmolLM2-135M: its blocks, and rows and columns of a block's query matrix."""
_STRENGTH = 0.5
_ALIGNMENT = 32
_FLOAT32 = 0
_OF_FLOAT, _OF_TEXT = 6, 8


def lora_adapter(seed: int) -> bytes:
    """A GGUF file: for every block two matrices whose product is added to its query matrix."""
    chance = random.Random(seed)
    names = [f"blk.{layer}.attn_q.weight.lora_{half}" for layer in range(LAYERS) for half in "ab"]
    matrices = [[chance.uniform(-_STRENGTH, _STRENGTH) for _ in range(WIDTH * RANK)] for _ in names]
    entries = [
        _text("general.architecture") + _typed("llama"),
        _text("general.type") + _typed("adapter"),
        _text("adapter.type") + _typed("lora"),
        _text("adapter.lora.alpha") + struct.pack("<If", _OF_FLOAT, RANK),
    ]
    size = WIDTH * RANK * 4  # a multiple of the alignment
    tensors = [_tensor(name, number * size) for number, name in enumerate(names)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries + tensors)
    padding = bytes(-len(head) % _ALIGNMENT)
    return head + padding + b"".join(_floats(matrix) for matrix in matrices)


def _tensor(name: str, offset: int) -> bytes:
    """What is said of a matrix: its shape, the inner length first, its type and where it lies."""
    shape = (WIDTH, RANK) if name.endswith("a") else (RANK, WIDTH)
    return _text(name) + struct.pack("<IQQIQ", 2, *shape, _FLOAT32, offset)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _typed(text: str) -> bytes:
    return struct.pack("<I", _OF_TEXT) + _text(text)


def _floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
