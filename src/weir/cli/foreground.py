"""What the commands share that run a part of the platform in the foreground: signals, and one line for a refusal."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import typer

from weir import errors


@contextmanager
def refusals_shown() -> Iterator[None]:
    """An error of ours becomes one line on standard error and exit status 2."""
    try:
        yield
    except errors.WeirError as refusal:
        typer.echo(f"weir: {refusal.detail}", err=True)
        raise typer.Exit(2) from refusal


async def until_signalled(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Serve until SIGINT or SIGTERM sets the event; a second SIGINT leaves at once. Raises the first error of ours alone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if stop.is_set():
            os._exit(130)  # asked twice: leave at once; whoever comes next resolves what is open
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await serve(stop)
    except* errors.WeirError as failures:
        fault: BaseException = failures
        while isinstance(fault, BaseExceptionGroup):  # bounded by the nesting of task groups
            fault = fault.exceptions[0]
        raise fault from None


def say(line: str) -> None:
    """A line for whoever watches the start."""
    typer.echo(f"  · {line}", err=True)
