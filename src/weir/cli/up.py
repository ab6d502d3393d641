"""`weir up`: the embedded cell in the foreground. Prints progress, keys and URLs, and drains on Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from weir import errors
from weir.app.cell import CellOptions, run_cell
from weir.app.ready_file import Ready
from weir.app.runtime import refuse_stripped_assertions
from weir.cli.foreground import refusals_shown, say, until_signalled
from weir.config import StoreConfig, load_config
from weir.telemetry import configure_logs

_PORT_MAX = 65_533  # management and metrics take the next two
FIRST_PROMPT = "What is a weir? Answer in two sentences."


def up(
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="simulated, llamacpp, or the URL of an OpenAI-compatible server (repeatable)."),
    ] = None,
    state: Annotated[Path, typer.Option("--state", help="State directory; made if missing.")] = Path("state"),
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT of the tenant API; port 0 = any free one.")
    ] = "127.0.0.1:8080",
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written (mode 0600) once everything is ready.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A weir.toml.")] = None,
    database: Annotated[
        str | None, typer.Option("--database", help="URL of a PostgreSQL database, instead of SQLite in the state directory.")
    ] = None,
    gateways: Annotated[
        int, typer.Option("--gateways", min=0, max=64, help="How many gateways, as processes of their own; 0: in this one.")
    ] = 0,
    standby: Annotated[
        bool, typer.Option("--standby", help="Take over once no other cell leads on this database, instead of at once.")
    ] = False,
    first_answer: Annotated[bool, typer.Option("--first-answer", help="Stream one answer once ready.")] = False,
) -> None:
    """Start the platform: coordinator, control and gateways, on SQLite or PostgreSQL, with its engines."""
    with refusals_shown():
        refuse_stripped_assertions()
        settings = load_config(config)
        if database is not None:
            settings = replace(settings, store=StoreConfig(url=database))
        configure_logs(json=settings.log.json)
        options = CellOptions(
            engines=engine or ["llamacpp"],
            state=state,
            listen=_address(listen),
            config=settings,
            ready_file=ready_file,
            gateways=gateways,
            standby=standby,
            announce=say,
        )
        uvloop.run(_serve(options, first_answer=first_answer))


async def _serve(options: CellOptions, *, first_answer: bool) -> None:
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Task[None]] = []

    def ready(found: Ready) -> None:
        show_ready(found)
        if first_answer:
            answers.append(loop.create_task(_stream_first_answer(options.state)))

    try:
        await until_signalled(lambda stop: run_cell(options, stop, ready))
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def _stream_first_answer(state: Path) -> None:
    """Ask the platform through its own command line, as a person would."""
    typer.echo(f"$ weir generate {FIRST_PROMPT!r}")
    command = (sys.executable, "-m", "weir.cli.main", "generate", "--state", str(state), FIRST_PROMPT)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > _PORT_MAX:
        raise errors.InvalidRequest(f"--listen takes HOST:PORT, not {text!r}.", members={"field": "--listen"})
    return host.strip("[]"), int(port)


def show_ready(ready: Ready) -> None:
    """Print where the cell listens, its keys, and an example with one that lives."""
    typer.echo("\nWeir is ready.")
    typer.echo(f"  API      {ready.api}")
    typer.echo(f"  admin    {ready.admin}   key {ready.secrets['admin_key'] or '(revoked)'}")
    typer.echo(f"  metrics  {ready.metrics}/metrics")
    for url in ready.gateways:
        typer.echo(f"  gateway  {url}")
    for alias in ready.aliases:
        typer.echo(f"  alias    {alias['alias']:<12} {alias['model_revision']}")
    for tenant in ready.secrets["tenants"]:
        for application in tenant["applications"]:
            typer.echo(f"  key      {tenant['name']}/{application['name']:<12} {application['key'] or '(revoked)'}")
    live = (application["key"] for tenant in ready.secrets["tenants"] for application in tenant["applications"])
    key = next((key for key in live if key is not None), None)
    if key is not None:
        typer.echo("\nTry it:\n" + _curl(ready, key))
    typer.echo("\nCtrl-C drains and stops.\n")


def _curl(ready: Ready, key: str) -> str:
    body = '{"model_alias":"assistant","input":"Say hello in five words.","max_output_tokens":32,"stream":true}'
    return f"  curl -N {ready.api}/v1/generations -H 'Authorization: Bearer {key}' \\\n    -d '{body}'"
