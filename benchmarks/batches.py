"""What a line of a batch costs beside an interactive request of the same size: CPU of one cell, side by side in one run.

Each repeat runs a batch to its end and then interactive chat completions, not streamed; 16 tokens each. A line's CPU is
everything from the batch's creation to its result file: reading its line, the pipeline, what is stored before and after it is
charged for, progress and results. Its upload, with the check of every line, is shown apart. Run by `make bench-batches`.
"""

import sys
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.batch_orders import chat_lines, created, ended, uploaded
from benchmarks.measures import ANSWER_TOKENS, MEASURES, take
from benchmarks.programs import ROOT, Gateway, build, call, cpu_ns, run_engine, run_weir

REPEATS = 3
LINES = 4_000
RUN_S_MAX = 120
_PROMPT = "x " * 100


def main(weir: Path = ROOT / ".venv" / "bin" / "weir") -> int:
    """Run and print the table; the exit status."""
    build()
    rows: dict[str, list[float]] = {"upload": [], "line": [], "lines a second": [], "request": []}
    measure = next(measure for measure in MEASURES if measure.name == "closed")
    with run_engine() as engine, run_weir([weir], engine.port) as cell:
        call(engine.port, "GET", "/set?itl=0&ttft=0&burst=32&step=0")
        for _ in range(REPEATS):
            for name, figure in _batch(cell).items():
                rows[name].append(figure)
            rows["request"].append(take(measure, cell, engine.port)["cpu_us"])
    line, request = median(rows["line"]), median(rows["request"])
    table = Table(title=f"{LINES:,} lines of {ANSWER_TOKENS} tokens, median of {REPEATS}")
    for name in ("what", "CPU µs", "beside a request"):
        table.add_column(name, justify="left" if name == "what" else "right")
    table.add_row("line of a batch", f"{line:.0f}", f"{line / request:.2f} ×")
    table.add_row("its upload and check", f"{median(rows['upload']):.0f}", f"{median(rows['upload']) / request:.2f} ×")
    table.add_row("interactive request", f"{request:.0f}", "1.00 ×")
    console = Console(width=100)
    console.print(table)
    console.print(f"{median(rows['lines a second']):,.0f} lines a second")
    return 0


def _batch(cell: Gateway) -> dict[str, float]:
    """CPU µs of a line and of its upload, and lines a second of one batch."""
    assert cell.pid is not None and cell.api_key is not None
    before_ns = cpu_ns(cell.pid)
    file_id = uploaded(cell, chat_lines([_PROMPT] * LINES, ANSWER_TOKENS))
    uploaded_ns = cpu_ns(cell.pid)
    began = time.monotonic()
    batch = ended(cell, created(cell, file_id), RUN_S_MAX)
    took_s = time.monotonic() - began
    ended_ns = cpu_ns(cell.pid)
    if batch["request_counts"] != {"total": LINES, "completed": LINES, "failed": 0}:
        sys.exit(f"bench: the batch went wrong: {batch}")
    return {
        "upload": (uploaded_ns - before_ns) / 1_000 / LINES,
        "line": (ended_ns - uploaded_ns) / 1_000 / LINES,
        "lines a second": LINES / took_s,
    }


if __name__ == "__main__":
    sys.exit(main())
