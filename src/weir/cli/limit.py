"""`weir limit`: set and show limits through the management API, which alone knows what a limit may be."""

from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected
from weir.cli.tables import print_json, print_table, thousands

commands = typer.Typer(no_args_is_help=True)
OptionalName = Annotated[str | None, typer.Option()]

_NO_LIMIT = "none"


@commands.command("set")
@connected(admin_connection)
def set_limits(
    connection: Connection,
    changes: Annotated[list[str], typer.Argument(help="LIMIT=N sets, LIMIT=none removes.", metavar="LIMIT=N...")],
    tenant: Annotated[str, typer.Option(help="The tenant that is limited.")],
    application: OptionalName = None,
    key: OptionalName = None,
    alias: OptionalName = None,
) -> None:
    """Set limits of a tenant, or of its application, key or alias; others stay."""
    named = {"tenant": tenant, "application": application, "key": key, "alias": alias}
    scope = {part: name for part, name in named.items() if name is not None}
    print_json(connection.call("PUT", "/admin/v1/limits", {"scope": scope, **dict(_change(text) for text in changes)}))


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
    as_json: JsonOption = False,
) -> None:
    """Show the limits that are set."""
    query = {"tenant": tenant, "application": application, "key": key, "alias": alias}
    entries = connection.call("GET", "/admin/v1/limits", query=query)["limits"]
    if as_json:
        print_json(entries)
        return
    rows = [row for entry in entries for row in _rows(entry)]
    print_table(("tenant", "application", "key", "alias", "limit", "value"), rows, numeric=("value",))


def _rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    scope = tuple(entry["scope"].get(part, "") for part in ("tenant", "application", "key", "alias"))
    return [(*scope, name, thousands(amount)) for name, amount in entry.items() if name not in ("scope", "pending")]
