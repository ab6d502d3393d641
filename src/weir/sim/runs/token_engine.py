"""The replicas of a run in full: a simulated engine each, behind the Engine port of the real gateway, every token of them.

It counts what they compute, as the other fidelity does, and fails what is silent for too long, as an engine's client would.
Tokens pass through unchanged. It knows neither the coordinator nor why a run is cancelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from weir.core.demands import NO_DEMANDS, Demands
from weir.core.request import Message
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.errors import Stalled
from weir.messages import ReplicaAddress
from weir.ports import Delta, EngineCall, EngineEnd, EngineRun, EngineSink
from weir.sim.runs.courses import Course
from weir.sim.runs.figures import Figures
from weir.sim.runs.paces import EngineModel
from weir.sim.runs.stepper import SilenceBounds
from weir.sim.virtual_loop import VirtualLoop
from weir.units import Nanos, Tokens


@dataclass(frozen=True, slots=True)
class TokenMaking:
    """What every replica shares. count_tokens: computed output is counted in pieces of so many."""

    engine: EngineModel
    concurrency: int
    count_tokens: Tokens


class TokenEngine:
    """The Engine port over replicas by name. course_of: whose a call is."""

    def __init__(
        self, loop: VirtualLoop, making: TokenMaking, course_of: Callable[[EngineCall], Course], figures: Figures
    ) -> None:
        self.loop = loop
        self.making = making
        self.course_of = course_of
        self.figures = figures
        self._replicas: dict[str, TokenReplica] = {}

    def add(self, address: ReplicaAddress, noise: Callable[[float], float]) -> "TokenReplica":
        """A replica that runs. noise: a step's milliseconds → what it really takes."""
        replica = self._replicas[address.name] = TokenReplica(self, address, noise)
        return replica

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a generation; a fault arrives as `on_end`."""
        return self._replicas[call.replica.name].start(call, sink)

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """Exact input tokens; None from a lost or stalled replica."""
        return await self._replicas[replica.name].engine.count_input(replica, prompt, chat, demands)

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """The address with what the engine can do. Raises ReplicaLost, or Stalled after the bound."""
        return await self._replicas[replica.name].engine.probe(replica)

    async def aclose(self) -> None:
        """Cancel every run."""
        for replica in self._replicas.values():
            await replica.engine.aclose()


class TokenReplica:
    """One replica: its engine and what it runs."""

    def __init__(self, owner: TokenEngine, address: ReplicaAddress, noise: Callable[[float], float]) -> None:
        making = owner.making
        simulated = SimulatedReplica(
            concurrency=making.concurrency,
            noise=noise,
            output_length=lambda call: owner.course_of(call).arrival.output_tokens,
            prefix_cache=True,
            step_time=making.engine.step_time,
            pace=making.engine.pace,
        )
        self.engine = SimulatedEngine(simulated)
        self.address = msgspec.structs.replace(address, counts_tokens=True, continuous_usage=True, cache_salt=True)
        self.is_stalled = False
        self.runs: dict[int, _TokenRun] = {}
        self._owner = owner
        self._started = 0

    @property
    def load(self) -> int:
        """Requests that it runs."""
        return len(self.runs)

    def stall(self) -> None:
        """No step completes and none begins until `resume`."""
        self.is_stalled = True
        self.engine.stall(self.address.name)

    def resume(self) -> None:
        """Go on where it stalled."""
        self.is_stalled = False
        self.engine.unstall(self.address.name)

    def break_off(self) -> None:
        """Everything in it is gone at once, and its runs end so."""
        self.engine.lose(self.address.name)

    def look(self, bounds: SilenceBounds) -> None:
        """While it is stalled: fail what is silent for too long. Unconfirmed stops are the engine's own to tell."""
        now_ns = self._owner.loop.now_ns
        for run in list(self.runs.values()):
            if not run.is_paused and now_ns - run.heard_ns >= bounds.idle_ns:
                run.fail_silent()

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a generation; a fault arrives as `on_end`."""
        self._started += 1
        number = self._started
        run = self.runs[number] = _TokenRun(self._owner, self._owner.course_of(call), sink)
        run.leave = lambda: self.runs.pop(number, None)
        run.inner = self.engine.start(call, run)
        return run


class _TokenRun:
    """One attempt: the engine's sink and the gateway's run. heard_ns: since when it says nothing."""

    inner: EngineRun
    leave: Callable[[], object]

    def __init__(self, owner: TokenEngine, course: Course, sink: EngineSink) -> None:
        self._loop = owner.loop
        self._figures = owner.figures
        self._piece = owner.making.count_tokens
        self._course = course
        self._sink = sink
        self._emitted: Tokens = 0
        self._counted: Tokens = 0
        self.is_paused = False
        self.heard_ns: Nanos = self._loop.now_ns

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Count what is there, and pass it on."""
        self._emitted = deltas[-1].tokens or self._emitted
        self.heard_ns = self._loop.now_ns
        if not self._counted or self._emitted >= self._counted + self._piece:
            self._count((self._emitted - 1) // self._piece * self._piece + 1)
        self._sink.on_deltas(deltas)

    def _count(self, tokens: Tokens) -> None:
        course, is_first = self._course, not self._counted
        if is_first:
            course.first_ns = self._loop.now_ns
        self._figures.computed(course, course.arrival.input_tokens if is_first else 0, tokens - self._counted)
        self._counted = tokens

    def on_end(self, end: EngineEnd) -> None:
        """Count the rest of a reply that ended by itself, and pass the end on."""
        self.leave()
        if end.usage is not None:
            self._course.last_ns = self._loop.now_ns
            self._count(end.usage.output_tokens)
            self._figures.cached(self._course, end.usage.cached_input_tokens)
        self._sink.on_end(end)

    def fail_silent(self) -> None:
        """The engine said nothing for too long."""
        self.cancel()
        self._sink.on_end(EngineEnd(None, None, Stalled(), self._emitted or None))

    def pause(self) -> None:
        """Silence is the reader's wish now."""
        self.is_paused = True
        self.inner.pause()

    def resume(self) -> None:
        """Read again."""
        self.is_paused, self.heard_ns = False, self._loop.now_ns
        self.inner.resume()

    def cancel(self) -> None:
        """Stop generating."""
        self.leave()
        self.inner.cancel()

    async def stopped(self) -> None:
        """Returns once the engine runs nothing for it. Raises ReplicaLost where that is not confirmed in time."""
        await self.inner.stopped()
