"""A thousand endings of each kind by itself: whatever ends a request, nothing of it stays but its row.

The bounded version runs always; the full one with WEIR_SOAK=1 and `-m slow`. The figures are printed (`-s`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.ending_stage import ENDINGS, Caller, Stage
from tests.e2e.running_cell import RunningCell, running_cell
from tests.e2e.scripted_engine import ScriptedEngine
from tests.soak.cell_size import FULL, check_books, check_flat, check_store_and_log, size_at_rest
from tests.soak.ending_kinds import KINDS, SHUTDOWN, Arena, Kind

SIZES = [(0, 16), pytest.param(300, 1_000, marks=FULL)]
"""Warm-up and endings. What is remembered for two minutes is part of a warm cell, about 10 kB an ending."""

DRAINED = """
[pool]
concurrency = {lanes}
[coordinator]
drain_grace_ms = 200
queue_wait_ms = 600000
"""
CellFor = Callable[[str], RunningCell]


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """An engine that does what a prompt tells it."""
    with ScriptedEngine() as started:
        yield started


@pytest.fixture(scope="module")
def cell_for(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CellFor]:
    """One cell per configuration, started when it is first asked for; each must be whole after its stop."""
    cells: dict[str, RunningCell] = {}
    with ExitStack() as running:

        def find(config: str) -> RunningCell:
            if config not in cells:
                state = tmp_path_factory.mktemp("endings") / "state"
                cells[config] = running.enter_context(running_cell(state, engine=(engine.url,), config=config))
            return cells[config]

        yield find
    for cell in cells.values():
        check_store_and_log(cell)


@pytest.mark.parametrize(("warm_up", "times"), SIZES)
@pytest.mark.parametrize("name", KINDS)
async def test_one_kind_of_ending(engine: ScriptedEngine, cell_for: CellFor, name: str, warm_up: int, times: int) -> None:
    """Each request ends as the table says, is booked once and paid by whom it says; nothing is held, and memory stays flat."""
    kind = KINDS[name]
    stage = Stage(cell_for(kind.config))
    arena = Arena(stage, engine, kind, await stage.caller())
    before = await arena.booked()
    await arena.reach(warm_up)
    warm = await size_at_rest(stage)
    await arena.reach(times)
    await check_flat(stage, warm, f"{times} × {name} of {arena.attempts} attempts")
    assert await arena.booked() - before == arena.reached
    await arena.wait_running(0)
    await check_paid(stage, arena.caller, kind, arena.reached)
    await stage.check_serves(arena.caller)


@pytest.mark.parametrize(("lanes", "starts"), [(8, 1), pytest.param(125, 4, marks=FULL)])
async def test_shutdown(engine: ScriptedEngine, tmp_path: Path, lanes: int, starts: int) -> None:
    """What a drain cuts off, running or queued, ends as the table says; each next start finds its rows and resolves nothing."""
    state, arena = tmp_path / "state", None
    for _ in range(starts):
        with running_cell(state, engine=(engine.url,), config=DRAINED.format(lanes=lanes)) as cell:
            stage = Stage(cell)
            if arena is None:
                arena = Arena(stage, engine, SHUTDOWN, await stage.caller())
            else:
                await check_paid(stage, arena.caller, SHUTDOWN, arena.reached)
            arena.stage = stage
            await SHUTDOWN.round(arena, 2 * lanes)
        await arena.wait_running(0)
    assert arena is not None and arena.reached == 2 * lanes * starts
    with running_cell(state, engine=(engine.url,), config=DRAINED.format(lanes=lanes)) as cell:
        stage = Stage(cell)
        await stage.check_quiet()
        await check_paid(stage, arena.caller, SHUTDOWN, arena.reached)
        await stage.check_serves(arena.caller)
    print(f"\n{arena.reached} × shutdown over {starts} starts: nothing held, nothing resolved")  # noqa: T201
    assert "resolved" not in cell.log.read_text()
    check_store_and_log(cell)


async def check_paid(stage: Stage, caller: Caller, kind: Kind, endings: int) -> None:
    """The usage rows are these endings and nothing else, and the payer is the table's."""
    await check_books(stage, caller)
    [row] = await stage.usage(caller.tenant)
    assert (row["status"], row["requests"]) == (ENDINGS[kind.reason][0], endings)
    assert (row["cost_microusd"] > 0) == (kind.payer == "tenant"), row
    assert row["platform_cost_microusd"] > 0 or kind.payer != "platform", row
    assert row["platform_cost_microusd"] == 0 or kind.payer != "nobody", row
