"""`weir batch`: give the requests of a file to the tenant API, see how far they are, give them up, fetch their answers.

Scripts read standard output: `submit` writes the batch's id there and nothing else.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli import batch_words as words
from weir.cli.admin_client import JsonOption
from weir.cli.batch_results import results
from weir.cli.batch_upload import FILES_PATH, InputFile, endpoint_of, opened, upload
from weir.cli.batch_watch import INTERRUPTED, BatchId, watch, watched
from weir.cli.batch_words import Batch, batch_of
from weir.cli.generate import api_connection
from weir.cli.http_api import CommandFailed, Connection, Refused, connected, segment
from weir.cli.tables import plain, print_json, print_table, thousands
from weir.clock import SystemClock

BATCHES_PATH = "/v1/batches"
PAGE_MAX, LIST_MAX = 100, 1_000
_SERVER_FAULT = 500

commands = typer.Typer(no_args_is_help=True)


@commands.command()
@connected(api_connection)
def submit(
    connection: Connection,
    file: Annotated[Path, typer.Argument(help="Its requests, one JSON object a line.")],
    endpoint: Annotated[str | None, typer.Option(help="What its lines ask; else the url of the first one.")] = None,
    window: Annotated[str, typer.Option(help="How long it may take, like 24h, 90m or 30s.")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, shown again; repeatable.")] = None,
    watching: Annotated[bool, typer.Option("--watch", help="Watch it until it is over.")] = False,
) -> None:
    """Upload a file and create a batch of its lines; prints the batch's id."""
    order = {"completion_window": window, "metadata": dict(map(_label, metadata)) if metadata else None}
    with opened(file) as content:
        order["endpoint"] = endpoint or endpoint_of(content)
        file_id = _uploaded(connection, content)
    batch = _created(connection, {name: value for name, value in order.items() if value is not None}, file_id)
    print(batch.id, flush=True)
    expires = "" if batch.expires_s is None else f"; expires {words.moment(batch.expires_s)}"
    _tell(f"{file.name} is {file_id}; {thousands(batch.total)} lines for {batch.endpoint}{expires}")
    if watching:
        raise typer.Exit(watched(connection, batch.id, sys.stderr))


def _label(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not (name and is_there):
        raise CommandFailed(f"--metadata takes NAME=VALUE, not {text!r}.")
    return name, value


def _uploaded(connection: Connection, file: InputFile) -> str:
    """The id of the file there."""
    try:
        document = upload(connection, file)
    except KeyboardInterrupt:
        _tell("Nothing was submitted.")
        raise typer.Exit(INTERRUPTED) from None
    if not isinstance(document, dict) or not isinstance(document.get("id"), str):
        raise CommandFailed("The answer is no file.")
    return plain(document["id"])


def _created(connection: Connection, order: dict[str, Any], file_id: str) -> Batch:
    """A batch that was refused leaves no file behind; where nobody knows whether it was created, the file stays."""
    try:
        return batch_of(connection.call("POST", BATCHES_PATH, order | {"input_file_id": file_id}))
    except Refused as refused:
        if refused.status < _SERVER_FAULT:
            with suppress(CommandFailed):
                connection.call("DELETE", f"{FILES_PATH}/{segment(file_id)}")
        raise
    except CommandFailed as fault:
        raise CommandFailed(f"{fault} The file is {file_id}; `weir batch list` tells whether the batch was created.") from fault


@commands.command()
@connected(api_connection)
def status(connection: Connection, batch: BatchId, as_json: JsonOption = False) -> None:
    """Show how far a batch is."""
    document = connection.call("GET", _path(batch))
    if as_json:
        print_json(document)
        return
    found = batch_of(document)
    rows = [("batch", found.id), *words.report(found, SystemClock().wall_ms() // 1_000)]
    for label, text in rows:
        print(f"{label:<9} {text}")


@commands.command("list")
@connected(api_connection)
def list_batches(
    connection: Connection,
    limit: Annotated[int, typer.Option(min=1, max=LIST_MAX, help="At most so many, the youngest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the tenant's batches."""
    documents = _newest(connection, limit)
    if as_json:
        print_json(documents)
        return
    columns = ("batch", "state", "done", "failed", "lines", "created", "expires", "endpoint")
    print_table(columns, [_row(batch_of(document)) for document in documents], numeric=("done", "failed", "lines"))


def _newest(connection: Connection, limit: int) -> list[Any]:
    """Page after page. Raises CommandFailed."""
    found: list[Any] = []
    while len(found) < limit:
        query = {"limit": str(min(PAGE_MAX, limit - len(found))), "after": found[-1].get("id") if found else None}
        page = connection.call("GET", BATCHES_PATH, query=query)
        entries = page.get("data") if isinstance(page, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise CommandFailed("The answer is no list of batches.")
        found += entries
        if not entries or not page.get("has_more"):
            break
    return found[:limit]


def _row(batch: Batch) -> tuple[str, ...]:
    counts = (thousands(batch.done), thousands(batch.failed), thousands(batch.total))
    return batch.id, words.state(batch), *counts, words.moment(batch.created_s), words.moment(batch.expires_s), batch.endpoint


commands.command()(watch)


@commands.command()
@connected(api_connection)
def cancel(connection: Connection, batch: BatchId) -> None:
    """Give a batch up: what is done is kept."""
    found = batch_of(connection.call("POST", f"{_path(batch)}/cancel"))
    print(f"{found.id}: {words.standing(found)}")


commands.command()(results)


def _path(batch: str) -> str:
    return f"{BATCHES_PATH}/{segment(batch)}"


def _tell(sentence: str) -> None:
    """Beside what scripts read."""
    print(plain(sentence), file=sys.stderr)
