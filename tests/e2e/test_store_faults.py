"""A store that is slow, locked, full, down or cut off, and back: refusals are told, nobody pays for it, records land once."""

import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

import asyncpg
import pytest
from tests.e2e.ending_stage import Caller, Shown, Stage, read_shown, wait_until
from tests.e2e.money_stage import DATABASES, Books, new_books
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import ask
from tests.postgres_server import shared_server

STEP_TOKENS = 8
CONFIG = f"""
[pool]
concurrency = 8
[coordinator]
store_wait_ms = 800
delivery_step_tokens = {STEP_TOKENS}
"""
LONG = Script(tokens=400, gap_ms=10)
WHOLE = Script(tokens=6, hold_at=6)
"""Has made its output, and ends when the engine lets go."""
FULL_BYTES = 16 * 1024


@dataclass(frozen=True)
class Stand:
    """A cell with the means to take its store away."""

    stage: Stage
    books: Books

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


@pytest.fixture(scope="module", params=DATABASES)
def stand(engine: ScriptedEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A cell on that engine, with its books in each database."""
    books = new_books(request.param, tmp_path_factory.mktemp("faults"))
    with books.running(engine.url, CONFIG) as cell:
        yield Stand(Stage(cell), books)


async def started(engine: ScriptedEngine, before: int) -> bool:
    """Whether the engine got another generation."""
    return engine.started > before


async def ask_without_id(stage: Stage, caller: Caller) -> tuple[int, str]:
    """(status, code) of a request whose id nobody can have used before."""
    body = {"model_alias": "assistant", "input": Script().prompt()}
    answer = await ask(stage.cell.api, "/v1/generations", method="POST", key=caller.secret, body=body)
    assert int(answer.headers["retry-after"]) >= 1
    return answer.status, answer.json["code"]


@pytest.mark.parametrize("fault", ["locked", "gone"])
async def test_a_store_that_is_away(stand: Stand, engine: ScriptedEngine, fault: str) -> None:
    """What runs ends within what is booked, what is new is refused, nobody pays; once it is back every record lands, once."""
    stage, engine_ran = stand.stage, engine.started
    running, whole, late = [await stage.caller() for _ in range(3)]
    engine.hold()
    async with stage.call(running, LONG, "it") as stream, stage.call(whole, WHOLE, "it", stream=False) as call:
        await stream.output_begun()
        await wait_until(lambda: started(engine, engine_ran + 1), "both run")
        async with stand.locked() if fault == "locked" else stand.gone():
            engine.release()
            told_whole, told = await read_shown(call), await read_shown(stream)
            check_told(told_whole, "")
            assert (told.status, told.reason) == ("failed", "ledger_unavailable") and told.text.count(" ") < LONG.tokens / 2
            refused = await stage.run(late, Script(), "it")
            assert (refused.http, refused.code) == (503, "ledger_unavailable") and int(refused.headers["retry-after"]) >= 1
            assert await ask_without_id(stage, late) == (503, "ledger_unavailable")
            was_changed = await change_limit(stage, late)
            pending = (await stage.get(running, "it")).json
            assert (pending["status"], pending["usage"]["settlement"]) == ("failed", "pending")
    await stage.check_quiet()
    await stage.check_ended(running, "it", "ledger_unavailable", "platform", told)
    # A settlement that a write had taken already may land with it: then the record decides, as GET shows.
    landed = (await stage.get(whole, "it")).json["status"] == "completed"
    await stage.check_ended(whole, "it", "stop" if landed else "ledger_unavailable", "tenant" if landed else "platform")
    assert await stage.usage(late.tenant) == [] and (await stage.get(late, "it")).status == 404
    [limits] = (await stage.admin("GET", f"limits?tenant={late.tenant}"))["limits"]
    assert limits.get("requests_per_minute") == (1_000 if was_changed else None)
    assert (await stand.books.verified())["open holds"] == 0
    await stage.check_serves(late)


async def change_limit(stage: Stage, caller: Caller) -> bool:
    """An administrator changes a limit while the store is away: whether it was said to be in force, else it is refused."""
    admin, body = stage.cell.ready["admin"], {"scope": {"tenant": caller.tenant}, "requests_per_minute": 1_000}
    answer = await ask(admin, "/admin/v1/limits", method="PUT", key=stage.cell.ready["admin_key"], body=body)
    assert answer.status == 200 or (answer.status, answer.json["code"]) == (503, "ledger_unavailable")
    return answer.status == 200


def check_told(told: Shown, text: str) -> None:
    """A whole answer that could not be booked: nothing of its output, and a time to come again."""
    assert (told.http, told.status, told.reason) == (503, "failed", "ledger_unavailable"), told
    assert told.text == text and int(told.headers["retry-after"]) >= 1


async def test_a_store_that_is_slow(stand: Stand, engine: ScriptedEngine) -> None:
    """A lock that ends within the bound costs time and nothing else: streams go on, and whole answers wait for their record."""
    stage, engine_ran = stand.stage, engine.started
    whole, streaming = [await stage.caller() for _ in range(2)]
    engine.hold()
    async with (
        stage.call(whole, WHOLE, "it", stream=False) as call,
        stage.call(streaming, Script(tokens=STEP_TOKENS, hold_at=1), "it") as stream,
    ):
        await wait_until(lambda: started(engine, engine_ran + 1), "both run")
        await stream.output_begun()
        async with stand.locked():
            engine.release()
            await stage.wait_status(streaming, "it", "completed")
            assert (await stage.get(streaming, "it")).json["usage"]["settlement"] == "pending"
        shown = [await read_shown(call), await read_shown(stream)]
    assert [one.reason for one in shown] == ["stop", "stop"] and shown[0].http == 200
    await stage.check_ended(whole, "it", "stop", "tenant", shown[0])
    await stage.check_ended(streaming, "it", "stop", "tenant", shown[1])


@pytest.mark.parametrize("stand", ["postgres"], indirect=True)
async def test_connections_that_are_cut(stand: Stand) -> None:
    """Connections to the database that end while a stream books its steps: it goes on, and is booked once."""
    stage, cuts, words = stand.stage, 0, 0
    caller, script = await stage.caller(), Script(tokens=120, gap_ms=10)
    async with stage.call(caller, script, "it") as call:
        async for event in call.events():
            words += event.json.get("text", "").count(script.word)
            if words >= 30 * (cuts + 1) and cuts < 3:
                connected = "FROM pg_stat_activity WHERE application_name = 'weir'"
                cuts += int(shared_server().sql(f"SELECT count(pg_terminate_backend(pid)) {connected}")) > 0
        shown = await read_shown(call)
    assert (shown.reason, shown.text, cuts) == ("stop", script.text, 3)
    await stage.check_ended(caller, "it", "stop", "tenant", shown)
    await stage.check_quiet()
    await stand.books.verified()
