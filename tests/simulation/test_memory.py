"""Runs in which KV memory is what is short: reservations keep engines from preempting, and large requests have their turn."""

from typing import Any

import msgspec
import pytest
from tests.simulation.test_runs import Listed

from weir.config import CoordinatorConfig
from weir.coordinator.fleet import Fleet
from weir.engines.simulated_batch import SimulatedBatch
from weir.messages import ReplicaAddress
from weir.sim.runs.arrivals import Arrival
from weir.sim.runs.experiment import RunSpec, _Experiment, _Stage
from weir.sim.runs.figures import Figures
from weir.sim.runs.keeper import Noise
from weir.sim.runs.paces import engine_model
from weir.sim.runs.stepper import SteppedReplica
from weir.sim.virtual_loop import VirtualLoop, run

SECONDS = 20
KV_TOKENS = 20_480
"""Two large requests and a few small ones."""
LARGE = [Arrival(0.5 + 2.5 * number, "large", 8_000, 200) for number in range(8)]
SMALL = [Arrival(number / 12, f"small-{number % 3}", 200, 200 + number % 7 * 60) for number in range(12 * SECONDS)]
PATIENT = CoordinatorConfig(queue_wait_ms=10_000)


class _Watched(_Experiment):
    """A run whose replicas are kept in sight. says_memory: whether the fleet is told how much each of them has."""

    says_memory = True

    def _schedule(self, loop: VirtualLoop, fleet: Fleet, figures: Figures) -> _Stage:
        stage = super()._schedule(loop, fleet, figures)
        self.batches: list[SimulatedBatch] = []
        make = stage.keeper._make

        def made(address: ReplicaAddress, noise: Noise) -> SteppedReplica:
            told = address if self.says_memory else msgspec.structs.replace(address, kv_tokens=None)
            replica: SteppedReplica = make(told, noise)
            self.batches.append(replica._batch)
            return replica

        stage.keeper._make = made
        return stage


class _Silent(_Watched):
    """Its replicas do not say how much memory they have."""

    says_memory = False


def played(kind: type[_Watched]) -> tuple[dict[str, Any], int]:
    """The result, and how often an engine had to preempt."""
    engine = engine_model(f"llama3.1-8b/h100_sxm/tp1,kv={KV_TOKENS}")
    requests = tuple(sorted(LARGE + SMALL))
    experiment = kind(RunSpec(Listed(requests), engine, SECONDS, concurrency=64, coordinator=PATIENT), 1, lambda share: None)
    result = run(experiment.live(), until_ms=3_600_000)
    return result, sum(batch.preemptions for batch in experiment.batches)


@pytest.fixture(scope="module")
def reserved() -> tuple[dict[str, Any], int]:
    """The run with reservations."""
    return played(_Watched)


def test_large_requests_are_served_beside_small_ones(reserved: tuple[dict[str, Any], int]) -> None:
    """Protects tenants of large requests: each has its turn in time, though small ones fit at any moment."""
    tenants = reserved[0]["tenants"]
    large = tenants["large"]
    assert large["ended"] == {"completed": len(LARGE)} and not large["rejected"]
    assert large["queue_wait_ms"]["p50"] > 0 and large["queue_wait_ms"]["p99"] < 5_000
    small = [tenants[f"small-{number}"]["ended"]["completed"] for number in range(3)]
    assert min(small) > 0.8 * max(small) and sum(small) > 0.5 * len(SMALL)


def test_reservations_keep_engines_from_starting_over(reserved: tuple[dict[str, Any], int]) -> None:
    """Protects work that is done: what runs fits in memory, where without reservations much is computed twice."""
    unreserved = played(_Silent)
    assert reserved[1] <= 10 and unreserved[1] > 50
    assert reserved[0]["total"]["ended"].keys() == {"completed"}
