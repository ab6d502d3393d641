"""A cell that keeps its books in PostgreSQL: as durable as on SQLite, and replaced by the next one that opens the database."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from tests.e2e.ending_stage import Stage
from tests.e2e.running_cell import kill_if_running, start_cell
from tests.e2e.test_crash import CONFIG, Seen, check_not_run_again, check_resolved, check_sums, kill_in_mid_stream
from tests.postgres_server import shared_server

ROUNDS = 2


async def test_a_killed_cell_on_postgres_forgets_nothing(tmp_path: Path) -> None:
    """kill -9 in mid-stream, round after round on one database: tenants pay once for what was answered, for nothing else."""
    url = shared_server().create_database(keep=True)
    moment, state = random.Random(21), tmp_path / "state"
    records: list[tuple[Seen, dict[str, Any]]] = []
    cell = start_cell(state, "--database", url, config=CONFIG)
    try:
        for number in range(ROUNDS):
            requests = await kill_in_mid_stream(cell, number, moment)
            cell = start_cell(state, "--database", url, config=CONFIG)
            stage = Stage(cell)
            found = [(seen, await check_resolved(stage, seen)) for seen in requests]
            records += [(seen, record) for seen, record in found if record is not None]
            await check_sums(stage, records)
            for seen in [seen for seen, record in records[-3:] if record["status"] == "completed"]:
                await check_not_run_again(stage, seen)
            assert "Traceback" not in cell.tail()
        assert "coordinator_lost" in {record["finish_reason"] for _, record in records}
        assert not (state / "weir.sqlite3").exists()
        assert cell.stop() == 0
    finally:
        kill_if_running(cell.process)


async def test_of_two_cells_on_one_database_the_newer_one_writes(tmp_path: Path) -> None:
    """The older cell's next write is refused, nobody pays for it, and it ends saying why; the address stays unseen."""
    url = shared_server().create_database(keep=True).replace("weir@", "weir:hunter2@")
    config = f'[store]\nurl = "{url}"\n'
    old = start_cell(tmp_path / "old", config=config)
    try:
        caller = Stage(old).demo_caller()
        assert (await Stage(old).run(caller, "Hello", "before")).reason == "stop"
        new = start_cell(tmp_path / "new", config=config)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert (await Stage(old).run(caller, "Hello", "refused", stream=False)).http == 503
            assert await asyncio.to_thread(old.process.wait, 20) == 2
            assert "A newer coordinator writes to this store" in old.tail()
            assert "hunter2" not in old.log.read_text() + new.log.read_text()
            assert (await Stage(new).get(caller, "before")).json["status"] == "completed"
            assert (await Stage(new).get(caller, "refused")).status == 404
            assert (await Stage(new).run(caller, "Hello", "after")).reason == "stop"
        finally:
            assert new.stop() == 0
    finally:
        kill_if_running(old.process)
