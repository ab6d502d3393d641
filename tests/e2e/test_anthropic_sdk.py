"""The official Anthropic client against a live cell: what it sends is understood, and what it reads has its own shapes."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx2
import pydantic
import pytest
from anthropic.types import MessageParam, ToolParam
from tests.e2e.ending_stage import BUDGET, Caller, Stage, price
from tests.e2e.scripted_engine import Script, ScriptedEngine

CONFIG = """
[pool]
concurrency = 4
[engine]
first_output_ms = 700
idle_ms = 700
probe_ms = 100
[gateway]
keep_alive_ms = 300
"""
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def call_delta(index: int, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """A piece of a tool's call as engines stream it."""
    function = {"arguments": arguments} | ({"name": "weather"} if call_id else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": call_id} if call_id else {})]}


CALLING = Script(
    tokens=1,
    word="I look.",
    deltas=[
        call_delta(0, "", "call_1"),
        call_delta(0, '{"city": '),
        call_delta(0, '"Bern"}'),
        call_delta(1, '{"city": "Thun"}', "call_2"),
    ],
    end="tool_calls",
)


def turn(script: Script) -> list[MessageParam]:
    return [{"role": "user", "content": script.prompt()}]


@contextmanager
def sdk(stage: Stage, caller: Caller, key: str | None = None, **options: Any) -> Iterator[anthropic.Anthropic]:
    settings: dict[str, Any] = {"max_retries": 0, "timeout": 20.0, **options}
    with anthropic.Anthropic(base_url=stage.cell.api, api_key=key or caller.secret, **settings) as client:
        yield client


@pytest.fixture
def caller(stage: Stage) -> Caller:
    """A tenant of the test's own, on a replica that has just served: what failed before counts against no later test."""

    async def served() -> Caller:
        await stage.check_serves(stage.demo_caller())
        return await stage.caller()

    return asyncio.run(served())


@pytest.fixture
def client(stage: Stage, caller: Caller) -> Iterator[anthropic.Anthropic]:
    with sdk(stage, caller) as made:
        yield made


def paid(stage: Stage, caller: Caller) -> dict[str, Any]:
    """The caller's only usage row; its account must agree, and nothing be held."""

    async def read() -> dict[str, Any]:
        await stage.check_quiet()
        [row] = (await stage.admin("GET", f"usage?tenant={caller.tenant}&group_by=status"))["rows"]
        ledger = await stage.admin("GET", f"ledger?tenant={caller.tenant}")
        [account] = [row for row in ledger["accounts"] if row["kind"] == "spend_microusd_lifetime"]
        assert (account["limit"], account["held"], account["spent"]) == (BUDGET, 0, row["cost_microusd"])
        found: dict[str, Any] = row
        return found

    return asyncio.run(read())


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_and_its_money(stage: Stage, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects the whole answer, and that it says what the ledger has: price times tokens, once."""
    script = Script(tokens=5)
    message = client.messages.create(model="assistant", max_tokens=50, messages=turn(script))
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", "assistant", "end_turn")
    assert message.id.startswith("msg_") and message.stop_sequence is None
    [block] = message.content
    assert block.type == "text" and block.text == script.text
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (script.input_tokens, 5, 0)
    row = paid(stage, caller)
    assert row["requests"] == 1
    assert (row["input_tokens"], row["output_tokens"]) == (script.input_tokens, 5)
    assert row["cost_microusd"] == price(script.input_tokens, 5) == usage.to_dict()["cost_microusd"]
    explained = asyncio.run(stage.admin("GET", f"generations/{caller.tenant}/{message._request_id}/explanation"))
    assert '"surface": "messages"' in json.dumps(explained)


def test_a_stream_is_the_same_message(stage: Stage, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects the SDK's stream helper: text, reason and usage of the accumulated message, which is what is paid."""
    script = Script(tokens=6, end="length", gap_ms=5)
    with client.messages.stream(model="assistant", max_tokens=50, messages=turn(script)) as stream:
        assert "".join(stream.text_stream) == script.text
        message = stream.get_final_message()
    assert (message.stop_reason, message.model) == ("max_tokens", "assistant")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (script.input_tokens, 6)
    row = paid(stage, caller)
    assert (row["requests"], row["output_tokens"], row["cost_microusd"]) == (1, 6, price(script.input_tokens, 6))


def test_a_plain_stream_has_anthropics_events(client: anthropic.Anthropic) -> None:
    """Protects clients without the helper: the order of events, and the input's count in the first."""
    script = Script(tokens=3, gap_ms=20)
    events = list(client.messages.create(model="assistant", max_tokens=50, messages=turn(script), stream=True))
    names = [event.type for event in events]
    middle = ["content_block_start", *["content_block_delta"] * (len(names) - 5), "content_block_stop"]
    assert names == ["message_start", *middle, "message_delta", "message_stop"]
    first = events[0]
    assert first.type == "message_start" and first.message.usage.input_tokens == script.input_tokens


def test_a_silent_stream_is_pinged(stage: Stage, caller: Caller) -> None:
    """Protects streams behind proxies, with the event that Anthropic's clients skip."""
    body = {"model": "assistant", "max_tokens": 9, "messages": turn(Script(first_ms=650)), "stream": True}
    answer = httpx2.post(f"{stage.cell.api}/v1/messages", json=body, headers={"x-api-key": caller.secret}, timeout=20)
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in answer.text
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_the_async_client_reads_the_same(stage: Stage) -> None:
    """Protects asynchronous callers."""
    caller, script = await stage.caller(), Script(tokens=4)
    async with anthropic.AsyncAnthropic(base_url=stage.cell.api, api_key=caller.secret, max_retries=0) as client:
        async with client.messages.stream(model="assistant", max_tokens=50, messages=turn(script)) as stream:
            assert await stream.get_final_text() == script.text
        counted = await client.messages.count_tokens(model="assistant", messages=turn(script))
    assert counted.input_tokens == script.input_tokens


# ── tools and forms ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_tools_are_called_and_answered(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    """Protects a loop with tools: the calls streamed and whole, and what the engine gets when their results are told."""
    asked: dict[str, Any] = {"model": "assistant", "max_tokens": 50, "messages": turn(CALLING), "tools": [WEATHER]}
    whole = client.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": False})
    assert engine.asked["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]
    assert (engine.asked["tool_choice"], engine.asked["parallel_tool_calls"]) == ("required", True)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        content: list[Any] = [*message.content]
        assert (content[0].type, content[0].text) == ("text", "I look.")
        assert [(call.type, call.id, call.name, call.input) for call in content[1:]] == [
            ("tool_use", "call_1", "weather", {"city": "Bern"}),
            ("tool_use", "call_2", "weather", {"city": "Thun"}),
        ]
    results: MessageParam = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "call_2", "content": "fog", "is_error": True},
            {"type": "text", "text": Script(tokens=1).prompt()},
        ],
    }
    asked["messages"] = [*turn(CALLING), whole.to_param(), results]
    answer = client.messages.create(**asked, system="Be brief.")
    assert answer.stop_reason == "end_turn"
    told = engine.asked["messages"]
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in told[2]["tool_calls"]] == ["call_1", "call_2"]
    assert json.loads(told[2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
    assert (told[3]["tool_call_id"], told[3]["content"], told[4]["content"]) == ("call_1", "rain", "Error: fog")


def test_a_call_that_is_no_json_is_shown(client: anthropic.Anthropic) -> None:
    """Protects callers from what a model cut short: the answer is there, and says what was written."""
    script = Script(tokens=0, deltas=[call_delta(0, '{"city": "Be', "call_1")], end="length")
    message = client.messages.create(model="assistant", max_tokens=50, messages=turn(script), tools=[WEATHER])
    [block] = message.content
    assert block.type == "tool_use" and block.input == {"INVALID_JSON": '{"city": "Be'}
    assert message.stop_reason == "max_tokens"


class City(pydantic.BaseModel):
    """What the SDK's helper wants an answer to be."""

    city: str


def test_a_form_is_demanded_of_the_engine(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    """Protects structured outputs: the SDK's schema reaches the engine, and its helper reads the answer."""
    script = Script(tokens=1, word='{"city": "Bern"}')
    message = client.messages.parse(model="assistant", max_tokens=50, messages=turn(script), output_format=City)
    assert message.parsed_output == City(city="Bern")
    form = engine.asked["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["schema"]["properties"]["city"]["type"] == "string"


# ── counts and models ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_count_costs_nothing_and_is_what_will_be_held(stage: Stage, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects counting: the engine's own figure, no row, nothing held, and refusals as for a message."""
    script = Script()
    counted = client.messages.count_tokens(model="assistant", messages=turn(script), tools=[WEATHER], system="s")
    assert counted.to_dict() == {"input_tokens": script.input_tokens, "basis": "exact"}
    assert asyncio.run(stage.usage(caller.tenant)) == []
    with pytest.raises(anthropic.NotFoundError) as absent:
        client.messages.count_tokens(model="absent", messages=turn(script))
    assert absent.value.error_code == "unknown_alias"
    with pytest.raises(anthropic.BadRequestError) as unknown:
        client.messages.count_tokens(model="assistant", messages=turn(script), extra_body={"max_tokens": 5})
    assert error_of(unknown.value)["field"] == "max_tokens"


def test_models_are_the_aliases(client: anthropic.Anthropic) -> None:
    """Protects the SDK's list and retrieve, at the path that OpenAI's clients have too."""
    [model] = client.models.list(limit=5)
    assert (model.type, model.id, model.display_name) == ("model", "assistant", "assistant")
    assert client.models.retrieve("assistant").id == "assistant"
    with pytest.raises(anthropic.NotFoundError) as absent:
        client.models.retrieve("org/absent")
    assert absent.value.error_code == "unknown_alias" and absent.value.type == "not_found_error"


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def error_of(refused: anthropic.APIStatusError) -> Any:
    """The error object of a refusal's body."""
    body: Any = refused.body
    assert body["request_id"] == refused.request_id
    return body["error"]


def test_a_wrong_key_is_an_authentication_error(stage: Stage, caller: Caller) -> None:
    """Protects 401, its code, and the id that support asks for; either header shows a key."""
    with sdk(stage, caller, key="sk-wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(model="assistant", max_tokens=1, messages=turn(Script()))
    assert refused.value.type == "authentication_error" and error_of(refused.value)["code"] == "unauthenticated"
    body = {"model": "assistant", "max_tokens": 5, "messages": turn(Script())}
    for header in ({"x-api-key": caller.secret}, {"authorization": f"Bearer {caller.secret}"}):
        answer = httpx2.post(f"{stage.cell.api}/v1/messages", json=body, headers=header, timeout=20)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 2_147_483_647}, "invalid_request", "max_tokens"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"extra_body": {"container": "c"}}, "unsupported_field", "container"),
        ({"extra_body": {"top_k": 5}}, "unsupported_field", "top_k"),
        ({"extra_body": {"temperature": 1.5}}, "invalid_request", "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2_000}}, "unsupported_field", "thinking.type"),
        ({"tool_choice": {"type": "auto"}}, "conflicting_fields", "tool_choice"),
        ({"extra_headers": {"weir-deadline-ms": "0"}}, "invalid_request", "weir-deadline-ms"),
    ],
)
def test_a_bad_request_names_its_field(client: anthropic.Anthropic, fields: dict[str, Any], code: str, field: str) -> None:
    """Protects callers, who find what to change under the name that they know, and nothing is charged."""
    asked: dict[str, Any] = {"model": "assistant", "max_tokens": 5, "messages": turn(Script()), **fields}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked)
    error = error_of(refused.value)
    assert (error["type"], error["code"], error["field"]) == ("invalid_request_error", code, field)
    assert error["accepted"] and refused.value.error_code == code


