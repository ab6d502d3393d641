"""What the demo's small model gives: TTFT and TPOT at 1, 2 and 3 clients, what is refused, and whether the targets hold.

Starts `weir up --engine llamacpp` with config/demo.toml on an empty state directory, then runs closed-loop clients with short
prompts for a bounded time each. A refused client waits as its Retry-After says. Figures are the platform's own timings, taken
from each stream's `done` event. Meaningful on idle cores only.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).parents[1] / "config" / "demo.toml"
PHASE_S = 20.0
START_S = 120.0
OUTPUT_TOKENS = 64
PROMPT = (
    "You are a guide on a river. A visitor asks what a weir is, why people build them, and how fish get past one. "
    "Answer kindly and in plain words, in one short paragraph, number {number}."
)
TTFT_TARGET_MS, TPOT_TARGET_MS = 1_000.0, 50.0


@dataclass
class Phase:
    """What the clients of one phase saw."""

    clients: int
    done: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Run the phases and print one table."""
    with tempfile.TemporaryDirectory(prefix="weir-demo-") as folder:
        ready_file = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "weir.cli.main", "up", "--engine", "llamacpp", "--config", str(CONFIG)]
        command += ["--state", f"{folder}/state", "--listen", "127.0.0.1:0", "--ready-file", str(ready_file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            phases = [_run_phase(_wait_ready(process, ready_file), clients) for clients in (1, 2, 3)]
        finally:
            process.terminate()
            process.wait(30)
    _show(phases)


def _wait_ready(process: subprocess.Popen[bytes], ready_file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the platform did not start; run `make run` to see why")
        time.sleep(0.1)
    ready: dict[str, Any] = json.loads(ready_file.read_text())
    return ready


def _run_phase(ready: dict[str, Any], clients: int) -> Phase:
    phase = Phase(clients)
    end = time.monotonic() + PHASE_S
    threads = [threading.Thread(target=_client, args=(ready, phase, end, number)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return phase


def _client(ready: dict[str, Any], phase: Phase, end: float, number: int) -> None:
    address = urlsplit(ready["api"])
    key = ready["tenants"][number % 2]["applications"][0]["key"]
    sent = 0
    while time.monotonic() < end:
        sent += 1
        body = {
            "model_alias": "assistant",
            "input": PROMPT.format(number=1_000 * number + sent),
            "max_output_tokens": OUTPUT_TOKENS,
            "stream": True,
        }
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request("POST", "/v1/generations", json.dumps(body), {"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status == 200:
            phase.done.append(json.loads(text.rsplit("data: ", 1)[1]))
        else:
            phase.refused[json.loads(text)["code"]] += 1
            time.sleep(int(answer.headers.get("retry-after-ms", "200")) / 1e3)


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _show(phases: list[Phase]) -> None:
    table = Table(title="SmolLM2-135M on this machine, short class")
    for name in ("clients", "completed", "refused at the door", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "targets"):
        table.add_column(name, justify="right")
    for phase in phases:
        completed = [entry["timing"] for entry in phase.done if entry["status"] == "completed"]
        ttft = [timing["ttft_ms"] for timing in completed]
        tpot = [timing["tpot_ms"] for timing in completed if timing["tpot_ms"] is not None]
        held = _percentile(ttft, 0.95) < TTFT_TARGET_MS and _percentile(tpot, 0.95) < TPOT_TARGET_MS
        refused = ", ".join(f"{number} {code}" for code, number in phase.refused.items()) or "0"
        figures = [f"{_percentile(values, share):.0f} ms" for values in (ttft, tpot) for share in (0.5, 0.95)]
        table.add_row(str(phase.clients), str(len(completed)), refused, *figures, "held" if held else "missed")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
