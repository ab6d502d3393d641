"""The least JSON that a schema admits, as far as the simulated engine reads schemas: what a model that obeys one would write.

Pure, and the same for the same schema. It reads type, properties, required, enum, const, items, minItems, anyOf, oneOf, allOf
and $ref to the schema's own definitions; numbers and strings keep their simple bounds. Of what it does not read it makes {}.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from weir.units import Tokens

DEPTH_MAX = 32
VALUES_MAX = 2_000
"""Schemas are strangers': what is larger or deeper is cut short with an empty object."""

_LETTER = "w"
_Schema: TypeAlias = Mapping[str, Any]


class _Instance:
    """One schema's instance in the making. left: values that may still be made."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left: Tokens = VALUES_MAX

    def of(self, schema: Any, depth: int = 0) -> Any:
        """The least value that the schema admits."""
        self._left -= 1
        if not isinstance(schema, dict) or depth > DEPTH_MAX or self._left < 0:
            return {}
        if "const" in schema:
            return schema["const"]
        if isinstance(values := schema.get("enum"), list) and values:
            return values[0]
        other = self._referred(schema)
        return self._typed(schema, depth) if other is None else self.of(other, depth + 1)

    def _referred(self, schema: _Schema) -> Any:
        """The schema that stands for this one: a definition, or the first alternative; None where it says all itself."""
        if isinstance(path := schema.get("$ref"), str):
            return self._definition(path)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(name), list) and options and "type" not in schema:
                return options[0]
        return None

    def _definition(self, path: str) -> Any:
        if not path.startswith("#"):
            return {}
        found = self._root
        for name in path[1:].split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return {} if found is None else found

    def _typed(self, schema: _Schema, depth: int) -> Any:
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        match kind:
            case "string":
                return _LETTER * _whole(schema.get("minLength"))
            case "integer":
                return math.ceil(_lowest(schema, 1))
            case "number":
                return _lowest(schema, 1e-9)
            case "boolean":
                return False
            case "null":
                return None
            case "array":
                return [self.of(schema.get("items"), depth + 1) for _ in range(_whole(schema.get("minItems")))]
            case _:
                return self._object(schema, depth)

    def _object(self, schema: _Schema, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        names = [name for name in required if isinstance(name, str)]
        return {name: self.of(properties.get(name), depth + 1) for name in names[:VALUES_MAX]}


def _whole(value: Any) -> int:
    """A length that a schema asks for, 0 where it asks for none, and no more than is sensible."""
    return min(value, VALUES_MAX) if type(value) is int and value > 0 else 0


def _lowest(schema: _Schema, above: float) -> float:
    """The number nearest to 0 within simple bounds. above: how far beyond an exclusive one."""
    low, past, high = (_number(schema.get(name)) for name in ("minimum", "exclusiveMinimum", "maximum"))
    least = max(0, low or 0, 0 if past is None else past + above)
    return least if high is None else min(least, high)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and type(value) is not bool else None


def least_instance(schema: str | None) -> str:
    """JSON text of the least value that a schema, as JSON text, admits; an empty object where it is none."""
    try:
        root = msgspec.json.decode(schema) if schema is not None else {}
    except (msgspec.MsgspecError, RecursionError):
        root = {}
    return msgspec.json.encode(_Instance(root).of(root)).decode()
