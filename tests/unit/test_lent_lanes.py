"""Lanes that batches use: which they give up, in what order, and which they keep."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.scheduling.lent_lanes import LentLanes


def test_what_began_last_gives_up_its_lane_first() -> None:
    """Protects work that is done: what has run longest has most to lose."""
    lanes: LentLanes[str] = LentLanes(10)
    for key in ("first", "second", "third"):
        lanes.take(key, keeps=False)
    assert lanes.ask_for(2) == ["third", "second"] and len(lanes) == 1
    assert lanes.ask_for(2) == [], "both are on their way"
    assert lanes.ask_for(3) == ["first"] and lanes.ask_for(9) == []


def test_what_is_asked_for_counts_until_it_is_free() -> None:
    """Protects lines: no second one is stopped for the same request."""
    lanes: LentLanes[str] = LentLanes(10)
    for key in ("first", "second", "third"):
        lanes.take(key, keeps=False)
    assert lanes.ask_for(1) == ["third"] and lanes.ask_for(1) == []
    lanes.give_back("third")
    assert lanes.ask_for(1) == ["second"], "the one that came free went to somebody else"


def test_what_keeps_its_lane_is_never_asked() -> None:
    """Protects batches: a kept lane is nobody's to ask for, and a part of the pool is kept, one lane at least."""
    lanes: LentLanes[str] = LentLanes(20)
    assert lanes.may_keep(1)
    lanes.take("kept", keeps=True)
    assert not lanes.may_keep(9) and lanes.may_keep(10)
    assert lanes.ask_for(5) == [] and not lanes
    lanes.give_back("kept")
    assert lanes.may_keep(1)


def test_a_lane_that_was_given_up_is_owed_until_somebody_has_it() -> None:
    """Protects whom it was for: a batch whose turn it is gets another one."""
    lanes: LentLanes[str] = LentLanes(10)
    for key in ("first", "second", "third"):
        lanes.take(key, keeps=False)
    lanes.give_back("first")  # by itself
    owed_before = lanes.is_owed
    lanes.ask_for(2)
    lanes.give_back("third")
    lanes.give_back("second")
    lanes.served_others()
    still_owed = lanes.is_owed
    lanes.served_others()
    lanes.served_others()
    assert (owed_before, still_owed, lanes.is_owed) == (False, True, False)


def test_nothing_is_owed_to_nobody() -> None:
    """Protects batches: who waited and left leaves no lane idle."""
    lanes: LentLanes[str] = LentLanes(10)
    lanes.take("first", keeps=False)
    lanes.ask_for(1)
    lanes.give_back("first")
    lanes.is_wanted_by_nobody()
    assert not lanes.is_owed


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("ask"), st.integers(0, 6)),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 99), st.integers(1, 40))
def test_each_lane_is_asked_for_once_and_a_part_is_kept(steps: list[tuple[str, int]], percent: int, usable: int) -> None:
    """Protects both classes, whatever comes: no lane is asked for twice, no kept one ever, and no more are kept than may be."""
    lanes: LentLanes[int] = LentLanes(percent)
    running: list[int] = []
    kept: set[int] = set()
    asked: set[int] = set()
    for number, (step, value) in enumerate(steps):
        if step == "take":
            keeps = bool(value) and lanes.may_keep(usable)
            lanes.take(number, keeps=keeps)
            running.append(number)
            kept |= {number} if keeps else set()
        elif step == "free" and running:
            key = running.pop(value % len(running))
            lanes.give_back(key)
            kept.discard(key)
            asked.discard(key)
        elif step == "ask":
            found = lanes.ask_for(value)
            assert not set(found) & (kept | asked) and set(found) <= set(running)
            assert len(found) == min(max(0, value - len(asked)), len(running) - len(kept) - len(asked))
            asked |= set(found)
        assert len(kept) <= max(1, usable * percent // 100)
        assert len(lanes) == len(running) - len(kept) - len(asked)
