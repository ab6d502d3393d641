"""Every failure of the management API as problem+json with a code of the error tree.

Whatever goes wrong (a refusal of ours, a body of the wrong shape, an unknown path, a bug) leaves here in one form. Answers name
the field and what is accepted, never the value that was sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from weir import errors
from weir.api.wire import problem
from weir.units import Bytes

BODY_BYTES_MAX: Bytes = 4 * 1024 * 1024
"""The largest evaluation set has a mebibyte, and up to three times as much where JSON escapes its characters."""

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string"},
        "detail": {"type": "string"},
        "field": {"type": "string"},
        "accepted": {},
    },
}


def problem_response(error: errors.WeirError) -> Response:
    """An error of ours as HTTP, with the headers that a 401 and a 405 owe."""
    if isinstance(field := error.members.get("field"), str):  # JSON can name a field by half a character, and nobody else
        error.members = {**error.members, "field": field.encode("utf-8", "replace").decode()}
    rendered = problem(error, now_wall_ms=0)  # no administrative refusal has a time of reset
    headers = {name.decode(): value.decode() for name, value in rendered.headers}
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.MethodNotAllowed):
        headers["allow"] = ", ".join(error.members["allowed"])
    return Response(rendered.body, rendered.status, headers, rendered.content_type.decode())


def install_problems(app: FastAPI) -> None:
    """Make every failure of the app a problem."""

    async def on_weir_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.WeirError)
        return problem_response(error)

    async def on_wrong_shape(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(_of_shape(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem_response(_of_status(request, error.status_code))

    async def on_bug(request: Request, error: Exception) -> Response:
        return problem_response(errors.InternalError())

    app.add_exception_handler(errors.WeirError, on_weir_error)
    app.add_exception_handler(RequestValidationError, on_wrong_shape)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def body_too_large() -> errors.RequestTooLarge:
    """The refusal of a body beyond the bound."""
    return errors.RequestTooLarge(f"A body may have {BODY_BYTES_MAX} bytes.", members={"limit_bytes": BODY_BYTES_MAX})


def _of_shape(found: Sequence[Mapping[str, Any]]) -> errors.WeirError:
    first = found[0]
    location = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return errors.InvalidRequest("The body is not JSON.", members={"field": "body", "accepted": "a JSON object"})
    field = ".".join(location) or str(first["loc"][0])
    if first["type"] == "missing" and not location:
        return errors.InvalidRequest("A body is needed.", members={"field": field, "accepted": "a JSON object"})
    accepted = str(first["msg"]).removeprefix("Input should be ")
    detail = f"{field} is missing." if first["type"] == "missing" else f"{field} does not have an accepted value."
    if not location:
        detail, accepted = "The body must be a JSON object, sent as application/json.", "a JSON object"
    return errors.InvalidRequest(detail, members={"field": field, "accepted": accepted})


def _of_status(request: Request, status: int) -> errors.WeirError:
    if status == errors.NotFound.http_status:
        return errors.NotFound("There is no such path.")
    if status == errors.MethodNotAllowed.http_status:
        return errors.MethodNotAllowed(members={"allowed": _allowed_methods(request)})
    if status == errors.RequestTooLarge.http_status:
        return body_too_large()
    return errors.InvalidRequest("The body cannot be read.", members={"field": "body", "accepted": "a JSON object in UTF-8"})


def _allowed_methods(request: Request) -> list[str]:
    """Methods of all routes on this path: the framework names those of the first one only."""
    matching = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods})
