"""How a command without a server ends that cannot do what it was asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from weir import errors


@contextmanager
def one_sentence() -> Iterator[None]:
    """A refusal, or a fault of the disk, as one line on standard error and exit status 1."""
    try:
        yield
    except errors.WeirError as refused:
        sentence = refused.detail
    except OSError as fault:
        sentence = f"{fault.filename}: {fault.strerror}."
    else:
        return
    typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(1)
