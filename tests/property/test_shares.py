"""Between the classes of a pool: each gets its share while it waits, none saves up, and an idle one costs nothing."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weir.core.scheduling.shares import ClassShares
from weir.core.tenancy import ServiceClass

CLASSES = list(ServiceClass)
INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
DEAREST = 1_000
costs = st.integers(1, DEAREST)


class Pool:
    """Two classes, and what each of them was served ÷ its share."""

    def __init__(self, interactive: int, batch: int) -> None:
        self.each = {INTERACTIVE: interactive, BATCH: batch}
        self.shares = ClassShares(self.each)
        self.waiting: list[ServiceClass] = []
        self.served: Counter[ServiceClass] = Counter()

    def begin(self, service_class: ServiceClass) -> None:
        """The first of its requests waits."""
        if service_class not in self.waiting:
            self.shares.began_to_wait(service_class, self.waiting)
            self.waiting.append(service_class)

    def serve(self, cost: int) -> ServiceClass:
        """One of the class whose turn it is."""
        turn = self.shares.turns(self.waiting)[0]
        self.shares.served(turn, cost)
        self.served[turn] += cost
        return turn

    def alone(self, service_class: ServiceClass, times: int, cost: int = 100) -> None:
        """One request after another of a class that nobody waits beside: each comes, starts at once, and leaves."""
        for _ in range(times):
            self.begin(service_class)
            assert self.serve(cost) is service_class
            self.waiting.remove(service_class)

    def turns(self, number: int, cost: int = 100) -> Counter[ServiceClass]:
        """Whose turn it was so many times."""
        return Counter(self.serve(cost) for _ in range(number))


@given(st.integers(1, 99), st.lists(costs, min_size=1, max_size=300))
def test_two_backlogged_classes_get_their_shares(batch: int, drawn: list[int]) -> None:
    """Protects both classes: what each was served ÷ its share differs by at most the dearest request ÷ the smaller share."""
    pool = Pool(100 - batch, batch)
    for each in ServiceClass:
        pool.begin(each)
    for cost in drawn:
        pool.serve(cost)
        parts = [pool.served[each] / share for each, share in pool.each.items()]
        assert max(parts) - min(parts) <= DEAREST / min(pool.each.values()) + 0.01


def test_shares_are_delivered_over_time() -> None:
    """Protects the configured proportion: at 80 to 20, four in five of equal requests are interactive ones."""
    pool = Pool(80, 20)
    for each in ServiceClass:
        pool.begin(each)
    assert pool.turns(500) == {INTERACTIVE: 400, BATCH: 100}


def test_the_larger_share_goes_first_among_equals() -> None:
    """Protects interactive requests at the first moment of a backlog, and repeatability."""
    shares = ClassShares({BATCH: 20, INTERACTIVE: 80})
    assert shares.turns([BATCH, INTERACTIVE]) == [INTERACTIVE, BATCH] == shares.turns([INTERACTIVE, BATCH])
    assert shares.turns([]) == []


def test_an_idle_class_costs_nothing() -> None:
    """Protects capacity: while nobody of the other class waits every turn is one's own, and its part is the whole."""
    pool = Pool(80, 20)
    pool.begin(BATCH)
    assert pool.turns(50) == {BATCH: 50}
    assert pool.shares.part(BATCH, [BATCH]) == 1.0 == pool.shares.part(BATCH, [])
    assert pool.shares.part(BATCH, [BATCH, INTERACTIVE]) == pool.shares.part(BATCH, [INTERACTIVE]) == 0.2
    assert pool.shares.part(INTERACTIVE, [BATCH]) == 0.8


def test_a_class_that_was_idle_beside_a_backlog_saves_up_nothing() -> None:
    """Protects those who wait: whoever comes back after a hundred turns gets its share from now on, and nothing back."""
    pool = Pool(50, 50)
    pool.begin(INTERACTIVE)
    pool.turns(100)
    pool.begin(BATCH)
    assert pool.turns(20) == {INTERACTIVE: 10, BATCH: 10}


def test_a_class_that_was_idle_while_the_other_never_had_to_wait_saves_up_nothing() -> None:
    """Protects interactive requests from the first batch after a quiet day: what started at once is no debt."""
    pool = Pool(50, 50)
    pool.alone(INTERACTIVE, 100)
    pool.begin(BATCH)
    pool.begin(INTERACTIVE)
    assert pool.turns(20) == {INTERACTIVE: 10, BATCH: 10}


@given(st.lists(st.tuples(st.sampled_from(ServiceClass), st.sampled_from([1, 5, 30])), max_size=8), st.permutations(CLASSES))
def test_no_past_decides_who_gets_the_next_turns(past: list[tuple[ServiceClass, int]], comers: list[ServiceClass]) -> None:
    """Protects both classes: whoever was alone before, once both wait each has half of equal shares from then on."""
    pool = Pool(50, 50)
    for service_class, times in past:
        pool.alone(service_class, times)
    for service_class in comers:
        pool.begin(service_class)
    turns = pool.turns(20)
    assert abs(turns[INTERACTIVE] - turns[BATCH]) <= 2
