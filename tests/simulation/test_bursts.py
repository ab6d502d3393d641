"""A burst onto idle replicas: what fits free lanes is admitted, and starts as its prompts are read, with defaults."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from weir.sim.runs.arrivals import Arrival
from weir.sim.runs.experiment import RunSpec, simulate
from weir.sim.runs.paces import engine_model

ROW = "llama3.1-8b/a100_sxm/tp1"
"""About 13 ms a token, and 0.06 ms to read one."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    """So many short questions of one tenant, all in one millisecond."""

    number: int
    label: str = "at once"
    span_s: float = 1.001
    tenants: tuple[str, ...] = ("demo",)

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """Evenly over it."""
        return (Arrival(1.0 + 0.001 * place / self.number, "demo", 400, 20) for place in range(self.number))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_burst_that_fits_free_lanes_is_not_refused_for_its_wait(replicas: int, seed: int) -> None:
    """Protects interactive bursts: two thirds of the lanes in one millisecond, 23 ms of reading each, and none is refused."""
    burst = AtOnce(24 * replicas)
    spec = RunSpec(burst, engine_model(ROW), burst.span_s, replicas, concurrency=40)
    total = simulate(spec, seed)["total"]
    assert (total["rejected"], total["ended"]) == ({}, {"completed": burst.number})
    assert 0 < total["queue_wait_ms"]["p99"] < 24 * 60
