"""What one seed stands for: a mixed world, a caller that waits as it is told, and a story interrupted at some of its points.

`run_seed` is what tests, soaks and the command line run; a failure names the command that repeats it.
"""

import hashlib

from weir.sim.crash_points import run_some_points
from weir.sim.probes import run_probes
from weir.sim.scenario import run_mixed

_POINTS = 3


class SeedBroke(AssertionError):
    """A world of this seed violated something; the violation is the cause."""

    def __init__(self, seed: int) -> None:
        super().__init__(f"seed {seed} failed; repeat it with: python -m weir.sim {seed}")


def run_seed(seed: int) -> str:
    """Run and audit every world of a seed; the digest of all that happened. Raises SeedBroke."""
    try:
        traces = [run_mixed(seed).checker.trace, run_probes(seed).checker.trace]
        traces += [world.checker.trace for world in run_some_points(seed, _POINTS)]
    except Exception as failure:
        raise SeedBroke(seed) from failure
    return hashlib.sha256("".join(traces).encode()).hexdigest()
