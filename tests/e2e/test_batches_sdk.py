"""Files and batches with the official OpenAI client against a live cell: each endpoint, page, refusal and end."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from tests.e2e.batch_stage import (
    check_answers,
    input_of,
    line_for,
    line_of,
    openai_of,
    results_of,
    script_of,
    submitted,
    until_done,
)
from tests.e2e.ending_stage import Caller, Stage, price
from tests.e2e.money_stage import new_caller
from tests.e2e.running_cell import running_cell
from tests.e2e.scripted_engine import Script, ScriptedEngine

from weir.engines.simulated_embeddings import DIMENSIONS

CONFIG = """
[pool]
concurrency = 8
[batches]
poll_ms = 50
line_bytes_max = 4096
lines_max = 20
lines_in_flight = 12
"""
LINES = 3
IN_FLIGHT = 12
CHAT = "/v1/chat/completions"
LONG = Script(tokens=400, gap_ms=25)
"""Ten seconds: longer than any test here leaves a line."""


async def _status_codes(*asked: Any) -> list[int]:
    """What each call was refused with; 200 for one that was not."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for each in found:
        assert not isinstance(each, BaseException) or isinstance(each, openai.APIStatusError), each
    return [each.status_code if isinstance(each, openai.APIStatusError) else 200 for each in found]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _body_of(endpoint: str, script: Script) -> dict[str, Any]:
    turns = [{"role": "user", "content": script.prompt()}]
    bodies: Mapping[str, dict[str, Any]] = {
        CHAT: {"messages": turns, "max_tokens": 9},
        "/v1/completions": {"prompt": script.prompt(), "max_tokens": 9},
        "/v1/responses": {"input": turns, "max_output_tokens": 9},
        "/v1/generations": {"input": script.prompt(), "max_output_tokens": 9},
    }
    return bodies[endpoint]


def _text_of(endpoint: str, body: dict[str, Any]) -> tuple[str | None, int]:
    """Text and output tokens of an answer, read with the SDK's own shapes."""
    match endpoint:
        case "/v1/chat/completions":
            chat = ChatCompletion.model_validate(body, strict=True)
            assert chat.usage is not None
            return chat.choices[0].message.content, chat.usage.completion_tokens
        case "/v1/completions":
            plain = Completion.model_validate(body, strict=True)
            assert plain.usage is not None
            return plain.choices[0].text, plain.usage.completion_tokens
        case "/v1/responses":
            response = Response.model_validate(body)
            assert response.usage is not None and response.status == "completed"
            return response.output_text, response.usage.output_tokens
    assert body["status"] == "completed"
    return body["output"], body["usage"]["output_tokens"]


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions", "/v1/responses", "/v1/generations"])
async def test_each_endpoint_answers_as_without_a_batch(stage: Stage, endpoint: str) -> None:
    """Protects readers of results: a line's body has the shape, text and usage of the endpoint's own answer."""
    caller = await new_caller(stage)
    scripts = [script_of(number, gap_ms=0) for number in range(LINES)]
    content = input_of([line_for(endpoint, number, _body_of(endpoint, script)) for number, script in enumerate(scripts)])
    async with openai_of(stage.cell, caller.secret) as client:
        asked = await submitted(client, content, endpoint=endpoint, metadata={"run": "monday"})
        batch = await until_done(client, asked.id)
        results = await results_of(client, batch)
    assert (batch.status, batch.endpoint, batch.metadata, batch.error_file_id) == (
        "completed",
        endpoint,
        {"run": "monday"},
        None,
    )
    assert batch.request_counts is not None and batch.request_counts.to_dict() == {
        "total": LINES,
        "completed": LINES,
        "failed": 0,
    }
    moments = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.expires_at)
    assert all(moments) and list(moments) == sorted(moment for moment in moments if moment)
    assert results.times == {f"line-{number}": 1 for number in range(LINES)}
    for line in results.output:
        number = int(line["custom_id"].removeprefix("line-"))
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"] == f"{batch.id}:{number + 1}"
        assert _text_of(endpoint, line["response"]["body"]) == (scripts[number].text, scripts[number].tokens)


