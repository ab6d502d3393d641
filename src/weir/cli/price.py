"""`weir price`: set and show what revisions cost through the management API. Amounts are micro-dollars per million tokens."""

from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.tables import digits_of, dollars, print_json, print_table

commands = typer.Typer(no_args_is_help=True)

_AMOUNTS = ("input_microusd", "cached_input_microusd", "output_microusd")
_HEADINGS = ("input", "cached input", "output", "batch")


@commands.command("set")
@connected(admin_connection)
def set_price(
    connection: Connection,
    revision: Annotated[str, typer.Argument(help="The revision's id.")],
    input_microusd: Annotated[int, typer.Option("--input", help="Micro-dollars per million input tokens.")],
    cached_input_microusd: Annotated[int, typer.Option("--cached-input", help="Of those that were in the prefix cache.")],
    output_microusd: Annotated[int, typer.Option("--output", help="Micro-dollars per million output tokens.")],
    batch_percent: Annotated[int | None, typer.Option(help="What part batch requests pay; else as it is.")] = None,
) -> None:
    """Set a revision's price from now on; what was admitted before keeps its own."""
    amounts = dict(zip(_AMOUNTS, (input_microusd, cached_input_microusd, output_microusd), strict=True))
    price = {**amounts, "batch_percent": batch_percent}
    print_json(connection.call("PUT", f"/admin/v1/revisions/{segment(revision)}/price", price))


@commands.command()
@connected(admin_connection)
def show(
    connection: Connection,
    revision: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what revisions cost per million tokens, now and before."""
    revisions = connection.call("GET", "/admin/v1/revisions")["revisions"]
    if revision is not None:
        revisions = [entry for entry in revisions if entry["id"] == revision]
        if not revisions:
            raise CommandFailed(f"There is no revision {revision!r}.")
    if as_json:
        print_json(revisions)
        return
    rows = [row for entry in revisions for row in _rows(entry)]
    print_table(("revision", "engine", "version", *_HEADINGS, ""), rows, numeric=("version", *_HEADINGS))


def _rows(revision: dict[str, Any]) -> list[tuple[str, ...]]:
    """The schedule, newest version first."""
    schedule = sorted(revision["prices"], key=lambda price: -price["version"])
    digits = {name: max(digits_of(price[name]) for price in schedule) for name in _AMOUNTS}
    return [
        (
            revision["id"],
            revision["engine"],
            str(price["version"]),
            *(dollars(price[name], digits[name]) for name in _AMOUNTS),
            f"{price['batch_percent']} %",
            "now" if price == revision["price"] else "",
        )
        for price in schedule
    ]
