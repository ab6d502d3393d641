"""What a request and a chunk cost: the engine alone, nginx, and Weir side by side. Run by `make bench`, in five minutes.

CPU time is the figure to trust on a shared machine; rates and delays show the order. Each measure runs three times: the
median counts, the best stands beside it. Delays are shown as what a gateway adds to the engine alone. Results are kept as
JSON in bench-results/. `split` is Weir with its gateway in a process of its own, on the same core.
"""

import argparse
import json
import os
import pstats
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.measures import MEASURES, Figures, Measure, take
from benchmarks.programs import PROFILE, ROOT, Gateway, build, resident_bytes, run_engine, run_nginx, run_weir

REPEATS = 3
ROWS = ("engine", "nginx", "weir", "split")
RESULTS = ROOT / "bench-results"
TABLE_WIDTH = 128
Results: TypeAlias = dict[str, dict[str, Any]]
"""Row → measure → list of figures, and row → rss_mb."""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for, print the table and keep the figures; the exit status."""
    options = _parse(arguments)
    _check_machine(options.rows, options.weir)
    build()
    console = Console(width=TABLE_WIDTH)
    results: Results = {}
    with run_engine() as engine:
        for row in options.rows:
            with _started(row, engine, options) as gateway:
                results[row] = _measure(console, gateway, engine.port, options.measures)
    console.print(table_of(results, options.measures))
    if options.profile:
        pstats.Stats(str(PROFILE)).sort_stats("tottime").print_stats(30)
        return 0
    console.print(f"kept in {_keep(results)}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [measure.name for measure in MEASURES]
    parser = argparse.ArgumentParser(prog="bench", description="The cost of a gateway, side by side.")
    parser.add_argument(
        "--only", default="", help=f"comma-separated rows ({', '.join(ROWS)}) and measures ({', '.join(names)})"
    )
    parser.add_argument("--profile", action="store_true", help="only Weir, under Python's profiler: where its time goes")
    parser.add_argument("--weir", type=Path, default=ROOT / ".venv" / "bin" / "weir", help="the command to measure")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - {*ROWS, *names}:
        parser.error(f"--only does not know {', '.join(sorted(unknown))}")
    options.rows = ["weir"] if options.profile else [row for row in ROWS if row in wanted] or list(ROWS)
    options.measures = [measure for measure in MEASURES if measure.name in wanted] or list(MEASURES)
    return options


def _check_machine(rows: Sequence[str], weir: Path) -> None:
    needed = ["gcc", "taskset", *(["nginx"] if "nginx" in rows else [])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        sys.exit(f"bench: install {', '.join(missing)} first")
    if {"weir", "split"} & set(rows) and not weir.exists():
        sys.exit(f"bench: {weir} does not exist: run make setup first")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("bench: needs two cores, one for the load and one for the gateway")


def _started(row: str, engine: Gateway, options: argparse.Namespace) -> AbstractContextManager[Gateway]:
    if row == "engine":
        return nullcontext(engine)
    if row == "nginx":
        return run_nginx(engine.port)
    profiler: list[str | Path] = [sys.executable, "-m", "cProfile", "-o", PROFILE] if options.profile else []
    split = ("--gateways", "1") if row == "split" else ()
    return run_weir([*profiler, options.weir], engine.port, *split)


def _measure(console: Console, gateway: Gateway, engine_port: int, measures: Sequence[Measure]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure in measures:
        console.print(f"{gateway.name}: {measure.title}", style="dim")
        found[measure.name] = [take(measure, gateway, engine_port) for _ in range(REPEATS)]
    if gateway.pid:
        found["rss_mb"] = resident_bytes(gateway.pid) / 1e6
    return found


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def table_of(results: Results, measures: Sequence[Measure]) -> Table:
    """One line per figure, one column per row of the benchmark: median, and the best of the repeats in parentheses."""
    table = Table(title="What a gateway costs: median (best of 3)")
    table.add_column("measure")
    table.add_column("figure")
    for row in results:
        table.add_column("engine alone" if row == "engine" else row, justify="right")
    for measure in measures:
        table.add_section()
        for number, (key, label) in enumerate(_figures_of(measure)):
            title = measure.title if number == 0 else ""
            table.add_row(title, label, *(_cell(results, row, measure, key) for row in results))
    table.add_section()
    table.add_row("resident memory afterwards", "MB", *(_number(found.get("rss_mb")) for found in results.values()))
    return table


def _figures_of(measure: Measure) -> list[tuple[str, str]]:
    unit = "request" if measure.per == "requests" else "chunk"
    if not measure.delays:
        return [("cpu_us", f"CPU µs per {unit}"), ("per_second", f"{unit}s/s")]
    delays = [(f"{name}_{share}_ms", f"{label} {share}, ms") for name, label in DELAYS for share in ("p50", "p95", "p99")]
    return [("cpu_us", f"CPU µs per {unit}"), *delays]


DELAYS = (("first", "first token"), ("total", "total"))


def _cell(results: Results, row: str, measure: Measure, key: str) -> str:
    figures: list[Figures] = results[row][measure.name]
    values = [figure[key] for figure in figures if key in figure]
    if not values:
        return "–"
    best = max(values) if key == "per_second" else min(values)
    if key.endswith("_ms") and row != "engine" and "engine" in results:
        alone = median(figure[key] for figure in results["engine"][measure.name])
        return f"{median(values) - alone:+.2f} ({best - alone:+.2f})"
    return f"{_number(median(values))} ({_number(best)})"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _keep(results: Results) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gateway-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps({"repeats": REPEATS, "results": results}, indent=1), encoding="utf-8")
    return path.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
