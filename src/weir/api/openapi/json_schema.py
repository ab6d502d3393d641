"""JSON Schema in small words, as OpenAPI 3.1 takes it: each makes one schema with its description.

A request's field is `needed` as it is, or `optional`: then null is the same as absent, here as in every parser.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

NULL: Json = {"type": "null"}


def text(description: str, *, shortest: int = 0, longest: int | None = None, pattern: str | None = None) -> Json:
    """A string of so many characters."""
    bounds = {"minLength": shortest or None, "maxLength": longest, "pattern": pattern}
    return {"type": "string", **_given(bounds), "description": description}


def whole(description: str, low: int = 0, high: int | None = None) -> Json:
    """A whole number of the range, both ends in it."""
    return {"type": "integer", **_given({"minimum": low, "maximum": high}), "description": description}


def number(description: str, low: float, high: float | None = None) -> Json:
    """A finite number of the range, both ends in it."""
    return {"type": "number", **_given({"minimum": low, "maximum": high}), "description": description}


def flag(description: str) -> Json:
    """true or false."""
    return {"type": "boolean", "description": description}


def words(description: str, values: Iterable[str]) -> Json:
    """One of these strings."""
    return {"type": "string", "enum": list(values), "description": description}


def only(description: str, value: Any, kind: str) -> Json:
    """No other value than this. kind: its JSON type."""
    return {"type": kind, "enum": [value], "description": description}


def listed(description: str, items: Json, *, fewest: int = 0, most: int | None = None) -> Json:
    """An array of so many items."""
    bounds = {"minItems": fewest or None, "maxItems": most}
    return {"type": "array", "items": items, **_given(bounds), "description": description}


def either(description: str, *schemas: Json) -> Json:
    """What at least one of these takes."""
    return {"anyOf": list(schemas), "description": description}


def ref(component: str) -> Json:
    """The schema of this name in the document."""
    return {"$ref": f"#/components/schemas/{component}"}


def optional(schema: Json, default: Any = None) -> Json:
    """A request's field that may be absent, or null. default: null where the description says what absence means."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL], "default": default}
    widened = {**schema, "type": [schema["type"], "null"], "default": default}
    return {**widened, "enum": [*schema["enum"], None]} if "enum" in schema else widened


def nullable(schema: Json) -> Json:
    """An answer's field that is there, and may be null."""
    widened = optional(schema)
    del widened["default"]
    return widened


def request_object(description: str, fields: Mapping[str, Json], needed: Sequence[str] = ()) -> Json:
    """An object that a parser reads: an unknown field is refused by name, unless it is null, which is the same as absent."""
    return {**answer_object(description, fields, needed), "additionalProperties": NULL}


def answer_object(description: str, fields: Mapping[str, Json], always: Sequence[str] = ()) -> Json:
    """An object that we answer; more fields may come with time. always: the fields that it never lacks."""
    required = {"required": list(always)} if always else {}
    return {"type": "object", "description": description, "properties": dict(fields), **required}


def _given(bounds: Mapping[str, Any]) -> Json:
    return {name: value for name, value in bounds.items() if value is not None}
