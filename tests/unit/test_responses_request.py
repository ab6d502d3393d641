"""What a response's body means, and which bodies are refused by the name of what is wrong in them."""

import contextlib
import json
from typing import Any

import pytest

from weir import errors
from weir.api.openai.response_input import ITEM_TYPES
from weir.api.openai.responses_request import FIELDS, LOGPROBS, ResponseOptions, parse_response
from weir.api.wire import json_object
from weir.core.demands import NO_DEMANDS, Demands, FormKind, OutputForm, Tool, ToolCall, ToolChoice, ToolMode
from weir.core.request import InferenceRequest, Message, Sampling

TOOL = {"type": "function", "name": "weather"}
USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


def parsed(headers: dict[bytes, bytes] | None = None, **fields: Any) -> InferenceRequest:
    """The request of a body with these fields, which came as JSON."""
    document = json_object(json.dumps({"model": "assistant", "input": "x", **fields}).encode())
    return parse_response(document, headers or {})[0]


def conversation(*items: Any, **fields: Any) -> Any:
    """The turns that these items are."""
    return parsed(input=list(items), **fields).prompt


def refused(expected: type[errors.WeirError], field: str, **fields: Any) -> None:
    """A body with these fields is refused by this name."""
    with pytest.raises(expected) as raised:
        parsed(**fields)
    assert raised.type is expected and raised.value.members["field"] == field and raised.value.members["accepted"]


# ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plain_input_is_one_prompt_and_null_is_absent() -> None:
    """Protects base models, which take a prompt and no conversation, and clients that send every field."""
    plain = InferenceRequest("assistant", "x", sampling=Sampling())
    assert parsed() == parsed(**dict.fromkeys(set(FIELDS) - {"model", "input"})) == plain
    assert parsed().demands is NO_DEMANDS


def test_every_field_reaches_the_request() -> None:
    """Protects callers from a field that is accepted and means nothing."""
    headers = {b"idempotency-key": b"k1", b"weir-deadline-ms": b"900", b"weir-session": b"s1"}
    request = parsed(
        headers,
        stream=True,
        stream_options={"include_obfuscation": False},
        max_output_tokens=7,
        temperature=0.5,
        top_p=1,
        instructions="Be short.",
        service_tier="auto",
        truncation="disabled",
        store=False,
        background=False,
        user="u",
        metadata={"a": "b"},
        include=[LOGPROBS],
        top_logprobs=3,
    )
    assert request == InferenceRequest(
        "assistant",
        (Message("system", "Be short."), Message("user", "x")),
        max_output_tokens=7,
        deadline_ms=900,
        stream=True,
        sampling=Sampling(temperature=0.5, top_p=1.0),
        session="s1",
        request_id="k1",
        demands=Demands(top_logprobs=3),
    )


def test_labels_and_instructions_are_kept_for_the_answer() -> None:
    """Protects what the answer repeats."""
    labels = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "p", "metadata": {"a": "b"}}
    body = {"model": "assistant", "input": "x", "instructions": "", **labels}
    request, options = parse_response(body, {})
    assert options == ResponseOptions("", labels) and request.prompt == "x"


def test_tools_and_forms_are_written_flat() -> None:
    """Protects both demands: functions and schemas stand where responses has them, one level above chat's."""
    schema = {"type": "json_schema", "name": "n", "schema": {"a": 1}, "description": "d", "strict": True}
    request = parsed(
        tools=[{**TOOL, "description": "d", "parameters": {"type": "object"}, "strict": True}, {**TOOL, "name": "time"}],
        tool_choice={"type": "function", "name": "time"},
        parallel_tool_calls=False,
        text={"format": schema},
    )
    assert request.demands == Demands(
        tools=(Tool("weather", "d", '{"type":"object"}', True), Tool("time")),
        tool_choice=ToolChoice(ToolMode.NAMED, "time"),
        parallel_tool_calls=False,
        form=OutputForm(FormKind.JSON_SCHEMA, "n", '{"a":1}', True, "d"),
    )
    for mode in ("none", "required"):
        assert parsed(tools=[TOOL], tool_choice=mode).demands.tool_choice == ToolChoice(ToolMode(mode))
    assert parsed(tools=[TOOL], tool_choice="auto").demands == parsed(tools=[TOOL]).demands
    assert parsed(text={"format": {"type": "json_object"}}).demands.form == OutputForm(FormKind.JSON_OBJECT)
    assert parsed(text={"format": {"type": "text"}}).demands.form is parsed(text={}).demands.form is None
    assert parsed(include=[LOGPROBS]).demands.top_logprobs == 0
    assert parsed(include=[]).demands.top_logprobs is None


