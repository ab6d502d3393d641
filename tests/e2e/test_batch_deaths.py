"""kill -9 while a batch is half done: every line is told and charged once, and an engine repeats at most what was in flight."""

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
from tests.e2e.money_stage import CELLS, new_books, new_caller
from tests.e2e.running_cell import kill_if_running
from tests.e2e.scripted_engine import ScriptedEngine
from tests.soak.cell_size import FULL

SIZES = [300, pytest.param(2_000, marks=FULL)]
IN_FLIGHT, LANES = 24, 16
CONFIG = f"""
[pool]
concurrency = {LANES}
[batches]
lines_in_flight = {IN_FLIGHT}
poll_ms = 100
"""


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("lines", SIZES)
async def test_the_cell_is_killed_in_the_middle(lines: int, kind: str, tmp_path: Path) -> None:
    """Protects results and money through the death of worker, coordinator and store's process at once."""
    books = new_books(kind, tmp_path)
    scripts = [script_of(number) for number in range(lines)]
    content = input_of([line_of(number, script) for number, script in enumerate(scripts)])
    with ScriptedEngine() as engine:
        cell = books.start(engine.url, CONFIG)
        try:
            caller = await new_caller(Stage(cell))
            async with openai_of(cell, caller.secret) as client:
                batch = await submitted(client, content)
                await until_half(client, batch.id, lines)
            cell.process.send_signal(signal.SIGKILL)
            cell.process.wait(10)
        finally:
            kill_if_running(cell.process)
        with books.running(engine.url, CONFIG) as cell:
            async with openai_of(cell, caller.secret) as client:
                ended = await until_done(client, batch.id)
                assert ended.status == "completed"
                cost = check_answers(await results_of(client, ended), scripts)
            rows = {row["status"]: row for row in await Stage(cell).usage(caller.tenant)}
            assert rows["completed"]["requests"] == lines and rows["completed"]["cost_microusd"] == cost
            assert sum(row["cost_microusd"] for row in rows.values()) == cost
        assert lines <= engine.started <= lines + IN_FLIGHT
