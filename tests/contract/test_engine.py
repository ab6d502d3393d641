"""Every engine keeps the Engine port's promises, and a slot of llama.cpp is free only when it is known to be."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.contract.engine_servers import (
    CONTEXT_TOKENS,
    HEAD,
    IMPLEMENTATIONS,
    WAIT_S,
    Children,
    Implementation,
    ScriptedServer,
    Sink,
    UnderTest,
    Wire,
    llamacpp,
    stop_confirmed,
    text_chunk,
)

from weir.core.endings import FinishReason
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.llamacpp import LlamaCppEngine
from weir.errors import EngineFault, EngineRejected, ReplicaLost
from weir.ports import EngineCall

CONVERSATION = (Message("system", "Be brief."), Message("user", "Count to ten, please."))
LONG = "apple river stone " * 150


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Engine processes of this module."""
    started = Children()
    yield started
    started.close()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Each implementation of the port."""
    chosen: Implementation = request.param
    return chosen


@pytest.fixture
async def under_test(implementation: Implementation, children: Children) -> AsyncIterator[UnderTest]:
    """A replica that tests share."""
    async with implementation(children, False) as opened:
        yield opened


# ── what every engine does ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chat", [True, False])
async def test_output_and_usage(under_test: UnderTest, chat: bool) -> None:
    """Output arrives with rising counts, and the end's usage is the last of them."""
    sink = await under_test.finish(under_test.call(CONVERSATION if chat else "1, 2, 3,", chat=chat, most=20))
    [end] = sink.ends
    assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert end.usage is not None and 0 < end.usage.output_tokens <= 20
    counts = [delta.tokens for delta in sink.deltas]
    assert counts == sorted(set(counts), key=lambda count: count or 0) and counts[-1] == end.usage.output_tokens
    assert end.output_tokens_seen == end.usage.output_tokens and sink.text


@pytest.mark.parametrize("prompt", ["1, 2, 3,", "a  b\n<|im_start|> \u017c\U0001f600 x", CONVERSATION, LONG])
async def test_input_is_counted_exactly(under_test: UnderTest, prompt: str | tuple[Message, ...]) -> None:
    """The count before is what the engine says it used."""
    assert under_test.replica.counts_tokens
    for chat in (True, False) if isinstance(prompt, str) else (True,):
        counted = None
        for _ in range(20):  # a busy machine may take longer than a count may
            counted = counted or await under_test.engine.count_input(under_test.replica, prompt, chat)
        [end] = (await under_test.finish(under_test.call(prompt, chat=chat, most=1))).ends
        assert end.usage is not None and counted == end.usage.input_tokens


async def test_the_room_of_its_kv_memory_is_found(under_test: UnderTest) -> None:
    """Placement knows what fits a replica: its own figure, in tokens, which another probe does not change."""
    assert under_test.replica.kv_tokens == under_test.kv_tokens
    assert await under_test.engine.probe(under_test.replica) == under_test.replica


async def test_a_repeated_prompt_is_not_cached(under_test: UnderTest) -> None:
    """No tenant's prompt speeds up another's, whatever lane it ran in."""
    for lane in (0, 0, 1):
        [end] = (await under_test.finish(under_test.call(CONVERSATION, lane=lane, chat=True, most=2))).ends
        assert end.usage is not None and end.usage.cached_input_tokens == 0


async def test_cancel_while_decoding(under_test: UnderTest) -> None:
    """A cancel stops the engine, which is confirmed; the sink hears nothing afterwards, and the lane is free."""
    sink = Sink(on_first=lambda: run.cancel())
    run = under_test.engine.start(under_test.call(most=300), sink)
    await sink.begun()
    run.cancel()
    await stop_confirmed(run)
    await under_test.check_idle(0)
    await under_test.finish(under_test.call(most=3))
    assert sink.calls == 1


@pytest.mark.parametrize("prompt", ["1, 2, 3,", LONG])
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("after_s", [None, 0.03])
async def test_cancel_before_the_first_token(
    under_test: UnderTest, prompt: str, connected: bool, after_s: float | None
) -> None:
    """A cancel before it is sent, before its slot or while its prompt is read stops it; a stop is never confirmed too early."""
    if connected:
        await under_test.finish(under_test.call(lane=1, most=1))
    sink = Sink()
    run = under_test.engine.start(under_test.call(prompt, lane=1, most=300), sink)
    if after_s is not None:
        await asyncio.sleep(after_s)
    told = sink.calls
    run.cancel()
    await stop_confirmed(run)
    await under_test.check_idle(1)
    await under_test.finish(under_test.call(lane=1, most=3))
    assert sink.calls == told


async def test_pause_and_resume(under_test: UnderTest) -> None:
    """A paused run says nothing while another runs to its end; resumed, it loses nothing."""
    sink = Sink(on_first=lambda: run.pause())
    run = under_test.engine.start(under_test.call(most=60), sink)
    await sink.begun()
    await under_test.finish(under_test.call(lane=1, most=30))
    assert sink.calls == 1
    run.resume()
    end = await sink.end()
    alone = await under_test.finish(under_test.call(most=60))
    assert sink.text == alone.text and end.usage == alone.ends[0].usage


async def test_lanes_do_not_disturb_each_other(under_test: UnderTest) -> None:
    """A cancel in one lane changes nothing in the other."""
    alone = await under_test.finish(under_test.call(most=40))
    one, two = Sink(), Sink()
    under_test.engine.start(under_test.call(most=40), one)
    other = under_test.engine.start(under_test.call("4, 5,", lane=1, most=300), two)
    await asyncio.gather(one.begun(), two.begun())
    other.cancel()
    await stop_confirmed(other)
    end = await one.end()
    assert one.text == alone.text and end == alone.ends[0]


