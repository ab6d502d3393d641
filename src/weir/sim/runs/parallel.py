"""Several seeds of one specification, each in a process of its own as far as there are cores; one seed right here.

Results come in the order of the seeds, whenever they are ready. CPU time is measured beside them and is no part of them.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from weir.sim.runs.experiment import RunSpec, simulate
from weir.sim.virtual_loop import SeedFailed

_LOOK_S = 0.2

OnSeedProgress = Callable[[int, float], None]
"""Told the place of a seed among the seeds, and the share of its run that is behind it."""

_shares: Any = None
"""In a process of its own: the shares of all runs, in shared memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run's result, and the CPU seconds that it took."""

    document: dict[str, Any]
    cpu_s: float


def run_seeds(spec: RunSpec, seeds: Sequence[int], on_progress: OnSeedProgress) -> list[Outcome]:
    """One result per seed. Raises SeedFailed from the first run that failed."""
    workers = min(len(seeds), os.cpu_count() or 1)
    if workers == 1:
        return [_timed(spec, seed, partial(on_progress, place)) for place, seed in enumerate(seeds)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of a progress display
    shares = context.Array("d", len(seeds))
    with ProcessPoolExecutor(workers, context, _enter, (shares,)) as pool:
        runs = [pool.submit(_run_there, spec, seed, place) for place, seed in enumerate(seeds)]
        pending: set[Future[Outcome]] = set(runs)
        while pending:
            done, pending = wait(pending, timeout=_LOOK_S)
            for place in range(len(seeds)):
                on_progress(place, shares[place])
            if any(run.exception() is not None for run in done):
                pool.shutdown(cancel_futures=True)
                break
    return [run.result() for run in runs if not run.cancelled()]


def _enter(shares: Any) -> None:
    global _shares
    _shares = shares


def _run_there(spec: RunSpec, seed: int, place: int) -> Outcome:
    return _timed(spec, seed, partial(_shares.__setitem__, place))


def _timed(spec: RunSpec, seed: int, on_progress: Callable[[float], None]) -> Outcome:
    before_s = time.process_time()
    try:
        document = simulate(spec, seed, on_progress)
    except Exception as failure:  # whatever it was: it is nothing without its seed
        raise SeedFailed(seed) from failure
    return Outcome(document, time.process_time() - before_s)
