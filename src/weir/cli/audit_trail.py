"""`weir audit`: who changed what and when, newest first, through the management API."""

import json
from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected
from weir.cli.tables import print_json, print_table, thousands

_PAIRS = ("limits.put", "tenant.patch", "tenant.delete")
"""Acts whose entries hold the value before and after the change."""


@connected(admin_connection)
def audit(
    connection: Connection,
    limit: Annotated[int, typer.Option(help="At most so many changes, 1 to 1000.")] = 20,
    before: Annotated[str | None, typer.Option(help="Only changes before this time; a date or RFC 3339.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, newest first."""
    entries = connection.call("GET", "/admin/v1/audit", query={"limit": str(limit), "before": before})["entries"]
    if as_json:
        print_json(entries)
        return
    rows = [(entry["at"], entry["actor"], entry["action"], entry["subject"], _changes(entry)) for entry in entries]
    print_table(("at", "actor", "action", "subject", "change"), rows)


def _changes(entry: dict[str, Any]) -> str:
    """The fields of an entry, one after the other; of a change as what it was → what it is."""
    return ", ".join(f"{name} {_value(entry['action'], value)}" for name, value in entry["summary"].items())


def _value(action: str, value: Any) -> str:
    if action in _PAIRS and isinstance(value, list):
        return " → ".join("none" if side is None else _plain(side) for side in value)
    return _plain(value)


def _plain(value: Any) -> str:
    if type(value) is int:
        return thousands(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
