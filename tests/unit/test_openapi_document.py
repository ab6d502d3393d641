"""The OpenAPI document is valid and complete: parsers, error tree and table of endings say the same as it does."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31

from weir.api.openapi.document import SURFACES, document
from weir.api.openapi.error_guide import ENDINGS, INTERNAL, MANAGEMENT_ONLY
from weir.api.openapi.surface_description import SurfaceDescription
from weir.errors import ERROR_BY_CODE, MethodNotAllowed

Json = dict[str, Any]
DOCUMENT = document()
SCHEMAS: dict[str, Json] = DOCUMENT["components"]["schemas"]
OPERATIONS: list[tuple[str, Json]] = [
    (f"{method.upper()} {path}", operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
BY_NAME = pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=[name for name, _ in OPERATIONS])
NUMBERS = ("integer", "number")
COMPATIBLE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages")
UNBOUNDED = {
    "ChatMessage.content",
    "MessageCountRequest.system",
    "MessageRequest.system",
    "MessageToolResult.content",
    "MessageTurn.content",
    "ResponseInputCallOutput.output",
    "ResponseInputMessage.content",
    "ResponseOutputText.logprobs",
    "ResponseRequest.include",
}
"""Fields whose lists only the body's own size bounds."""


def below(value: Any) -> Iterator[Json]:
    """Every object in a piece of the document."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from below(item)
    elif isinstance(value, list):
        for item in value:
            yield from below(item)


def schemas_of(*roots: Any) -> set[str]:
    """The components that these lead to."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:  # bounded: each component is entered once
        names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(waiting.pop()))) - found
        found |= names
        waiting += [SCHEMAS[name] for name in names]
    return found


def test_the_document_is_openapi_3_1() -> None:
    """Protects every tool that reads it: the document is what the specification allows."""
    jsonschema_rs.validate(OPENAPI_31, DOCUMENT)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_json_schema(name: str) -> None:
    """Protects validators and generators: each component compiles, by itself and with what it refers to."""
    jsonschema_rs.meta.validate(SCHEMAS[name])
    jsonschema_rs.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_every_reference_leads_somewhere_and_every_component_is_used() -> None:
    """Protects the document from names that are gone, and from parts that nothing needs."""
    references = {item["$ref"] for item in below(DOCUMENT) if "$ref" in item}
    kinds: dict[str, set[str]] = {}
    for reference in references:
        kind, name = re.fullmatch(r"#/components/(\w+)/([\w-]+)", reference).groups()  # type: ignore[union-attr]
        kinds.setdefault(kind, set()).add(name)
    assert kinds["headers"] | {"Allow"} == set(DOCUMENT["components"]["headers"])  # of a method that is in no operation
    assert schemas_of(DOCUMENT["paths"]) == set(SCHEMAS)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


FORM = "FileUpload"
"""A form, not JSON: its fields are text, and absent or there."""

PARSED = [(surface, component) for surface in SURFACES for component in surface.parsed]


@pytest.mark.parametrize(("surface", "component"), PARSED, ids=[component for _, component in PARSED])
def test_the_fields_are_those_of_the_parser(surface: SurfaceDescription, component: str) -> None:
    """Protects callers in both directions: no field is documented that is refused, and none is taken that is not documented."""
    schema = SCHEMAS[component]
    assert sorted(schema["properties"]) == sorted(surface.parsed[component])
    assert schema["additionalProperties"] == (False if component == FORM else {"type": "null"})


def test_every_object_of_a_request_is_compared_with_its_parser() -> None:
    """Protects the test above from an object that nobody names there."""
    bodies = [operation["requestBody"] for _, operation in OPERATIONS if "requestBody" in operation]
    objects = {name for name in schemas_of(*bodies) if "properties" in SCHEMAS[name]}
    assert objects == {component for _, component in PARSED}
    for _, component in PARSED:
        nested = below(list(SCHEMAS[component]["properties"].values()))
        assert not any("properties" in schema for schema in nested), f"{component} has an object without a name"


