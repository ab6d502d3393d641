"""The scheduling domains of one pool: one per service class that waits there, and whose turn it is between them.

It counts and orders; what a domain's requests cost and how long they wait is `domain.py`'s.
"""

from collections.abc import Callable, Mapping

from weir.coordinator.domain import Domain
from weir.coordinator.fleet import PoolView
from weir.core.ledger.records import ExecutionId
from weir.core.scheduling.orders import Cost
from weir.core.scheduling.queues import DomainQueue
from weir.core.scheduling.shares import ClassShares
from weir.core.tenancy import ServiceClass


class PoolDomains:
    """shares: guaranteed to each class while it waits. make: a new domain of the pool."""

    def __init__(self, view: PoolView, shares: Mapping[ServiceClass, int], make: Callable[[PoolView], Domain]) -> None:
        self.view = view
        self._make = make
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

    def queues(self) -> list[DomainQueue[ExecutionId]]:
        """The queues in which somebody waits, the one whose turn it is first."""
        waiting = self._waiting()
        turns = self._shares.turns(waiting) if len(waiting) > 1 else waiting
        return [self._domains[each].queue for each in turns]

    def _waiting(self) -> list[ServiceClass]:
        return [name for name, domain in self._domains.items() if domain.queue]
