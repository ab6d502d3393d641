"""A request id is one generation: through repeats, kill -9, cut connections and the retries of the official OpenAI client."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from tests.e2e.ending_stage import Caller, Stage, Surface, price, read_shown, wait_until
from tests.e2e.money_stage import CELLS, new_books, new_caller
from tests.e2e.running_cell import kill_if_running
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Answer

LANES = 2
CONFIG = f"""
[pool]
concurrency = {LANES}
[coordinator]
queue_wait_ms = 400
"""
QUICK = Script()
LONG = Script(tokens=400, gap_ms=10)
BROKEN = Script(tokens=3, gap_ms=20, end="error")
HELD = Script(tokens=6, hold_at=4)


@dataclass(frozen=True)
class Use:
    """A request id with its body and form."""

    request_id: str
    script: Script = QUICK
    stream: bool = False
    surface: Surface = "native"
    deadline_ms: int | None = None


BOUND = (
    Use("completed-stream", stream=True),
    Use("completed", surface="chat"),
    Use("cancelled", LONG, stream=True),
    Use("late", LONG, stream=True, surface="chat", deadline_ms=250),
    Use("broken-stream", BROKEN, stream=True),
    Use("running", LONG, stream=True),
)
"""Each delivers or costs something, and is never run again. The last one still runs when the cell is killed."""

FREE = (
    Use("refused-by-engine", Script(status=500), surface="chat"),
    Use("broken", BROKEN),
    Use("expired", stream=True),
)
"""Each delivers and costs nothing, and may run again."""


@dataclass
class Ids:
    """Two tenants that use the same request ids on one cell."""

    stage: Stage
    engine: ScriptedEngine
    caller: Caller
    other: Caller

    async def repeat(self, use: Use, body: Script | None = None) -> Answer:
        """Send an id again, with the same body or with another one."""
        async with self.stage.call(
            self.caller, body or use.script, use.request_id, stream=use.stream, surface=use.surface, deadline_ms=use.deadline_ms
        ) as call:
            return await call.answer()

    async def check_bound(self, use: Use) -> None:
        """The same body is answered by the record, another one is refused, and the engine hears of neither."""
        ran = self.engine.started
        record = (await self.stage.get(self.caller, use.request_id)).json
        again, changed = await self.repeat(use), await self.repeat(use, Script(note="another"))
        told = again.json.get("error", again.json)
        assert (again.status, told["code"], again.headers["x-should-retry"]) == (409, "output_not_retained", "false")
        assert "retry-after" not in again.headers and told["generation"] == record
        told = changed.json.get("error", changed.json)
        assert (changed.status, told["code"], changed.headers["x-should-retry"]) == (422, "request_id_reused", "false")
        assert "generation" not in told and self.engine.started == ran

    async def run_free(self, use: Use) -> None:
        """The same body runs again as another execution, is paid once, and is bound then."""
        ran, before = self.engine.started, await self.totals()
        self.engine.always = Script(tokens=5)
        try:
            async with self.stage.call(self.caller, use.script, use.request_id, stream=use.stream, surface=use.surface) as call:
                shown = await read_shown(call)
        finally:
            self.engine.always = None
        assert shown.status == "completed" and self.engine.started == ran + 1, shown
        paid = price(use.script.input_tokens, 5)
        assert await self.totals() == (before[0] + 1, before[1] + paid)
        await self.check_bound(use)

    async def totals(self) -> tuple[int, int]:
        """(executions, micro-dollars) of the tenant."""
        rows = await self.stage.usage(self.caller.tenant)
        return sum(row["requests"] for row in rows), sum(row["cost_microusd"] for row in rows)


async def use_ids(ids: Ids, stack: AsyncExitStack) -> None:
    """Bring every id to its ending; the last bound one goes on running."""
    stage, caller, engine = ids.stage, ids.caller, ids.engine
    for number in range(8):  # quick answers keep the predicted wait short, so that the door lets in what will expire
        await stage.run(caller, Script(), f"quick-{number}", stream=False)
    for use in (*BOUND, *FREE[:2]):
        call = await stack.enter_async_context(
            stage.call(
                caller,
                use.script,
                use.request_id,
                stream=use.stream,
                surface=use.surface,
                deadline_ms=use.deadline_ms,
            )
        )
        if use.request_id in ("cancelled", "running"):
            await call.output_begun()
        if use.request_id == "cancelled":
            await stage.get(caller, "cancelled", "/cancel")
        if use.request_id != "running":
            await read_shown(call)
    engine.hold()
    blocker = await stack.enter_async_context(stage.call(caller, HELD, "blocker", stream=False, surface="chat"))
    await stage.wait_status(caller, "blocker", "running")
    async with stage.call(caller, FREE[2].script, FREE[2].request_id, stream=True) as call:
        shown = await read_shown(call)
    assert (shown.status, shown.reason) == ("expired", "queue_wait")
    for use in (Use("blocker", HELD, surface="chat"), BOUND[-1]):
        await check_running(ids, use)
    engine.release()
    assert (await read_shown(blocker)).reason == "stop"


async def check_running(ids: Ids, use: Use) -> None:
    """An id that runs is in flight, says for how long to wait, and shows its record."""
    answer = await ids.repeat(use)
    told = answer.json.get("error", answer.json)
    assert (answer.status, told["code"], told["generation"]["status"]) == (409, "request_in_flight", "running")
    assert int(answer.headers["retry-after"]) >= 1 and answer.headers.get("x-should-retry") != "false"


@pytest.mark.parametrize("database", CELLS)
async def test_ids_through_kill_9(tmp_path: Path, database: str) -> None:
    """What delivered or cost something never runs again, also after kill -9; what did neither runs once more, paid once."""
    books = new_books(database, tmp_path)
    with ScriptedEngine() as engine:
        cell = books.start(engine.url, CONFIG)
        try:
            stage = Stage(cell)
            ids = Ids(stage, engine, await new_caller(stage), await new_caller(stage))
            async with AsyncExitStack() as stack:
                await use_ids(ids, stack)
                for use in BOUND[:-1]:
                    await ids.check_bound(use)
                await ids.run_free(FREE[0])
                for use in BOUND[:2]:
                    form = {"stream": use.stream, "surface": use.surface}
                    assert (await stage.run(ids.other, use.script, use.request_id, **form)).reason == "stop"
                cell.process.send_signal(signal.SIGKILL)
        finally:
            kill_if_running(cell.process)
        with books.running(engine.url, CONFIG) as cell:
            ids.stage = stage = Stage(cell)
            assert (await stage.get(ids.caller, "running")).json["finish_reason"] == "coordinator_lost"
            for use in (*BOUND, FREE[0]):
                await ids.check_bound(use)
            for use in FREE[1:]:
                await ids.run_free(use)
            ids.caller = ids.other
            for use in BOUND[:2]:
                await ids.check_bound(use)
            assert (await stage.run(ids.other, QUICK, "running", stream=False)).http == 200
            await stage.check_quiet()


# ── the official client ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=CELLS)
def stage(engine: ScriptedEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A cell on that engine, with its books in each database."""
    with new_books(request.param, tmp_path_factory.mktemp("ids")).running(engine.url, "") as cell:
        yield Stage(cell)


