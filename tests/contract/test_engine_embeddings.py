"""Embeddings of OpenAI-shaped servers: right ones arrive in order and exactly, and whatever else a server does is its fault."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.contract.engine_servers import (
    API_KEY,
    CONTEXT_TOKENS,
    Children,
    ScriptedServer,
    Sink,
    Wire,
    stop_confirmed,
)

from weir.core.demands import TEXTS_MAX, Demands, Embedding
from weir.core.endings import FinishReason
from weir.core.output import Vectors, vector_of, vectors_of
from weir.core.registry.model import EngineKind
from weir.core.request import Sampling
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.engines.openai_embeddings import ANSWER_BYTES, ANSWER_BYTES_PER_VECTOR
from weir.engines.simulated_api import ServerSpec
from weir.engines.simulated_embeddings import embedding_of
from weir.errors import EngineError, EngineFault, EngineRejected, ReplicaLost, Stalled
from weir.messages import ReplicaAddress
from weir.ports import Engine, EngineCall, EngineEnd, EngineUsage

Script = Callable[[Wire, dict[str, Any]], Awaitable[None]]
TEXTS = ("zebra one", "zebra two")
ONE, TWO = (1.0, -0.5), (0.25, 3.0)


def _call(replica: ReplicaAddress, texts: Sequence[str] = TEXTS, **more: Any) -> EngineCall:
    dimensions = more.pop("dimensions", None)
    return EngineCall(
        replica, 0, "", False, 1, Sampling(), more.get("cache_salt"), Demands(embedding=Embedding(tuple(texts), dimensions))
    )


async def _finish(engine: Engine, call: EngineCall) -> Sink:
    sink = Sink()
    run = engine.start(call, sink)
    await sink.end()
    await stop_confirmed(run)
    return sink


async def _run_script(script: Script, *, bound_ms: int = 20_000, dimensions: int | None = None) -> Sink:
    async with ScriptedServer(script).running() as server:
        engine = OpenAICompatibleEngine(first_output_ms=bound_ms)
        sink = await _finish(engine, _call(server.address(model="m"), dimensions=dimensions))
        await engine.aclose()
    return sink


def _says(content: Any, status: int = 200) -> Script:
    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.answer(status, content)

    return script


def _item(index: int, embedding: Any) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": embedding}


def _coded(*numbers: float) -> str:
    return base64.b64encode(vector_of(numbers)).decode()


def _answer(*items: dict[str, Any], **usage: Any) -> dict[str, Any]:
    return {"object": "list", "data": items, "model": "m", "usage": {"prompt_tokens": 7, "total_tokens": 7, **usage}}


GOOD = (vector_of(ONE), vector_of(TWO))


@pytest.mark.parametrize(
    "content",
    [
        _answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO))),
        _answer(_item(1, _coded(*TWO)), _item(0, _coded(*ONE))),
        _answer(_item(0, list(ONE)), _item(1, list(TWO))),
        _answer(_item(1, [0.25, 3]), _item(0, _coded(*ONE)), completion_tokens=0),
    ],
)
async def test_vectors_come_in_the_order_of_their_texts(content: Any) -> None:
    """Protects callers: base64 or numbers, in whatever order a server lists them; all in one piece, with the server's usage."""
    sink = await _run_script(_says(content))
    [piece] = sink.deltas
    assert isinstance(piece, Vectors) and (piece.text, piece.tokens, piece.vectors) == ("", None, GOOD)
    assert sink.ends == [EngineEnd(FinishReason.STOP, EngineUsage(7, 0, 0))]


async def test_only_what_was_asked_for_is_sent() -> None:
    """Protects engines and tenants: texts, format, size and our own salt; nothing of a caller beside them."""
    async with ScriptedServer(_says(_answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO))))).running() as server:
        engine = OpenAICompatibleEngine()
        await _finish(engine, _call(server.address(model="m", cache_salt=True, api_key="k"), cache_salt="salt", dimensions=2))
        await _finish(engine, _call(server.address(model="m")))
        await engine.aclose()
    (head, first), (_, second) = server.requests
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\n") and b"Authorization: Bearer k\r\n" in head
    plain = {"model": "m", "input": list(TEXTS), "encoding_format": "base64"}
    assert first == {**plain, "dimensions": 2, "cache_salt": "salt"} and second == plain


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"total_tokens": 7}])
async def test_usage_that_is_not_told_is_unknown(usage: Any) -> None:
    """Protects the bill: what no server measured is not taken for zero."""
    content = {**_answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO))), "usage": usage}
    assert (await _run_script(_says(content))).ends == [EngineEnd(FinishReason.STOP, None)]


