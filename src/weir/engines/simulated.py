"""The simulated engine: the Engine port over batches in this process, on any event loop, also one of virtual time.

It uses no more of a loop than `time`, `call_soon` and `call_at`; randomness is given in. Each replica name has its own batch
and step time, and can be lost, stalled or slowed on request, which is what tests and the simulator come for. It never reads a
clock and holds no socket; `simulated_server` puts the same engine behind HTTP.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from weir.core.demands import NO_DEMANDS, Demands, Embedding
from weir.core.request import Message
from weir.engines.simulated_batch import SimulatedBatch, Step, StepOutcome
from weir.engines.simulated_choices import ChoicesRun
from weir.engines.simulated_embeddings import SimulatedEmbeddingRun, as_turns, text_tokens
from weir.engines.simulated_faults import NO_FAULTS, Faults, is_marked
from weir.engines.simulated_replies import demands_shape, shaped_replies
from weir.engines.simulated_run import SequenceRun, SimulatedRun
from weir.engines.simulated_text import (
    ReplyBounds,
    count_prompt_tokens,
    natural_output_tokens,
    prompt_block_keys,
    prompt_with_tools,
    script,
)
from weir.engines.step_time import StepTime, step_time
from weir.errors import EngineRejected, ReplicaLost, Stalled
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, EngineRun, EngineSink
from weir.units import Millis, Tokens

LATE_STEP_S = 0.005  # after a timer late by less, the next step starts where this one ended: no drift


def _natural_length(call: EngineCall) -> Tokens:
    return natural_output_tokens(call.prompt)


def count_input_tokens(prompt: str | tuple[Message, ...], chat: bool, demands: Demands) -> Tokens:
    """Exact input tokens ≥ 1, with the tools that the chat template tells of."""
    return count_prompt_tokens(prompt_with_tools(prompt, demands.tools) if demands.tools and chat else prompt, chat)


def _exact(duration_ms: float) -> float:
    return duration_ms


def _scheduled(step: Step) -> float:
    return step.duration_ms


def _nothing_more() -> None:
    return


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """What one simulated replica is. row and preset name its step time; concurrency: running sequences at most.

    context_tokens: its window, None for the one in the address. noise: a step's milliseconds → what it really takes.
    output_length: the tokens after which a reply ends by itself, ≥ 1. seed: for calls that bring none.
    kv_tokens: what its KV blocks have room for, ≥ 16, None for the row's. prefix_cache: whether calls of one salt reuse what
    their prompts begin with; calls without a salt share one. faults: from its start. on_crash: what an ordered crash does
    beside losing the replica. step_time: in place of the one that row and preset name. pace: a step → its milliseconds.
    """

    row: str = "demo"
    preset: str = "nominal"
    concurrency: int = 1_024
    context_tokens: Tokens | None = None
    seed: int = 0
    noise: Callable[[float], float] = _exact
    output_length: Callable[[EngineCall], Tokens] = _natural_length
    kv_tokens: Tokens | None = None
    prefix_cache: bool = False
    faults: Faults = NO_FAULTS
    on_crash: Callable[[], None] = _nothing_more
    step_time: StepTime | None = None
    pace: Callable[[Step], float] = _scheduled


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's own figures: sequences and the share of KV blocks they hold now, the rest since it started.

    kv_tokens: what all its KV blocks have room for. prompt_tokens: of prompts whose first token came. prefix_queries,
    prefix_hits: prompt tokens looked up, and found, in the prefix cache.
    """

    running: int
    waiting: int
    prompt_tokens: Tokens
    generation_tokens: Tokens
    kv_usage: float
    preemptions: int
    prefix_queries: Tokens
    prefix_hits: Tokens
    kv_tokens: Tokens


@dataclass(frozen=True, slots=True)
class SimulatedBounds:
    """How long the engine's client waits, in milliseconds: for a count, a probe, and the confirmation of a stop."""

    count_ms: Millis = 250
    probe_ms: Millis = 1_000
    stop_ms: Millis = 10_000


