"""What a line of a batch costs beside an interactive request of the same size: CPU of one cell, side by side in one run.

Each repeat runs a batch to its end and then interactive chat completions, not streamed; 16 tokens each. A line's CPU is
everything from the batch's creation to its result file: reading its line, the pipeline, what is stored before and after it is
charged for, progress and results. Its upload, with the check of every line, is shown apart. Run by `make bench-batches`.
"""

import json
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measures import ANSWER_TOKENS, MEASURES, take
from benchmarks.programs import ALIAS, ROOT, Gateway, build, call, cpu_ns, run_engine, run_weir

REPEATS = 3
LINES = 4_000
RUN_S_MAX = 120
_BOUNDARY = "weir-bench"
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
    file_id = _uploaded(cell)["id"]
    uploaded_ns = cpu_ns(cell.pid)
    began = time.monotonic()
    asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    batch = call(cell.port, "POST", "/v1/batches", asked, cell.api_key)
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() - began > RUN_S_MAX:
            sys.exit(f"bench: the batch did not end: {batch}")
        time.sleep(0.2)
        batch = call(cell.port, "GET", f"/v1/batches/{batch['id']}", None, cell.api_key)
    took_s = time.monotonic() - began
    ended_ns = cpu_ns(cell.pid)
    if batch["request_counts"] != {"total": LINES, "completed": LINES, "failed": 0}:
        sys.exit(f"bench: the batch went wrong: {batch}")
    return {
        "upload": (uploaded_ns - before_ns) / 1_000 / LINES,
        "line": (ended_ns - uploaded_ns) / 1_000 / LINES,
        "lines a second": LINES / took_s,
    }


def _uploaded(cell: Gateway) -> Any:
    """The file of a batch."""
    body = {"model": ALIAS, "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": ANSWER_TOKENS}
    lines = "".join(
        json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
        for number in range(LINES)
    )
    part = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="x.jsonl"\r\n\r\n{lines}\r\n--{_BOUNDARY}--\r\n'
    connection = HTTPConnection("127.0.0.1", cell.port, timeout=RUN_S_MAX)
    try:
        headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}", "Authorization": f"Bearer {cell.api_key}"}
        connection.request("POST", "/v1/files", form.encode(), headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        sys.exit(f"bench: the upload was answered {answer.status}: {text[:500]!r}")
    return json.loads(text)


if __name__ == "__main__":
    sys.exit(main())
