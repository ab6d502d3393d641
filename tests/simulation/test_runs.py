"""Simulated runs: a seed gives the same bytes again, small cases come out as arithmetic says, and failures leave nothing."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from weir.config import CoordinatorConfig
from weir.sim.runs.arrivals import Arrival, Workload, drawn_workload
from weir.sim.runs.experiment import RunSpec, simulate
from weir.sim.runs.outages import faults_of
from weir.sim.runs.paces import engine_model
from weir.sim.runs.parallel import run_seeds
from weir.sim.runs.policies import Policy

PROMPT_JOURNAL = CoordinatorConfig(group_ms=1)


@dataclass(frozen=True, slots=True)
class Listed:
    """These requests and no others."""

    requests: tuple[Arrival, ...]
    label: str = "listed"

    @property
    def span_s(self) -> float:
        """Until the last one."""
        return self.requests[-1].at_s

    @property
    def tenants(self) -> tuple[str, ...]:
        """Who asks."""
        return tuple(sorted({request.tenant for request in self.requests}))

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """As listed."""
        return iter(self.requests)


def exact(*requests: tuple[float, str, int, int], engine: str = "flat:1000", **more: Any) -> dict[str, Any]:
    """The result of these requests on a replica without noise."""
    workload = Listed(tuple(Arrival(*request) for request in requests))
    defaults: dict[str, Any] = {"duration_s": workload.span_s, "noise_sigma": 0.0, "coordinator": PROMPT_JOURNAL}
    return simulate(RunSpec(workload, engine_model(engine), **defaults | more), 1)


def drawn(text: str, faults: tuple[str, ...] = (), replicas: int = 2, **more: Any) -> RunSpec:
    """A drawn workload on a small fleet of real step times, with faults."""
    workload: Workload = drawn_workload(text)
    outages, bursts = faults_of(faults, replicas, workload.tenants)
    engine = engine_model("llama3.1-8b/h100_sxm/tp1")
    spec = RunSpec(workload, engine, 20.0, replicas, outages=outages, bursts=bursts, faults=faults)
    return replace(spec, **more)


BUSY = drawn(
    "poisson:30,in=200..3000,out=60~0.8,tenants=big:4/small:1",
    ("kill@4,start=3s", "stall@9,for=2", "burst@12,for=2,factor=4,tenant=big"),
    concurrency=16,
)


# ── the same again ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    """Protects that results can be compared and repeated, with noise, faults and bursts, also in another process."""
    once, again = (json.dumps(simulate(BUSY, 7)) for _ in range(2))
    assert once == again
    reported: list[tuple[int, float]] = []
    elsewhere = run_seeds(BUSY, [8, 7], lambda place, share: reported.append((place, share)))
    assert [json.dumps(outcome.document) == once for outcome in elsewhere] == [False, True]
    assert [outcome.document["seed"] for outcome in elsewhere] == [8, 7] and all(outcome.cpu_s > 0 for outcome in elsewhere)
    assert {place for place, _ in reported} == {0, 1}


def test_every_request_is_counted_once() -> None:
    """Protects the counts: offered is rejected plus admitted, admitted is what ended, parts sum to the total."""
    result = simulate(BUSY, 3)
    total = result["total"]
    assert total["offered"] == total["admitted"] + sum(total["rejected"].values()) > 400
    assert total["admitted"] == sum(total["ended"].values())
    for parts in (result["classes"], result["tenants"]):
        assert sum(part["offered"] for part in parts.values()) == total["offered"]
        assert sum(part["tokens"] for part in parts.values()) == total["tokens"]
    windows = result["windows"]
    assert sum(windows["input_tokens"]) + sum(windows["output_tokens"]) == total["tokens"]
    assert result["tenants"]["big"]["offered"] > 2 * result["tenants"]["small"]["offered"]
    assert [outage["kind"] for outage in result["outages"]] == ["kill", "stall"]
    assert len(result["dispatches"]) == 3


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_request_alone_takes_what_the_rate_says() -> None:
    """Protects times: at 1,000 tokens a second five tokens come a millisecond apart, the first after one."""
    result = exact((1.0, "a", 100, 5))
    total = result["total"]
    assert (total["ttft_ms"]["p50"], total["tpot_ms"]["p50"], total["queue_wait_ms"]["p50"]) == (1.0, 1.0, 0.0)
    assert result["makespan_s"] == 0.005 and total["tokens"] == 105 and result["tokens_per_s"] == 21_000.0
    assert total["goodput"] == {"requests": 1, "offered": 1.0, "admitted": 1.0}


def test_two_requests_share_the_rate_while_both_run() -> None:
    """Protects times in a batch: steps of two tokens take two milliseconds, the rest of the longer one goes alone."""
    tenants = exact((1.0, "a", 10, 3), (1.0, "b", 10, 5))["tenants"]
    assert (tenants["a"]["ttft_ms"]["p50"], tenants["a"]["tpot_ms"]["p50"]) == (2.0, 2.0)
    assert (tenants["b"]["ttft_ms"]["p50"], tenants["b"]["tpot_ms"]["p50"]) == (2.0, 1.5)


def test_a_linear_step_time_is_a_plus_b_c_d() -> None:
    """Protects the linear engine: 5 + 0.1·100 ms of prefill, then 5 + 2 + 0.01·context for each further token."""
    total = exact((0.0, "a", 100, 3), engine="linear:a=5,b=2,c=0.01,d=0.1")["total"]
    assert total["ttft_ms"]["p50"] == 15.0
    assert total["tpot_ms"]["p50"] == round((8.01 + 8.02) / 2, 3)


def test_who_finds_the_only_lane_taken_waits_for_it() -> None:
    """Protects queue wait and dispatches: the second starts when the first has ended."""
    result = exact((1.0, "a", 10, 3), (1.0, "b", 10, 4), concurrency=1)
    second = result["tenants"]["b"]
    assert (second["queue_wait_ms"]["p50"], second["ttft_ms"]["p50"], second["tpot_ms"]["p50"]) == (3.0, 4.0, 1.0)
    assert result["dispatches"] == {"replica-001": 2} and result["dispatches_per_admitted"] == 1.0


def test_output_waits_until_it_is_booked() -> None:
    """Protects the fidelity of TTFT: what the next group books 30 ms later leaves then, though the engine had it."""
    tenants = exact((1.0, "a", 10, 3), (1.01, "b", 10, 100), coordinator=CoordinatorConfig(group_ms=40))["tenants"]
    assert tenants["a"]["ttft_ms"]["p50"] == 1.0
    assert tenants["b"]["ttft_ms"]["p50"] == 30.0


def test_long_outputs_are_booked_in_steps() -> None:
    """Protects delivery steps: 700 tokens leave at the engine's pace, and their tokens are counted once."""
    total = exact((0.0, "a", 10, 700), max_output_tokens=2_000)["total"]
    assert total["tokens"] == 710 and total["tpot_ms"]["p50"] == 1.0 and total["ended"] == {"completed": 1}