async def test_embeddings(tmp_path: Path) -> None:
    """Protects indexes: a batch's vectors are those of a request that was asked by itself."""
    config = f"{CONFIG}[engine]\nembeddings = true\n"
    texts = ["a river", "a lake", "a dam"]
    endpoint = "/v1/embeddings"
    with running_cell(tmp_path / "state", config=config) as cell:
        async with openai_of(cell, cell.key()) as client:
            content = input_of([line_for(endpoint, number, {"input": text}) for number, text in enumerate(texts)])
            batch = await until_done(client, (await submitted(client, content, endpoint=endpoint)).id)
            results = await results_of(client, batch)
            alone = await client.embeddings.create(model="assistant", input=texts, encoding_format="float")
    assert batch.status == "completed" and results.error == [] and len(results.output) == len(texts)
    for line in results.output:
        made = CreateEmbeddingResponse.model_validate(line["response"]["body"])
        assert made.data[0].embedding == alone.data[int(line["custom_id"].removeprefix("line-"))].embedding
        assert len(made.data[0].embedding) == DIMENSIONS


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_files_are_listed_read_and_deleted(stage: Stage) -> None:
    """Protects a tenant's view of its files: pages in both directions, content byte by byte, and gone once deleted."""
    caller = await new_caller(stage)
    contents = [input_of([line_of(number, Script())]) for number in range(5)]
    async with openai_of(stage.cell, caller.secret) as client:
        made = [
            await client.files.create(file=(f"ä {number}.jsonl", content), purpose="batch")
            for number, content in enumerate(contents)
        ]
        for number, file in enumerate(made):
            assert (file.filename, file.bytes, file.purpose) == (f"ä {number}.jsonl", len(contents[number]), "batch")
            assert await client.files.retrieve(file.id) == file
            assert (await client.files.content(file.id)).content == contents[number]
        rising = [file async for file in client.files.list(limit=2, order="asc")]
        falling = [file async for file in client.files.list(limit=3)]
        assert rising == made and falling == made[::-1]
        assert [file async for file in client.files.list(purpose="batch_output")] == []
        page = await client.files.list(limit=2, after=made[3].id)
        assert page.data == [made[2], made[1]] and page.has_more
        gone = await client.files.delete(made[2].id)
        assert (gone.id, gone.deleted) == (made[2].id, True)
        asked = [client.files.retrieve(gone.id), client.files.content(gone.id), client.files.delete(gone.id)]
        assert await _status_codes(*asked) == [404, 404, 404]
        assert [file async for file in client.files.list(limit=2, order="asc")] == [*made[:2], *made[3:]]


async def test_batches_are_listed_and_their_files_are_the_tenants(stage: Stage) -> None:
    """Protects a tenant's view of its batches: pages, the youngest first; results are files; an input that is read stays."""
    caller = await new_caller(stage)
    async with openai_of(stage.cell, caller.secret) as client:
        made = [await submitted(client, input_of([line_of(0, Script())])) for _ in range(5)]
        ended = [await until_done(client, batch.id) for batch in made]
        assert [batch async for batch in client.batches.list(limit=2)] == ended[::-1]
        page = await client.batches.list(limit=2, after=made[1].id)
        assert page.data == [ended[0]] and not page.has_more
        outputs = {file.id: file async for file in client.files.list(purpose="batch_output")}
        assert set(outputs) == {batch.output_file_id for batch in ended}
        waiting = await submitted(client, input_of([line_of(0, LONG)]))
        assert await _status_codes(client.files.delete(waiting.input_file_id)) == [409]
        await client.batches.cancel(waiting.id)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

GOOD = input_of([line_of(0, Script())])


def _second(**change: Any) -> bytes:
    """A file whose second line is changed."""
    return GOOD + input_of([{**line_of(1, Script()), **change}])


