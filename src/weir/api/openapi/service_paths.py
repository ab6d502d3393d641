"""What needs no key: whether the process serves, whether it takes new work, and the document itself."""

from weir.api.openapi.answers import EVERYWHERE, PROBLEM, answer, refusals, together
from weir.api.openapi.json_schema import Json, answer_object, only
from weir.api.openapi.shared_parts import OPEN
from weir.api.openapi.surface_description import SurfaceDescription

_TAG = "Service"


def _state(word: str) -> dict[str, Json]:
    schema = answer_object("The state.", {"status": only("In one word.", word, "string")}, ["status"])
    return {"application/json": {"schema": schema}}


def _open(operation: str, summary: str, description: str, answers: dict[str, Json]) -> Json:
    return {
        "tags": [_TAG],
        "operationId": operation,
        "summary": summary,
        "description": description,
        "security": OPEN,
        "responses": together(answers, refusals(PROBLEM, EVERYWHERE)),
    }


def _healthz() -> Json:
    answers = {"200": answer("It serves.", _state("ok"), has_key=False)}
    return _open("getHealth", "Whether the process serves", "For liveness probes.", answers)


def _readyz() -> Json:
    answers = {
        "200": answer("New work is welcome.", _state("ready"), has_key=False),
        "503": answer("It drains, or no replica is ready.", _state("not_ready"), has_key=False),
    }
    return _open("getReadiness", "Whether new work is welcome", "For readiness probes and load balancers.", answers)


def _document() -> Json:
    content = {"application/json": {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}}}
    answers = {"200": answer("The document.", content, has_key=False, headers=("ETag", "Cache-Control"))}
    return _open("getDocument", "This document", "The tenant API in OpenAPI 3.1.", answers)


SURFACE = SurfaceDescription(
    name=_TAG,
    description="Probes and this document; no key is needed.",
    page="api.md",
    paths={
        "/healthz": {"get": _healthz()},
        "/readyz": {"get": _readyz()},
        "/openapi.json": {"get": _document()},
    },
)
