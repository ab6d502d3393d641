"""The simulated engine keeps the Engine port's promises, and the faults that tests order from it happen as ordered."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from weir.core.endings import FinishReason
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.engines.simulated_faults import NO_FAULTS, Faults
from weir.errors import EngineRejected, ReplicaLost, Stalled
from weir.messages import ReplicaAddress
from weir.ports import Delta, Engine, EngineCall, EngineEnd, EngineRun
from weir.sim.virtual_loop import run

CONTEXT_TOKENS = 1_000
STEP_S = 0.003  # no step of the demo row with a few short sequences takes longer


def _address(name: str) -> ReplicaAddress:
    return ReplicaAddress(name, "pool", "revision", EngineKind.SIMULATED, "", "demo", CONTEXT_TOKENS)


A, B = _address("a"), _address("b")


def _call(replica: ReplicaAddress = A, prompt: str = "hello", max_output_tokens: int = 20, **sampling: Any) -> EngineCall:
    return EngineCall(replica, 0, prompt, True, max_output_tokens, Sampling(**sampling))


class _Sink:
    """Keeps what it is told. on_first: called with the first output, from within the engine."""

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self.deltas: list[Delta] = []
        self.ends: list[EngineEnd] = []
        self.calls_after_end = 0
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self._on_first = on_first

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        self.calls_after_end += len(self.ends)
        self.deltas.extend(deltas)
        self.started.set()
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    def on_end(self, end: EngineEnd) -> None:
        self.ends.append(end)
        self.ended.set()


def _engine(**replica: Any) -> SimulatedEngine:
    return SimulatedEngine(SimulatedReplica(output_length=lambda _: 50, **replica))


def _simulate(main: Coroutine[Any, Any, None]) -> None:
    run(main, until_ms=600_000)


async def _finish(engine: Engine, call: EngineCall) -> _Sink:
    sink = _Sink()
    started = engine.start(call, sink)
    await sink.ended.wait()
    await started.stopped()
    return sink


async def _deltas_and_end(engine: Engine) -> None:
    sink = await _finish(engine, _call())
    assert [delta.tokens for delta in sink.deltas] == list(range(1, 21))
    [end] = sink.ends
    assert end.fault is None and end.reason is FinishReason.LENGTH and end.usage is not None
    assert (end.usage.output_tokens, end.output_tokens_seen, end.usage.cached_input_tokens) == (20, 20, 0)
    assert end.usage.input_tokens == await engine.count_input(A, "hello", True)
    assert sink.calls_after_end == 0
    await engine.aclose()


def test_a_run_streams_cumulative_counts_and_ends_once() -> None:
    """Deltas carry the engine's own count; the end carries usage that agrees with it and with `count_input`."""
    _simulate(_deltas_and_end(_engine()))


async def test_it_runs_on_a_real_loop_too() -> None:
    """The engine needs nothing of virtual time: the same run on the machine's loop."""
    async with asyncio.timeout(20):
        await _deltas_and_end(_engine())


def test_the_same_call_gives_the_same_text_everywhere() -> None:
    """Neither the replica nor its other work changes a reply; the seed does."""

    async def main() -> None:
        engine = _engine()
        alone = await _finish(engine, _call(seed=1))
        first, second, other = await asyncio.gather(
            _finish(engine, _call(seed=1)), _finish(engine, _call(B, seed=1)), _finish(engine, _call(seed=2))
        )
        assert alone.text == first.text == second.text != other.text
        stopped = await _finish(engine, _call(seed=1, stop=(alone.deltas[4].text,)))
        assert alone.text.startswith(stopped.text) and stopped.ends[0].reason is FinishReason.STOP

    _simulate(main())


def test_a_cancelled_run_leaves_at_the_next_step_without_a_word() -> None:
    """A cancel frees the replica within one step, and the sink hears nothing more; other runs go on."""

    async def main() -> None:
        engine, loop = _engine(), asyncio.get_running_loop()
        sink = _Sink()
        other = loop.create_task(_finish(engine, _call(max_output_tokens=50)))
        cancelled = engine.start(_call(max_output_tokens=500), sink)
        await sink.started.wait()
        assert engine.running("a") == 2
        heard, asked_s = len(sink.deltas), loop.time()
        cancelled.cancel()
        cancelled.cancel()
        await cancelled.stopped()
        assert loop.time() - asked_s < STEP_S and engine.running("a") == 1
        assert len((await other).deltas) == 50
        assert len(sink.deltas) == heard and sink.ends == []
        await cancelled.stopped()

    _simulate(main())


