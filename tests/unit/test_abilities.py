"""What an engine cannot do is refused by its field's name, and what would stop an engine never reaches it."""

from typing import Any

import msgspec
import pytest

from weir.core.demands import NO_DEMANDS, Demands, FormKind, OutputForm, Tool, ToolCall
from weir.core.registry.abilities import GRAMMAR_BRANCHES_MAX, GRAMMAR_OPTIONAL_MAX, lacking
from weir.core.registry.model import EngineKind
from weir.core.request import InferenceRequest, Message, Sampling

OPTIONAL: dict[str, Any] = {f"o{number}": {} for number in range(GRAMMAR_OPTIONAL_MAX)}
TOOL = Tool("find", None, '{"type":"object"}')


def _request(demands: Demands = NO_DEMANDS, **fields: Any) -> InferenceRequest:
    return InferenceRequest("assistant", "Hi", demands=demands, **fields)


def _formed(schema: Any) -> InferenceRequest:
    return _request(Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", msgspec.json.encode(schema).decode())))


def _field(request: InferenceRequest, engine: EngineKind) -> str | None:
    refused = lacking(request, engine)
    return refused and refused[0]


@pytest.mark.parametrize(
    ("request_", "engine", "field"),
    [
        (_request(), EngineKind.LLAMACPP, None),
        (_request(Demands(choices=2)), EngineKind.LLAMACPP, "n"),
        (_request(Demands(choices=2)), EngineKind.SIMULATED, None),
        (_request(Demands(tools=(TOOL,), top_logprobs=0)), EngineKind.LLAMACPP, "logprobs"),
        (_request(Demands(tools=(TOOL,), top_logprobs=0)), EngineKind.VLLM, None),
        (_request(Demands(tools=(TOOL,))), EngineKind.LLAMACPP, None),
        (_request(sampling=Sampling(top_k=5)), EngineKind.OPENAI, "top_k"),
        (_request(sampling=Sampling(top_k=5)), EngineKind.LLAMACPP, None),
    ],
)
def test_what_an_engine_lacks(request_: InferenceRequest, engine: EngineKind, field: str | None) -> None:
    """Protects callers: what an engine would ignore or refuse late is refused early, and what it can do is not."""
    assert _field(request_, engine) == field


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", "7", '"a"', "[" * 5_000])
def test_calls_told_again_have_arguments_that_templates_can_write(arguments: str) -> None:
    """Protects replicas: what a chat template fails on is the request's fault, not an engine's that then counts as failing."""
    told = (Message("user", "Hi"), Message("assistant", "", (ToolCall("c", "find", arguments),)))
    request = InferenceRequest("assistant", told)
    found = {engine: _field(request, engine) for engine in EngineKind}
    assert found == {**dict.fromkeys(EngineKind), EngineKind.LLAMACPP: "messages", EngineKind.VLLM: "messages"}
    fine = InferenceRequest("assistant", (Message("assistant", "", (ToolCall("c", "find", '{"a":1}'),)),))
    assert not any(_field(fine, engine) for engine in EngineKind)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a{0,1000}){0,1000}$"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a"}}},
        {"$defs": {"a": {"anyOf": [{"type": "string", "pattern": "a"}]}}},
        {"enum": [f"x{number}" for number in range(GRAMMAR_BRANCHES_MAX + 1)]},
        {"properties": {name: {"enum": ["a"] * 129} for name in "ab"}},
        {"anyOf": [{"type": ["string", "null"]}] * 100},
        {"description": "x" * 40_000},
        {"type": "object", "properties": {f"p{number}": {} for number in range(GRAMMAR_OPTIONAL_MAX + 1)}},
        {"properties": {"a": {"properties": {"b": {}, "c": {}}, "required": ["b", 5]}, **OPTIONAL}, "required": 5},
    ],
)
def test_a_grammar_that_takes_minutes_is_not_built(schema: Any) -> None:
    """Protects all tenants of a llama.cpp replica: it builds grammars in the one thread that decodes, and nothing stops it."""
    assert _field(_formed(schema), EngineKind.LLAMACPP) == "response_format"
    tool = Tool("find", None, msgspec.json.encode(schema).decode())
    assert _field(_request(Demands(tools=(TOOL, tool))), EngineKind.LLAMACPP) == "tools"
    assert _field(_formed(schema), EngineKind.VLLM) is None


@pytest.mark.parametrize(
    "schema",
    [
        {},
        _deep(300),
        {"enum": list(range(GRAMMAR_BRANCHES_MAX))},
        {"properties": OPTIONAL},
        {"properties": {f"p{number}": {} for number in range(500)}, "required": [f"p{number}" for number in range(500)]},
        {"properties": 5},
        {"type": "object", "properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}}},
    ],
)
def test_ordinary_schemas_are_served(schema: Any) -> None:
    """Protects structured output: depth, a long enum, and members that are merely called `pattern` are fine."""
    assert _field(_formed(schema), EngineKind.LLAMACPP) is None


def test_a_schema_that_is_no_json_is_left_to_the_engine() -> None:
    """Protects the walk: text that cannot be read has no pattern, and ends as the engine's own refusal."""
    assert _field(_request(Demands(form=OutputForm(FormKind.JSON_SCHEMA, "a", "{"))), EngineKind.LLAMACPP) is None
    assert _field(_request(Demands(form=OutputForm(FormKind.JSON_OBJECT))), EngineKind.LLAMACPP) is None
