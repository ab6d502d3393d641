"""Between the classes of one pool: each has a guaranteed share of what is dispatched while it waits, and none has priority.

A virtual counter per class, cost ÷ share, as between the flows of one class; the class whose counter is smallest goes first.
One that begins to wait is lifted to the smallest counter of those that do, or to that of the class which was served last: it
saves up nothing while it is idle. Costs are those expected at dispatch: their errors are no class's own.
"""

from collections.abc import Collection, Mapping

from weir.core.scheduling.orders import Cost
from weir.core.tenancy import ServiceClass

_SCALE = 1 << 16


class ClassShares:
    """shares: of each class, integers ≥ 1 in proportion to each other."""

    def __init__(self, shares: Mapping[ServiceClass, int]) -> None:
        self._shares = shares
        self._counters = dict.fromkeys(shares, 0)
        self._last_served = 0

    def began_to_wait(self, service_class: ServiceClass, waiting: Collection[ServiceClass]) -> None:
        """The first request of a class waits. waiting: the other classes that do."""
        floor = min([self._counters[other] for other in waiting], default=self._last_served)
        self._counters[service_class] = max(self._counters[service_class], floor)

    def served(self, service_class: ServiceClass, cost: Cost) -> None:
        """One of its requests was dispatched."""
        self._last_served = self._counters[service_class] = (
            self._counters[service_class] + cost * _SCALE // self._shares[service_class]
        )

    def turns(self, waiting: Collection[ServiceClass]) -> list[ServiceClass]:
        """The classes that wait, the one whose turn it is first; of equals the one with the larger share."""
        return sorted(waiting, key=lambda each: (self._counters[each], -self._shares[each]))

    def part(self, service_class: ServiceClass, waiting: Collection[ServiceClass]) -> float:
        """What a class is guaranteed while these others wait, 0 < part ≤ 1."""
        own = self._shares[service_class]
        return own / (own + sum([self._shares[other] for other in waiting if other is not service_class]))
