"""Who gives up a lane so that others can start: the fewest for each of those who wait, on one replica, the last begun first.

What has just begun has done least. Nobody is stopped where that helps nobody: where the replica takes no work, is the one to
avoid, has more work than it may have, or has too little memory even then. What is free, or on its way, is used before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from weir.units import Tokens

Key = TypeVar("Key")


class Claim(NamedTuple):
    """What one that waits needs beside a lane. avoid: the replica that failed it, if one did."""

    kv_tokens: Tokens
    avoid: str | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A replica that takes work. lanes: free, negative where more run than may. kv_left: None where memory bounds nothing."""

    lanes: int
    running: int
    kv_left: Tokens | None = None

    def has_room(self, kv_tokens: Tokens) -> bool:
        """Whether one that needs so much can start."""
        return self.lanes > 0 and (not self.running or self.kv_left is None or kv_tokens <= self.kv_left)

    def with_one(self, kv_tokens: Tokens, sign: int = 1) -> "Site":
        """With one more that takes so much; one less with sign −1."""
        left = None if self.kv_left is None else self.kv_left - sign * kv_tokens
        return Site(self.lanes - sign, self.running + sign, left)


class Lent(NamedTuple, Generic[Key]):
    """Work that gives way. kv_tokens: what it takes there."""

    key: Key
    site: str
    kv_tokens: Tokens


def who_makes_room(claims: Sequence[Claim], sites: Mapping[str, Site], lent: Sequence[Lent[Key]]) -> list[Key]:
    """Keys of the work to stop. claims: the first comes first; sites: by name; lent: the last begun first."""
    now = dict(sites)
    on_site: dict[str, list[tuple[int, Lent[Key]]]] = {name: [] for name in sites}
    for age, each in enumerate(lent):
        if each.site in on_site:
            on_site[each.site].append((age, each))
    stopped: list[Key] = []
    too_much: dict[str | None, Tokens] = {}  # by what is avoided: room only gets less, so no more than this ever fits
    for claim in claims:
        if claim.kv_tokens >= too_much.get(claim.avoid, claim.kv_tokens + 1):
            continue
        able = [(_enough(site, claim, on_site[name]), name) for name, site in now.items() if name != claim.avoid]
        found = [(*enough, name) for enough, name in able if enough is not None]
        if not found:
            too_much[claim.avoid] = claim.kv_tokens
            continue
        number, _, name = min(found)
        for _, each in on_site[name][:number]:
            stopped.append(each.key)
            now[name] = now[name].with_one(each.kv_tokens, -1)
        del on_site[name][:number]
        now[name] = now[name].with_one(claim.kv_tokens)
    return stopped


def _enough(site: Site, claim: Claim, lent: Sequence[tuple[int, Lent[Key]]]) -> tuple[int, int] | None:
    """How many stop there until it fits, and the age of the oldest of them; None where it never does."""
    if site.has_room(claim.kv_tokens):
        return 0, -1
    for number, (age, each) in enumerate(lent, 1):
        site = site.with_one(each.kv_tokens, -1)
        if site.has_room(claim.kv_tokens):
            return number, age
    return None
