"""`weir batch watch`: a batch as it goes, each second anew, until it is over.

On a terminal it is a bar; elsewhere one plain line per change. It only looks: Ctrl-C leaves the batch to itself. Where the API
does not answer for a while, as when a gateway restarts, it asks again; a refusal that waiting does not cure ends it. The exit
status is 0 once every line has an answer, 3 where some failed, 4 for a batch that failed, expired or was cancelled, and 130
after Ctrl-C.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Annotated, Protocol

import typer

from weir.cli import batch_words as words
from weir.cli.batch_words import Batch, Pace, batch_of
from weir.cli.generate import api_connection
from weir.cli.http_api import CommandFailed, Connection, Refused, connected, segment
from weir.cli.tables import plain
from weir.clock import SystemClock
from weir.core.batches.batch_records import BatchStatus
from weir.units import NANOS_PER_SECOND

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PERIOD_S = 1.0
ANSWER_WAIT_S = 5.0
FAULTS_MAX = 60
"""In a row, of a second each, or of five where nobody even refuses: a restart takes less."""
ALL_ANSWERED, SOME_FAILED, NOT_COMPLETED, INTERRUPTED = 0, 3, 4, 130
_CURED_BY_WAITING = (408, 429)
_SERVER_FAULT = 500
_BAR_CELLS = 40

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id.")]


class Screen(Protocol):
    """Where a batch is shown."""

    def show(self, batch: Batch, pace: Pace, fault: str | None = None) -> None:
        """How it is now. fault: why it could not be asked just now."""
        ...


@connected(api_connection)
def watch(connection: Connection, batch: BatchId) -> None:
    """Watch a batch until it is over; Ctrl-C leaves it to itself."""
    raise typer.Exit(watched(connection, batch, sys.stdout))


def watched(connection: Connection, batch: str, shown_on: IO[str]) -> int:
    """Show a batch there until it is over; the exit status. Raises CommandFailed as `follow` does."""
    hasty = replace(connection, wait_s=ANSWER_WAIT_S)
    try:
        return _shown(lambda: batch_of(hasty.call("GET", f"/v1/batches/{segment(batch)}")), shown_on)
    except KeyboardInterrupt:
        typer.echo(f"The batch goes on; `weir batch watch {batch}` looks again.", err=True)
        return INTERRUPTED


def _shown(ask: Callable[[], Batch], shown_on: IO[str]) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=shown_on)
    if not console.is_terminal or console.is_dumb_terminal:
        return follow(ask, Lines(shown_on), lambda: time.sleep(PERIOD_S))
    with Live(console=console, auto_refresh=False) as live:
        return follow(ask, Frames(live), lambda: time.sleep(PERIOD_S))


def follow(ask: Callable[[], Batch], screen: Screen, rest: Callable[[], None], now_s: Callable[[], float] | None = None) -> int:
    """Ask and show until the batch is over; the exit status.

    now_s: of a clock that never goes back. Raises CommandFailed where the first answer or too many fail, and Refused where the
    same answer would come again.
    """
    now_s = now_s or _monotonic_s
    batch, faults, pace = ask(), 0, Pace()
    pace.note(now_s(), batch.done)
    screen.show(batch, pace)
    while not batch.is_over:
        rest()
        try:
            batch, faults = ask(), 0
        except CommandFailed as fault:
            faults += 1
            if faults > FAULTS_MAX or _is_final(fault):
                raise
            screen.show(batch, pace, str(fault))
        else:
            pace.note(now_s(), batch.done)
            screen.show(batch, pace)
    if batch.status != BatchStatus.COMPLETED:
        return NOT_COMPLETED
    return SOME_FAILED if batch.failed else ALL_ANSWERED


def _monotonic_s() -> float:
    return SystemClock().monotonic_ns() / NANOS_PER_SECOND


def _is_final(fault: CommandFailed) -> bool:
    """Whether waiting does not help."""
    return isinstance(fault, Refused) and fault.status < _SERVER_FAULT and fault.status not in _CURED_BY_WAITING


class Lines:
    """One plain line per change."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._key: object = None
        self._fault: str | None = None

    def show(self, batch: Batch, pace: Pace, fault: str | None = None) -> None:
        """Write what is new."""
        lines: list[str] = []
        if fault is not None:
            lines += [f"{fault} Asking again."] if self._fault is None else []
        elif (key := words.change_key(batch)) != self._key:
            lines += [f"{batch.id}: {words.standing(batch, pace)}", *_last_words(batch)]
            self._key = key
        self._fault = fault
        for line in lines:
            self._stream.write(f"{plain(line)}\n")
        self._stream.flush()


class Frames:
    """A bar that is drawn anew."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    def show(self, batch: Batch, pace: Pace, fault: str | None = None) -> None:
        """Draw it in the place of the one before."""
        self._live.update(frame(batch, pace, fault), refresh=True)


def frame(batch: Batch, pace: Pace, fault: str | None = None) -> "RenderableType":
    """A batch as a terminal shows it. fault: why it could not be asked just now."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = max(1, batch.total)
    bar = ProgressBar(total, min(batch.done, total), width=_BAR_CELLS, complete_style="cyan", finished_style="green")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(bar, Text(words.counted(batch), style="yellow" if batch.failed else ""))
    parts: list[RenderableType] = [Text(f"{batch.id}: {words.state(batch)}", style="bold"), grid]
    if (waits := words.waiting(batch)) is not None:
        parts.append(Text(f"waits: {waits}", style="yellow"))
    elif not batch.is_over and (going := pace.words(batch)):
        parts.append(Text(going, style="dim"))
    parts += [Text(line) for line in _last_words(batch)]
    if fault is not None:
        parts.append(Text(f"{plain(fault)} Asking again.", style="yellow"))
    return Group(*parts)


def _last_words(batch: Batch) -> list[str]:
    """Why it failed as a whole, if it did."""
    return list(batch.faults[: words.FAULTS_SHOWN]) if batch.is_over else []
