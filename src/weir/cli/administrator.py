"""`weir admin-key`: create, list and revoke the keys of administrators. A secret is printed once, at its creation."""

from typing import Annotated

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, yes_or_blank
from weir.core.tenancy import Role

commands = typer.Typer(no_args_is_help=True)
_PATH = "/admin/v1/admin-keys"


@commands.command()
@connected(admin_connection)
def create(
    connection: Connection,
    actor: Annotated[str, typer.Argument(help="The administrator, as the audit trail shows them.")],
    role: Annotated[Role, typer.Option("--role", help="What they may do.")],
) -> None:
    """Create an administrator's key; its secret is shown this once."""
    print_json(connection.call("POST", _PATH, {"actor": actor, "role": role.value}))


@commands.command("list")
@connected(admin_connection)
def list_keys(connection: Connection, as_json: JsonOption = False) -> None:
    """List the keys of administrators."""
    keys = connection.call("GET", _PATH)["admin_keys"]
    if as_json:
        print_json(keys)
    else:
        rows = [(key["id"], key["actor"], key["role"], yes_or_blank(key["revoked"])) for key in keys]
        print_table(("key", "actor", "role", "revoked"), rows)


@commands.command()
@connected(admin_connection)
def revoke(
    connection: Connection,
    key_id: Annotated[str, typer.Argument(help="The key's public id.")],
) -> None:
    """Revoke an administrator's key; the last owner's stays."""
    print_json(connection.call("DELETE", f"{_PATH}/{segment(key_id)}"))
