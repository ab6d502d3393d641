"""Every way in which an OpenAI-shaped server can answer or break ends as the right output, fault or capability."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.contract.engine_servers import (
    CONTEXT_TOKENS,
    DONE,
    HEAD,
    METRICS,
    ScriptedServer,
    Sink,
    Wire,
    stop_confirmed,
    text_chunk,
    usage_of,
)

from weir.core.endings import FinishReason
from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.errors import EngineError, EngineFault, EngineRejected, ReplicaLost, Stalled
from weir.messages import ReplicaAddress
from weir.ports import Delta, EngineCall, EngineEnd, EngineUsage

CONVERSATION = (Message("system", "Be brief."), Message("user", "Count to ten, please."))


# ── what servers do to us ────────────────────────────────────────────────────────────────────────────────────────────


async def _run_script(
    script: Callable[[Wire, dict[str, Any]], Awaitable[None]],
    *,
    chat: bool = True,
    first_output_ms: int = 20_000,
    idle_ms: int = 20_000,
    **server: Any,
) -> Sink:
    """One generation against a script."""
    async with ScriptedServer(script, **server).running() as running:
        engine = OpenAICompatibleEngine(first_output_ms=first_output_ms, idle_ms=idle_ms)
        sink = Sink()
        run = engine.start(EngineCall(running.address(model="m"), 0, "zebra", chat, 9, Sampling()), sink)
        await sink.end()
        await stop_confirmed(run)
        await engine.aclose()
    return sink


def _stream(*payloads: bytes | dict[str, Any], end: bool = True) -> Callable[[Wire, dict[str, Any]], Awaitable[None]]:
    """A script that sends these events, and ends cleanly or resets the connection."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD)
        await wire.events(*payloads)
        await (wire.end() if end else _reset(wire))

    return script


async def _reset(wire: Wire) -> None:
    await asyncio.sleep(0.05)  # so that what was written is read before the reset discards it
    wire.cut()


def _chat(text: str | None, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    return text_chunk(text, finish, chat=True, **extra)


def timed(predicted: int) -> dict[str, Any]:
    """llama.cpp's timings, as far as they count tokens."""
    return {"predicted_n": predicted, "predicted_ms": 1.5}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]}
USAGE = {"choices": [], **usage_of(7, 2, 3)}
STOPPED = _chat(None, "stop")


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_any_cut_and_line_end(split: int, line_end: bytes) -> None:
    """The same reply, however it is cut, also inside a character, and whatever ends its lines."""
    script = _stream(ROLE, _chat("za"), _chat("\u017c\U0001f600"), STOPPED, USAGE, DONE)
    sink = await _run_script(script, split=split, line_end=line_end)
    assert [delta.text for delta in sink.deltas if delta.text] == ["za", "\u017c\U0001f600"]
    assert sink.ends == [EngineEnd(FinishReason.STOP, EngineUsage(7, 3, 2), None, 2)]


async def test_one_call_per_read() -> None:
    """All deltas that arrive together reach the sink in one call."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD + wire.framed(*[b'{"choices":[{"delta":{"content":"x"}}]}'] * 30) + wire.framed(DONE))

    sink = await _run_script(script)
    assert [len(batch) for batch in sink.batches] == [30]


@pytest.mark.parametrize("last", [DONE, b"{"])
async def test_cancel_from_within_a_call(last: bytes) -> None:
    """A sink that cancels on its first output hears nothing more, also where the end arrived in the same read."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(
            HEAD + wire.framed(b'{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}', last) + b"0\r\n\r\n"
        )

    async with ScriptedServer(script).running() as server:
        engine = OpenAICompatibleEngine()
        sink = Sink(on_first=lambda: run.cancel())
        run = engine.start(EngineCall(server.address(), 0, "x", True, 9, Sampling()), sink)
        await sink.begun()
        await stop_confirmed(run)
        await engine.aclose()
        assert sink.calls == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("content_filter", FinishReason.CONTENT_FILTER),
        ("", FinishReason.STOP),
        ("none", FinishReason.STOP),
    ],
)
async def test_finish_reasons(name: str, reason: FinishReason) -> None:
    """Known reasons are ours; what some servers write for none is an ordinary stop at the end mark."""
    assert (await _run_script(_stream(_chat("a", name), DONE))).ends == [EngineEnd(reason, None)]


