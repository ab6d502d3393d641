"""`weir control`: control alone, in the foreground: engines, catalog and management, linked to whichever coordinator leads."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from weir.app.control_process import ControlOptions, run_control
from weir.app.link_sockets import address_of, control_token_of, host_and_port
from weir.app.ready_file import Ready
from weir.app.runtime import refuse_stripped_assertions
from weir.cli.foreground import refusals_shown, say, until_signalled
from weir.config import StoreConfig, load_config
from weir.telemetry import configure_logs


def control(
    connect: Annotated[
        list[str], typer.Option("--connect", help="unix:PATH or HOST:PORT of a coordinator; several are tried in turn.")
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="simulated, llamacpp, or the URL of an OpenAI-compatible server (repeatable)."),
    ] = None,
    state: Annotated[Path, typer.Option("--state", help="State directory of its own; made if missing.")] = Path("state"),
    database: Annotated[str | None, typer.Option("--database", help="URL of the PostgreSQL database of the cell.")] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT of the management API; port 0 = any free one.")
    ] = "127.0.0.1:8081",
    metrics: Annotated[str, typer.Option("--metrics", help="HOST:PORT of its metrics; port 0 = any.")] = "127.0.0.1:0",
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written (mode 0600) once everything is ready.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A weir.toml.")] = None,
) -> None:
    """Run the control of a cell, which keeps its engines and its catalog and serves the management API."""
    with refusals_shown():
        refuse_stripped_assertions()
        settings = load_config(config)
        if database is not None:
            settings = replace(settings, store=StoreConfig(url=database))
        configure_logs(json=settings.log.json)
        options = ControlOptions(
            engines=engine or ["llamacpp"],
            state=state,
            connect=[address_of(text, settings.link) for text in connect],
            token=control_token_of(settings.link) if settings.link.control_token_file is not None else "",
            listen=host_and_port(listen, "--listen"),
            metrics=host_and_port(metrics, "--metrics"),
            config=settings,
            ready_file=ready_file,
            announce=say,
        )
        uvloop.run(until_signalled(lambda stop: run_control(options, stop, _show_ready)))


def _show_ready(ready: Ready) -> None:
    """Where administrators connect, and the key of the first start. Tenants connect to gateways."""
    typer.echo("\nWeir's control is ready.")
    typer.echo(f"  admin    {ready.admin}   key {ready.secrets['admin_key'] or '(revoked)'}")
    typer.echo(f"  metrics  {ready.metrics}/metrics")
    for tenant in ready.secrets["tenants"]:
        for application in tenant["applications"]:
            typer.echo(f"  key      {tenant['name']}/{application['name']:<12} {application['key'] or '(revoked)'}")
    typer.echo("\nCtrl-C stops it and the engines that it started.\n")
