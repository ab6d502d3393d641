"""What every long test measures of a cell at rest: memory, descriptors, books, store and log.

The cell is asked only once it is quiet, so what is measured is what stays. Nothing here decides what is run. Sizes in bytes.
"""

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass

import pytest
from tests.e2e.ending_stage import Caller, Stage, wait_until
from tests.e2e.processes import open_descriptors, resident_bytes
from tests.e2e.running_cell import RunningCell

AT_ONCE = 24
GROWTH_BYTES = 12 * 1024 * 1024
GROWTH_DESCRIPTORS = 24  # kept connections to the engine come and go, one per lane and count; a leak would be thousands
SETTLED_S = 30.0
FULL = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("WEIR_SOAK") != "1", reason="a full run is asked for by WEIR_SOAK=1"),
]


@dataclass(frozen=True)
class Size:
    """What a process holds while nothing runs."""

    resident: int
    descriptors: int


async def repeat(times: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Run `work` so many times, AT_ONCE at a time."""
    numbers = iter(range(times))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())


async def size_at_rest(stage: Stage) -> Size:
    """The cell's size once it is quiet and its connections are closed."""
    await stage.check_quiet()
    pid, last = stage.cell.process.pid, 0

    async def is_settled() -> bool:
        nonlocal last
        before, last = last, open_descriptors(pid)
        await asyncio.sleep(0.1)  # descriptors of closed connections go at the loop's next turns
        return before == last

    await wait_until(is_settled, "descriptors settled", SETTLED_S)
    return Size(resident_bytes(pid), last)


async def check_flat(stage: Stage, warm: Size, what: str) -> None:
    """The size did not grow since the warm-up; prints the figures."""
    end = await size_at_rest(stage)
    grown, more = end.resident - warm.resident, end.descriptors - warm.descriptors
    print(f"\n{what}: RSS {warm.resident / 1e6:.1f} → {end.resident / 1e6:.1f} MB, fds {warm.descriptors} → {end.descriptors}")  # noqa: T201
    assert grown < GROWTH_BYTES and more <= GROWTH_DESCRIPTORS, (warm, end)


async def check_books(stage: Stage, caller: Caller) -> None:
    """Nothing is held, and the account is the sum of the usage rows."""
    ledger = await stage.admin("GET", f"ledger?tenant={caller.tenant}")
    rows = await stage.usage(caller.tenant)
    assert ledger["open_holds"] == 0 and all(account["held"] == 0 for account in ledger["accounts"])
    spent = next(account["spent"] for account in ledger["accounts"] if account["kind"] == "spend_microusd_lifetime")
    assert spent == sum(row["cost_microusd"] for row in rows)


def check_store_and_log(cell: RunningCell) -> None:
    """After the stop: the database is whole, holds nothing open, and nothing failed unseen."""
    with closing(sqlite3.connect(cell.state / "weir.sqlite3")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT count(*) FROM ledger_open").fetchone() == (0,)
    log = cell.log.read_text()
    assert "Traceback" not in log and "loop_fault" not in log
