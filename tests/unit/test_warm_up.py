"""The warm-up: its pace is the replica's own, it costs little, and what a replica does wrong is a fault."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest

from weir import errors
from weir.control.warm_up import LONG_TOKENS_MAX, OUTPUT_TOKENS, WarmUp
from weir.core.demands import NO_DEMANDS, Demands
from weir.core.endings import FinishReason
from weir.core.output import Vectors
from weir.core.registry.model import EngineKind
from weir.core.request import Message
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.engines.step_time import step_time
from weir.messages import ReplicaAddress, ReplicaPace
from weir.ports import Delta, Engine, EngineCall, EngineEnd, EngineRun, EngineSink, EngineUsage
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.units import Tokens

SLOW_ROW = "llama3.1-70b/a100_sxm/tp4"


class Listening:
    """An engine that remembers its calls. before: run as each one starts."""

    def __init__(self, inner: Engine, before: Callable[[], None] = lambda: None) -> None:
        self.calls: list[EngineCall] = []
        self._inner = inner
        self._before = before

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        self.calls.append(call)
        self._before()
        return self._inner.start(call, sink)

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        return await self._inner.count_input(replica, prompt, chat, demands)

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        return await self._inner.probe(replica)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Spoken:
    """An engine that says the same at once each time. deltas: of each reply; counted: what `count_input` says."""

    def __init__(self, deltas: Sequence[Delta], usage: EngineUsage | None, counted: Tokens | None = None) -> None:
        self.counted_prompts: list[str | tuple[Message, ...]] = []
        self._deltas = deltas
        self._usage = usage
        self._counted = counted

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        if self._deltas:
            sink.on_deltas(self._deltas)
        sink.on_end(EngineEnd(FinishReason.STOP, self._usage))
        return self

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        self.counted_prompts.append(prompt)
        return self._counted

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        return replica

    async def aclose(self) -> None:
        """Nothing is open."""

    def pause(self) -> None:
        """There is nothing to pause."""

    def resume(self) -> None:
        """There is nothing to resume."""

    def cancel(self) -> None:
        """It is over."""

    async def stopped(self) -> None:
        """It is over."""


def _address(context_tokens: Tokens = 32_768) -> ReplicaAddress:
    return ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, "", "m", context_tokens)


def _measure(engine: Engine, *, context_tokens: Tokens = 32_768, chat: bool = True, embeds: bool = False) -> ReplicaPace:
    async def main() -> ReplicaPace:
        return await WarmUp(engine, VirtualClock(_loop()), _address(context_tokens), chat, embeds).measure()

    return run(main(), until_ms=600_000)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _words(call: EngineCall) -> list[str]:
    text = call.prompt if isinstance(call.prompt, str) else call.prompt[0].content
    return text.split()


@pytest.mark.parametrize("row", ["demo", SLOW_ROW, "llama3.1-8b/h100_sxm/tp1"])
def test_the_pace_is_that_of_the_replicas_row(row: str) -> None:
    """Protects predictions at the door from a prior that is not the replica's: every figure within a factor of two."""
    pace = _measure(SimulatedEngine(SimulatedReplica(row)))
    step = step_time(row)
    token_ms = step.milliseconds(1, 0, 1_000, 0)
    long_ms = step.milliseconds(0, LONG_TOKENS_MAX, 0, LONG_TOKENS_MAX**2 / 2)
    assert token_ms / 2 < pace.output_ms < 2 * token_ms
    assert long_ms / 2 < pace.first_ms + LONG_TOKENS_MAX * pace.input_ms < 2 * long_ms
    assert pace.first_ms > 0.001 and pace.input_ms > 0.001


def test_a_model_that_embeds_embeds() -> None:
    """Protects readiness and predictions: what makes no text is asked for vectors, and its pace is that of its row."""
    engine = Listening(SimulatedEngine(SimulatedReplica(SLOW_ROW)))
    pace = _measure(engine, embeds=True)
    asked = [call.demands.embedding for call in engine.calls]
    assert len(asked) == 3 and all(each is not None and len(each.texts) == 1 for each in asked)
    assert {(call.prompt, call.chat, call.max_output_tokens) for call in engine.calls} == {("", False, 1)}
    long_ms = step_time(SLOW_ROW).milliseconds(0, LONG_TOKENS_MAX, 0, LONG_TOKENS_MAX**2 / 2)
    assert long_ms / 2 < pace.first_ms + LONG_TOKENS_MAX * pace.input_ms < 2 * long_ms


def test_an_engine_that_reports_no_usage_of_embeddings_is_asked_for_a_count() -> None:
    """Protects the pace: what is counted is the text that was embedded."""
    engine = Spoken([Vectors("", vectors=(b"abcd",))], None, 30)
    _measure(engine, embeds=True)
    assert len(engine.counted_prompts) == 3 and all(isinstance(each, str) and each for each in engine.counted_prompts)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("context_tokens", "tokens"), [(400, 100), (2_048, 512), (1_000_000, 2_000)])
