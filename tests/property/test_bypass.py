"""A head that fits nowhere: others pass it so often and no more, then its room is kept, and fairness holds all the same."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.routing.capacity import Need
from weir.core.routing.placement import place
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits
from weir.core.scheduling.fairness import FairOrder
from weir.core.scheduling.orders import BYPASSES_MAX, Ticket
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds
from weir.core.scheduling.schedule import Start, next_start

WIDE = QueueBounds(100_000, 100_000, 100_000_000, 1)
KV_MAX = 10
DEAREST = 100


def replica(name: str = "r", lanes: int = 16, kv_tokens_max: int = KV_MAX) -> Replica:
    """A ready one."""
    made = Replica(name, "pool", ReplicaLimits(lanes))
    made.room.kv_tokens_max = kv_tokens_max
    made.advance(ReplicaEvent.ANSWERED)
    return made


class Pool:
    """Replicas and the queues of their classes, and how often the head of each was passed, counted from what is seen."""

    def __init__(self, replicas: Sequence[Replica], queues: int = 1, slack: int = 0) -> None:
        self.replicas = replicas
        self.queues: list[DomainQueue[int]] = [DomainQueue(WIDE, FairOrder(slack=slack)) for _ in range(queues)]
        self.running: list[tuple[int, Replica, int, Ticket | None]] = []
        self.passes: Counter[int] = Counter()
        self.keys = 0

    def push(self, tenant: str, kv_tokens: int, cost: int = 1, start_by_ns: int = 0, queue: int = 0) -> int:
        """One more that waits; its key."""
        self.keys += 1
        self.queues[queue].push(Entry(tenant, self.keys, 1, cost, start_by_ns, Need(kv_tokens, kv_tokens)))
        return self.keys

    def start(self, queues: Sequence[DomainQueue[int]] | None = None) -> Start[int] | None:
        """The next dispatch, if there is one, in this order of turns."""
        turns = self.queues if queues is None else queues
        start = next_start(turns, self.replicas)
        if start is None:
            return None
        self._count_passes(turns, start)
        for queue, key in start.passed:
            queue.passed(key)
        ticket = start.queue.serve(start.waiting)
        lane = start.site.replica.take_lane(start.waiting.need.kv_tokens)
        self.running.append((start.waiting.key, start.site.replica, lane, ticket))
        return start

    def _count_passes(self, turns: Sequence[DomainQueue[int]], start: Start[int]) -> None:
        """Whoever was asked before it and fits nowhere was passed; a second attempt passes nobody of its own queue."""
        for queue in turns:
            fresh = [waiting for waiting in queue.candidates() if waiting.avoid is None]
            if queue is start.queue and (start.waiting.avoid is not None or start.waiting == fresh[0]):
                assert not any((queue, waiting.key) in start.passed for waiting in fresh)
                return
            if fresh:
                assert (queue, fresh[0].key) in start.passed and place(self.replicas, fresh[0].need) is None
                self.passes[fresh[0].key] += 1
            if queue is start.queue:
                return

    def keeps_room(self) -> bool:
        """For the head of its first queue."""
        first = self.queues[0].candidates()
        return any(self.queues[0].keeps_room(waiting.key) for waiting in first)

    def end(self, number: int) -> int:
        """One of those that run ends; its key."""
        key, where, lane, _ = self.running.pop(number % len(self.running))
        where.free_lane(lane)
        return key

    def started(self, number: int) -> list[int]:
        """The keys of what starts until nothing can, so many at most."""
        keys = []
        for _ in range(number):
            start = self.start()
            if start is None:
                break
            keys.append(start.waiting.key)
        return keys


class Busy(Pool):
    """Two classes on a few replicas, under random load. where: the queue of each key."""

    def __init__(self, fleet: int) -> None:
        super().__init__([replica(f"r{number}", lanes=4) for number in range(fleet)], queues=2)
        self.turns = self.queues
        self.where: dict[int, int] = {}

    def play(self, move: str, number: int, kv_tokens: int, queue: int) -> None:
        """One move; number: a tenant, or which of the running or known requests it is about."""
        if move == "push":
            self.where[self.push(str(number), kv_tokens, queue=queue)] = queue
        elif move == "ahead":
            self.keys += 1
            entry = Entry(str(number), self.keys, 1, 1, 0, Need(kv_tokens, kv_tokens))
            self.queues[queue].push_ahead(entry, f"r{number % 3}")
        elif move == "end" and self.running:
            self.end(number)
        elif move == "leave" and self.where:
            key = sorted(self.where)[number % len(self.where)]
            any(self.queues[self.where[key]].remove(str(tenant), key) for tenant in range(4))
        elif move == "turn":
            self.turns = self.turns[::-1]

    def start_all(self) -> None:
        """Whatever can start does, and nothing out of its turn before a head whose room is kept."""
        for _ in range(100):
            kept = [
                (queue, waiting.key) for queue in self.turns for waiting in queue.candidates() if queue.keeps_room(waiting.key)
            ]
            start = self.start(self.turns)
            if start is None:
                return
            assert not any(passed in kept for passed in start.passed)


moves = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 3), st.sampled_from([1, 1, 2, 3, 7, 10, 14]), st.integers(0, 1)),
    st.tuples(st.just("ahead"), st.integers(0, 3), st.sampled_from([1, 8]), st.integers(0, 1)),
    st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 50), st.just(0), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 9, 10])), max_size=30),
    st.lists(moves, max_size=120),
)
def test_a_head_is_passed_so_often_and_then_its_room_is_kept(
    fleet: int, waiting: list[tuple[int, int]], played: list[tuple[str, int, int, int]]
) -> None:
    """Protects large requests: whatever comes, ends or leaves, no head is passed more often than the bound, in any queue."""
    pool = Busy(fleet)
    for tenant, kv_tokens in waiting:
        pool.play("push", tenant, kv_tokens, 0)
    for move in played:
        pool.play(*move)
        pool.start_all()
        assert max(pool.passes.values(), default=0) <= BYPASSES_MAX


def test_small_requests_pass_a_large_one_up_to_the_bound() -> None:
    """Protects both sides: memory that a large request cannot use yet is used, and then it is kept until that one starts."""
    pool = Pool([replica()])
    pool.push("large", 9)
    assert pool.started(10) == [1]  # it runs: a second one of its size fits nowhere
    large = pool.push("large", 9)
    small = [pool.push("small", 1) for _ in range(2 * BYPASSES_MAX)]
    served = []
    for _ in range(BYPASSES_MAX):
        [key] = pool.started(10)
        served.append(key)
        assert pool.end(1) == key
    assert served == small[:BYPASSES_MAX] and pool.keeps_room()
    assert pool.started(10) == []
    assert pool.end(0) == 1
    assert pool.started(1) == [large] and not pool.keeps_room()
    assert pool.started(10) == [small[BYPASSES_MAX]]


def test_a_large_one_that_leaves_keeps_nothing() -> None:
    """Protects the others from a client that is gone: its room is free at once, and another one's is counted anew."""
    pool = Pool([replica()])
    pool.push("large", 9)
    pool.started(1)
    larges = [(tenant, pool.push(tenant, 9)) for tenant in ("large", "huge")]
    for number, (tenant, large) in enumerate(larges):
        for _ in range(2 * BYPASSES_MAX):
            pool.push(f"small-{number}", 1)
        for _ in range(BYPASSES_MAX):
            assert len(pool.started(10)) == 1
            pool.end(1)
        assert pool.started(10) == []
        assert pool.queues[0].remove(tenant, large)
    assert not pool.keeps_room() and len(pool.started(10)) == 1