def test_a_limit_is_a_rate_limit_error_with_a_time_to_wait(stage: Stage, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects 429: its code, its figures, Retry-After, and the limits that every answer shows."""
    asyncio.run(stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "requests_per_minute": 1}))
    asked: dict[str, Any] = {"model": "assistant", "max_tokens": 5, "messages": turn(Script())}
    first = client.messages.with_raw_response.create(**asked)
    assert first.headers["x-ratelimit-remaining-requests"] == "0" and first.headers["request-id"]
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages.create(**asked)
    error = error_of(refused.value)
    assert (error["type"], error["code"], error["limit"], error["used"]) == ("rate_limit_error", "requests_limited", 1, 1)
    headers = refused.value.response.headers
    assert 50 <= int(headers["retry-after"]) <= 60 and int(headers["retry-after-ms"]) > 50_000


def test_retries_stop_where_waiting_cannot_help(stage: Stage, caller: Caller) -> None:
    """Protects that an exhausted budget is asked for once, not three times."""
    asyncio.run(stage.admin("PUT", "limits", {"scope": {"tenant": caller.tenant}, "spend_microusd_lifetime": 0}))
    asked: list[str | None] = []
    hook = {"request": [lambda request: asked.append(request.headers.get("x-stainless-retry-count"))]}
    with (
        httpx2.Client(event_hooks=hook) as http_client,
        sdk(stage, caller, max_retries=2, http_client=http_client) as client,
        pytest.raises(anthropic.RateLimitError) as refused,
    ):
        client.messages.create(model="assistant", max_tokens=1, messages=turn(Script()))
    assert refused.value.error_code == "budget_exhausted" and asked == ["0"]


def test_an_idempotency_key_is_never_charged_twice(stage: Stage, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects 409 for the same body and 422 for another; the key is the id of the answer."""
    asked: dict[str, Any] = {"model": "assistant", "messages": turn(Script()), "extra_headers": {"Idempotency-Key": "once"}}
    assert client.messages.with_raw_response.create(**asked, max_tokens=5).headers["request-id"] == "once"
    with pytest.raises(anthropic.ConflictError) as again:
        client.messages.create(**asked, max_tokens=5)
    with pytest.raises(anthropic.UnprocessableEntityError) as other:
        client.messages.create(**asked, max_tokens=6)
    assert (again.value.error_code, other.value.error_code) == ("output_not_retained", "request_id_reused")
    assert again.value.type == "conflict_error" and error_of(again.value)["generation"]["status"] == "completed"
    assert paid(stage, caller)["requests"] == 1


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FAILURES: dict[str, tuple[Script, int, str, str]] = {
    "refused": (Script(status=400), 400, "engine_rejected", "invalid_request_error"),
    "broken": (Script(status=500), 502, "engine_error", "api_error"),
    "error": (Script(end="error", gap_ms=20), 502, "engine_error", "api_error"),
    "garbage": (Script(end="garbage", gap_ms=20), 502, "engine_error", "api_error"),
    "unfinished": (Script(end="unfinished", gap_ms=20), 502, "engine_error", "api_error"),
    "reset": (Script(end="reset", gap_ms=20), 502, "replica_lost", "api_error"),
    "cut": (Script(end="cut", gap_ms=20), 502, "replica_lost", "api_error"),
    "stalled": (Script(end="stall"), 502, "stalled", "api_error"),
    "late": (Script(tokens=400, gap_ms=20), 504, "deadline_exceeded", "timeout_error"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_an_error_of_the_sdk(stage: Stage, client: anthropic.Anthropic, name: str) -> None:
    """Protects callers from answers that end in silence: before the headers by status, after them by the error event."""
    asyncio.run(stage.check_serves(stage.demo_caller()))
    script, status, code, kind = FAILURES[name]
    headers = {"weir-deadline-ms": "400"} if name == "late" else {}
    asked: dict[str, Any] = {"model": "assistant", "max_tokens": 500, "messages": turn(script), "extra_headers": headers}
    with pytest.raises(anthropic.APIStatusError) as whole:
        client.messages.create(**asked)
    assert (whole.value.status_code, whole.value.error_code, whole.value.type) == (status, code, kind)
    assert error_of(whole.value)["generation"]["finish_reason"]
    if name == "late":
        assert whole.value.response.headers["x-should-retry"] == "false"
    asyncio.run(stage.check_serves(stage.demo_caller()))
    with pytest.raises(anthropic.APIStatusError) as streamed, client.messages.stream(**asked) as stream:
        stream.until_done()
    assert (streamed.value.error_code, streamed.value.type) == (code, kind)
    assert error_of(streamed.value)["code"] == code


def test_leaving_a_stream_cancels_it(stage: Stage, engine: ScriptedEngine, caller: Caller, client: anthropic.Anthropic) -> None:
    """Protects that a closed stream stops the engine and is charged for what was generated."""
    script = Script(tokens=400, gap_ms=20)
    with client.messages.stream(model="assistant", max_tokens=500, messages=turn(script)) as stream:
        for _ in stream.text_stream:
            break
    row = paid(stage, caller)
    assert 1 <= row["output_tokens"] < 400 and row["cost_microusd"] == price(script.input_tokens, row["output_tokens"])
    assert engine.running == 0
