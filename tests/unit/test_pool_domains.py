"""The domains of a pool: one per class, whose turn it is between them, and what each is guaranteed while both wait."""

from weir.config import CoordinatorConfig
from weir.coordinator.domain import Domain
from weir.coordinator.fleet import PoolView
from weir.coordinator.pool_domains import PoolDomains
from weir.core.ledger.records import ExecutionId
from weir.core.registry.model import Pool
from weir.core.scheduling.fairness import FairOrder
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import Entry
from weir.core.tenancy import ServiceClass

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
VIEW = PoolView(Pool("pool", "rev", 1, 4))


class Stand:
    """A pool's domains, and requests of both classes."""

    def __init__(self) -> None:
        self.views: list[PoolView] = []
        self.pool = PoolDomains(VIEW, {INTERACTIVE: 75, BATCH: 25}, self.make)
        self.numbers = 0

    def make(self, view: PoolView) -> Domain:
        """A new domain."""
        self.views.append(view)
        return Domain(CoordinatorConfig(), FairOrder(), OutputLengths())

    def wait(self, service_class: ServiceClass, times: int = 1) -> None:
        """So many of a class come."""
        for _ in range(times):
            self.numbers += 1
            self.pool.begins_to_wait(service_class)
            entry = Entry("acme", ExecutionId("acme", f"r{self.numbers}", 1), 1, 100, 0)
            self.pool.of(service_class).queue.push(entry)

    def start(self) -> ServiceClass:
        """The next one of the class whose turn it is."""
        queue = self.pool.queues()[0]
        turn = next(each for each in ServiceClass if self.pool.of(each).queue is queue)
        ticket = queue.serve(next(queue.candidates()))
        assert ticket is not None
        self.pool.served(turn, ticket.cost)
        return turn


def test_a_class_has_one_domain_from_its_first_request_on() -> None:
    """Protects memory and history: domains are made when they are needed, for their pool, and once."""
    stand = Stand()
    assert stand.pool.queues() == [] and stand.pool.waiting == 0 and stand.views == []
    domain = stand.pool.of(BATCH)
    assert stand.pool.of(BATCH) is domain is not stand.pool.of(INTERACTIVE)
    assert stand.views == [VIEW, VIEW]


def test_who_waits_is_counted_by_class() -> None:
    """Protects the door's figures: all that wait, those of other classes, and the part that is guaranteed meanwhile."""
    stand = Stand()
    stand.wait(INTERACTIVE, 3)
    assert stand.pool.part(INTERACTIVE) == 1.0 and stand.pool.part(BATCH) == 0.25
    stand.wait(BATCH, 2)
    assert stand.pool.waiting == 5
    assert (stand.pool.waiting_beside(INTERACTIVE), stand.pool.waiting_beside(BATCH)) == (2, 3)
    assert (stand.pool.part(INTERACTIVE), stand.pool.part(BATCH)) == (0.75, 0.25)


def test_backlogged_classes_start_by_their_shares() -> None:
    """Protects both classes: three in four are interactive, and batch has its turn though interactive requests wait on."""
    stand = Stand()
    stand.wait(INTERACTIVE, 40)
    stand.wait(BATCH, 40)
    turns = [stand.start() for _ in range(40)]
    assert (turns.count(INTERACTIVE), turns.count(BATCH)) == (30, 10)
    assert turns[0] is INTERACTIVE and BATCH in turns[:4]


def test_a_class_alone_takes_every_turn_and_owes_nothing_for_it() -> None:
    """Protects batches on an idle pool: they run while nobody else waits, and share from the moment at which somebody does."""
    stand = Stand()
    stand.wait(BATCH, 60)
    assert {stand.start() for _ in range(20)} == {BATCH}
    stand.wait(INTERACTIVE, 40)
    turns = [stand.start() for _ in range(40)]
    assert turns.count(BATCH) == 10


def test_what_started_at_once_is_no_debt() -> None:
    """Protects interactive requests from the first batch after a quiet day on which none of them had to wait."""
    stand = Stand()
    for _ in range(100):
        stand.wait(INTERACTIVE)
        assert stand.start() is INTERACTIVE
    stand.wait(BATCH, 40)
    stand.wait(INTERACTIVE, 40)
    turns = [stand.start() for _ in range(40)]
    assert turns.count(INTERACTIVE) >= 29
