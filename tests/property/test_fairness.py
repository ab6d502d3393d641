"""The fair order: counters stay close, weights are honoured, no credit is saved up, urgent heads go first inside the slack."""

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.scheduling.fairness import FairOrder, TokenCosts
from weir.core.scheduling.orders import BYPASSES_MAX, ArrivalOrder, Head, Ticket
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds

DEAREST = 100
WEIGHTS = {"a": 1, "b": 2, "c": 5}
WIDE = QueueBounds(100_000, 100_000, 100_000_000, 1)
FAR_NS = 10**15


def entry(tenant: str, key: int, cost: int, start_by_ns: int = FAR_NS) -> Entry[int]:
    """One that waits."""
    return Entry(tenant, key, 1, cost, start_by_ns)


@dataclass
class Backlogged:
    """Flows that never run dry on a few lanes: what each was charged ÷ its weight.

    since: for each flow, the corrections of every flow since its own last turn. corrected: all of each flow.
    """

    slack: int
    burst: int = 0
    queue: DomainQueue[int] = field(init=False)
    charged: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    since: dict[str, dict[str, float]] = field(default_factory=lambda: {tenant: defaultdict(float) for tenant in WEIGHTS})
    corrected: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: list[tuple[Ticket, int]] = field(default_factory=list)
    keys: int = 0

    def __post_init__(self) -> None:
        self.queue = DomainQueue(WIDE, FairOrder(WEIGHTS.__getitem__, self.slack, self.burst))

    def arrive(self, tenant: str, expected: int, start_by_ns: int) -> None:
        """One more request."""
        self.keys += 1
        self.queue.push(entry(tenant, self.keys, expected, start_by_ns))

    def dispatch(self, actual: int | None) -> str:
        """The next one starts; it will turn out to cost `actual`, or what is expected."""
        waiting = next(self.queue.candidates())
        ticket = self.queue.serve(waiting)
        assert ticket is not None
        self.charged[waiting.tenant] += ticket.cost / WEIGHTS[waiting.tenant]
        self.since[waiting.tenant].clear()
        self.running.append((ticket, ticket.cost if actual is None else actual))
        return waiting.tenant

    def end(self, number: int) -> None:
        """One of those that run ends."""
        ticket, actual = self.running.pop(number)
        self.queue.close(ticket, actual)
        change = (actual - ticket.cost) / WEIGHTS[ticket.tenant]
        self.charged[ticket.tenant] += change
        self.corrected[ticket.tenant] += abs(change)
        for since in self.since.values():
            since[ticket.tenant] += abs(change)

    def bound(self, one: str, other: str) -> float:
        """By how much one may be ahead of the other: U + Δ + E, after what changed since its last turn."""
        corrections = self.since[one][one] + self.since[one][other]
        return DEAREST / WEIGHTS[one] + self.slack + corrections + 1


costs = st.integers(1, DEAREST)
plays = st.lists(st.tuples(costs, costs, st.integers(0, 10**6), st.integers(0, 7)), min_size=30, max_size=200)


@settings(max_examples=150, deadline=None)
@given(
    slack=st.sampled_from([0, 50, 400]),
    burst=st.sampled_from([0, 300]),
    play=plays,
)
def test_backlogged_flows_stay_within_the_bound(slack: int, burst: int, play: list[tuple[int, int, int, int]]) -> None:
    """Protects fairness: what flows that came together were charged differs by at most U + Δ + E, always, with any burst."""
    world = Backlogged(slack, burst)
    for tenant in WEIGHTS:
        for expected, _, latest, _ in play:
            world.arrive(tenant, expected, latest)
    for _, actual, _, lane in play:
        world.dispatch(actual)
        if len(world.running) > lane:
            world.end(lane)
        for one in WEIGHTS:
            for other in WEIGHTS:
                assert world.charged[one] - world.charged[other] <= world.bound(one, other), (one, other)


