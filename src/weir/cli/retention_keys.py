"""`weir retention keys`, `rotate-key` and `drop-key`: the keys that seal retained streams, in a file. Local: no cell is asked.

The newest key seals, all of them open. A secret is never printed, and a file is replaced whole, readable by its owner only.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir import errors
from weir.cli.admin_client import JsonOption
from weir.cli.one_sentence import one_sentence
from weir.cli.tables import print_json, print_table, yes_or_blank

if TYPE_CHECKING:
    from weir.gateway.sealing import KeyRing

KEY_FILE = "retention-keys"
_FILE_BYTES_MAX = 16 * 1024

commands = typer.Typer(no_args_is_help=True)
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="The file of keys; none given: it is in the state directory.")]
State = Annotated[Path | None, typer.Option("--state", help="State directory; its file of keys is `retention-keys`.")]


@commands.command()
def keys(key_file: KeyFile = None, state: State = None, as_json: JsonOption = False) -> None:
    """List the ids of the keys, newest first; the newest one seals new streams."""
    with one_sentence():
        _show(_read(_place(key_file, state)), as_json)


@commands.command("rotate-key")
def rotate_key(key_file: KeyFile = None, state: State = None, as_json: JsonOption = False) -> None:
    """Add a key, which seals new streams from now on; makes the file if it is absent."""
    from weir.clock import SystemEntropy
    from weir.gateway.sealing import KeyRing

    with one_sentence():
        place = _place(key_file, state)
        with _alone(place):
            try:
                ring = _read(place).added(SystemEntropy())
            except FileNotFoundError:
                ring = KeyRing.new(SystemEntropy())
            _write(place, ring)
        _show(ring, as_json)


@commands.command("drop-key")
def drop_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id.")],
    key_file: KeyFile = None,
    state: State = None,
    as_json: JsonOption = False,
) -> None:
    """Remove an old key: what was sealed with it can't be read any more, wherever it is stored."""
    with one_sentence():
        place = _place(key_file, state)
        with _alone(place):
            ring = _read(place).without(key_id)
            _write(place, ring)
        _show(ring, as_json)


def _place(key_file: Path | None, state: Path | None) -> Path:
    if key_file is not None and state is not None:
        raise typer.BadParameter("give --key-file or --state, not both")
    return (key_file or (state or Path("state")) / KEY_FILE).absolute()


def _read(place: Path) -> "KeyRing":
    from weir.gateway.sealing import parse_key_ring

    with place.open("rb") as file:
        text = file.read(_FILE_BYTES_MAX + 1)
    try:
        if len(text) > _FILE_BYTES_MAX:
            raise errors.InvalidRequest("It is too long.")
        return parse_key_ring(text.decode("ascii", "replace"))
    except errors.InvalidRequest as flaw:
        raise errors.InvalidRequest(f"{place} holds no ring of keys: {flaw.detail}") from None


def _write(place: Path, ring: "KeyRing") -> None:
    from weir.gateway.sealing import format_key_ring
    from weir.storage.state_directory import write_private_file

    write_private_file(place, f"# Keys of retained streams, newest first. Secret.\n{format_key_ring(ring)}".encode())


def _show(ring: "KeyRing", as_json: bool) -> None:
    rows = [(key.id, key == ring.newest) for key in ring.keys]
    if as_json:
        print_json([{"id": key_id, "newest": newest} for key_id, newest in rows])
    else:
        print_table(("key", "newest"), [(key_id, yes_or_blank(newest)) for key_id, newest in rows])


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Two changes at once would lose a key, and with it what it sealed meanwhile. Raises NotAllowedNow."""
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise errors.NotAllowedNow(f"{place} is changed by another command just now.") from None
    finally:
        os.close(folder)