def test_messages_of_every_role_and_both_kinds_of_content() -> None:
    """Protects conversations: parts are joined, a developer is the system, instructions come first."""
    turns = conversation(
        {"type": "message", "role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": [], "logprobs": []}]},
        {"role": "system", "content": ""},
        instructions="first",
    )
    expected = [("system", "first"), ("system", "a"), ("user", "bc"), ("assistant", "d"), ("system", "")]
    assert [(turn.role, turn.content) for turn in turns] == expected


def test_calls_belong_to_the_models_turn_and_outputs_answer_them() -> None:
    """Protects agents: what an answer had is told again as engines know it, several calls of one turn in one turn."""
    message = {"role": "assistant", "content": "I ask.", "type": "message", "id": "msg_1", "status": "completed"}
    text_output = [{"type": "input_text", "text": "wet"}]
    turns = conversation(
        USER,
        message,
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "dry", "id": "fco_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": text_output},
        {**CALL, "call_id": "c3"},
    )
    assert turns == (
        Message("user", "x"),
        Message("assistant", "I ask.", (ToolCall("c1", "weather", "{}"), ToolCall("c2", "weather", "{}"))),
        Message("tool", "dry", tool_call_id="c1"),
        Message("tool", "wet", tool_call_id="c2"),
        Message("assistant", "", (ToolCall("c3", "weather", "{}"),)),
    )


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "access_programs",
        "background_options",
        "context_management",
        "conversation",
        "image",
        "max_tool_calls",
        "moderation",
        "previous_response_id",
        "prompt",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "n",
        "seed",
        "stop",
        "max_tokens",
        "messages",
        "anything",
    ],
)
def test_a_field_that_is_not_served_is_refused_by_its_name(name: str) -> None:
    """Protects callers from options that would be dropped silently."""
    refused(errors.UnsupportedField, name, **{name: "x"})


@pytest.mark.parametrize(
    ("asked", "kept_by"),
    [
        ({}, None),
        ({"store": False}, None),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"background": True, "store": True}, "background"),
        ({"background": False, "store": True}, "store"),
    ],
)
def test_what_asks_for_keeping(asked: dict[str, Any], kept_by: str | None) -> None:
    """Protects callers that come back: what runs in the background is stored; nothing is that was not asked for."""
    _, options = parse_response({"model": "assistant", "input": "x", **asked}, {})
    assert options.kept_by == kept_by and options.background == (kept_by == "background")
    assert options.store == (kept_by is not None)


def test_background_work_that_is_not_stored_is_refused() -> None:
    """Protects callers from work whose answer nobody could read."""
    refused(errors.ConflictingFields, "store", background=True, store=False)


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": True}}),
    ("truncation", {"truncation": "auto"}),
    ("service_tier", {"service_tier": "flex"}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.json_schema", {"text": {"format": {"type": "json_schema", "json_schema": {}}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_object", "schema": {}}}}),
    ("include", {"include": ["reasoning.encrypted_content"]}),
    ("tools[1].type", {"tools": [TOOL, {"type": "web_search"}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools[0].defer_loading", {"tools": [{**TOOL, "defer_loading": True}]}),
    ("tool_choice.mode", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather", "mode": "auto"}}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].type", {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}),
    ("input[0].type", {"input": [{"id": "msg_1"}]}),
    ("input[1].name", {"input": [USER, {**USER, "name": "bob"}]}),
    ("input[0].phase", {"input": [{**USER, "phase": "commentary"}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}),
    ("input[0].content[0].type", {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}]}),
    (
        "input[0].content[0].annotations",
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [{}]}]}]},
    ),
    (
        "input[0].content[0].prompt_cache_breakpoint",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {}}]}]},
    ),
    ("input[0].namespace", {"input": [{**CALL, "namespace": "x"}]}),
    ("input[0].output[0].type", {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "x"}]}]}),
]


