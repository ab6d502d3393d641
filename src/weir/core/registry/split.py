"""Who gets the canary: the same callers each time, whatever else changes, and more of them as its weight rises.

Each (tenant, session or request id) has a bucket of its own in each rollout; a weight takes the lowest ones. So a raised weight
moves nobody back, another rollout begins with other callers, and nobody outside can tell a bucket, because a rollout's id is
random. Pure.
"""

import hashlib

BUCKETS = 10_000
_PER_PERCENT = BUCKETS // 100
_SEPARATOR = b"\xff"  # in no UTF-8 text


def bucket_of(rollout: str, tenant: str, caller: str) -> int:
    """0 … BUCKETS − 1, evenly. rollout: 1 … 64 bytes, the key of the hash; caller: a session, else a request id."""
    message = tenant.encode() + _SEPARATOR + caller.encode()
    digest = hashlib.blake2b(message, digest_size=8, key=rollout.encode()).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def takes_canary(rollout: str, weight: int, tenant: str, caller: str) -> bool:
    """Whether this caller is among the weight percent, 0 … 100, that a rollout sends to its canary."""
    return bucket_of(rollout, tenant, caller) < weight * _PER_PERCENT
