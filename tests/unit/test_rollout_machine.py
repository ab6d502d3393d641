"""The rollout machine: every pair of state and event is allowed or refused on purpose, and every state can be stored."""

from typing import TypeAlias, get_args

import msgspec
import pytest

from weir.core.registry.comparison import Measure
from weir.core.registry.evidence import Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.rollout import (
    Finish,
    IllegalRolloutTransition,
    Live,
    Lose,
    OnCanary,
    Pause,
    Paused,
    Promote,
    Promoting,
    Proposed,
    RaiseWeight,
    Regain,
    Resume,
    RollBack,
    RollbackReason,
    RolledBack,
    RollingBack,
    RolloutEvent,
    RolloutState,
    Route,
    Verified,
    Verify,
    advance,
    is_terminal,
    name_of,
    next_weight,
    onward,
    route_of,
    weight_of,
)
from weir.core.registry.rollout_plan import RolloutPlan

PLAN = RolloutPlan()
SCORE = Score(9, 10, ("capital-1",))
TALLY = Tally(900, 4, 30)
BACK = RollBack(200, RollbackReason.ERRORS, "errors: 9 of 12 requests.")

PROPOSED = Proposed(100)
VERIFIED, VERIFIED_LOST = Verified(100, SCORE), Verified(100, SCORE, lost_since_ms=150)
CANARY, CANARY_LOST = OnCanary(1, 100, TALLY), OnCanary(1, 100, TALLY, lost_since_ms=150)
PROMOTING, PROMOTING_LOST = Promoting(100), Promoting(100, lost_since_ms=150)
ROLLING_BACK = RollingBack(200, BACK.reason, BACK.detail)
LIVE = Live(100)
ROLLED_BACK = RolledBack(200, BACK.reason, BACK.detail)

STATES: tuple[RolloutState, ...] = (
    PROPOSED,
    VERIFIED,
    VERIFIED_LOST,
    CANARY,
    CANARY_LOST,
    PROMOTING,
    PROMOTING_LOST,
    Paused(PROPOSED, 120),
    Paused(VERIFIED, 120),
    Paused(CANARY_LOST, 120),
    ROLLING_BACK,
    LIVE,
    ROLLED_BACK,
)
EVENTS: tuple[RolloutEvent, ...] = (
    Verify(200, SCORE),
    RaiseWeight(200, TALLY),
    Promote(200),
    Finish(200),
    Pause(200),
    Resume(200),
    Lose(200),
    Regain(),
    BACK,
)
EventClass: TypeAlias = type[RolloutEvent]

ALLOWED: dict[RolloutState, dict[EventClass, RolloutState]] = {
    PROPOSED: {Verify: Verified(200, SCORE), Pause: Paused(PROPOSED, 200)},
    VERIFIED: {
        RaiseWeight: OnCanary(0, 200, TALLY),
        Pause: Paused(VERIFIED, 200),
        Lose: Verified(100, SCORE, lost_since_ms=200),
    },
    VERIFIED_LOST: {RaiseWeight: OnCanary(0, 200, TALLY), Pause: Paused(VERIFIED_LOST, 200), Regain: VERIFIED},
    CANARY: {
        RaiseWeight: OnCanary(2, 200, TALLY),
        Promote: Promoting(200),
        Pause: Paused(CANARY, 200),
        Lose: OnCanary(1, 100, TALLY, lost_since_ms=200),
    },
    CANARY_LOST: {
        RaiseWeight: OnCanary(2, 200, TALLY),
        Promote: Promoting(200, lost_since_ms=150),
        Pause: Paused(CANARY_LOST, 200),
        Regain: CANARY,
    },
    PROMOTING: {Finish: Live(200), Lose: Promoting(100, lost_since_ms=200)},
    PROMOTING_LOST: {Finish: Live(200), Regain: PROMOTING},
    Paused(PROPOSED, 120): {Resume: Proposed(200)},
    Paused(VERIFIED, 120): {Resume: Verified(200, SCORE)},
    Paused(CANARY_LOST, 120): {Resume: CANARY},
    ROLLING_BACK: {Finish: ROLLED_BACK},
    LIVE: {},
    ROLLED_BACK: {},
}
NEVER_ROLLED_BACK = (ROLLING_BACK, LIVE, ROLLED_BACK)


def test_the_tables_name_every_state_and_event() -> None:
    """Protects this file: a state or an event added to the machine needs its rows here."""
    assert {type(state) for state in STATES} == set(get_args(RolloutState))
    assert {type(event) for event in EVENTS} == set(get_args(RolloutEvent))
    assert set(ALLOWED) == set(STATES)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", STATES, ids=repr)
def test_every_pair_is_allowed_or_refused_on_purpose(state: RolloutState, event: RolloutEvent) -> None:
    """Protects the machine: exactly the pairs of the table lead on, and back from everything that is not over."""
    expected = ALLOWED[state].get(type(event))
    if isinstance(event, RollBack) and state not in NEVER_ROLLED_BACK:
        expected = RollingBack(200, BACK.reason, BACK.detail)
    if expected is None:
        with pytest.raises(IllegalRolloutTransition, match=f"{type(event).__name__} is illegal in {type(state).__name__}"):
            advance(state, event)
    else:
        assert advance(state, event) == expected


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_state_is_stored_and_read_back(state: RolloutState) -> None:
    """Protects a restart in the middle: every state is JSON and comes back as it was, under the name that is shown."""
    stored = msgspec.json.encode(state)
    assert msgspec.json.decode(stored, type=RolloutState) == state
    assert msgspec.json.decode(stored)["type"] == name_of(state)


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_terminal_states_are_those_in_capitals(state: RolloutState) -> None:
    """Protects callers that look before they leap."""
    assert is_terminal(state) == (state in (LIVE, ROLLED_BACK))


@pytest.mark.parametrize(
    ("state", "route", "weight", "following"),
    [
        (PROPOSED, Route.OLD, 0, 1),
        (VERIFIED, Route.OLD, 0, 1),
        (OnCanary(0, 0), Route.SPLIT, 1, 10),
        (OnCanary(1, 0), Route.SPLIT, 10, 50),
        (OnCanary(3, 0), Route.SPLIT, 100, 100),
        (PROMOTING, Route.NEW, 100, 100),
        (LIVE, Route.NEW, 100, 100),
        (Paused(PROPOSED, 0), Route.OLD, 0, 1),
        (Paused(OnCanary(2, 0), 0), Route.SPLIT, 50, 100),
        (ROLLING_BACK, Route.OLD, 0, 0),
        (ROLLED_BACK, Route.OLD, 0, 0),
    ],
)
def test_what_the_alias_says(state: RolloutState, route: Route, weight: int, following: int) -> None:
    """Protects invariant 1: the route and the weight follow from the state alone, and what must be carried before the next."""
    assert (route_of(state), weight_of(PLAN, state), next_weight(PLAN, state)) == (route, weight, following)


def test_onward_goes_through_the_steps_to_the_promotion() -> None:
    """Protects the order of the steps, and whom the next one is compared with."""
    assert onward(PLAN, VERIFIED, 7) == RaiseWeight(7)
    assert onward(PLAN, OnCanary(2, 0), 7, TALLY) == RaiseWeight(7, TALLY)
    assert onward(PLAN, OnCanary(3, 0, TALLY), 7, Tally()) == Promote(7)


def test_every_measure_is_a_reason() -> None:
    """Protects the labels: what is compared and why a rollout went back are the same words."""
    assert [RollbackReason(measure.value) for measure in Measure] == list(RollbackReason)[: len(Measure)]
