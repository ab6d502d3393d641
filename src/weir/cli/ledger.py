"""`weir ledger`: what is held and spent of a tenant's limits, and the check of a whole ledger.

The check reads the store itself, also while a cell runs on it, and needs no key. It exits 0 for a clean ledger, 1 for one with
problems, and 2 when it could not be checked.
"""

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from weir import errors
from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected
from weir.cli.limit import SCOPE_COLUMNS, scope_cells
from weir.cli.tables import print_json, print_table, thousands
from weir.ports import LedgerReport

commands = typer.Typer(no_args_is_help=True)

_FIGURES = ("limit", "held", "spent")


@commands.command()
@connected(admin_connection)
def show(
    connection: Connection,
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a tenant's limits have held and spent now."""
    ledger = connection.call("GET", "/admin/v1/ledger", query={"tenant": tenant})
    if as_json:
        print_json(ledger)
        return
    rows = [_row(account) for account in ledger["accounts"]]
    print_table((*SCOPE_COLUMNS, "kind", *_FIGURES, "resets at"), rows, numeric=_FIGURES)
    print(f"open holds: {ledger['open_holds']}")


def _row(account: dict[str, Any]) -> tuple[str, ...]:
    return (
        *scope_cells(account["scope"]),
        account["kind"],
        *(thousands(account[name]) for name in _FIGURES),
        account["resets_at"] or "",
    )


@commands.command()
def verify(
    state: Annotated[Path | None, typer.Option("--state", help="State directory of an embedded cell.")] = None,
    database: Annotated[str | None, typer.Option("--database", help="URL of a PostgreSQL database.")] = None,
) -> None:
    """Recount every balance from its records, and check the rules that records keep."""
    if state is not None and database is not None:
        raise typer.BadParameter("give --state or --database, not both")
    try:
        report = asyncio.run(_verified(state or Path("state"), database))
    except errors.WeirError as refusal:
        raise _unchecked(refusal.detail) from None
    except Exception as fault:  # whatever it was: a status of 1 would say that the books are wrong
        raise _unchecked(f"The ledger could not be checked ({type(fault).__name__}): it may be damaged.") from None
    for field in fields(LedgerReport):
        if field.name != "problems":
            print(f"{field.name.replace('_', ' '):<13} {thousands(getattr(report, field.name)):>15}")
    for problem in report.problems:
        print(f"problem: {problem}")
    print("clean" if report.is_clean else f"not clean: {len(report.problems)} problem(s)")
    raise typer.Exit(0 if report.is_clean else 1)


def _unchecked(sentence: str) -> typer.Exit:
    typer.echo(f"error: {sentence}", err=True)
    return typer.Exit(2)


async def _verified(state: Path, database: str | None) -> LedgerReport:
    from weir.storage.reading import verify_database, verify_state

    return await (verify_state(state) if database is None else verify_database(database))
