"""Two measurements on recorded traces, for `benchmarks.scheduling`: a noisy neighbour, and prompts that replicas still hold.

The noisy neighbour: one tenant of an hour asks for most of it. The fleet is the smallest one on which the others, alone, take
at most 70 % of its limit; then the noisy one's requests are repeated until both together ask for one and a half times that
limit. The limit is the highest rate at which every workload class meets its targets; what each part takes of it is measured
alone.

Prompts that replicas still hold: conversations whose prompts begin as earlier ones did, the coordinator told of it or not.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.fleet_runs import EIGHT_B, PATIENT, PATIENT_MS, Row, run
from weir.config import CoordinatorConfig
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES
from weir.sim.runs.arrivals import Burst, Workload
from weir.sim.runs.experiment import RunSpec
from weir.sim.runs.mixtures import Chosen, Faster
from weir.sim.runs.paces import engine_model
from weir.sim.runs.policies import Policy
from weir.sim.runs.traces import TraceWorkload, trace_workload

NOISY_HOUR, NOISY = "servegen_m-large_1h_30rps_noisy", "57"
SEARCHED_S, NOISY_SEARCHED_S, SHOWN_S = 600.0, 60.0, 600.0
LIMIT_SHARE, DEMAND = 0.7, 1.5
REPLICAS_MAX = 8
LANES = 256
"""Of a replica: as many sequences as an engine runs on such a GPU unless told otherwise. With few, long answers fill them."""
THRIFTY_PERCENT = 300
"""Of the default backlog: steps are filled better, and whoever comes waits longer for the next one."""
LOST_MAX = 0.01
"""Of what was offered: refused at the door, or not completed."""
DOUBLINGS, HALVINGS = 5, 4
"""A limit is found between two powers of two, to 4 %."""
COUNTED_REQUESTS = 100
"""Of a tenant that counts as the worst: with fewer, a 95th percentile is one request."""

CONVERSATIONS, CONVERSATION_RATES = "mooncake_conversation", ((1.0, 3, (1,)), (6.25, 17, (1, 2, 3)))
"""Times the recorded rate, and replicas: about what the fleet can do when it is told nothing. And seeds: so near its limit the
noise of steps alone moves a 90th percentile by a third.
"""


def meets(document: dict[str, Any]) -> bool:
    """Whether every workload class has its p95 within its targets, and nearly everything offered was completed."""
    total = document["total"]
    if total["ended"].get("completed", 0) < (1 - LOST_MAX) * total["offered"]:
        return False
    targets = {row.name: row for row in DEFAULT_WORKLOAD_CLASSES}
    return all(
        part["ttft_ms"]["p95"] <= targets[name].ttft_target_ms
        and (part["tpot_ms"] is None or part["tpot_ms"]["p95"] <= targets[name].tpot_target_ms)
        for name, part in document["classes"].items()
    )


def highest(spec_at: Callable[[float], RunSpec]) -> float:
    """The highest factor of a load, ≥ 1, that meets the targets: doubled until it does not, then halved in between."""
    low = 1.0
    for _ in range(DOUBLINGS):
        if not meets(run(spec_at(2 * low))):
            break
        low *= 2
    ratio = 2.0
    for _ in range(HALVINGS):
        ratio **= 0.5
        if meets(run(spec_at(low * ratio))):
            low *= ratio
    return low


# ── a noisy neighbour ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NoisyHour:
    """The trace, and its tenants but the noisy one."""

    trace: TraceWorkload
    others: tuple[str, ...]

    def alone_at(self, replicas: int, factor: float) -> RunSpec:
        """The others' first minutes in less time."""
        workload = Faster(Chosen(self.trace, self.others), factor)
        return RunSpec(workload, engine_model(EIGHT_B), SEARCHED_S / factor, replicas, LANES)

    def noise_at(self, replicas: int, factor: float) -> RunSpec:
        """The noisy tenant's first minutes, each request so many times."""
        workload: Workload = Chosen(self.trace, (NOISY,))
        bursts = (Burst(0, NOISY_SEARCHED_S, factor),)
        return RunSpec(workload, engine_model(EIGHT_B), NOISY_SEARCHED_S, replicas, LANES, bursts=bursts)

    def smallest_fleet(self) -> int:
        """The fewest replicas whose limit the others do not come near."""
        return next(
            (count for count in range(1, REPLICAS_MAX) if meets(run(self.alone_at(count, 1 / LIMIT_SHARE)))), REPLICAS_MAX
        )