class _Replica:
    """Drives one batch: begins a step, waits its duration, hands out what it yielded, begins the next."""

    def __init__(self, spec: SimulatedReplica, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.lost = False
        self.stalled = spec.faults.stalled
        self.faults = spec.faults
        self.prompt_tokens: Tokens = 0
        self.generation_tokens: Tokens = 0
        self._loop = loop
        self._step_time = spec.step_time or step_time(spec.row, spec.preset)
        self._runs: dict[int, SequenceRun] = {}
        self._crashing: set[int] = set()
        self._stalling: dict[int, Tokens] = {}
        self._last_id = 0
        self._step: Step | None = None
        self._step_ends_s = 0.0
        self._wake: asyncio.Handle | None = None
        self.batch = self._empty_batch()

    def submit(self, run: SimulatedRun, call: EngineCall) -> None:
        """Queue a run; the first step begins after everything else that arrives at this instant."""
        prompt = prompt_with_tools(call.prompt, call.demands.tools) if call.demands.tools else call.prompt
        reuses = self.spec.prefix_cache and call.demands.embedding is None
        keys = prompt_block_keys(prompt, call.chat) if reuses else ()
        for sequence in run.sequences():
            self._submit(sequence, call, keys)
        self._continue()

    def _submit(self, run: SequenceRun, call: EngineCall, keys: Sequence[bytes]) -> None:
        self._last_id += 1
        sequence_id = self._last_id
        self._runs[sequence_id] = run
        run.on_cancel = lambda: self.batch.cancel(sequence_id)
        embedding = call.demands.embedding
        self.batch.submit(sequence_id, self._held_input(run, embedding), run.reply.tokens, keys, call.cache_salt or "")
        prompt = call.prompt if embedding is None else as_turns(embedding)
        if is_marked(prompt, self.faults.crash_marker):
            self._crashing.add(sequence_id)
        if is_marked(prompt, self.faults.stall_marker):
            self._stalling[sequence_id] = self.faults.stall_after_tokens

    def _held_input(self, run: SequenceRun, embedding: Embedding | None) -> Tokens:
        """Many texts may be more than its blocks hold at once, and need not be held at once."""
        return run.input_tokens if embedding is None else min(run.input_tokens, self.batch.kv_tokens - run.reply.tokens)

    def order(self, faults: Faults) -> None:
        """From now on these faults, and no others."""
        self.faults = faults
        self._crashing.clear()
        self._stalling.clear()
        if faults.stalled:
            self.stall()
        else:
            self.unstall()

    def stall(self) -> None:
        """No step completes and none begins until `unstall`."""
        self.stalled = True

    def unstall(self) -> None:
        """Go on where it stalled."""
        self.stalled = False
        self._continue()

    def lose(self) -> None:
        """Everything in it is gone at once."""
        self.lost = True
        self._stop_stepping()
        runs, self._runs = self._runs, {}
        self._crashing.clear()
        self._stalling.clear()
        self.batch = self._empty_batch()
        for run in runs.values():
            run.on_cancel = None
            run.leave(lost=True)
            self._loop.call_soon(run.fail, ReplicaLost())

    def close(self) -> None:
        """Cancel every run and stop."""
        self._stop_stepping()
        for run in self._runs.values():
            run.cancel()
            run.leave()
        self._runs.clear()

    def _stop_stepping(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._step = None

    def _continue(self) -> None:
        if self._wake is None and not self.stalled:
            self._wake = self._loop.call_soon(self._begin_now if self._step is None else self._complete)

    def _begin_now(self) -> None:
        self._begin(self._loop.time())

    def _begin(self, start_s: float) -> None:
        self._wake = None
        if self.stalled:
            return
        for sequence_id in self.batch.sweep():
            self._take_out(sequence_id).leave()
        self._step = self.batch.schedule()
        if self._step is not None:
            for sequence_id, cached_tokens in self._step.started:
                self._runs[sequence_id].begin(cached_tokens)
            self._step_ends_s = start_s + self.spec.noise(self.spec.pace(self._step)) * self.faults.slowdown / 1_000
            self._wake = self._loop.call_at(self._step_ends_s, self._complete)

    def _complete(self) -> None:
        self._wake = None
        if self.stalled:
            return
        assert self._step is not None
        step, self._step = self._step, None
        if self._crashing and any(sequence_id in self._crashing for sequence_id, _ in step.prefills):
            self.spec.on_crash()
            self.lose()
            return
        outcome = self.batch.complete(step)
        self.generation_tokens += len(outcome.emitted)
        self._hand_out(outcome)
        if self._wake is None:  # else a sink submitted something, and the next step is about to begin
            now_s = self._loop.time()
            self._begin(self._step_ends_s if now_s - self._step_ends_s < LATE_STEP_S else now_s)

    def _hand_out(self, outcome: StepOutcome) -> None:
        """Tell the sinks. A sink may submit, cancel, or lose this replica meanwhile."""
        finished = set(outcome.finished)
        for sequence_id, tokens in outcome.emitted:
            run = self._runs.get(sequence_id)
            if run is None:
                continue
            if tokens == 1:
                self.prompt_tokens += run.input_tokens
            if tokens == self._stalling.get(sequence_id):
                self.stall()
            run.emit(tokens)
            if sequence_id in finished and self._runs.get(sequence_id) is run:
                self._take_out(sequence_id).complete()

    def _take_out(self, sequence_id: int) -> SequenceRun:
        """A run that the batch holds no more."""
        self._crashing.discard(sequence_id)
        self._stalling.pop(sequence_id, None)
        return self._runs.pop(sequence_id)

    def _empty_batch(self) -> SimulatedBatch:
        return SimulatedBatch(self._step_time, self.spec.concurrency, self.spec.kv_tokens)


class SimulatedEngine:
    """The Engine port. Use it on one running loop."""

    def __init__(
        self,
        default: SimulatedReplica = SimulatedReplica(),
        replicas: Mapping[str, SimulatedReplica] | None = None,
        bounds: SimulatedBounds = SimulatedBounds(),
    ) -> None:
        """replicas: what each name is; default: what every other name is."""
        self._default = default
        self._replicas = dict(replicas or {})
        self._bounds = bounds
        self._live: dict[str, _Replica] = {}
        self._closed = False

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a generation; a fault arrives as `on_end`."""
        replica = self._replica(call.replica.name)
        embedding = call.demands.embedding
        if embedding is None:
            run = self._generation(call, replica.spec, sink)
            input_tokens, output_tokens = run.input_tokens, call.max_output_tokens
        else:
            run = SimulatedEmbeddingRun(sink, embedding, self._bounds.stop_ms)
            input_tokens, output_tokens = max(text_tokens(embedding)), 0
        loop = asyncio.get_running_loop()
        if replica.lost or self._closed:
            run.leave(lost=True)
            loop.call_soon(run.fail, ReplicaLost(reached=False))
        elif input_tokens + output_tokens > self._context_tokens(call.replica):
            run.leave()
            members = {"input_tokens": input_tokens, "limit": self._context_tokens(call.replica)}
            loop.call_soon(run.fail, EngineRejected("Input and output do not fit the context window", members=members))
        else:
            replica.submit(run, call)
        return run

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """Exact input tokens; None from a lost or stalled replica."""
        if not await self._answers(replica.name, self._bounds.count_ms):
            return None
        return count_input_tokens(prompt, chat, demands)

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """The address with what this engine can do. Raises ReplicaLost, or Stalled after the bound."""
        if not await self._answers(replica.name, self._bounds.probe_ms):
            raise ReplicaLost() if self._replica(replica.name).lost else Stalled("The replica did not answer in time")
        context_tokens = self._context_tokens(replica)
        return msgspec.structs.replace(
            replica,
            context_tokens=context_tokens,
            counts_tokens=True,
            continuous_usage=True,
            cache_salt=self._replica(replica.name).spec.prefix_cache,
            kv_tokens=self._replica(replica.name).batch.kv_tokens,
        )

    async def aclose(self) -> None:
        """Cancel every run; later ones end ReplicaLost."""
        self._closed = True
        for replica in self._live.values():
            replica.close()

    # ── for tests and the simulator ──────────────────────────────────────────────────────────────────────────────────

    def lose(self, name: str) -> None:
        """The replica's runs end ReplicaLost, and new ones too, until `restore`."""
        self._replica(name).lose()

    def restore(self, name: str) -> None:
        """A lost replica is back, empty."""
        self._replica(name).lost = False

    def stall(self, name: str) -> None:
        """The replica takes work and does none until `unstall`; it confirms no cancel meanwhile."""
        self._replica(name).stall()

    def unstall(self, name: str) -> None:
        """A stalled replica goes on where it was."""
        self._replica(name).unstall()

    def order(self, name: str, faults: Faults) -> None:
        """The replica's faults from now on, in place of those before; the default ends all, a stall too."""
        self._replica(name).order(faults)

    def running(self, name: str) -> int:
        """Generations that the replica computes now."""
        return self.load(name).running

    def load(self, name: str) -> ReplicaLoad:
        """The replica's own figures."""
        replica = self._replica(name)
        batch = replica.batch
        return ReplicaLoad(
            batch.running,
            batch.waiting,
            replica.prompt_tokens,
            replica.generation_tokens,
            batch.kv_usage,
            batch.preemptions,
            batch.prefix_queries,
            batch.prefix_hits,
            batch.kv_tokens,
        )

    # ── within ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _generation(self, call: EngineCall, spec: SimulatedReplica, sink: EngineSink) -> SimulatedRun:
        seed = spec.seed if call.sampling.seed is None else call.sampling.seed
        input_tokens = count_input_tokens(call.prompt, call.chat, call.demands)
        if demands_shape(call):
            replies = shaped_replies(call, seed, spec.output_length(call))
            return ChoicesRun(sink, replies, input_tokens, self._bounds.stop_ms)
        limits = ReplyBounds(spec.output_length(call), call.max_output_tokens, call.sampling.stop)
        return SimulatedRun(sink, script(call.prompt, seed, limits), input_tokens, self._bounds.stop_ms)

    def _replica(self, name: str) -> _Replica:
        replica = self._live.get(name)
        if replica is None:
            replica = _Replica(self._replicas.get(name, self._default), asyncio.get_running_loop())
            self._live[name] = replica
        return replica

    def _context_tokens(self, address: ReplicaAddress) -> Tokens:
        """The window: what the replica says, else the address, and no more than its KV blocks have room for."""
        replica = self._replica(address.name)
        own = replica.spec.context_tokens
        return min(address.context_tokens if own is None else own, replica.batch.kv_tokens)

    async def _answers(self, name: str, within_ms: Millis) -> bool:
        """Whether the replica answers; a stalled one is given until the bound."""
        replica = self._replica(name)
        if replica.stalled and not replica.lost:
            await asyncio.sleep(within_ms / 1_000)
        return not (replica.lost or replica.stalled or self._closed)