def test_what_no_replica_can_hold_is_refused() -> None:
    """Protects the window: input and output beyond the KV memory never reach a replica."""
    total = exact((0.0, "a", 900, 200), (0.0, "a", 800, 200), engine="flat:1000,kv=1024")["total"]
    assert total["rejected"] == {"input_too_long": 1} and total["ended"] == {"completed": 1}


def test_a_deadline_ends_what_runs() -> None:
    """Protects deadlines: whoever is late ends then, and its lane is free for the next."""
    result = exact((0.0, "a", 10, 500), (1.0, "a", 10, 50), concurrency=1, deadline_ms=200)
    assert result["total"]["ended"] == {"completed": 1, "expired/deadline": 1}
    assert result["total"]["goodput"]["admitted"] == 0.5


def test_what_a_replica_still_holds_is_not_computed_again() -> None:
    """Protects prefixes in a run: a tenant's second turn takes a step less for each block found, another tenant's does not."""
    blocks = (0, 1, 2)
    first, again = Arrival(0.0, "a", 1_536, 2, blocks), Arrival(10.0, "a", 1_700, 2, (*blocks, 3))
    workload = Listed((first, again, again._replace(at_s=20.0, tenant="b")))
    spec = RunSpec(workload, engine_model("linear:a=10,d=1"), 20.0, noise_sigma=0.0, coordinator=PROMPT_JOURNAL)
    tenants = simulate(spec, 1)["tenants"]
    assert (tenants["a"]["cached_input_tokens"], tenants["b"]["cached_input_tokens"]) == (1_536, 0)
    assert tenants["a"]["ttft_ms"]["p50"] == 10.0 + 1_700 - 1_536 and tenants["b"]["ttft_ms"]["p50"] == 1_710.0
    assert tenants["a"]["tokens"] == 1_538 + 1_702


