"""Randomness from a seed: the Entropy port, independent generators by name, and the noise of engine steps.

Every random choice in the simulator comes from here, so that a seed names a run. A generator's name keeps its draws apart: one
more draw in one place changes nothing elsewhere. Never used where a secret must be secret.
"""

import hashlib
from collections.abc import Callable
from random import Random


def seeded_random(seed: int, name: str) -> Random:
    """A generator of its own for this seed and name."""
    return Random(hashlib.sha256(f"{seed}/{name}".encode()).digest())


class SeededEntropy:
    """The Entropy port, repeatable."""

    def __init__(self, seed: int, name: str = "entropy") -> None:
        self._random = seeded_random(seed, name)

    def token(self, size: int) -> bytes:
        """size bytes that the seed determines."""
        return self._random.randbytes(size)


STALL_CHANCE = 1 / 20_000
STALL_MS = (50.0, 200.0)
"""Rare long steps keep tail tests honest: about one every few minutes of a busy replica."""


def step_noise(random: Random, sigma: float = 0.05) -> Callable[[float], float]:
    """A step's milliseconds → what it really takes: lognormal with median 1, and rare stalls. sigma ≥ 0."""

    def noisy(duration_ms: float) -> float:
        stall_ms = random.uniform(*STALL_MS) if random.random() < STALL_CHANCE else 0.0
        return duration_ms * random.lognormvariate(0.0, sigma) + stall_ms

    return noisy
