"""`weir batch results`: the answers and the errors of a batch, from the API to the disk or to standard output, piece by piece.

A file is there whole or not at all: it is written under another name beside it, and gets its own at the end. One that is there
already is left alone without --force.
"""

import codecs
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from weir.cli import batch_words as words
from weir.cli.batch_watch import BatchId
from weir.cli.batch_words import Batch, batch_of
from weir.cli.generate import api_connection
from weir.cli.http_api import CommandFailed, Connection, connected, segment
from weir.cli.tables import plain

STANDARD_OUTPUT = Path("-")


@connected(api_connection)
def results(
    connection: Connection,
    batch: BatchId,
    output: Annotated[Path | None, typer.Option(help="Where the answers go; - is standard output.")] = None,
    errors: Annotated[Path | None, typer.Option(help="Where the failed lines go; - is standard output.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Fetch the result files of a batch: those that an option names, else the answers, to standard output."""
    if output is None and errors is None:
        output = STANDARD_OUTPUT
    named = [path for path in (output, errors) if path is not None and path != STANDARD_OUTPUT]
    if len(named) != len({path.resolve() for path in named}):
        raise CommandFailed("--output and --errors are two files.")
    for each in named:
        _check_free(each, force)
    found = batch_of(connection.call("GET", f"/v1/batches/{segment(batch)}"))
    for path, file, lacking in (
        (output, found.output_file, "No line of it has an answer"),
        (errors, found.error_file, "No line of it failed"),
    ):
        if path is not None and file is not None:
            _fetch(connection.pieces(f"/v1/files/{segment(file)}/content"), path, force)
        elif path is not None:
            _tell_lack(found, lacking)


def _tell_lack(batch: Batch, lacking: str) -> None:
    """Raises CommandFailed where it may still come."""
    if not batch.is_over:
        raise CommandFailed(f"There is nothing yet: {words.standing(batch)}.")
    print(f"{lacking}: {words.standing(batch)}.", file=sys.stderr)


def _check_free(path: Path, force: bool) -> None:
    if not path.exists():
        return
    if not path.is_file():
        raise CommandFailed(f"{path} is not a plain file.")
    if not force:
        raise CommandFailed(f"{path} is there already; --force writes over it.")


def _fetch(pieces: Iterator[bytes], path: Path, force: bool) -> None:
    if path == STANDARD_OUTPUT:
        _print(pieces)
        return
    with _placed(path.resolve(), force) as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def _placed(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """A new file, which gets its name once it is whole, and otherwise leaves nothing. Raises CommandFailed."""
    own = path.with_name(f".weir-{secrets.token_hex(8)}.part")
    try:
        file = own.open("xb")
    except OSError as fault:
        raise _unwritable(path, fault) from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _name(own, path, force)
    except OSError as fault:
        raise _unwritable(path, fault) from None
    finally:
        own.unlink(missing_ok=True)


def _name(own: Path, path: Path, force: bool) -> None:
    """Raises CommandFailed where somebody else has made such a file meanwhile."""
    if force:
        own.replace(path)
        return
    try:
        os.link(own, path)
    except FileExistsError:
        raise CommandFailed(f"{path} is there already; --force writes over it.") from None
    except OSError:  # a file system without second names
        _check_free(path, force)
        own.replace(path)


def _unwritable(path: Path, fault: OSError) -> CommandFailed:
    return CommandFailed(f"{path} cannot be written: {fault.strerror}.")


def _print(pieces: Iterable[bytes]) -> None:
    """As they are; on a terminal without what it would obey."""
    if not sys.stdout.isatty():
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        sys.stdout.write("\n".join(plain(line) for line in decoder.decode(piece).split("\n")))
    sys.stdout.flush()
