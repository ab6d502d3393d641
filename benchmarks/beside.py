"""What interactive requests see while a batch takes all that is left: a real model, four settings in turn in one run.

- *alone*: a pool of `service_classes = ["interactive"]` with one llama.cpp process of one thread, and nothing else to do.
- *control*: the same, while another llama.cpp process, which Weir knows nothing of, is asked for one line after the other on
  each of its lanes. What this costs is the machine's: memory and caches that both cores share.
- *own pool*: the same, while a batch keeps a pool of its own (`["batch"]`, another llama.cpp process) busy in the same way.
- *one pool*: another cell, whose only pool takes both classes, full of a batch's long lines.

Core 0 has the cell, the clients and the engine that answers them; core 1 the engine beside, as if it were another machine. Each
round holds the same conversation once in each setting, so that drifts of the machine meet all of them. Every batch's results
must have each line once. Run by `make bench-beside`; figures of a machine with other work say little.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batch_orders import chat_lines, created, ended, shown, told, uploaded
from benchmarks.conversation import Answered, hold, turns
from benchmarks.programs import BUILD, LOAD_CORE, busy_ns, call, cpu_ns
from benchmarks.real_engines import OtherEngine, RealCell, other_engine, real_cell

ROUNDS, TURNS, PER_SECOND, TOKENS = 4, 8, 0.3, 24
LANES = 2
SHORT_TOKENS, LONG_TOKENS = 64, 160
APART_LINES, SHARED_LINES = 100, 12
BATCH_S_MAX = 600
_PROMPT = "Write a very long story about a river, a mill and heron number {}. Do not stop early."
_BATCHES = f"[coordinator]\nconcurrency_min_percent = 100\n[batches]\npoll_ms = 100\nlines_in_flight = {2 * LANES}\n"
_POOL = f"[pool]\nconcurrency = {LANES}\nthreads = 1\nsecond_model = false\n"
APART = f'{_POOL}service_classes = ["interactive"]\n[pools.jobs]\nservice_classes = ["batch"]\n{_BATCHES}'
SHARED = f"{_POOL}{_BATCHES}"


@dataclass
class Work:
    """What ran beside a conversation. engine: the process that did it; lines: done while it lasted; gave_way: preempted."""

    engine: int | None = None
    lines: int = 0
    gave_way: int = 0


@dataclass(frozen=True)
class Used:
    """Parts of a core while a conversation lasted: the cell without its engines, the engine beside, and core 0 by strangers."""

    cell: float
    beside: float
    strangers: float


@dataclass
class Seen:
    """Of one setting, over all rounds."""

    answers: list[Answered] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)

    def of(self, name: str, share: float) -> float:
        """A percentile of one figure of the answers."""
        values = sorted(getattr(each, name) for each in self.answers if not each.refused)
        return float(values[min(len(values) - 1, int(share * len(values)))]) if values else float("nan")

    def counts(self) -> tuple[int, int, int]:
        """Requests that were refused, lines that were done, and executions of lines that gave way."""
        refused = sum(answer.refused for answer in self.answers)
        return refused, sum(work.lines for work in self.works), sum(work.gave_way for work in self.works)


@dataclass(frozen=True)
class Setting:
    """beside: begins what runs beside a conversation of a round, told whether it is the last round, and ends it."""

    name: str
    cell: RealCell
    beside: Callable[[bool], AbstractContextManager[Work]]


def main() -> int:
    """Run all rounds and print the table; the exit status."""
    parser = argparse.ArgumentParser(description="Interactive requests beside a batch, on a real model.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="conversations in each setting")
    rounds: int = parser.parse_args().rounds
    if (os.cpu_count() or 1) < 2:
        sys.exit("bench: two cores are needed")
    BUILD.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {LOAD_CORE})
    with ExitStack() as stack:
        apart = stack.enter_context(real_cell("apart", APART))
        shared = stack.enter_context(real_cell("shared", SHARED))
        other = stack.enter_context(other_engine(LANES))
        apart.move_engine("jobs")
        settings = [
            Setting("alone", apart, lambda _: _nothing()),
            Setting("control", apart, lambda _: _control(other)),
            Setting("own pool", apart, partial(_batch, apart, "jobs")),
            Setting("one pool", shared, partial(_batch, shared, "assistant")),
        ]
        seen = {setting.name: Seen() for setting in settings}
        meter = Meter((apart.engine_of("jobs"), other.pid))
        for number in range(rounds):
            first = number % len(settings)  # nobody comes after the same one each time
            for setting in (*settings[first:], *settings[:first]):
                _round(setting, seen[setting.name], meter, number, number == rounds - 1)
    _show(seen, rounds)
    return 0


def _round(setting: Setting, seen: Seen, meter: "Meter", number: int, is_last: bool) -> None:
    asked = turns(number, TURNS, PER_SECOND)
    with setting.beside(is_last) as work:
        meter.begin(setting.cell.pid, work.engine)
        seen.answers += hold(setting.cell.of("acme"), f"{setting.name.replace(' ', '-')}.{number}", asked, TOKENS)
        seen.used.append(meter.end())
    seen.works.append(work)
    print(f"round {number + 1}: {setting.name}", file=sys.stderr)


class Meter:
    """What uses the cores. there: those of this benchmark's processes that run on core 1; all others run on core 0."""

    def __init__(self, there: Sequence[int]) -> None:
        self._there = there
        self._measured: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
        self._before = self._measured()

    def begin(self, cell: int, engine: int | None) -> None:
        """A conversation with a cell begins, beside an engine."""
        self._measured = partial(self._now, cell, engine)
        self._before = self._measured()

    def end(self) -> Used:
        """What was used since it began."""
        took, cell, beside, strangers = (now - before for now, before in zip(self._measured(), self._before, strict=True))
        return Used(cell / took, beside / took, max(0, strangers) / took)

    def _now(self, cell: int, engine: int | None) -> tuple[int, int, int, int]:
        ours_ns = cpu_ns(os.getpid()) - sum(map(cpu_ns, self._there))
        beside_ns = cpu_ns(engine) if engine is not None else 0
        return time.monotonic_ns(), time.clock_gettime_ns((~cell << 3) | 2), beside_ns, busy_ns(LOAD_CORE) - ours_ns