NAN = base64.b64encode(b"\x00\x00\xc0\x7f").decode()
INFINITE = base64.b64encode(b"\x00\x00\x80\x7f" + b"\x00\x00\x80\xff").decode()


@pytest.mark.parametrize(
    "content",
    [
        _answer(),
        _answer(_item(0, _coded(*ONE))),
        _answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO)), _item(2, _coded(*TWO))),
        _answer(_item(0, _coded(*ONE)), _item(0, _coded(*TWO))),
        _answer(_item(0, _coded(*ONE)), _item(2, _coded(*TWO))),
        _answer(_item(1, _coded(*ONE)), _item(2, _coded(*TWO))),
        _answer(_item(-1, _coded(*ONE)), _item(0, _coded(*TWO))),
        _answer({"embedding": _coded(*ONE)}, _item(1, _coded(*TWO))),
        _answer(_item(0, _coded(*ONE)), _item(1, _coded(1.0))),
        _answer(_item(0, NAN), _item(1, NAN)),
        _answer(_item(0, INFINITE), _item(1, INFINITE)),
        _answer(_item(0, [1e39]), _item(1, [1.0])),
        _answer(_item(0, []), _item(1, [])),
        _answer(_item(0, ""), _item(1, "")),
        _answer(_item(0, "AAA="), _item(1, "AAA=")),
        _answer(_item(0, "not base64!"), _item(1, "not base64!")),
        _answer(_item(0, [None]), _item(1, [1.0])),
        _answer(_item(0, [[1.0]]), _item(1, [[1.0]])),
        _answer(_item(0, [0.0] * 8_193), _item(1, [0.0] * 8_193)),
        b'{"data": [{"index": 0, "embedding": [NaN]}, {"index": 1, "embedding": [1]}]}',
        b'{"data": [{"index": 0, "embedding": "\xff\xfe"}]}',
        b'{"data": "zebra one"}',
        b'{"x": ' + b"[" * 20_000 + b"]" * 20_000 + b', "data": []}',
        b"zebra one",
        b"",
        {"error": {"type": "server_error", "message": "zebra one"}},
    ],
)
async def test_an_answer_that_is_wrong_is_the_engines_fault(content: Any) -> None:
    """Protects indexes from vectors of other texts, or none at all; and the fault tells nothing of a text."""
    sink = await _run_script(_says(content))
    assert not sink.deltas
    [end] = sink.ends
    assert type(end.fault) is EngineError and "zebra" not in end.fault.detail + repr(end.fault.members)


async def test_dimensions_that_a_server_ignores_are_refused() -> None:
    """Protects callers: vectors of another size than they asked for would pass for what they are not."""
    content = _answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO)))
    [end] = (await _run_script(_says(content), dimensions=3)).ends
    assert isinstance(end.fault, EngineRejected) and "2 dimensions, not of 3" in end.fault.detail
    assert vectors_of((await _run_script(_says(content), dimensions=2)).deltas) == GOOD


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, EngineRejected), (413, EngineRejected), (401, EngineError), (404, EngineError), (500, EngineError)],
)
async def test_a_refusal_is_whose_fault_it_is(status: int, kind: type[EngineFault]) -> None:
    """Protects replicas and callers: what is wrong with the request is not taken for a broken engine. No message is told."""
    [end] = (await _run_script(_says({"error": {"type": "some_error", "message": "zebra one"}}, status))).ends
    assert type(end.fault) is kind and "(some_error)" in end.fault.detail and "zebra" not in end.fault.detail


async def test_an_endless_answer_is_cut() -> None:
    """Protects the memory of gateways: no more is read than so many vectors can take."""
    sent = 0

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        nonlocal sent
        await wire.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1_000):
            await wire.raw(b"10000\r\n" + b"[" * 65_536 + b"\r\n")
            sent += 65_536

    [end] = (await _run_script(script)).ends
    assert type(end.fault) is EngineError and "more than" in end.fault.detail
    assert sent < 2 * (ANSWER_BYTES + 2 * ANSWER_BYTES_PER_VECTOR)


async def test_a_body_that_is_cut() -> None:
    """Protects callers: half an answer is none."""

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        content = msgspec.json.encode(_answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO))))
        await wire.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(content) + 1) + content)
        wire.cut()

    sink = await _run_script(script)
    assert not sink.deltas and isinstance(sink.ends[0].fault, ReplicaLost)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"])
async def test_silence_has_a_bound(head: bytes) -> None:
    """Protects lanes: a server that says nothing, or stops within its answer, is given up; its connection is closed."""
    closed = asyncio.Event()

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        await wire.raw(head)
        for _ in range(1_000):
            if wire.is_cut:
                break
            await asyncio.sleep(0.01)
        closed.set()

    [end] = (await _run_script(script, bound_ms=100)).ends
    assert isinstance(end.fault, Stalled)