async def test_too_long(under_test: UnderTest) -> None:
    """A prompt beyond the window is refused as such, without a word of it in the fault, and the lane goes on."""
    [end] = (await under_test.finish(under_test.call("zebra " * 3 * CONTEXT_TOKENS))).ends
    assert isinstance(end.fault, EngineRejected) and "zebra" not in end.fault.detail + repr(end.fault.members)
    await under_test.finish(under_test.call(most=3))


async def test_after_the_end(under_test: UnderTest) -> None:
    """Every call on a run that ended is harmless."""
    sink = Sink()
    run = under_test.engine.start(under_test.call(most=3), sink)
    await sink.end()
    for act in (run.pause, run.resume, run.cancel):
        act()
        await stop_confirmed(run)
    assert len(sink.ends) == 1


async def test_a_lost_replica(implementation: Implementation, children: Children) -> None:
    """A replica that dies in mid-stream ends the run as lost, with what was seen, and refuses what comes after."""
    async with implementation(children, True) as under_test:
        sink = Sink()
        run = under_test.engine.start(under_test.call(most=300), sink)
        await sink.begun()
        under_test.kill()
        end = await sink.end()
        assert isinstance(end.fault, ReplicaLost) and end.usage is None
        assert end.output_tokens_seen == sink.deltas[-1].tokens
        if not under_test.own_process:
            return
        if under_test.replica.engine is EngineKind.LLAMACPP:
            with pytest.raises(ReplicaLost):
                await stop_confirmed(run)
        [end] = (await under_test.finish(under_test.call())).ends
        assert isinstance(end.fault, ReplicaLost)
        with pytest.raises(EngineFault):
            await under_test.engine.probe(under_test.replica)
        assert await under_test.engine.count_input(under_test.replica, "a", False) is None


# ── llama.cpp's slots ────────────────────────────────────────────────────────────────────────────────────────────────


class _Slots(ScriptedServer):
    """Streams without an end, and answers /slots from a list of (is processing, prompt tokens read); the last one stays."""

    def __init__(self, answers: list[tuple[bool, int]], *, has_output: bool) -> None:
        super().__init__(self._generate)
        self.answers = answers
        self.asked_at: list[float] = []
        self._has_output = has_output
        self._asked = asyncio.Event()

    async def _generate(self, wire: Wire, body: dict[str, Any]) -> None:
        self._asked.set()
        await wire.raw(HEAD)
        if self._has_output:
            await wire.events(text_chunk("a", chat=True))

    async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
        if path != b"/slots":
            await super()._answer(path, wire, body)
            return
        self.asked_at.append(asyncio.get_running_loop().time())
        processing, read = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await wire.answer(200, [{"id": 1}, {"id": 0, "is_processing": processing, "n_prompt_tokens_processed": read}])

    async def cancel_one(self, stop_ms: int) -> float:
        """Cancel a generation; seconds until the stop was confirmed. Raises ReplicaLost."""
        now = asyncio.get_running_loop().time
        async with self.running():
            engine = LlamaCppEngine(stop_ms=stop_ms)
            sink = Sink()
            run = engine.start(EngineCall(self.address(), 0, "x", True, 9, Sampling()), sink)
            if self._has_output:
                await sink.begun()
            async with asyncio.timeout(WAIT_S):
                await self._asked.wait()
            run.cancel()
            cancelled_at = now()
            try:
                await stop_confirmed(run)
            finally:
                await engine.aclose()
            return now() - cancelled_at


async def test_a_decoding_slot_is_asked_often() -> None:
    """A slot that decoded is free within milliseconds, and is known to be."""
    assert await _Slots([(True, 5), (True, 5), (False, 5)], has_output=True).cancel_one(5_000) < 1


async def test_a_reading_slot_is_asked_rarely() -> None:
    """Before the first token a slot is not believed idle at once, and the server's own second passes between questions."""
    server = _Slots([(True, 0), (False, 0)], has_output=False)
    assert await server.cancel_one(5_000) > 1.2
    assert server.asked_at[1] - server.asked_at[0] > 1


async def test_a_slot_without_progress_is_lost() -> None:
    """A slot that goes on without progress is a lost replica after the bound; progress renews the bound."""
    with pytest.raises(ReplicaLost):
        await _Slots([(True, 5)], has_output=True).cancel_one(300)
    progress = [(True, read) for read in range(40)]
    assert await _Slots([*progress, (False, 0)], has_output=True).cancel_one(300) > 0.5


@pytest.mark.model
async def test_cancel_in_prefill_beside_a_decoding_lane(children: Children) -> None:
    """While another lane decodes, a prompt that is being read stops too, and is confirmed only when it did."""
    async with llamacpp(children, False) as under_test:
        one, two = Sink(), Sink()
        decoding = under_test.engine.start(under_test.call(most=300), one)
        await one.begun()
        reading = under_test.engine.start(under_test.call(LONG, lane=1, most=300), two)
        reading_began = asyncio.Event()
        for _ in range(600):
            if await under_test.running(1):
                reading_began.set()
                break
            await asyncio.sleep(0.01)
        assert reading_began.is_set()
        told = two.calls
        reading.cancel()
        await stop_confirmed(reading)
        await under_test.check_idle(1)
        decoding.cancel()
        await stop_confirmed(decoding)
        assert two.calls == told
