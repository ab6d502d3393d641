"""The bounded queue of one scheduling domain: bounds hold, order repeats, nobody starves, nothing is lost or served twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.scheduling.orders import ArrivalOrder
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds, Waiting

TENANTS = ("a", "b", "c")
BOUNDS = QueueBounds(entries_per_tenant_max=3, entries_max=6, bytes_max=100, wait_ms_max=1)
WIDE = QueueBounds(1_000, 1_000, 10_000, 1)


def entry(tenant: str, key: int, size: int = 1, *, start_by_ns: int = 10**9, cost: int = 10) -> Entry[int]:
    """One that waits."""
    return Entry(tenant, key, size, cost, start_by_ns)


class QueueMachine(RuleBasedStateMachine):
    """A queue beside plain lists of what waits, oldest first: in the flows, and ahead of them by the replica to avoid."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: DomainQueue[int] = DomainQueue(BOUNDS)
        self.waiting: list[tuple[str, int, int]] = []
        self.ahead: list[tuple[str, int, int, str]] = []
        self.keys = 0

    @property
    def everybody(self) -> list[tuple[str, int, int]]:
        """(tenant, key, size) of all that waits."""
        return self.waiting + [entry[:3] for entry in self.ahead]

    @rule(tenant=st.sampled_from(TENANTS), size=st.integers(0, 60), avoid=st.sampled_from([None, None, "r1", "r2"]))
    def arrive(self, tenant: str, size: int, avoid: str | None) -> None:
        """An entry waits exactly if every bound leaves room for it, ahead or not."""
        own = sum(waiting == tenant for waiting, _, _ in self.everybody)
        total = sum(known for _, _, known in self.everybody)
        fits = own < 3 and len(self.everybody) < 6 and total + size <= 100
        refusal = self.queue.refusal(tenant, size)
        assert (refusal is None) == fits
        if refusal is not None:
            assert refusal.code == "queue_full" and refusal.retry_after_ms
            return
        self.keys += 1
        if avoid is None:
            self.queue.push(entry(tenant, self.keys, size))
            self.waiting.append((tenant, self.keys, size))
        else:
            self.queue.push_ahead(entry(tenant, self.keys, size), avoid)
            self.ahead.append((tenant, self.keys, size, avoid))

    @precondition(lambda self: self.everybody)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """Candidates are the oldest ahead for each replica to avoid, then the oldest entries of flows."""
        chosen = data.draw(st.sampled_from(list(self.queue.candidates())))
        if chosen.avoid is not None:
            again = next(entry for entry in self.ahead if entry[3] == chosen.avoid)
            assert again[:2] == (chosen.tenant, chosen.key)
            self.ahead.remove(again)
        else:
            oldest = next(entry for entry in self.waiting if entry[0] == chosen.tenant)
            assert oldest[1] == chosen.key
            self.waiting.remove(oldest)
        ticket = self.queue.serve(chosen)
        assert (ticket is None) == (chosen.avoid is not None)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """An entry leaves from anywhere, once."""
        if not self.everybody:
            assert not self.queue.remove("a", 1)
            return
        entry = data.draw(st.sampled_from(self.everybody))
        assert self.queue.remove(entry[0], entry[1])
        assert not self.queue.remove(entry[0], entry[1])
        self.waiting = [other for other in self.waiting if other[1] != entry[1]]
        self.ahead = [other for other in self.ahead if other[1] != entry[1]]

    @invariant()
    def figures_agree(self) -> None:
        """Entries and bytes are those of what waits; who may go next is one per replica to avoid, and each flow's head."""
        assert len(self.queue) == len(self.everybody) and self.queue.ahead == len(self.ahead)
        assert self.queue.bytes == sum(size for _, _, size in self.everybody)
        avoided = {entry[3] for entry in self.ahead}
        assert len(list(self.queue.candidates())) == len(avoided) + len({tenant for tenant, _, _ in self.waiting})
        assert self.queue.work_ahead == 10 * len(self.ahead)
        for tenant in TENANTS:
            own = sum(waiting == tenant for waiting, _, _ in self.waiting)
            assert 10 * (len(self.ahead) + own) <= self.queue.work_before(tenant) <= 10 * len(self.everybody)


QueueMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestQueueMachine = QueueMachine.TestCase


def _serve_next(queue: DomainQueue[int]) -> Waiting[int]:
    first = next(queue.candidates())
    queue.serve(first)
    return first


@given(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=60))
def test_backlogged_flows_take_turns(arrivals: list[str]) -> None:
    """Protects fairness: between two equal services of a backlogged flow each other one is served once, or twice at most."""
    queue: DomainQueue[int] = DomainQueue(WIDE)
    for key, tenant in enumerate(arrivals):
        queue.push(entry(tenant, key))
    left = {tenant: arrivals.count(tenant) for tenant in set(arrivals)}
    since: dict[str, list[str]] = {tenant: [] for tenant in left}
    while queue:
        tenant = _serve_next(queue).tenant
        left[tenant] -= 1
        for other in since:
            if other != tenant and left[other]:
                since[other].append(tenant)
                assert since[other].count(tenant) <= 2
        since[tenant] = []


