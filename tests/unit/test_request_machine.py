"""The request machine: every pair of state and event is allowed or refused on purpose."""

import runpy
from pathlib import Path
from typing import TypeAlias, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason, Status, ending
from weir.core.request import (
    ATTEMPTS_MAX,
    Admit,
    Cancelled,
    Completed,
    Dispatch,
    Dispatched,
    End,
    Expired,
    Failed,
    FirstOutput,
    IllegalTransition,
    InferenceRequest,
    Message,
    Queued,
    Received,
    Reject,
    Rejected,
    RequestEvent,
    RequestState,
    Requeue,
    Streaming,
    advance,
    is_terminal,
    public_status,
)

StateClass: TypeAlias = type[RequestState]

STATES: list[RequestState] = [
    Received(100),
    Queued(100, 101, 1),
    Dispatched(100, 101, 102, 1, "r1"),
    Streaming(100, 101, 102, 1, "r1", 103),
    Rejected("queue_full"),
    Completed(FinishReason.STOP),
    Cancelled(FinishReason.CLIENT),
    Expired(FinishReason.DEADLINE),
    Failed(FinishReason.STALLED),
]
EVENTS: list[RequestEvent] = [
    Admit(200),
    Reject("queue_full"),
    Dispatch(200, "r2"),
    FirstOutput(200),
    Requeue(),
    *(End(reason) for reason in FinishReason),
]
ENDED_CLASS: dict[Status, StateClass] = {
    Status.COMPLETED: Completed,
    Status.CANCELLED: Cancelled,
    Status.EXPIRED: Expired,
    Status.FAILED: Failed,
}

ALLOWED: dict[tuple[StateClass, type[RequestEvent]], StateClass] = {
    (Received, Admit): Queued,
    (Received, Reject): Rejected,
    (Queued, Dispatch): Dispatched,
    (Dispatched, FirstOutput): Streaming,
    (Dispatched, Requeue): Queued,
}
ENDS_AS: dict[StateClass, set[StateClass]] = {
    Queued: {Cancelled, Expired, Failed},
    Dispatched: {Completed, Cancelled, Expired, Failed},
    Streaming: {Completed, Cancelled, Expired, Failed},
}
TERMINAL: set[StateClass] = {Rejected, Completed, Cancelled, Expired, Failed}


def expected_class(state: RequestState, event: RequestEvent) -> StateClass | None:
    """The class of the state that follows, or None where the pair is refused."""
    if isinstance(event, End):
        ended = ENDED_CLASS[ending(event.reason).status]
        return ended if ended in ENDS_AS.get(type(state), set()) else None
    return ALLOWED.get((type(state), type(event)))


def test_the_tables_name_every_state_and_event() -> None:
    """Protects this file: a state or an event added to the machine needs its rows here."""
    assert {type(state) for state in STATES} == {leaf for part in get_args(RequestState) for leaf in get_args(part) or (part,)}
    assert {type(event) for event in EVENTS} == set(get_args(RequestEvent))


@pytest.mark.parametrize("event", EVENTS, ids=repr)
@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_every_pair_is_allowed_or_refused_on_purpose(state: RequestState, event: RequestEvent) -> None:
    """Protects the machine: exactly the pairs of the tables lead on, everything else is an illegal transition."""
    expected = expected_class(state, event)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{type(event).__name__} is illegal in {type(state).__name__}"):
            advance(state, event)
    else:
        assert type(advance(state, event)) is expected


def test_states_carry_what_is_true_in_them() -> None:
    """Protects the times: each state keeps those of the states before it and adds its own."""
    state: RequestState = Received(1)
    assert (state := advance(state, Admit(2))) == Queued(1, 2, attempt=1)
    assert (state := advance(state, Dispatch(3, "r1"))) == Dispatched(1, 2, 3, 1, "r1")
    assert (state := advance(state, Requeue())) == Queued(1, 2, attempt=2)
    assert (state := advance(state, Dispatch(5, "r2"))) == Dispatched(1, 2, 5, 2, "r2")
    assert (state := advance(state, FirstOutput(6))) == Streaming(1, 2, 5, 2, "r2", 6)
    assert advance(state, End(FinishReason.LENGTH)) == Completed(FinishReason.LENGTH)
    assert advance(Received(1), Reject("draining")) == Rejected("draining")


def test_there_is_one_retry() -> None:
    """Protects the bound of attempts: the last one cannot be queued again."""
    with pytest.raises(IllegalTransition):
        advance(Dispatched(1, 2, 3, ATTEMPTS_MAX, "r1"), Requeue())


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_order_of_events_ends_at_most_once_and_dispatches_at_most_twice(events: list[RequestEvent]) -> None:
    """Protects invariant 3: never dispatched after output, at most twice in all, and nothing follows a terminal state."""
    state: RequestState = Received(0)
    dispatches, delivered = 0, False
    for event in events:
        was_terminal = is_terminal(state)
        try:
            state = advance(state, event)
        except IllegalTransition:
            continue
        assert not was_terminal
        if isinstance(event, Dispatch):
            assert not delivered
            dispatches += 1
        delivered = delivered or isinstance(state, Streaming)
    assert dispatches <= ATTEMPTS_MAX


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_terminal_states_are_those_in_capitals(state: RequestState) -> None:
    """Protects callers that look before they leap."""
    assert is_terminal(state) == (type(state) in TERMINAL)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Queued(1, 2), Status.QUEUED),
        (Dispatched(1, 2, 3, 1, "r1"), Status.RUNNING),
        (Streaming(1, 2, 3, 1, "r1", 4), Status.RUNNING),
        (Completed(FinishReason.STOP), Status.COMPLETED),
        (Cancelled(FinishReason.SLOW_CLIENT), Status.CANCELLED),
        (Expired(FinishReason.QUEUE_WAIT), Status.EXPIRED),
        (Failed(FinishReason.SHUTDOWN), Status.FAILED),
    ],
)
def test_the_public_status(state: RequestState, status: Status) -> None:
    """Protects the word a customer reads: running is dispatched or streaming."""
    assert not isinstance(state, Received | Rejected)
    assert public_status(state) is status


@pytest.mark.parametrize(
    ("prompt", "prompt_bytes", "turns"),
    [
        ("", 0, 1),
        ("déjà 漢", 10, 1),
        ((), 0, 0),
        ((Message("system", "é"), Message("user", "漢字")), 8, 2),
    ],
)
def test_the_size_of_an_input(prompt: str | tuple[Message, ...], prompt_bytes: int, turns: int) -> None:
    """Protects the queue's byte bound and the token bound: UTF-8 bytes are counted, not characters."""
    request = InferenceRequest("assistant", prompt)
    assert (request.prompt_bytes, request.turns) == (prompt_bytes, turns)


def test_the_documented_states_are_those_of_the_machine() -> None:
    """Protects the reference: the page of states is what the machine does (`make docs` writes it anew)."""
    tool = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "write_states.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"]()
