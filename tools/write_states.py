"""Writes docs/reference/states.md, the request machine as a diagram and a table, from the machine itself.

It asks `advance` about every pair of state and event, so the page cannot say anything that the code does not do. Run by
`make docs`; a test fails when the page is out of date.
"""

from collections.abc import Iterator
from pathlib import Path

from weir.core.endings import FinishReason, ending
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

INTRODUCTION = f"""# Request states

Made from `weir.core.request` by `make docs`; edit the machine, not this page. Terminal states are written in capitals. A pair
that is not listed is illegal. An execution is dispatched at most {ATTEMPTS_MAX} times: the last attempt refuses `Requeue`.
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


def page() -> str:
    """The whole page."""
    rows = list(transitions())
    edges = [f"    {state} --> {after}: {event.partition(':')[0]}" for state, event, after in rows]
    table = [f"| {state} | {event} | {after} |" for state, event, after in rows]
    statuses = [f"| {reason.value} | {ending(reason).status.value} |" for reason in FinishReason]
    lines = ["", "```mermaid", "stateDiagram-v2", *edges, "```", "", "| state | event | next state |", "|---|---|---|", *table]
    lines += ["", "A finish reason names its status:", "", "| finish reason | status |", "|---|---|", *statuses, ""]
    return INTRODUCTION + "\n".join(lines)


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"states: wrote {PAGE.name}")


if __name__ == "__main__":
    main()