@pytest.mark.parametrize(("field", "fields"), UNSUPPORTED)
def test_what_is_not_served_inside_a_field_is_refused_by_its_path(field: str, fields: dict[str, Any]) -> None:
    """Protects callers of nested options: the refusal says which one."""
    refused(errors.UnsupportedField, field, **fields)


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": ""}),
    ("model", {"model": None}),
    ("model", {"model": 1}),
    ("input", {"input": None}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input", {"input": {}}),
    ("input", {"input": [USER] * 10_001}),
    ("input[0]", {"input": ["x"]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].role", {"input": [{"role": ["user"], "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": ["x"]}]}),
    ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input[0].content[0].logprobs", {"input": [{"role": "assistant", "content": [{"type": "output_text", "logprobs": 1}]}]}),
    ("input[0].status", {"input": [{**USER, "status": "done"}]}),
    ("input[0].id", {"input": [{**USER, "id": 1}]}),
    ("input[0].call_id", {"input": [{**CALL, "call_id": ""}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].name", {"input": [{**CALL, "name": "a b"}]}),
    ("input[0].arguments", {"input": [{**CALL, "arguments": {}}]}),
    ("input[128]", {"input": [CALL] * 129}),
    ("instructions", {"instructions": 1}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": 1.0}),
    ("max_output_tokens", {"max_output_tokens": True}),
    ("max_output_tokens", {"max_output_tokens": 2**31}),
    ("stream", {"stream": "true"}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "1"}),
    ("top_p", {"top_p": -0.1}),
    ("store", {"store": "no"}),
    ("background", {"background": 1}),
    ("user", {"user": ""}),
    ("metadata", {"metadata": {"a": 1}}),
    ("metadata", {"metadata": {str(number): "" for number in range(17)}}),
    ("include", {"include": LOGPROBS}),
    ("top_logprobs", {"include": [LOGPROBS], "top_logprobs": 21}),
    ("text", {"text": "x"}),
    ("text.format", {"text": {"format": {"type": "yaml"}}}),
    ("text.format", {"text": {"format": "text"}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("tools", {"tools": {}}),
    ("tools", {"tools": [TOOL] * 129}),
    ("tools[0]", {"tools": ["weather"]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[1].name", {"tools": [TOOL, TOOL]}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": []}]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "function"}}),
]


@pytest.mark.parametrize(("field", "fields"), INVALID)
def test_a_wrong_value_is_refused_by_its_path(field: str, fields: dict[str, Any]) -> None:
    """Protects callers: the refusal names what is wrong as this surface calls it."""
    refused(errors.InvalidRequest, field, **fields)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("stream_options", {"stream_options": {}}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("parallel_tool_calls", {"parallel_tool_calls": True}),
    ],
)
def test_what_needs_another_field_is_refused_without_it(field: str, fields: dict[str, Any]) -> None:
    """Protects callers from an option that could have no effect."""
    refused(errors.ConflictingFields, field, **fields)


@pytest.mark.parametrize("header", [b"idempotency-key", b"weir-deadline-ms", b"weir-session"])
def test_weirs_own_headers_are_checked(header: bytes) -> None:
    """Protects the native rules on this surface."""
    with pytest.raises(errors.InvalidRequest):
        parsed({header: b""})


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model", {"model": SURROGATE}),
        ("input", {"input": SURROGATE}),
        ("instructions", {"instructions": SURROGATE}),
        ("input[0].content", {"input": [{"role": "user", "content": SURROGATE}]}),
        ("input[0].arguments", {"input": [{**CALL, "arguments": SURROGATE}]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": {"a": SURROGATE}}]}),
        ("metadata", {"metadata": {"a": SURROGATE}}),
        ("metadata", {"metadata": {SURROGATE: "a"}}),
        ("user", {"user": SURROGATE}),
    ],
)
def test_text_that_is_no_unicode_is_refused(field: str, fields: dict[str, Any]) -> None:
    """Protects the platform: what could not be encoded never gets as far as an engine or an answer."""
    with pytest.raises(errors.InvalidRequest) as raised:
        parse_response({"model": "assistant", "input": "x", **fields}, {})
    assert raised.value.members["field"] == field


@pytest.mark.parametrize("depth", range(900, 1_000, 5))
def test_a_schema_as_deep_as_a_body_may_be_is_served_or_refused(depth: int) -> None:
    """Protects against an internal error: what can just be read may be too deep to be written again."""
    schema = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"type":"function","name":"f","parameters":{schema}}}]'
    with contextlib.suppress(errors.InvalidRequest):
        document = json_object(f'{{"model":"m","input":"x","tools":{tools}}}'.encode())
        assert parse_response(document, {})[0].demands.tools[0].parameters == schema


def test_every_kind_of_item_is_named_where_another_is_refused() -> None:
    """Protects callers of hosted items: they learn which ones there are."""
    with pytest.raises(errors.UnsupportedField) as raised:
        conversation({"type": "web_search_call"})
    assert raised.value.members["accepted"] == list(ITEM_TYPES)
