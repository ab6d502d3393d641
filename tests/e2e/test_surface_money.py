"""Money is the same on every surface: what is enforced = what the ledger holds = price × tokens = what the answer shows.

One table of endings, walked on each surface, streamed and not; each case has a tenant and so an account of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.e2e.ending_stage import Caller, Payer, Stage, price, read_shown, wait_until
from tests.e2e.money_stage import Books, set_limits
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.surfaces import ANSWERS, Shown

CONFIG = """
[pool]
concurrency = 8
[engine]
probe_ms = 20
restart_backoff_ms = 1
"""
MOST = 1_000
GENERATED = 5


@dataclass(frozen=True)
class Row:
    """A script, who ends it, and how that must be told and paid."""

    script: Script
    reason: str
    payer: Payer
    ended_by: str = "engine"


ROWS = {
    "completed": Row(Script(tokens=6, word=" é𝄞"), "stop", "tenant"),
    "completed at its bound": Row(Script(tokens=6, end="length"), "length", "tenant"),
    "completed with nothing": Row(Script(tokens=0), "stop", "tenant"),
    "cancelled by id": Row(Script(tokens=400, gap_ms=25), "client", "tenant", "cancel"),
    "cancelled by leaving": Row(Script(tokens=400, gap_ms=25), "disconnect", "tenant", "leave"),
    "failed": Row(Script(end="error", gap_ms=20), "engine_error", "platform"),
    "refused by the engine": Row(Script(status=400), "engine_rejected", "nobody"),
}


@pytest.fixture(scope="module", autouse=True)
def books(stage: Stage) -> Iterator[None]:
    """After the last case the books are clean: every balance is the sum of its records."""
    yield
    assert Books(stage.cell.state, None).verify()["open holds"] == 0


async def ended(stage: Stage, engine: ScriptedEngine, caller: Caller, row: Row, answer: tuple[str, bool]) -> Shown | None:
    """Run a row to its end; what was told, None where nobody is there to be told."""
    surface, stream = answer
    engine.sent.pop("", None)

    async def has_generated() -> bool:
        return engine.sent.get("", 0) >= GENERATED

    async with stage.call(caller, row.script, "it", surface=surface, stream=stream, most=MOST) as call:
        if row.ended_by != "engine":
            await wait_until(has_generated, "the engine generates")
        if row.ended_by == "leave":
            call.leave()
            return None
        if row.ended_by == "cancel":
            await stage.get(caller, "it", "/cancel")
        return await read_shown(call)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer[0]}-{'stream' if answer[1] else 'whole'}")
@pytest.mark.parametrize("name", ROWS)
async def test_what_an_ending_costs_is_the_same_everywhere(
    stage: Stage, engine: ScriptedEngine, name: str, answer: tuple[str, bool]
) -> None:
    """Protects tenants and the platform: answer, record, usage row and account agree, and the next hold is measured by them."""
    row, caller = ROWS[name], await stage.caller()
    await stage.check_serves(stage.demo_caller())
    shown = await ended(stage, engine, caller, row, answer)
    await stage.check_ended(caller, "it", row.reason, row.payer, shown)
    if row.reason in ("stop", "length"):
        assert shown is not None and shown.usage is not None, "a completed answer shows what it used"
    [usage] = await stage.usage(caller.tenant)
    spent, asked = usage["cost_microusd"], Script(tokens=1)
    assert (spent > 0) == (row.payer == "tenant")
    worst = price(asked.input_tokens, MOST)
    refusal = (429, "budget_exhausted") if spent else (400, "exceeds_limit_capacity")  # nothing spent: it never would fit
    assert await refused_within(stage, caller, answer, asked, spent + worst - 1) == refusal
    assert await refused_within(stage, caller, answer, asked, spent + worst) is None


async def refused_within(
    stage: Stage, caller: Caller, answer: tuple[str, bool], asked: Script, budget: int
) -> tuple[int, str] | None:
    """How a request is refused, in the surface's shape, where its tenant may spend so much in all; None where it is served."""
    surface, stream = answer
    await set_limits(stage, {"tenant": caller.tenant}, spend_microusd_lifetime=budget)
    shown = await stage.run(caller, asked, f"within-{budget}", surface=surface, stream=stream, most=MOST)
    if shown.code is None:
        assert shown.text == asked.text
        return None
    assert shown.http == 400 or shown.headers["x-should-retry"] == "false"
    return shown.http, shown.code
