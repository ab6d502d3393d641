"""The fairness gap of a run: how far apart the service of two tenants came while both had work waiting.

Service is tokens as a replica computes them, output weighted against input, divided by the tenant's weight. For each pair that
is backlogged at once, the gap is the greatest change of the difference of their service over any part of that time; a run's
gap is the greatest of all pairs. This counts what was computed, and never asks the scheduler what it believes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from weir.units import Tokens

OUTPUT_WEIGHT = 4
"""A token of output against one of input: what decoding costs a GPU at least."""


class Backlog:
    """Service per tenant, and pairs that are backlogged. A message costs at most the number of backlogged tenants."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        """weights: of tenants, 1 where none is given."""
        self._weights = weights
        self._service: defaultdict[str, float] = defaultdict(float)
        self.gap = 0.0
        self.between: tuple[str, str] | None = None
        self._waiting: Counter[str] = Counter()
        self._backlogged: dict[str, None] = {}
        self._pairs: dict[tuple[str, str], list[float]] = {}

    def waits(self, tenant: str, change: int) -> None:
        """One more of its requests waits (1), or one fewer (−1)."""
        self._waiting[tenant] += change
        if change > 0 and tenant not in self._backlogged:
            for other in self._backlogged:
                pair, difference = self._pair(tenant, other)
                self._pairs[pair] = [difference, difference]
            self._backlogged[tenant] = None
        elif not self._waiting[tenant]:
            del self._backlogged[tenant]
            for other in self._backlogged:
                del self._pairs[self._pair(tenant, other)[0]]

    def serve(self, tenant: str, input_tokens: Tokens, output_tokens: Tokens) -> None:
        """So much was computed for it."""
        self._service[tenant] += (input_tokens + OUTPUT_WEIGHT * output_tokens) / self._weights.get(tenant, 1)
        if tenant not in self._backlogged:
            return
        for other in self._backlogged:
            if other != tenant:
                pair, difference = self._pair(tenant, other)
                bounds = self._pairs[pair]
                bounds[0], bounds[1] = min(bounds[0], difference), max(bounds[1], difference)
                if bounds[1] - bounds[0] > self.gap:
                    self.gap, self.between = bounds[1] - bounds[0], pair

    def _pair(self, one: str, other: str) -> tuple[tuple[str, str], float]:
        first, second = (one, other) if one < other else (other, one)
        return (first, second), self._service[first] - self._service[second]

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._backlogged
