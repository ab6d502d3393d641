"""The simulated engine writes the least JSON that a schema admits, and survives any schema."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from weir.engines.simulated_schema import VALUES_MAX, least_instance

NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({}, {}),
        ({"type": "string"}, ""),
        ({"type": "string", "minLength": 3}, "www"),
        ({"type": "integer"}, 0),
        ({"type": "integer", "minimum": 2.5}, 3),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "number", "minimum": 1.5}, 1.5),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["null", "string"]}, None),
        ({"type": "array", "items": {"type": "integer"}}, []),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
        ({"const": [1]}, [1]),
        ({"enum": ["b", "a"]}, "b"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 0),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [7]}}, "required": ["b"]}, {"b": 7}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, 0),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/node"}, "$defs": {"node": NODE}}, [{}]),
    ],
)
def test_the_least_value(schema: dict[str, Any], least: Any) -> None:
    """Protects tests and studies: what comes is small, always the same, and admitted by the schema."""
    assert msgspec.json.decode(least_instance(msgspec.json.encode(schema).decode())) == least
    Draft202012Validator(schema).validate(least)


LEAVES = st.sampled_from(
    [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": -3}, {"type": "number"}, {"type": "boolean"},
     {"type": "null"}, {"enum": ["x", 1]}, {"const": {"a": 1}}, {"$ref": "#/$defs/d"}]
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2)}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)}
        ),
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS)
def test_every_schema_that_is_read_is_kept(schema: Any) -> None:
    """Protects structured output in tests: what was asked for is what comes."""
    whole = {**schema, "$defs": {"d": {"type": "integer"}}}
    Draft202012Validator(whole).validate(msgspec.json.decode(least_instance(msgspec.json.encode(whole).decode())))


_NAMES = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "enum",
        "const",
        "items",
        "minItems",
        "anyOf",
        "$ref",
        "$defs",
        "minimum",
        "minLength",
        "a",
    ]
)
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "object", "array", "#", "#/$defs/a", "#/x", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(schema=_ANY)
def test_no_schema_breaks_it(schema: Any) -> None:
    """Protects the server from strangers' schemas: wrong types in any place, and definitions that name themselves."""
    msgspec.json.decode(least_instance(msgspec.json.encode(schema).decode()))


@pytest.mark.parametrize(
    "schema",
    [
        None,
        "",
        "{",
        '{"$ref":"#"}',
        '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}',
        '{"type":"string","minLength":1000000000}',
        '{"type":"array","minItems":1000,"items":{"type":"array","minItems":1000,"items":{"type":"integer"}}}',
        '{"type":"object","properties":{"a":{"$ref":"#"},"b":{"$ref":"#"}},"required":["a","b"]}',
    ],
)
def test_what_has_no_end_is_cut(schema: str | None) -> None:
    """Protects the server's memory: a bounded number of values, and no endless recursion."""
    assert len(least_instance(schema)) < 8 * VALUES_MAX * 32
