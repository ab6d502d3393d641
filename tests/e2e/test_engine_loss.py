"""An engine that dies or cannot be reached: its requests end `replica_lost` at the platform's cost, and service comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.e2e.ending_stage import Caller, Stage, read_shown, wait_until
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call, ask

CONFIG = """
[engine]
probe_ms = 100
restart_backoff_ms = 100
[pool]
concurrency = 4
"""
SLOW_PROBE = CONFIG.replace("probe_ms = 100", "probe_ms = 1500")
BACK_S = 10.0


LONG_REPLY = "Say 48"
"""A prompt that the simulated engine answers with as many words as it ever does."""


@asynccontextmanager
async def calls_of(stage: Stage, callers: list[Caller]) -> AsyncIterator[list[Call]]:
    """One stream of each caller, sent."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(stage.call(caller, LONG_REPLY, "it")) for caller in callers]


async def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    """kill -9 of the engine's process in mid-stream ends each stream `replica_lost`, and the supervisor brings it back."""
    with running_cell(tmp_path / "state", config=CONFIG) as cell:
        stage = Stage(cell)
        callers = [await stage.caller() for _ in range(4)]
        [child] = children_of(cell.process.pid)
        async with calls_of(stage, callers) as calls:
            await calls[0].output_begun()
            os.kill(child, signal.SIGSTOP)  # none of them can end by itself now
            for caller in callers:
                await stage.wait_status(caller, "it", "running")
            os.kill(child, signal.SIGKILL)
            shown = [await read_shown(call) for call in calls]
        for caller, told in zip(callers, shown, strict=True):
            await stage.check_ended(caller, "it", "replica_lost", "platform", told)
        assert wait_process_gone(child, BACK_S)
        await stage.check_quiet()
        await stage.check_serves(callers[0])
        [replacement] = children_of(cell.process.pid)
        assert replacement != child


async def test_what_waits_outlives_the_replica(tmp_path: Path) -> None:
    """A queued request is not lost with the replica that others ran on; it runs on the next one."""
    with running_cell(tmp_path / "state", config=CONFIG) as cell:
        stage = Stage(cell)
        callers, waiting = [await stage.caller() for _ in range(4)], await stage.caller()
        [child] = children_of(cell.process.pid)
        os.kill(child, signal.SIGSTOP)
        async with calls_of(stage, callers) as calls:
            for caller in callers:
                await stage.wait_status(caller, "it", "running")
            async with stage.call(waiting, "Hello", "it") as queued:
                await stage.wait_status(waiting, "it", "queued")
                os.kill(child, signal.SIGKILL)
                for call in calls:
                    assert (await read_shown(call)).reason == "replica_lost"
                told = await read_shown(queued)
        await stage.check_ended(waiting, "it", "stop", "tenant", told)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_refuses_connections(tmp_path: Path, stream: bool) -> None:
    """The first request ends `replica_lost`; the next is refused with a time to come back, until the engine answers again."""
    with ScriptedEngine() as engine, running_cell(tmp_path / "state", engine=(engine.url,), config=SLOW_PROBE) as cell:
        stage = Stage(cell)
        caller, late = await stage.caller(), await stage.caller()
        await asyncio.to_thread(engine.vanish)
        told = await stage.run(caller, Script(), "it", stream=stream)
        await stage.check_ended(caller, "it", "replica_lost", "platform", told)
        refused = await stage.run(late, Script(), "it", stream=stream)
        assert (refused.http, refused.code) == (503, "no_capacity") and int(refused.headers["retry-after"]) >= 1
        assert await stage.usage(late.tenant) == []
        assert (await ask(cell.api, "/readyz")).status == 503
        await asyncio.to_thread(engine.listen)
        await stage.check_serves(late)
        await stage.check_quiet()


async def test_one_of_two_engines_is_lost(tmp_path: Path) -> None:
    """The survivor goes on serving, and what runs there is not touched."""
    async with AsyncExitStack() as stack:
        kept, lost = (stack.enter_context(ScriptedEngine()) for _ in range(2))
        cell = stack.enter_context(running_cell(tmp_path / "state", engine=(kept.url, lost.url), config=CONFIG))
        stage = Stage(cell)
        await wait_until(lambda: _both_ready(stage), "both replicas are ready")
        callers = [await stage.caller() for _ in range(8)]
        async with AsyncExitStack() as open_calls:
            script = Script(tokens=30, gap_ms=30)
            calls = [await open_calls.enter_async_context(stage.call(caller, script, "it")) for caller in callers]
            for call in calls:
                await call.output_begun()
            assert (kept.running, lost.running) == (4, 4)
            await asyncio.to_thread(lost.vanish)
            shown = [await read_shown(call) for call in calls]
        assert sorted(str(told.reason) for told in shown) == ["replica_lost"] * 4 + ["stop"] * 4
        assert (await stage.run(callers[0], Script(), "next")).reason == "stop"
        await stage.check_quiet()


async def _both_ready(stage: Stage) -> bool:
    replicas = (await stage.admin("GET", "replicas"))["replicas"]
    return len(replicas) == 2 and all(replica["state"] == "ready" for replica in replicas)