def test_a_waiting_run_can_be_cancelled() -> None:
    """Beyond its concurrency the replica queues; a cancel there frees the place as fast."""

    async def main() -> None:
        engine = _engine(concurrency=1)
        first, second = _Sink(), _Sink()
        engine.start(_call(), first)
        waiting = engine.start(_call(), second)
        await first.started.wait()
        assert (engine.load("a").running, engine.load("a").waiting) == (1, 1)
        waiting.cancel()
        await waiting.stopped()
        assert engine.load("a").waiting == 0
        await first.ended.wait()
        assert not second.deltas and not second.ends

    _simulate(main())


def test_a_sink_may_cancel_from_within() -> None:
    """A relay that sees its client gone cancels while it is being told; nothing follows."""

    async def main() -> None:
        engine = _engine()
        runs: list[EngineRun] = []
        sink = _Sink(on_first=lambda: runs[0].cancel())
        runs.append(engine.start(_call(), sink))
        await sink.started.wait()
        await runs[0].stopped()
        await asyncio.sleep(1)
        assert len(sink.deltas) == 1 and not sink.ends and engine.running("a") == 0

    _simulate(main())


def test_a_paused_run_keeps_everything_until_resumed() -> None:
    """Backpressure loses nothing and reorders nothing; the end comes after the output."""

    async def main() -> None:
        engine = _engine()
        sink = _Sink()
        paused = engine.start(_call(), sink)
        await sink.started.wait()
        paused.pause()
        paused.pause()
        heard = len(sink.deltas)
        await paused.stopped()
        await asyncio.sleep(1)
        assert len(sink.deltas) == heard and not sink.ends
        paused.resume()
        paused.resume()
        await sink.ended.wait()
        assert [delta.tokens for delta in sink.deltas] == list(range(1, 21))
        assert sink.text == (await _finish(engine, _call())).text

    _simulate(main())


def test_a_request_beyond_the_window_is_rejected_later_on_the_loop() -> None:
    """`start` never raises and never calls back at once; the refusal names the numbers."""

    async def main() -> None:
        engine = _engine()
        sink = _Sink()
        rejected = engine.start(_call(max_output_tokens=CONTEXT_TOKENS), sink)
        assert not sink.ends
        await sink.ended.wait()
        await rejected.stopped()
        fault = sink.ends[0].fault
        assert isinstance(fault, EngineRejected) and fault.members == {"input_tokens": 9, "limit": CONTEXT_TOKENS}
        assert sink.ends[0].usage is None and engine.running("a") == 0

    _simulate(main())


def test_a_probe_tells_what_the_replica_can_do() -> None:
    """Readiness finds the capabilities and the window."""

    async def main() -> None:
        engine = _engine(context_tokens=4_096, kv_tokens=8_007)
        found = await engine.probe(A)
        assert (found.context_tokens, found.counts_tokens, found.continuous_usage) == (4_096, True, True)
        assert found.kv_tokens == 8_000
        assert (found.name, found.cache_salt) == ("a", False)
        assert await engine.count_input(A, (Message("user", "hello"),), True) == 9

    _simulate(main())


def test_a_lost_replica_ends_its_runs_until_restored() -> None:
    """Running and new work of a lost replica ends ReplicaLost, other replicas don't notice, a restored one serves."""

    async def main() -> None:
        engine = _engine()
        sink, late = _Sink(), _Sink()
        lost = engine.start(_call(), sink)
        other = asyncio.get_running_loop().create_task(_finish(engine, _call(B)))
        await sink.started.wait()
        engine.lose("a")
        assert not sink.ends and engine.running("a") == 0
        await sink.ended.wait()
        fault = sink.ends[0].fault
        assert isinstance(fault, ReplicaLost) and fault.reached and sink.ends[0].output_tokens_seen == len(sink.deltas)
        with pytest.raises(ReplicaLost):
            await lost.stopped()
        engine.start(_call(), late)
        await late.ended.wait()
        fault = late.ends[0].fault
        assert isinstance(fault, ReplicaLost) and not fault.reached and late.ends[0].output_tokens_seen is None
        with pytest.raises(ReplicaLost):
            await engine.probe(A)
        assert await engine.count_input(A, "hello", True) is None
        assert len((await other).deltas) == 20
        engine.restore("a")
        assert len((await _finish(engine, _call())).deltas) == 20

    _simulate(main())


