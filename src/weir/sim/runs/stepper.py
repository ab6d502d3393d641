"""One simulated replica of a run: its batch, one event per step, whoever is in it.

It tells its listener only what changes a request's course: the first output of each delivery step, the end, and that a
cancelled run has left. It can be stalled and lost on request. It knows neither the coordinator nor why a run is cancelled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.engines.simulated_batch import SimulatedBatch, Step
from weir.messages import ReplicaAddress
from weir.sim.runs.courses import Course
from weir.sim.runs.paces import EngineModel
from weir.sim.runs.step_clock import StepClock
from weir.units import NANOS_PER_MILLI, Nanos, Tokens


@dataclass(slots=True, eq=False)
class Run:
    """One attempt in a batch. cancelled_ns: since when its engine is to stop."""

    course: Course
    attempt: int
    lane: int
    replica: "SteppedReplica"
    sequence: int
    since_ns: Nanos
    cancelled_ns: Nanos | None = None


class EngineListener(Protocol):
    """Who is told what a replica yields. It may submit and cancel meanwhile."""

    def on_mark(self, run: Run, tokens: Tokens) -> None:
        """The first output of a delivery step exists; tokens: output so far."""
        ...

    def on_finished(self, run: Run) -> None:
        """The run ended by itself."""
        ...

    def on_left(self, run: Run) -> None:
        """A cancelled run is in the batch no more."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaMaking:
    """What every replica of a run shares. mark_tokens ≥ 2: between two marks."""

    engine: EngineModel
    concurrency: int
    mark_tokens: Tokens
    listener: EngineListener


class SteppedReplica:
    """A replica that runs. noise: a step's milliseconds → what it really takes."""

    def __init__(
        self, address: ReplicaAddress, making: ReplicaMaking, noise: Callable[[float], float], clock: StepClock
    ) -> None:
        self.address = address
        self.name = address.name
        self.is_stalled = False
        self.runs: dict[int, Run] = {}
        self.stepped_ns: Nanos = 0
        self._listener = making.listener
        self._marks = making.mark_tokens
        self._concurrency = making.concurrency
        self._pace = making.engine.pace
        self._batch = SimulatedBatch(making.engine.step_time, making.concurrency)
        self._noise = noise
        self._clock = clock
        self._emitted: dict[int, Tokens] = {}
        self._submitted = 0
        self._step: Step | None = None
        self._is_woken = False

    def submit(self, course: Course, lane: int) -> Run:
        """Start an attempt; the first step begins after everything else that arrives at this instant."""
        self._submitted += 1
        run = Run(course, course.attempt, lane, self, self._submitted, self._clock.now_ns)
        self.runs[run.sequence] = run
        assert len(self.runs) <= self._concurrency, f"{self.name} runs more than its concurrency"
        self._batch.submit(run.sequence, course.arrival.input_tokens, course.arrival.output_tokens)
        self._continue()
        return run

    def cancel(self, run: Run) -> None:
        """It leaves at the next step's boundary, and the listener hears when."""
        if run.cancelled_ns is None:
            run.cancelled_ns = self._clock.now_ns
            self._batch.cancel(run.sequence)
            self._continue()

    def emitted(self, run: Run) -> Tokens:
        """Output of a run so far."""
        return self._emitted.get(run.sequence, 0)

    def stall(self) -> None:
        """No step completes and none begins until `resume`."""
        self.is_stalled = True

    def resume(self) -> None:
        """Go on where it stalled."""
        self.is_stalled = False
        self._continue()

    def lose(self) -> list[Run]:
        """Everything in it is gone at once; what it ran."""
        self.is_stalled = True
        lost, self.runs = list(self.runs.values()), {}
        return lost

    def _continue(self) -> None:
        if not self._is_woken and not self.is_stalled:
            self._is_woken = True
            self._clock.soon(self._begin if self._step is None else self._complete)

    def _begin(self) -> None:
        self._is_woken = False
        if self.is_stalled:
            return
        for sequence in self._batch.sweep():
            run = self.runs.pop(sequence)
            self._emitted.pop(sequence, None)
            self._listener.on_left(run)
        if self._is_woken:
            return  # what left made room, and the next step is about to begin with who took it
        step = self._step = self._batch.schedule()
        if step is not None:
            self._is_woken = True
            self._clock.after(round(self._noise(self._pace(step)) * NANOS_PER_MILLI), self._complete)

    def _complete(self) -> None:
        self._is_woken = False
        if self.is_stalled:
            return
        assert self._step is not None
        step, self._step = self._step, None
        outcome = self._batch.complete(step)
        self.stepped_ns = self._clock.now_ns
        self._emitted.update(outcome.emitted)
        marks, runs = self._marks, self.runs
        for sequence, tokens in outcome.emitted:
            if tokens % marks == 1:
                self._listener.on_mark(runs[sequence], tokens)
        for sequence in outcome.finished:
            run = runs.pop(sequence)
            del self._emitted[sequence]
            self._listener.on_finished(run)
        if not self._is_woken:  # else the listener submitted something, and the next step is about to begin
            self._begin()
