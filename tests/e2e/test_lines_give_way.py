"""Lines of a batch give their lanes to whoever waits for an answer: on a real model, and on a simulated one.

What is asserted is what Weir decides: how long a request waited for its lane, how each execution of a line ended, and who paid.
How fast an engine then reads a prompt is the machine's.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.batch_stage import input_of, line_for, openai_of, results_of, submitted, until_done
from tests.e2e.conftest import SLOW_ROW, engine_process
from tests.e2e.ending_stage import Caller, Stage, price, wait_until
from tests.e2e.money_stage import new_caller
from tests.e2e.running_cell import running_cell

from weir.engines.simulated_text import natural_output_tokens

CHAT = "/v1/chat/completions"
GIVEN_WAY_MS = 1_000
STARTED_S = 30.0
SHORT = 8
STORY = "Write a very long story about a river, a mill and heron number {}. Do not stop early."


def config(lanes: int, lines: int) -> str:
    """One pool for everybody."""
    pool = f"[pool]\nconcurrency = {lanes}\nthreads = 1\nsecond_model = false\n"
    # However busy the machine is, all lanes stay, and no line's time is over in the queue.
    pool += "[coordinator]\nconcurrency_min_percent = 100\nqueue_wait_ms = 60000\n"
    return f"{pool}[batches]\npoll_ms = 50\nlines_in_flight = {lines}\n"


def long_lines(prompts: list[str], tokens: int) -> bytes:
    """A batch's file of answers of so many tokens at most."""
    bodies = [{"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens} for prompt in prompts]
    return input_of([line_for(CHAT, number, body) for number, body in enumerate(bodies)])


def talkative(number: int, tokens: int) -> list[str]:
    """Prompts that the simulated engine answers with as many words, or more."""
    prompts = (STORY.format(each) for each in range(10_000))
    return list(islice((prompt for prompt in prompts if natural_output_tokens(prompt) >= tokens), number))


async def executions(stage: Stage, caller: Caller, request_id: str) -> list[Mapping[str, Mapping[str, Any]]]:
    """The events of each execution of a request by their names, the latest execution first."""
    path = f"generations/{caller.tenant}/{request_id}/explanation"
    timelines = (await stage.admin("GET", path))["timelines"]
    return [{event["event"]: event for event in each["events"]} for each in timelines if "execution" in each]


async def all_lanes_write(stage: Stage, lanes: int) -> None:
    """Wait until every lane is taken and no prompt is being read: what still reads is no measure of a stop."""

    async def write() -> bool:
        [replica] = (await stage.admin("GET", "replicas"))["replicas"]
        return bool(replica["running"] == lanes and replica["prefill_tokens"] == 0)

    await wait_until(write, "every lane writes a line", STARTED_S)


async def waited_ms(stage: Stage, caller: Caller, request_id: str) -> float:
    """Ask something short; how long it waited for a lane."""
    shown = await stage.run(caller, "What is a weir?", request_id, most=SHORT)
    assert shown.status == "completed", shown
    record = (await stage.get(caller, request_id)).json
    return float(record["timing"]["queue_ms"])


async def check_batch(stage: Stage, caller: Caller, batch_id: str, lines: int) -> int:
    """Each line is told once and paid for once, whatever became of it before; how often lines gave way."""
    async with openai_of(stage.cell, caller.secret) as client:
        batch = await until_done(client, batch_id)
        results = await results_of(client, batch)
    assert batch.status == "completed" and results.error == []
    assert results.times == Counter(f"line-{number}" for number in range(lines))
    usages = [line["response"]["body"]["usage"] for line in results.output]
    cost = sum(price(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages)
    ends: Counter[str] = Counter()
    for number in range(1, lines + 1):
        made = await executions(stage, caller, f"{batch_id}:{number}")
        reasons = [each["ended"]["finish_reason"] for each in made]
        assert reasons[0] in ("stop", "length") and set(reasons[1:]) <= {"preempted"}
        ends.update(reasons)
    rows = {row["status"]: row for row in await stage.usage(caller.tenant)}
    assert set(rows) == {"completed", "failed"} and rows["failed"]["requests"] == ends["preempted"]
    assert (rows["completed"]["requests"], rows["completed"]["cost_microusd"]) == (lines, cost)
    assert rows["failed"]["cost_microusd"] == 0 < rows["failed"]["platform_cost_microusd"]
    return ends["preempted"]


async def check_lines_give_way(stage: Stage, content: bytes, lanes: int, rounds: tuple[int, ...]) -> None:
    """Lines on all lanes; in each round so many ask at once, and are served within a second; the batch ends whole."""
    lines = content.count(b"\n")
    owner, asker = await new_caller(stage), await new_caller(stage)
    async with openai_of(stage.cell, owner.secret) as client:
        batch_id = (await submitted(client, content)).id
    for number, times in enumerate(rounds):
        await all_lanes_write(stage, lanes)
        waits = await asyncio.gather(*(waited_ms(stage, asker, f"{number}.{each}") for each in range(times)))
        assert max(waits) < GIVEN_WAY_MS, waits
    gave_way = await check_batch(stage, owner, batch_id, lines)
    assert 1 <= gave_way <= sum(rounds), "no more than were waited for, and not none"
    await stage.check_quiet()


async def test_lines_on_simulated_lanes_behind_two_gateways(tmp_path: Path) -> None:
    """Protects interactive work on a shared pool: whichever gateway it comes through, a line makes room, and runs again."""
    lanes, lines, tokens = 3, 4, 66  # more than two seconds a line
    with (
        engine_process("--row", SLOW_ROW, "--concurrency", str(lanes)) as url,
        running_cell(tmp_path / "state", "--gateways", "2", engine=(url,), config=config(lanes, lines)) as cell,
    ):
        await check_lines_give_way(Stage(cell), long_lines(talkative(lines, tokens), tokens), lanes, (2,))
        assert "Traceback" not in cell.log.read_text()


@pytest.mark.model
async def test_lines_on_the_lanes_of_a_real_model(tmp_path: Path) -> None:
    """Protects interactive work beside a batch on a real engine: its stops are as quick as the promise needs."""
    lanes, lines, tokens = 2, 4, 32
    with running_cell(tmp_path / "state", engine=("llamacpp",), config=config(lanes, lines)) as cell:
        prompts = [STORY.format(number) for number in range(lines)]
        await check_lines_give_way(Stage(cell), long_lines(prompts, tokens), lanes, (1, 1))
        assert "Traceback" not in cell.log.read_text()
