"""OpenAI's responses with the official client against a live cell: what it sends is understood, and it reads its own shapes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.e2e.ending_stage import Caller, Stage, price, wait_until
from tests.e2e.scripted_engine import Script, ScriptedEngine

CONFIG = """
[pool]
concurrency = 4
[engine]
first_output_ms = 2500
idle_ms = 2500
probe_ms = 100
"""
LONG = Script(tokens=400, gap_ms=25)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
CALL = Script(
    tokens=3,
    end="tool_calls",
    choices=(
        {"delta": {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"place":'}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}},
    ),
)


class Place(BaseModel):
    """What an output is parsed into."""

    name: str
    people: int


def sdk(stage: Stage, caller: Caller, **options: Any) -> openai.OpenAI:
    """The official client with this caller's key."""
    settings: dict[str, Any] = {"max_retries": 0, "timeout": 20.0, **options}
    return openai.OpenAI(base_url=f"{stage.cell.api}/v1", api_key=caller.secret, **settings)


@pytest.fixture
async def caller(stage: Stage) -> AsyncIterator[Caller]:
    """A tenant of the test's own, on a replica that has just served; the cell is quiet afterwards."""
    await stage.check_serves(stage.demo_caller())
    yield await stage.caller()
    await stage.check_quiet()


@pytest.fixture
def client(stage: Stage, caller: Caller) -> Iterator[openai.OpenAI]:
    with sdk(stage, caller) as made:
        yield made


@asynccontextmanager
async def async_sdk(stage: Stage, caller: Caller) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official asynchronous client with this caller's key."""
    async with openai.AsyncOpenAI(base_url=f"{stage.cell.api}/v1", api_key=caller.secret, max_retries=0, timeout=20.0) as made:
        yield made


