"""Writes docs/reference/states.md, the machines of a request and of a rollout as diagrams and tables, from the machines.

It asks `advance` about every pair of state and event, so the page cannot say anything that the code does not do. Run by
`make docs`; a test fails when the page is out of date.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from weir.core.endings import FinishReason, ending
from weir.core.registry import rollout
from weir.core.request import (
    ATTEMPTS_MAX,
    Admit,
    Dispatch,
    Dispatched,
    End,
    FirstOutput,
    IllegalTransition,
    Queued,
    Received,
    Reject,
    RequestEvent,
    RequestState,
    Requeue,
    Streaming,
    advance,
    is_terminal,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "states.md"
STATES: tuple[RequestState, ...] = (Received(0), Queued(0, 0), Dispatched(0, 0, 0, 1, ""), Streaming(0, 0, 0, 1, "", 0))
EVENTS: tuple[RequestEvent, ...] = (
    Admit(0),
    Reject(""),
    Dispatch(0, ""),
    FirstOutput(0),
    Requeue(),
    *(End(reason) for reason in FinishReason),
)

ROLLOUT_STATES: tuple[rollout.RolloutState, ...] = (
    rollout.Proposed(0),
    rollout.Verified(0, None),
    rollout.Verified(0, None, lost_since_ms=0),
    rollout.OnCanary(0, 0),
    rollout.OnCanary(0, 0, lost_since_ms=0),
    rollout.Promoting(0),
    rollout.Promoting(0, lost_since_ms=0),
    rollout.Paused(rollout.Proposed(0), 0),
    rollout.Paused(rollout.Verified(0, None), 0),
    rollout.Paused(rollout.OnCanary(0, 0), 0),
    rollout.RollingBack(0, rollout.RollbackReason.OPERATOR, ""),
)
ROLLOUT_EVENTS: tuple[rollout.RolloutEvent, ...] = (
    rollout.Verify(0, None),
    rollout.RaiseWeight(0),
    rollout.Promote(0),
    rollout.Finish(0),
    rollout.Pause(0),
    rollout.Resume(0),
    rollout.Lose(0),
    rollout.Regain(),
    rollout.RollBack(0, rollout.RollbackReason.OPERATOR, ""),
)

INTRODUCTION = """# States

Made from `weir.core.request` and `weir.core.registry.rollout` by `make docs`; edit the machines, not this page. Terminal states
are written in capitals. A pair that is not listed is illegal.
"""
REQUESTS = f"""
## A request

An execution is dispatched at most {ATTEMPTS_MAX} times: the last attempt refuses `Requeue`.
"""
ROLLOUTS = """
## A rollout

`canary` has a step, and `RaiseWeight` leads to the next one. `Lose` and `Regain` mark since when it has no ready replica. What
is decided by, and why: [rollouts](../explanation/rollouts.md).
"""


def shown(state: RequestState) -> str:
    """A state's name as the documentation writes it."""
    name = type(state).__name__
    return name.upper() if is_terminal(state) else name.lower()


def transitions() -> Iterator[tuple[str, str, str]]:
    """(state, event, next state) of every pair that the machine allows; an end is named by its status and reasons."""
    for state in STATES:
        ends: dict[str, list[str]] = {}
        for event in EVENTS:
            try:
                after = shown(advance(state, event))
            except IllegalTransition:
                continue
            if isinstance(event, End):
                ends.setdefault(after, []).append(event.reason.value)
            else:
                yield shown(state), type(event).__name__, after
        for after, reasons in ends.items():
            yield shown(state), f"End: {', '.join(reasons)}", after


def rollout_transitions() -> Iterator[tuple[str, str, str]]:
    """The same of a rollout; what differs only by a lost replica is one state."""
    seen = set()
    for state in ROLLOUT_STATES:
        for event in ROLLOUT_EVENTS:
            try:
                after = rollout.advance(state, event)
            except rollout.IllegalRolloutTransition:
                continue
            row = (_shown_rollout(state), type(event).__name__, _shown_rollout(after))
            if row not in seen:
                seen.add(row)
                yield row


def _shown_rollout(state: rollout.RolloutState) -> str:
    name = rollout.name_of(state)
    return name.upper() if rollout.is_terminal(state) else name


def machine(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """The lines of a diagram and of a table."""
    edges = [f"    {state} --> {after}: {event.partition(':')[0]}" for state, event, after in rows]
    table = [f"| {state} | {event} | {after} |" for state, event, after in rows]
    return ["", "```mermaid", "stateDiagram-v2", *edges, "```", "", "| state | event | next state |", "|---|---|---|", *table]


def page() -> str:
    """The whole page."""
    statuses = [f"| {reason.value} | {ending(reason).status.value} |" for reason in FinishReason]
    lines = machine(list(transitions()))
    lines += ["", "A finish reason names its status:", "", "| finish reason | status |", "|---|---|", *statuses, ""]
    rollouts = machine(list(rollout_transitions()))
    return INTRODUCTION + REQUESTS + "\n".join(lines) + ROLLOUTS + "\n".join([*rollouts, ""])


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"states: wrote {PAGE.name}")


if __name__ == "__main__":
    main()