def test_a_sink_may_lose_the_replica_from_within() -> None:
    """A fault ordered by an event of one run ends all runs of the replica, each told once."""

    async def main() -> None:
        engine = _engine()
        first, second = _Sink(on_first=lambda: engine.lose("a")), _Sink()
        engine.start(_call(), first)
        engine.start(_call(), second)
        await first.ended.wait()
        await second.ended.wait()
        await asyncio.sleep(1)
        assert (len(first.deltas), len(second.deltas)) == (1, 0)
        assert [len(first.ends), len(second.ends)] == [1, 1] and engine.running("a") == 0

    _simulate(main())


def test_a_stalled_replica_is_silent_and_goes_on_where_it_was() -> None:
    """Nothing comes, nothing is confirmed within the bound, and nothing is lost once it goes on."""

    async def main() -> None:
        engine = _engine()
        sink, cancelled_sink = _Sink(), _Sink()
        engine.start(_call(), sink)
        cancelled = engine.start(_call(), cancelled_sink)
        await sink.started.wait()
        engine.stall("a")
        heard = len(sink.deltas)
        cancelled.cancel()
        with pytest.raises(ReplicaLost):
            await cancelled.stopped()
        with pytest.raises(Stalled):
            await engine.probe(A)
        assert await engine.count_input(A, "hello", True) is None
        late = asyncio.get_running_loop().create_task(_finish(engine, _call()))
        await asyncio.sleep(60)
        assert len(sink.deltas) == heard and engine.running("a") == 2
        engine.unstall("a")
        await cancelled.stopped()
        await sink.ended.wait()
        assert len(sink.deltas) == len((await late).deltas) == 20 and not cancelled_sink.ends

    _simulate(main())


def test_a_marked_prompt_crashes_its_replica() -> None:
    """One poisonous request takes everything beside it along, and only once it is computed; others live on elsewhere."""

    async def main() -> None:
        crashes: list[str] = []
        engine = _engine(faults=Faults(crash_marker="poison"), on_crash=lambda: crashes.append("crash"))
        beside, poisoned = _Sink(), _Sink()
        engine.start(_call(), beside)
        await beside.started.wait()
        engine.start(_call(prompt="a poisonous one"), poisoned)
        assert not crashes
        await poisoned.ended.wait()
        await beside.ended.wait()
        assert crashes == ["crash"] and not poisoned.deltas
        assert isinstance(beside.ends[0].fault, ReplicaLost) and isinstance(poisoned.ends[0].fault, ReplicaLost)
        assert len((await _finish(engine, _call(B))).deltas) == 20
        engine.restore("a")
        engine.order("a", NO_FAULTS)
        assert len((await _finish(engine, _call(prompt="a poisonous one"))).deltas) == 20

    _simulate(main())


def test_a_marked_prompt_stalls_in_mid_stream() -> None:
    """The replica falls silent after just so many tokens of that request, for everybody, until the fault is taken back."""

    async def main() -> None:
        engine = _engine(faults=Faults(stall_marker="sleepy", stall_after_tokens=5))
        sleepy, beside = _Sink(), _Sink()
        engine.start(_call(prompt="a sleepy one"), sleepy)
        engine.start(_call(), beside)
        await asyncio.sleep(60)
        assert (len(sleepy.deltas), len(beside.deltas)) == (5, 5)
        engine.order("a", NO_FAULTS)
        await sleepy.ended.wait()
        await beside.ended.wait()
        assert len(sleepy.deltas) == len(beside.deltas) == 20

    _simulate(main())


