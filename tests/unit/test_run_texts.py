"""The texts that describe a run mean what they say, and a wrong one is refused with the accepted range."""

import math
from itertools import islice, pairwise
from random import Random
from statistics import fmean, median, pstdev

import pytest

from weir import errors
from weir.engines.simulated_batch import Step
from weir.engines.step_time import step_time
from weir.sim.runs.arrivals import Arrival, Burst, DrawnWorkload, drawn_workload, with_burst
from weir.sim.runs.outages import Outage, OutageKind, SlowClients, faults_of, slow_clients_of
from weir.sim.runs.paces import engine_model, warmed_up
from weir.sim.runs.terms import number, seconds, whole

TENANTS = ("a", "b")


def some(workload: DrawnWorkload, requests: int = 4_000) -> list[Arrival]:
    """The first requests."""
    return list(islice(workload.arrivals(Random(1)), requests))


# ── workloads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_poisson_workload_has_its_rate_lengths_and_tenants() -> None:
    """Protects synthetic load: rate, variation, drawn lengths and weighted tenants are as asked for."""
    workload = drawn_workload("poisson:50,in=100..300,out=80~0.5,tenants=a:3/b:1")
    assert workload.tenants == TENANTS and workload.span_s is None
    drawn = some(workload)
    gaps = [after.at_s - before.at_s for before, after in pairwise(drawn)]
    assert fmean(gaps) == pytest.approx(0.02, rel=0.1) and pstdev(gaps) / fmean(gaps) == pytest.approx(1, abs=0.1)
    assert {100, 300} <= {arrival.input_tokens for arrival in drawn} <= set(range(100, 301))
    assert median(arrival.output_tokens for arrival in drawn) == pytest.approx(80, rel=0.1)
    assert sum(arrival.tenant == "a" for arrival in drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert drawn == some(workload)


def test_gaps_vary_as_asked() -> None:
    """Protects bursty load: cv is the coefficient of variation of the gaps."""
    drawn = some(drawn_workload("poisson:10,cv=4,tenants=2"), 20_000)
    gaps = [after.at_s - before.at_s for before, after in pairwise(drawn)]
    assert fmean(gaps) == pytest.approx(0.1, rel=0.1) and pstdev(gaps) / fmean(gaps) == pytest.approx(4, rel=0.15)
    assert {arrival.input_tokens for arrival in drawn} == {2_000} and {arrival.tenant for arrival in drawn} == {
        "tenant-1",
        "tenant-2",
    }


@pytest.mark.parametrize(("factor", "expected"), [(3.0, 3.0), (2.5, 2.5), (0.25, 0.25), (0.0, 0.0)])
def test_a_burst_scales_one_tenant_for_its_time(factor: float, expected: float) -> None:
    """Protects bursts and the noisy neighbour: more of one tenant's requests, still in order; the others as before."""
    plain = list(islice(drawn_workload("poisson:100,tenants=a:1/b:1").arrivals(Random(2)), 4_000))
    burst = list(with_burst(plain, Burst(10.0, 20.0, factor, "a"), Random(3)))

    def number_of(arrivals: list[Arrival], tenant: str, first: float, last: float) -> int:
        return sum(arrival.tenant == tenant and first <= arrival.at_s < last for arrival in arrivals)

    assert [arrival.at_s for arrival in burst] == sorted(arrival.at_s for arrival in burst)
    assert [arrival for arrival in burst if arrival.tenant == "b"] == [arrival for arrival in plain if arrival.tenant == "b"]
    assert number_of(burst, "a", 10, 31) / number_of(plain, "a", 10, 31) == pytest.approx((20 * expected + 1) / 21, abs=0.15)
    assert number_of(burst, "a", 0, 10) == number_of(plain, "a", 0, 10)


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_engines_take_the_time_that_their_text_says() -> None:
    """Protects step times: rows as calibrated, linear by its formula, flat by its rate, with the memory asked for."""
    step = Step(12.5, (1, 2, 3), ((4, 100),))
    assert engine_model("flat:2000").pace(step) == 2.0
    assert engine_model("demo").pace(step) == 12.5
    linear = engine_model("linear:a=6,b=0.5,c=0.001,d=0.02").step_time
    assert linear.milliseconds(3, 100, 5_000, 7.0) == pytest.approx(6 + 1.5 + 5 + 2)
    assert engine_model("demo,preset=conserv").step_time == step_time("demo", "conserv")
    small = engine_model("llama3.1-8b/h100_sxm/tp1,kv=10_000,step=512").step_time.row
    assert (small.kv_tokens, small.step_tokens_max) == (10_000, 512)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_faults_are_read_with_their_times() -> None:
    """Protects faults: kinds, times with units, replicas and defaults."""
    texts = ["kill@90,replica=2,start=5m", "stall@1.5m", "burst@10s,for=1m,factor=5,tenant=b", "kill@0"]
    outages, bursts = faults_of(texts, 2, TENANTS)
    assert [(outage.kind, outage.at_s, outage.replica, outage.for_s, outage.start_s) for outage in outages] == [
        (OutageKind.KILL, 90.0, 2, 0.0, 300.0),
        (OutageKind.STALL, 90.0, None, 10.0, None),
        (OutageKind.KILL, 0.0, None, 0.0, None),
    ]
    assert bursts == (Burst(10.0, 60.0, 5.0, "b"),)


def test_a_slow_start_a_noisy_tenant_and_slow_clients_are_read() -> None:
    """Protects the other faults: how slow and how long a replacement is, whose requests multiply, who reads slowly."""
    texts = [
        "slow-start@60,start=2m,speed=0.25,for=30",
        "slow-start@5",
        "noisy@9,tenant=a",
        "slow-clients@3,share=0.5,rate=80,for=4",
    ]
    outages, bursts = faults_of(texts, 2, TENANTS)
    assert outages == (
        Outage(OutageKind.SLOW_START, 60.0, None, 30.0, 120.0, 0.25),
        Outage(OutageKind.SLOW_START, 5.0, None, 60.0, None, 0.5),
    )
    assert bursts == faults_of(["burst@9,tenant=a"], 2, TENANTS)[1]
    (slow,) = slow_clients_of(texts)
    assert slow == SlowClients(3.0, 4.0, 0.5, 80)
    assert [slow.covers(Arrival(at_s, "a", 1, 1)) for at_s in (2.9, 3.0, 6.9, 7.0)] == [False, True, True, False]


# ── what is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        *["", "poisson", "poisson:0", "poisson:nan", "poisson:1e9", "uniform:3", "poisson:5,in=0", "poisson:5,in=9..2"],
        *["poisson:5,in=5~9", "poisson:5,cv=0", "poisson:5,tenants=0", "poisson:5,tenants=a:1/a:2", "poisson:5,tenants=:1"],
        *["poisson:5,color=red", "poisson:5,in", "poisson:5,in=1,in=2", "poisson:5,out=1_000_001", "poisson:5,tenants=a:-1"],
    ],
)
def test_a_wrong_workload_is_refused(text: str) -> None:
    """Protects people from a run that is not what they meant."""
    with pytest.raises(errors.InvalidRequest, match="takes") as refusal:
        drawn_workload(text)
    assert refusal.value.members["field"].startswith("--workload")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "flat",
        "flat:0",
        "flat:-1",
        "flat:5,a=1",
        "linear",
        "linear:a=0",
        "linear:a=1,e=1",
        "nothing",
        "demo,preset=x",
        "demo,kv=3",
    ],
)
def test_a_wrong_engine_is_refused(text: str) -> None:
    """Protects people from step times that are none; an unknown row is answered with the known ones."""
    with pytest.raises(errors.InvalidRequest, match="--engine"):
        engine_model(text)


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "kill",
            "kill@",
            "kill@x",
            "kill@-1",
            "kill@5,replica=0",
            "kill@5,replica=3",
            "kill@5,for=1",
            "kill:2@5",
            "melt@5",
        ],
        *[
            "stall@5,start=1",
            "stall@5,for=x",
            "burst@5,factor=-1",
            "burst@5,tenant=c",
            "burst@5,replica=1",
            "kill@5,replica=1.5",
        ],
        *["slow-start@5,speed=0", "slow-start@5,factor=2", "noisy@5", "noisy@5,tenant=c", "slow-clients@x"],
    ],
)
def test_a_wrong_fault_is_refused(text: str) -> None:
    """Protects people from a fault that would not happen."""
    with pytest.raises(errors.InvalidRequest, match="--fault"):
        faults_of([text], 2, TENANTS)


