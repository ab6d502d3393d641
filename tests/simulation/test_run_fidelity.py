"""Runs in full: the real gateway and every token say the same as the played side; and what both tell about the door."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.test_runs import Listed

from weir.config import CoordinatorConfig
from weir.sim.runs.arrivals import Arrival, drawn_workload
from weir.sim.runs.experiment import Fidelity, RunSpec, simulate
from weir.sim.runs.outages import faults_of, slow_clients_of
from weir.sim.runs.paces import engine_model
from weir.sim.runs.whole_gateway import prompt_of

BOTH = pytest.mark.parametrize("fidelity", list(Fidelity))


def drawn(text: str, faults: tuple[str, ...] = (), replicas: int = 2, **more: Any) -> RunSpec:
    """A drawn workload on a small fleet of real step times, with faults."""
    workload = drawn_workload(text)
    outages, bursts = faults_of(faults, replicas, workload.tenants)
    spec = RunSpec(workload, engine_model("llama3.1-8b/h100_sxm/tp1"), 15.0, replicas, 16, outages=outages, bursts=bursts)
    return replace(spec, slow_clients=slow_clients_of(faults), faults=faults, **more)


def written(fidelity: Fidelity, *requests: Arrival, faults: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """The result of these requests on one replica of 1,000 tokens a second."""
    workload = Listed(requests)
    outages, _ = faults_of(faults, 1, workload.tenants)
    spec = RunSpec(workload, engine_model("flat:1000"), workload.span_s, noise_sigma=0.0, outages=outages, fidelity=fidelity)
    return simulate(replace(spec, coordinator=CoordinatorConfig(group_ms=1), **more), 1)


BUSY = drawn(
    "poisson:25,in=200..2500,out=60~0.8,tenants=big:4/small:1",
    ("kill@3,start=2s", "stall@7,for=2", "noisy@9,for=2,factor=4,tenant=big"),
    fidelity=Fidelity.FULL,
)


# ── the two fidelities ───────────────────────────────────────────────────────────────────────────────────────────────


def test_both_fidelities_tell_the_same_of_a_small_load() -> None:
    """Protects the cheaper fidelity: what it plays is what the real gateway does, so that its figures can be relied on."""
    small = drawn("poisson:15,in=200..2000,out=60~0.8,tenants=4")
    played, full = (simulate(replace(small, fidelity=fidelity), 5)["total"] for fidelity in Fidelity)
    assert full["offered"] == played["offered"] > 150
    assert full["admitted"] == pytest.approx(played["admitted"], rel=0.02)
    assert full["ended"]["completed"] == pytest.approx(played["ended"]["completed"], rel=0.02)
    assert full["tokens"] == pytest.approx(played["tokens"], rel=0.02)
    assert full["ttft_ms"]["p50"] == pytest.approx(played["ttft_ms"]["p50"], abs=2)
    assert full["tpot_ms"]["p50"] == pytest.approx(played["tpot_ms"]["p50"], abs=0.2)


def test_both_fidelities_tell_the_same_of_faults_and_overload() -> None:
    """Protects the same where it is harder: a lost and a stalled replica, a noisy tenant, refusals for the wait."""
    played, full = (simulate(replace(BUSY, fidelity=fidelity), 5)["total"] for fidelity in Fidelity)
    assert sum(full["rejected"].values()) == pytest.approx(sum(played["rejected"].values()), rel=0.1) and played["rejected"]
    assert full["admitted"] == pytest.approx(played["admitted"], rel=0.05)
    assert full["ttft_ms"]["p50"] == pytest.approx(played["ttft_ms"]["p50"], rel=0.1)


def test_a_seed_in_full_gives_the_same_bytes() -> None:
    """Protects repeatability: with tasks, streams, noise and faults, a seed is one run."""
    once, again, other = (json.dumps(simulate(replace(BUSY, duration_s=6.0), seed)) for seed in (7, 7, 8))
    assert once == again != other


def test_a_full_run_counts_every_request_once() -> None:
    """Protects the counts of the real gateway: what it refuses by itself, what was refused, what ended."""
    result = written(
        Fidelity.FULL,
        Arrival(0, "a", 900, 200),
        Arrival(0, "a", 1, 1),
        Arrival(1, "b", 10, 700),
        engine=engine_model("flat:1000,kv=1024"),
    )
    total = result["total"]
    assert total["rejected"] == {"input_too_long": 1} and total["ended"] == {"completed": 2} and total["admitted"] == 2
    assert total["tokens"] == 712 and result["tenants"]["b"]["tpot_ms"]["p50"] == 1.0


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_a_slow_start_has_its_share_of_speed_for_its_time(fidelity: Fidelity) -> None:
    """Protects slow starts: lost at 1 s, ready at 3 s, at half its speed until 13 s, and then as ever."""
    requests = [Arrival(at_s, tenant, 10, 5) for at_s, tenant in ((4.0, "slow"), (14.0, "usual"))]
    result = written(fidelity, *requests, faults=("slow-start@1,start=2,speed=0.5,for=10",))
    assert [result["tenants"][tenant]["ttft_ms"]["p50"] for tenant in ("slow", "usual")] == [2.0, 1.0]
    assert result["outages"] == [{"at_s": 1.0, "kind": "slow-start", "replica": "replica-001"}]
    assert result["dispatches"] == {"replica-002": 2}


@BOTH
def test_a_silent_engine_is_noticed_and_replaced(fidelity: Fidelity) -> None:
    """Protects against silence: what runs fails after the bound, its stop is not confirmed, a replacement serves."""
    requests = Arrival(0.9, "a", 10, 500), Arrival(59.0, "a", 10, 5)
    result = written(fidelity, *requests, faults=("stall@1,for=1h",), start_s=5.0)
    assert result["total"]["ended"] == {"completed": 1, "failed/stalled": 1}
    assert result["dispatches"] == {"replica-001": 1, "replica-002": 1}


def test_slow_clients_hold_their_streams_and_may_lose_them() -> None:
    """Protects slow readers: a share of clients that reads slower than produced is cut after the grace, the others are not."""
    workload = "poisson:1,in=100,out=1000,tenants=2"
    slow, patient = (
        simulate(drawn(workload, faults, fidelity=Fidelity.FULL), 1)["total"]["ended"]
        for faults in (("slow-clients@0,for=1h,share=0.5,rate=200",), ())
    )
    assert set(patient) == {"completed"}
    assert 0 < slow["cancelled/slow_client"] < sum(slow.values()) and slow["completed"] > 0


def test_a_stream_that_is_read_too_slowly_pauses_its_engine() -> None:
    """Protects backpressure in a run: a stream whose reader is far behind goes on at the reader's pace, and completes."""
    slow = slow_clients_of(["slow-clients@0,share=1,rate=80000"])
    request = Arrival(0.0, "a", 10, 20_000)
    total = written(Fidelity.FULL, request, slow_clients=slow, engine=engine_model("flat:4000"))["total"]
    assert total["ended"] == {"completed": 1} and total["tokens"] == 20_010
    assert total["tpot_ms"]["p50"] > 1.5 / 4  # of the 1 / 4 ms in which the engine makes one


