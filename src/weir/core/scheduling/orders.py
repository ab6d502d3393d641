"""What the order between the flows of one scheduling domain is, and the plainest one.

A flow is one tenant's waiting requests; its head goes first within it. An order says whose head is next. It sees costs and
deadlines, never what a cache holds: no tenant's turn depends on another's prompts.
"""

from typing import Protocol, TypeAlias

import msgspec

from weir.core.scheduling.lazy_heap import LazyHeap
from weir.units import Nanos

Cost: TypeAlias = int
"""What a request takes of a domain: its tokens, weighted by kind (`fairness.py::TokenCosts`)."""

BYPASSES_MAX = 16
"""How many may start before one whose turn it is and which fits no replica, and how many of the dearest requests' service a
flow may get ahead of such a one's."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """A flow's first entry. number: rises with arrival. start_by_ns: when it must have started."""

    number: int
    start_by_ns: Nanos

    @property
    def urgency(self) -> int:
        """By when it must have started and then by arrival, as one integer."""
        return urgency(self.start_by_ns, self.number)


_ARRIVALS_BITS = 48


def urgency(start_by_ns: Nanos, number: int) -> int:
    """An integer in the order of (start_by_ns, number), 0 ≤ number < 2^48: heaps compare it in half of the time of a pair."""
    return (start_by_ns << _ARRIVALS_BITS) + number


def head_of(its_urgency: int) -> Head:
    """Whose urgency that is."""
    return Head(its_urgency & ((1 << _ARRIVALS_BITS) - 1), its_urgency >> _ARRIVALS_BITS)


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """What was charged for one dispatch. weight: of the flow then; activation: how often it had become backlogged."""

    tenant: str
    cost: Cost
    weight: int
    activation: int


class Order(Protocol):
    """Whose turn it is between backlogged flows."""

    @property
    def holds_back(self) -> bool:
        """Whether one of many of a tenant is to leave replicas nearly free for others (`Need.of_many`)."""
        ...

    def joined(self, tenant: str, head: Head) -> None:
        """The flow became backlogged."""
        ...

    def changed(self, tenant: str, head: Head) -> None:
        """A backlogged flow has another head."""
        ...

    def left(self, tenant: str) -> None:
        """The flow has no entry any more."""
        ...

    def first(self) -> str | None:
        """The flow whose head goes next; None when nothing waits."""
        ...

    def next(self, number: int) -> list[str]:
        """The flows whose heads would go next, the first one first, `number` at most; those after it about in order."""
        ...

    def charge(self, tenant: str, cost: Cost) -> Ticket:
        """The head of this backlogged flow is dispatched, at what it is expected to cost."""
        ...

    def correct(self, ticket: Ticket, cost: Cost) -> Ticket:
        """What was dispatched costs this so far; returns the ticket that holds now."""
        ...

    def close(self, ticket: Ticket, cost: Cost) -> None:
        """It ended, and cost this. Each ticket is closed once."""
        ...

    def work_before(self, tenant: str, own: Cost, others: Cost, mean: Cost) -> Cost:
        """Of the others' waiting work, about what goes before one more request of a tenant that has `own` waiting.

        mean: the cost of one that waits.
        """
        ...

    def lead(self, tenant: str, own: Cost) -> Cost:
        """By how much the floor must rise until it is the turn of one more request of this tenant, in cost ÷ weight."""
        ...

    @property
    def floor(self) -> Cost:
        """What every backlogged flow had at least, less a burst, in cost ÷ weight; it never falls."""
        ...


class ArrivalOrder:
    """First come, first served over all tenants: what a plain queue does, and the baseline of every comparison."""

    holds_back = False

    def __init__(self) -> None:
        self._heads: LazyHeap[int, str] = LazyHeap()

    def joined(self, tenant: str, head: Head) -> None:
        """By arrival."""
        self._heads.put(tenant, head.number)

    changed = joined

    def left(self, tenant: str) -> None:
        """It waits no more."""
        self._heads.discard(tenant)

    def first(self) -> str | None:
        """The flow of the oldest head."""
        entry = self._heads.first()
        return entry[1] if entry else None

    def next(self, number: int) -> list[str]:
        """The flows of the oldest heads."""
        return [tenant for _, tenant in self._heads.smallest(number)]

    def charge(self, tenant: str, cost: Cost) -> Ticket:
        """Nothing is counted."""
        return Ticket(tenant, cost, 1, 0)

    def correct(self, ticket: Ticket, cost: Cost) -> Ticket:
        """Nothing is counted."""
        return ticket

    def close(self, ticket: Ticket, cost: Cost) -> None:
        """Nothing is counted."""

    def work_before(self, tenant: str, own: Cost, others: Cost, mean: Cost) -> Cost:
        """Everything that waits goes before a newcomer."""
        return others

    def lead(self, tenant: str, own: Cost) -> Cost:
        """Nobody comes later and goes before."""
        return 0

    @property
    def floor(self) -> Cost:
        """Nothing is counted."""
        return 0
