"""The document with answers that allow no further field, so that one which it does not tell is found.

As it is served they are open: clients must bear what comes with time.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def close_answers(document: dict[str, Any]) -> None:
    """Close every object that an answer has, as deep as it goes; in place."""
    components: dict[str, Schema] = document["components"]["schemas"]
    waiting = list(answer_schemas(document))
    entered: set[str] = set()
    while waiting:  # bounded: the document is a tree, and each component is entered once
        schema = waiting.pop()
        if "$ref" in schema:
            name = component_of(schema)
            waiting += [] if name in entered else [components[name]]
            entered.add(name)
        if "properties" in schema and "allOf" not in schema:
            schema.setdefault("additionalProperties", False)
        waiting += _below(schema)


def answer_schemas(document: dict[str, Any]) -> Iterator[Schema]:
    """The schemas of all bodies that operations answer; the document's own is anybody's."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for response in operation["responses"].values():
                if path != "/openapi.json":
                    yield from (media["schema"] for media in response["content"].values())


def component_of(reference: Schema) -> str:
    """The name of what a `$ref` leads to."""
    return str(reference["$ref"]).rpartition("/")[2]


def _below(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("properties", {}).values()
    yield from schema.get("anyOf", ())
    yield from schema.get("allOf", ())[:1]  # a component; what follows narrows its fields and has none of its own
    yield from (schema[word] for word in ("items", "contentSchema") if word in schema)
