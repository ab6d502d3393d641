"""`weir alias`: what the model names that applications send mean, through the management API."""

from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, thousands

commands = typer.Typer(no_args_is_help=True)


@commands.command("list")
@connected(admin_connection)
def list_aliases(connection: Connection, as_json: JsonOption = False) -> None:
    """List all aliases and what they mean."""
    aliases = connection.call("GET", "/admin/v1/aliases")["aliases"]
    if as_json:
        print_json(aliases)
        return
    columns = ("alias", "tenant", "revision", "default output", "canary")
    print_table(columns, [_row(alias) for alias in aliases], numeric=("default output",))


def _row(alias: dict[str, Any]) -> tuple[str, ...]:
    canary = alias["canary"]
    shown = "" if canary is None else f"{canary['weight']} % {canary['revision']} ({canary['rollout']})"
    return alias["name"], alias["tenant"] or "", alias["revision"], thousands(alias["default_max_output_tokens"]), shown


@commands.command("set")
@connected(admin_connection)
def set_alias(
    connection: Connection,
    name: Annotated[str, typer.Argument(help="The name that applications send.")],
    revision: Annotated[str, typer.Argument(help="The revision's id.")],
    default_max_output_tokens: Annotated[int | None, typer.Option(help="Of a request that names none; else as it was.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose name it is; else everybody's.")] = None,
) -> None:
    """Let an alias mean a revision from now on, for everybody at once; `weir rollout start` does it step by step."""
    body = {"revision": revision, "default_max_output_tokens": default_max_output_tokens, "tenant": tenant}
    print_json(connection.call("PUT", f"/admin/v1/aliases/{segment(name)}", body))
