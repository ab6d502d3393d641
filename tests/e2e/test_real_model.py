"""A real model behind the whole product: streamed natively and through the official SDK, counted, cancelled, killed."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall
from tests.e2e.ending_stage import Stage, read_shown, wait_until
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import running_cell
from tests.e2e.sse_client import ask, bearer, calling

pytestmark = pytest.mark.model

CONFIG = """
[pool]
concurrency = 2
second_model = false
[engine]
restart_backoff_ms = 200
probe_ms = 500
"""
QUESTION = "What is a weir? Answer in one sentence."
STORY = "Write a very long story about a river, a mill and a heron. Do not stop early."
STOPPED_S = 5.0
BACK_S = 20.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_cell(tmp_path_factory.mktemp("real") / "state", engine=("llamacpp",), config=CONFIG) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.tail()


async def lanes_taken(stage: Stage) -> float:
    """Slots that are not free."""
    return (await stage.metrics())['weir_lanes{state="taken"}']


async def check_freed(stage: Stage) -> None:
    """All slots are free within a short bound."""

    async def are_free() -> bool:
        return await lanes_taken(stage) == 0

    await wait_until(are_free, "the slots are free", STOPPED_S)


async def engine_count(stage: Stage, prompt: str) -> int:
    """The engine's own count of a prompt's tokens, asked by a request of one token that is measured."""
    caller = await stage.caller()
    shown = await stage.run(caller, prompt, "count", stream=False, most=1)
    assert shown.usage is not None and shown.usage["basis"] == "engine"
    return int(shown.usage["input_tokens"])


async def test_an_answer_is_streamed(stage: Stage) -> None:
    """Natively: text, one terminal event, the engine's own counts, and the tenant's price for them."""
    caller = await stage.caller()
    shown = await stage.run(caller, QUESTION, "it", most=40)
    assert shown.text.strip() and shown.usage is not None and shown.usage["basis"] == "engine"
    assert 1 <= shown.usage["output_tokens"] <= 40
    await stage.check_ended(caller, "it", str(shown.reason), "tenant", shown)


async def test_its_room_and_pace_are_known_before_the_first_request(stage: Stage) -> None:
    """Two slots of 2,048 tokens, and figures of a small model on a CPU: reading a token is cheaper than writing one."""
    [replica] = (await stage.admin("GET", "replicas"))["replicas"]
    pace = replica["pace"]
    assert replica["kv_tokens"] == 2 * 2_048
    assert 0.1 < pace["input_ms"] < pace["output_ms"] < 2_000 and 0 < pace["first_ms"] < 10_000


async def test_the_input_is_held_as_it_is_measured(stage: Stage) -> None:
    """The count that a hold is taken with is the engine's own: a window one token too small refuses with that number."""
    counted = await engine_count(stage, QUESTION)
    caller = await stage.caller()
    refused = await stage.refused(caller, QUESTION, most=2_048 - counted + 1)
    assert (refused["code"], refused["input_tokens"], refused["limit"]) == ("input_too_long", counted, 2_048)
    assert await stage.usage(caller.tenant) == []


async def test_an_input_that_is_too_long(stage: Stage) -> None:
    """What does not fit the window is refused before anything runs, with the numbers."""
    caller = await stage.caller()
    refused = await stage.refused(caller, "river " * 3_000, most=16)
    assert refused["code"] == "input_too_long" and refused["status"] == 400
    assert refused["input_tokens"] > refused["limit"] == 2_048


