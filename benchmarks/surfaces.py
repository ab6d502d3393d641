"""What a request and a chunk cost on each surface, beside the native one: all in one run of one cell, in turn.

CPU time of the cell's process; the surfaces take turns within each repeat, so that a slow minute is everybody's. The median of
the repeats counts. Run by `make bench-surfaces`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measures import MEASURES, Measure, streams, take
from benchmarks.programs import ROOT, Gateway, build, run_engine, run_weir

REPEATS = 5
LONG_TOKENS = 3_000
SURFACES = {
    "native": ("/v1/generations", ""),
    "native, retained": ("/v1/generations", ',"retain":true'),
    "chat completions": ("/v1/chat/completions", ""),
    "completions": ("/v1/completions", ""),
    "responses": ("/v1/responses", ""),
    "responses, stored": ("/v1/responses", ',"store":true'),
    "messages": ("/v1/messages", ""),
}
"""Paths, and what is asked for beside the usual."""
_NATIVE = "native"
_BURST = next(measure for measure in MEASURES if measure.name == "burst8")
_MEASURED = (
    *(measure for measure in MEASURES if measure.name in ("closed", "chunks", "burst8")),
    replace(
        _BURST, name="long", title=f"{_BURST.title}, {LONG_TOKENS:,} in each stream", load=streams(LONG_TOKENS, "-c", "16")
    ),
)
"""The last one shows what a chunk costs almost without the beginning and end of its stream."""


def main(weir: Path = ROOT / ".venv" / "bin" / "weir") -> int:
    """Run and print the table; the exit status."""
    build()
    with run_engine() as engine, run_weir([weir], engine.port) as cell:
        found = {measure.name: _measured(measure, cell, engine.port) for measure in _MEASURED}
    table = Table(title=f"CPU µs on each surface, and beside the native one: median of {REPEATS}")
    table.add_column("measure")
    for name in SURFACES:
        table.add_column(name, justify="right")
    for measure in _MEASURED:
        costs = {name: median(found[measure.name][name]) for name in SURFACES}
        cells = [f"{cost:.{0 if cost >= 100 else 1}f} ({cost / costs[_NATIVE]:.2f} ×)" for cost in costs.values()]
        table.add_row(f"{measure.title}, per {'request' if measure.per == 'requests' else 'chunk'}", *cells)
    Console(width=150).print(table)
    return 0


def _measured(measure: Measure, cell: Gateway, engine_port: int) -> dict[str, list[float]]:
    """CPU µs of each surface, one for each repeat."""
    costs: dict[str, list[float]] = {name: [] for name in SURFACES}
    for _ in range(REPEATS):
        for name, (path, fields) in SURFACES.items():
            costs[name].append(take(measure, replace(cell, name=name, path=path, fields=fields), engine_port)["cpu_us"])
    return costs


if __name__ == "__main__":
    sys.exit(main())
