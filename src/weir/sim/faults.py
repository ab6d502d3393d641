"""What can go wrong in the simulated world: the store's weather, engines that fail or fall silent, wall-clock steps.

It breaks things on request and keeps the truth about what engines really did; it never looks at what the platform decided.
The scenario chooses moments, the world wires these in place of the plain parts.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from weir import errors
from weir.core.demands import NO_DEMANDS, Demands
from weir.core.ledger.records import LedgerRecord
from weir.core.request import Message
from weir.engines.simulated import SimulatedEngine
from weir.errors import WeirError
from weir.messages import ReplicaAddress
from weir.ports import (
    Delta,
    EngineCall,
    EngineEnd,
    EngineRun,
    EngineSink,
    LedgerReport,
    LedgerStore,
    Recovery,
    StoredExecution,
    UsageQuery,
    UsageRow,
)
from weir.sim.virtual_loop import WALL_START_MS, VirtualClock, VirtualLoop
from weir.storage.memory import MemoryLedger, Operation
from weir.units import Millis, Tokens


class StepClock(VirtualClock):
    """Virtual time whose wall clock somebody sets now and then; the monotonic clock never notices."""

    def __init__(self, loop: VirtualLoop, wall_start_ms: Millis = WALL_START_MS) -> None:
        super().__init__(loop, wall_start_ms)
        self._stepped_ms: Millis = 0
        self.was_stepped = False

    def wall_ms(self) -> Millis:
        """The stepped wall clock."""
        return super().wall_ms() + self._stepped_ms

    def step_wall(self, by_ms: Millis) -> None:
        """Set the wall clock forward, or back when by_ms is negative."""
        self._stepped_ms += by_ms
        self.was_stepped = True


class StoreWeather:
    """How the store behaves now, through the memory ledger's hooks. latency_ms: of an operation in fair weather."""

    def __init__(self, random: Random, latency_ms: tuple[float, float] = (1.0, 6.0)) -> None:
        self._random = random
        self._latency_ms = latency_ms
        self.extra_ms: Millis = 0
        self.failing = False
        self.losing_answers = False

    def clear(self) -> None:
        """Fair weather."""
        self.extra_ms, self.failing, self.losing_answers = 0, False, False

    def apply_to(self, ledger: MemoryLedger) -> None:
        """This ledger has this weather from now on."""
        ledger.delay, ledger.fault, ledger.lost_answer = self._delay, self._fault, self._lost_answer

    async def _delay(self, operation: Operation) -> None:
        await asyncio.sleep((self._random.uniform(*self._latency_ms) + self.extra_ms) / 1e3)

    def _fault(self, operation: Operation) -> Exception | None:
        return errors.LedgerUnavailable(not_written=True) if self.failing else None

    def _lost_answer(self, operation: Operation) -> Exception | None:
        return errors.LedgerUnavailable() if self.losing_answers else None


class CellStore:
    """The ledger as one process reaches it: after `cut` nothing of that process reaches it any more.

    opened: called in the step in which this process becomes the writer; refused: in that in which it hears that it is not.
    """

    def __init__(self, ledger: LedgerStore, opened: Callable[[], None]) -> None:
        self._ledger = ledger
        self._opened = opened
        self.refused: Callable[[], None] = lambda: None
        self.is_cut = False
        self.writing: tuple[int, Sequence[LedgerRecord]] | None = None
        """The write that is under way: its outcome is open when the process dies."""

    def cut(self) -> None:
        """The process died."""
        self.is_cut = True

    async def _alive(self) -> None:
        if self.is_cut:
            await asyncio.Event().wait()  # until its task is cancelled

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """As the ledger."""
        recovery = await self._ledger.open_epoch(recent_since_ms)
        self._opened()
        return recovery

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """As the ledger."""
        await self._alive()
        self.writing = (epoch, records)
        try:
            await self._ledger.write(epoch, records)
        except errors.LedgerUnavailable as fault:
            if fault.not_written:
                self.writing = None
            raise
        except errors.StaleEpoch:
            self.refused()
            raise
        self.writing = None

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """As the ledger."""
        await self._alive()
        return await self._ledger.find_execution(tenant, request_id)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """As the ledger."""
        return await self._ledger.usage(query)

    async def verify(self) -> LedgerReport:
        """As the ledger."""
        return await self._ledger.verify()

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """As the ledger."""
        await self._alive()
        return await self._ledger.prune(epoch, before_ms, rows_max)

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """As the ledger."""
        await self._alive()
        await self._ledger.count_rejections(counts)

    async def aclose(self) -> None:
        """The ledger outlives its processes."""


