"""`weir rollout watch`: a rollout as it goes, each second anew, until it is over.

On a terminal it is a live view; elsewhere one plain line per change. It only looks: Ctrl-C leaves the rollout to itself. Where
the cell does not answer for a while, as when control restarts, it asks again. The exit status is 0 once the new revision is
live, 3 once it was rolled back, and 130 after Ctrl-C.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from weir.cli import rollout_words as words
from weir.cli.admin_client import admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.rollout_frame import frame
from weir.cli.rollout_words import Document
from weir.cli.tables import plain

if TYPE_CHECKING:
    from rich.live import Live

PERIOD_S = 1.0
ANSWER_WAIT_S = 5.0
FAULTS_MAX = 60
"""In a row, of a second each, or of five where nobody even refuses: a restart of control takes less."""
LIVE, ROLLED_BACK, INTERRUPTED = 0, 3, 130


class Screen(Protocol):
    """Where a rollout is shown."""

    def show(self, rollout: Document, fault: str | None = None) -> None:
        """How it is now. fault: why the cell could not be asked just now."""
        ...


@connected(admin_connection)
def watch(connection: Connection, rollout: Annotated[str, typer.Argument(help="The rollout's id.")]) -> None:
    """Watch a rollout until it is over; Ctrl-C leaves it to itself."""
    hasty = replace(connection, wait_s=ANSWER_WAIT_S)
    path = f"/admin/v1/rollouts/{segment(rollout)}"
    try:
        status = _watched(lambda: hasty.call("GET", path))
    except KeyboardInterrupt:
        typer.echo(f"The rollout goes on; `weir rollout watch {rollout}` looks again.", err=True)
        status = INTERRUPTED
    raise typer.Exit(status)


def _watched(ask: Callable[[], Document]) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return follow(ask, Lines(sys.stdout.write), lambda: time.sleep(PERIOD_S))
    with Live(console=console, auto_refresh=False) as live:
        return follow(ask, Frames(live), lambda: time.sleep(PERIOD_S))


def follow(ask: Callable[[], Document], screen: Screen, rest: Callable[[], None]) -> int:
    """Ask and show until the rollout is over; the exit status. Raises CommandFailed where the first answer or too many fail."""
    rollout, faults = ask(), 0
    screen.show(rollout)
    while not rollout["is_over"]:
        rest()
        try:
            rollout, faults = ask(), 0
        except CommandFailed as fault:
            faults += 1
            if faults > FAULTS_MAX:
                raise
            screen.show(rollout, str(fault))
        else:
            screen.show(rollout)
    return LIVE if rollout["state"] == "live" else ROLLED_BACK


class Lines:
    """One plain line per change: what was done since the last one, and how it stands."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._newest: Document | None = None
        self._key: object = None
        self._fault: str | None = None

    def show(self, rollout: Document, fault: str | None = None) -> None:
        """Write what is new."""
        lines = [] if self._key is not None else [words.headline(rollout)]
        if fault is not None:
            lines += [fault] if self._fault is None else []
        else:
            lines += self._new_events(rollout)
            key = words.change_key(rollout)
            if key != self._key:
                lines.append(f"{words.standing(rollout)}: {words.verdict(rollout)}")
            self._key = key
        self._fault = fault
        for line in lines:
            self._write(f"{plain(line)}\n")
        sys.stdout.flush()

    def _new_events(self, rollout: Document) -> list[str]:
        """What was done since the last look, oldest first."""
        newest_first = rollout["history"]
        new = list(takewhile(lambda entry: entry != self._newest, newest_first))
        self._newest = next(iter(newest_first), None)
        return [words.event(entry) for entry in reversed(new)]


class Frames:
    """A live view that is drawn anew."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    def show(self, rollout: Document, fault: str | None = None) -> None:
        """Draw the frame in the place of the one before."""
        self._live.update(frame(rollout, self._live.console.height, fault), refresh=True)
