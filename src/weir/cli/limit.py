"""`weir limit`: set, show and remove limits through the management API, which alone knows what a limit may be."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected
from weir.cli.tables import print_json, print_table, thousands
from weir.core.tenancy import LIMIT_NAMES, Scope, ServiceClass

commands = typer.Typer(no_args_is_help=True)
TenantOption = Annotated[str, typer.Option("--tenant", help="The tenant that is limited.")]
OptionalName = Annotated[str | None, typer.Option()]
ClassOption = Annotated[
    ServiceClass | None, typer.Option("--service-class", help="Only requests of this class; lines of batches are `batch`.")
]

SCOPE_COLUMNS = ("tenant", "application", "key", "alias", "class")
"""How tables head what `scope_cells` gives."""

_NO_LIMIT = "none"
_SCOPE_PARTS = tuple(field.name for field in fields(Scope))


@commands.command("set")
@connected(admin_connection)
def set_limits(
    connection: Connection,
    changes: Annotated[list[str], typer.Argument(help="LIMIT=N sets, LIMIT=none removes.", metavar="LIMIT=N...")],
    tenant: TenantOption,
    application: OptionalName = None,
    key: OptionalName = None,
    alias: OptionalName = None,
    service_class: ClassOption = None,
) -> None:
    """Set limits of a tenant, or of its application, key, alias or service class; others stay."""
    _put(connection, _scope(tenant, application, key, alias, service_class), dict(_change(text) for text in changes))


@commands.command()
@connected(admin_connection)
def remove(
    connection: Connection,
    tenant: TenantOption,
    names: Annotated[list[str] | None, typer.Argument(help="None named: all.", metavar="LIMIT...")] = None,
    application: OptionalName = None,
    key: OptionalName = None,
    alias: OptionalName = None,
    service_class: ClassOption = None,
) -> None:
    """Remove limits of exactly this scope, so that it is unlimited; others stay."""
    _put(connection, _scope(tenant, application, key, alias, service_class), dict.fromkeys(names or LIMIT_NAMES))


def _scope(*parts: str | None) -> dict[str, str]:
    """The parts that are named, in the order of a scope's fields."""
    return {name: part for name, part in zip(_SCOPE_PARTS, parts, strict=True) if part is not None}


def scope_cells(scope: Mapping[str, str]) -> tuple[str, ...]:
    """A scope's parts as a table shows them; an absent one is empty."""
    return tuple(scope.get(part, "") for part in _SCOPE_PARTS)


def _put(connection: Connection, scope: dict[str, str], changes: Mapping[str, int | None]) -> None:
    print_json(connection.call("PUT", "/admin/v1/limits", {"scope": scope, **changes}))


def _change(text: str) -> tuple[str, int | None]:
    name, equals, amount = text.partition("=")
    if not equals:
        raise CommandFailed(f"{text!r} is not of the form LIMIT=N or LIMIT={_NO_LIMIT}.")
    if amount == _NO_LIMIT:
        return name, None
    try:
        return name, int(amount)
    except ValueError:
        raise CommandFailed(f"{amount!r} is not a whole number.") from None


@commands.command()
@connected(admin_connection)
def show(
    connection: Connection,
    tenant: OptionalName = None,
    application: OptionalName = None,
    key: OptionalName = None,
    alias: OptionalName = None,
    service_class: ClassOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the limits that are set."""
    query = dict(zip(_SCOPE_PARTS, (tenant, application, key, alias, service_class), strict=True))
    entries = connection.call("GET", "/admin/v1/limits", query=query)["limits"]
    if as_json:
        print_json(entries)
        return
    rows = [row for entry in entries for row in _rows(entry)]
    print_table((*SCOPE_COLUMNS, "limit", "value"), rows, numeric=("value",))


def _rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    scope = scope_cells(entry["scope"])
    return [(*scope, name, thousands(amount)) for name, amount in entry.items() if name not in ("scope", "pending")]
