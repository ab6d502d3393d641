"""`weir key`: create, list and revoke API keys through the management API. A secret is printed once, at its creation."""

from typing import Annotated

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, yes_or_blank

commands = typer.Typer(no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(help="The tenant's name.")]
Application = Annotated[str, typer.Argument(help="The application's name.")]


def _path(tenant: str, application: str) -> str:
    return f"/admin/v1/tenants/{segment(tenant)}/applications/{segment(application)}/keys"


@commands.command()
@connected(admin_connection)
def create(connection: Connection, tenant: Tenant, application: Application) -> None:
    """Create an API key; its secret is shown this once."""
    print_json(connection.call("POST", _path(tenant, application)))


@commands.command("list")
@connected(admin_connection)
def list_keys(connection: Connection, tenant: Tenant, application: Application, as_json: JsonOption = False) -> None:
    """List an application's keys."""
    keys = connection.call("GET", _path(tenant, application))["keys"]
    if as_json:
        print_json(keys)
    else:
        print_table(("key", "revoked"), [(key["id"], yes_or_blank(key["revoked"])) for key in keys])


@commands.command()
@connected(admin_connection)
def revoke(
    connection: Connection,
    tenant: Tenant,
    application: Application,
    key_id: Annotated[str, typer.Argument(help="The key's public id.")],
) -> None:
    """Revoke an API key and cancel its running work."""
    print_json(connection.call("DELETE", f"{_path(tenant, application)}/{segment(key_id)}"))
