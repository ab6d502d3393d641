"""Limits and time zones that change while requests run: in force at once, cutting nothing, and as set last after kill -9."""

import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.e2e.ending_stage import Caller, Stage, price, read_shown
from tests.e2e.money_stage import (
    CELLS,
    CODES,
    LIMITS,
    accounts_of,
    new_books,
    new_caller,
    noon_zone,
    scopes_of,
    set_limits,
    worst_of,
)
from tests.e2e.running_cell import kill_if_running
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call
from tests.e2e.surfaces import Shown

MOST = 40
HELD = Script(tokens=12, hold_at=5)
"""Runs until the engine lets go."""
ENDED = Script(tokens=12)


@dataclass
class Play:
    """One limit of one caller's scope, changed again and again. number: of requests asked so far."""

    stage: Stage
    caller: Caller
    scope: dict[str, str]
    limit: str
    number: int = 0
    calls: list[Call] = field(default_factory=list)

    @property
    def worst(self) -> int:
        """What one request takes of the limit."""
        return worst_of(self.limit, HELD.prompt(), MOST)

    async def set(self, amount: int | None) -> None:
        """Change it, and read it back as set."""
        wanted = {"scope": self.scope, **({} if amount is None else {self.limit: amount})}
        assert await set_limits(self.stage, self.scope, **{self.limit: amount}) == wanted
        assert await self.read_back() == ([] if amount is None else [wanted])

    async def read_back(self) -> Any:
        """The tenant's limits."""
        return (await self.stage.admin("GET", f"limits?tenant={self.caller.tenant}"))["limits"]

    async def admitted(self, stack: AsyncExitStack) -> None:
        """The next request is admitted at once, and runs until the engine lets go."""
        self.number += 1
        call = await stack.enter_async_context(self.stage.call(self.caller, HELD, f"it-{self.number}", most=MOST))
        await call.output_begun()
        self.calls.append(call)

    async def refused(self, limit: int) -> dict[str, Any]:
        """The next request is refused by this limit. Its refusal."""
        problem = await self.stage.refused(self.caller, HELD.prompt(), most=MOST)
        assert (problem["code"], problem["limit_name"], problem["limit"]) == (CODES[self.limit], self.limit, limit)
        assert problem["scope"] == self.scope
        return problem

    async def ended(self) -> list[Shown]:
        """All that run came to their own end."""
        shown = [await read_shown(call) for call in self.calls]
        assert all((one.reason, one.text) == ("stop", HELD.text) for one in shown)
        self.calls.clear()
        return shown

    async def served(self) -> None:
        """The next request is admitted, and ends."""
        self.number += 1
        shown = await self.stage.run(self.caller, ENDED, f"it-{self.number}", stream=False, most=MOST)
        assert (shown.http, shown.reason) == (200, "stop"), shown


async def change_while_running(play: Play, engine: ScriptedEngine) -> None:
    """Raise, lower below what is held and spent, remove, add again: each is in force for the very next request."""
    worst, is_bucket = play.worst, play.limit.endswith("minute")
    engine.hold()
    async with AsyncExitStack() as stack:
        await play.set(2 * worst)
        await play.admitted(stack)
        await play.admitted(stack)
        await play.refused(2 * worst)
        await play.set(3 * worst)
        await play.admitted(stack)
        await play.refused(3 * worst)
        await play.set(worst)
        problem = await play.refused(worst)
        if not is_bucket:  # a bucket is never fuller than it is large
            assert max(problem["used"], problem["held"]) == 3 * worst
        engine.release()
        costs = [shown.usage["cost_microusd"] for shown in await play.ended() if shown.usage]
    assert costs == [price(HELD.input_tokens, HELD.tokens)] * 3
    if play.limit == "concurrency":
        await play.served()
    else:
        await play.refused(worst)  # less than what was spent
    await play.set(None)
    await play.served()
    await play.set(0)
    await play.refused(0)


async def check_after_restart(play: Play) -> None:
    """What was set last is what is read back and in force, with everything that was ever spent in it."""
    assert await play.read_back() == [{"scope": play.scope, play.limit: 0}]
    await play.refused(0)
    await play.set(None)
    assert await play.read_back() == []
    await play.served()
    spent = await spent_of(play)
    if play.limit not in LIMITS[:3]:
        amount = spent + play.worst - 1
        await play.set(amount)
        problem = await play.refused(amount)
        assert (problem["used"], problem["held"]) == (spent, 0)
        await play.set(amount + 1)
        await play.served()
        found = await accounts_of(play.stage, play.caller.tenant)
        assert found[play.limit, *play.scope] == (amount + 1, 0, await spent_of(play))


