"""What changes next among a pool's replicas: rows of decisions, and where any sequence of wishes and events ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.control.pool_balance import KeptReplica, Kind, Start, balance, kinds_of
from weir.core.registry.model import Pool

NARROW, WIDE = Kind("", 2), Kind("", 4)
ONE, TWO = Kind("http://one", 2), Kind("http://two", 2)


def replica(kind: Kind, *, ready: bool = True, leaves: bool = False, replaces: KeptReplica | None = None) -> KeptReplica:
    """One of a pool's."""
    made = KeptReplica(kind, replaces, is_ready=ready)
    if leaves:
        made.leaves.set()
    return made


def test_a_pool_wants_one_replica_for_each_address_or_as_many_as_it_says() -> None:
    """Protects the count: addresses are what a pool behind URLs has, and zero is a number of replicas."""
    pool = Pool("p", "v", 3, 2)
    assert kinds_of(pool) == [NARROW] * 3 and kinds_of(replace(pool, replicas=0)) == []
    assert kinds_of(replace(pool, urls=(ONE.url, TWO.url))) == [ONE, TWO]


def test_what_is_right_stays() -> None:
    """Protects running replicas from being touched for nothing."""
    assert balance([NARROW, NARROW], [replica(NARROW), replica(NARROW, ready=False)]) == ([], [])


def test_what_is_missing_starts_and_what_is_too_much_goes() -> None:
    """Protects numbers: at once in both directions, the newest first, and what is going is not counted."""
    first, second, third = replica(NARROW), replica(NARROW), replica(NARROW, ready=False)
    assert balance([NARROW], [first, second, third]) == ([second, third], [])
    assert balance([NARROW] * 2, [first, replica(NARROW, leaves=True)]) == ([], [Start(NARROW)])
    assert balance([], [first, third]) == ([third, first], [])


def test_who_serves_is_followed_one_after_another() -> None:
    """Protects service: a successor starts beside, its predecessor goes once it is ready, and the next waits for both."""
    old, older = replica(NARROW), replica(NARROW)
    assert balance([WIDE, WIDE], [older, old]) == ([], [Start(WIDE, older)])
    successor = replica(WIDE, ready=False, replaces=older)
    assert balance([WIDE, WIDE], [older, old, successor]) == ([], [])
    successor.is_ready = True
    assert balance([WIDE, WIDE], [older, old, successor]) == ([older], [])
    older.leaves.set()
    assert balance([WIDE, WIDE], [older, old, successor]) == ([], [])
    assert balance([WIDE, WIDE], [old, successor]) == ([], [Start(WIDE, old)])


def test_who_does_not_serve_has_nothing_to_lose() -> None:
    """Protects from waiting for what fails to start: replaced at once, also where it was to follow another one."""
    failing = replica(NARROW, ready=False)
    assert balance([WIDE], [failing]) == ([failing], [Start(WIDE)])
    old = replica(NARROW)
    successor = replica(WIDE, ready=False, replaces=old)
    assert balance([NARROW], [old, successor]) == ([successor], [])
    old.is_ready = False
    assert balance([WIDE], [old, successor]) == ([old], [])


def test_growth_does_not_wait_for_what_is_to_be_followed() -> None:
    """Protects capacity that is asked for together with other lanes: what is missing starts, the rest follows."""
    old = replica(NARROW)
    assert balance([WIDE] * 3, [old]) == ([], [Start(WIDE), Start(WIDE)])
    assert balance([WIDE], [old, replica(NARROW), last := replica(NARROW)]).leave[-1] is last


def test_an_address_that_is_taken_away_is_not_waited_for() -> None:
    """Protects an engine that is to be shut down: it goes at once, though the others are not ready."""
    one, two = replica(ONE, ready=False), replica(TWO)
    assert balance([ONE], [one, two]) == ([two], [])


KINDS = st.lists(st.sampled_from([NARROW, WIDE, ONE, TWO]), max_size=4)
EVENTS = st.lists(st.tuples(st.sampled_from(["wish", "ready", "fail", "gone"]), KINDS, st.integers(0, 99)), max_size=40)


class Run:
    """Replicas as the supervisor keeps them, without a process."""

    def __init__(self) -> None:
        self.wanted: list[Kind] = []
        self.replicas: list[KeptReplica] = []

    def settle(self) -> None:
        """Do what is to be done now. Serving ones go only if they are too many, or followed."""
        changes = balance(self.wanted, self.replicas)
        serving = [each for each in self.replicas if each.is_ready and not each.is_leaving]
        for leaving in changes.leave:
            assert leaving in self.replicas and not leaving.is_leaving
            leaving.leaves.set()
        left = sum(not each.is_leaving for each in serving)
        assert left >= min(len(serving), len(self.wanted)), "a serving one went for nothing"
        self.replicas += [replica(start.kind, ready=False, replaces=start.replaces) for start in changes.start]
        staying = sum(not each.is_leaving for each in self.replicas)
        assert staying <= len(self.wanted) + 1, "more than one beside those that are wanted"

    def gone(self, which: KeptReplica) -> None:
        """It has ended."""
        self.replicas.remove(which)
        for each in self.replicas:
            if each.replaces is which:
                each.replaces = None

    def happen(self, event: str, kinds: list[Kind], number: int) -> None:
        """One event."""
        if event == "wish":
            self.wanted = kinds
        elif self.replicas:
            which = self.replicas[number % len(self.replicas)]
            if event == "gone" and which.is_leaving:
                self.gone(which)
            elif event != "gone":
                which.is_ready = event == "ready"
        self.settle()


@given(EVENTS, KINDS)
def test_whatever_happens_the_last_wish_is_what_there_is_in_the_end(
    events: list[tuple[str, list[Kind], int]], wanted: list[Kind]
) -> None:
    """Protects from changes on top of changes: bounded at each step, and settled once everything that starts gets ready."""
    run = Run()
    for event in events:
        run.happen(*event)
    run.wanted = wanted
    for _ in range(60):
        run.settle()
        for each in list(run.replicas):
            if each.is_leaving:
                run.gone(each)
            else:
                each.is_ready = True
    assert sorted(each.kind for each in run.replicas) == sorted(wanted)
    assert balance(wanted, run.replicas) == ([], [])


@pytest.mark.parametrize("number", [1, 3])
def test_nobody_is_followed_twice(number: int) -> None:
    """Protects machines: however often it is asked, one successor is under way."""
    run = Run()
    run.replicas, run.wanted = [replica(NARROW) for _ in range(number)], [WIDE] * number
    for _ in range(5):
        run.settle()
    assert len(run.replicas) == number + 1
