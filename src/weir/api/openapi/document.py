"""Assembles the document of the tenant API from its surfaces, and answers it."""

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

import weir
from weir.api.openapi import (
    batches_paths,
    chat_paths,
    completions_paths,
    embeddings_paths,
    messages_paths,
    models_paths,
    native_paths,
    responses_paths,
    service_paths,
)
from weir.api.openapi.json_schema import Json
from weir.api.openapi.shared_parts import HEADERS, SCHEMAS, SECURITY, SECURITY_SCHEMES
from weir.api.openapi.surface_description import SurfaceDescription
from weir.api.wire import Headers, Rendered

SURFACES: tuple[SurfaceDescription, ...] = (
    native_paths.SURFACE,
    chat_paths.SURFACE,
    completions_paths.SURFACE,
    responses_paths.SURFACE,
    embeddings_paths.SURFACE,
    batches_paths.SURFACE,
    messages_paths.SURFACE,
    models_paths.SURFACE,
    service_paths.SURFACE,
)
"""A new surface adds its own here, and nothing else of this package changes."""

_KEEP_S = 300
_DESCRIPTION = """What applications call: model aliases, served within your limits and budgets.

`null` is the same as absent in every request, and a field that is not described is refused by name (`unsupported_field`), never
dropped. Whole numbers have no fraction: `1.0` is refused. Answers may get further fields with time. Any other method of a path
is answered `405 method_not_allowed`, any other path `404 not_found`. Each response lists its codes in `x-weir-codes`. In an
event stream the schema is that of each event."""


def document() -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weir: the tenant API", "version": weir.__version__, "description": _DESCRIPTION},
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "servers": [{"url": "/", "description": "The cell that answered this document."}],
        "security": SECURITY,
        "tags": [{"name": surface.name, "description": surface.description} for surface in SURFACES],
        "paths": _united("paths", *(surface.paths for surface in SURFACES)),
        "components": {
            "schemas": _united("schemas", SCHEMAS, *(surface.schemas for surface in SURFACES)),
            "headers": HEADERS,
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _united(what: str, *parts: Mapping[str, Any]) -> Json:
    united: Json = {}
    for part in parts:
        assert not united.keys() & part.keys(), f"two surfaces have {what} of one name"
        united |= part
    return united


@cache
def _encoded() -> tuple[bytes, bytes]:
    """The document and its ETag: made when first asked for, and the same until the process ends."""
    body = msgspec.json.encode(document())
    return body, b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()


def document_answer() -> Rendered:
    """The document as it is served."""
    body, etag = _encoded()
    headers: Headers = [(b"etag", etag), (b"cache-control", b"public, max-age=%d" % _KEEP_S)]
    return Rendered(200, b"application/json", body, headers)
