"""kill -9 of the whole cell in mid-stream: the next start ends every hold by rule, charges nobody twice, forgets nothing."""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.ending_stage import Caller, Stage, price
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import RunningCell, kill_if_running, start_cell
from tests.e2e.sse_client import ask

ROUNDS = 50 if os.environ.get("WEIR_SOAK") == "1" else 5
STEP_TOKENS = 16
STREAMS, WHOLE = 8, 4
CONFIG = f"""
[pool]
concurrency = 10
[coordinator]
delivery_step_tokens = {STEP_TOKENS}
"""


@dataclass
class Seen:
    """What a client had of one request when the cell died. words: of its output, each of which is one token."""

    caller: Caller
    request_id: str
    stream: bool
    accepted: bool = False
    words: int = 0
    end: dict[str, Any] | None = None


async def follow(stage: Stage, seen: Seen) -> None:
    """Run one request until it ends or the cell dies."""
    try:
        async with stage.call(seen.caller, f"Say {seen.request_id}", seen.request_id, stream=seen.stream) as call:
            if not seen.stream:
                answer = await call.answer()
                seen.accepted, seen.end = True, answer.json
                return
            async for event in call.events():
                seen.accepted = True
                seen.words += event.json["text"].count(" ") if event.name == "output" else 0
                seen.end = event.json if event.name == "done" else None
    except (ConnectionError, asyncio.IncompleteReadError):
        return


async def kill_in_mid_stream(cell: RunningCell, round_number: int, moment: random.Random) -> list[Seen]:
    """Several requests of two tenants at once, and kill -9 at a random moment of theirs. What their clients had."""
    stage = Stage(cell)
    callers = [stage.demo_caller("acme"), stage.demo_caller("globex")]
    requests = [Seen(callers[n % 2], f"r{round_number}-{n}", stream=n < STREAMS) for n in range(STREAMS + WHOLE)]
    children = children_of(cell.process.pid)
    assert children
    async with asyncio.TaskGroup() as tasks:
        for seen in requests:
            tasks.create_task(follow(stage, seen))
        await asyncio.sleep(moment.uniform(0.02, 0.6))  # the moment of the crash, which is what varies
        cell.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(cell.process.wait, 10)
    for child in children:
        assert wait_process_gone(child, 5), "an engine outlived its cell"
    return requests


async def check_resolved(stage: Stage, seen: Seen) -> dict[str, Any] | None:
    """A request after the restart: as it was answered, or ended by rule. Its record, None if it never was."""
    answer = await stage.get(seen.caller, seen.request_id)
    if answer.status == 404:  # its hold was never durable, so its client was told nothing
        assert not seen.accepted
        return None
    record: dict[str, Any] = answer.json
    if seen.end is not None:
        told = {**seen.end["usage"], "settlement": "posted"}
        assert (record["status"], record["finish_reason"], record["usage"]) == ("completed", seen.end["finish_reason"], told)
    elif record["status"] != "completed":  # one that completed may have died on its way to the client
        assert (record["status"], record["finish_reason"]) == ("failed", "coordinator_lost")
        assert record["error"]["code"] == "coordinator_lost"
        check_uncertain(seen, record["usage"])
    return record


def check_uncertain(seen: Seen, usage: dict[str, Any]) -> None:
    """The tenant pays nothing; what is booked covers what was delivered, by at most two steps too much."""
    assert usage["cost_microusd"] == 0
    if usage["basis"] is None:  # it was never dispatched
        assert not seen.words and not usage["output_tokens"]
        return
    assert usage["basis"] == "uncertain"
    assert seen.words <= usage["output_tokens"] <= seen.words + 2 * STEP_TOKENS


async def check_sums(stage: Stage, records: list[tuple[Seen, dict[str, Any]]]) -> None:
    """Usage rows, accounts and records of both tenants agree to the micro-dollar; nothing is held."""
    for tenant in ("acme", "globex"):
        own = [record for seen, record in records if seen.caller.tenant == tenant]
        lost = [record["usage"] for record in own if record["finish_reason"] == "coordinator_lost"]
        cost = sum(record["usage"]["cost_microusd"] for record in own)
        wasted = sum(price(usage["input_tokens"], usage["output_tokens"]) for usage in lost)
        rows = await stage.usage(tenant)
        sums = [sum(row[name] for row in rows) for name in ("requests", "cost_microusd", "platform_cost_microusd")]
        assert sums == [len(own), cost, wasted]
        ledger = await stage.admin("GET", f"ledger?tenant={tenant}")
        accounts = {account["kind"]: (account["spent"], account["held"]) for account in ledger["accounts"]}
        assert ledger["open_holds"] == 0 and accounts["spend_microusd_lifetime"] == (cost, 0)


async def check_not_run_again(stage: Stage, seen: Seen) -> None:
    """The same id and body after the restart is answered from the record: nothing runs and nothing is charged."""
    async with stage.call(seen.caller, f"Say {seen.request_id}", seen.request_id, stream=seen.stream) as call:
        answer = await call.answer()
    assert (answer.status, answer.json["code"]) == (409, "output_not_retained")


async def test_crash(tmp_path: Path) -> None:
    """Round after round on one state directory: a crash costs tenants nothing, and completed work stays as it was answered."""
    moment = random.Random(20)
    records: list[tuple[Seen, dict[str, Any]]] = []
    reasons: set[str] = set()
    cell = start_cell(tmp_path / "state", config=CONFIG)
    try:
        for number in range(ROUNDS):
            requests = await kill_in_mid_stream(cell, number, moment)
            cell = start_cell(tmp_path / "state", config=CONFIG)
            stage = Stage(cell)
            found = [(seen, await check_resolved(stage, seen)) for seen in requests]
            records += [(seen, record) for seen, record in found if record is not None]
            reasons |= {record["finish_reason"] for _, record in records}
            await check_sums(stage, records)
            for seen in [seen for seen, record in records[-3:] if record["status"] == "completed"]:
                await check_not_run_again(stage, seen)
            await check_sums(stage, records)
            assert "Traceback" not in cell.tail()
        assert "coordinator_lost" in reasons
        assert cell.stop() == 0
    finally:
        kill_if_running(cell.process)


async def test_a_clean_stop_leaves_nothing_to_resolve(tmp_path: Path) -> None:
    """After SIGTERM the next start resolves no hold, and the engine's process is gone."""
    cell = start_cell(tmp_path / "state", config=CONFIG)
    try:
        children = children_of(cell.process.pid)
        stage = Stage(cell)
        assert (await stage.run(stage.demo_caller(), "Hello", "before")).reason == "stop"
        assert cell.stop() == 0
        assert all(wait_process_gone(child, 5) for child in children)
        cell = start_cell(tmp_path / "state", config=CONFIG)
        assert "resolved" not in cell.log.read_text()
        answer = await ask(cell.api, "/v1/generations/before", key=cell.key())
        assert answer.json["status"] == "completed"
        assert cell.stop() == 0
    finally:
        kill_if_running(cell.process)
