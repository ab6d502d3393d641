"""`weir tenant`: create, list, show, change, disable, enable, revoke and delete tenants through the management API."""

import sys
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.tables import print_json, print_table, thousands, yes_or_blank

commands = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The tenant's name.")]
_WEIGHT_HELP = "Its share of a busy pool next to others' weights, 1 to 1000."
_LEAVES = typer.Option("--leaves-its-pools/--keeps-its-pools", help="May its work use shared pools beside its dedicated ones.")
_SECONDS = typer.Option(help="How long after its end a stream that it asks to retain is kept, up to 7 days.")
_BYTES = typer.Option(help="Of all its retained streams, as they are stored; at least 64 KiB.")
_GRACE = typer.Option(help="How long a retained stream that nobody reads goes on, up to an hour.")


@commands.command()
@connected(admin_connection)
def create(
    connection: Connection,
    name: Name,
    time_zone: Annotated[str, typer.Option(help="IANA time zone of its budget windows.")] = "UTC",
    external_allowed: Annotated[bool, typer.Option(help="May use models outside the platform.")] = False,
    weight: Annotated[int, typer.Option(help=_WEIGHT_HELP)] = 1,
    leaves_its_pools: Annotated[bool, _LEAVES] = False,
    retention_seconds: Annotated[int | None, _SECONDS] = None,
    retention_bytes: Annotated[int | None, _BYTES] = None,
    resume_grace_seconds: Annotated[int | None, _GRACE] = None,
) -> None:
    """Create a tenant."""
    body = {
        "name": name,
        "time_zone": time_zone,
        "external_allowed": external_allowed,
        "weight": weight,
        "leaves_its_pools": leaves_its_pools,
        "retention": _given(retention_seconds, retention_bytes, resume_grace_seconds) or None,
    }
    print_json(connection.call("POST", "/admin/v1/tenants", body))


def _given(seconds: int | None, of_bytes: int | None, grace_seconds: int | None) -> dict[str, int]:
    """The fields of a retention that the options name; what is missing or out of range is the cell's to refuse."""
    fields = {"seconds": seconds, "bytes": of_bytes, "resume_grace_seconds": grace_seconds}
    return {name: value for name, value in fields.items() if value is not None}


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
    retention_seconds: Annotated[int | None, _SECONDS] = None,
    retention_bytes: Annotated[int | None, _BYTES] = None,
    resume_grace_seconds: Annotated[int | None, _GRACE] = None,
    no_retention: Annotated[bool, typer.Option("--no-retention", help="Retain nothing from now on.")] = False,
) -> None:
    """Change what is given of a tenant; the rest stays."""
    body: dict[str, Any] = {
        "time_zone": time_zone,
        "external_allowed": external_allowed,
        "weight": weight,
        "leaves_its_pools": leaves_its_pools,
    }
    path, asked = f"/admin/v1/tenants/{segment(name)}", _given(retention_seconds, retention_bytes, resume_grace_seconds)
    if asked and no_retention:
        raise CommandFailed("--no-retention goes with none of --retention-seconds, --retention-bytes, --resume-grace-seconds.")
    if asked:
        body["retention"] = (connection.call("GET", path)["retention"] or {}) | asked
    if no_retention:
        body["retention"] = None
    print_json(connection.call("PATCH", path, body))


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


@commands.command()
@connected(admin_connection)
def delete(
    connection: Connection, name: Name, yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False
) -> None:
    """End a tenant for good, cancel its running work and show it no more; its usage stays, and so does its name."""
    if not yes and not _agreed(f"Delete tenant {name} for good? What it runs is cancelled, and nobody gets its name again."):
        raise CommandFailed("Nothing was deleted: that needs a y, or --yes.")
    print_json(connection.call("DELETE", f"/admin/v1/tenants/{segment(name)}"))


def _agreed(question: str) -> bool:
    """Whether a person says yes to it. Standard output stays the answer's alone; a script that says nothing says no."""
    print(f"{question} [y/N]", file=sys.stderr)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