def test_slowness_is_a_factor_and_ends() -> None:
    """Every step takes so many times as long while it is ordered, and no longer afterwards."""

    async def main() -> None:
        engine, loop = _engine(), asyncio.get_running_loop()
        times: list[float] = []
        for faults in (NO_FAULTS, Faults(slowdown=10.0), NO_FAULTS):
            engine.order("a", faults)
            began_s = loop.time()
            await _finish(engine, _call())
            times.append(loop.time() - began_s)
        assert times == pytest.approx([times[0], 10 * times[0], times[0]])

    _simulate(main())


def test_the_prefix_cache_knows_salts() -> None:
    """A repeated prompt comes sooner and says what was cached, under its own salt only; without the cache nothing is."""

    async def main() -> None:
        engine, loop = _engine(prefix_cache=True), asyncio.get_running_loop()
        assert (await engine.probe(A)).cache_salt
        prompt = "wave" * 800
        cached: list[int] = []
        times: list[float] = []
        for salt in ("one", "one", "two", None, None):
            sink, began_s = _Sink(), loop.time()
            engine.start(EngineCall(A, 0, prompt, False, 5, Sampling(), salt), sink)
            await sink.started.wait()
            times.append(loop.time() - began_s)
            await sink.ended.wait()
            usage = sink.ends[0].usage
            assert usage is not None and usage.input_tokens == 800
            cached.append(usage.cached_input_tokens)
        assert cached == [0, 784, 0, 0, 784]
        assert times[1] == pytest.approx(times[4]) and times[0] == pytest.approx(times[2]) == pytest.approx(times[3])
        assert times[1] < times[0]
        load = engine.load("a")
        assert (load.prefix_queries, load.prefix_hits, load.prompt_tokens) == (4_000, 1_568, 4_000)

    _simulate(main())


def test_a_preempted_run_loses_no_word() -> None:
    """Short of KV blocks, runs give way and start over; their text, counts and usage are those of undisturbed ones."""

    async def main() -> None:
        engine = SimulatedEngine(SimulatedReplica(output_length=lambda _: 100, kv_tokens=320))
        prompts = [f"{number} waves" * 20 for number in range(4)]
        calls = [_call(prompt=prompt, max_output_tokens=100) for prompt in prompts]
        together = await asyncio.gather(*(_finish(engine, call) for call in calls))
        assert engine.load("a").preemptions > 0 and engine.load("a").kv_usage == 0
        for call, sink in zip(calls, together, strict=True):
            alone = await _finish(engine, call)
            assert (sink.text, sink.ends) == (alone.text, alone.ends)
        assert engine.load("a").prompt_tokens == 2 * sum(len(prompt) // 4 + 7 for prompt in prompts)

    _simulate(main())


def test_what_memory_cannot_hold_is_rejected() -> None:
    """A request larger than all KV blocks is refused like one beyond the window, instead of waiting for ever."""

    async def main() -> None:
        engine = _engine(kv_tokens=160)
        assert (await engine.probe(A)).context_tokens == 160
        fault = (await _finish(engine, _call(max_output_tokens=152))).ends[0].fault
        assert isinstance(fault, EngineRejected) and fault.members == {"input_tokens": 9, "limit": 160}
        assert len((await _finish(engine, _call(max_output_tokens=151))).deltas) == 50

    _simulate(main())


def test_closing_cancels_everything() -> None:
    """After `aclose` no sink is called, and later calls end ReplicaLost."""

    async def main() -> None:
        engine = _engine()
        sink, late = _Sink(), _Sink()
        closed = engine.start(_call(), sink)
        await sink.started.wait()
        await engine.aclose()
        await closed.stopped()
        heard = len(sink.deltas)
        engine.start(_call(), late)
        await late.ended.wait()
        assert isinstance(late.ends[0].fault, ReplicaLost)
        assert len(sink.deltas) == heard and not sink.ends

    _simulate(main())


def test_noise_and_rows_belong_to_the_replica() -> None:
    """Each name has its own step time: a slow replica beside a fast one."""

    async def main() -> None:
        slow = SimulatedReplica(output_length=lambda _: 50, noise=lambda duration_ms: duration_ms * 100)
        engine, loop = SimulatedEngine(SimulatedReplica(), {"b": slow}), asyncio.get_running_loop()
        await _finish(engine, _call())
        fast_s = loop.time()
        await _finish(engine, _call(B))
        assert loop.time() - fast_s > 50 * fast_s

    _simulate(main())