# ── what runs beside ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _nothing() -> Iterator[Work]:
    yield Work()


@contextmanager
def _control(other: OtherEngine) -> Iterator[Work]:
    work = Work(other.pid)
    with other.kept_busy([_PROMPT.format(number) for number in range(APART_LINES)], SHORT_TOKENS) as done:
        before = len(done)
        yield work
        work.lines = len(done) - before


@contextmanager
def _batch(cell: RealCell, pool: str, to_its_end: bool) -> Iterator[Work]:
    """Lines on every lane of a pool. A batch that is not run to its end is given up; each line is told once all the same."""
    number, tokens = (APART_LINES, SHORT_TOKENS) if pool == "jobs" else (SHARED_LINES, LONG_TOKENS)
    owner, lines = cell.of("globex"), chat_lines(map(_PROMPT.format, range(number)), tokens)
    batch = created(owner, uploaded(owner, lines))
    cell.wait_full(pool)
    work, gave_way = Work(cell.engine_of(pool)), cell.preempted()
    done = shown(owner, batch)["request_counts"]["completed"]
    yield work
    counts = shown(owner, batch)["request_counts"]
    work.lines, work.gave_way = counts["completed"] - done, cell.preempted() - gave_way
    if counts["completed"] + counts["failed"] > number - LANES:
        print(f"note: {pool} was not full to the end of this conversation", file=sys.stderr)
    if pool == "jobs" or not to_its_end:
        call(owner.port, "POST", f"/v1/batches/{batch}/cancel", None, owner.api_key or "")
    end = ended(owner, batch, BATCH_S_MAX)
    _check(end, told(owner, end), number)


def _check(batch: Mapping[str, Any], times: Counter[str], lines: int) -> None:
    if times != {f"line-{number}": 1 for number in range(lines)} or batch["status"] not in ("completed", "cancelled"):
        sys.exit(f"bench: the batch went wrong: {batch}, {times}")


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show(seen: dict[str, Seen], rounds: int) -> None:
    table = Table(title=f"SmolLM2-135M, {rounds * TURNS} requests of {TOKENS} tokens in each setting, {PER_SECOND}/s; ms")
    for name in (
        "",
        "refused",
        "queue p95",
        "TTFT p50",
        "p95",
        "TPOT p50",
        "p95",
        "cell",
        "beside",
        "strangers",
        "lines",
        "gave way",
    ):
        table.add_column(name, justify="right" if name else "left")
    alone = seen["alone"]
    for name, each in seen.items():
        figures = [f"{each.of('queue_ms', 0.95):.0f}"]
        for what in ("ttft_ms", "tpot_ms"):
            for share in (0.5, 0.95):
                value = each.of(what, share)
                figures.append(f"{value:.0f} ({value / alone.of(what, share):.2f} ×)")
        refused, lines, gave_way = each.counts()
        used = [f"{median(getattr(one, name) for one in each.used):.0%}" for name in ("cell", "beside", "strangers")]
        table.add_row(name, str(refused), *figures, *used, str(lines), str(gave_way))
    console = Console(width=150)
    console.print(table)
    own, control = seen["own pool"], seen["control"]
    pairs = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
    ratios = (f"p95 {name} {own.of(what, 0.95) / control.of(what, 0.95):.2f} ×" for name, what in pairs)
    console.print(f"Own pool beside control: {', '.join(ratios)}. × in the table is beside alone.")
    console.print("cell (without its engines), beside (the engine that runs lines), strangers (on core 0): parts of a core.")
    console.print("Every batch's results had each line once.")


if __name__ == "__main__":
    sys.exit(main())