WRONG: Mapping[str, tuple[bytes, int]] = {
    "bad json": (GOOD + b'{"custom_id":\n', 2),
    "no object": (GOOD + b"[1]\n", 2),
    "blank": (GOOD + b"\n" + GOOD, 2),
    "the id twice": (GOOD + GOOD, 2),
    "an id that is none": (_second(custom_id=""), 2),
    "another url": (_second(url="/v1/completions"), 2),
    "a wrong url": (_second(url="/v1/moderations"), 2),
    "another method": (_second(method="GET"), 2),
    "no body": (_second(body="text"), 2),
    "a member too many": (_second(extra=1), 2),
    "too long": (_second(body={"messages": "m" * 5_000}), 2),
    "not utf-8": (GOOD + b'{"custom_id":"\xff\xfe"}\n', 2),
    "nested": (GOOD + b'{"body":' + b"[" * 100 + b"]" * 100 + b"}\n", 2),
    "too many lines": (input_of([line_of(number, Script(note="")) for number in range(21)]), 21),
    "empty": (b"", 1),
    "cut off": (GOOD + GOOD[:40], 2),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_file_is_refused_with_its_line(stage: Stage, what: str) -> None:
    """Protects whoever wrote the file: the SDK raises with the number of the line, and nothing is left of the file."""
    content, line = WRONG[what]
    caller = await new_caller(stage)
    async with openai_of(stage.cell, caller.secret) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("lines.jsonl", content), purpose="batch")
        body: Any = refused.value.body
        assert (refused.value.code, refused.value.param, body["line"]) == ("invalid_request", "file", line)
        assert f"Line {line} " in refused.value.message and body["accepted"]
        assert [file async for file in client.files.list()] == []


async def test_what_the_endpoint_refuses_is_in_the_error_file(stage: Stage) -> None:
    """Protects good lines from wrong ones: these are told as their endpoint tells them, and cost nothing."""
    caller = await new_caller(stage)
    scripts = [script_of(number, gap_ms=0) for number in range(6)]
    lines = [line_of(number, script) for number, script in enumerate(scripts)]
    lines[1]["body"]["temperature"] = 9
    lines[3]["body"]["stream"] = True
    lines[4]["body"]["messages"][0]["content"] = Script(status=400).prompt()
    async with openai_of(stage.cell, caller.secret) as client:
        batch = await until_done(client, (await submitted(client, input_of(lines))).id)
        results = await results_of(client, batch)
    assert batch.status == "completed" and batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 6, "completed": 3, "failed": 3}
    assert sorted(line["custom_id"] for line in results.output) == ["line-0", "line-2", "line-5"]
    told = {line["custom_id"]: line["response"] for line in results.error}
    said = {name: (answer["status_code"], answer["body"]["error"]["code"]) for name, answer in told.items()}
    assert said["line-1"] == (400, "invalid_request") and told["line-1"]["body"]["error"]["param"] == "temperature"
    assert said["line-3"][0] == 400 and told["line-3"]["body"]["error"]["param"] == "stream"
    assert said["line-4"] == (400, "engine_rejected")
    rows = {row["status"]: row for row in await stage.usage(caller.tenant)}
    cost = sum(price(scripts[number].input_tokens, scripts[number].tokens) for number in (0, 2, 5))
    assert rows["completed"]["requests"] == 3 and sum(row["cost_microusd"] for row in rows.values()) == cost