def test_a_retry_goes_first_and_uses_no_turn() -> None:
    """Protects both sides of a retry: it waits behind nobody again, and its tenant's next request keeps its turn."""
    queue: DomainQueue[int] = DomainQueue(BOUNDS)
    queue.push(entry("a", 1))
    queue.push(entry("b", 2))
    queue.push_ahead(entry("a", 3), "r1")
    assert [_serve_next(queue).key for _ in range(3)] == [3, 1, 2]


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 5)), min_size=1, max_size=40))
def test_within_a_flow_goes_first_what_must_start_first(arrivals: list[tuple[str, int]]) -> None:
    """Protects deadlines: a tenant's own urgent request passes its patient ones, and equal ones keep their order."""
    queue: DomainQueue[int] = DomainQueue(WIDE)
    for key, (tenant, start_by_ns) in enumerate(arrivals):
        queue.push(entry(tenant, key, start_by_ns=start_by_ns))
    served: dict[str, list[tuple[int, int]]] = {}
    while queue:
        waiting = _serve_next(queue)
        served.setdefault(waiting.tenant, []).append((arrivals[waiting.key][1], waiting.key))
    assert all(keys == sorted(keys) for keys in served.values())


@given(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=40), st.sets(st.integers(0, 39)))
def test_first_come_first_served(arrivals: list[str], gone: set[int]) -> None:
    """Protects the baseline of every comparison: with equal deadlines it is arrival, whoever asks, whoever leaves."""
    queue: DomainQueue[int] = DomainQueue(WIDE, ArrivalOrder())
    for key, tenant in enumerate(arrivals):
        queue.push(entry(tenant, key))
    for key in gone & set(range(len(arrivals))):
        assert queue.remove(arrivals[key], key)
    assert [_serve_next(queue).key for _ in range(len(queue))] == [key for key in range(len(arrivals)) if key not in gone]


def test_a_domain_refuses_above_its_own_bounds() -> None:
    """Protects memory: the domain's entries and bytes are bounded across tenants, and a place that is left can be taken."""
    for bounds in (QueueBounds(entries_max=2, bytes_max=1_000), QueueBounds(entries_max=100, bytes_max=20)):
        queue: DomainQueue[str] = DomainQueue(bounds)
        for tenant in ("acme", "globex"):
            assert queue.refusal(tenant, 10) is None
            queue.push(Entry(tenant, tenant, 10, 1, 0))
        refusal = queue.refusal("initech", 10)
        assert refusal is not None and refusal.code == "queue_full" and refusal.retry_after_ms
        assert queue.remove("acme", "acme")
        assert queue.refusal("initech", 10) is None


def test_the_door_is_at_half_of_the_bound_of_waiting() -> None:
    """Protects what is admitted from expiring at the bound, and a tiny bound from refusing everything."""
    assert QueueBounds(wait_ms_max=5_000).door_ms_max == 2_500 and QueueBounds(wait_ms_max=1).door_ms_max == 1


def test_a_tenant_is_refused_above_its_own_bound() -> None:
    """Protects other tenants: what waits for a second attempt counts in its tenant's entries, and leaves them with its end."""
    queue: DomainQueue[int] = DomainQueue(QueueBounds(entries_per_tenant_max=2))
    queue.push(entry("acme", 1, 10))
    queue.push_ahead(entry("acme", 2, 10), "r1")
    refusal = queue.refusal("acme", 10)
    assert refusal is not None and refusal.code == "queue_full"
    assert queue.refusal("globex", 10) is None
    assert queue.remove("acme", 2)
    assert queue.refusal("acme", 10) is None


def test_a_more_urgent_request_of_its_own_moves_a_flow() -> None:
    """Protects deadlines through the order: a flow is judged by its new head, and by the one before once that left."""
    queue: DomainQueue[int] = DomainQueue(WIDE)
    for key, (tenant, start_by_ns) in enumerate([("a", 5), ("b", 4), ("a", 6), ("a", 3)]):
        queue.push(entry(tenant, key, start_by_ns=start_by_ns))
    assert next(queue.candidates()).key == 3
    assert queue.remove("a", 3) and next(queue.candidates()).key == 1
    assert queue.remove("a", 2) and queue.remove("a", 0)
    assert [waiting.key for waiting in queue.candidates()] == [1]


def test_a_place_in_a_flow_counts_its_own_tenants_earlier_ones() -> None:
    """Protects the answer to how many go before: the more urgent ones and the older of equals, of one tenant alone."""
    queue: DomainQueue[int] = DomainQueue(WIDE)
    for key, (tenant, start_by_ns) in enumerate([("a", 5), ("b", 1), ("a", 3), ("a", 7), ("a", 5)]):
        queue.push(entry(tenant, key, 2, start_by_ns=start_by_ns))
    assert [queue.position("a", key) for key in (2, 3, 4)] == [0, 3, 2] and queue.position("b", 1) == 0
    assert queue.bytes == 10


def test_what_waits_ahead_leaves_once_and_from_anywhere() -> None:
    """Protects bounds: of several that avoid one replica each is counted until it leaves, and an unknown one is none."""
    queue: DomainQueue[int] = DomainQueue(WIDE)
    for key, avoid in enumerate(("r1", "r1", "r2")):
        queue.push_ahead(entry("a", key, cost=7), avoid)
    assert queue.ahead == 3 and queue.work_ahead == 21
    assert queue.remove("a", 1) and not queue.remove("a", 1) and not queue.remove("nobody", 5)
    assert [(waiting.key, waiting.avoid) for waiting in queue.candidates()] == [(0, "r1"), (2, "r2")]
    assert queue.remove("a", 0) and [waiting.key for waiting in queue.candidates()] == [2]
