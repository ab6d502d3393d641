"""A store that is slow, locked, full, down or cut off, and back: refusals are told, nobody pays for it, records land once.

On one process with either database, and on two gateways beside PostgreSQL: there everything is asked through each of them.
"""

import asyncio
import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from itertools import count
from typing import Self

import asyncpg
import pytest
from tests.e2e.ending_stage import Caller, Stage, read_shown, wait_until
from tests.e2e.money_stage import CELLS, Books, new_books
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call, ask
from tests.e2e.surfaces import Shown
from tests.e2e.test_gateways import owner_of
from tests.postgres_server import shared_server

STEP_TOKENS = 8
CONFIG = f"""
[pool]
concurrency = 8
[coordinator]
store_wait_ms = 800
delivery_step_tokens = {STEP_TOKENS}
"""
SHOWN = 4
LONG = Script(tokens=400, gap_ms=10, hold_at=SHOWN)
"""Shows its first words, and would go on for long when the engine lets go."""
WHOLE = Script(tokens=6, hold_at=6)
"""Makes its output, and ends when the engine lets go."""
FULL_BYTES = 4 * 1024
"""Not even the first page of a write-ahead log that has just begun anew fits."""
TOLD_S = 8.0
"""Several times what a client of a store that is away waits for the end, because this machine may be busy."""


@dataclass(frozen=True)
class Stand:
    """A cell with the means to take its store away."""

    stage: Stage
    books: Books

    @property
    def doors(self) -> list[Stage]:
        """The cell as each of its gateways alone shows it."""
        return [Stage(cell) for cell in self.stage.cell.doors()]

    def away(self, fault: str) -> AbstractAsyncContextManager[None]:
        """One of the two ways in which the store is away for the length of a block."""
        return self.locked() if fault == "locked" else self.gone()

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Somebody else has the lock that every write needs: the file's, or the cell's row's."""
        if self.books.url is None:
            with closing(sqlite3.connect(self.books.state / "weir.sqlite3", isolation_level=None)) as database:
                database.execute("BEGIN IMMEDIATE")
                yield
                database.execute("ROLLBACK")
            return
        connection = await asyncpg.connect(self.books.url)
        try:
            async with connection.transaction():
                await connection.execute("SELECT 1 FROM cell FOR UPDATE")
                yield
        finally:
            await connection.close()

    @asynccontextmanager
    async def gone(self) -> AsyncIterator[None]:
        """SQLite: the disk is full for the cell, no file of it may grow. PostgreSQL: the server crashed."""
        if self.books.url is not None:
            shared_server().stop(signal.SIGQUIT)
            try:
                yield
            finally:
                shared_server().start()
            return
        pid = self.stage.cell.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    async def wait_served(self) -> None:
        """New work is served, once a cell whose lease ran out meanwhile has it again; until then a client is to come again."""
        caller, numbers = await self.stage.caller(), count()

        async def is_served() -> bool:
            shown = await self.stage.run(caller, Script(), f"again-{next(numbers)}", stream=False)
            assert shown.http == 200 or shown.code in ("coordinator_lost", "ledger_unavailable"), shown
            return shown.http == 200

        await wait_until(is_served, "new work is served")