@dataclass
class Sdk:
    """The official client with its own retries, and the statuses that it was answered."""

    client: openai.AsyncOpenAI
    statuses: list[int]

    async def ask(self, script: Script, *, stream: bool = False) -> str:
        """The text of one completion under the key `it`. Raises what the client raises."""
        asked: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": script.prompt()}]}
        headers = {"Idempotency-Key": "it"}
        if not stream:
            whole = await self.client.chat.completions.create(**asked, extra_headers=headers)
            return whole.choices[0].message.content or ""
        chunks = await self.client.chat.completions.create(**asked, stream=True, extra_headers=headers)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@asynccontextmanager
async def sdk(url: str, caller: Caller, engine: ScriptedEngine) -> AsyncIterator[Sdk]:
    """A client. The engine does what prompts say again once it has failed for the first time."""
    statuses: list[int] = []

    async def answered(response: httpx2.Response) -> None:
        statuses.append(response.status_code)
        engine.always = None

    async with httpx2.AsyncClient(event_hooks={"response": [answered]}) as http_client:
        yield Sdk(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=caller.secret, http_client=http_client), statuses)


async def paid(stage: Stage, caller: Caller) -> dict[str, tuple[int, int]]:
    """(executions, micro-dollars) by status."""
    await stage.check_quiet()
    return {row["status"]: (row["requests"], row["cost_microusd"]) for row in await stage.usage(caller.tenant)}


async def check_conflict(asking: Sdk, script: Script) -> None:
    """The same key again is a conflict, which the client asks for once."""
    asked = len(asking.statuses)
    with pytest.raises(openai.ConflictError) as told:
        await asking.ask(script)
    assert told.value.code == "output_not_retained" and asking.statuses[asked:] == [409]
    body: Any = told.value.body
    assert body["generation"]["request_id"] == "it"


