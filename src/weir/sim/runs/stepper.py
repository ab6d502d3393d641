"""One simulated replica of a run: its batch, one event per step, whoever is in it.

It tells its listener only what changes a request's course: the first output of each delivery step, the end, and that a
cancelled run has left. It can be stalled and lost on request. It knows neither the coordinator nor why a run is cancelled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.core.endings import FinishReason
from weir.engines.simulated_batch import SimulatedBatch, Step
from weir.messages import ReplicaAddress
from weir.sim.runs.courses import Course
from weir.sim.runs.paces import EngineModel
from weir.sim.runs.prompt_blocks import engine_keys
from weir.sim.runs.step_clock import StepClock
from weir.units import NANOS_PER_MILLI, Nanos, Tokens


@dataclass(slots=True, eq=False)
class Run:
    """One attempt in a batch. cancelled_ns: since when its engine is to stop.

    cached_tokens: of its prompt, found in the replica's prefix cache as it started; None until then.
    """

    course: Course
    attempt: int
    lane: int
    replica: "SteppedReplica"
    sequence: int
    since_ns: Nanos
    cancelled_ns: Nanos | None = None
    cached_tokens: Tokens | None = None


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

    def fail(self, run: Run, reason: FinishReason) -> None:
        """The replica broke off, or is silent for too long."""
        ...

    def give_up(self, run: Run) -> None:
        """A cancelled run's stop is not confirmed."""
        ...


@dataclass(frozen=True, slots=True)
class SilenceBounds:
    """How long the engine's client waits for further output, and for the confirmation of a stop."""

    idle_ns: Nanos
    stop_ns: Nanos


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
        asked = course.arrival
        keys = engine_keys(asked.blocks)
        self._batch.submit(run.sequence, asked.input_tokens, asked.output_tokens, keys, asked.tenant)
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

    @property
    def load(self) -> int:
        """Requests that it runs."""
        return len(self.runs)

    def break_off(self) -> None:
        """Everything in it is gone at once, and whoever listens hears so."""
        self.is_stalled = True
        lost, self.runs = list(self.runs.values()), {}
        for run in lost:
            self._listener.fail(run, FinishReason.REPLICA_LOST)
        for run in lost:
            self._listener.give_up(run)

    def look(self, bounds: SilenceBounds) -> None:
        """While it is stalled: fail what is silent for too long, and give up on what was cancelled and does not stop."""
        now_ns = self._clock.now_ns
        for run in list(self.runs.values()):
            if run.cancelled_ns is not None and now_ns - run.cancelled_ns >= bounds.stop_ns:
                self._listener.give_up(run)
            elif run.cancelled_ns is None and now_ns - max(run.since_ns, self.stepped_ns) >= bounds.idle_ns:
                self._listener.fail(run, FinishReason.STALLED)

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
            self._note_cached(step)
            self._clock.after(round(self._noise(self._pace(step)) * NANOS_PER_MILLI), self._complete)

    def _note_cached(self, step: Step) -> None:
        """What was found as a run started; what it finds of its own, starting over, is nobody's gain."""
        for sequence, cached_tokens in step.started:
            run = self.runs[sequence]
            if run.cached_tokens is None:
                run.cached_tokens = cached_tokens

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
