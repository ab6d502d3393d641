"""Responses of an operation: what it answers when all is well, and its refusals, grouped by status with the codes of each.

A surface names the error classes that a path can answer; their statuses, headers and meanings come from the error tree.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weir import errors
from weir.api.openapi.error_guide import ENDINGS, GUIDE, Wait, codes_of
from weir.api.openapi.json_schema import Json, answer_object, only, ref, text
from weir.api.openapi.shared_parts import LIMIT_HEADERS, RETRY_HEADERS, header_refs
from weir.core.endings import EndingRule
from weir.errors import WeirError

Errors = tuple[type[WeirError], ...]
Answers = dict[str, Json]
"""Status → response."""

CONNECTION: Errors = (errors.InvalidRequest, errors.RequestTooLarge)
"""Of any request that is not HTTP, or not within its bounds: always as problem+json, whatever the path."""
EVERYWHERE: Errors = (*CONNECTION, errors.Shutdown, errors.InternalError)
WITH_KEY: Errors = (errors.Unauthenticated, errors.Forbidden, errors.Revoked, errors.IssuerUnavailable, *EVERYWHERE)
"""Of every path that needs a key."""
LOOKUP: Errors = (errors.NotFound, errors.LedgerUnavailable, errors.CoordinatorLost, *WITH_KEY)
"""Of a path that reads a record."""
KEPT: Errors = (errors.StreamStoreUnavailable, *LOOKUP)
"""Of a path that reads what may be kept beside a record."""
RETAINED: Errors = (errors.StreamNotRetained, *KEPT)
"""Of a path to a retained stream."""
FOLLOWED: Errors = (errors.QueueFull, *RETAINED)
"""Of a path that shows one."""
ADMISSION: Errors = (
    *WITH_KEY,
    errors.UnsupportedField,
    errors.InputTooLong,
    errors.DeadlineInfeasible,
    errors.ExceedsLimitCapacity,
    errors.UnknownAlias,
    errors.RequestInFlight,
    errors.OutputNotRetained,
    errors.RequestIdReused,
    errors.Quarantined,
    *errors.Rejected.__subclasses__(),
    errors.LedgerUnavailable,
    errors.CoordinatorLost,
)
"""Of every path that asks for a generation, before anything is taken."""
ENDED: Errors = tuple({rule.error: None for rule in ENDINGS if rule.error is not None})
"""What an admitted request ends with where it does not complete: refusals and endings are one on compatible paths."""

_UNNAMED = "message"
"""How readers call an event that has no name."""


@dataclass(frozen=True)
class Shape:
    """How a surface shows an error. schema_of: the body's schema for these codes of one status."""

    media_type: str
    schema_of: Callable[[int, list[str]], Json]


def _problem(status: int, codes: list[str]) -> Json:
    narrowed = {"properties": {"status": {"const": status}, "code": {"enum": codes}}}
    return {"allOf": [ref("Problem"), narrowed]}


def _openai_error(_: int, codes: list[str]) -> Json:
    error = {"allOf": [ref("OpenAIError"), {"properties": {"code": {"enum": codes}}}]}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def anthropic_failure(error: Json) -> Json:
    """Anthropic's object around an error, which its `error` event has too."""
    fields = {
        "type": only("What this is.", "error", "string"),
        "error": error,
        "request_id": text("The request's id, as in the headers.", shortest=1),
    }
    return answer_object("A failure.", fields, list(fields))


def _anthropic_error(_: int, codes: list[str]) -> Json:
    return anthropic_failure({"allOf": [ref("AnthropicError"), {"properties": {"code": {"enum": codes}}}]})


def _error_by_version(status: int, codes: list[str]) -> Json:
    return {"anyOf": [_openai_error(status, codes), _anthropic_error(status, codes)]}


PROBLEM = Shape("application/problem+json", _problem)
OPENAI = Shape("application/json", _openai_error)
ANTHROPIC = Shape("application/json", _anthropic_error)
BY_VERSION = Shape("application/json", _error_by_version)
"""Anthropic's where the request names a version of its API, else OpenAI's."""


def refusals(shape: Shape, tree: Errors) -> Answers:
    """A response for each status of these errors."""
    by_status: dict[int, list[type[WeirError]]] = {}
    for error in dict.fromkeys(tree):
        by_status.setdefault(error.http_status, []).append(error)
    return {str(status): _refusal(shape, status, group) for status, group in sorted(by_status.items())}


