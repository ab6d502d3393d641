"""Every ending that a caller, a deadline, an administrator or an engine causes: one story everywhere, and the table's payer."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.ending_stage import Caller, Payer, Stage, Surface, locked_store, price, read_shown, wait_until
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call
from tests.e2e.surfaces import ANSWERS

LANES = 2
CONFIG = f"""
[pool]
concurrency = {LANES}
[engine]
first_output_ms = 700
idle_ms = 700
probe_ms = 100
[gateway]
early_headers_ms = 500
[coordinator]
queue_wait_ms = 800
drain_grace_ms = 300
"""
LONG = Script(tokens=400, gap_ms=25)
SILENT = Script(first_ms=20_000)
BUSY = Script(tokens=400, gap_ms=200)


# ── the engine's endings ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Row:
    """An engine's behaviour and how it must end."""

    script: Script
    reason: str
    payer: Payer


ENGINE_ROWS = {
    "stop": Row(Script(), "stop", "tenant"),
    "length": Row(Script(end="length"), "length", "tenant"),
    "refused_500": Row(Script(status=500), "engine_error", "platform"),
    "garbage": Row(Script(end="garbage", gap_ms=20), "engine_error", "platform"),
    "error_event": Row(Script(end="error", gap_ms=20), "engine_error", "platform"),
    "no_finish": Row(Script(end="unfinished", gap_ms=20), "engine_error", "platform"),
    "reset": Row(Script(end="reset", gap_ms=20), "replica_lost", "platform"),
    "cut": Row(Script(end="cut", gap_ms=20), "replica_lost", "platform"),
    "stalled": Row(Script(end="stall"), "stalled", "platform"),
    "never_began": Row(Script(tokens=0, end="stall"), "stalled", "platform"),
    "refused_400": Row(Script(status=400), "engine_rejected", "nobody"),
}


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
@pytest.mark.parametrize("name", ENGINE_ROWS)
async def test_what_an_engine_does_ends_as_the_table_says(stage: Stage, name: str, surface: Surface, stream: bool) -> None:
    """The answer, GET, usage and account tell the same ending on every surface, and the next request works."""
    row, caller = ENGINE_ROWS[name], await stage.caller()
    await stage.check_serves(stage.demo_caller())
    shown = await stage.run(caller, row.script, name, surface=surface, stream=stream)
    assert shown.http or stream
    assert shown.text == (row.script.text if shown.http in (0, 200) and row.script.status == 200 else "")
    await stage.check_ended(caller, name, row.reason, row.payer, shown)
    await stage.check_quiet()
    await stage.check_serves(caller)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_without_counts_is_booked_by_what_was_relayed(stage: Stage, stream: bool) -> None:
    """Without the engine's figures the tenant pays an estimate that covers what it got and stays within its hold."""
    caller, script = await stage.caller(), Script(counts=False, tokens=6)
    shown = await stage.run(caller, script, "estimated", stream=stream)
    assert shown.usage is not None and shown.usage["basis"] == "estimated"
    assert 6 <= shown.usage["output_tokens"] <= len(script.text.encode())
    await stage.check_ended(caller, "estimated", "stop", "tenant", shown)


async def test_an_engine_that_counts_too_much_costs_the_tenant_no_more_than_its_hold(stage: Stage) -> None:
    """What an engine reports beyond the hold is the platform's."""
    caller, script = await stage.caller(), Script(usage=(500, 90_000))
    shown = await stage.run(caller, script, "clamped", most=100)
    assert shown.usage is not None and shown.usage["output_tokens"] == 90_000
    [row] = await stage.usage(caller.tenant)
    assert row["cost_microusd"] == shown.usage["cost_microusd"] <= price(script.input_tokens, 100)
    assert row["cost_microusd"] + row["platform_cost_microusd"] == price(500, 90_000)


async def test_an_engine_that_reports_zero_is_believed(stage: Stage) -> None:
    """An explicit zero stays zero."""
    caller = await stage.caller()
    shown = await stage.run(caller, Script(tokens=0, usage=(0, 0)), "zero", stream=False)
    await stage.check_ended(caller, "zero", "stop", "tenant", shown)
    assert shown.usage is not None and shown.usage["cost_microusd"] == 0


# ── ended by somebody ────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def full_lanes(stage: Stage) -> AsyncIterator[None]:
    """Every lane is taken while the block runs. Quick answers before it keep the predicted wait short, so the door lets in."""
    caller, ids = await stage.caller(), [f"blocker-{lane}" for lane in range(LANES)]
    for number in range(8):
        await stage.run(caller, Script(), f"quick-{number}", stream=False)
    async with asyncio.TaskGroup() as tasks:
        blockers = [tasks.create_task(stage.run(caller, BUSY, name, stream=False)) for name in ids]
        try:
            for name in ids:
                await stage.wait_status(caller, name, "running")
            yield
        finally:
            for name in ids:
                await stage.get(caller, name, "/cancel")
    assert all(task.result().reason == "client" for task in blockers)


@asynccontextmanager
async def in_phase(stage: Stage, engine: ScriptedEngine, phase: str, caller: Caller, **options: Any) -> AsyncIterator[Call]:
    """A request of this caller with the id `it` that has come as far as this phase."""
    script = PHASES[phase]
    async with AsyncExitStack() as stack:
        if phase == "queued":
            await stack.enter_async_context(full_lanes(stage))
        if phase == "generating":
            script = msgspec.structs.replace(script, note=caller.tenant)
        call = await stack.enter_async_context(stage.call(caller, script, "it", **options))
        if phase == "generating" and options["stream"]:
            await call.output_begun()
        elif phase == "generating":
            await wait_until(lambda: has_sent(engine, caller.tenant, 5), "the engine generates")
        else:
            await stage.wait_status(caller, "it", "queued" if phase == "queued" else "running")
        yield call