@pytest.mark.parametrize(
    ("chunks", "deltas", "usage"),
    [
        ([text_chunk("a"), text_chunk("", "stop", **usage_of(3, 1))], [Delta("a"), Delta("", 1)], EngineUsage(3, 0, 1)),
        ([text_chunk("a"), text_chunk("b", "stop")], [Delta("a"), Delta("b")], None),
        (
            [text_chunk("", timings=timed(0)), text_chunk("ab", timings=timed(2)), text_chunk("", "stop")],
            [Delta("ab", 2)],
            None,
        ),
        (
            [text_chunk("a", **usage_of(3, 2)), text_chunk("b", "stop", **usage_of(3, 2, 9))],
            [Delta("a", 2), Delta("b", 2)],
            EngineUsage(3, 3, 2),
        ),
        ([text_chunk("", "stop", usage=None, timings=None, error=None)], [], None),
    ],
)
async def test_counts(chunks: list[dict[str, Any]], deltas: list[Delta], usage: EngineUsage | None) -> None:
    """Usage on the last chunk or on every chunk, llama.cpp's timings, or no count at all: each is taken as it is meant."""
    sink = await _run_script(_stream(*chunks, DONE), chat=False)
    assert sink.deltas == deltas and sink.ends[0].usage == usage


async def test_an_end_without_a_mark() -> None:
    """A clean end after the finish reason is an end, and so is a cut after the usage."""
    for chunks, end in (([_chat("a"), STOPPED], True), ([_chat("a"), STOPPED, USAGE], False)):
        assert (await _run_script(_stream(*chunks, end=end))).ends[0].reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("script", "fault", "text"),
    [
        (_stream(_chat("a"), end=False), ReplicaLost, "a"),
        (_stream(_chat("a"), STOPPED, end=False), ReplicaLost, "a"),
        (_stream(_chat("a")), EngineError, "a"),
        (_stream(_chat("a"), DONE), EngineError, "a"),
        (_stream(_chat("a", "")), EngineError, "a"),
        (_stream(), EngineError, ""),
        (_stream(_chat("a"), _chat("b", "exploded"), DONE), EngineError, "a"),
        (_stream(_chat("a"), {"error": {"message": "zebra", "type": "zebra stripes"}}, DONE), EngineError, "a"),
        (_stream(_chat("a"), {"error": "zebra"}), EngineError, "a"),
        (_stream(_chat("a"), b"{"), EngineError, "a"),
        (_stream(_chat("a"), b'{"choices": [{"text": 1}]}'), EngineError, "a"),
        (_stream(_chat("a"), b'{"choices": [{"text": "\\ud800"}]}'), EngineError, "a"),
        (_stream(_chat("a"), b'{"choices": [{"text": "\xff"}]}'), EngineError, "a"),
        (_stream(_chat("a"), b'{"choices": [], "deep": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"), EngineError, "a"),
        (_stream(_chat("a"), usage_of(-1, 1)), EngineError, "a"),
        (_stream(_chat("a"), b"x" * 2_000_000), EngineError, "a"),
        (_stream(_chat("a"), {"error": {"type": "exceed_context_size_error", "n_ctx": 5}}), EngineRejected, "a"),
    ],
)
async def test_broken_streams(
    script: Callable[[Wire, dict[str, Any]], Awaitable[None]], fault: type[EngineFault], text: str
) -> None:
    """What came before the fault is delivered; the fault is the right one and repeats nothing of what the engine said."""
    sink = await _run_script(script)
    [end] = sink.ends
    assert type(end.fault) is fault and sink.text == text
    assert "zebra" not in end.fault.detail


@pytest.mark.parametrize(
    ("status", "content", "fault", "words"),
    [
        (400, {"error": {"message": "zebra", "type": "BadRequestError"}}, EngineRejected, "400 (BadRequestError)"),
        (400, {"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 5}}, EngineRejected, "9 tokens"),
        (422, {"detail": ["zebra"]}, EngineRejected, "422"),
        (400, {"message": "zebra", "type": "zebra stripes"}, EngineRejected, "400"),
        (413, "zebra", EngineRejected, "413"),
        (401, {"error": {"type": "authentication_error"}}, EngineError, "401 (authentication_error)"),
        (404, {}, EngineError, "404"),
        (429, {}, EngineError, "429"),
        (500, {"error": {"message": "zebra", "type": "InternalServerError"}}, EngineError, "500 (InternalServerError)"),
        (503, {"error": {"message": "Loading model", "type": "unavailable_error"}}, EngineError, "503 (unavailable_error)"),
        (302, {}, EngineError, "302"),
    ],
)
async def test_refusals(status: int, content: Any, fault: type[EngineFault], words: str) -> None:
    """A refusal of the request is one; what is wrong with the replica or our standing there is an engine error."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.answer(status, content)

    [end] = (await _run_script(script)).ends
    assert type(end.fault) is fault and words in end.fault.detail
    assert "zebra" not in end.fault.detail + repr(end.fault.members)


async def test_the_engines_numbers_of_a_refusal() -> None:
    """A refusal for length carries the engine's own numbers."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.answer(400, {"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 5}})

    [end] = (await _run_script(script)).ends
    assert end.fault is not None and dict(end.fault.members) == {"n_prompt_tokens": 9, "n_ctx": 5}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("noise", ["nothing", "comments", "roles", "empty chunks"])
async def test_silence(begun: bool, noise: str) -> None:
    """Silence beyond the bound is Stalled, before the first output and after it; what carries no output is silence too."""
    gone = asyncio.Event()
    chunks: dict[str, dict[str, Any]] = {"roles": ROLE, "empty chunks": {"choices": []}}

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD if begun or noise != "nothing" else b"")
        if begun:
            await wire.events(_chat("a"))
        try:
            while not wire.is_cut:  # bounded by the client's patience
                await asyncio.sleep(0.01)
                await wire.events(*([chunks[noise]] if noise in chunks else []))
                await wire.raw(b"3\r\n:\n\n\r\n" if noise == "comments" else b"")
        finally:
            gone.set()

    first_output_ms, idle_ms = (60_000, 150) if begun else (150, 60_000)
    [end] = (await _run_script(script, first_output_ms=first_output_ms, idle_ms=idle_ms)).ends
    assert type(end.fault) is Stalled
    assert gone.is_set()


@pytest.mark.parametrize("hidden", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
async def test_output_that_is_not_relayed_is_no_silence(hidden: dict[str, Any]) -> None:
    """An engine that reasons, or calls a tool, works: it is not stalled, though its client is shown none of that."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD)
        for _ in range(40):
            await asyncio.sleep(0.02)
            await wire.events({"choices": [{"index": 0, "delta": hidden, "finish_reason": None}]})
        await wire.events(_chat("a"), STOPPED, USAGE, DONE)
        await wire.end()

    sink = await _run_script(script, first_output_ms=500, idle_ms=500)
    assert sink.ends[0].reason is FinishReason.STOP and sink.text == "a"


async def test_a_first_output_may_take_longer_than_the_next() -> None:
    """A long prompt that is read in silence is no stall."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(HEAD)
        await asyncio.sleep(0.6)
        await wire.events(_chat("a"), STOPPED, USAGE, DONE)
        await wire.end()

    assert (await _run_script(script, idle_ms=150)).ends[0].reason is FinishReason.STOP


async def test_a_paused_run_is_not_silent() -> None:
    """The bound of silence doesn't run while we ourselves don't read."""

    async with ScriptedServer(_stream(_chat("a"), STOPPED, USAGE, DONE)).running() as server:
        engine = OpenAICompatibleEngine(first_output_ms=300, idle_ms=300)
        sink = Sink()
        run = engine.start(EngineCall(server.address(), 0, "x", True, 9, Sampling()), sink)
        run.pause()
        await asyncio.sleep(0.7)  # two bounds pass while paused
        assert sink.calls == 0
        run.resume()
        assert (await sink.end()).reason is FinishReason.STOP
        await engine.aclose()


async def test_what_is_sent() -> None:
    """Exactly our own fields and headers go to an engine, and only what its replica can take."""
    sampling = Sampling(temperature=0.5, top_p=0.9, seed=7, stop=("x",), presence_penalty=0.1, frequency_penalty=0.2)
    async with ScriptedServer().running() as server:
        engine = OpenAICompatibleEngine()
        plain = server.address(model="m")
        able = server.address(model="m", api_key="k", continuous_usage=True, cache_salt=True)
        for call in (
            EngineCall(plain, 0, "hi", True, 2, Sampling(), cache_salt="salt"),
            EngineCall(able, 0, "hi", False, 2, sampling, cache_salt="salt"),
            EngineCall(able, 0, CONVERSATION, True, 2, Sampling()),
        ):
            sink = Sink()
            engine.start(call, sink)
            await sink.end()
        await engine.aclose()
    bodies = [body for _, body in server.requests]
    common = {"model": "m", "max_tokens": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert bodies[0] == {**common, "messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
    assert bodies[1] == {
        **common, "prompt": "hi", "stream_options": options, "cache_salt": "salt", "temperature": 0.5, "top_p": 0.9, "seed": 7,
        "stop": ["x"], "presence_penalty": 0.1, "frequency_penalty": 0.2,
    }  # fmt: skip
    assert bodies[2]["messages"][0] == {"role": "system", "content": "Be brief."} and "cache_salt" not in bodies[2]
    heads = [head for head, _ in server.requests]
    assert heads[0].startswith(b"POST /v1/chat/completions ") and heads[1].startswith(b"POST /v1/completions ")
    assert b"Authorization" not in heads[0] and b"Authorization: Bearer k\r\n" in heads[1]


async def test_nobody_listens() -> None:
    """A refused connection is a lost replica that runs nothing, told later and never from within start."""
    for engine in (OpenAICompatibleEngine(), LlamaCppEngine()):
        sink = Sink()
        address = ReplicaAddress("r", "p", "v", EngineKind.OPENAI, "http://127.0.0.1:1/v1", "m", 1)
        run = engine.start(EngineCall(address, 0, "x", True, 1, Sampling()), sink)
        assert sink.calls == 0
        fault = (await sink.end()).fault
        assert type(fault) is ReplicaLost and not fault.reached
        await stop_confirmed(run)
        with pytest.raises(ReplicaLost):
            await engine.probe(address)
        await engine.aclose()


# ── probes and counts ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_probing_vllm() -> None:
    """A vLLM is found with its model, its window and all it can do, also behind a URL that ends in /v1."""
    async with ScriptedServer().running() as server:
        engine = OpenAICompatibleEngine()
        server.url += "/v1/"
        found = await engine.probe(server.address())
        assert found == server.address(
            model="m",
            context_tokens=CONTEXT_TOKENS,
            counts_tokens=True,
            continuous_usage=True,
            cache_salt=True,
            kv_tokens=8_000,
        )
        with pytest.raises(EngineError):
            await engine.probe(server.address(model="another"))
        await engine.aclose()
    assert server.generating == 0


async def test_probing_a_bare_server() -> None:
    """A server with completions and a model is healthy, keeps its configured window, and can't do anything more."""
    async with ScriptedServer(dialect="bare").running() as server:
        engine = OpenAICompatibleEngine()
        address = server.address(model="m", context_tokens=9)
        assert await engine.probe(address) == address
        assert await engine.count_input(address, "a", False) is None
        await engine.aclose()


@pytest.mark.parametrize(
    ("metrics", "kv_tokens"),
    [
        (METRICS, 8_000),
        (b"# TYPE vllm:cache_config_info gauge\r\n" + METRICS + METRICS.replace(b"500", b"700"), 19_200),
        (b'vllm:cache_config_info{num_gpu_blocks="3",block_size="32"}', 96),
        (METRICS + METRICS.replace(b'"500"', b'"None"'), None),
        (METRICS.replace(b"block_size", b"hash_block_size"), None),
        (METRICS.replace(b"500", b"0"), None),
        (METRICS.replace(b"500", b"5" * 13), None),
        (METRICS.replace(b"}", b""), None),
        (b"python_info{} 1.0\n", None),
        (b"\xff\x00", None),
        (METRICS + b"#" * 2_000_000, None),
        (b"", None),
    ],
)
async def test_the_room_that_metrics_tell_of(metrics: bytes, kv_tokens: int | None) -> None:
    """Blocks times their size, of all engines of a server; anything broken, missing or without a bound is unknown, no fault."""
    async with ScriptedServer(metrics=metrics).running() as server:
        engine = OpenAICompatibleEngine()
        assert (await engine.probe(server.address())).kv_tokens == kv_tokens
        await engine.aclose()


async def test_metrics_that_do_not_come_are_no_fault() -> None:
    """A server whose metrics hang, or break off, is as healthy as before; once it told its room, it is not asked again."""

    class _Hanging(ScriptedServer):
        hangs = True

        async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
            if path != b"/metrics":
                await super()._answer(path, wire, body)
            elif not self.hangs:
                wire.cut()

    server = _Hanging()
    async with server.running():
        engine = OpenAICompatibleEngine(probe_ms=300)
        assert (await engine.probe(server.address())).kv_tokens is None
        server.hangs = False
        found = await engine.probe(server.address())
        assert found.kv_tokens is None
        asked = len(server.requests)
        assert (await engine.probe(msgspec.structs.replace(found, kv_tokens=5))).kv_tokens == 5
        assert not any(b"/metrics" in head for head, _ in server.requests[asked:])
        await engine.aclose()


@pytest.mark.parametrize(
    ("status", "content", "words", "stays"),
    [
        (401, {"error": {"message": "zebra"}}, "refuses the key (engine.api_key_file)", True),
        (403, {}, "refuses the key (engine.api_key_file)", True),
        (404, {}, "lists no models: /v1/models answers 404", False),
        (500, {"error": "zebra"}, "lists no models: /v1/models answers 500", False),
        (200, "zebra", "lists no models", False),
        (200, {"data": "zebra"}, "lists no models", False),
        (200, {"data": []}, "lists no models", False),
        (200, {"data": ["zebra", {"id": ""}, {"id": 7}, {}]}, "lists no models", False),
    ],
)
async def test_probing_what_is_no_engine(status: int, content: Any, words: str, stays: bool) -> None:
    """Whatever speaks HTTP is no replica: it must list a model to us. Only a refused key is not worth asking again."""

    class _Other(ScriptedServer):
        async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
            await wire.answer(status if path == b"/v1/models" else min(status, 404), content)

    async with _Other().running() as server:
        engine = OpenAICompatibleEngine()
        for model in ("", "m"):
            with pytest.raises(EngineError) as refused:
                await engine.probe(server.address(model=model))
            assert words in refused.value.detail and "zebra" not in refused.value.detail
            assert (refused.value.retry_advice is False) is stays
        await engine.aclose()


async def test_probing_while_it_loads() -> None:
    """A replica that answers 503 is not ready."""

    class _Loading(ScriptedServer):
        async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
            await wire.answer(503, {"error": {"message": "Loading model"}})

    async with _Loading().running() as server:
        for engine in (OpenAICompatibleEngine(), LlamaCppEngine()):
            with pytest.raises(EngineError):
                await engine.probe(server.address())
            await engine.aclose()
