"""`weir usage`: what was used and what it costs, as a table with totals, as JSON or as CSV."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from weir.cli.admin_client import admin_connection
from weir.cli.http_api import Connection, connected
from weir.cli.tables import digits_of, dollars, print_csv, print_json, print_table, thousands

_COUNTS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens")
_COSTS = ("cost_microusd", "platform_cost_microusd")
_HEADINGS = ("requests", "input", "cached", "output", "cost", "platform cost")


@connected(admin_connection)
def usage(
    connection: Connection,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Inclusive; a date (its midnight in UTC) or RFC 3339.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Exclusive; a date (its midnight in UTC) or RFC 3339.")] = None,
    group_by: Annotated[str, typer.Option(help="Columns, separated by commas.")] = "tenant,application,alias",
    as_json: Annotated[bool | None, typer.Option("--json/--csv", help="Print JSON or CSV, not a table.")] = None,
) -> None:
    """Show usage and cost."""
    query = {"tenant": tenant, "from": from_, "to": to, "group_by": group_by or None}
    rows = connection.call("GET", "/admin/v1/usage", query=query)["rows"]
    groups = group_by.split(",") if group_by else []
    if as_json is None:
        _print_report(groups, rows)
    elif as_json:
        print_json(rows)
    else:
        print_csv([*groups, *_COUNTS, *_COSTS], rows)


def _print_report(groups: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    total = {name: sum(row[name] for row in rows) for name in (*_COUNTS, *_COSTS)}
    digits = {name: max(digits_of(row[name]) for row in (*rows, total)) for name in _COSTS}

    def amounts(row: dict[str, Any]) -> list[str]:
        counts = [thousands(row[name]) for name in _COUNTS]
        return counts + [dollars(row[name], digits[name]) for name in _COSTS]

    lines = [[*(str(row[name]) for name in groups), *amounts(row)] for row in rows]
    label = ["total", *("" for _ in groups[1:])] if groups else []
    print_table([*groups, *_HEADINGS], lines, numeric=_HEADINGS, totals=[*label, *amounts(total)])