async def spent_of(play: Play) -> int:
    """What its usage rows say that the caller spent, in the limit's unit."""
    [row] = await play.stage.usage(play.caller.tenant)
    assert row["requests"] == play.number
    spent: int = row["cost_microusd"] if play.limit.startswith("spend") else row["input_tokens"] + row["output_tokens"]
    return spent


# ── time zones ───────────────────────────────────────────────────────────────────────────────────────────────────────


def zone_of_another_day(present: ZoneInfo) -> ZoneInfo:
    """A time zone in which it is yesterday or tomorrow, while it is noon in this one."""
    east = round((datetime.now(present).utcoffset() or timedelta()) / timedelta(hours=1))
    other = min(14, east + 14) if east <= 1 else east - 14
    return ZoneInfo(f"Etc/GMT{-other:+d}")  # named the other way round: east of Greenwich is minus


@dataclass
class Move:
    """A tenant that has spent its day and moves to a time zone where it is another one."""

    stage: Stage
    caller: Caller
    zone: ZoneInfo

    def __post_init__(self) -> None:
        self.today = datetime.now(self.zone).date()
        self.other = zone_of_another_day(self.zone)

    async def spend_and_move(self) -> None:
        """Spend the day's budget, move, and find it spent."""
        worst = worst_of("spend_microusd_per_day", ENDED.prompt(), MOST)
        await set_limits(self.stage, {"tenant": self.caller.tenant}, spend_microusd_per_day=worst)
        assert (await self.stage.run(self.caller, ENDED, "before", stream=False, most=MOST)).http == 200
        moved = await self.stage.admin("PATCH", f"tenants/{self.caller.tenant}", {"time_zone": self.other.key})
        assert moved["time_zone"] == self.other.key and datetime.now(self.other).date() != self.today
        await self.check_spent()

    async def check_spent(self) -> None:
        """The budget of this day is spent, and comes back when the day ends where it began."""
        problem = await self.stage.refused(self.caller, ENDED.prompt(), most=MOST)
        assert (problem["code"], problem["window"]) == ("budget_exhausted", f"day/{self.today.isoformat()}")
        midnight = datetime.combine(self.today + timedelta(days=1), datetime.min.time(), tzinfo=self.zone)
        assert abs(datetime.fromisoformat(problem["resets_at"]) - midnight) < timedelta(seconds=1)
        assert problem["used"] == price(ENDED.input_tokens, ENDED.tokens)

    async def check_after_restart(self) -> None:
        """It has moved, its day has not, and what comes now counts in that day."""
        tenant = await self.stage.admin("GET", f"tenants/{self.caller.tenant}")
        assert tenant["time_zone"] == self.other.key
        await self.check_spent()
        await set_limits(self.stage, {"tenant": self.caller.tenant}, spend_microusd_per_day=None)
        assert (await self.stage.run(self.caller, ENDED, "after", stream=False, most=MOST)).http == 200
        rows = (await self.stage.admin("GET", f"usage?tenant={self.caller.tenant}&group_by=day"))["rows"]
        assert [(row["day"], row["requests"]) for row in rows] == [(self.today.isoformat(), 2)]


# ── through kill -9 ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("database", CELLS)
async def test_limits_and_time_zones_that_change_while_requests_run(tmp_path: Path, database: str) -> None:
    """Each change counts for the next request and cuts none that runs; kill -9 brings no old value back, nor a second day."""
    books, zone = new_books(database, tmp_path), noon_zone()
    with ScriptedEngine(counts_input=False) as engine:
        cell = books.start(engine.url, "")
        try:
            stage = Stage(cell)
            callers = [await new_caller(stage, zone.key) for _ in LIMITS]
            plays = [
                Play(stage, caller, scopes_of(caller)[number % 12], limit)
                for number, (caller, limit) in enumerate(zip(callers, LIMITS, strict=True))
            ]
            move = Move(stage, await new_caller(stage, zone.key), zone)
            for play in plays:
                await change_while_running(play, engine)
            await move.spend_and_move()
        finally:
            cell.process.send_signal(signal.SIGKILL)
            kill_if_running(cell.process)
        with books.running(engine.url, "") as cell:
            move.stage = Stage(cell)
            await move.check_after_restart()
            for play in plays:
                play.stage = Stage(cell)
                await check_after_restart(play)