def test_weights_are_delivered() -> None:
    """Protects proportions: at weights 1 to 4, service over many requests lies within one percent of them."""
    weights = {"a": 1, "b": 2, "c": 3, "d": 4}
    queue: DomainQueue[int] = DomainQueue(WIDE, FairOrder(weights.__getitem__))
    for key in range(40_000):
        queue.push(entry("abcd"[key % 4], key, 7 + key % 13))
    served: dict[str, int] = defaultdict(int)
    for _ in range(20_000):
        ticket = queue.serve(next(queue.candidates()))
        assert ticket is not None
        served[ticket.tenant] += ticket.cost
    whole = sum(served.values())
    for tenant, weight in weights.items():
        assert abs(served[tenant] / whole - weight / 10) < 0.01 * weight / 10


def test_no_credit_is_saved_up() -> None:
    """Protects those who wait: a flow that was away for a hundred services gets its share from now on, and nothing back."""
    queue: DomainQueue[int] = DomainQueue(WIDE, FairOrder())
    for key in range(300):
        queue.push(entry("busy", key, 10))
    for _ in range(100):
        queue.serve(next(queue.candidates()))
    for key in range(1_000, 1_100):
        queue.push(entry("late", key, 10))
    turns = [waiting.tenant for _ in range(20) for waiting in [next(queue.candidates())] if queue.serve(waiting)]
    assert abs(turns.count("late") - turns.count("busy")) <= 1


def test_what_is_given_back_after_a_lift_is_dropped() -> None:
    """Protects those who wait from an over-estimate: dispatch dear, leave, come back, and the refund buys nothing."""
    order = FairOrder()
    order.joined("greedy", Head(1, 0))
    ticket = order.charge("greedy", 1_000)
    order.left("greedy")
    order.joined("busy", Head(2, 0))
    for _ in range(50):
        order.close(order.charge("busy", 100), 100)
    order.joined("greedy", Head(3, 0))  # to where `busy` is
    order.close(ticket, 1)
    order.charge("greedy", 10)
    assert order.first() == "busy"


def test_a_refund_within_one_activation_counts() -> None:
    """Protects whoever asks for less than expected: what was prepaid too much is theirs while they wait on."""
    order = FairOrder()
    for number, tenant in enumerate(("a", "b")):
        order.joined(tenant, Head(number, 0))
    ticket = order.charge("a", 100)
    order.close(order.charge("b", 50), 50)
    assert order.first() == "b"
    order.close(ticket, 10)
    assert order.first() == "a"


def test_a_refund_is_no_credit_for_one_that_was_away() -> None:
    """Protects those who wait: prepaid dearly, away until the others caught up, back just ahead of them, then refunded."""
    order = FairOrder()
    order.joined("greedy", Head(1, 0))
    tickets = [order.charge("greedy", 1_000) for _ in range(10)]
    order.left("greedy")
    order.joined("busy", Head(2, 0))
    for _ in range(99):
        order.close(order.charge("busy", 100), 100)
    order.joined("greedy", Head(3, 0))
    for ticket in tickets:
        order.close(ticket, 1)
    turns = []
    for _ in range(20):
        turn = order.first()
        assert turn is not None
        turns.append(turn)
        order.close(order.charge(turn, 100), 100)
    assert turns.count("greedy") <= 12


def test_corrections_count_by_weight() -> None:
    """Protects heavy flows: a refund of fifty at weight five moves the counter by ten, an extra fifty as much."""
    order = FairOrder({"heavy": 5, "light": 1}.__getitem__)
    for number, tenant in enumerate(("heavy", "light")):
        order.joined(tenant, Head(number, 0))
    ticket = order.charge("heavy", 100)
    order.close(order.charge("light", 15), 15)
    assert order.first() == "light"  # 20 against 15
    ticket = order.correct(ticket, 70)
    assert order.first() == "heavy"  # 14
    ticket = order.correct(ticket, 80)
    assert order.first() == "light"  # 16
    order.close(ticket, 80)


