"""Fifty requests at a barrier, and room for exactly three: no interleaving admits a fourth, whichever limit says so."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import pytest
from tests.e2e.ending_stage import Caller, Stage, price, wait_until
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
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Answer, Call, bearer
from tests.e2e.surfaces import ACTIVE, SURFACES, Asked, SurfaceUnderTest
from tests.soak.cell_size import FULL

AT_ONCE, ROOM = 50, 3
MOST = 40
ASKED = Script(tokens=25, hold_at=25)
"""All that are admitted run, to the last token, until every other one has its answer: so each hold is at its worst case."""


@dataclass(frozen=True)
class Round:
    """One barrier. limit: the one with room for three, set for this scope to this amount. worst: what a request takes of it."""

    caller: Caller
    limit: str
    scope: dict[str, str]
    amount: int
    worst: int
    zone: ZoneInfo


# ── the barrier ──────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def held_back(api: str, path: str, headers: Mapping[str, str], body: dict[str, Any]) -> AsyncIterator[Call]:
    """A connection that has sent its whole request but the last byte."""
    parts, content = urlsplit(api), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    try:
        fields = {"host": parts.netloc, "content-type": "application/json", "content-length": str(len(content)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content[:-1])
        await writer.drain()
        yield Call(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def answers_of(stage: Stage, engine: ScriptedEngine, caller: Caller, surface: SurfaceUnderTest) -> list[Answer]:
    """Every request at once; the engine goes on once each of the others is answered. Half of them stream, half name an id."""
    started, refused, answers = engine.started, 0, []

    async def read(call: Call) -> None:
        nonlocal refused
        status = await call.head()
        refused += status != 200
        answers.append(await call.answer())

    async def all_decided() -> bool:
        return refused + engine.started - started >= AT_ONCE

    async with AsyncExitStack() as stack:
        calls = []
        for number in range(AT_ONCE):
            request_id = "" if number % 4 < 2 else f"at-once-{number}"
            form = Asked(ASKED.prompt(), request_id, stream=number % 2 == 0, most=MOST)
            headers = bearer(caller.secret, surface.headers(form))
            calls.append(await stack.enter_async_context(held_back(stage.cell.api, surface.path, headers, surface.body(form))))
        engine.hold()
        for call in calls:
            call.writer.write(b"}")
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(read(call))
            await wait_until(all_decided, "every request is decided")
            engine.release()
    return answers


# ── what is said and booked ──────────────────────────────────────────────────────────────────────────────────────────


def check_refusal(asked: Round, answer: Answer) -> None:
    """It names the limit, its scope and its figures, and a time to wait that is true."""
    told = answer.json.get("error", answer.json)
    assert (answer.status, told["code"]) == (429, CODES[asked.limit]), answer.body
    assert (told["scope"], told["limit_name"], told["limit"]) == (asked.scope, asked.limit, asked.amount)
    full = ROOM * asked.worst
    if asked.limit == "tokens_per_minute":  # it refills while they are refused
        assert full * 0.9 <= told["used"] <= full and told["held"] == 0, told
    elif asked.limit == "requests_per_minute":
        assert (told["used"], told["held"]) == (full, 0)
    elif asked.limit == "concurrency":
        assert (told["used"], told["held"]) == (full, full)
    else:
        assert (told["used"], told["held"]) == (0, full)
    check_time_to_wait(asked, answer, told)


def check_time_to_wait(asked: Round, answer: Answer, told: Mapping[str, Any]) -> None:
    """Exact where a clock decides, spread where it is an estimate, absent where waiting cannot help."""
    if asked.limit.endswith("lifetime"):
        assert "retry-after" not in answer.headers and answer.headers["x-should-retry"] == "false"
        assert "resets_at" not in told
        return
    wait_ms = int(answer.headers["retry-after-ms"])
    assert int(answer.headers["retry-after"]) == -(-wait_ms // 1000)
    if asked.limit == "concurrency":
        assert 1_000 <= wait_ms <= 1_250
    elif asked.limit.endswith("minute"):
        assert 60_000 / ROOM * 0.9 <= wait_ms <= 60_000 / ROOM  # a third of the bucket, less what has refilled
        assert datetime.fromisoformat(told["resets_at"]) > datetime.now(UTC) + timedelta(milliseconds=wait_ms)
    else:
        resets = window_end(asked)
        assert abs(datetime.fromisoformat(told["resets_at"]) - resets) < timedelta(seconds=1)
        left_ms = (resets - datetime.now(UTC)) / timedelta(milliseconds=1)
        assert 0 <= wait_ms - left_ms < 10_000 and answer.headers["x-should-retry"] == "false"


def window_end(asked: Round) -> datetime:
    """The next midnight, or first of a month, where the tenant is."""
    today = datetime.now(asked.zone).date()
    after = today + timedelta(days=1)
    if asked.limit.endswith("month"):
        after = (today.replace(day=1) + timedelta(days=31)).replace(day=1)
    return datetime(after.year, after.month, after.day, tzinfo=asked.zone)


async def check_booked(stage: Stage, asked: Round) -> None:
    """At once after the last answer: three are booked at what they cost, and nothing is held."""
    tokens = (ROOM * ASKED.input_tokens, ROOM * ASKED.tokens)
    cost = ROOM * price(ASKED.input_tokens, ASKED.tokens)
    found = await accounts_of(stage, asked.caller.tenant)
    limit, held, spent = found[asked.limit, *asked.scope]
    assert (limit, held) == (asked.amount, 0)
    if asked.limit in ("requests_per_minute", "tokens_per_minute"):
        used = ROOM if asked.limit.startswith("requests") else sum(tokens)
        assert used * 0.8 <= spent <= used, (spent, used)
    elif asked.limit == "concurrency":
        assert spent == 0
    else:
        assert spent == (cost if asked.limit.startswith("spend") else sum(tokens))
    [row] = await stage.usage(asked.caller.tenant)
    assert (row["status"], row["requests"], row["cost_microusd"]) == ("completed", ROOM, cost)
    assert (row["input_tokens"], row["output_tokens"], row["platform_cost_microusd"]) == (*tokens, 0)


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=FULL)])
@pytest.mark.parametrize("database", CELLS)
async def test_room_for_three_admits_three(tmp_path: Path, database: str, rounds: int) -> None:
    """Of fifty parallel requests exactly three are served and booked; the others are told which limit, how full, till when."""
    books, zone = new_books(database, tmp_path), noon_zone()
    with ScriptedEngine(counts_input=False) as engine, books.running(engine.url, "") as cell:
        stage = Stage(cell)
        for number in range(rounds):
            caller, limit = await new_caller(stage, zone.key), LIMITS[number % len(LIMITS)]
            worst = worst_of(limit, ASKED.prompt(), MOST)
            # A rest that is too small for a fourth is no room; a bucket would soon have refilled it.
            spare = worst - 1 if limit not in LIMITS[:3] and number % 2 else 0
            asked = Round(caller, limit, scopes_of(caller)[number % 12], ROOM * worst + spare, worst, zone)
            await set_limits(stage, asked.scope, **{limit: asked.amount})
            surface = SURFACES[ACTIVE[(number + CELLS.index(database)) % len(ACTIVE)]]
            began = time.monotonic()
            answers = await answers_of(stage, engine, caller, surface)
            served = [answer for answer in answers if answer.status == 200]
            assert (len(served), len(answers)) == (ROOM, AT_ONCE), (limit, time.monotonic() - began)
            for answer in answers:
                if answer not in served:
                    check_refusal(asked, answer)
            await check_booked(stage, asked)
        await stage.check_quiet()
        assert (await books.verified())["settlements"] == ROOM * rounds
