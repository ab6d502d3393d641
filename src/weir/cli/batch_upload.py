"""A file's way to the tenant API: a form that is read from the disk as it is sent, with a bar of its bytes on a terminal.

Of the file one piece is held at a time, whatever its size.
"""

import json
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from weir.cli.http_api import PIECE_BYTES, CommandFailed, Connection, Streamed
from weir.cli.tables import plain

FILES_PATH = "/v1/files"
LINE_BYTES_MAX = 1024 * 1024
"""Of the line that names the endpoint; a longer one is refused by the API, too."""

UPLOAD_WAIT_S = 120.0
"""For each piece and for the answer: a store may take a while to keep what it was given."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that is open for reading. size: in bytes, as it was opened."""

    name: str
    size: int
    content: IO[bytes]


@contextmanager
def opened(path: Path) -> Iterator[InputFile]:
    """Raises CommandFailed where it cannot be read, or is not a plain file."""
    try:
        if path.exists() and not path.is_file():
            raise CommandFailed(f"{path} is not a plain file.")
        content = path.open("rb")
    except OSError as fault:
        raise CommandFailed(f"{path} cannot be read: {fault.strerror}.") from None
    with content:
        yield InputFile(path.name, os.fstat(content.fileno()).st_size, content)


def endpoint_of(file: InputFile) -> str:
    """The `url` of its first line, as written. Raises CommandFailed."""
    try:
        line = json.loads(file.content.readline(LINE_BYTES_MAX))
    except (ValueError, RecursionError):
        line = None
    except OSError as fault:
        raise CommandFailed(f"{file.name} cannot be read: {fault.strerror}.") from None
    url = line.get("url") if isinstance(line, dict) else None
    if not isinstance(url, str):
        raise CommandFailed(f"Line 1 of {file.name} is no JSON object with a url; --endpoint names one, too.")
    return url


def upload(connection: Connection, file: InputFile) -> Any:
    """What the API answers to a whole file. Raises CommandFailed; nothing is kept of a file that was refused or cut off."""
    boundary = f"weir-{secrets.token_hex(16)}"
    head, tail = _head(boundary, file.name), f"\r\n--{boundary}--\r\n".encode()
    with closing(_with_bar(file)) as pieces:
        form = Streamed(
            _framed(head, pieces, tail), len(head) + file.size + len(tail), f"multipart/form-data; boundary={boundary}"
        )
        return replace(connection, wait_s=UPLOAD_WAIT_S).call("POST", FILES_PATH, form)


def _head(boundary: str, name: str) -> bytes:
    shown = name.replace("\\", "%5C").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
    lines = (
        f"--{boundary}",
        'Content-Disposition: form-data; name="purpose"',
        "",
        "batch",
        f"--{boundary}",
        f'Content-Disposition: form-data; name="file"; filename="{shown}"',
        "Content-Type: application/jsonl",
        "",
        "",
    )
    return "\r\n".join(lines).encode("utf-8", "replace")


def _framed(head: bytes, pieces: Iterator[bytes], tail: bytes) -> Iterator[bytes]:
    yield head
    yield from pieces
    yield tail


def _pieces(file: InputFile) -> Iterator[bytes]:
    """As much as the file had when it was opened: what is appended meanwhile is not of it."""
    left = file.size
    try:
        file.content.seek(0)
        while left:
            piece = file.content.read(min(left, PIECE_BYTES))
            if not piece:
                raise CommandFailed(f"{file.name} became shorter while it was read.")
            left -= len(piece)
            yield piece
    except OSError as fault:
        raise CommandFailed(f"{file.name} cannot be read: {fault.strerror}.") from None


def _with_bar(file: InputFile) -> Generator[bytes]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield from _pieces(file)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(plain(file.name), total=file.size)
        for piece in _pieces(file):
            yield piece
            progress.advance(task, len(piece))
