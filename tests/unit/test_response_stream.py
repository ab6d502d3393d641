"""The shape of a response: a stream's events, their order and numbers, and what the object says at the end."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.unit.response_stand import ACCEPTED, KeptClient, answer_on, record_of, streamed, whole

from weir import errors
from weir.api.openai.response_shapes import UNKNOWN_SETTINGS, response_object
from weir.core.endings import FinishReason, Status, ending
from weir.core.output import Delta, ShapedDelta, TokenLogprob, ToolCallPart
from weir.messages import GenerationRecord, StandingView

LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
TEXT = [Delta("Hel"), Delta("lo"), Delta("", 3), Delta(" ☃")]
CALLS = [
    ShapedDelta("", reasoning="Hm"),
    ShapedDelta("", reasoning="m."),
    Delta("I ask."),
    ShapedDelta("", tool_calls=(ToolCallPart(0, "call_a", "weather", ""),)),
    ShapedDelta("", tool_calls=(ToolCallPart(0, arguments='{"at":'),)),
    ShapedDelta("", tool_calls=(ToolCallPart(1, None, "time", "{}"), ToolCallPart(0, arguments='"x"}'))),
]
WAYS = ("added", "done")
ITEMS = ["reasoning", "message", "function_call", "function_call"]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def names(client: KeptClient) -> list[str]:
    return [event["type"].removeprefix("response.") for event in client.events]


def final(client: KeptClient) -> Any:
    """The response in the last event, which is the only terminal one of a stream without gaps."""
    events = client.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if event["type"] in TERMINAL] == [events[-1]["type"]]
    assert client.ended == 1 and b"[DONE]" not in b"".join(client.writes)
    return events[-1]["response"]


def test_a_stream_of_text_has_openais_events_in_order() -> None:
    """Protects clients that follow the protocol: every part begins before its deltas and ends before the response does."""
    client = streamed([[piece] for piece in TEXT])
    deltas = ["output_text.delta"] * 3
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names(client) == [*begun, *deltas, *ended]
    assert [event["delta"] for event in client.events if event["type"].endswith("delta")] == ["Hel", "lo", " ☃"]
    response = final(client)
    assert response["output"] == [client.events[-2]["item"]]
    assert response["output"][0]["content"] == [client.events[-3]["part"]]
    assert client.events[-4]["text"] == response["output"][0]["content"][0]["text"] == "Hello ☃"
    assert client.events[0]["response"] == client.events[1]["response"]
    assert (client.events[0]["response"]["status"], client.events[0]["response"]["usage"]) == ("in_progress", None)


def test_every_event_is_one_that_the_official_sdk_knows() -> None:
    """Protects typed clients: events and the final object are valid by the SDK's own types, also with calls and logprobs."""
    logprob = TokenLogprob("a", -0.5, (97,), (TokenLogprob("b", -1.0),))
    for client in (
        streamed([TEXT], temperature=0.5, metadata={"a": "b"}, instructions="Be short."),
        streamed([CALLS], FinishReason.TOOL_CALLS, tools=[{"type": "function", "name": "weather", "parameters": {}}]),
        streamed([[ShapedDelta("a", logprobs=(logprob,))]], FinishReason.LENGTH, **LOGPROBS),
    ):
        for event in client.events:
            assert EVENT.validate_python(event).type == event["type"]
        assert Response.model_validate(final(client)).id == "resp_r1"
    assert Response.model_validate(whole(CALLS).json).object == "response"


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("pieces", [[], TEXT, CALLS], ids=["nothing", "text", "calls"])
def test_every_ending_has_exactly_one_terminal_event(reason: FinishReason, pieces: list[Delta]) -> None:
    """Protects clients from streams that never end or end twice, and the mapping of the table of endings."""
    response, rule = final(streamed([pieces] if pieces else [], reason)), ending(reason)
    incomplete = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}.get(reason)
    expected = "incomplete" if incomplete else {Status.EXPIRED: "failed"}.get(rule.status, rule.status)
    assert response["status"] == expected
    assert response["incomplete_details"] == ({"reason": incomplete} if incomplete else None)
    if rule.error is None:
        assert response["error"] is None and response["output"]
    else:
        assert response["error"] == {"code": rule.error.code, "message": "What happened."}
        assert all(item["status"] in ("completed", "incomplete") for item in response["output"])
    assert (response["completed_at"] is not None) == (expected == "completed")


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if ending(reason).error])
def test_a_failure_before_the_headers_is_openais_error(reason: FinishReason) -> None:
    """Protects SDKs' exceptions: the table's status for compatible paths, our code, the record, and no text."""
    client, rule = whole([Delta("secret")], reason), ending(reason)
    assert rule.error is not None and client.status == rule.compatible_http_status
    error = client.json["error"]
    assert (error["code"], error["generation"]["request_id"]) == (rule.error.code, "r1") and "secret" not in str(client.json)


