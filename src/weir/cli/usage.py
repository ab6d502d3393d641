"""`weir usage`: what was used and what it costs, as a table with totals in dollars, as JSON, or as a file.

Files come as the management API writes them: the same columns, amounts in whole micro-dollars.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli.admin_client import AdminKeyOption, AdminOption, JsonOption, StateOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected
from weir.cli.tables import digits_of, dollars, print_json, print_table, thousands

REPORT_WAIT_S = 90.0
"""A report over years of a busy cell may take its database a minute."""

_COUNTS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens")
_COSTS = ("cost_microusd", "platform_cost_microusd")
_HEADINGS = ("requests", "input", "cached", "output", "cost", "platform cost")


@dataclass(frozen=True, slots=True)
class _Report:
    """Whom to ask for usage, of whom and when."""

    connection: Connection
    query: dict[str, str | None]


def _report(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Inclusive; a date (its midnight in UTC) or RFC 3339.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Exclusive; a date (its midnight in UTC) or RFC 3339.")] = None,
    state: StateOption = Path("state"),
    admin: AdminOption = None,
    admin_key: AdminKeyOption = None,
) -> _Report:
    connection = replace(admin_connection(state, admin, admin_key), wait_s=REPORT_WAIT_S)
    return _Report(connection, {"tenant": tenant, "from": from_, "to": to})


@connected(_report)
def usage(
    report: _Report,
    file: Annotated[Path | None, typer.Argument(help="Where --csv or --parquet is written; standard output for CSV.")] = None,
    group_by: Annotated[str, typer.Option(help="Columns, separated by commas.")] = "tenant,application,alias",
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV.")] = False,
    as_parquet: Annotated[bool, typer.Option("--parquet", help="Write Parquet.")] = False,
) -> None:
    """Show usage and cost."""
    named = [name for name, wanted in (("json", as_json), ("csv", as_csv), ("parquet", as_parquet)) if wanted]
    form = _form(named, file)
    query = report.query | {"group_by": group_by or None}
    if form in ("csv", "parquet"):
        _write(file, report.connection.download("/admin/v1/usage", query | {"format": form}))
        return
    rows = report.connection.call("GET", "/admin/v1/usage", query=query)["rows"]
    if form == "json":
        print_json(rows)
    else:
        _print_report(group_by.split(",") if group_by else [], rows)


def _form(named: Sequence[str], file: Path | None) -> str:
    """The form that the options ask for."""
    if len(named) > 1:
        raise CommandFailed("Give one of --json, --csv and --parquet.")
    form = named[0] if named else "table"
    if file is not None and form in ("table", "json"):
        raise CommandFailed("A file takes --csv or --parquet.")
    if file is None and form == "parquet":
        raise CommandFailed("--parquet needs the name of a file.")
    return form


def _write(file: Path | None, content: bytes) -> None:
    if file is None:
        sys.stdout.write(content.decode())
        return
    try:
        file.write_bytes(content)
    except OSError as fault:
        raise CommandFailed(f"{file} cannot be written ({fault.strerror}).") from fault


def _print_report(groups: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    total = {name: sum(row[name] for row in rows) for name in (*_COUNTS, *_COSTS)}
    digits = {name: max(digits_of(row[name]) for row in (*rows, total)) for name in _COSTS}

    def amounts(row: dict[str, Any]) -> list[str]:
        counts = [thousands(row[name]) for name in _COUNTS]
        return counts + [dollars(row[name], digits[name]) for name in _COSTS]

    lines = [[*(str(row[name]) for name in groups), *amounts(row)] for row in rows]
    label = ["total", *("" for _ in groups[1:])] if groups else []
    print_table([*groups, *_HEADINGS], lines, numeric=_HEADINGS, totals=[*label, *amounts(total)])