def test_room_is_kept_from_the_other_class_too() -> None:
    """Protects a class's large request from the other class's small ones, and lets that class have its own turn."""
    pool = Pool([replica()], queues=2)
    pool.push("large", 9)
    pool.started(1)
    large = pool.push("large", 9)
    small = [pool.push("small", 1, queue=1) for _ in range(2 * BYPASSES_MAX)]
    for key in small[:BYPASSES_MAX]:
        assert pool.started(10) == [key]
        pool.end(1)
    assert pool.started(10) == []
    start = pool.start(pool.queues[::-1])
    assert start is not None and (start.waiting.key, start.passed) == (small[BYPASSES_MAX], ()), "it was that class's turn"
    pool.end(1)
    assert pool.start() is None
    pool.end(0)
    assert pool.started(1) == [large]


def test_another_pool_is_not_held_up() -> None:
    """Protects pools from each other: room that is kept in one is no business of the next one."""
    kept, other = Pool([replica()]), Pool([replica("other")])
    kept.push("large", 9)
    kept.started(1)
    kept.push("large", 9)
    for _ in range(BYPASSES_MAX + 1):
        kept.push("small", 1)
    for _ in range(BYPASSES_MAX):
        kept.started(10)
        kept.end(1)
    assert kept.keeps_room() and kept.started(1) == []
    assert [other.push("large", 9), other.push("small", 1)] == other.started(10)


