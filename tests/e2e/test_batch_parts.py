"""A batch while parts of a cell die alone: the coordinator with its worker, a gateway, control, in the middle of its lines."""

import asyncio
import signal
from pathlib import Path

import pytest
from tests.e2e.batch_stage import (
    check_answers,
    input_of,
    line_of,
    openai_of,
    results_of,
    script_of,
    submitted,
    until_done,
    until_half,
)
from tests.e2e.ending_stage import Stage
from tests.e2e.parts_stage import parts, served_again
from tests.e2e.running_cell import START_S
from tests.e2e.scripted_engine import ScriptedEngine
from tests.e2e.test_batch_deaths import IN_FLIGHT, SIZES


def settings(folder: Path) -> str:
    """Files in a place that coordinators and gateways share."""
    return f'\n[batches]\ndirectory = "{folder / "files"}"\nlines_in_flight = {IN_FLIGHT}\npoll_ms = 100\n'


async def check(stage: Stage, tenant: str, lines: int, cost: int) -> None:
    """Each line is charged once."""
    found = (await stage.admin("GET", f"usage?tenant={tenant}&group_by=status,workload_class"))["rows"]
    rows = {row["status"]: row for row in found if row["workload_class"] == "batch"}
    assert rows["completed"]["requests"] == lines
    assert sum(row["cost_microusd"] for row in rows.values()) == cost == rows["completed"]["cost_microusd"]


@pytest.mark.parametrize("lines", SIZES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["killed", "frozen", "handed over"])
async def test_the_next_coordinator_goes_on_with_it(number: signal.Signals, lines: int, tmp_path: Path) -> None:
    """Protects a batch through the loss of its worker: the coordinator that stood by runs the rest, and repeats little."""
    scripts = [script_of(number) for number in range(lines)]
    content = input_of([line_of(number, script) for number, script in enumerate(scripts)])
    with ScriptedEngine() as engine, parts(tmp_path) as made:
        made.more = settings(tmp_path)
        first = made.coordinator("a")
        first.said()
        control = made.control(engine.url, "ab")
        url = made.gateway("first", "ab")
        stage = made.stage(control, first, [url])
        caller = await stage.caller()
        second = made.coordinator("b", "--standby")
        async with openai_of(stage.cell, caller.secret) as client:
            batch = await submitted(client, content)
            await until_half(client, batch.id, lines)
            first.process.send_signal(number)
            ended = await until_done(client, batch.id)
            assert ended.status == "completed"
            cost = check_answers(await results_of(client, ended), scripts)
        if number is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(first.process.wait, START_S)
        await served_again(url, caller, "after", ["coordinator_lost", "no_capacity"])
        await check(made.stage(control, second, [url]), caller.tenant, lines, cost)
        assert lines <= engine.started <= lines + IN_FLIGHT + 1


@pytest.mark.parametrize("lines", SIZES)
async def test_gateways_and_control_are_killed_in_the_middle(lines: int, tmp_path: Path) -> None:
    """Protects a batch from parts that it does not need: it goes on, and its tenant reads it elsewhere."""
    scripts = [script_of(number) for number in range(lines)]
    content = input_of([line_of(number, script) for number, script in enumerate(scripts)])
    with ScriptedEngine() as engine, parts(tmp_path) as made:
        made.more = settings(tmp_path)
        coordinator = made.coordinator("a")
        coordinator.said()
        control = made.control(engine.url)
        part, url = made.gateway_at("127.0.0.1:0", "first")
        other = made.gateway("second")
        stage = made.stage(control, coordinator, [url, other])
        caller = await stage.caller()
        here, there = stage.cell.doors()
        async with openai_of(here, caller.secret) as client:
            batch = await submitted(client, content)
            await until_half(client, batch.id, lines)
        part.kill()
        control.kill()
        control = made.control(engine.url)
        async with openai_of(there, caller.secret) as client:
            ended = await until_done(client, batch.id)
            cost = check_answers(await results_of(client, ended), scripts)
        await check(made.stage(control, coordinator, [other]), caller.tenant, lines, cost)
        assert lines <= engine.started <= lines + IN_FLIGHT
