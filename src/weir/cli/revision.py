"""`weir model`: register, show, approve and end revisions through the management API; make a key and sign a folder without it.

Paths are made absolute, because control reads the files itself: a folder is registered from a machine that control runs on, or
from a disk that both see.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.sign_folder import keygen, sign
from weir.cli.tables import print_json, print_table
from weir.core.registry.golden_set import SET_BYTES_MAX
from weir.core.registry.model import EngineKind

REGISTER_WAIT_S = 3_600.0
"""Control reads and copies the whole artifact before it answers: 200 GB at 60 MB/s."""
_DIGEST_CHARACTERS = len("sha256:") + 12

commands = typer.Typer(no_args_is_help=True)
commands.command()(keygen)
commands.command()(sign)
Revision = Annotated[str, typer.Argument(help="The revision's id.")]


@commands.command()
@connected(admin_connection)
def register(
    connection: Connection,
    name: Annotated[str, typer.Option(help="What to call the model; the id adds a digest of all that never changes.")],
    engine: Annotated[EngineKind, typer.Option(help="What runs it.")],
    input_microusd: Annotated[int, typer.Option("--input", help="Micro-dollars per million input tokens.")],
    cached_input_microusd: Annotated[int, typer.Option("--cached-input", help="Of those that were in the prefix cache.")],
    output_microusd: Annotated[int, typer.Option("--output", help="Micro-dollars per million output tokens.")],
    batch_percent: Annotated[int | None, typer.Option(help="What part of it batch requests pay; else all of it.")] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="The signed folder; none for a served model.")] = None,
    signature: Annotated[Path | None, typer.Option(help="The folder's signature.")] = None,
    file: Annotated[str | None, typer.Option(help="The file in it that llama.cpp loads, if there are several.")] = None,
    served: Annotated[str | None, typer.Option(help="What an engine behind a URL calls the model.")] = None,
    external: Annotated[bool, typer.Option("--external", help="It runs outside the platform.")] = False,
    context_tokens: Annotated[int | None, typer.Option(help="The window, input and output together.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="The most output; else the window.")] = None,
    typical_output_tokens: Annotated[int | None, typer.Option(help="Usual output; else a quarter of the most.")] = None,
    base_model: Annotated[bool, typer.Option("--base-model", help="It takes plain prompts only, no conversations.")] = False,
    argument: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: how the engine runs it (repeatable).")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="A JSONL file of cases, asked before its first request.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whom it belongs to; else to all.")] = None,
    adapter_of: Annotated[str | None, typer.Option(help="The revision whose model this adapter changes.")] = None,
) -> None:
    """Verify a signed model, keep a copy of it and record it as a revision; it serves once another person approved it."""
    price = {
        "input_microusd": input_microusd,
        "cached_input_microusd": cached_input_microusd,
        "output_microusd": output_microusd,
        "batch_percent": batch_percent,
    }
    body = {
        "name": name,
        "engine": engine.value,
        "price": price,
        "folder": _absolute(folder),
        "signature": _absolute(signature),
        "artifact": file,
        "served": served,
        "external": external,
        "context_tokens": context_tokens,
        "max_output_tokens": max_output_tokens,
        "typical_output_tokens": typical_output_tokens,
        "chat": not base_model,
        "arguments": dict(_argument(text) for text in argument or ()),
        "evaluation": None if evaluation is None else _cases(evaluation),
        "tenant": tenant,
        "adapter_of": adapter_of,
    }
    print_json(replace(connection, wait_s=REGISTER_WAIT_S).call("POST", "/admin/v1/revisions", body))


def _absolute(path: Path | None) -> str | None:
    """Links are left as they are: control refuses them with its own reason."""
    return None if path is None else str(path.absolute())


def _argument(text: str) -> tuple[str, bool | int | float | str]:
    """A number, true or false as what it is, everything else as text."""
    name, equals, written = text.partition("=")
    if not (name and equals):
        raise CommandFailed(f"{text!r} is not of the form NAME=VALUE.")
    try:
        value = json.loads(written)
    except ValueError:
        return name, written
    return name, value if isinstance(value, bool | int | float) else written


def _cases(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(SET_BYTES_MAX + 1)
        return content.decode()
    except OSError as fault:
        raise CommandFailed(f"The evaluation set cannot be read: {fault.strerror}.") from None
    except UnicodeDecodeError:
        raise CommandFailed("The evaluation set is not UTF-8.") from None


@commands.command("list")
@connected(admin_connection)
def list_revisions(connection: Connection, as_json: JsonOption = False) -> None:
    """List all revisions with their state, and whether anybody vouched for what they run."""
    revisions = connection.call("GET", "/admin/v1/revisions")["revisions"]
    if as_json:
        print_json(revisions)
        return
    columns = ("revision", "state", "engine", "artifact", "tenant", "adapter of", "registered by", "approved by")
    print_table(columns, [_row(revision) for revision in revisions])


def _row(revision: dict[str, Any]) -> tuple[str, ...]:
    digest = revision["artifact_digest"][:_DIGEST_CHARACTERS]
    people = (revision[name] or "" for name in ("tenant", "adapter_of", "registered_by", "approved_by"))
    return revision["id"], revision["state"], revision["engine"], digest, *people


@commands.command()
@connected(admin_connection)
def show(connection: Connection, revision: Revision) -> None:
    """Show one revision: everything that makes it what it is."""
    print_json(connection.call("GET", _path(revision)))


@commands.command()
@connected(admin_connection)
def approve(connection: Connection, revision: Revision) -> None:
    """Let a registered revision serve; needs another administrator than the one who registered it."""
    print_json(connection.call("POST", f"{_path(revision)}/approve"))


@commands.command()
@connected(admin_connection)
def retire(connection: Connection, revision: Revision) -> None:
    """End a revision's service once nothing needs it; what runs may finish."""
    print_json(connection.call("POST", f"{_path(revision)}/retire"))


@commands.command()
@connected(admin_connection)
def revoke(connection: Connection, revision: Revision) -> None:
    """End a revision and its adapters for good and cancel their running work."""
    print_json(connection.call("POST", f"{_path(revision)}/revoke"))


def _path(revision: str) -> str:
    return f"/admin/v1/revisions/{segment(revision)}"