def _refusal(shape: Shape, status: int, group: list[type[WeirError]]) -> Json:
    codes = codes_of(tuple(group))
    said = "\n".join(f"- `{error.code}`: {GUIDE[error].meaning}" for error in group)
    return {
        "description": f"{group[0].title if len(group) == 1 else 'One of these codes'}.\n\n{said}",
        "headers": _headers_of(status, group),
        "content": {shape.media_type: {"schema": shape.schema_of(status, codes)}},
        "x-weir-codes": codes,
    }


def _headers_of(status: int, group: list[type[WeirError]]) -> Json:
    names = ["x-request-id", "request-id"]
    if status == errors.Unauthenticated.http_status:
        return header_refs(*names, "WWW-Authenticate")
    names += LIMIT_HEADERS
    if any(GUIDE[error].wait is not Wait.NONE for error in group):
        names += RETRY_HEADERS
    elif status >= 500 or any(error.should_retry is not None for error in group):
        names.append("x-should-retry")
    return header_refs(*names)


def native_endings() -> Answers:
    """What an admitted request that did not complete answers on native paths: its record, with the status of its ending."""
    by_status: dict[int, list[EndingRule]] = {}
    for rule in ENDINGS:
        if rule.http_status != 200:
            by_status.setdefault(rule.http_status, []).append(rule)
    return {str(status): _ending(status, rules) for status, rules in sorted(by_status.items())}


def _ending(status: int, rules: list[EndingRule]) -> Json:
    tree = [rule.error for rule in rules if rule.error]
    codes = codes_of(tuple(tree))
    error = {"properties": {"code": {"enum": codes}}}
    schema = {"allOf": [ref("Generation"), {"required": ["error"], "properties": {"error": error}}]}
    said = "\n".join(f"- `{rule.error.code}`, ended {rule.status} as `{rule.reason}`" for rule in rules if rule.error)
    return {
        "description": f"It was admitted, and its record tells in `error` how it ended:\n\n{said}",
        "headers": _headers_of(status, tree),
        "content": {"application/json": {"schema": schema}},
        "x-weir-codes": codes,
    }


def answer(description: str, content: Mapping[str, Json], *, has_key: bool = True, headers: Iterable[str] = ()) -> Json:
    """A response that is no refusal. content: media type → its object. has_key: the caller is known, and its limits shown."""
    shown = ("x-request-id", "request-id", *(LIMIT_HEADERS if has_key else ()), *headers)
    return {"description": description, "headers": header_refs(*shown), "content": dict(content)}


def events(*kinds: Json) -> Json:
    """A stream's media type object: its schema is that of each of its events, as OpenAPI 3.1 readers take it."""
    return {"schema": {"anyOf": list(kinds)}}


def event(description: str, content: Json, *, name: str | None = None, numbered: bool = False) -> Json:
    """One kind of server-sent event. content: what its `data`, which is JSON, holds."""
    content_is_json = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return _event(description, content_is_json, name, numbered)


def last_event(description: str, word: str) -> Json:
    """One whose `data` is a word and no JSON."""
    return _event(description, {"type": "string", "const": word}, None, numbered=False)


def _event(description: str, data: Json, name: str | None, numbered: bool) -> Json:
    fields: Json = {"data": data, "event": {"type": "string", "const": name or _UNNAMED}}
    if numbered:
        fields["id"] = {"type": "string", "pattern": "^(0|[1-9][0-9]*)$"}
    needed = [field for field in fields if name or field != "event"]
    return {"type": "object", "description": description, "required": needed, "properties": fields}


def together(*parts: Mapping[str, Json]) -> Answers:
    """All responses of an operation, by status. Bodies of one status stand beside each other, by media type."""
    merged: Answers = {}
    for part in parts:
        for status, response in part.items():
            merged[status] = _beside(merged[status], response) if status in merged else response
    return dict(sorted(merged.items()))


def _beside(one: Json, other: Json) -> Json:
    assert not one["content"].keys() & other["content"].keys(), "one media type has one schema"
    codes = list(dict.fromkeys((*one.get("x-weir-codes", ()), *other.get("x-weir-codes", ()))))
    return {
        "description": f"{one['description']}\n\n{other['description']}",
        "headers": {**one["headers"], **other["headers"]},
        "content": {**one["content"], **other["content"]},
        **({"x-weir-codes": codes} if codes else {}),
    }