def test_what_an_answer_costs_beyond_the_expected_is_charged() -> None:
    """Protects the others from long answers, also while they run."""
    order = FairOrder()
    for number, tenant in enumerate(("a", "b")):
        order.joined(tenant, Head(number, 0))
    ticket = order.charge("a", 10)
    order.charge("b", 50)
    assert order.first() == "a"
    ticket = order.correct(ticket, 80)
    assert order.first() == "b"
    order.close(ticket, 80)
    assert order.first() == "b"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10**6)), min_size=2, max_size=12, unique_by=lambda pair: pair[1]))
def test_the_most_urgent_within_the_slack_goes_first(flows: list[tuple[int, int]]) -> None:
    """Protects deadlines, and their limit: least time left among counters within the slack, never one beyond it."""
    order = FairOrder(slack=20)
    for number, (_, latest) in enumerate(flows):
        order.joined(str(number), Head(number, latest))
    for number, (lead, _) in enumerate(flows):
        if lead:
            order.charge(str(number), lead)
    smallest = min(lead for lead, _ in flows)
    urgent = min((latest, str(number)) for number, (lead, latest) in enumerate(flows) if lead <= smallest + 20)
    assert order.first() == urgent[1]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 40)), max_size=20),
    st.integers(1, 14),
)
def test_who_is_next_if_the_first_fits_nowhere(
    flows: list[tuple[int, int]], charged: list[tuple[int, int]], number: int
) -> None:
    """Protects those who may pass, and those who are passed: by their heads within the slack, beyond it by counter, up to P."""
    order, slack, dearest = FairOrder(slack=20), 20, 0
    counters = {str(each): 0 for each in range(len(flows))}
    heads = {str(each): (latest, each) for each, (_, latest) in enumerate(flows)}
    for each, (latest, arrived) in heads.items():
        order.joined(each, Head(arrived, latest))
    assert order.first() is not None  # all are near by now
    for place, cost in [*enumerate(lead for lead, _ in flows), *charged]:
        tenant = str(place % len(flows))
        order.charge(tenant, cost)
        counters[tenant] += cost
        dearest = max(dearest, cost)
    limit = min(counters.values()) + slack
    near = sorted((tenant for tenant, counter in counters.items() if counter <= limit), key=heads.__getitem__)
    far = sorted((tenant for tenant in counters if tenant not in near), key=lambda tenant: (counters[tenant], tenant))
    allowed = [tenant for tenant in far if counters[tenant] <= limit + BYPASSES_MAX * dearest]
    assert order.next(number) == (near + far[:number])[: min(number, len(near) + len(allowed))]


def test_a_flow_that_is_too_far_ahead_passes_nobody() -> None:
    """Protects a flow whose heads fit nowhere: another is offered until it is ahead by P and the slack, and then no more."""
    order = FairOrder(slack=20)
    for number, tenant in enumerate(("large", "small")):
        order.joined(tenant, Head(number, 0))
    for _ in range(BYPASSES_MAX + 2):
        assert order.next(5) == ["large", "small"]
        order.close(order.charge("small", 10), 10)
    assert order.next(5) == ["large", "small"]  # at 180: P is 160, the slack 20
    order.close(order.charge("small", 1), 1)
    assert order.next(5) == ["large"]


def test_a_far_flows_new_head_waits_for_its_counter() -> None:
    """Protects the slack's limit: an urgent head of a flow that is far ahead counts once it is near."""
    order = FairOrder(slack=20)
    for number, tenant in enumerate(("ahead", "behind")):
        order.joined(tenant, Head(number, 100))
    order.charge("ahead", 50)
    assert order.first() == "behind"
    order.changed("ahead", Head(2, 1))
    assert order.first() == "behind"
    order.charge("behind", 40)
    assert order.first() == "ahead"


def test_nobody_is_next_where_nobody_waits() -> None:
    """Protects the schedule's rest: an order without flows names none."""
    assert FairOrder().next(5) == [] == ArrivalOrder().next(5)


def test_the_next_in_order_of_arrival() -> None:
    """Protects the baseline: if the oldest head fits nowhere the next oldest may go."""
    order = ArrivalOrder()
    for number, tenant in ((3, "c"), (1, "a"), (2, "b")):
        order.joined(tenant, Head(number, 0))
    assert (order.next(2), order.next(9)) == (["a", "b"], ["a", "b", "c"])
    order.left("a")
    assert order.first() == "b"
    order.changed("b", Head(9, 0))
    assert order.next(9) == ["c", "b"]