def test_sessions_go_where_their_beginning_is_held() -> None:
    """Protects affinity, and the comparison without it: turns of several sessions find what they left, told of it or not."""
    turns = [
        Arrival(
            turn + session / 10, f"s{session}", 4_000 + 500 * turn, 20, tuple(range(100 * session, 100 * session + 8 + turn))
        )
        for turn in range(6)
        for session in range(7)
    ]
    spec = RunSpec(Listed(tuple(turns)), engine_model("llama3.1-8b/h100_sxm/tp1"), 10.0, 4)
    found, blind = (simulate(replace(spec, affinity=told), 1)["total"]["cached_input_tokens"] for told in (True, False))
    most = 7 * 512 * (8 + 9 + 10 + 11 + 12)
    assert 0.95 * most < found <= most and blind < 0.8 * most


def test_the_others_are_shown_without_whoever_asks_most() -> None:
    """Protects what a noisy neighbour is judged by: everybody else's figures, pooled."""
    result = exact((1.0, "a", 10, 3), (1.0, "b", 10, 4), (5.0, "b", 10, 4), (9.0, "c", 10, 2))
    rest = result["all_but_largest"]
    assert (rest["largest"], rest["offered"], rest["tokens"]) == ("b", 2, 25)


# ── what fails ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_kill_before_the_first_output_is_made_up_for_elsewhere() -> None:
    """Protects the one retry: what was in prefill on the lost replica completes on the other one."""
    outages, _ = faults_of(["kill@0.05"], 2, ("a",))
    result = exact((0.0, "a", 100, 3), engine="linear:a=10,d=1", replicas=2, outages=outages)
    assert result["retries"] == 1 and result["total"]["ended"] == {"completed": 1}
    assert result["total"]["ttft_ms"]["p50"] == 50.0 + 110.0
    assert result["dispatches"] == {"replica-001": 1, "replica-002": 1} and result["dispatches_per_admitted"] == 2.0


def test_a_kill_in_the_middle_leaves_nothing_behind() -> None:
    """Protects holds and lanes: a run ends by checking that none is left; what had delivered fails, a replacement serves."""
    result = simulate(drawn("poisson:20,in=500,out=200", ("kill@5,replica=1,start=2",), replicas=1, concurrency=16), 1)
    total = result["total"]
    assert total["ended"]["failed/replica_lost"] > 0 and total["rejected"]["no_capacity"] > 0
    assert set(result["dispatches"]) == {"replica-001", "replica-002"}
    assert result["outages"] == [{"at_s": 5.0, "kind": "kill", "replica": "replica-001"}]


def test_a_stall_that_does_not_end_is_noticed_and_the_replica_replaced() -> None:
    """Protects against a silent engine: its runs fail after the bound, its stop is not confirmed, a replacement serves."""
    outages, _ = faults_of(["stall@1,for=1h"], 1, ("a",))
    spec: dict[str, Any] = {"outages": outages, "start_s": 5.0, "duration_s": 60.0}
    result = exact((0.9, "a", 10, 500), (59.0, "a", 10, 5), **spec)
    assert result["total"]["ended"] == {"completed": 1, "failed/stalled": 1}
    assert result["dispatches"] == {"replica-001": 1, "replica-002": 1}


def test_a_stall_that_ends_costs_its_time() -> None:
    """Protects short stalls: the run goes on where it was."""
    outages, _ = faults_of(["stall@1.0025,for=3"], 1, ("a",))
    result = exact((1.0, "a", 10, 5), outages=outages)
    assert result["total"]["ended"] == {"completed": 1} and result["makespan_s"] == pytest.approx(3.0045, abs=0.001)


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fair_order_keeps_a_quiet_tenant_ahead_of_a_flood() -> None:
    """Protects the comparison of policies: beside a flood the quiet tenant waits half as long as first come, first served."""
    noisy = drawn("poisson:40,in=1000,out=100,tenants=flood:19/quiet:1", replicas=1, concurrency=8)
    fair, fcfs = (simulate(replace(noisy, policy=policy), 2) for policy in (Policy.FAIR, Policy.FCFS))
    waits = [result["tenants"]["quiet"]["queue_wait_ms"]["p50"] for result in (fair, fcfs)]
    assert waits[0] < waits[1] / 2
    assert fair["tenants"]["flood"]["offered"] == fcfs["tenants"]["flood"]["offered"]
