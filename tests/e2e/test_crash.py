"""kill -9 of the whole cell at any moment: the next start ends every hold by rule, charges nobody twice, forgets nothing."""

import asyncio
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.ending_stage import Caller, Stage, price
from tests.e2e.money_stage import DATABASES, Books, accounts_of, new_books, new_caller, set_limits
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import RunningCell, kill_if_running, start_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask
from tests.soak.cell_size import FULL

STEP_TOKENS = 16
MOST = 64
TENANTS, CLIENTS, LANES = 3, 4, 9
ROOM = 7
"""Requests that fit into what a tenant has left: less than its clients ask for."""
WORST_TOKENS = Script(tokens=MOST, gap_ms=8).input_tokens + MOST
WORST_MICROUSD = price(WORST_TOKENS - MOST, MOST)
REQUESTS_MAX = 200
PACE_S = 0.05
CONFIG = f"""
[pool]
concurrency = {LANES}
[coordinator]
delivery_step_tokens = {STEP_TOKENS}
"""
LOST = "coordinator_lost"


@dataclass
class Seen:
    """What a client had of one request when the cell died. words: of its output, each of which is one token."""

    caller: Caller
    request_id: str
    stream: bool
    script: Script
    refused: bool = False
    accepted: bool = False
    words: int = 0
    end: dict[str, Any] | None = None


@dataclass(frozen=True)
class Ended:
    """An execution as its record tells it."""

    seen: Seen
    reason: str
    usage: dict[str, Any]

    @property
    def delivered(self) -> bool:
        """Whether its output may have reached its client."""
        return self.reason != LOST or (self.seen.stream and self.usage["output_tokens"] > 0)


async def follow(stage: Stage, seen: Seen) -> None:
    """Run one request until it ends. Raises ConnectionError or IncompleteReadError when the cell dies."""
    async with stage.call(seen.caller, seen.script, seen.request_id, stream=seen.stream, most=MOST) as call:
        if await call.head() == 429:
            assert (await call.answer()).json["code"] == "budget_exhausted"
            seen.refused = True
            await asyncio.sleep(PACE_S)
        elif not seen.stream:
            assert call.status == 200
            seen.accepted, seen.end = True, (await call.answer()).json
        else:
            async for event in call.events():
                seen.accepted = True
                seen.words += event.json["text"].count(seen.script.word) if event.name == "output" else 0
                seen.end = event.json if event.name == "done" else None


