"""What is known of a recorded prompt without its text: the ids of its 512-token blocks, in order.

An id stands for the whole beginning up to its block's end, so equal ids are equal beginnings. Who asked, what an engine's
prefix cache looks up and what the gateway says of the prompt all follow from them. No likeness is claimed that an id does not
show: what two prompts share within the block in which they part is not counted.
"""

from hashlib import blake2b

from weir.core.routing.prefixes import marks_within
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.units import Bytes, Tokens

BYTES_PER_TOKEN = 4
_RECORDED_TOKENS: Tokens = 512
_KEYS = _RECORDED_TOKENS // BLOCK_TOKENS
_TENANTS = 50


def session_tenant(blocks: tuple[int, ...]) -> str:
    """Whose a prompt is: all requests of a session are one tenant's, one of 50, by a stable hash.

    A session is known by its second block; the first one is the system prompt that all share.
    """
    digest = blake2b(str(blocks[:2][-1]).encode(), digest_size=8).digest()
    return f"tenant-{int.from_bytes(digest) % _TENANTS + 1:02d}"


def engine_keys(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """What an engine looks up: a key for each of its own blocks within the recorded ones."""
    return tuple([key for block in blocks for key in range(block * _KEYS, (block + 1) * _KEYS)])


def prefix_of(tenant: str, blocks: tuple[int, ...], size: Bytes) -> tuple[bytes, ...]:
    """A prompt's digests at the marks of its size, of a tenant's own: that of the block which a mark lies in, or ends."""
    block_bytes = _RECORDED_TOKENS * BYTES_PER_TOKEN
    places = enumerate((mark - 1) // block_bytes for mark in marks_within(size))
    return tuple([_digest(tenant, number, blocks[place]) for number, place in places if place < len(blocks)])


def _digest(tenant: str, mark: int, block: int) -> bytes:
    return blake2b(f"{tenant}/{mark}/{block}".encode(), digest_size=8).digest()