def test_usage_says_what_was_measured_and_what_it_costs() -> None:
    """Protects money: the tokens and the price of the record, in a stream and in a whole answer."""
    told = final(streamed([TEXT]))["usage"]
    assert told == whole(TEXT).json["usage"]
    assert told == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
        "cost_microusd": 4,
    }


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_text_and_calls_are_items_in_the_order_of_their_beginnings() -> None:
    """Protects agents: each call has its name, its id and its whole arguments, also where two come side by side."""
    client = streamed([[piece] for piece in CALLS], FinishReason.TOOL_CALLS)
    output = final(client)["output"]
    assert [item["type"] for item in output] == ITEMS
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}] and output[0]["summary"] == []
    assert output[1]["content"][0]["text"] == "I ask."
    assert [(call["call_id"], call["name"], call["arguments"]) for call in output[2:]] == [
        ("call_a", "weather", '{"at":"x"}'),
        ("call-0a1b-0-1", "time", "{}"),
    ]
    assert whole(CALLS, FinishReason.TOOL_CALLS).json["output"] == output
    assert len({item["id"] for item in output}) == 4 and {item["status"] for item in output} == {"completed"}


def test_every_item_is_told_as_begun_and_as_done_once() -> None:
    """Protects clients that follow items: each has its place from the beginning, and is whole when it is done."""
    client = streamed([CALLS], FinishReason.TOOL_CALLS)
    added, done = ([event for event in client.events if event["type"] == f"response.output_item.{way}"] for way in WAYS)
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"] for event in done] == final(client)["output"]
    assert names(client).index("reasoning_text.done") < names(client).index("output_text.delta")


def test_what_a_bound_cut_off_is_incomplete_and_what_came_before_is_not() -> None:
    """Protects agents from calling a function with half of its arguments."""
    for output in (
        final(streamed([CALLS], FinishReason.LENGTH))["output"],
        whole(CALLS, FinishReason.LENGTH).json["output"],
    ):
        assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]


def test_nothing_generated_is_one_empty_message() -> None:
    """Protects clients that look at the first item."""
    client = streamed([])
    [item] = final(client)["output"]
    assert item["content"][0]["text"] == "" and "output_text.done" in names(client)
    assert whole([]).json["output"] == [item]


def test_log_probabilities_are_shown_where_they_were_asked_for() -> None:
    """Protects both: whoever asked has them with each delta and in the part; whoever did not is told none."""
    reported = TokenLogprob("é", -0.25, None, (TokenLogprob("e", -1.5),))
    pieces = [ShapedDelta("é", logprobs=(reported,)), ShapedDelta("", logprobs=(reported,))]
    shown = {
        "token": "é",
        "logprob": -0.25,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "e", "logprob": -1.5, "bytes": [101]}],
    }
    asked, unasked = streamed([pieces], **LOGPROBS), streamed([pieces])
    deltas = [event for event in asked.events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [("é", [shown]), ("", [shown])]
    assert final(asked)["output"][0]["content"][0]["logprobs"] == [shown, shown]
    assert final(unasked)["output"][0]["content"][0]["logprobs"] == []
    assert whole(pieces, **LOGPROBS).json["output"] == final(asked)["output"]


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_asked_for_is_repeated() -> None:
    """Protects callers that log answers: settings as given, and of what was left out what happens."""
    tool = {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}
    form = {"type": "json_schema", "name": "n", "description": "d", "schema": {"type": "object"}, "strict": None}
    given: dict[str, Any] = {
        "instructions": "Be short.",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "text": {"format": form},
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert given.items() <= whole([], **given).json.items()
    assert UNKNOWN_SETTINGS.items() <= whole([]).json.items()
    assert whole([], text={"format": {"type": "json_object"}}).json["text"] == {"format": {"type": "json_object"}}


@pytest.mark.parametrize(("status", "shown"), [(Status.QUEUED, "queued"), (Status.RUNNING, "in_progress")])
def test_a_response_that_has_not_ended_has_no_usage_yet(status: Status, shown: str) -> None:
    """Protects pollers: they wait while it is queued or in progress, and no figure is final before the end."""
    record = GenerationRecord("gen-1", "r1", 1, "assistant", "small@1", status)
    response = response_object(record, UNKNOWN_SETTINGS, 0, None, [])
    assert (response["id"], response["status"], response["usage"], response["error"]) == ("resp_r1", shown, None, None)
    assert Response.model_validate(response).output == []


async def test_silence_is_a_comment_which_takes_no_number() -> None:
    """Protects the numbering from keep-alives."""
    client = KeptClient()
    answer = answer_on(client, stream=True)
    await answer.open(ACCEPTED)
    answer.keep_alive()
    answer.output([Delta("a")])
    answer.keep_alive()
    answer.finish_reason(record_of(FinishReason.STOP))
    answer.finish_reason(record_of(FinishReason.STOP))
    await answer.end(record_of(FinishReason.STOP), [], StandingView())
    assert client.writes.count(b": keep-alive\n\n") == 2
    assert final(client)["status"] == "completed"


async def test_a_refusal_has_the_names_of_this_surface() -> None:
    """Protects callers from a field that they never sent: `param` is what it is called here."""
    for field, shown in (("input", "input"), ("max_output_tokens", "max_output_tokens"), ("deadline_ms", "weir-deadline-ms")):
        client = KeptClient()
        error = errors.InvalidRequest("No.", members={"field": field, "accepted": "another"})
        await answer_on(client).refuse(error, None, None)
        told = client.json["error"]
        assert (client.status, told["param"], told["field"], told["code"]) == (400, shown, shown, "invalid_request")
        assert client.headers["x-request-id"] == "r1"
