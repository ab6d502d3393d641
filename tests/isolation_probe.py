"""A timing probe for what another tenant asked, and the judgement of what it found.

A victim sends one of two fresh prompts, by a coin. The attacker sends both, each after the victim sent its own once more, and
takes the one whose first token came sooner for the victim's. Who meets the victim's prefix cache is nearly always right; who
meets nothing of it is right as often as a coin. It knows nothing of engines: it is given two ways to send.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import comb
from random import Random

from weir.sim.random_source import seeded_random

P_MIN = 0.01
DETECTED = 0.9
"""The share of right guesses of a probe that meets the cache; with less it could not have seen a leak."""

Send = Callable[[str], Awaitable[float]]
"""Sends a prompt, reads the reply to its end, and returns the time to its first token, in any unit."""

_WORDS = (
    "mill", "weir", "pond", "reed", "bank", "lock", "ford", "duck",
    "fish", "boat", "rain", "snow", "wind", "moss", "fern", "path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found. rounds: its guesses, ≥ 1; hits: the right ones."""

    rounds: int
    hits: int

    @property
    def p_value(self) -> float:
        """How likely a fair coin is at least as far from half of its guesses, above or below."""
        distance = abs(2 * self.hits - self.rounds)
        further = [hits for hits in range(self.rounds + 1) if abs(2 * hits - self.rounds) >= distance]
        return sum(comb(self.rounds, hits) for hits in further) * 0.5**self.rounds

    @property
    def is_at_chance(self) -> bool:
        """Whether a coin may well have done this."""
        return self.p_value >= P_MIN

    @property
    def is_certain(self) -> bool:
        """Whether the guesses were nearly all right, and no coin's."""
        return self.hits >= DETECTED * self.rounds and not self.is_at_chance


@dataclass(frozen=True, slots=True)
class Probe:
    """Who sends. words: the length of each prompt."""

    victim: Send
    attacker: Send
    words: int

    async def find(self, rounds: int, seed: int) -> Finding:
        """So many rounds, each with prompts that nobody sent before."""
        random = seeded_random(seed, "isolation probe")
        guesses = [await self._guess(random) for _ in range(rounds)]
        return Finding(rounds, sum(guesses))

    async def check_finds_nothing(self, rounds: int, seed: int) -> None:
        """At chance. Raises AssertionError when it is off twice in a row, which a coin is once in ten thousand times."""
        findings = await self._try_twice(rounds, seed, lambda finding: finding.is_at_chance)
        assert findings[-1].is_at_chance, f"timing tells whose prompt it was: {findings}"

    async def check_finds_out(self, rounds: int, seed: int) -> None:
        """Nearly always right. Raises AssertionError when it is not twice in a row: once is the noise of a busy machine."""
        findings = await self._try_twice(rounds, seed, lambda finding: finding.is_certain)
        assert findings[-1].is_certain, f"this probe could see no leak: {findings}"

    async def _try_twice(self, rounds: int, seed: int, is_good: Callable[[Finding], bool]) -> list[Finding]:
        findings = [await self.find(rounds, seed)]
        if not is_good(findings[0]):
            findings.append(await self.find(rounds, seed + 1))
        return findings

    async def _guess(self, random: Random) -> bool:
        """One round; whether the guess was right. Equal times leave it to a coin."""
        candidates = [secret_prompt(random, self.words) for _ in range(2)]
        secret = random.choice(candidates)
        times: dict[str, float] = {}
        for candidate in random.sample(candidates, 2):
            await self.victim(secret)
            times[candidate] = await self.attacker(candidate)
        return min(random.sample(candidates, 2), key=times.__getitem__) == secret


def secret_prompt(random: Random, words: int) -> str:
    """A prompt of so many words of four letters, like no other from its beginning on."""
    return " ".join(random.choices(_WORDS, k=words))