class ChurnMachine(RuleBasedStateMachine):
    """Flows come, go, run and end at random: the order always names a flow that waits, within the slack of the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.order = FairOrder(WEIGHTS.__getitem__, slack=30)
        self.waiting: dict[str, Head] = {}
        self.tickets: list[Ticket] = []
        self.number = 0

    def head(self, latest: int) -> Head:
        """A new head."""
        self.number += 1
        return Head(self.number, latest)

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), latest=st.integers(0, 100))
    def arrive(self, tenant: str, latest: int) -> None:
        """A flow joins, or gets a more urgent head."""
        head = self.head(latest)
        if tenant in self.waiting:
            self.order.changed(tenant, head)
        else:
            self.order.joined(tenant, head)
        self.waiting[tenant] = head

    @precondition(lambda self: self.waiting)
    @rule(cost=costs, stays=st.booleans())
    def dispatch(self, cost: int, stays: bool) -> None:
        """The first one is dispatched, and leaves or stays."""
        tenant = self.order.first()
        assert tenant is not None
        self.tickets.append(self.order.charge(tenant, cost))
        if not stays:
            self.order.left(tenant)
            del self.waiting[tenant]

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), cost=costs)
    def end(self, data: st.DataObject, cost: int) -> None:
        """Something ends."""
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.order.close(self.order.correct(ticket, ticket.cost), cost)

    @invariant()
    def the_first_waits(self) -> None:
        """Nobody is named who does not wait, and somebody is if anybody does."""
        assert (self.order.first() in self.waiting) if self.waiting else self.order.first() is None


ChurnMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestChurnMachine = ChurnMachine.TestCase


def test_what_goes_before_a_newcomer() -> None:
    """Protects the door: the heads that came earlier and, for a flow that is ahead, the others' share until its turn."""
    order = FairOrder({"light": 1, "busy": 1, "heavy": 4}.__getitem__, slack=10)
    assert order.lead("unknown", 0) == 0 and order.work_before("unknown", 0, 0, 0) == 0
    for number, tenant in enumerate(("light", "busy", "heavy")):
        order.joined(tenant, Head(number, 0))
    order.first()
    assert order.work_before("unknown", 0, 10_000, 7) == 3 * 7
    order.charge("light", 100)
    assert order.lead("light", 0) == 90 and order.lead("heavy", 400) == 90 and order.lead("busy", 0) == 0
    assert order.work_before("light", 0, 10_000, 0) == 5 * 100
    assert order.work_before("light", 0, 300, 0) == 300
    assert order.floor == 0


def test_first_come_first_served_counts_nothing() -> None:
    """Protects the baseline: everything that waits goes before a newcomer, whoever it is and whatever was charged."""
    order = ArrivalOrder()
    order.joined("a", Head(1, 0))
    ticket = order.charge("a", 100)
    assert order.correct(ticket, 50) == ticket
    order.close(ticket, 50)
    assert order.work_before("a", 0, 700, 10) == 700 and order.lead("a", 100) == 0 and order.floor == 0


def test_quiet_flows_are_forgotten() -> None:
    """Protects memory: a hundred thousand tenants that came once leave no trace once others moved on."""
    order = FairOrder()
    for number in range(100_000):
        order.joined(str(number), Head(number, 0))
        order.close(order.charge(str(number), 1), 1)
        order.left(str(number))
    assert len(vars(order)["_flows"]) < 5_000


def test_costs_weigh_kinds_of_tokens() -> None:
    """Protects the ratio of the kinds: cached input is cheapest, output dearest, and nothing is free."""
    costs_of = TokenCosts(input=10, cached_input=1, output=40)
    assert costs_of.cost(100, 0, 10) == 1_400
    assert costs_of.cost(100, 90, 10) == 590
    assert costs_of.cost(0, 0, 0) == 1