def fields_of_requests() -> Iterator[tuple[str, Json, bool]]:
    """Every field of every object of a request, and whether it is needed."""
    for _, component in PARSED:
        schema = SCHEMAS[component]
        for name, field in schema["properties"].items():
            resolved = SCHEMAS[field["$ref"].rpartition("/")[2]] if "$ref" in field else field
            yield f"{component}.{name}", resolved, name in schema.get("required", ())


FIELDS = list(fields_of_requests())


@pytest.mark.parametrize(("name", "field", "needed"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_a_field_has_type_range_default_and_description(name: str, field: Json, needed: bool) -> None:
    """Protects readers: what a field takes, within which bounds, what its absence means, and what it is for."""
    assert re.match(r"[A-Z`].*\.$", field["description"]), name
    is_absent_or_there = needed or name.startswith(f"{FORM}.")
    assert is_absent_or_there != ("default" in field), name
    for part in (field, *field.get("anyOf", ())):
        kinds = part.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        assert kinds or "anyOf" in part or "$ref" in part
        if "enum" not in part:
            assert not set(kinds) & set(NUMBERS) or {"minimum", "maximum"} <= part.keys(), name
            assert "array" not in kinds or "maxItems" in part or name in UNBOUNDED, name
    if not is_absent_or_there:
        assert "null" in json.dumps(field.get("type", field.get("anyOf"))), name


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def codes_of(operation: Json) -> set[str]:
    """The codes of all of its answers."""
    return {code for response in operation["responses"].values() for code in response.get("x-weir-codes", ())}


def test_every_code_of_the_tenant_api_is_answered_somewhere_and_no_other() -> None:
    """Protects callers: the codes of the document are those of the error tree that can leave on this listener."""
    answered = {code for _, operation in OPERATIONS for code in codes_of(operation)}
    elsewhere = {error.code for error in (*INTERNAL, *MANAGEMENT_ONLY, MethodNotAllowed)}
    assert answered == ERROR_BY_CODE.keys() - elsewhere


@BY_NAME
def test_each_answer_tells_its_codes_and_its_headers(name: str, operation: Json) -> None:
    """Protects clients: a refusal's schema allows exactly the codes that are listed, and ids come with every answer."""
    for status, response in operation["responses"].items():
        assert {"x-request-id", "request-id"} <= response["headers"].keys()
        narrowed = {
            code
            for media in response["content"].values()
            for schema in below(media["schema"])
            if "code" in schema.get("properties", {})
            for code in schema["properties"]["code"].get("enum", ())
        }
        assert narrowed == set(response.get("x-weir-codes", ())), f"{name} {status}"
        if status == "429":
            assert {"Retry-After", "retry-after-ms", "x-should-retry"} <= response["headers"].keys()
    assert operation["summary"] and operation["description"].endswith(".") and operation["operationId"]


def test_every_ending_is_an_answer_of_what_makes_generations() -> None:
    """Protects callers: the table of endings, status by status, on the native path and on the compatible ones."""
    operations = dict(OPERATIONS)
    for rule in ENDINGS:
        assert rule.error is not None
        for path in COMPATIBLE:
            compatible = operations[f"POST {path}"]["responses"][str(rule.compatible_http_status)]
            assert rule.error.code in compatible["x-weir-codes"]
        if rule.http_status != 200:
            native = operations["POST /v1/generations"]["responses"][str(rule.http_status)]
            assert rule.error.code in native["x-weir-codes"] and "application/json" in native["content"]


@BY_NAME
def test_a_key_is_asked_for_below_v1_and_nowhere_else(name: str, operation: Json) -> None:
    """Protects callers from a path that says nothing of keys, and probes from needing one."""
    needs_key = " /v1/" in name
    assert (operation.get("security") != []) == needs_key == ("401" in operation["responses"])
