"""The bounded queue of one scheduling domain: bounds hold, order repeats, nobody starves, nothing is lost or served twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.scheduling.queues import DomainQueue, QueueBounds, Rotation

TENANTS = ("a", "b", "c")
BOUNDS = QueueBounds(entries_per_tenant_max=3, entries_max=6, bytes_max=100, wait_ms_max=1)


class QueueMachine(RuleBasedStateMachine):
    """A queue beside a plain list of what waits, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: DomainQueue[int] = DomainQueue(BOUNDS)
        self.waiting: list[tuple[str, int, int]] = []
        self.keys = 0

    @rule(tenant=st.sampled_from(TENANTS), size=st.integers(0, 60))
    def arrive(self, tenant: str, size: int) -> None:
        """An entry waits exactly if every bound leaves room for it."""
        own = sum(waiting == tenant for waiting, _, _ in self.waiting)
        total = sum(known for _, _, known in self.waiting)
        fits = own < 3 and len(self.waiting) < 6 and total + size <= 100
        refusal = self.queue.refusal(tenant, size)
        assert (refusal is None) == fits
        if refusal is not None:
            assert refusal.code == "queue_full" and refusal.retry_after_ms
            return
        self.keys += 1
        self.queue.push(tenant, self.keys, size)
        self.waiting.append((tenant, self.keys, size))

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        """The head is the oldest entry of its tenant, and `pop` takes what `head` showed."""
        head = self.queue.head()
        assert head == self.queue.pop()
        tenant, key = head
        oldest = next(entry for entry in self.waiting if entry[0] == tenant)
        assert oldest[1] == key
        self.waiting.remove(oldest)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """An entry leaves from anywhere, once."""
        if not self.waiting:
            assert not self.queue.remove("a", 1)
            return
        entry = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(entry[0], entry[1])
        assert not self.queue.remove(entry[0], entry[1])
        self.waiting.remove(entry)

    @invariant()
    def figures_agree(self) -> None:
        """Entries and bytes are those of what waits; an empty queue has no head."""
        assert len(self.queue) == len(self.waiting)
        assert self.queue.bytes == sum(size for _, _, size in self.waiting)
        assert (self.queue.head() is None) == (not self.waiting)


QueueMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestQueueMachine = QueueMachine.TestCase


@given(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=60))
def test_backlogged_flows_take_turns(arrivals: list[str]) -> None:
    """Protects fairness: between two services of a backlogged flow every other backlogged flow is served at most once."""
    queue: DomainQueue[int] = DomainQueue(QueueBounds(1_000, 1_000, 10_000, 1))
    for key, tenant in enumerate(arrivals):
        queue.push(tenant, key, 1)
    left = {tenant: arrivals.count(tenant) for tenant in set(arrivals)}
    since: dict[str, list[str]] = {tenant: [] for tenant in left}
    while queue:
        tenant, _ = queue.pop()
        left[tenant] -= 1
        for other in since:
            if other != tenant and left[other]:
                since[other].append(tenant)
                assert since[other].count(tenant) <= 1
        since[tenant] = []


def test_rotation_ignores_a_flow_whose_turn_it_is_not() -> None:
    """Protects the order: serving out of turn moves nobody."""
    order = Rotation()
    assert order.turn() is None
    order.served("a")
    order.joined("a")
    order.joined("b")
    order.served("b")
    assert order.turn() == "a"
    order.served("a")
    assert order.turn() == "b"
    order.left("b")
    assert order.turn() == "a"


def test_a_domain_refuses_above_its_own_bounds() -> None:
    """Protects memory: the domain's entries and bytes are bounded across tenants, and a place that is left can be taken."""
    for bounds in (QueueBounds(entries_max=2, bytes_max=1_000), QueueBounds(entries_max=100, bytes_max=20)):
        queue: DomainQueue[str] = DomainQueue(bounds)
        for tenant in ("acme", "globex"):
            assert queue.refusal(tenant, 10) is None
            queue.push(tenant, tenant, 10)
        refusal = queue.refusal("initech", 10)
        assert refusal is not None and refusal.code == "queue_full" and refusal.retry_after_ms
        assert queue.remove("acme", "acme")
        assert queue.refusal("initech", 10) is None
