"""One run of a simulated fleet as the scheduling benchmarks make and show it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weir.config import CoordinatorConfig
from weir.sim.runs.experiment import RunSpec, simulate

SEED = 1
EIGHT_B = "llama3.1-8b/h100_sxm/tp1"
PATIENT = CoordinatorConfig(queue_wait_ms=86_400_000, queue_entries=100_000, queue_entries_per_tenant=100_000)
"""Whoever comes waits, as in the VTC paper."""
PATIENT_MS = 86_400_000
"""The deadline beside it."""


@dataclass(frozen=True)
class Row:
    """One run. title: of the load; aspect: what sets it apart from others with this load; told: what to say of its result."""

    title: str
    aspect: str
    spec: RunSpec
    told: Callable[[dict[str, Any]], str]
    seed: int = SEED


def run(spec: RunSpec, seed: int = SEED) -> dict[str, Any]:
    """In whichever process."""
    return simulate(spec, seed)
