"""Thousands of endings on one cell: slots, holds, memory and descriptors come back to where they were, and every sum agrees.

The bounded version runs always; the full one with WEIR_SOAK=1 and `-m slow`. The figures are printed (`-s`).
"""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.ending_stage import ENDINGS, Caller, Stage, read_shown, wait_until
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask
from tests.e2e.surfaces import ACTIVE
from tests.soak.cell_size import FULL, check_books, check_flat, check_store_and_log, repeat, size_at_rest

CONFIG = """
[pool]
concurrency = 16
[engine]
first_output_ms = 1000
idle_ms = 1000
probe_ms = 100
restart_backoff_ms = 100
[coordinator]
remembered_executions = 100
explained_requests = 100
"""


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
"""These make the replica suspect until it is tried again, so that others are refused meanwhile."""
REFUSED = ("no_capacity", "deadline_unmeetable_now", "queue_wait_exceeded")
IN_A_HURRY = "deadline"
"""Its deadline is short enough to be no replica's to meet while the machine is slow: `deadline_infeasible`."""


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
        deadline_ms = 150 if kind == IN_A_HURRY else None
        async with self._stage.call(
            self._caller,
            KINDS[kind],
            request_id,
            stream=stream,
            deadline_ms=deadline_ms,
            surface=chance.choice(ACTIVE),
        ) as call:
            if kind == "disconnect":
                await asyncio.sleep(0.03)
                self.ended[kind] += 1
                return
            if kind == "client":
                await self._stage.get(self._caller, request_id, "/cancel")
            shown = await read_shown(call)
        if shown.code in REFUSED or (kind == IN_A_HURRY and shown.code == "deadline_infeasible"):
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