async def test_an_engine_that_fails_once_costs_one_answer(stage: Stage, engine: ScriptedEngine) -> None:
    """The client's retry after a failure before output is a second execution; the tenant pays for that one."""
    caller, ran, script = await stage.caller(), engine.started, Script(tokens=7)
    async with sdk(stage.cell.api, caller, engine) as asking:
        engine.always = Script(status=500)
        assert await asking.ask(script) == script.text
        assert (asking.statuses, engine.started) == ([502, 200], ran + 2)
        await check_conflict(asking, script)
    assert engine.started == ran + 2
    assert await paid(stage, caller) == {"failed": (1, 0), "completed": (1, price(script.input_tokens, 7))}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_breaks_after_output_is_not_asked_again(
    stage: Stage, engine: ScriptedEngine, stream: bool
) -> None:
    """Once anything was generated the client does not retry by itself; what it was shown of a stream never comes twice."""
    caller, ran = await stage.caller(), engine.started
    async with sdk(stage.cell.api, caller, engine) as asking:
        with pytest.raises(openai.APIError) as told:
            await asking.ask(BROKEN, stream=stream)
        assert told.value.code == "engine_error" and asking.statuses == [200 if stream else 502]
        if stream:
            await check_conflict(asking, BROKEN)
    assert engine.started == ran + 1
    assert await paid(stage, caller) == {"failed": (1, 0)}


class Way:
    """A way to the cell that can be cut. connections: how many came. cut_answers: how many are cut at their first byte."""

    def __init__(self, target: str, cut_answers: int = 0) -> None:
        self._target = urlsplit(target)
        self._open: set[asyncio.StreamWriter] = set()
        self.cut_answers = cut_answers
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its client to the cell, until either end closes."""
        self.connections += 1
        cell_reader, cell_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._open |= {writer, cell_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, cell_writer))
                tasks.create_task(self._pump(cell_reader, writer, is_answer=True))
        finally:
            self._open -= {writer, cell_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool = False) -> None:
        try:
            while content := await reader.read(65_536):  # ends with the connection
                if is_answer and self.cut_answers:
                    self.cut_answers -= 1
                    self.cut()
                    return
                writer.write(content)
        except ConnectionError:
            return
        finally:
            writer.close()

    def cut(self) -> None:
        """Reset what is connected now, on both sides."""
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def way_to(cell: str, cut_answers: int = 0) -> AsyncIterator[tuple[Way, str]]:
    """Such a way, and its URL."""
    way = Way(cell, cut_answers)
    server = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    async with server:
        yield way, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        way.cut()


async def has_sent(engine: ScriptedEngine, note: str, tokens: int) -> bool:
    """Whether the engine wrote so many tokens for the script with this note."""
    return engine.sent.get(note, 0) >= tokens


async def test_an_answer_that_is_lost_on_its_way(stage: Stage, engine: ScriptedEngine) -> None:
    """The connection breaks once the answer is decided: the client's retry is told so, and nothing is generated again."""
    caller, ran, script = await stage.caller(), engine.started, Script(tokens=7)
    async with way_to(stage.cell.api, cut_answers=1) as (way, url), sdk(url, caller, engine) as asking:
        with pytest.raises(openai.ConflictError) as told:
            await asking.ask(script)
        body: Any = told.value.body
        assert (told.value.code, body["generation"]["status"]) == ("output_not_retained", "completed")
        assert (asking.statuses, way.connections, engine.started) == ([409], 2, ran + 1)
    assert await paid(stage, caller) == {"completed": (1, price(script.input_tokens, 7))}


async def test_a_client_that_is_cut_off_while_it_waits(stage: Stage, engine: ScriptedEngine) -> None:
    """The connection breaks while the engine generates: that is cancelled and paid, and the client's retry starts nothing."""
    caller, ran = await stage.caller(), engine.started
    script = Script(tokens=400, gap_ms=10, note=caller.tenant)
    async with way_to(stage.cell.api) as (way, url), sdk(url, caller, engine) as asking, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(expect_conflict(asking, script))
        await wait_until(partial(has_sent, engine, caller.tenant, 5), "the engine generates")
        way.cut()
        told = await waiting
        assert told.code == "output_not_retained" and engine.started == ran + 1
    await stage.check_ended(caller, "it", "disconnect", "tenant")


async def expect_conflict(asking: Sdk, script: Script) -> openai.ConflictError:
    """The conflict that a completion ends with."""
    with pytest.raises(openai.ConflictError) as told:
        await asking.ask(script)
    return told.value
