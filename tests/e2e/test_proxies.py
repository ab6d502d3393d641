"""Weir behind nginx and HAProxy as its own page recommends them, HTTP/2 at the proxy: nothing is held back, none forgotten."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, wait_until
from tests.e2e.proxy_processes import COMMANDS, ProxiedCall, Proxy, block_of, running_proxy, through
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import bearer
from tests.e2e.surfaces import ACTIVE, ANSWERS, SURFACES, Asked

from weir.config import GatewayConfig

CONFIG = """
[pool]
concurrency = 16
[engine]
probe_ms = 100
restart_backoff_ms = 1
[gateway]
early_headers_ms = 300
keep_alive_ms = 200
"""
IDLE = "1s"
"""The proxies' bound of silence: 60 s where keep-alives come every 10 s, here in little."""
SILENT_MS = 3_000
STOPPED_S = 2.0
HELD = Script(tokens=4, hold_at=1)
LONG = Script(tokens=400, gap_ms=25)


@pytest.fixture(scope="module", params=COMMANDS)
def proxy(request: pytest.FixtureRequest, stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Each proxy in turn."""
    folder = tmp_path_factory.mktemp("proxy") / request.param
    with running_proxy(request.param, folder, stage.cell.api, IDLE) as running:
        yield running


@asynccontextmanager
async def called(
    proxy: Proxy, caller: Caller, script: Script, surface: str = "native", **asked: Any
) -> AsyncIterator[ProxiedCall]:
    """A generation with the id `it` through the proxy."""
    described, form = SURFACES[surface], Asked(script.prompt(), "it", **asked)
    async with through(proxy, surface, described.body(form), bearer(caller.secret, described.headers(form))) as call:
        yield call


async def check_stopped(engine: ScriptedEngine) -> None:
    """The engine was cut, not waited for."""

    async def is_idle() -> bool:
        return engine.running == 0

    await wait_until(is_idle, "the engine stopped", STOPPED_S)


@pytest.mark.parametrize("surface", ACTIVE)
async def test_the_first_token_is_seen_before_the_last_is_made(
    stage: Stage, engine: ScriptedEngine, proxy: Proxy, surface: str
) -> None:
    """Protects latency: a proxy holds no event back, and every header that a client relies on passes it."""
    caller = await stage.caller()
    engine.hold()
    async with called(proxy, caller, HELD, surface) as call:
        await call.read_until(HELD.word)
        assert (call.status, call.protocol) == (200, "HTTP/2")
        assert call.headers[SURFACES[surface].id_header] == "it"
        assert (await stage.get(caller, "it")).json["status"] == "running"
        engine.release()
        shown = await call.shown()
    assert (shown.text, shown.reason) == (HELD.text, "stop")
    await stage.check_ended(caller, "it", "stop", "tenant", shown)


async def test_streams_outlive_a_proxy_that_is_less_patient_than_their_engine(stage: Stage, proxy: Proxy) -> None:
    """Protects long waits: three bounds of the proxy's patience pass before the first token, and comments carry the stream."""
    callers = {name: await stage.caller() for name in ACTIVE}
    script = Script(tokens=2, first_ms=SILENT_MS)

    async def run(name: str) -> None:
        async with called(proxy, callers[name], script, name) as call:
            shown = await call.shown()
        assert (shown.text, shown.reason) == (script.text, "stop"), shown
        pings = sum(event.name == "ping" for event in call.seen)
        assert call.parsed.comments + pings >= SILENT_MS // 1_000
        await stage.check_ended(callers[name], "it", "stop", "tenant", shown)

    async with asyncio.TaskGroup() as tasks:
        for name in ACTIVE:
            tasks.create_task(run(name))


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_who_leaves_the_proxy_leaves_weir(
    stage: Stage, engine: ScriptedEngine, proxy: Proxy, surface: str, stream: bool
) -> None:
    """Protects engines from work that nobody reads: a client's end at the proxy cancels, streamed or not."""
    caller = await stage.caller()
    engine.sent.clear()

    async def has_generated() -> bool:
        return max(engine.sent.values(), default=0) >= 5

    async with called(proxy, caller, LONG, surface, stream=stream) as call:
        await wait_until(has_generated, "the engine generates")
        call.leave()
        await check_stopped(engine)
    await stage.check_ended(caller, "it", "disconnect", "tenant")
    await stage.check_quiet()


async def test_an_answer_that_is_not_streamed_needs_a_patient_proxy(stage: Stage, engine: ScriptedEngine, proxy: Proxy) -> None:
    """Protects the page's warning: a proxy that gives up answers 504 itself, and the generation is cancelled, not forgotten."""
    caller = await stage.caller()
    async with called(proxy, caller, Script(first_ms=20_000), stream=False) as call:
        assert await call.head() == 504
        await check_stopped(engine)
    await stage.check_ended(caller, "it", "disconnect", "platform")


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_failures_and_refusals_pass_in_their_shape(stage: Stage, proxy: Proxy, surface: str, stream: bool) -> None:
    """Protects error handling of clients: what Weir answers is what arrives, with its status, headers and terminal event."""
    caller, nobody = await stage.caller(), Caller("", "", "weir-unknown")
    async with called(proxy, caller, Script(end="error", gap_ms=20), surface, stream=stream) as call:
        shown = await call.shown()
    assert shown.code == "engine_error" and (stream or shown.http == 502)
    await stage.check_ended(caller, "it", "engine_error", "platform", shown)
    async with called(proxy, nobody, Script(), surface, stream=stream) as call:
        shown = await call.shown()
    assert (shown.http, shown.code) == (401, "unauthenticated")


async def test_many_streams_at_once(stage: Stage, engine: ScriptedEngine, proxy: Proxy) -> None:
    """Protects the connections between proxy and cell: a dozen streams on them neither mix nor wait for one another."""
    caller = await stage.caller()
    scripts = [Script(tokens=20, word=f" {number}", gap_ms=10) for number in range(12)]
    async with AsyncExitStack() as stack:
        calls = []
        for number, script in enumerate(scripts):
            described = SURFACES[ACTIVE[number % len(ACTIVE)]]
            form = Asked(script.prompt(), f"it-{number}")
            headers = bearer(caller.secret, described.headers(form))
            calls.append(await stack.enter_async_context(through(proxy, described.name, described.body(form), headers)))
        for script, call in zip(scripts, calls, strict=True):
            assert (await call.shown()).text == script.text
    await stage.check_quiet()


def test_the_page_agrees_with_the_defaults() -> None:
    """Protects operators who copy the page: its bounds are those of the defaults that it names."""
    config = GatewayConfig()
    assert f"client_max_body_size {config.body_bytes_max // 2**20}m;" in block_of("nginx")
    assert "keepalive_timeout 60s;" in block_of("nginx") and config.idle_connection_ms > 60_000
    assert (config.keep_alive_ms, config.early_headers_ms) == (10_000, 2_000)
