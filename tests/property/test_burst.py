"""What a flow may be behind when it comes back: enough for who asks for little, bounded, and never more than one such burst."""

from collections import Counter
from itertools import permutations
from operator import itemgetter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_fairness import DEAREST, WEIGHTS, Backlogged, plays

from weir.core.scheduling.fairness import FairOrder
from weir.core.scheduling.orders import Head


@settings(max_examples=60, deadline=None)
@given(
    slack=st.sampled_from([0, 50, 400]),
    burst=st.sampled_from([0, 100, 300]),
    is_exact=st.booleans(),
    play=plays,
    joins=st.lists(st.integers(0, 29), min_size=len(WEIGHTS), max_size=len(WEIGHTS)),
)
def test_who_comes_later_takes_no_more_than_the_burst(
    slack: int, burst: int, is_exact: bool, play: list[tuple[int, int, int, int]], joins: list[int]
) -> None:
    """Protects those who wait: two get the same but for 2U + 2Δ + burst + E, whoever came when and after whom."""
    world, since = Backlogged(slack, burst), dict[str, tuple[int, dict[str, float]]]()
    for number, (_, actual, _, lane) in enumerate(play):
        for tenant in [tenant for tenant, join in zip(WEIGHTS, joins, strict=True) if join == number]:
            for expected, _, latest, _ in play:
                world.arrive(tenant, expected, latest)
            since[tenant] = number, dict(world.charged)
        if not since:
            continue
        world.dispatch(None if is_exact else actual)
        if len(world.running) > lane:
            world.end(lane)
        for one, other in permutations(since, 2):
            _, began = max(since[one], since[other], key=itemgetter(0))
            one_got, other_got = (world.charged[tenant] - began.get(tenant, 0) for tenant in (one, other))
            most = DEAREST / WEIGHTS[one] + DEAREST / WEIGHTS[other] + 2 * slack + burst + 1
            assert one_got - other_got <= most + world.corrected[one] + world.corrected[other], (one, other)


def joined_late(burst: int, *tenants: str) -> FairOrder:
    """An order in which `busy` has waited for long, and these come back."""
    order = FairOrder(burst=burst)
    order.joined("busy", Head(0, 0))
    for _ in range(50):
        order.close(order.charge("busy", 100), 100)
    for number, tenant in enumerate(tenants, 1):
        order.joined(tenant, Head(number, 0))
    return order


def turns_of(order: FairOrder, number: int, cost: int = 10) -> list[str]:
    """Who gets the next turns, of this cost each."""
    turns = []
    for _ in range(number):
        tenant = order.first()
        assert tenant is not None
        order.close(order.charge(tenant, cost), cost)
        turns.append(tenant)
    return turns


def test_who_comes_back_goes_first_until_it_is_level() -> None:
    """Protects who asks for little from who always waits: so much at once, and from then on its half."""
    turns = turns_of(joined_late(100, "light"), 50)
    assert turns[:10] == 10 * ["light"]
    assert abs(turns[10:].count("light") - 20) <= 1


def test_a_burst_is_no_head_start_for_two_who_always_wait() -> None:
    """Protects equal service: who has used its burst has what the others have, and gets no more for it ever after."""
    order = joined_late(100, "light")
    turns_of(order, 10)
    turns = turns_of(order, 400)
    assert abs(turns.count("light") - turns.count("busy")) <= 1


def test_many_who_come_back_together_start_together() -> None:
    """Protects who always waits from a crowd: each newcomer has a burst, measured from the same place, not from one another."""
    order = joined_late(100, *map(str, range(20)))
    turns = Counter(turns_of(order, 20 * 10 + 21))
    assert turns["busy"] >= 1 and max(turns.values()) <= 11


def test_who_comes_alone_lowers_nothing_for_those_who_come_after() -> None:
    """Protects who was busy before from a quiet hour: many single requests, each at once, add up to no lead over it."""
    order = joined_late(100)
    order.left("busy")
    for number in range(50):
        tenant = str(number)
        order.joined(tenant, Head(number, 0))
        order.close(order.charge(tenant, 1), 1)
        order.left(tenant)
    assert order.floor >= 5_000 - 100
    order.joined("busy", Head(100, 0))
    order.joined("49", Head(101, 0))
    assert turns_of(order, 12).count("49") <= 11


def test_who_comes_back_soon_has_no_second_burst() -> None:
    """Protects who always waits: one that leaves once it is level, and comes back, begins where it was."""
    order = joined_late(100, "light")
    turns_of(order, 10)
    order.left("light")
    order.joined("light", Head(9, 0))
    assert turns_of(order, 20).count("light") <= 11


def test_what_is_given_back_takes_it_no_lower_than_its_floor() -> None:
    """Protects those who wait from a burst on top of a burst: an old dispatch that cost less than expected adds nothing."""
    order = FairOrder(burst=100)
    order.joined("greedy", Head(1, 0))
    tickets = [order.charge("greedy", 1_000) for _ in range(3)]
    order.left("greedy")
    order.joined("busy", Head(2, 0))
    for _ in range(50):
        order.close(order.charge("busy", 100), 100)
    order.joined("greedy", Head(3, 0))
    order.close(tickets[0], 1)
    assert turns_of(order, 5) == 5 * ["greedy"]
    order.close(tickets[1], 1)  # of the burst a half was used: so much of it is given back
    assert turns_of(order, 12).count("greedy") >= 10
    order.close(tickets[2], 1)
    assert turns_of(order, 30).count("greedy") <= 10 + 10 + 1


def test_memory_is_no_second_burst() -> None:
    """Protects who always waits from a sweep: one that is forgotten starts no further behind than it was."""
    order = joined_late(100, "light")
    turns_of(order, 10)
    order.left("light")
    for number in range(3_000):
        order.joined(str(number), Head(number, 0))
        order.close(order.charge(str(number), 10**6), 10**6)
        order.left(str(number))
    order.joined("light", Head(9_999, 0))
    assert turns_of(order, 20).count("light") <= 11


def test_who_has_a_burst_waits_for_nobody() -> None:
    """Protects the door for who asks for little: what others wait for is not before it until its burst is used up."""
    order = joined_late(100)
    order.first()
    assert order.work_before("light", 0, 10_000, 10) == 0 and order.lead("light", 0) == 0
    order.joined("light", Head(1, 0))
    assert order.work_before("light", 90, 10_000, 10) == 0 and order.lead("light", 90) == 0
    assert order.work_before("light", 100, 10_000, 10) == 10, "level with it"
    assert order.lead("light", 150) == 50
    order.charge("light", 100)
    assert order.work_before("light", 50, 10_000, 0) == 50 and order.work_before("light", 50, 20, 0) == 20