@dataclass(slots=True)
class CallTruth:
    """What the engine did for one call: the yardstick of what the ledger says."""

    prompt: str
    replica: str
    emitted: Tokens = 0


FaultPlan = Callable[[EngineCall], tuple[Tokens, WeirError] | None]
"""Which call fails by itself: after how many tokens, and how. None: it does not."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How replicas are reached. idle_ms: silence that counts as stalled. burst: tokens that arrive in one read. counts_tokens:
    whether a count is ever answered.

    concurrency: what a replica of each pool may hold at once, asserted against what its batch really holds.
    """

    concurrency: Mapping[str, int]
    idle_ms: Millis = 5_000
    burst: int = 1
    counts_tokens: bool = True


class FaultyEngine:
    """The Engine port over a simulated engine: calls that fail on request, and silence that is noticed.

    on_start: called with each call before the engine sees it. spare: runs above its limit that a replica may be given.
    """

    def __init__(self, engine: SimulatedEngine, traits: EngineTraits, on_start: Callable[[EngineCall], None]) -> None:
        self.inner = engine
        self.calls: list[CallTruth] = []
        self.spare = 0
        self.fault_plan: FaultPlan = lambda call: None
        self._traits = traits
        self.on_start = on_start

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a generation."""
        load = self.inner.load(call.replica.name)
        held = load.running + load.waiting
        limit = self._traits.concurrency[call.replica.pool] + self.spare
        assert held < limit, f"{call.replica.name} holds {held} runs and is given another"
        self.on_start(call)
        assert isinstance(call.prompt, str)
        truth = CallTruth(call.prompt, call.replica.name)
        self.calls.append(truth)
        watched = _WatchedRun(sink, truth, self._traits, self.fault_plan(call))
        watched.run = self.inner.start(call, watched)
        return watched

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """As the engine, unless nothing is counted."""
        return await self.inner.count_input(replica, prompt, chat, demands) if self._traits.counts_tokens else None

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """As the engine."""
        return await self.inner.probe(replica)

    async def aclose(self) -> None:
        """As the engine."""
        await self.inner.aclose()

    def emitted_by_prompt(self) -> dict[str, Tokens]:
        """The most tokens that any call with this prompt emitted."""
        most: defaultdict[str, Tokens] = defaultdict(int)
        for truth in self.calls:
            most[truth.prompt] = max(most[truth.prompt], truth.emitted)
        return most


class _WatchedRun:
    """A run and its sink: counts, ends a silent run as stalled, and fails one as planned."""

    run: EngineRun

    def __init__(
        self, sink: EngineSink, truth: CallTruth, traits: EngineTraits, planned: tuple[Tokens, WeirError] | None
    ) -> None:
        self._sink = sink
        self._truth = truth
        self._planned = planned
        self._idle_s = traits.idle_ms / 1e3
        self._burst = traits.burst
        self._unread: list[Delta] = []
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._paused = False
        self._timer = self._loop.call_later(self._idle_s, self._silent)
        if planned is not None and planned[0] == 0:
            self._loop.call_soon(self._fail, planned[1])

    def pause(self) -> None:
        """Silence is the reader's wish now."""
        self._paused = True
        self.run.pause()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        self.run.resume()

    def cancel(self) -> None:
        """Stop generating."""
        self._close()
        self.run.cancel()

    async def stopped(self) -> None:
        """As the run."""
        await self.run.stopped()

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Count, pass on what a read takes, and fail if it is time."""
        if self._over:
            return
        self._watch_again()
        self._truth.emitted = deltas[-1].tokens or 0
        self._unread += deltas
        if len(self._unread) >= self._burst:
            self._read()
        if not self._over and self._planned is not None and self._truth.emitted >= self._planned[0]:
            self._fail(self._planned[1])

    def on_end(self, end: EngineEnd) -> None:
        """Pass on."""
        if not self._over:
            self._read()
        if not self._over:
            self._close()
            self._sink.on_end(end)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if unread:
            self._sink.on_deltas(unread)

    def _watch_again(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(self._idle_s, self._silent)

    def _silent(self) -> None:
        if self._paused:
            self._watch_again()
        else:
            self._fail(errors.Stalled())

    def _fail(self, fault: WeirError) -> None:
        if self._over:
            return
        self._close()
        self.run.cancel()
        self._sink.on_end(EngineEnd(None, None, fault, self._truth.emitted or None))

    def _close(self) -> None:
        self._over = True
        self._timer.cancel()