def test_a_second_attempt_neither_passes_nor_is_held_up() -> None:
    """Protects the one retry: it goes ahead of a head whose room is kept, and counts as no bypass of it."""
    pool = Pool([replica()])
    pool.push("large", 9)
    pool.started(1)
    large = pool.push("large", 9)
    queue = pool.queues[0]
    for number in range(3 * BYPASSES_MAX):
        queue.push_ahead(Entry("again", 1_000 + number, 1, 1, 0, Need(1, 1)), "gone")
        assert pool.started(1) == [1_000 + number]
        pool.end(1)
    assert not queue.keeps_room(large) and pool.passes[large] == 0


def test_a_large_second_attempt_is_not_passed_for_ever() -> None:
    """Protects the one retry of a large request: where it fits on no replica that it may use, its room is kept in the end."""
    pool = Pool([replica("r1"), replica("r2")])
    for _ in range(8):
        pool.push("small", 1)
    pool.started(8)
    pool.queues[0].push_ahead(Entry("again", 1_000, 1, 1, 0, Need(9, 9)), "r1")
    started: list[int] = []
    for _ in range(8 * BYPASSES_MAX):
        pool.push("small", 1)
        pool.end(0)
        started += pool.started(8)
    assert 1_000 in started


def test_a_queue_of_second_attempts_alone_is_passed_without_a_count() -> None:
    """Protects other classes: what must avoid the only replica could not have used its room."""
    pool = Pool([replica()], queues=2)
    pool.queues[0].push_ahead(Entry("again", 1_000, 1, 1, 0), "r")
    keys = [pool.push("small", 1, queue=1) for _ in range(2 * BYPASSES_MAX)]
    for key in keys:
        start = pool.start()
        assert start is not None and (start.waiting.key, start.passed) == (key, ())
        pool.end(0)


def test_heads_that_fit_nowhere_hide_nobody_behind_them() -> None:
    """Protects small requests: whoever asks for as much as one that fits nowhere is not asked for, up to a bound of flows."""
    pool = Pool([replica()])
    pool.push("first", 5)
    pool.started(1)
    for number in range(31):
        pool.push(f"large-{number:02d}", 9)
    small = pool.push("small", 1)
    assert pool.started(1) == [small]
    pool.end(1)
    for number in range(31, 36):
        pool.push(f"large-{number:02d}", 9)
    small = pool.push("small", 1)
    assert pool.started(1) == []
    for number in range(4):
        assert pool.queues[0].remove(f"large-{number:02d}", 2 + number)
    assert pool.started(1) == [small]


def test_who_cuts_in_and_leaves_does_not_reset_the_count() -> None:
    """Protects large requests from a neighbour that asks urgently and leaves again: every start before it counts."""
    pool = Pool([replica()], slack=1_000)
    pool.push("large", 9, start_by_ns=5)
    pool.started(1)
    large = pool.push("large", 9, start_by_ns=5)
    for _ in range(6 * BYPASSES_MAX):
        pool.push("small", 1, start_by_ns=9)
    before = 0
    for number in range(6 * BYPASSES_MAX):
        urgent = pool.push("urgent", 9, start_by_ns=1) if number % (BYPASSES_MAX - 1) == BYPASSES_MAX - 2 else None
        before += len(pool.started(1))
        if len(pool.running) > 1:
            pool.end(1)
        if urgent is not None:
            assert pool.queues[0].remove("urgent", urgent)
    assert pool.queues[0].remove("large", large)
    assert before <= 2 * BYPASSES_MAX


# ── fairness beside bypasses ─────────────────────────────────────────────────────────────────────────────────────────


