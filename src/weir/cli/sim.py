"""`weir sim`: what-if runs. A fleet, a workload and faults in virtual time, through the coordinator that serves real requests.

It reads options, shows progress, and prints or writes the results; the runs themselves are `weir.sim.runs`. Bad options exit
with 2 and say what is accepted.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weir import errors
from weir.cli.tables import print_table
from weir.config import CoordinatorConfig
from weir.core.tenancy import TENANT_WEIGHT_MAX
from weir.sim.runs.arrivals import TOKENS_MAX, Workload, drawn_workload
from weir.sim.runs.experiment import Fidelity, RunSpec
from weir.sim.runs.outages import SlowClients, faults_of, slow_clients_of
from weir.sim.runs.paces import engine_model
from weir.sim.runs.parallel import Outcome, run_seeds
from weir.sim.runs.policies import Policy
from weir.sim.runs.report_page import COLUMNS, DOOR_COLUMNS, door_figures_of, figures_of, page_of
from weir.sim.runs.terms import number, refused, seconds, whole
from weir.sim.runs.traces import trace_workload

commands = typer.Typer(no_args_is_help=True)

_SEEDS_MAX = 1_000
_DRAWN_S = 60.0
"""How long requests come where neither an option nor a trace says."""
_DAY_MS = 86_400_000
_TENANTS_SHOWN = 10
"""On the terminal; the files have all."""


@commands.callback()
def _group() -> None:
    """What-if runs in virtual time."""


@commands.command()
def run(
    workload: Annotated[str | None, typer.Option(help="poisson:RATE,in=LENGTH,out=LENGTH,tenants=N,cv=N")] = None,
    trace: Annotated[Path | None, typer.Option(help="A recorded workload: a file, or its name in --traces.")] = None,
    traces: Annotated[Path | None, typer.Option(envvar="WEIR_TRACES", help="The folder that --trace looks in.")] = None,
    engine: Annotated[
        str, typer.Option(help="A calibration row, linear:a=MS,b=,c=,d= or flat:RATE.")
    ] = "llama3.1-8b/h100_sxm/tp1",
    replicas: Annotated[str, typer.Option(help="How many replicas.")] = "1",
    concurrency: Annotated[str, typer.Option(help="Requests that a replica runs at once.")] = "64",
    noise: Annotated[str, typer.Option(help="Sigma of each step's lognormal noise; 0: exact, without stalls.")] = "0.05",
    start: Annotated[str, typer.Option(help="From a loss to its replacement being ready.")] = "30s",
    policy: Annotated[str, typer.Option(help="The order between tenants: fair, or fcfs to compare with.")] = "fair",
    weight: Annotated[list[str] | None, typer.Option(help="TENANT=N: a tenant's weight (repeatable).")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="kill@T, stall@T, burst@T and others (repeatable).")] = None,
    fidelity: Annotated[str, typer.Option(help="schedule, or full: the real gateway and every token.")] = "schedule",
    for_: Annotated[str | None, typer.Option("--for", help="How long requests come; else the trace's length, or 60 s.")] = None,
    seed: Annotated[str, typer.Option(help="One seed or several: 1,2,5-8.")] = "1",
    max_output_tokens: Annotated[
        str, typer.Option(help="What requests ask for at most, their output if that is longer.")
    ] = "1024",
    deadline_ms: Annotated[str | None, typer.Option(help="Of every request; else that of its workload class.")] = None,
    queue_wait_ms: Annotated[str | None, typer.Option(help="The bound of waiting; else the platform's own.")] = None,
    queue_entries: Annotated[str | None, typer.Option(help="How many may wait, of one tenant too.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results as JSON.")] = None,
) -> None:
    """Simulate a workload on a fleet, and print what tenants would see."""
    try:
        requests = _workload(workload, trace, traces)
        outages, bursts = faults_of(fault or (), whole("--replicas", replicas, 1, 1_024), requests.tenants)
        spec = RunSpec(
            workload=requests,
            engine=engine_model(engine),
            duration_s=_duration_s(for_, requests),
            replicas=whole("--replicas", replicas, 1, 1_024),
            concurrency=whole("--concurrency", concurrency, 1, 65_536),
            noise_sigma=number("--noise", noise, 0, 2),
            start_s=seconds("--start", start),
            policy=_policy(policy),
            weights=_weights(weight or (), requests.tenants),
            outages=outages,
            bursts=bursts,
            slow_clients=_slow_clients(fault or (), fidelity),
            faults=tuple(fault or ()),
            fidelity=_fidelity(fidelity),
            max_output_tokens=whole("--max-output-tokens", max_output_tokens, 1, TOKENS_MAX),
            deadline_ms=None if deadline_ms is None else whole("--deadline-ms", deadline_ms, 1, 3_600_000),
            coordinator=_coordinator(queue_wait_ms, queue_entries),
        )
        seeds = _seeds(seed)
        _check_writable(report, json_file)
        outcomes = _run_with_progress(spec, seeds)
        _write(report, json_file, {"spec": spec.document(), "runs": [outcome.document for outcome in outcomes]})
    except errors.InvalidRequest as refusal:
        typer.echo(f"weir: {refusal.detail}", err=True)
        raise typer.Exit(2) from None
    _print_results(outcomes)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _workload(drawn: str | None, trace: Path | None, folder: Path | None) -> Workload:
    if (drawn is None) == (trace is None):
        raise refused("weir sim run", "both" if trace else "neither", "one of --workload and --trace")
    if trace is not None:
        return trace_workload(trace, folder)
    assert drawn is not None
    return drawn_workload(drawn)


def _duration_s(given: str | None, workload: Workload) -> float:
    if given is not None:
        return seconds("--for", given)
    return _DRAWN_S if workload.span_s is None else workload.span_s


def _policy(given: str) -> Policy:
    if given not in list(Policy):
        raise refused("--policy", given, " or ".join(Policy))
    return Policy(given)


def _fidelity(given: str) -> Fidelity:
    if given not in list(Fidelity):
        raise refused("--fidelity", given, " or ".join(Fidelity))
    return Fidelity(given)


def _slow_clients(faults: Sequence[str], fidelity: str) -> tuple[SlowClients, ...]:
    """Only real streams have readers."""
    found = slow_clients_of(faults)
    if found and fidelity != Fidelity.FULL:
        raise refused("--fault slow-clients", fidelity, "--fidelity full")
    return found


def _weights(given: Sequence[str], tenants: Sequence[str]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for text in given:
        tenant, _, weight = text.rpartition("=")
        if tenant not in tenants:
            raise refused("--weight", text, f"TENANT=N of a tenant that asks: {', '.join(tenants[:10])}")
        weights[tenant] = whole(f"--weight {tenant}=", weight, 1, TENANT_WEIGHT_MAX)
    return weights


def _coordinator(wait_ms: str | None, entries: str | None) -> CoordinatorConfig:
    config = CoordinatorConfig()
    if wait_ms is not None:
        config = replace(config, queue_wait_ms=whole("--queue-wait-ms", wait_ms, 1, _DAY_MS))
    if entries is not None:
        most = whole("--queue-entries", entries, 1, 10_000_000)
        config = replace(config, queue_entries=most, queue_entries_per_tenant=most, queue_bytes=1 << 40)
    return config


def _seeds(given: str) -> list[int]:
    seeds: list[int] = []
    for part in given.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not 0 <= last - first < _SEEDS_MAX - len(seeds):
            raise refused("--seed", given, f"seeds from 0 to 999,999,999 like 1,2,5-8, at most {_SEEDS_MAX:,}")
        seeds += range(first, last + 1)
    return seeds


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_with_progress(spec: RunSpec, seeds: Sequence[int]) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        whole_bar = progress.add_task(f"{len(seeds)} run(s) of {spec.duration_s:,.0f} s", total=float(len(seeds)))
        shares = [0.0] * len(seeds)

        def show(place: int, share: float) -> None:
            shares[place] = share
            progress.update(whole_bar, completed=sum(shares))

        return run_seeds(spec, seeds, show)


def _check_writable(*paths: Path | None) -> None:
    """Before minutes of work: whether its results have a place."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise refused("--report and --json", str(path), "the path of a file in a folder that exists")


