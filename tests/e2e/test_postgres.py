"""A cell that keeps its books in PostgreSQL is replaced by the next one that opens the database."""

import asyncio
import contextlib
from pathlib import Path

from tests.e2e.ending_stage import Stage
from tests.e2e.running_cell import kill_if_running, start_cell
from tests.postgres_server import shared_server


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