@pytest.mark.parametrize("text", ["slow-clients@5,share=2", "slow-clients@5,rate=0", "slow-clients@5,factor=2", "melt@5"])
def test_wrong_slow_clients_are_refused(text: str) -> None:
    """Protects people from clients that would read as ever."""
    with pytest.raises(errors.InvalidRequest, match="--fault"):
        slow_clients_of([text])


def test_numbers_have_ranges() -> None:
    """Protects every numeric option: in range as it is, else refused with the range."""
    assert (number("x", "1e1", 0, 10), whole("x", "1_000", 0, 1_000), seconds("x", "1.5h")) == (10.0, 1_000, 5_400.0)
    for wrong in ("", "inf", "11", "-1", "ten", str(math.nan)):
        with pytest.raises(errors.InvalidRequest, match="from 0 to 10"):
            number("x", wrong, 0, 10)
        with pytest.raises(errors.InvalidRequest, match="from 0 to 10"):
            whole("x", wrong, 0, 10)
    for wrong in ("", "5d", "-1s", "s", "999h9", "99999h"):
        with pytest.raises(errors.InvalidRequest, match="like 90, 90s, 15m or 1h"):
            seconds("x", wrong)


@pytest.mark.parametrize(
    ("engine", "first_ms", "input_ms", "output_ms"),
    [("linear:a=5,b=2,c=0,d=0.1", 5.0, 0.1, 7.0), ("flat:1000", 1.0, 0.0, 1.0), ("linear:a=5,b=2,d=0.1,kv=64", 5.0, 0.1, 7.0)],
)
def test_a_warm_up_measures_an_idle_replica(engine: str, first_ms: float, input_ms: float, output_ms: float) -> None:
    """Protects the prior that placement starts from: a short and a long prompt tell the parts of a step's time."""
    pace = warmed_up(engine_model(engine))
    assert (pace.first_ms, pace.input_ms, pace.output_ms) == pytest.approx((first_ms, input_ms, output_ms))