async def has_sent(engine: ScriptedEngine, note: str, tokens: int) -> bool:
    """Whether the engine wrote so many tokens for the script with this note."""
    return engine.sent.get(note, 0) >= tokens


async def end_by(stage: Stage, caller: Caller, reason: str) -> None:
    """Do what ends the request `it` for this reason; a deadline comes by itself."""
    if reason == "client":
        first, second = [await stage.get(caller, "it", "/cancel") for _ in range(2)]
        assert (first.status, first.json["finish_reason"]) == (200, "client")
        assert first.json == second.json
    elif reason == "revoked":
        await stage.revoke(caller)


PHASES = {"queued": SILENT, "dispatched": SILENT, "generating": LONG}
PAYERS: dict[str, Payer] = {"queued": "nobody", "dispatched": "platform", "generating": "tenant"}


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("reason", ["client", "revoked", "deadline"])
async def test_a_request_ended_by_somebody(
    stage: Stage, engine: ScriptedEngine, reason: str, phase: str, surface: Surface, stream: bool
) -> None:
    """Cancel, revocation and deadline end a request in each phase; the payer is the table's and the engine stops."""
    caller = await stage.caller()
    deadline_ms = 500 if reason == "deadline" else None
    async with in_phase(stage, engine, phase, caller, surface=surface, stream=stream, deadline_ms=deadline_ms) as call:
        await end_by(stage, caller, reason)
        shown = await read_shown(call)
        if phase == "queued":
            assert engine.running == LANES
    payer = PAYERS[phase]
    if reason == "deadline" and not stream and payer == "tenant":
        payer = "platform"  # nothing of a whole answer was delivered
    await stage.check_ended(caller, "it", reason, payer, shown)
    await stage.check_quiet()
    await wait_until(lambda: is_idle(engine), "the engine stopped")


async def is_idle(engine: ScriptedEngine) -> bool:
    """Whether the engine runs nothing."""
    return engine.running == 0


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_the_bound_of_waiting_ends_what_still_waits(
    stage: Stage, engine: ScriptedEngine, surface: Surface, stream: bool
) -> None:
    """A request that reaches the bound in the queue ends `expired`; nobody pays, and an SDK may send it again."""
    caller = await stage.caller()
    async with in_phase(stage, engine, "queued", caller, surface=surface, stream=stream) as call:
        shown = await read_shown(call)
    assert shown.http == (0 if stream else 503)  # a stream that waits was told early that it is admitted
    await stage.check_ended(caller, "it", "queue_wait", "nobody", shown)
    await stage.check_quiet()


async def test_a_drain_ends_what_is_left_after_its_grace(tmp_path: Path) -> None:
    """SIGTERM ends what is left after the grace as `shutdown`, at the platform's cost, and the next start shows it."""
    config = CONFIG.replace(f"concurrency = {LANES}", f"concurrency = {len(ANSWERS)}")
    with ScriptedEngine() as engine:
        with running_cell(tmp_path / "state", engine=(engine.url,), config=config) as cell:
            stage = Stage(cell)
            callers = [await stage.caller() for _ in ANSWERS]
            async with asyncio.TaskGroup() as tasks:
                runs = [
                    tasks.create_task(
                        stage.run(
                            caller, msgspec.structs.replace(LONG, note=caller.tenant), "it", surface=surface, stream=stream
                        )
                    )
                    for caller, (surface, stream) in zip(callers, ANSWERS, strict=True)
                ]
                for caller in callers:
                    await wait_until(partial(has_sent, engine, caller.tenant, 5), "the engine generates")
                cell.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(cell.process.wait, 20)
        with running_cell(tmp_path / "state", engine=(engine.url,), config=config) as cell:
            for caller, run in zip(callers, runs, strict=True):
                await Stage(cell).check_ended(caller, "it", "shutdown", "platform", run.result())


STORE_CONFIG = f"{CONFIG}store_wait_ms = 500\ndelivery_step_tokens = 8\n".replace("concurrency = 2", "concurrency = 8")


async def test_a_store_that_cannot_be_written(engine: ScriptedEngine, tmp_path: Path) -> None:
    """What runs ends within what is booked, what is new is refused, nobody pays; once the store is back every record lands."""
    with running_cell(tmp_path / "state", engine=(engine.url,), config=STORE_CONFIG) as cell:
        stage = Stage(cell)
        running, whole, late = [await stage.caller() for _ in range(3)]
        async with stage.call(running, Script(tokens=400, gap_ms=10), "it") as call:
            await call.output_begun()
            with locked_store(stage):
                told_whole = await stage.run(whole, Script(), "it", stream=False)
                told = await read_shown(call)
                refused = await stage.run(late, Script(), "it")
        assert (refused.http, refused.code) == (503, "ledger_unavailable") and int(refused.headers["retry-after"]) >= 1
        assert told.text.count(" ") <= 32  # the steps booked before; it would have been twice as many
        await stage.check_ended(running, "it", "ledger_unavailable", "platform", told)
        assert (told_whole.http, told_whole.code, told_whole.text) == (503, "ledger_unavailable", "")
        # A settlement that a blocked write had taken already lands with it: then the record decides, as GET shows.
        landed = (await stage.wait_status(whole, "it", "failed", "completed"))["status"] == "completed"
        await stage.check_ended(whole, "it", "stop" if landed else "ledger_unavailable", "tenant" if landed else "platform")
        assert await stage.usage(late.tenant) == []
        await stage.check_quiet()
        await stage.check_serves(late)
