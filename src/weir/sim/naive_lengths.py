"""How long an answer is expected to be, computed a second time: from plain lists of lengths instead of sums in buckets.

It is meant to be another text than the platform's own expectation, so that a wrong sum shows. Slow, and only for worlds.
"""

from collections import defaultdict
from typing import TypeAlias

from weir.units import Tokens, ceil_div

Caller: TypeAlias = tuple[str, str, str]
"""(tenant, application, revision)."""

_REMEMBERED = 255
_WEIGHT_OF_BELIEF = 8


class NaiveLengths:
    """Lengths of the answers of each revision and of each caller. Of too many, half are forgotten."""

    def __init__(self) -> None:
        self._seen: defaultdict[str | Caller, list[Tokens]] = defaultdict(list)

    def observe(self, caller: Caller, tokens: Tokens) -> None:
        """An answer that completed had this many tokens."""
        for key in (caller[2], caller):
            lengths = [*self._seen[key], tokens]
            self._seen[key] = lengths if len(lengths) <= _REMEMBERED else _half_of(lengths)

    def expected(self, caller: Caller, limit: Tokens, typical: Tokens) -> Tokens:
        """Of the next answer, 1 … limit: the typical, corrected by the answers of the revision, then by those of the caller."""
        belief = min(limit, typical)
        for lengths in (self._seen[caller[2]], self._seen[caller]):
            if lengths:
                total = _sum_of_cut(lengths, limit) + _WEIGHT_OF_BELIEF * belief
                belief = ceil_div(total, len(lengths) + _WEIGHT_OF_BELIEF)
        return min(limit, max(1, belief))


def _by_digits(lengths: list[Tokens]) -> dict[int, list[Tokens]]:
    """Lengths with as many binary digits as each other are alike."""
    alike: defaultdict[int, list[Tokens]] = defaultdict(list)
    for tokens in lengths:
        alike[tokens.bit_length()].append(tokens)
    return alike


def _half_of(lengths: list[Tokens]) -> list[Tokens]:
    """Of those alike half as many, rounded up, and as long as they are on average, rounded down in all."""
    kept: list[Tokens] = []
    for alike in _by_digits(lengths).values():
        number = (len(alike) + 1) // 2
        each, rest = divmod(sum(alike) * number // len(alike), number)
        kept += [each + (place < rest) for place in range(number)]
    return kept


def _sum_of_cut(lengths: list[Tokens], limit: Tokens) -> Tokens:
    """The sum of the lengths, none above the limit; those alike it are cut as their mean is."""
    total, digits = 0, limit.bit_length()
    for other, alike in _by_digits(lengths).items():
        most = limit * len(alike)
        total += min(sum(alike), most) if other <= digits else most
    return total