@pytest.fixture(scope="module", params=CELLS)
def stand(engine: ScriptedEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A cell on that engine, of each kind."""
    books = new_books(request.param, tmp_path_factory.mktemp("faults"))
    with books.running(engine.url, CONFIG) as cell:
        yield Stand(Stage(cell), books)


# ── what runs as the store goes ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work:
    """A stream and a whole answer through one gateway, each of a caller of its own."""

    streaming: Caller
    stream: Call
    whole: Caller
    call: Call

    @classmethod
    async def begun(cls, door: Stage, stack: AsyncExitStack, engine: ScriptedEngine) -> Self:
        """The stream shows output, the whole answer makes its own; both go on when the engine lets go."""
        streaming, whole, started = await door.caller(), await door.caller(), engine.started
        stream = await stack.enter_async_context(door.call(streaming, LONG, "it"))
        call = await stack.enter_async_context(door.call(whole, WHOLE, "it", stream=False))
        await stream.output_begun()
        await wait_until(lambda: has_started(engine, started + 2), "both run")
        return cls(streaming, stream, whole, call)

    async def read(self) -> Shown:
        """How the stream ended: it went on within what was booked. Of the whole answer, which was not, nothing is shown."""
        shown, whole = await read_shown(self.stream), await read_shown(self.call)
        assert (shown.status, shown.reason) == ("failed", "ledger_unavailable"), shown
        assert SHOWN < shown.text.count(LONG.word) <= SHOWN + 2 * STEP_TOKENS, shown
        check_refusal(whole)
        assert (whole.status, whole.reason, whole.text) == ("failed", "ledger_unavailable", ""), whole
        return shown

    async def check_pending(self, door: Stage) -> None:
        """A gateway tells how the stream ended, and that nothing is booked of it."""
        record = (await door.get(self.streaming, "it")).json
        assert (record["status"], record["usage"]["settlement"]) == ("failed", "pending")

    async def check_ended(self, stage: Stage, shown: Shown) -> None:
        """The platform paid. A settlement that a write had taken already may land with it: then the record decides."""
        await stage.check_ended(self.streaming, "it", "ledger_unavailable", "platform", shown)
        landed = (await stage.get(self.whole, "it")).json["status"] == "completed"
        reason = "stop" if landed else "ledger_unavailable"
        await stage.check_ended(self.whole, "it", reason, "tenant" if landed else "platform")


async def has_started(engine: ScriptedEngine, number: int) -> bool:
    """Whether the engine got so many generations."""
    return engine.started >= number


async def is_idle(engine: ScriptedEngine) -> bool:
    """Whether the engine makes nothing."""
    return engine.running == 0


# ── what is asked while it is away ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Early:
    """A request through one gateway before anybody knows that the store is away, of a caller of its own."""

    door: Stage
    caller: Caller
    stream: bool

    async def sent(self, stack: AsyncExitStack) -> Call:
        """It is on its way."""
        return await stack.enter_async_context(self.door.call(self.caller, Script(), "it", stream=self.stream))

    async def check_ended(self, stage: Stage, *, admitted: bool) -> None:
        """The platform paid for what was admitted; where the id could not be looked up nothing was, and nothing is known."""
        if admitted:
            await stage.check_ended(self.caller, "it", "ledger_unavailable", "platform")
        else:
            assert (await stage.get(self.caller, "it")).status == 404 and await stage.usage(self.caller.tenant) == []


async def told_while_away(works: list[Work], early: list[Early], engine: ScriptedEngine) -> list[Shown]:
    """How streams end that run: within a bound, as what comes at once is refused, and the engine makes nothing more."""
    async with asyncio.timeout(TOLD_S), AsyncExitStack() as stack:
        calls = [await one.sent(stack) for one in early]
        engine.release()
        told = [await work.read() for work in works]
        for call in calls:
            check_refusal(await read_shown(call))
        await wait_until(lambda: is_idle(engine), "the engine makes nothing")
    return told


def check_refusal(shown: Shown) -> None:
    """No headers were sent: the store is named, and when to come again."""
    assert (shown.http, shown.code) == (503, "ledger_unavailable"), shown
    assert int(shown.headers["retry-after"]) >= 1


async def check_refused(door: Stage, caller: Caller) -> None:
    """What comes late is refused at once, with an id and without, which nobody can have used before."""
    check_refusal(await door.run(caller, Script(), "it"))
    body = {"model_alias": "assistant", "input": Script().prompt()}
    answer = await ask(door.cell.api, "/v1/generations", method="POST", key=caller.secret, body=body)
    assert (answer.status, answer.json["code"]) == (503, "ledger_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


async def change_limit(stage: Stage, caller: Caller) -> bool:
    """An administrator changes a limit while the store is away: whether it was said to be in force, else it is refused."""
    admin, body = stage.cell.ready["admin"], {"scope": {"tenant": caller.tenant}, "requests_per_minute": 1_000}
    answer = await ask(admin, "/admin/v1/limits", method="PUT", key=stage.cell.ready["admin_key"], body=body)
    assert answer.status == 200 or (answer.status, answer.json["code"]) == (503, "ledger_unavailable")
    return answer.status == 200


async def check_late(stand: Stand, late: Caller, *, was_changed: bool) -> None:
    """Of what was refused nothing is known; what is asked now through each gateway is served, and counted by itself."""
    for door in stand.doors:
        assert (await door.get(late, "it")).status == 404
        await door.check_serves(late)
    [row] = await stand.stage.usage(late.tenant)
    assert (row["status"], row["requests"]) == ("completed", len(stand.doors))
    [limits] = (await stand.stage.admin("GET", f"limits?tenant={late.tenant}"))["limits"]
    assert limits.get("requests_per_minute") == (1_000 if was_changed else None)


# ── the faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", ["locked", "gone"])
async def test_a_store_that_is_away(stand: Stand, engine: ScriptedEngine, fault: str) -> None:
    """What runs ends within what is booked, what is new is refused, nobody pays; once it is back every record lands, once."""
    stage, doors = stand.stage, stand.doors
    late, early = await stage.caller(), [Early(door, await stage.caller(), kind) for door in doors for kind in (True, False)]
    engine.hold()
    async with AsyncExitStack() as stack:
        works = [await Work.begun(door, stack, engine) for door in doors]
        async with stand.away(fault):
            told = await told_while_away(works, early, engine)
            for door in doors:
                await check_refused(door, late)
                for work in works:
                    await work.check_pending(door)
            was_changed = await change_limit(stage, late)
    await stage.check_quiet()
    await stand.wait_served()
    for work, shown in zip(works, told, strict=True):
        await work.check_ended(stage, shown)
    for one in early:
        await one.check_ended(stage, admitted=fault == "locked" or stand.books.url is None)
    await check_late(stand, late, was_changed=was_changed)
    assert (await stand.books.verified())["open holds"] == 0


@pytest.mark.parametrize("stand", ["gateways"], indirect=True)
async def test_a_gateway_that_is_killed_while_the_store_is_away(stand: Stand, engine: ScriptedEngine) -> None:
    """Two faults at once: what it carried ends with its lease though that cannot be written, and lands once like the rest."""
    stage, (gone, kept) = stand.stage, stand.doors
    engine.hold()
    async with AsyncExitStack() as stack:
        lost, work = [await Work.begun(door, stack, engine) for door in stand.doors]
        async with stand.gone():
            os.kill(owner_of(gone.cell.api, stage.cell), signal.SIGKILL)
            for caller in (lost.streaming, lost.whole):
                record = await kept.wait_status(caller, "it", "failed")
                assert (record["finish_reason"], record["usage"]["settlement"]) == ("coordinator_lost", "pending")
            engine.release()
            told = await work.read()
    await stage.check_quiet()
    await stand.wait_served()
    await gone.check_serves(await stage.caller())
    for caller in (lost.streaming, lost.whole):
        await stage.check_ended(caller, "it", "coordinator_lost", "platform")
    await work.check_ended(stage, told)
    assert (await stand.books.verified())["open holds"] == 0


async def test_a_store_that_is_slow(stand: Stand, engine: ScriptedEngine) -> None:
    """A lock that ends within the bound costs time and nothing else: streams go on, and whole answers wait for their record."""
    stage, short = stand.stage, Script(tokens=STEP_TOKENS, hold_at=1)
    asked = [(door, await stage.caller(), stream) for door in stand.doors for stream in (True, False)]
    engine.hold()
    async with AsyncExitStack() as stack:
        started = engine.started
        calls = [
            await stack.enter_async_context(door.call(caller, short if stream else WHOLE, "it", stream=stream))
            for door, caller, stream in asked
        ]
        await wait_until(lambda: has_started(engine, started + len(calls)), "all run")
        for call in calls[::2]:
            await call.output_begun()
        async with stand.locked():
            engine.release()
            for door, caller, _ in asked[::2]:
                record = await door.wait_status(caller, "it", "completed")
                assert record["usage"]["settlement"] == "pending"
        shown = [await read_shown(call) for call in calls]
    for (_, caller, stream), one in zip(asked, shown, strict=True):
        assert (one.http, one.reason) == (0 if stream else 200, "stop")
        await stage.check_ended(caller, "it", "stop", "tenant", one)


@pytest.mark.parametrize("stand", [kind for kind in CELLS if kind != "sqlite"], indirect=True)
async def test_connections_that_are_cut(stand: Stand) -> None:
    """Connections to the database that end while streams book their steps: they go on, and are booked once."""
    stage, cuts, words, script = stand.stage, 0, 0, Script(tokens=120, gap_ms=10)
    asked = [(door, await stage.caller()) for door in stand.doors]
    async with AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(door.call(caller, script, "it")) for door, caller in asked]
        async for event in calls[0].events():
            words += event.json.get("text", "").count(script.word)
            if words >= 30 * (cuts + 1) and cuts < 3:
                connected = "FROM pg_stat_activity WHERE application_name = 'weir'"
                cuts += int(shared_server().sql(f"SELECT count(pg_terminate_backend(pid)) {connected}")) > 0
        shown = [await read_shown(call) for call in calls]
    assert cuts == 3
    for (_, caller), one in zip(asked, shown, strict=True):
        assert (one.reason, one.text) == ("stop", script.text)
        await stage.check_ended(caller, "it", "stop", "tenant", one)
    await stage.check_quiet()
    await stand.books.verified()


async def test_an_idle_cell_names_the_store_that_is_away(stand: Stand) -> None:
    """Protects whoever reads a refusal: with nothing in hand, and its lease run out, the ledger is still what is missing."""
    if stand.books.url is None:
        pytest.skip("a cell on SQLite has no lease")
    await stand.stage.check_quiet()
    caller = await stand.stage.caller()
    logged = len(stand.stage.cell.log.read_text())

    async def is_over() -> bool:
        return '"leads": false' in stand.stage.cell.log.read_text()[logged:]

    async with stand.gone():
        await wait_until(is_over, "the lease is over")
        for number, door in enumerate(stand.doors):
            shown = await door.run(caller, Script(), f"idle-{number}", stream=False)
            assert (shown.http, shown.code) == (503, "ledger_unavailable"), shown
    await stand.wait_served()