async def test_orders_that_cannot_be_run(stage: Stage) -> None:
    """Protects whoever orders: the field, or what is missing, is named before anything runs."""
    caller = await new_caller(stage)
    async with openai_of(stage.cell, caller.secret) as client:
        create: Any = client.batches.create
        other = await client.files.create(file=("a", input_of([line_of(0, Script(), model="absent")])), purpose="batch")
        file = await client.files.create(file=("a", GOOD), purpose="batch")
        order = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, code, param in (
            ({"completion_window": "8d"}, "invalid_request", "completion_window"),
            ({"completion_window": "200h"}, "invalid_request", "completion_window"),
            ({"endpoint": "/v1/completions"}, "invalid_request", "endpoint"),
            ({"endpoint": "/v1/moderations"}, "invalid_request", "endpoint"),
            ({"metadata": {"a": 1}}, "invalid_request", "metadata"),
            ({"input_file_id": "file-0"}, "not_found", None),
            ({"input_file_id": other.id}, "unknown_alias", None),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                await create(**{**order, **change})
            assert refused.value.code == code and param in (None, refused.value.param), (change, refused.value.body)
        with pytest.raises(openai.BadRequestError) as purpose:
            await client.files.create(file=("a", GOOD), purpose="assistants")
        assert purpose.value.param == "purpose"


async def test_nothing_of_another_tenant_is_there(stage: Stage) -> None:
    """Protects tenants from one another: each id of the other's is one that never was, and lists are empty."""
    owner, other = await new_caller(stage), await new_caller(stage)
    async with openai_of(stage.cell, owner.secret) as client, openai_of(stage.cell, other.secret) as stranger:
        create: Any = stranger.batches.create
        running = await submitted(client, input_of([line_of(0, LONG)]))
        ended = await until_done(client, (await submitted(client, GOOD)).id)
        assert ended.output_file_id is not None
        never = await _refusal(stranger.batches.retrieve("batch_0123456789abcdef"))
        for batch in (running, ended):
            assert await _refusal(stranger.batches.retrieve(batch.id)) == never
            assert (await _refusal(stranger.batches.cancel(batch.id))) == never
        for file_id in (running.input_file_id, ended.output_file_id):
            asked = [stranger.files.retrieve(file_id), stranger.files.content(file_id), stranger.files.delete(file_id)]
            order = create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
            assert await _status_codes(*asked, order) == [404] * 4
        assert [file async for file in stranger.files.list()] == [] == [batch async for batch in stranger.batches.list()]
        record = await stage.get(other, f"{ended.id}:1")
        assert record.status == 404
        assert (await client.batches.retrieve(running.id)).status in ("validating", "in_progress")
        assert (await client.files.content(ended.output_file_id)).content
        await client.batches.cancel(running.id)


async def _refusal(asked: Any) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as refused:
        await asked
    return refused.value.status_code, refused.value.message


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _mixed(client: AsyncOpenAI, window: str) -> tuple[str, list[Script]]:
    """A batch of quick lines, and of others that take longer than anything here; more of these than lanes."""
    scripts = [*(script_of(number, gap_ms=0) for number in range(LINES)), *[LONG] * 10]
    return (
        await submitted(client, input_of([line_of(number, each) for number, each in enumerate(scripts)]), window)
    ).id, scripts


async def test_an_expired_window_keeps_what_is_done(stage: Stage) -> None:
    """Protects what was paid for: the lines that are done are in the output file, the others in the error file, each once."""
    caller = await new_caller(stage)
    async with openai_of(stage.cell, caller.secret) as client:
        batch_id, scripts = await _mixed(client, "5s")
        batch = await until_done(client, batch_id)
        results = await results_of(client, batch)
    assert batch.status == "expired" and batch.expired_at is not None and batch.expired_at >= batch.created_at + 5
    assert {line["custom_id"] for line in results.output} == {f"line-{number}" for number in range(LINES)}
    assert results.times == {f"line-{number}": 1 for number in range(len(scripts))}
    told = [line["error"] or line["response"]["body"]["error"] for line in results.error]
    assert {error["code"] for error in told} <= {"batch_expired", "deadline_exceeded"} and len(told) == 10
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": len(scripts), "completed": LINES, "failed": 10}
    await stage.check_quiet()


async def test_a_cancelled_batch_keeps_what_is_done(stage: Stage) -> None:
    """Protects whoever gives up: no further line begins, those that run end, and what they made is there."""
    caller = await new_caller(stage)
    longer = Script(tokens=30, gap_ms=100)  # than it takes until the cancellation is seen
    scripts = [*(script_of(number, gap_ms=0) for number in range(LINES)), *[longer] * 17]
    async with openai_of(stage.cell, caller.secret) as client:
        asked = await submitted(client, input_of([line_of(number, each) for number, each in enumerate(scripts)]))
        await until_done(client, asked.id, LINES)
        cancelling = await client.batches.cancel(asked.id)
        assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
        assert (await client.batches.cancel(asked.id)).cancelling_at == cancelling.cancelling_at
        batch = await until_done(client, asked.id)
        results = await results_of(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None
        assert await _status_codes(client.batches.cancel(asked.id)) == [409]
    assert results.times == {f"line-{number}": 1 for number in range(len(scripts))}
    # Not all places are its own while another test's batch still ends.
    assert LINES < len(results.output) <= LINES + IN_FLIGHT
    assert {line["error"]["code"] for line in results.error} == {"batch_cancelled"}
    await stage.check_quiet()


# ── what is known of a line ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_line_is_a_request_of_the_tenant(stage: Stage) -> None:
    """Protects the bill: usage has the lines under class batch, and each line's record is there by its request id."""
    caller = await new_caller(stage)
    scripts = [script_of(number, gap_ms=0) for number in range(LINES)]
    async with openai_of(stage.cell, caller.secret) as client:
        content = input_of([line_of(number, script) for number, script in enumerate(scripts)])
        batch = await until_done(client, (await submitted(client, content)).id)
        cost = check_answers(await results_of(client, batch), scripts)
    rows = (await stage.admin("GET", f"usage?tenant={caller.tenant}&group_by=workload_class,application,key"))["rows"]
    assert [(row["workload_class"], row["key"], row["requests"], row["cost_microusd"]) for row in rows] == [
        ("batch", caller.key_id, LINES, cost)
    ]
    for number, script in enumerate(scripts, 1):
        answer = await stage.get(caller, f"{batch.id}:{number}")
        record = answer.json
        assert (answer.status, record["status"], record["finish_reason"]) == (200, "completed", "stop")
        assert record["usage"]["output_tokens"] == script.tokens and record["usage"]["settlement"] == "posted"
        assert "output" not in record or record["output"] is None


# ── several processes ────────────────────────────────────────────────────────────────────────────────────────────────


async def _run_through(caller: Caller, first: AsyncOpenAI, second: AsyncOpenAI) -> None:
    """What one gateway takes, the other shows."""
    scripts = [script_of(number, gap_ms=0) for number in range(10)]
    content = input_of([line_of(number, script) for number, script in enumerate(scripts)])
    file = await first.files.create(file=("lines.jsonl", content), purpose="batch")
    assert await second.files.retrieve(file.id) == file
    assert (await second.files.content(file.id)).content == content
    batch = await second.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ended = await until_done(first, batch.id)
    check_answers(await results_of(second, ended), scripts)
    await second.files.delete(file.id)
    assert await _status_codes(first.files.retrieve(file.id)) == [404]


async def test_gateways_share_files_and_batches(tmp_path: Path, engine: ScriptedEngine) -> None:
    """Protects clients behind a balancer: whatever gateway they reach, files and batches are the same."""
    with running_cell(tmp_path / "state", "--gateways", "2", engine=(engine.url,), config=CONFIG) as cell:
        caller = await new_caller(Stage(cell))
        one, two = cell.doors()
        async with openai_of(one, caller.secret) as first, openai_of(two, caller.secret) as second:
            await _run_through(caller, first, second)
            await _run_through(caller, second, first)


@pytest.mark.parametrize("arguments", [(), ("--gateways", "1")], ids=["one process", "gateway"])
async def test_a_batch_goes_on_after_a_restart(tmp_path: Path, engine: ScriptedEngine, arguments: tuple[str, ...]) -> None:
    """Protects batches from upgrades: SIGTERM drains what runs, the next start runs the rest, and nothing runs twice."""
    state, before = tmp_path / "state", engine.started
    scripts = [script_of(number) for number in range(100)]
    config = CONFIG.replace("lines_max = 20", "lines_max = 100")
    with running_cell(state, *arguments, engine=(engine.url,), config=config) as cell:
        key, warm_up = cell.key(), engine.started - before
        async with openai_of(cell, key) as client:
            batch = await submitted(client, input_of([line_of(number, each) for number, each in enumerate(scripts)]))
            await until_done(client, batch.id, 10)
    assert json.loads(next((state / "files").rglob(f"{batch.id}.json")).read_bytes())["id"] == batch.id
    assert not list((state / "files").rglob(f"{batch.id}.end"))
    with running_cell(state, *arguments, engine=(engine.url,), config=config) as cell:
        async with openai_of(cell, key) as client:
            ended = await until_done(client, batch.id)
            assert ended.status == "completed"
            cost = check_answers(await results_of(client, ended), scripts)
        rows = {row["status"]: row for row in await Stage(cell).usage("acme")}
        assert rows["completed"]["requests"] == len(scripts)
        assert rows["completed"]["cost_microusd"] == cost == sum(row["cost_microusd"] for row in rows.values())
    assert engine.started - before == len(scripts) + 2 * warm_up
