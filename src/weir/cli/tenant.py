"""`weir tenant`: create, list, show, change, disable, enable and revoke tenants through the management API."""

from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, thousands, yes_or_blank

commands = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The tenant's name.")]
_WEIGHT_HELP = "Its share of a busy pool next to others' weights, 1 to 1000."
_LEAVES = typer.Option("--leaves-its-pools/--keeps-its-pools", help="May its work use shared pools beside its dedicated ones.")


@commands.command()
@connected(admin_connection)
def create(
    connection: Connection,
    name: Name,
    time_zone: Annotated[str, typer.Option(help="IANA time zone of its budget windows.")] = "UTC",
    external_allowed: Annotated[bool, typer.Option(help="May use models outside the platform.")] = False,
    weight: Annotated[int, typer.Option(help=_WEIGHT_HELP)] = 1,
    leaves_its_pools: Annotated[bool, _LEAVES] = False,
) -> None:
    """Create a tenant."""
    body = {
        "name": name,
        "time_zone": time_zone,
        "external_allowed": external_allowed,
        "weight": weight,
        "leaves_its_pools": leaves_its_pools,
    }
    print_json(connection.call("POST", "/admin/v1/tenants", body))


@commands.command("list")
@connected(admin_connection)
def list_tenants(connection: Connection, as_json: JsonOption = False) -> None:
    """List all tenants."""
    tenants = connection.call("GET", "/admin/v1/tenants")["tenants"]
    if as_json:
        print_json(tenants)
    else:
        columns = ("tenant", "time zone", "weight", "state", "external")
        print_table(columns, [_row(tenant) for tenant in tenants], numeric=("weight",))


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    state = "revoked" if tenant["revoked"] else "disabled" if tenant["disabled"] else "active"
    return tenant["name"], tenant["time_zone"], thousands(tenant["weight"]), state, yes_or_blank(tenant["external_allowed"])


@commands.command()
@connected(admin_connection)
def show(connection: Connection, name: Name) -> None:
    """Show one tenant."""
    print_json(connection.call("GET", f"/admin/v1/tenants/{segment(name)}"))


@commands.command("set")
@connected(admin_connection)
def change(
    connection: Connection,
    name: Name,
    time_zone: Annotated[str | None, typer.Option(help="IANA time zone; it takes effect at the next budget windows.")] = None,
    external_allowed: Annotated[bool | None, typer.Option(help="May use models outside the platform.")] = None,
    weight: Annotated[int | None, typer.Option(help=_WEIGHT_HELP)] = None,
    leaves_its_pools: Annotated[bool | None, _LEAVES] = None,
) -> None:
    """Change what is given of a tenant; the rest stays."""
    body = {
        "time_zone": time_zone,
        "external_allowed": external_allowed,
        "weight": weight,
        "leaves_its_pools": leaves_its_pools,
    }
    print_json(connection.call("PATCH", f"/admin/v1/tenants/{segment(name)}", body))


@commands.command()
@connected(admin_connection)
def disable(connection: Connection, name: Name) -> None:
    """Admit nothing more for a tenant; what runs may finish."""
    print_json(connection.call("PATCH", f"/admin/v1/tenants/{segment(name)}", {"disabled": True}))


@commands.command()
@connected(admin_connection)
def enable(connection: Connection, name: Name) -> None:
    """Take a disabling back."""
    print_json(connection.call("PATCH", f"/admin/v1/tenants/{segment(name)}", {"disabled": False}))


@commands.command()
@connected(admin_connection)
def revoke(connection: Connection, name: Name) -> None:
    """End a tenant for good and cancel its running work."""
    print_json(connection.call("POST", f"/admin/v1/tenants/{segment(name)}/revoke"))