async def test_the_official_sdk(stage: Stage) -> None:
    """Streamed and whole, with usage, over the SDK as its users have it."""
    caller = await stage.caller()
    async with openai.AsyncOpenAI(api_key=caller.secret, base_url=f"{stage.cell.api}/v1", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        options: Any = {"model": "assistant", "messages": messages, "max_completion_tokens": 24, "temperature": 0}
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def _weather_call(number: int, city: str) -> list[Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return [{"role": "user", "content": f"Weather in {city}?"}, {"role": "assistant", "tool_calls": [call]}]


async def test_tools_and_forms_by_the_official_sdk(stage: Stage) -> None:
    """A call in pieces and whole is the same call; its result is told again; a schema is kept; too hard a schema is a 400."""
    caller = await stage.caller()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    shown = [turn for number, city in enumerate(("Rome", "Oslo", "Bern")) for turn in _weather_call(number, city)]
    messages: Any = [*shown, {"role": "user", "content": "Weather in Paris?"}]
    options: Any = {"model": "assistant", "max_completion_tokens": 48, "temperature": 0}
    async with openai.AsyncOpenAI(api_key=caller.secret, base_url=f"{stage.cell.api}/v1", max_retries=0) as client:
        async with client.chat.completions.stream(messages=messages, tools=tools, **options) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(messages=messages, tools=tools, **options)).choices[0]
        [one], [other] = list(streamed.message.tool_calls or []), list(whole.message.tool_calls or [])
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        assert isinstance(one, ChatCompletionMessageToolCall) and isinstance(other, ChatCompletionMessageToolCall)
        assert one.id and other.id and one.function.arguments == other.function.arguments
        assert set(json.loads(one.function.arguments)) == {"city"} and one.function.name == "get_weather"
        answer = {"role": "tool", "tool_call_id": other.id, "content": "sunny"}
        told = [*messages, whole.message.to_dict(), answer]
        after = await client.chat.completions.create(messages=told, tools=tools, **options)
        assert after.usage is not None and after.usage.prompt_tokens > 0
        form: Any = {"type": "json_schema", "json_schema": {"name": "pick", "schema": {"enum": ["yes", "no"]}}}
        picked = await client.chat.completions.create(messages=messages[-1:], response_format=form, **options)
        assert json.loads(picked.choices[0].message.content or "") in ("yes", "no")
        form["json_schema"]["schema"] = {"type": "string", "pattern": "^(a{0,1000}){0,1000}$"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(messages=messages[-1:], response_format=form, **options)
        assert refused.value.param == "response_format"
    await check_freed(stage)


async def test_a_cancel_frees_its_slot(stage: Stage) -> None:
    """Cancelled in mid-stream: the slot is confirmed free within moments, and the tenant pays what was generated."""
    caller, name = await stage.caller(), "weir_cancel_to_stopped_seconds_count"
    before = (await stage.metrics()).get(name, 0)
    async with stage.call(caller, STORY, "it") as call:
        await call.output_begun()
        assert (await stage.get(caller, "it", "/cancel")).json["finish_reason"] == "client"
        await check_freed(stage)
        shown = await read_shown(call)
    assert (await stage.metrics())[name] == before + 1
    await stage.check_ended(caller, "it", "client", "tenant", shown)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_frees_the_slot(stage: Stage, stream: bool) -> None:
    """A client that leaves, streaming or not, stops the engine; the next request has the slot at once."""
    caller = await stage.caller()
    async with stage.call(caller, STORY, "it", stream=stream) as call:
        await stage.wait_status(caller, "it", "running")
        assert await lanes_taken(stage) == 1
        call.leave()
    await check_freed(stage)
    record = await stage.wait_status(caller, "it", "cancelled")
    assert record["finish_reason"] == "disconnect"
    assert (await stage.run(caller, QUESTION, "next", most=4)).status == "completed"


async def test_no_more_run_than_there_are_slots(stage: Stage) -> None:
    """Of three at once on two slots, one waits; never more than two run, and all are answered."""
    callers = [await stage.caller() for _ in range(3)]
    most_seen = 0.0
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(stage.run(caller, QUESTION, "it", most=24)) for caller in callers]
        while not all(run.done() for run in runs):  # bounded by the runs' own bounds
            pool = (await stage.admin("GET", "pools"))["pools"][0]
            most_seen = max(most_seen, pool["running"])
            assert pool["running"] <= 2
    assert 1 <= most_seen <= 2  # on a busy machine one alone keeps the time per output token
    assert {run.result().status for run in runs} <= {"completed", "expired"}
    assert sum(run.result().status == "completed" for run in runs) >= 2


async def test_a_killed_replica_comes_back(stage: Stage) -> None:
    """kill -9 of the engine in mid-stream: `replica_lost` at the platform's cost, and serving again within the bound."""
    caller = await stage.caller()
    [child] = children_of(stage.cell.process.pid)
    async with stage.call(caller, STORY, "it") as call:
        await call.output_begun()
        os.kill(child, signal.SIGKILL)
        shown = await read_shown(call)
    await stage.check_ended(caller, "it", "replica_lost", "platform", shown)
    assert wait_process_gone(child, 5)

    async def is_ready() -> bool:
        return (await ask(stage.cell.api, "/readyz")).status == 200

    await wait_until(is_ready, "a replica is ready again", BACK_S)
    assert (await stage.run(caller, QUESTION, "next", most=4)).status == "completed"
    await check_freed(stage)


async def test_the_second_model_starts_on_demand(tmp_path: Path) -> None:
    """The first request of an on-demand pool is told when to come back; then the model answers plain prompts."""
    config = CONFIG.replace("second_model = false", "second_model = true")
    with running_cell(tmp_path / "state", engine=("llamacpp",), config=config) as cell:
        stage, headers = Stage(cell), bearer(cell.key())
        body = {"model_alias": "completion", "input": "The river flows", "max_output_tokens": 8}
        async with calling(cell.api, "/v1/generations", body=body, headers=headers) as call:
            refused = await call.answer()
        assert (refused.status, refused.json["code"]) == (503, "no_capacity")
        assert int(refused.headers["retry-after"]) >= 1

        async def serves() -> bool:
            async with calling(cell.api, "/v1/generations", body=body, headers=headers) as call:
                answer = await call.answer()
            assert answer.status in (200, 503), answer.body
            return answer.status == 200 and bool(answer.json["output"])

        await wait_until(serves, "the second model answers", 40.0)
        assert (await stage.run(stage.demo_caller(), QUESTION, "first", most=4)).status == "completed"
