"""`weir coordinator`: the coordinator alone, in the foreground. Says where its metrics are once it leads; drains on SIGTERM."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from weir.app.coordinator_process import CoordinatorOptions, CoordinatorReady, run_coordinator
from weir.app.link_sockets import host_and_port
from weir.app.runtime import refuse_stripped_assertions
from weir.cli.foreground import refusals_shown, say, until_signalled
from weir.config import StoreConfig, load_config
from weir.telemetry import configure_logs


def coordinator(
    state: Annotated[Path, typer.Option("--state", help="State directory of its own; made if missing.")] = Path("state"),
    database: Annotated[str | None, typer.Option("--database", help="URL of the PostgreSQL database of the cell.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A weir.toml; link.listen says where others connect.")] = None,
    metrics: Annotated[str, typer.Option("--metrics", help="HOST:PORT of its metrics; port 0 = any.")] = "127.0.0.1:0",
    standby: Annotated[
        bool, typer.Option("--standby", help="Take over once no other coordinator leads, instead of at once.")
    ] = False,
) -> None:
    """Run the coordinator of a cell, which admits, books and dispatches; gateways and control connect to it."""
    with refusals_shown():
        refuse_stripped_assertions()
        settings = load_config(config)
        if database is not None:
            settings = replace(settings, store=StoreConfig(url=database))
        configure_logs(json=settings.log.json)
        options = CoordinatorOptions(
            state=state,
            config=settings,
            metrics=host_and_port(metrics, "--metrics"),
            standby=standby,
            announce=say,
        )
        uvloop.run(until_signalled(lambda stop: run_coordinator(options, stop, _tell_ready)))


def _tell_ready(ready: CoordinatorReady) -> None:
    typer.echo(msgspec.json.encode(ready).decode())
    sys.stdout.flush()