# ── what prompts share ───────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
@pytest.mark.parametrize("affinity", [True, False])
def test_recorded_beginnings_are_cached_for_their_tenant_alone(fidelity: Fidelity, affinity: bool) -> None:
    """Protects prefixes: the second request of a tenant finds the recorded blocks, another tenant's finds none of them."""
    who = ((0.0, "a"), (1.0, "a"), (2.0, "b"))
    requests = [Arrival(at_s, tenant, 1_100, 5, (7, 8)) for at_s, tenant in who]
    tenants = written(fidelity, *requests, affinity=affinity)["tenants"]
    assert [tenants[name]["cached_input_tokens"] for name in ("a", "b")] == [1_024, 0]


def test_prompts_have_their_length_and_share_what_is_recorded() -> None:
    """Protects played prompts: four bytes a token, equal as far as their blocks are, and each its own behind them."""
    one, other = (prompt_of(Arrival(0.0, "a", 1_500, 1, (3, 4)), number) for number in (1, 2))
    assert len(one) == len(other) == 6_000 and one[:4_096] == other[:4_096] and one != other
    assert len(prompt_of(Arrival(0.0, "a", 100, 1, (3, 4)), 1)) == 400 and len(prompt_of(Arrival(0.0, "a", 1, 1), 123_456)) == 4


# ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_who_is_refused_or_admitted_in_vain_is_counted(fidelity: Fidelity) -> None:
    """Protects the measures of the door: per tenant and in all, bounded by what was refused and admitted."""
    loaded = drawn("poisson:30,in=1000,out=100,tenants=flood:9/quiet:1", replicas=1, fidelity=fidelity)
    result = simulate(replace(loaded, coordinator=CoordinatorConfig(queue_wait_ms=1_500)), 3)
    total, parts = result["total"], [part["door"] for part in result["tenants"].values()]
    door, refused = total["door"], total["rejected"]["queue_wait_exceeded"]
    assert 0 < door["wrongly_refused"]["requests"] <= refused
    assert door["wrongly_refused"]["requests"] == sum(part["wrongly_refused"]["requests"] for part in parts)
    assert door["wrongly_refused"]["offered"] == pytest.approx(door["wrongly_refused"]["requests"] / total["offered"], abs=1e-6)
    assert door["wrongly_admitted"]["requests"] == total["ended"].get("expired/queue_wait", 0)
    assert door["waits_foreseen"] > 50 and 0 < door["wait_error_ms"]["p50"] <= door["wait_error_ms"]["p95"] < 5_000


@BOTH
def test_a_deadline_allows_the_wait_that_is_left_of_it(fidelity: Fidelity) -> None:
    """Protects refusals for a deadline: they too are judged, and who meets a deadline without output was admitted in vain."""
    loaded = drawn("poisson:40,in=1000,out=200,tenants=2", replicas=1, fidelity=fidelity, deadline_ms=2_500)
    total = simulate(loaded, 3)["total"]
    refused = total["rejected"]["deadline_unmeetable_now"]
    assert 0 < total["door"]["wrongly_refused"]["requests"] <= sum(total["rejected"].values()) and refused > 0
    assert total["door"]["wrongly_admitted"]["requests"] <= total["ended"]["expired/deadline"]
