"""What the scheduler delivers, beside first come, first served in the same run: `make bench-scheduling`.

Every row is a run of the simulator: the real coordinator, queues and journal, simulated engines, virtual time. Rows with the
same load differ in the order between tenants only, or in what else they name: without a door whoever comes waits. Recorded
traces are read from the folder that `WEIR_TRACES` names; without one their rows are left out, which is said.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet_runs import EIGHT_B, PATIENT, PATIENT_MS, Row, run
from benchmarks.programs import ROOT
from benchmarks.recorded import conversation_rows, noisy_rows
from weir.config import CoordinatorConfig
from weir.sim.runs.arrivals import Workload, drawn_workload
from weir.sim.runs.experiment import RunSpec
from weir.sim.runs.outages import faults_of
from weir.sim.runs.paces import engine_model
from weir.sim.runs.policies import Policy
from weir.sim.runs.traces import trace_workload

PROMPT = CoordinatorConfig(queue_wait_ms=1_000)
"""Refuse at the door what would wait for more than half a second."""
ANSWERS = "in=2000,out=300"
VTC_ENGINE = "linear:a=35.8,b=0.1,c=0.0005,d=0.05,kv=10000"
"""A step time with which first come, first served gives the paper's 777 tokens a second."""
LIGHT_REQUESTS_MAX = 50
BACKLOGGED_S, WEIGHTED_S = 30, 600


def fleet(rate: float, replicas: int, *, faults: tuple[str, ...] = (), tenants: str = "4", for_s: float = 120) -> RunSpec:
    """The load of the planner's worked example on replicas of 2,500 output tokens a second."""
    workload = drawn_workload(f"poisson:{rate},{ANSWERS},tenants={tenants}")
    outages, bursts = faults_of(faults, replicas, workload.tenants)
    spec = RunSpec(workload, engine_model("flat:2500"), for_s, replicas, 64, coordinator=PROMPT)
    return replace(spec, outages=outages, bursts=bursts, faults=faults)


def overload(rate: float) -> RunSpec:
    """Mixed lengths on two calibrated replicas."""
    workload = drawn_workload(f"poisson:{rate},in=500~0.8,out=100~0.8,tenants=4")
    return RunSpec(workload, engine_model(EIGHT_B), 60, 2, 64, coordinator=PROMPT)


def weighted() -> RunSpec:
    """Four tenants that each ask for the whole fleet."""
    workload = drawn_workload("poisson:120,in=200..800,out=50..250,tenants=4")
    weights = {f"tenant-{number}": number for number in (1, 2, 3, 4)}
    spec = RunSpec(workload, engine_model("flat:2500"), WEIGHTED_S, 1, 64, weights=weights, coordinator=PATIENT)
    return replace(spec, deadline_ms=PATIENT_MS)


def vtc(folder: Path) -> RunSpec:
    """The paper's trace on one replica with 10,000 tokens of KV memory."""
    workload: Workload = trace_workload(Path("lmsys_arena_vtc_27clients"), folder)
    spec = RunSpec(workload, engine_model(VTC_ENGINE), 600, 1, 24, noise_sigma=0.0, coordinator=PATIENT)
    return replace(spec, deadline_ms=PATIENT_MS)


def row(title: str, spec: RunSpec, told: Callable[[dict[str, Any]], str] | None = None) -> Row:
    """A row that its order between tenants sets apart."""
    return Row(title, spec.policy.value, spec, told or dispatches)


def rows(folder: Path | None) -> Iterator[Row]:
    """Every load, under both orders where tenants compete."""
    for rate in (42, 60, 90, 120):
        for policy in Policy:
            yield row(f"mixed lengths, {rate}/s on two 8B replicas", replace(overload(rate), policy=policy))
        plain = replace(overload(rate), policy=Policy.FCFS, coordinator=PATIENT, deadline_ms=PATIENT_MS)
        yield Row(f"mixed lengths, {rate}/s on two 8B replicas", "fcfs, no door", plain, dispatches)
    for policy in Policy:
        spec = fleet(200, 19, tenants="a:1/b:3")
        yield row("two tenants at 200/s, 19 replicas", replace(spec, policy=policy))
    for replicas in (19, 13, 12):
        yield row(f"100/s, {replicas} replicas", fleet(100, replicas))
        yield row(f"100/s, {replicas} replicas, one killed at 60 s", fleet(100, replicas, faults=("kill@60",)))
    spec = weighted()
    yield row("weights 1 : 2 : 3 : 4", spec, lambda document: f"service {by_weight(document, dict(spec.weights))}")
    if folder is not None:
        for policy in Policy:
            yield row("VTC trace", replace(vtc(folder), policy=policy), light_clients)
        yield from conversation_rows(folder)


def light_clients(document: dict[str, Any]) -> str:
    """TTFT p95 of clients with few requests: the median over them."""
    light = [slice_ for slice_ in document["tenants"].values() if slice_["offered"] <= LIGHT_REQUESTS_MAX]
    light_s = float(median(slice_["ttft_ms"]["p95"] for slice_ in light)) / 1_000
    return f"{document['tokens_per_s']:.0f} tok/s, light clients {light_s:.1f} s"


def by_weight(document: dict[str, Any], weights: dict[str, int]) -> str:
    """Service of each tenant against the first's, from when all were backlogged until requests stopped coming."""
    windows = document["windows"]
    during = slice(BACKLOGGED_S // windows["seconds"], int(WEIGHTED_S / windows["seconds"]))
    served = {name: sum(windows["service"][name][during]) / weight for name, weight in weights.items()}
    first = next(iter(served.values()))
    return " : ".join(f"{weights[name] * amount / first:.3f}" for name, amount in served.items())


def dispatches(document: dict[str, Any]) -> str:
    """Where there is nothing else to say."""
    most = max(document["dispatches"].values())
    return f"{document['dispatches_per_admitted']:.3f} dispatches a request, {most:,} on one replica"


def shown(row: Row, document: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    total = document["total"]
    failed = sum(number for name, number in total["ended"].items() if name != "completed")
    tpot = total["tpot_ms"]["p95"]
    return (
        row.title,
        row.aspect,
        f"{total['admitted']:,} of {total['offered']:,}",
        f"{total['goodput']['requests'] / row.spec.duration_s:.1f}",
        f"{total['ttft_ms']['p95']:,.0f}",
        f"{tpot:.1f}",
        f"{failed}",
        f"{document['fairness_gap']['tokens']:,.0f}",
        row.told(document),
    )


def main() -> int:
    """Run, print, keep."""
    table = Table(title="What the scheduler delivers")
    for title in (
        "load",
        "",
        "admitted",
        "goodput/s",
        "TTFT p95, ms",
        "TPOT p95, ms",
        "not completed",
        "fairness gap",
        "",
    ):
        table.add_column(title, justify="left" if title in ("load", "") else "right")
    folder = Path(os.environ["WEIR_TRACES"]) if "WEIR_TRACES" in os.environ else None
    every, said = list(rows(folder)), "WEIR_TRACES is not set: the recorded traces were left out"
    kept: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        if folder is not None:
            noisy, said = noisy_rows(folder, pool)
            every += noisy
        documents = pool.map(run, [each.spec for each in every], [each.seed for each in every])
        for each, document in zip(every, documents, strict=True):
            table.add_row(*shown(each, document))
            kept.append({"title": each.title, "aspect": each.aspect, **each.spec.document(), "result": document})
    console = Console(width=220)
    console.print(table)
    console.print(said)
    results = ROOT / "bench-results"
    results.mkdir(exist_ok=True)
    path = results / f"scheduling-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(kept), encoding="utf-8")
    console.print(f"kept in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