@dataclass
class Life:
    """One set of books through many deaths. asked: since the last look at the records; ended: every execution so far."""

    books: Books
    engine: ScriptedEngine
    chance: random.Random
    callers: list[Caller] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    asked: list[Seen] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    refusals: int = 0
    cell: RunningCell | None = None

    # ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def die(self) -> None:
        """kill -9, and a check of the books as it left them."""
        assert self.cell is not None
        self.cell.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.cell.process.wait, 10)
        await self.books.verified()

    async def die_while_starting(self) -> None:
        """At a random moment of a start, before, during or after its recovery."""
        self.cell = await asyncio.to_thread(self.books.spawn, self.engine.url, CONFIG)
        await asyncio.sleep(self.chance.uniform(0.3, 1.6))  # the moment of the crash, which is what varies
        await self.die()

    async def die_under_load(self, number: int) -> None:
        """At a random moment while every tenant asks for more than it may."""
        self.cell = await asyncio.to_thread(self.books.start, self.engine.url, CONFIG)
        stage = Stage(self.cell)
        await self.look(stage)
        await self.leave_little_room(stage)
        async with asyncio.TaskGroup() as tasks:
            for client in range(TENANTS * CLIENTS):
                tasks.create_task(self.ask_on(stage, f"r{number}-{client}", client))
            if number % 4 == 0:
                tasks.create_task(self.books.verified())  # while it writes, and dies
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            await self.die()

    async def ask_on(self, stage: Stage, name: str, client: int) -> None:
        """One client's requests, each after the last one's end, until the cell is gone."""
        for number in range(REQUESTS_MAX):
            script = Script(tokens=self.chance.randint(1, MOST - 4), gap_ms=self.chance.choice((0, 3, 8)))
            seen = Seen(self.callers[client % TENANTS], f"{name}-{number}", self.chance.random() < 0.6, script)
            self.asked.append(seen)
            try:
                await follow(stage, seen)
            except (ConnectionError, asyncio.IncompleteReadError):
                return
        raise AssertionError("the cell never died")

    async def leave_little_room(self, stage: Stage) -> None:
        """Limits that a few more requests reach: of money, of tokens, or of both."""
        if not self.callers:
            self.callers = [await new_caller(stage) for _ in range(TENANTS)]
        for number, caller in enumerate(self.callers):
            money, tokens = self.spent(caller)
            money += ROOM * WORST_MICROUSD
            tokens += ROOM * WORST_TOKENS if number else 10**9
            self.limits[caller.tenant] = money
            await set_limits(
                stage, {"tenant": caller.tenant}, spend_microusd_lifetime=money, tokens_lifetime=tokens, concurrency=100
            )

    # ── looks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, caller: Caller) -> list[Ended]:
        """A tenant's executions."""
        return [one for one in self.ended if one.seen.caller is caller]

    def spent(self, caller: Caller) -> tuple[int, int]:
        """(micro-dollars, tokens) that a tenant paid for."""
        paid = [one.usage for one in self.of(caller) if one.usage["cost_microusd"]]
        return sum(usage["cost_microusd"] for usage in paid), sum(u["input_tokens"] + u["output_tokens"] for u in paid)

    async def look(self, stage: Stage) -> None:
        """Every request since the last look ended as it was answered, or by rule; nothing runs again, and every sum agrees."""
        fresh = [one for one in await asyncio.gather(*(resolved(stage, seen) for seen in self.asked)) if one is not None]
        self.refusals += sum(seen.refused for seen in self.asked)
        self.asked.clear()
        self.ended += fresh
        await self.check_sums(stage)
        for one in [one for one in fresh if one.delivered][-2:]:
            await check_not_run_again(stage, one.seen)
        free = [one for one in fresh if not one.delivered][-1:]
        for one in free:
            await self.run_again(stage, one.seen)
        await self.check_sums(stage)

    async def run_again(self, stage: Stage, seen: Seen) -> None:
        """What delivered and cost nothing may run again, once, and is paid then."""
        tenant = seen.caller.tenant
        self.limits[tenant] += WORST_MICROUSD
        await set_limits(stage, {"tenant": tenant}, spend_microusd_lifetime=self.limits[tenant], tokens_lifetime=None)
        shown = await stage.run(seen.caller, seen.script, seen.request_id, stream=seen.stream, most=MOST)
        assert shown.reason == "stop" and shown.usage is not None, shown
        self.ended.append(Ended(seen, "stop", dict(shown.usage)))
        await check_not_run_again(stage, seen)

    async def check_sums(self, stage: Stage) -> None:
        """Records, usage rows and accounts of each tenant agree to the micro-dollar, within its limit; nothing is held."""
        for caller in self.callers:
            own, (money, tokens) = self.of(caller), self.spent(caller)
            lost = [one.usage for one in own if one.reason == LOST]
            wasted = sum(price(usage["input_tokens"], usage["output_tokens"]) for usage in lost)
            rows = await stage.usage(caller.tenant)
            names = ("requests", "cost_microusd", "platform_cost_microusd", "input_tokens", "output_tokens")
            requests, cost, platform, *used = [sum(row[name] for row in rows) for name in names]
            assert (requests, cost, platform, sum(used)) == (len(own), money, wasted, tokens)
            found = await accounts_of(stage, caller.tenant)
            assert found["spend_microusd_lifetime", "tenant"][1:] == (0, money)
            assert money <= self.limits[caller.tenant]