def ask(client: openai.OpenAI, script: Script, key: str = "", **fields: Any) -> Response:
    """A whole response that follows a script."""
    headers = {"Idempotency-Key": key} if key else {}
    made = client.responses.create(model="assistant", input=script.prompt(), extra_headers=headers, **fields)
    assert isinstance(made, Response)
    return made


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_response_and_its_stream_agree_and_are_paid_once(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects both shapes and the money: same text, and the usage told is the usage row's, priced."""
    script = Script(tokens=6)
    whole = ask(client, script, max_output_tokens=50, temperature=0.0)
    with client.responses.stream(model="assistant", input=script.prompt(), max_output_tokens=50) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert whole.status == final.status == "completed" and whole.output_text == final.output_text == script.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == script.text
    assert whole.usage is not None and final.usage is not None
    assert whole.usage.to_dict() == final.usage.to_dict()
    usage: Any = whole.usage
    assert (usage.input_tokens, usage.output_tokens) == (script.input_tokens, 6)
    assert usage.cost_microusd == price(script.input_tokens, 6) > 0
    [row] = await stage.usage(caller.tenant)
    assert (row["requests"], row["output_tokens"], row["cost_microusd"]) == (2, 12, 2 * usage.cost_microusd)
    explained = await stage.admin("GET", f"generations/{caller.tenant}/{whole.id.removeprefix('resp_')}/explanation")
    assert '"surface": "responses"' in json.dumps(explained)
    assert whole.model == "assistant" and whole.temperature == 0.0 and whole.to_dict()["store"] is False


async def test_the_asynchronous_client_reads_the_same(stage: Stage, caller: Caller) -> None:
    """Protects the other half of the SDK's users."""
    script = Script(tokens=3, end="length")
    async with async_sdk(stage, caller) as client:
        whole = await client.responses.create(model="assistant", input=script.prompt())
        stream = await client.responses.create(model="assistant", input=script.prompt(), stream=True)
        events = [event async for event in stream]
    assert whole.status == "incomplete" and whole.output_text == script.text
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert events[0].type == "response.created" and events[1].type == "response.in_progress"
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == script.text
    assert whole.usage is not None and last.response.usage is not None
    assert last.response.usage.to_dict() == whole.usage.to_dict()


async def test_a_tool_is_called_and_its_output_told(client: openai.OpenAI) -> None:
    """Protects an agent's loop: the call arrives whole, in both shapes, and what the answer had is taken back as input."""
    whole = ask(client, CALL, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False)
    with client.responses.stream(model="assistant", input=CALL.prompt(), tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [call] = whole.output
    assert call.type == "function_call" and (call.call_id, call.name) == ("call_1", "weather")
    assert call.arguments == '{"place":"Rome"}'
    [parsed] = final.output
    assert parsed.type == "function_call" and parsed.parsed_arguments == {"place": "Rome"}
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == ['{"place":', '"Rome"}']
    told: list[Any] = [{"role": "user", "content": "And now?"}, call.to_dict()]
    told += [{"type": "function_call_output", "call_id": call.call_id, "output": Script(word=" sunny", tokens=1).prompt()}]
    answer = client.responses.create(model="assistant", input=told, tools=[WEATHER])
    assert answer.output_text == " sunny"
    told += [*(item.to_dict() for item in answer.output), {"role": "user", "content": "Thanks."}]
    again = client.responses.create(model="assistant", input=told)
    assert again.status == "completed"


async def test_a_form_is_parsed_by_the_client(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects structured output: the helper's schema is accepted, and what comes back is its object, streamed too."""
    prompt = Script(tokens=1, word='{"name": "Rome", "people": 3}').prompt()
    answer = client.responses.parse(model="assistant", input=prompt, text_format=Place)
    assert answer.output_parsed == Place(name="Rome", people=3)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    async with (
        async_sdk(stage, caller) as asynchronous,
        asynchronous.responses.stream(model="assistant", input=prompt, text_format=Place) as stream,
    ):
        final = await stream.get_final_response()
    assert final.output_parsed == Place(name="Rome", people=3)


async def test_reasoning_and_log_probabilities_are_shown(client: openai.OpenAI) -> None:
    """Protects both: reasoning as an item of its own before the message, probabilities where they were asked for."""
    logprob = {"token": "Yes", "logprob": -0.25, "bytes": [89, 101, 115], "top_logprobs": [{"token": "No", "logprob": -1.5}]}
    script = Script(
        tokens=2,
        choices=(
            {"delta": {"reasoning_content": "Let me see."}},
            {"delta": {"content": "Yes"}, "logprobs": {"content": [logprob]}},
        ),
    )
    answer = ask(client, script, include=["message.output_text.logprobs"], top_logprobs=1)
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "Let me see."
    assert message.type == "message" and message.content[0].type == "output_text"
    [told] = message.content[0].logprobs or []
    assert (told.token, told.logprob, told.top_logprobs[0].token) == ("Yes", -0.25, "No")


async def test_what_a_filter_stopped_is_incomplete(client: openai.OpenAI) -> None:
    """Protects callers from text that looks whole."""
    answer = ask(client, Script(end="content_filter"))
    assert answer.incomplete_details is not None
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "content_filter")


# ── retrieve and cancel ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_response_is_retrieved_by_its_id_without_its_text(client: openai.OpenAI) -> None:
    """Protects who lost an answer: its state, its usage and its price are there, and the text is nowhere."""
    made = ask(client, Script(end="length"), "kept:1")
    assert made.id == "resp_kept:1"
    found = client.responses.retrieve(made.id)
    assert (found.id, found.status, found.output) == (made.id, "incomplete", [])
    assert found.usage is not None and made.usage is not None and found.usage.to_dict() == made.usage.to_dict()
    unnamed = ask(client, Script())
    assert client.responses.retrieve(unnamed.id).status == "completed"
    assert client.responses.cancel(made.id).to_dict() == found.to_dict()


async def test_only_the_owner_finds_a_response(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects isolation: unknown, foreign and malformed ids are the same 404."""
    made, other = ask(client, Script(), "mine"), await stage.caller()
    with sdk(stage, other) as foreign:
        unknown = ("resp_absent", "mine", "resp_a b", "resp_", "x/y")
        for asking, given in ((foreign, made.id), *((client, name) for name in unknown)):
            for action in (asking.responses.retrieve, asking.responses.cancel):
                with pytest.raises(openai.NotFoundError) as refused:
                    action(given)
                assert refused.value.code == "not_found"


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ({"stream": "maybe"}, "invalid_request", "stream"),
        ({"starting_after": "3"}, "conflicting_fields", "starting_after"),
        ({"include[]": "x"}, "unsupported_field", "include"),
    ],
)
async def test_what_cannot_be_asked_of_a_response(client: openai.OpenAI, query: dict[str, str], code: str, param: str) -> None:
    """Protects clients that resume: what is wrong is told by its name."""
    made = ask(client, Script())
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(made.id, extra_query=query)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert client.responses.retrieve(made.id, extra_query={"stream": "false"}).id == made.id


async def test_a_stream_that_was_not_kept_cannot_be_followed(client: openai.OpenAI) -> None:
    """Protects clients that resume: they are told that the stream is not there, and not to try again."""
    made = ask(client, Script())
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.retrieve(made.id, stream=True)
    assert (refused.value.status_code, refused.value.code) == (410, "stream_not_retained")


async def test_background_work_is_followed_retrieved_and_deleted(stage: Stage, client: openai.OpenAI, caller: Caller) -> None:
    """Protects agents that come back: a stream is left and taken up again, the answer is read later, and deleted."""
    await stage.admin("PATCH", f"tenants/{caller.tenant}", {"retention": {"seconds": 60, "bytes": 1_000_000}})
    script = Script(tokens=20, gap_ms=20)

    def come_back() -> None:
        stream = client.responses.create(model="assistant", input=script.prompt(), stream=True, background=True)
        first = [event for event, _ in zip(stream, range(4), strict=False)]
        stream.close()
        assert first[0].type == "response.created"
        made = first[0].response
        rest = list(client.responses.retrieve(made.id, stream=True, starting_after=first[-1].sequence_number))
        assert [event.sequence_number for event in first + rest] == list(range(len(first) + len(rest)))
        assert rest[-1].type == "response.completed" and rest[-1].response.output_text == script.text
        again = client.responses.retrieve(made.id)
        assert (again.status, again.output_text, again.background) == ("completed", script.text, True)
        client.responses.delete(made.id)
        assert client.responses.retrieve(made.id).output_text == ""

    await asyncio.to_thread(come_back)


async def test_a_stream_cancelled_by_id_fails_with_its_reason(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects cancel while it streams: the stream ends with one terminal event, and the tenant pays what was generated."""
    stream = client.responses.create(
        model="assistant", input=LONG.prompt(), stream=True, extra_headers={"Idempotency-Key": "live"}
    )
    seen = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    assert client.responses.retrieve("resp_live").status == "in_progress"
    cancelled = client.responses.cancel("resp_live")
    assert cancelled.status == "cancelled" and cancelled.usage is not None and cancelled.usage.output_tokens >= 1
    seen += list(stream)
    last: Any = seen[-1]
    assert last.type == "response.failed" and last.response.status == "cancelled"
    assert last.response.error.code == "request_cancelled"
    assert last.response.output_text == "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    await stage.check_ended(caller, "live", "client", "tenant")


async def test_a_whole_response_cancelled_by_id_is_a_conflict(stage: Stage, caller: Caller) -> None:
    """Protects cancel before the headers: 409, which the client must not retry, with the record in it."""
    async with async_sdk(stage, caller) as client:
        asked = asyncio.create_task(
            client.responses.create(model="assistant", input=LONG.prompt(), extra_headers={"Idempotency-Key": "whole"})
        )
        await stage.wait_status(caller, "whole", "running")
        assert (await client.responses.cancel("resp_whole")).status == "cancelled"
        with pytest.raises(openai.ConflictError) as ended:
            await asked
    assert ended.value.code == "request_cancelled" and ended.value.response.headers["x-should-retry"] == "false"
    body: Any = ended.value.body
    assert body["generation"]["status"] == "cancelled"


async def test_leaving_a_stream_cancels_it(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects engines and money: who leaves pays what was generated and nothing more is."""
    stream = client.responses.create(
        model="assistant", input=LONG.prompt(), stream=True, extra_headers={"Idempotency-Key": "left"}
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    await stage.check_ended(caller, "left", "disconnect", "tenant")


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FAILURES = {
    "engine_error": (Script(end="error", gap_ms=20), 502),
    "replica_lost": (Script(end="reset", gap_ms=20), 502),
    "stalled": (Script(end="stall"), 502),
    "engine_rejected": (Script(status=400), 400),
    "deadline_exceeded": (LONG, 504),
}


@pytest.mark.parametrize("code", FAILURES)
async def test_a_failure_is_an_exception_before_the_headers_and_an_event_after_them(
    stage: Stage, client: openai.OpenAI, code: str
) -> None:
    """Protects both ways to learn of it: the same code, one terminal event, and what was shown stays shown."""
    script, status = FAILURES[code]
    headers = {"weir-deadline-ms": "500"} if code == "deadline_exceeded" else {}
    await stage.check_serves(stage.demo_caller())
    with pytest.raises(openai.APIStatusError) as failed:
        client.responses.create(model="assistant", input=script.prompt(), extra_headers=headers)
    assert (failed.value.status_code, failed.value.code) == (status, code)
    await stage.check_serves(stage.demo_caller())
    events = []
    with contextlib.suppress(openai.BadRequestError):  # an engine that refuses at once can be before the headers
        events = list(client.responses.create(model="assistant", input=script.prompt(), stream=True, extra_headers=headers))
    assert [event.type for event in events if "complete" in event.type or "failed" in event.type] == (
        ["response.failed"] if events else []
    )
    if events:
        last: Any = events[-1]
        assert (last.response.status, last.response.error.code) == ("failed", code)
    await stage.check_serves(stage.demo_caller())


async def test_a_wrong_key_is_an_authentication_error(stage: Stage) -> None:
    """Protects 401 in the client's shape, on all three paths."""
    with sdk(stage, Caller("nobody", "", "sk-wrong")) as client:
        for asking in (partial(ask, client, Script()), partial(client.responses.retrieve, "resp_x")):
            with pytest.raises(openai.AuthenticationError) as refused:
                asking()
            assert refused.value.code == "unauthenticated"
        with pytest.raises(openai.AuthenticationError):
            client.responses.cancel("resp_x")


async def test_a_limit_tells_when_to_come_again(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects 429 with its headers, and that a budget that is used up is asked for once, not three times."""
    await stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "requests_per_minute": 1})
    raw = client.responses.with_raw_response.create(model="assistant", input="x", extra_headers={"Idempotency-Key": "raw:1"})
    assert raw.request_id == raw.headers["request-id"] == "raw:1"
    assert (raw.headers["x-ratelimit-limit-requests"], raw.headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    with pytest.raises(openai.RateLimitError) as limited:
        ask(client, Script())
    assert limited.value.code == "requests_limited" and 50 <= int(limited.value.response.headers["retry-after"]) <= 60
    await stage.admin(
        "PUT", "limits", {"scope": {"tenant": caller.tenant}, "requests_per_minute": None, "spend_microusd_lifetime": 0}
    )
    asked: list[str | None] = []
    hook = {"request": [lambda request: asked.append(request.headers.get("x-stainless-retry-count"))]}
    with (
        httpx2.Client(event_hooks=hook) as http_client,
        sdk(stage, caller, max_retries=2, http_client=http_client) as patient,
        pytest.raises(openai.RateLimitError) as exhausted,
    ):
        ask(patient, Script())
    assert exhausted.value.code == "budget_exhausted" and asked == ["0"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"store": True}, "unsupported_field", "store"),
        ({"background": True}, "unsupported_field", "background"),
        ({"previous_response_id": "resp_x"}, "unsupported_field", "previous_response_id"),
        ({"reasoning": {"effort": "low"}}, "unsupported_field", "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_field", "tools[0].type"),
        ({"max_output_tokens": 2_147_483_647}, "invalid_request", "max_output_tokens"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": " x" * 3_000_000}, "input_too_long", None),
    ],
)
async def test_a_refusal_names_its_parameter(
    stage: Stage, caller: Caller, client: openai.OpenAI, fields: dict[str, Any], code: str, param: str | None
) -> None:
    """Protects callers: a refusal costs nothing, is counted, and names what this surface calls it."""
    before = await rejections(stage, code)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "assistant", "input": "x", **fields})
    assert (refused.value.code, refused.value.param) == (code, param)
    assert await stage.usage(caller.tenant) == []
    assert await rejections(stage, code) == before + 1


async def rejections(stage: Stage, code: str) -> float:
    """Refused requests for a generation, by their code."""
    samples = (await stage.metrics()).items()
    return sum(value for name, value in samples if name.startswith("weir_rejections_total") and f'code="{code}"' in name)


async def test_an_idempotency_key_is_never_charged_twice(stage: Stage, caller: Caller, client: openai.OpenAI) -> None:
    """Protects 409 for the same body and 422 for another, and that instructions are part of the body."""
    first = ask(client, Script(), "once", instructions="a")
    with pytest.raises(openai.ConflictError) as again:
        ask(client, Script(), "once", instructions="a")
    with pytest.raises(openai.UnprocessableEntityError) as other:
        ask(client, Script(), "once", instructions="b")
    assert (again.value.code, other.value.code) == ("output_not_retained", "request_id_reused")
    usage: Any = first.usage
    [row] = await stage.usage(caller.tenant)
    assert (row["requests"], row["cost_microusd"]) == (1, usage.cost_microusd)


async def test_the_wire_has_names_numbers_and_no_done(
    stage: Stage, caller: Caller, client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    """Protects clients that read lines: event and type agree, numbers have no gap, the queue of events has no [DONE]."""
    body = {"model": "assistant", "input": Script(tokens=5).prompt(), "stream": True}
    with client.responses.with_streaming_response.create(**body) as answer:  # type: ignore[call-overload]
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = [block.splitlines() for block in answer.read().decode().split("\n\n") if not block.startswith(":")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in filter(None, blocks)]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(name == event["type"] for name, event in events) and events[-1][0] == "response.completed"

    async def is_idle() -> bool:
        return engine.running == 0

    await wait_until(is_idle, "the engine runs nothing")
