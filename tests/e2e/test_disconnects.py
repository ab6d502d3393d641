"""A client that leaves, in every phase and on every surface, ends its request at once and costs what had been generated."""

import asyncio

import msgspec
import pytest
from tests.e2e.ending_stage import Stage, Surface, locked_store, wait_until
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call
from tests.e2e.surfaces import ACTIVE, ANSWERS, SURFACES

CONFIG = """
[pool]
concurrency = 1
[engine]
probe_ms = 100
"""
SILENT = Script(first_ms=20_000, note="silent")
LONG = Script(tokens=400, gap_ms=25, note="long")
STOPPED_S = 2.0
"""From leaving to an engine that runs nothing: far below what the request would have taken."""

UNENDED = Script(end="stall")
HELD = Script(hold_at=4)
LEAVE = {"closed": Call.leave, "half_closed": Call.half_close, "reset": Call.reset}
"""Half a close is a close: what follows it is nobody's."""


async def check_stopped(stage: Stage, engine: ScriptedEngine) -> None:
    """The engine was cut, not waited for."""

    async def is_idle() -> bool:
        return engine.running == 0

    await wait_until(is_idle, "the engine stopped", STOPPED_S)
    await stage.check_quiet()


async def check_left_while_generating(stage: Stage, engine: ScriptedEngine, call: Call, stream: bool) -> None:
    """Wait until output exists: shown by the stream, else known from the engine."""

    async def has_generated() -> bool:
        return engine.sent.get("long", 0) >= 5

    if stream:
        await call.output_begun()
    else:
        await wait_until(has_generated, "the engine generates")


@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("surface", ACTIVE)
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_it_generates(
    stage: Stage, engine: ScriptedEngine, stream: bool, surface: Surface, how: str
) -> None:
    """The engine is cut at once; the tenant pays its input and what was generated."""
    caller = await stage.caller()
    engine.sent.clear()
    async with stage.call(caller, LONG, "it", stream=stream, surface=surface) as call:
        await check_left_while_generating(stage, engine, call, stream)
        LEAVE[how](call)
        await check_stopped(stage, engine)
    await stage.check_ended(caller, "it", "disconnect", "tenant")
    await stage.check_serves(caller)


@pytest.mark.parametrize("surface", ACTIVE)
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token(stage: Stage, engine: ScriptedEngine, stream: bool, surface: Surface) -> None:
    """Nothing was generated, so the platform pays for the input that the engine read."""
    caller = await stage.caller()
    async with stage.call(caller, SILENT, "it", stream=stream, surface=surface):
        await stage.wait_status(caller, "it", "running")
    await check_stopped(stage, engine)
    await stage.check_ended(caller, "it", "disconnect", "platform")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("surface", ACTIVE)
async def test_leaving_after_the_last_token(stage: Stage, engine: ScriptedEngine, surface: Surface, stream: bool) -> None:
    """All output is there and the engine has not said so: leaving ends it, and the tenant pays what was generated."""
    caller, script = await stage.caller(), msgspec.structs.replace(UNENDED, note=f"unended-{surface}-{stream}")

    async def is_all_there() -> bool:
        return engine.sent.get(script.note, 0) == script.tokens

    async with stage.call(caller, script, "it", stream=stream, surface=surface) as call:
        await wait_until(is_all_there, "the last token")
        if stream:
            await read_text(call, script.text)
        call.leave()
        await check_stopped(stage, engine)
    await stage.check_ended(caller, "it", "disconnect", "tenant")
    await stage.check_serves(caller)


async def read_text(call: Call, text: str) -> None:
    """Read a stream until it has shown this text."""
    surface = SURFACES[call.surface]
    async for _ in call.events():
        if surface.text(call.seen) == text:
            return
    raise AssertionError(f"it ended with {surface.text(call.seen)!r}")


@pytest.mark.parametrize("surface", ACTIVE)
async def test_leaving_before_the_settlement_is_shown(stage: Stage, engine: ScriptedEngine, surface: Surface) -> None:
    """The engine ended, the terminal event waits for the store: who leaves now has completed, and pays what was delivered."""
    caller = await stage.caller()
    engine.hold()

    async def has_ended() -> bool:
        return engine.running == 0

    async with stage.call(caller, HELD, "it", surface=surface) as call:
        await read_text(call, HELD.text)
        with locked_store(stage):
            engine.release()
            await wait_until(has_ended, "the engine ended")
            call.leave()
    await stage.check_ended(caller, "it", "stop", "tenant")
    await stage.check_quiet()


@pytest.mark.parametrize("surface", ACTIVE)
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_the_queue(stage: Stage, engine: ScriptedEngine, stream: bool, surface: Surface) -> None:
    """A place in the queue is given up at once, costs nobody anything, and never reaches the engine."""
    caller, other, started = await stage.caller(), await stage.caller(), engine.started

    async def has_reached_the_engine() -> bool:
        return engine.started == started + 1

    async with stage.call(other, LONG, "ahead"):
        await wait_until(has_reached_the_engine, "the request ahead runs on the engine")
        before = (await stage.metrics())["weir_queue_entries"]
        async with stage.call(caller, SILENT, "it", stream=stream, surface=surface):
            await stage.wait_status(caller, "it", "queued")
        await stage.wait_status(caller, "it", "cancelled")
        assert (await stage.metrics())["weir_queue_entries"] == before == 0
    await check_stopped(stage, engine)
    assert engine.started == started + 1
    await stage.check_ended(caller, "it", "disconnect", "nobody")


@pytest.mark.parametrize("surface", ACTIVE)
async def test_bytes_of_a_next_request_do_not_hide_that_the_client_left(
    stage: Stage, engine: ScriptedEngine, surface: Surface
) -> None:
    """A client that pipelines a second request and closes is seen to leave the first."""
    caller = await stage.caller()
    async with stage.call(caller, LONG, "it", surface=surface) as call:
        await call.output_begun()
        call.writer.write(b"GET /healthz HTTP/1.1\r\nhost: weir\r\n\r\n")
        await call.writer.drain()
        call.leave()
        await check_stopped(stage, engine)
    await stage.check_ended(caller, "it", "disconnect", "tenant")


async def test_leaving_while_the_body_is_sent_leaves_nothing(stage: Stage, engine: ScriptedEngine) -> None:
    """Before admission there is no request: no row, no hold, and the cell goes on."""
    caller, started = await stage.caller(), engine.started
    _, writer = await asyncio.open_connection("127.0.0.1", int(stage.cell.api.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/generations HTTP/1.1\r\nhost: weir\r\ncontent-length: 900\r\n")
    writer.write(f"authorization: Bearer {caller.secret}\r\n\r\n".encode() + b'{"model_alias": "assistant", "inp')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await stage.check_quiet()
    assert await stage.usage(caller.tenant) == [] and engine.started == started
    await stage.check_serves(caller)


async def test_many_that_leave_at_once(stage: Stage, engine: ScriptedEngine) -> None:
    """Forty clients that leave in different phases leave nothing behind."""
    caller = await stage.caller()

    async def leave(number: int) -> None:
        surface, stream = ANSWERS[number % len(ANSWERS)]
        async with stage.call(caller, LONG, f"it-{number}", stream=stream, surface=surface):
            await asyncio.sleep(number * 0.005)  # the moment of leaving, which is what varies

    async with asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(leave(number))
    await check_stopped(stage, engine)
    ledger = await stage.admin("GET", f"ledger?tenant={caller.tenant}")
    assert ledger["open_holds"] == 0 and all(account["held"] == 0 for account in ledger["accounts"])
    await stage.check_serves(caller)