async def resolved(stage: Stage, seen: Seen) -> Ended | None:
    """A request after the restart: as it was answered, or ended by rule. None if it never was admitted."""
    answer = await stage.get(seen.caller, seen.request_id)
    if answer.status == 404:  # refused, or its hold was never durable, so that its client was told nothing
        assert not seen.accepted
        return None
    assert not seen.refused
    record: dict[str, Any] = answer.json
    usage, reason = record["usage"], record["finish_reason"]
    if seen.end is not None:
        told = {**seen.end["usage"], "settlement": "posted"}
        assert (record["status"], reason, usage) == ("completed", seen.end["finish_reason"], told)
    if record["status"] == "completed":  # one that nobody was told of may have died on its way to the client
        assert usage["output_tokens"] == seen.script.tokens and usage["basis"] == "engine"
        assert usage["cost_microusd"] == price(usage["input_tokens"], usage["output_tokens"])
    else:
        assert (record["status"], reason, record["error"]["code"]) == ("failed", LOST, LOST)
        check_uncertain(seen, usage)
    return Ended(seen, reason, usage)


def check_uncertain(seen: Seen, usage: dict[str, Any]) -> None:
    """The tenant pays nothing; what is booked covers what was delivered, by at most two steps too much."""
    assert usage["cost_microusd"] == 0
    if usage["basis"] is None:  # it was never dispatched
        assert not seen.words and not usage["output_tokens"]
        return
    assert usage["basis"] == "uncertain"
    assert seen.words <= usage["output_tokens"] <= seen.words + 2 * STEP_TOKENS


async def check_not_run_again(stage: Stage, seen: Seen) -> None:
    """The same id and body after the restart is answered from the record: nothing runs and nothing is charged."""
    async with stage.call(seen.caller, seen.script, seen.request_id, stream=seen.stream, most=MOST) as call:
        answer = await call.answer()
    assert (answer.status, answer.json["code"]) == (409, "output_not_retained")


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=FULL)])
@pytest.mark.parametrize("database", DATABASES)
async def test_death_after_death(tmp_path: Path, database: str, rounds: int) -> None:
    """Round after round on one set of books: no crash costs a tenant anything, what was answered stays, no budget is passed."""
    with ScriptedEngine() as engine:
        life = Life(new_books(database, tmp_path), engine, random.Random(20))
        try:
            for number in range(rounds):
                if number % 3 == 2:
                    await life.die_while_starting()
                else:
                    await life.die_under_load(number)
        finally:
            if life.cell is not None:
                kill_if_running(life.cell.process)
        with life.books.running(engine.url, CONFIG) as cell:
            await life.look(Stage(cell))
        reasons = [one.reason for one in life.ended]
        assert {"stop", LOST} <= set(reasons) and any(one.delivered for one in life.ended if one.reason == LOST)
        assert life.refusals and (life.books.state / "weir.sqlite3").exists() == (database == "sqlite")
        assert "Traceback" not in cell.log.read_text()


async def test_a_clean_stop_leaves_nothing_to_resolve(tmp_path: Path) -> None:
    """After SIGTERM the next start resolves no hold; the engine's process is gone then, and also after kill -9."""
    cell = start_cell(tmp_path / "state")
    try:
        children = children_of(cell.process.pid)
        stage = Stage(cell)
        assert (await stage.run(stage.demo_caller(), "Hello", "before")).reason == "stop"
        assert cell.stop() == 0
        assert children and all(wait_process_gone(child, 5) for child in children)
        cell = start_cell(tmp_path / "state")
        assert "resolved" not in cell.log.read_text()
        answer = await ask(cell.api, "/v1/generations/before", key=cell.key())
        assert answer.json["status"] == "completed"
        children = children_of(cell.process.pid)
        kill_if_running(cell.process)
        assert children and all(wait_process_gone(child, 5) for child in children)
    finally:
        kill_if_running(cell.process)
