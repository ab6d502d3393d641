"""The scheduling domains of one pool: one per service class that waits there, and whose turn it is between them.

It counts and orders; what a domain's requests cost and how long they wait is `domain.py`'s.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from weir.coordinator.domain import Domain
from weir.coordinator.fleet import PoolView
from weir.core.ledger.records import ExecutionId
from weir.core.scheduling.lent_lanes import LentLanes
from weir.core.scheduling.orders import Cost
from weir.core.scheduling.queues import DomainQueue
from weir.core.scheduling.shares import ClassShares
from weir.core.tenancy import ServiceClass

Attempted: TypeAlias = tuple[ExecutionId, int]
"""An execution and the number of its attempt."""


class PoolDomains:
    """shares: guaranteed to each class while it waits. make: a new domain of the pool. lent: attempts on idle lanes."""

    def __init__(self, view: PoolView, shares: Mapping[ServiceClass, int], make: Callable[[PoolView], Domain]) -> None:
        self.view = view
        self._make = make
        self.lent: LentLanes[Attempted] = LentLanes(shares[ServiceClass.BATCH])
        self._shares = ClassShares(shares)
        self._domains: dict[ServiceClass, Domain] = {}

    def of(self, service_class: ServiceClass) -> Domain:
        """The domain of a class."""
        domain = self._domains.get(service_class)
        if domain is None:
            domain = self._domains[service_class] = self._make(self.view)
        return domain

    @property
    def waiting(self) -> int:
        """Requests that wait, of every class."""
        waiting = 0
        for domain in self._domains.values():  # every request asks several times
            waiting += len(domain.queue)
        return waiting

    def waiting_beside(self, service_class: ServiceClass) -> int:
        """Requests of other classes that wait."""
        return sum([len(domain.queue) for name, domain in self._domains.items() if name is not service_class])

    @property
    def is_short(self) -> bool:
        """Whether those who wait for an answer wait for a lane, or for memory, and not for prompts to be read before theirs."""
        if not self.view.lanes.free:
            return True
        others = [domain for name, domain in self._domains.items() if name is not ServiceClass.BATCH]
        firsts = [next(domain.queue.candidates(), None) for domain in others]
        return any(first is not None and not self.view.has_memory(first.need, first.avoid) for first in firsts)

    def part(self, service_class: ServiceClass) -> float:
        """What a class is guaranteed of the pool while those wait that do."""
        return self._shares.part(service_class, self._waiting())

    def begins_to_wait(self, service_class: ServiceClass) -> None:
        """A request of this class is about to wait."""
        if not self.of(service_class).queue:
            self._shares.began_to_wait(service_class, self._waiting())

    def served(self, service_class: ServiceClass, cost: Cost) -> None:
        """A request of this class was dispatched at this cost."""
        self._shares.served(service_class, cost)
        if service_class is not ServiceClass.BATCH:
            self.lent.served_others()

    def queues(self) -> list[DomainQueue[ExecutionId]]:
        """Where somebody waits, the one whose turn it is first; batches last while they keep their share of lanes."""
        waiting = self._waiting()
        turns = self._shares.turns(waiting) if len(waiting) > 1 else waiting
        if len(turns) == 1:
            self.lent.is_wanted_by_nobody()
        elif self.lent.is_owed or not self.lent.may_keep(self.view.lanes.usable):
            turns.sort(key=lambda name: name is ServiceClass.BATCH)
        return [self._domains[each].queue for each in turns]

    def _waiting(self) -> list[ServiceClass]:
        return [name for name, domain in self._domains.items() if domain.queue]
