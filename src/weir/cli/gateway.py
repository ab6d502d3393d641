"""`weir gateway`: one gateway in the foreground, on a link to a coordinator. Says where it listens, and drains on SIGTERM."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from weir.app.gateway_process import GatewayOptions, GatewayProcess, GatewayReady
from weir.app.link_sockets import address_of, host_and_port, token_of
from weir.app.runtime import refuse_stripped_assertions
from weir.app.servers import bind
from weir.cli.foreground import refusals_shown, until_signalled
from weir.config import WeirConfig, load_config
from weir.telemetry import configure_logs

_SETTINGS_BYTES_MAX = 128 * 1024 * 1024
"""One line, usually below a kilobyte. With all the rules that issuers may have it is more than a pipe holds at once."""


def gateway(
    connect: Annotated[
        list[str], typer.Option("--connect", help="unix:PATH or HOST:PORT of a coordinator; several are tried in turn.")
    ],
    listen_on: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT of the tenant API, which gateways of a host may share.")
    ] = None,
    own: Annotated[str, typer.Option("--own", help="HOST:PORT where only this gateway answers; port 0 = any.")] = "127.0.0.1:0",
    metrics: Annotated[str, typer.Option("--metrics", help="HOST:PORT of its metrics; port 0 = any.")] = "127.0.0.1:0",
    config: Annotated[Path | None, typer.Option("--config", help="A weir.toml; the coordinator's, or the same limits.")] = None,
    inherited: Annotated[list[int] | None, typer.Option("--inherited", hidden=True)] = None,
) -> None:
    """Run one gateway, which authenticates, counts, relays and reports, and decides nothing that another must know."""
    with refusals_shown():
        refuse_stripped_assertions()
        settings = load_config(config) if not inherited else _settings_from_input()
        configure_logs(json=settings.log.json)
        listeners = [_inherited(descriptor) for descriptor in inherited or ()]
        if not listeners:
            listeners.append(bind(*host_and_port(own, "--own"), settings.gateway))
        if listen_on is not None:
            listeners.append(bind(*host_and_port(listen_on, "--listen"), settings.gateway, shared=True))
        options = GatewayOptions(
            connect=[address_of(text, settings.link) for text in connect],
            token=token_of(settings.link) if settings.link.token_file is not None else "",
            listeners=listeners,
            config=settings,
            metrics=host_and_port(metrics, "--metrics"),
            orphaned=asyncio.Event(),
        )
        uvloop.run(until_signalled(lambda stop: _serve(options, stop, is_child=bool(inherited))))


def _settings_from_input() -> WeirConfig:
    """What a cell tells the gateways that it starts: its own settings, without what only it may know."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _SETTINGS_BYTES_MAX:
        piece = os.read(sys.stdin.fileno(), _SETTINGS_BYTES_MAX - len(line))
        if not piece:
            break
        line += piece
    return msgspec.json.decode(line, type=WeirConfig)


def _inherited(descriptor: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    return listener


async def _serve(options: GatewayOptions, stop: asyncio.Event, *, is_child: bool) -> None:
    if is_child:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _input_over, stop, options.orphaned)
    await GatewayProcess(options).run(stop, _tell_ready)


def _input_over(stop: asyncio.Event, orphaned: asyncio.Event) -> None:
    """Nothing is ever written to it: what can be read is its end."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    orphaned.set()
    stop.set()


def _tell_ready(ready: GatewayReady) -> None:
    typer.echo(msgspec.json.encode(ready).decode())
    sys.stdout.flush()
