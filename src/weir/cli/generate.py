"""`weir generate`: ask a model through the public API and stream its answer to the terminal.

Text goes to standard output as it arrives, usage and timing to standard error at the end. Ctrl-C cancels the request by its id
and still shows what it cost. The exit status is 1 unless the request completed.
"""

import http.client
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.admin_client import StateOption
from weir.cli.http_api import (
    ANSWER_BYTES_MAX,
    CommandFailed,
    Connection,
    connected,
    new_request_id,
    read_ready_file,
    refusal_sentence,
    segment,
)
from weir.cli.tables import dollars, print_json, thousands
from weir.core.request import DEADLINE_MS_MAX

STREAM_WAIT_S = 60.0
"""A running stream carries a comment at least every 10 seconds; six missed ones are a dead peer."""

_ANSWER_GRACE_S = 10.0
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def api_connection(
    state: StateOption = Path("state"),
    api: Annotated[str | None, typer.Option("--api", envvar="WEIR_API_URL", help="URL of the public API.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="WEIR_API_KEY", help="API key.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose key of the ready file to use; else the first.")] = None,
    application: Annotated[str | None, typer.Option(help="Which application's key; else the first.")] = None,
) -> Connection:
    """The public API as the options name it. Raises CommandFailed when address or key is not known."""
    if api:
        if tenant or application:
            raise CommandFailed("--tenant and --application choose a key of the ready file; with --api give --api-key.")
        if not api_key:
            raise CommandFailed("An address needs its own key: give --api-key beside --api.")
        return Connection(api, api_key)
    ready = read_ready_file(state)
    keys = (
        entry.get("key")
        for owner in ready.get("tenants", [])
        for entry in owner.get("applications", [])
        if tenant in (None, owner.get("name")) and application in (None, entry.get("name"))
    )
    if not ready.get("api"):
        raise CommandFailed("The ready file names no address of the tenant API; give one with --api, and --api-key.")
    url, key = ready.get("api"), api_key or next((key for key in keys if key), None)
    if not key:
        raise CommandFailed("The ready file names no such API key that is valid; give one with --api-key.")
    return Connection(str(url), str(key))


@connected(api_connection)
def generate(
    connection: Connection,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    alias: Annotated[str, typer.Option(help="Model alias.")] = "assistant",
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="At most this many tokens.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(min=1, max=DEADLINE_MS_MAX, help="Time to the last token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON, at its end.")] = False,
) -> None:
    """Ask a model."""
    body = {
        "request_id": new_request_id(),
        "model_alias": alias,
        "input": prompt,
        "max_output_tokens": max_output_tokens,
        "deadline_ms": deadline_ms,
        "stream": not as_json,
    }
    given = {name: value for name, value in body.items() if value is not None}
    wait_s = (deadline_ms or DEADLINE_MS_MAX) / 1_000 + _ANSWER_GRACE_S if as_json else STREAM_WAIT_S
    end = _run(replace(connection, wait_s=wait_s), given)
    if as_json:
        print_json(end)
    else:
        _show_end(end)
    if end.get("status") != "completed":
        raise typer.Exit(1)


def _run(connection: Connection, body: dict[str, Any]) -> dict[str, Any]:
    """The terminal event or the generation body. Raises CommandFailed for a refusal."""
    with connection.exchange("POST", "/v1/generations", body) as answer:
        try:
            if answer.headers.get_content_type() == "text/event-stream":
                return _stream(answer)
            return _ended(answer)
        except KeyboardInterrupt:
            cancelled = f"/v1/generations/{segment(body['request_id'])}/cancel"
            ended: dict[str, Any] = Connection(connection.url, connection.key).call("POST", cancelled)
            return ended


def _ended(answer: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        document = json.loads(answer.read(ANSWER_BYTES_MAX))
    except ValueError as unreadable:
        raise CommandFailed(f"The answer is not JSON (status {answer.status}).") from unreadable
    if isinstance(document, dict) and "finish_reason" in document:
        return document
    raise CommandFailed(refusal_sentence(document, answer.status))


def _stream(answer: http.client.HTTPResponse) -> dict[str, Any]:
    written = False
    for event, document in _events(answer):
        if event == "output":
            text = str(document["text"])
            sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            written = True
        elif event == "done":
            if written:
                print()
            return document
    raise CommandFailed("The stream ended without its terminal event.")


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream; ends with the connection."""
    event, data = "", ""
    while line := answer.readline(ANSWER_BYTES_MAX):
        name, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "data":
            data += value
        elif not name and data:
            yield event, json.loads(data)
            event, data = "", ""


def _show_end(end: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    usage, timing, failure = end.get("usage") or {}, end.get("timing") or {}, end.get("error")
    parts = [f"{end.get('status')} ({end.get('finish_reason')})"]
    if failure:
        parts.append(str(failure.get("detail") or failure.get("code")))
    if usage:
        parts.append(f"{thousands(usage['input_tokens'])} tokens in, {thousands(usage['output_tokens'])} out")
        parts.append(dollars(usage["cost_microusd"]))
    for name, label in (("queue_ms", "queued"), ("ttft_ms", "first token"), ("tpot_ms", "per token"), ("total_ms", "total")):
        if timing.get(name) is not None:
            parts.append(f"{label} {timing[name]:,.0f} ms")
    Console(stderr=True, soft_wrap=True).print(Text(" · ".join(parts), style="dim"))
