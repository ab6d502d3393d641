"""Thousands of endings on one cell: slots, holds, memory and descriptors come back to where they were, and every sum agrees.

The bounded version runs always; the full one with WEIR_SOAK=1 and `-m slow`. The figures are printed (`-s`).
"""

import asyncio
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.ending_stage import ENDINGS, Caller, Stage, read_shown, wait_until
from tests.e2e.processes import open_descriptors, resident_bytes
from tests.e2e.running_cell import RunningCell, running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask

AT_ONCE = 24
GROWTH_BYTES = 12 * 1024 * 1024
GROWTH_DESCRIPTORS = 24  # kept connections to the engine come and go, one per lane and count; a leak would be thousands
SETTLED_S = 30.0
CONFIG = """
[pool]
concurrency = 16
[engine]
idle_ms = 1000
probe_ms = 100
[coordinator]
remembered_executions = 100
"""
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
        await asyncio.sleep(0.3)  # descriptors of closed connections go at the loop's next turns
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


@pytest.mark.parametrize("times", [150, pytest.param(5_000, marks=FULL)])
async def test_disconnects(tmp_path: Path, times: int) -> None:
    """Clients that leave at random moments, streaming or not, leave no slot, hold, memory or descriptor behind."""
    moment = random.Random(7)
    with running_cell(tmp_path / "state", config=CONFIG) as cell:
        stage = Stage(cell)
        caller = stage.demo_caller()

        async def leave(number: int) -> None:
            delay_s, stream = moment.uniform(0, 0.4), moment.random() < 0.5
            async with stage.call(caller, f"Say {number}", f"leave-{moment.getrandbits(64)}", stream=stream):
                await asyncio.sleep(delay_s)  # the moment of leaving, which is what varies

        await repeat(max(150, times // 10), leave)
        warm = await size_at_rest(stage)
        await repeat(times, leave)
        await check_flat(stage, warm, f"{times} disconnects")
        await check_books(stage, caller)
        await stage.check_serves(caller)
        rows = {row["status"]: row["requests"] for row in await stage.usage(caller.tenant)}
        assert rows["cancelled"] > times // 10 and set(rows) <= {"cancelled", "completed", "expired"}, rows
    check_store_and_log(cell)


KINDS: dict[str, Script] = {
    "stop": Script(),
    "length": Script(end="length"),
    "engine_error": Script(end="error", gap_ms=5),
    "engine_rejected": Script(status=400),
    "replica_lost": Script(end="reset", gap_ms=5),
    "stalled": Script(end="stall"),
    "client": Script(tokens=400, gap_ms=10),
    "disconnect": Script(tokens=400, gap_ms=10),
    "deadline": Script(tokens=400, gap_ms=10),
}
RARE = ("replica_lost", "stalled")
"""These make the replica suspect until its next probe, so that others are refused meanwhile."""
REFUSED = ("no_capacity", "deadline_unmeetable_now", "queue_wait_exceeded")


class Mixed:
    """Requests that end in every way. ended: how often each was seen."""

    def __init__(self, stage: Stage, caller: Caller) -> None:
        self._stage = stage
        self._caller = caller
        self._chance = random.Random(11)
        self.ended: Counter[str] = Counter()

    async def one(self, number: int) -> None:
        """One request; it ends as its kind says, or is refused while the replica is suspect."""
        chance = self._chance
        kinds = RARE if number % 40 == 0 else tuple(kind for kind in KINDS if kind not in RARE)
        kind, request_id = chance.choice(kinds), f"mixed-{chance.getrandbits(64)}"
        stream = kind != "disconnect" and chance.random() < 0.5
        deadline_ms = 150 if kind == "deadline" else None
        async with self._stage.call(
            self._caller,
            KINDS[kind],
            request_id,
            stream=stream,
            deadline_ms=deadline_ms,
            surface=chance.choice(("native", "chat")),
        ) as call:
            if kind == "disconnect":
                await asyncio.sleep(0.03)
                self.ended[kind] += 1
                return
            if kind == "client":
                await self._stage.get(self._caller, request_id, "/cancel")
            shown = await read_shown(call)
        if shown.code in REFUSED:
            self.ended["refused"] += 1
            await wait_until(self._is_ready, "a replica is ready again")
            return
        _, native, compatible, code = ENDINGS[kind]
        assert (shown.http in (0, native, compatible) and shown.code == code) or kind == "client", (kind, shown)
        self.ended[kind] += 1

    async def _is_ready(self) -> bool:
        return (await ask(self._stage.cell.api, "/readyz")).status == 200


@pytest.mark.parametrize("times", [75, pytest.param(1_000, marks=FULL)])
async def test_endings_of_every_kind(tmp_path: Path, times: int) -> None:
    """A random mix of endings, several at a time: each ends as its kind says, and the cell is as large as before."""
    with ScriptedEngine() as engine, running_cell(tmp_path / "state", engine=(engine.url,), config=CONFIG) as cell:
        stage = Stage(cell)
        caller = stage.demo_caller()
        mixed = Mixed(stage, caller)
        await repeat(max(50, times // 10), mixed.one)
        warm = await size_at_rest(stage)
        await repeat(times, mixed.one)
        await check_flat(stage, warm, f"{times} endings {dict(sorted(mixed.ended.items()))}")
        await check_books(stage, caller)
        await stage.check_serves(caller)
        assert engine.running == 0
        assert {row["status"] for row in await stage.usage(caller.tenant)} == {"completed", "cancelled", "expired", "failed"}
    check_store_and_log(cell)
