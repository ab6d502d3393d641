"""`weir app`: create and list a tenant's applications through the management API."""

from typing import Annotated

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, yes_or_blank
from weir.core.tenancy import ServiceClass

commands = typer.Typer(no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(help="The tenant's name.")]


@commands.command()
@connected(admin_connection)
def create(
    connection: Connection,
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="The application's name.")],
    service_class: Annotated[ServiceClass, typer.Option(help="What its requests are.")] = ServiceClass.INTERACTIVE,
    alias: Annotated[list[str] | None, typer.Option(help="An alias it may use; repeat for more; none given: all.")] = None,
) -> None:
    """Create an application."""
    body = {"name": name, "service_class": service_class.value, "aliases": alias or None}
    print_json(connection.call("POST", f"/admin/v1/tenants/{segment(tenant)}/applications", body))


@commands.command("list")
@connected(admin_connection)
def list_applications(connection: Connection, tenant: Tenant, as_json: JsonOption = False) -> None:
    """List a tenant's applications."""
    applications = connection.call("GET", f"/admin/v1/tenants/{segment(tenant)}/applications")["applications"]
    if as_json:
        print_json(applications)
        return
    rows = [
        (entry["name"], entry["service_class"], ", ".join(entry.get("aliases", ["(all)"])), yes_or_blank(entry["revoked"]))
        for entry in applications
    ]
    print_table(("application", "service class", "aliases", "revoked"), rows)