def _write(report: Path | None, json_file: Path | None, result: dict[str, Any]) -> None:
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if report is not None:
            report.write_text(page_of(result), encoding="utf-8")
    except OSError as fault:
        raise refused("--report and --json", str(fault.filename), f"a file that can be written ({fault.strerror})") from None


def _print_results(outcomes: Sequence[Outcome]) -> None:
    rows: list[list[str]] = []
    for outcome in outcomes:
        run_result = outcome.document
        rows.append([str(run_result["seed"]), "all", *figures_of(run_result["total"])])
        rows += [["", name, *figures_of(part)] for name, part in run_result["classes"].items()]
    print_table(("seed", "class", *COLUMNS), rows, numeric=COLUMNS)
    print_table(("seed", "tenant", *DOOR_COLUMNS), _door_rows(outcomes), numeric=DOOR_COLUMNS)
    for outcome in outcomes:
        _print_run(outcome)


def _door_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Of each seed the whole, and the tenants that asked for most."""
    rows: list[list[str]] = []
    for outcome in outcomes:
        found = outcome.document
        rows.append([str(found["seed"]), "all", *door_figures_of(found["total"])])
        largest = sorted(found["tenants"].items(), key=lambda each: -each[1]["offered"])[:_TENANTS_SHOWN]
        rows += [["", name, *door_figures_of(part)] for name, part in largest]
    return rows


def _print_run(outcome: Outcome) -> None:
    found = outcome.document
    total, gap = found["total"], found["fairness_gap"]
    pair = f" between {' and '.join(gap['between'])}" if gap["between"] else ""
    print(f"seed {found['seed']}: {found['tokens_per_s'] or 0:,.0f} tokens/s over {found['makespan_s']:,.0f} s", end="")
    print(f", fairness gap {gap['tokens']:,.0f}{pair}, {found['dispatches_per_admitted'] or 0:.4f} dispatches per admitted")
    for code, count in (*total["rejected"].items(), *total["ended"].items()):
        print(f"  {code:<32} {count:>12,}")
    for outage in found["outages"]:
        print(f"  at {outage['at_s']:,.0f} s: {outage['kind']} {outage['replica']}")
    if total["offered"] and outcome.cpu_s:
        speed, cost_ms = found["makespan_s"] / outcome.cpu_s, 1e3 * outcome.cpu_s / total["offered"]
        print(f"  {outcome.cpu_s:.1f} s of CPU: {speed:,.1f} times real time, {cost_ms:.2f} ms a request")