async def test_a_cancel_closes_the_connection_and_tells_nothing_more() -> None:
    """Protects engines from work that nobody waits for."""
    begun = asyncio.Event()

    async def script(wire: Wire, body: dict[str, Any]) -> None:
        begun.set()
        for _ in range(1_000):
            if wire.is_cut:
                return
            await asyncio.sleep(0.01)

    async with ScriptedServer(script).running() as server:
        engine, sink = OpenAICompatibleEngine(), Sink()
        run = engine.start(_call(server.address(model="m")), sink)
        await begun.wait()
        run.pause()
        run.resume()
        run.cancel()
        run.cancel()
        await stop_confirmed(run)
        assert sink.calls == 0
        await engine.aclose()


async def test_a_sink_that_cancels_hears_no_end() -> None:
    """Protects the relay: after its cancel nothing more comes, though the answer is whole."""
    async with ScriptedServer(_says(_answer(_item(0, _coded(*ONE)), _item(1, _coded(*TWO))))).running() as server:
        engine = OpenAICompatibleEngine()
        sink = Sink(on_first=lambda: run.cancel())
        run = engine.start(_call(server.address(model="m")), sink)
        await sink.begun()
        await stop_confirmed(run)
        assert len(sink.batches) == 1 and not sink.ends
        await engine.aclose()


async def test_nobody_there() -> None:
    """Protects retries: a replica that never got the request says so."""
    engine = OpenAICompatibleEngine()
    nowhere = ReplicaAddress("r", "p", "v", EngineKind.OPENAI, "http://127.0.0.1:9", "m", 1)
    [end] = (await _finish(engine, _call(nowhere))).ends
    assert isinstance(end.fault, ReplicaLost) and not end.fault.reached
    await engine.aclose()


# ── llama.cpp's own ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "input (1101 tokens) is too large to process. increase the physical batch size (current batch size: 1024)",
            EngineRejected,
        ),
        ("zebra one", EngineError),
    ],
)
async def test_a_long_text_is_not_llamacpps_failure(message: str, kind: type[EngineFault]) -> None:
    """Protects replicas: llama.cpp says 500 of a text that does not fit, which must not count against it."""
    async with ScriptedServer(
        _says({"error": {"code": 500, "type": "server_error", "message": message}}, 500)
    ).running() as server:
        engine = LlamaCppEngine()
        [end] = (await _finish(engine, _call(server.address(model="m")))).ends
        await engine.aclose()
    assert type(end.fault) is kind
    assert end.fault.members == ({"n_prompt_tokens": 1101, "n_ctx": 1024} if kind is EngineRejected else {})


# ── the simulated server ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


@asynccontextmanager
async def _simulated(children: Children) -> AsyncIterator[tuple[Engine, ReplicaAddress]]:
    spec = ServerSpec("m", CONTEXT_TOKENS, 2, kv_tokens=4_096, api_key=API_KEY, embeddings=True)
    child = children.shared("weir.engines.simulated_server", spec)
    engine = OpenAICompatibleEngine()
    try:
        yield engine, await engine.probe(ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, child.url, "", 1, api_key=API_KEY))
    finally:
        await engine.aclose()


async def test_the_simulated_server_embeds(children: Children) -> None:
    """Protects what tests rely on: vectors by text and size, usage by the count of each text, more than its memory holds."""
    texts = [f"{number} {'word ' * 100}" for number in range(TEXTS_MAX)]
    async with _simulated(children) as (engine, replica):
        sink = await _finish(engine, _call(replica, texts, dimensions=16))
        counts = [await engine.count_input(replica, text, False) for text in texts[:2]]
    assert vectors_of(sink.deltas) == tuple(embedding_of(text, 16) for text in texts)
    [end] = sink.ends
    assert end.usage is not None and (end.usage.cached_input_tokens, end.usage.output_tokens) == (0, 0)
    assert counts == [126, 126] and end.usage.input_tokens == sum(-(-len(text) // 4) for text in texts) > 4_096


async def test_the_simulated_server_refuses_what_does_not_fit(children: Children) -> None:
    """Protects callers: a text above the window is refused as such, and a model that embeds makes no text."""
    async with _simulated(children) as (engine, replica):
        [long] = (await _finish(engine, _call(replica, ["a", "word " * 1_000]))).ends
        sink = Sink()
        run = engine.start(EngineCall(replica, 0, "a", False, 4, Sampling()), sink)
        text = await sink.end()
        await stop_confirmed(run)
    assert isinstance(long.fault, EngineRejected) and isinstance(text.fault, EngineRejected)
