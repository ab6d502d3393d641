"""`weir pool`: create, list, change and retire pools of replicas through the management API."""

from typing import Annotated, Any

import typer

from weir.cli.admin_client import JsonOption, admin_connection
from weir.cli.http_api import Connection, connected, segment
from weir.cli.tables import print_json, print_table, thousands
from weir.core.tenancy import ServiceClass

commands = typer.Typer(no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The pool's name.")]
ServiceClasses = Annotated[list[ServiceClass] | None, typer.Option(help="Whose requests it takes (repeatable); else all.")]
_FIGURES = ("replicas", "ready", "concurrency", "running", "queued")


@commands.command()
@connected(admin_connection)
def create(
    connection: Connection,
    name: Name,
    revision: Annotated[str, typer.Argument(help="The id of the revision that it serves.")],
    replicas: Annotated[int, typer.Option(help="How many to keep.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Requests that a replica may run at once.")] = 1,
    url: Annotated[list[str] | None, typer.Option(help="Where an engine runs already (repeatable).")] = None,
    on_demand: Annotated[bool, typer.Option("--on-demand", help="Start with the first request, stop when idle.")] = False,
    idle_stop_ms: Annotated[int | None, typer.Option(help="How long without a request before it stops.")] = None,
    tenant: Annotated[str | None, typer.Option(help="It serves this tenant alone.")] = None,
    service_class: ServiceClasses = None,
    input_tokens_max: Annotated[int | None, typer.Option(help="The longest input that it takes.")] = None,
) -> None:
    """Start replicas of an approved revision."""
    body = {
        "name": name,
        "revision": revision,
        "replicas": replicas,
        "concurrency": concurrency,
        "urls": url or None,
        "on_demand": on_demand,
        "idle_stop_ms": idle_stop_ms,
        "tenant": tenant,
        "service_classes": _names(service_class),
        "input_tokens_max": input_tokens_max,
    }
    print_json(connection.call("POST", "/admin/v1/pools", body))


def _names(service_classes: list[ServiceClass] | None) -> list[str] | None:
    return [each.value for each in service_classes] if service_classes else None


@commands.command("list")
@connected(admin_connection)
def list_pools(connection: Connection, as_json: JsonOption = False) -> None:
    """List all pools and how they do."""
    pools = connection.call("GET", "/admin/v1/pools")["pools"]
    if as_json:
        print_json(pools)
    else:
        print_table(("pool", "revision", "tenant", *_FIGURES, "takes"), [_row(pool) for pool in pools], numeric=_FIGURES)


def _row(pool: dict[str, Any]) -> tuple[str, ...]:
    takes = ", ".join(pool["service_classes"])
    if pool["input_tokens_max"] is not None:
        takes += f", up to {thousands(pool['input_tokens_max'])} tokens"
    figures = (thousands(pool[name]) for name in _FIGURES)
    return pool["name"], pool["revision"], pool["tenant"] or "", *figures, takes


@commands.command()
@connected(admin_connection)
def patch(
    connection: Connection,
    name: Name,
    replicas: Annotated[int | None, typer.Option(help="How many to keep.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests that a replica may run at once.")] = None,
    service_class: ServiceClasses = None,
) -> None:
    """Change what is given of a pool; the rest stays."""
    body = {"replicas": replicas, "concurrency": concurrency, "service_classes": _names(service_class)}
    print_json(connection.call("PATCH", f"/admin/v1/pools/{segment(name)}", body))


@commands.command()
@connected(admin_connection)
def retire(connection: Connection, name: Name) -> None:
    """Drain and stop a pool's replicas; what runs may finish."""
    print_json(connection.call("POST", f"/admin/v1/pools/{segment(name)}/retire"))
