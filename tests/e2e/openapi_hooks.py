"""What a run of schemathesis changes in its requests and in the document: loaded by its process, and never by a test.

What is right in a request is made servable: an alias that exists, a short output, a deadline that can be met, an id that is not
another body's, and whole numbers without a fraction, which JSON Schema cannot ask for. What is wrong in it stays wrong.
"""

import re
from itertools import count
from typing import Any

import schemathesis
from schemathesis import Case, HookContext
from tests.e2e.openapi_aliases import ALIAS, VECTORS
from tests.e2e.openapi_closing import close_answers

from weir.api.functions import NAME_PATTERN
from weir.api.generations import ALIAS_CHARS_MAX, OUTPUT_TOKENS_MAX, is_request_id
from weir.core.batches.completion_window import WINDOW_PATTERN
from weir.core.demands import CHOICES_MAX
from weir.core.request import DEADLINE_MS_MAX

OUTPUT_TOKENS = 4
DEADLINE_MS = 600_000
ALIAS_FIELDS = ("model_alias", "model")
CHOICE_FIELDS = ("n", "best_of")
"""The simulated engine makes one choice, and the two must be the same, which a schema cannot say."""
OURS = "req-"
MESSAGES, MODELS, EMBEDDINGS, FILES = "/v1/messages", "/v1/models", "/v1/embeddings", "/v1/files"
LINE = f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{{"model":"{ALIAS}","prompt":"a","max_tokens":1}}}}'
WINDOW = "24h"
PAGING, VERSION = ("limit", "after_id", "before_id"), "anthropic-version"
BOUND_FIELDS = ("max_output_tokens", "max_tokens", "max_completion_tokens")

_numbers = count(1)
_used: set[str] = set()


@schemathesis.hook
def before_load_schema(_: HookContext, document: dict[str, Any]) -> None:
    """Allow an answer no field that the document does not have."""
    close_answers(document)


@schemathesis.hook
def filter_headers(_: HookContext, headers: dict[str, Any] | None) -> bool:
    """Whether the values arrive as they were made: blanks around one are no part of it, so a wrong one might arrive right."""
    texts = [value for value in (headers or {}).values() if isinstance(value, str)]
    return all(text == text.strip() for text in texts)


@schemathesis.hook
def before_call(_: HookContext, case: Case[Any], __: dict[str, Any]) -> None:
    """Let what is right in a request be served, and soon."""
    body: Any = _whole_as_whole(case.body)
    if isinstance(body, dict):
        _make_servable(body, VECTORS if case.operation.path == EMBEDDINGS else ALIAS)
        if case.operation.path.startswith(MESSAGES):
            _make_conversation(body.get("messages"))
        if case.operation.path == FILES:
            _make_lines(body)
        case.body = body
    headers: Any = case.headers or {}
    if case.operation.path == MODELS and case.query:
        _make_page(case)
    deadline = str(headers.get("weir-deadline-ms", ""))
    if deadline.isdecimal() and 1 <= int(deadline) <= DEADLINE_MS_MAX:
        headers["weir-deadline-ms"] = str(DEADLINE_MS)
    if is_request_id(given := headers.get("Idempotency-Key")):
        headers["Idempotency-Key"] = _unused(given)


def _make_servable(body: dict[str, Any], alias: str) -> None:
    for name in ALIAS_FIELDS:
        if isinstance(body.get(name), str) and 1 <= len(body[name]) <= ALIAS_CHARS_MAX:
            body[name] = alias
    for name in BOUND_FIELDS:
        if _is_whole(body.get(name), OUTPUT_TOKENS_MAX):
            body[name] = min(body[name], OUTPUT_TOKENS)
    for name in CHOICE_FIELDS:
        if _is_whole(body.get(name), CHOICES_MAX):
            body[name] = 1
    if _is_whole(body.get("deadline_ms"), DEADLINE_MS_MAX):
        body["deadline_ms"] = DEADLINE_MS
    if is_request_id(given := body.get("request_id")):
        body["request_id"] = _unused(given)
    if isinstance(window := body.get("completion_window"), str) and window and re.search(WINDOW_PATTERN, window):
        body["completion_window"] = WINDOW
    _name_tools(body)


def _make_lines(body: dict[str, Any]) -> None:
    """A file of lines: a schema cannot say what is in it."""
    if isinstance(given := body.get("file"), str) and given:
        body["file"] = LINE


def _make_conversation(turns: Any) -> None:
    """Results before text, and a user's turn behind the assistant's last: a schema cannot say where in a list something is."""
    if not isinstance(turns, list):
        return
    for turn in turns:
        blocks = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks):
            blocks.sort(key=lambda block: block.get("type") == "text")
    if turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
        turns.append({"role": "user", "content": ""})


def _make_page(case: Case[Any]) -> None:
    """A page is Anthropic's, and has one end: else the query is not looked at, or two of its parts exclude each other."""
    case.query = _whole_as_whole(dict(case.query))
    if case.query.keys() & set(PAGING):
        given: Any = case.headers or {}
        given[VERSION] = "2023-06-01"
        case.headers = given
    if "after_id" in case.query:
        case.query.pop("before_id", None)


def _name_tools(body: dict[str, Any]) -> None:
    """Each tool another name, and the chosen one that of a tool: a schema cannot compare two values."""
    tools = body.get("tools")
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    functions = [tool.get("function", tool) for tool in listed]
    named = [function for function in functions if isinstance(function, dict) and _is_name(function.get("name"))]
    for number, function in enumerate(named):
        function["name"] = f"tool-{number}"
    choice = body.get("tool_choice")
    chosen = choice.get("function", choice) if isinstance(choice, dict) else None
    if isinstance(chosen, dict) and _is_name(chosen.get("name")) and named:
        chosen["name"] = named[0]["name"]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(NAME_PATTERN, value) is not None


def _whole_as_whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole_as_whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole_as_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(value: Any, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= high


def _unused(request_id: str) -> str:
    """The id as it is the first time, so that its bounds are tried; else one of its own, as for one that an answer told."""
    is_used = request_id in _used or request_id.startswith(OURS)
    unused = f"again-{next(_numbers)}" if is_used else request_id
    _used.add(unused)
    return unused