def test_a_long_prompt_takes_a_quarter_of_the_window_at_most(chat: bool, context_tokens: Tokens, tokens: Tokens) -> None:
    """Protects small windows and large bills: few tokens out, a bounded number in, and prompts that share no beginning."""
    engine = Listening(SimulatedEngine(SimulatedReplica(kv_tokens=1_000_000)))
    _measure(engine, context_tokens=context_tokens, chat=chat)
    first, short, long = engine.calls
    assert {call.max_output_tokens for call in engine.calls} == {OUTPUT_TOKENS} and {call.chat for call in engine.calls} == {
        chat
    }
    assert _words(first) == _words(short) and len(_words(short)) == 8 and _words(long)[0] != _words(short)[0]
    assert 0.9 * tokens < len(" ".join(_words(long))) / 4 <= tokens


def test_a_short_prompt_that_came_late_makes_no_input_cheap() -> None:
    """Protects the door and the room for unread prompts: a pause of the machine in either short prompt changes nothing."""

    def pace(paused_step: int) -> ReplicaPace:
        steps = count()
        return _measure(SimulatedEngine(SimulatedReplica(SLOW_ROW, noise=lambda ms: ms + 400 * (next(steps) == paused_step))))

    assert pace(0) == pace(OUTPUT_TOKENS) == pace(-1)


class Alike(Listening):
    """An engine that reports the same input for every prompt."""

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        return super().start(call, _Counted(sink))


class _Counted:
    def __init__(self, sink: EngineSink) -> None:
        self._sink = sink
        self.on_deltas = sink.on_deltas

    def on_end(self, end: EngineEnd) -> None:
        self._sink.on_end(replace(end, usage=EngineUsage(10, 0, OUTPUT_TOKENS)))


def test_an_engine_that_does_not_count_is_not_taken_for_a_slow_reader() -> None:
    """Protects the door: where every prompt counts alike a moment's delay says nothing of a token, and must bound nothing."""
    steps = count()
    late = SimulatedReplica(SLOW_ROW, noise=lambda ms: ms + 400 * (next(steps) == 2 * OUTPUT_TOKENS))
    assert _measure(Alike(SimulatedEngine(late))).input_ms == 0.001


def test_a_slow_replica_reads_a_shorter_prompt() -> None:
    """Protects starts: who would read the long prompt for minutes is given one for seconds, and is measured all the same."""
    slow = SimulatedReplica(SLOW_ROW, noise=lambda duration_ms: duration_ms * 100)
    engine = Listening(SimulatedEngine(slow))
    assert _measure(engine).output_ms > 1_000
    assert len(_words(engine.calls[-1])) < 100


def test_a_replica_that_reads_for_seconds_has_a_pace() -> None:
    """Protects the door: the slowest reader is the last that may be taken for one that reads at once."""
    quick = _measure(SimulatedEngine(SimulatedReplica(SLOW_ROW))).input_ms
    slowest = _measure(SimulatedEngine(SimulatedReplica(SLOW_ROW, noise=lambda duration_ms: duration_ms * 60))).input_ms
    assert slowest > 10 * quick


def test_a_cache_that_remembers_an_earlier_warm_up_changes_nothing() -> None:
    """Protects the pace of a replica that was warmed up before: its prefix cache does not make it look faster."""

    async def main() -> list[ReplicaPace]:
        engine = SimulatedEngine(SimulatedReplica(SLOW_ROW, prefix_cache=True))
        warm_up = WarmUp(engine, VirtualClock(_loop()), _address(), chat=True)
        return [await warm_up.measure() for _ in range(2)]

    first, second = run(main(), until_ms=600_000)
    assert second.input_ms == pytest.approx(first.input_ms, rel=0.01)


def test_the_first_generation_is_not_measured() -> None:
    """Protects the pace from what happens once: compiling, loading, connecting."""

    async def main() -> tuple[ReplicaPace, ReplicaPace]:
        cold = SimulatedReplica(noise=lambda duration_ms: duration_ms + (5_000 if len(engine.calls) == 1 else 0))
        engine = Listening(SimulatedEngine(cold))
        clock = VirtualClock(_loop())
        once = await WarmUp(engine, clock, _address(), chat=True).measure()
        return once, await WarmUp(SimulatedEngine(), clock, _address(), chat=True).measure()

    cold, warm = run(main(), until_ms=600_000)
    assert cold == warm


def test_an_engine_without_figures_is_measured_by_our_own() -> None:
    """Protects engines that report no usage: their count is asked for, else bytes stand for tokens, and no figure is zero."""
    for counted in (7, None):
        engine = Spoken([Delta("a"), Delta("b")], None, counted)
        assert _measure(engine, chat=False) == ReplicaPace(0.001, 0.001, 0.001)
        assert len(engine.counted_prompts) == 3


@pytest.mark.parametrize("deltas", [[], [Delta("a", 4)]])
def test_an_output_that_comes_at_once_has_a_pace(deltas: list[Delta]) -> None:
    """Protects the start of a replica whose reply is empty, or in one piece."""
    engine = Spoken(deltas, EngineUsage(30, 20, len(deltas)))
    assert _measure(engine) == ReplicaPace(0.001, 0.001, 0.001) and not engine.counted_prompts


def test_a_replica_that_fails_or_hangs_is_a_fault() -> None:
    """Protects readiness: no pace of a replica that does not generate, and no endless wait for one."""
    lost, hung = SimulatedEngine(), SimulatedEngine()
    with pytest.raises(errors.ReplicaLost):
        _measure(Listening(lost, before=lambda: lost.lose("r")))
    with pytest.raises(errors.EngineError, match="did not end"):
        _measure(Listening(hung, before=lambda: hung.stall("r")))
