"""Anthropic's bodies: each field is served as engines understand it, or refused by its name."""

from typing import Any

import msgspec
import pytest

from weir import errors
from weir.api.anthropic.messages_request import FIELDS, INPUT_FIELDS, parse_count, parse_message
from weir.core.demands import NO_DEMANDS, FormKind, Tool, ToolChoice, ToolMode
from weir.core.request import InferenceRequest, Message, Sampling

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
MARK = {"type": "ephemeral", "ttl": "5m"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "assistant", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


def parsed(**fields: Any) -> InferenceRequest:
    return parse_message(body(**fields), {})


def turns(*messages: tuple[str, Any]) -> tuple[Message, ...]:
    prompt = parsed(messages=[{"role": role, "content": content} for role, content in messages]).prompt
    assert isinstance(prompt, tuple)
    return prompt


def refused(**fields: Any) -> tuple[str, str]:
    """The code of a refusal and the field that it names."""
    with pytest.raises(errors.WeirError) as refusal:
        parsed(**fields)
    assert refusal.value.members["accepted"]
    return refusal.value.code, refusal.value.members["field"]


# ── served ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_body_is_a_conversation_of_one_turn() -> None:
    """Protects the defaults: nothing is demanded that was not asked for."""
    request = parsed()
    assert request == InferenceRequest("assistant", (Message("user", "hi"),), max_output_tokens=9)
    assert request.demands is NO_DEMANDS


def test_every_field_is_served() -> None:
    """Protects the meaning of what engines get, and fields that change nothing from changing anything."""
    request = parsed(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": MARK}],
        stream=True,
        stop_sequences=["END", "\n\n"],
        temperature=1,
        top_p=0.5,
        top_k=40,
        metadata={"user_id": "u-1"},
        service_tier="standard_only",
        thinking={"type": "disabled"},
        cache_control={"type": "ephemeral"},
        tools=[{**TOOL, "type": "custom", "strict": True, "cache_control": MARK}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert request.prompt == (Message("system", "Be brief."), Message("user", "hi"))
    assert request.stream
    assert request.sampling == Sampling(temperature=1.0, top_p=0.5, stop=("END", "\n\n"), top_k=40)
    demands = request.demands
    assert demands.tools == (Tool("weather", "Tells it.", '{"type":"object"}', True),)
    assert demands.tool_choice == ToolChoice(ToolMode.NAMED, "weather")
    assert demands.parallel_tool_calls is False
    assert demands.form is not None and (demands.form.kind, demands.form.strict) == (FormKind.JSON_SCHEMA, True)
    assert demands.form.schema == '{"type":"object"}' and demands.form.name


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, None, None),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolMode.REQUIRED, True),
        ({"type": "none"}, ToolMode.NONE, None),
    ],
)
def test_a_tool_choice_has_the_engines_word(choice: Any, mode: ToolMode | None, parallel: bool | None) -> None:
    """Protects what must, may or must not be called; what may be called by default is the same request as by choice."""
    demands = parsed(tools=[TOOL], tool_choice=choice).demands
    assert (demands.tool_choice, demands.parallel_tool_calls) == (mode and ToolChoice(mode), parallel)


def test_blocks_become_turns_of_the_conversation() -> None:
    """Protects a use of tools told again: the call with its id, each result as a turn of its own, then what the user says."""
    told = turns(
        ("user", "a"),
        ("assistant", [{"type": "text", "text": "I look. "}, CALL, {"type": "text", "text": "Wait."}]),
        (
            "user",
            [
                RESULT,
                {**RESULT, "content": [{"type": "text", "text": "no"}], "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        ),
    )
    assert [turn.role for turn in told] == ["user", "assistant", "tool", "tool", "user"]
    assert told[1].content == "I look. Wait."
    [call] = told[1].tool_calls
    assert (call.id, call.name, msgspec.json.decode(call.arguments)) == ("toolu_1", "weather", {"city": "Bern"})
    assert (told[2].content, told[2].tool_call_id) == ("rain", "toolu_1")
    assert told[3].content == "Error: no" and told[4].content == "So?"


def test_a_result_may_be_empty_and_roles_need_not_alternate() -> None:
    """Protects conversations that Anthropic takes: a tool without an answer, two turns of one side, a system's turn between."""
    silent = {"type": "tool_result", "tool_use_id": "toolu_1"}
    told = turns(("user", "a"), ("user", "b"), ("system", "c"), ("assistant", [CALL]), ("user", [silent]))
    assert [(turn.role, turn.content) for turn in told] == [
        ("user", "a"),
        ("user", "b"),
        ("system", "c"),
        ("assistant", ""),
        ("tool", ""),
    ]


def test_weirs_headers_are_read() -> None:
    """Protects deadline, session and idempotency on this surface."""
    headers = {b"weir-deadline-ms": b"500", b"weir-session": b"s", b"idempotency-key": b"k", b"anthropic-beta": b"any-2099"}
    request = parse_message(body(), headers)
    assert (request.deadline_ms, request.session, request.request_id) == (500, "s", "k")


def test_null_is_absent() -> None:
    """Protects clients that send every field they know."""
    assert parsed(**dict.fromkeys(set(FIELDS) - {"model", "messages", "max_tokens"})) == parsed()


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["container", "mcp_servers", "context_management", "output_format", "speed", "n", "inference_geo"]
)
def test_what_is_not_served_is_refused_by_its_name(name: str) -> None:
    """Protects callers from options that would be dropped silently."""
    assert refused(**{name: "x"}) == ("unsupported_field", name)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"user_id": 7}}, "metadata.user_id"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"service_tier": ["auto"]}, "service_tier"),
        ({"thinking": True}, "thinking"),
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": []}}, "cache_control.ttl"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]}, "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": ""}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "is_error": 1}]}]}, "messages[0].content[0].is_error"),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "input": "x"}]}]}, "messages[0].content[0].input"),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": {"a": "\ud800"}}]}]},
            "messages[0].content[0].input",
        ),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "name": "a b"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "id": None}]}]}, "messages[0].content[0].id"),
        ({"messages": [{"role": "assistant", "content": [CALL] * 129}]}, "messages[0].content"),
        ({"tools": TOOL}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_wrong_value_is_refused_by_its_fields_name(fields: dict[str, Any], field: str) -> None:
    """Protects callers, who find what to change, and engines from values that they would take otherwise."""
    assert refused(**fields) == ("invalid_request", field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]}]},
            "messages[0].content[0].citations",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type"),
        ({"metadata": {"team": "x"}}, "metadata.team"),
        ({"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_what_anthropic_has_and_weir_has_not_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    """Protects callers from features that would be ignored: blocks, a begun answer, servers' tools, thinking."""
    assert refused(**fields) == ("unsupported_field", field)


def test_a_choice_without_tools_is_a_conflict() -> None:
    """Protects callers who forgot their tools; `none` asks for nothing and passes."""
    assert refused(tool_choice={"type": "any"}) == ("conflicting_fields", "tool_choice")
    assert parsed(tool_choice={"type": "none"}).demands.tool_choice is None


def test_a_count_takes_what_is_input_and_nothing_else() -> None:
    """Protects the two bodies from drifting apart: what a count leaves out is no input."""
    asked = {name: value for name, value in body(tools=[TOOL], system="s").items() if name in INPUT_FIELDS}
    request = parse_count(asked, {})
    assert request.prompt == (Message("system", "s"), Message("user", "hi")) and request.demands.tools
    for name in set(FIELDS) - set(INPUT_FIELDS):
        with pytest.raises(errors.UnsupportedField) as refusal:
            parse_count({**asked, name: 1}, {})
        assert refusal.value.members["field"] == name
