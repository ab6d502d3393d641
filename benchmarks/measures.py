"""What is measured: each measure is an engine setting, a load, and the figures taken from the generator and the kernel.

The generator checks every answer: status, number and order of tokens, the end of the stream. A run with a wrong answer ends
the benchmark, so that a fast gateway that loses tokens shows no figure at all.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.programs import BUILD, LOAD_CORE, Gateway, call, cpu_ns

Figures = Mapping[str, float]

REQUESTS_MAX = 1_000_000_000  # runs are bounded by time
ANSWER_TOKENS, STREAM_TOKENS, STREAMS = 16, 300, 100
OFFERED_CHUNKS_PER_S = 30_000
FAULTS = ("err_status", "err_count", "err_seq", "err_conn")


@dataclass(frozen=True)
class Measure:
    """One kind of run. per: what CPU time is divided by, `requests` or `tokens`; a token is one chunk of the engine."""

    name: str
    title: str
    seconds: float
    per: str
    load: tuple[str, ...]
    itl_us: int = 0
    ttft_us: int = 0
    burst: int = 32
    delays: bool = False


def streams(tokens: int, *more: str) -> tuple[str, ...]:
    """The generator's arguments for streams of so many tokens, whatever their chunks."""
    return ("-s", "-A", "-N", str(tokens), *more)


_ANSWERS = ("-N", str(ANSWER_TOKENS))
_PACE_US = STREAMS * 1_000_000 // OFFERED_CHUNKS_PER_S
_DELAY_LOAD = streams(ANSWER_TOKENS, "-r", "50", "-c", "200")

MEASURES = (
    Measure("closed", "not streamed, 16 at once", 2, "requests", (*_ANSWERS, "-c", "16")),
    Measure("open", "not streamed, 100/s", 3, "requests", (*_ANSWERS, "-c", "64", "-r", "100")),
    Measure(
        "chunks", "100 streams, 30,000 chunks/s offered", 3, "tokens", streams(STREAM_TOKENS, "-c", str(STREAMS)), _PACE_US
    ),
    Measure("burst1", "as fast as possible, 1 chunk a write", 2, "tokens", streams(STREAM_TOKENS, "-c", "16"), burst=1),
    Measure("burst8", "as fast as possible, 8 chunks a write", 2, "tokens", streams(STREAM_TOKENS, "-c", "16"), burst=8),
    Measure("delay0", "50 streams/s, engine's first token at once", 3, "requests", _DELAY_LOAD, 1_000, 0, delays=True),
    Measure(
        "delay30", "50 streams/s, engine's first token after 30 ms", 3, "requests", _DELAY_LOAD, 1_000, 30_000, delays=True
    ),
)
DELAYS = (
    next(measure for measure in MEASURES if measure.name == "delay30"),
    Measure(
        "delay60", "50 streams/s, engine's first token after 60 ms", 3, "requests", _DELAY_LOAD, 1_000, 60_000, delays=True
    ),
)
"""What a ledger may add to, by how late the engine's first token comes."""


def take(measure: Measure, gateway: Gateway, engine_port: int) -> Figures:
    """Run one measure once. Ends the benchmark when the gateway answered wrongly or not at all."""
    setting = f"itl={measure.itl_us}&ttft={measure.ttft_us}&burst={measure.burst}&step=0"
    call(engine_port, "GET", f"/set?{setting}")
    before_ns = cpu_ns(gateway.pid) if gateway.pid else 0
    result = _load(measure, gateway)
    used_ns = cpu_ns(gateway.pid) - before_ns if gateway.pid else 0
    done = result["finished"] if measure.per == "requests" else result["tokens"]
    if not done or any(result[fault] for fault in FAULTS):
        counts = {name: result[name] for name in ("ok", "finished", "last_status", "bad_events", *FAULTS)}
        sys.exit(f"bench: {gateway.name} answered wrongly in {measure.name!r}: {counts}")
    figures = {"per_second": done / result["elapsed"]}
    if gateway.pid:
        figures["cpu_us"] = used_ns / 1_000 / done
    if measure.delays:
        for name, histogram in (("first", result["ttft"]), ("total", result["total"])):
            figures |= {f"{name}_{share}_ms": histogram[share] / 1_000 for share in ("p50", "p95", "p99")}
    return figures


def _load(measure: Measure, gateway: Gateway) -> dict[str, Any]:
    """The generator's own account of one run."""
    command = ["taskset", "-c", str(LOAD_CORE), str(BUILD / "load"), "-p", str(gateway.port), "-m", gateway.model]
    command += ["-u", gateway.path, "-n", str(REQUESTS_MAX), "-T", str(measure.seconds), *measure.load]
    if gateway.fields:
        command += ["-B", gateway.fields]
    if gateway.api_key:
        command += ["-k", gateway.api_key]
    ended = subprocess.run(command, capture_output=True, check=True, text=True, timeout=measure.seconds + 30)
    result: dict[str, Any] = json.loads(ended.stdout)
    return result