def noisy_hour(folder: Path) -> NoisyHour:
    """The hour as it was recorded."""
    trace = trace_workload(Path(NOISY_HOUR), folder)
    return NoisyHour(trace, tuple(name for name in trace.tenants if name != NOISY))


def noisy_rows(folder: Path, pool: Executor) -> tuple[list[Row], str]:
    """The rows, and how their fleet and load were found."""
    hour = noisy_hour(folder)
    replicas = pool.submit(hour.smallest_fleet).result()
    searches = [pool.submit(highest, partial(at, replicas)) for at in (hour.alone_at, hour.noise_at)]
    limit, noise_limit = (search.result() for search in searches)
    factor = (DEMAND - 1 / limit) * noise_limit
    alone = RunSpec(Chosen(hour.trace, hour.others), engine_model(EIGHT_B), SHOWN_S, replicas, LANES)
    noisy = replace(alone, workload=hour.trace, bursts=(Burst(0, SHOWN_S, factor, NOISY),))
    title = f"noisy hour, {replicas} replica{'s' if replicas > 1 else ''}"
    rows = [Row(title, "the others alone", alone, lambda document: others_told(document["total"], document))]
    for policy in Policy:
        spec = replace(noisy, policy=policy)
        aspect = f"with the noisy one, {policy.value}"
        rows.append(Row(title, aspect, spec, lambda document: others_told(document["all_but_largest"], document)))
    thrifty = replace(noisy, coordinator=CoordinatorConfig(backlog_percent=THRIFTY_PERCENT))
    aspect = f"with the noisy one, fair, backlog {THRIFTY_PERCENT} %"
    rows.append(Row(title, aspect, thrifty, lambda document: others_told(document["all_but_largest"], document)))
    return rows, (
        f"noisy hour: the others meet their targets up to {limit:.2f} times their rate, the noisy tenant alone up to "
        f"{noise_limit:.2f} times; its requests come {factor:.2f} times, together {DEMAND} times the limit"
    )


def others_told(part: dict[str, Any], document: dict[str, Any]) -> str:
    """What the tenants but the noisy one saw, and the worst of those who asked often."""
    tenants = {
        name: slice_["ttft_ms"]["p95"]
        for name, slice_ in document["tenants"].items()
        if name != NOISY and slice_["offered"] >= COUNTED_REQUESTS
    }
    worst = max(tenants, key=tenants.__getitem__)
    return (
        f"others: TTFT p95 {part['ttft_ms']['p95']:,.0f} ms (worst tenant {tenants[worst]:,.0f}), "
        f"TPOT p95 {part['tpot_ms']['p95']:.1f} ms, goodput {part['goodput']['offered']:.1%}"
    )


# ── prompts that replicas still hold ─────────────────────────────────────────────────────────────────────────────────


def conversation_rows(folder: Path) -> Iterator[Row]:
    """Told how prompts begin, and not."""
    trace = trace_workload(Path(CONVERSATIONS), folder)
    for factor, replicas, seeds in CONVERSATION_RATES:
        workload = Faster(trace, factor)
        spec = RunSpec(workload, engine_model(EIGHT_B), workload.span_s or 0.0, replicas, coordinator=PATIENT)
        spec = replace(spec, deadline_ms=PATIENT_MS)
        title = f"conversations at {factor:g} times their rate, {replicas} replicas"
        for seed, affinity in product(seeds, (True, False)):
            aspect = f"{'with affinity' if affinity else 'without'}, seed {seed}"
            yield Row(title, aspect, replace(spec, affinity=affinity), hits_told, seed)


def hits_told(document: dict[str, Any]) -> str:
    """How fast, and how much of the prompts was not computed."""
    total = document["total"]
    share = total["cached_input_tokens"] / sum(document["windows"]["input_tokens"])
    ttft = total["ttft_ms"]
    return f"{document['tokens_per_s']:,.0f} tok/s, TTFT p50 {ttft['p50']:,.0f}, p90 {ttft['p90']:,.0f} ms, {share:.1%} cached"