class Service:
    """Flows that never run dry, on one replica: what each got. `large` never fits beside another of its own."""

    def __init__(self, slack: int) -> None:
        self.pool = Pool([replica()], slack=slack)
        self.got: dict[str, int] = defaultdict(int)
        self.wrong: dict[str, float] = defaultdict(float)  # Σ |correction|
        self.slack = slack

    def fill(self, tenant: str, kv_tokens: int, costs: Sequence[int], start_by_ns: int = 0) -> None:
        """This much more waits."""
        for cost in costs:
            self.pool.push(tenant, kv_tokens, cost, start_by_ns)

    def start_all(self) -> list[str]:
        """Dispatch until nothing fits; the tenants that were served."""
        tenants = []
        for _ in range(100):
            start = self.pool.start()
            if start is None:
                break
            ticket = self.pool.running[-1][3]
            assert ticket is not None
            self.got[ticket.tenant] += ticket.cost
            tenants.append(ticket.tenant)
        return tenants

    def end(self, number: int, actual: int | None = None) -> None:
        """One ends, and cost this."""
        number %= len(self.pool.running)
        ticket = self.pool.running[number][3]
        assert ticket is not None
        self.pool.end(number)
        cost = ticket.cost if actual is None else actual
        self.pool.queues[0].close(ticket, cost)
        self.got[ticket.tenant] += cost - ticket.cost
        self.wrong[ticket.tenant] += abs(cost - ticket.cost)

    def end_small(self) -> None:
        """The oldest one that is not large ends; a large one only where nothing else runs."""
        tickets = [ticket.tenant for _, _, _, ticket in self.pool.running if ticket is not None]
        self.end(next((number for number, tenant in enumerate(tickets) if tenant != "large"), 0))

    def bound(self, *tenants: str) -> float:
        """2U + Δ + E + P."""
        return (2 + BYPASSES_MAX) * DEAREST + self.slack + sum(self.wrong[tenant] for tenant in tenants)


@settings(max_examples=60, deadline=None)
@given(
    slack=st.sampled_from([0, 300]),
    costs=st.lists(st.integers(1, DEAREST), min_size=40, max_size=40),
    ends=st.lists(st.tuples(st.integers(0, 9), st.integers(1, DEAREST)), min_size=20, max_size=120),
)
def test_flows_whose_heads_fit_stay_within_the_bound_beside_a_large_one(
    slack: int, costs: list[int], ends: list[tuple[int, int]]
) -> None:
    """Protects fairness: between flows that pass a large head, service differs by at most 2U + Δ + E + P at any moment."""
    service = Service(slack)
    for tenant, kv_tokens in (("large", 9), ("a", 1), ("b", 1)):
        service.fill(tenant, kv_tokens, 10 * costs)
    for number, actual in ends:
        service.start_all()
        service.end(number, actual)
        assert abs(service.got["a"] - service.got["b"]) <= service.bound("a", "b")


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(1, DEAREST), min_size=40, max_size=40),
    ends=st.lists(st.integers(0, 9), min_size=20, max_size=120),
)
def test_while_one_head_waits_the_others_get_no_more_than_their_bypasses(costs: list[int], ends: list[int]) -> None:
    """Protects large requests: from the moment at which it is first, no more than P is dispatched before it."""
    service = Service(0)
    for tenant, kv_tokens in (("a", 1), ("large", 9), ("b", 1)):
        service.fill(tenant, kv_tokens, 10 * costs)
    before = 0
    for number in ends:
        for _ in range(100):
            first = next(service.pool.queues[0].candidates())
            start = service.pool.start()
            if start is None:
                break
            is_bypass = first.tenant == "large" and start.waiting.tenant != "large"
            before = before + 1 if is_bypass else 0
            assert before <= BYPASSES_MAX
        service.end(number)


def test_flows_that_pass_a_large_one_take_turns() -> None:
    """Protects fairness among those who pass: it is the smallest counter's turn, not that of whoever came first."""
    service = Service(0)
    for tenant, kv_tokens in (("large", 9), ("a", 1), ("b", 1)):
        service.fill(tenant, kv_tokens, 50 * [DEAREST])
    for _ in range(BYPASSES_MAX):
        service.start_all()
        service.end_small()
        assert abs(service.got["a"] - service.got["b"]) <= DEAREST


def _long_unequal() -> Service:
    """A thousand short answers of a small flow beside long ones of a large flow, at the same cost each."""
    service = Service(0)
    service.fill("large", 9, 2_000 * [DEAREST])
    service.fill("small", 1, 2_000 * [DEAREST])
    for _ in range(1_000):
        service.start_all()
        service.end_small()
    return service


def test_a_flow_whose_heads_never_fit_at_once_is_not_left_behind_without_bound() -> None:
    """Protects tenants of large requests: P is lent once, not with each of their requests."""
    service = _long_unequal()
    assert service.got["small"] - service.got["large"] <= service.bound("small", "large")


def test_a_newcomer_takes_no_more_than_the_bound_from_a_flow_that_passed_a_large_one() -> None:
    """Protects a small flow: it does not pay a newcomer for what it was allowed to have before a large head."""
    service = _long_unequal()
    before = service.got["small"]
    service.fill("newcomer", 1, 1_000 * [DEAREST])
    for _ in range(200):
        service.start_all()
        service.end_small()
        assert service.got["newcomer"] - (service.got["small"] - before) <= service.bound("newcomer", "small")
