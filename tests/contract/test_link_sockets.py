"""Where a coordinator is reached: a socket of its user's own, which replaces one that was left and takes nobody's place."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.link_stand import TERMS, StandingCoordinator, until_nothing_is_left

from weir import errors
from weir.app.link_sockets import LinkListener, serving_unix
from weir.config import LinkConfig
from weir.link.coordinator_end import CoordinatorEnd


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name short enough for a socket in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def end(folder: Path) -> CoordinatorEnd:
    """A coordinator's end that nobody reaches yet."""
    return StandingCoordinator(folder / "unused", 1, "", TERMS).end


def listener_at(path: Path) -> LinkListener:
    """One that listens at a path."""
    return LinkListener(LinkConfig(listen=f"unix:{path}"))


def left_socket(path: Path) -> None:
    """What a killed process leaves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as old:
        old.bind(str(path))


async def can_connect(path: Path) -> bool:
    """Whether somebody takes connections there; this one is over then, because a listener must not close in between."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.write(b"no frame at all: it is closed for that")
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.transport.abort()
    return True


async def test_it_is_its_owners_replaces_one_that_was_left_and_goes(folder: Path, end: CoordinatorEnd) -> None:
    """Protects the coordinator from other users, and a restart from what a killed cell left."""
    named, own = folder / "named", folder / "link"
    left_socket(named)
    left_socket(own)
    async with listener_at(named).serving(end), serving_unix(end, folder) as path:
        assert path == own
        for served in (named, own):
            assert served.stat().st_mode & 0o777 == 0o600 and await can_connect(served)
    assert not named.exists() and not own.exists()
    await until_nothing_is_left()


async def test_a_folder_with_too_long_a_name_gets_a_socket_elsewhere(folder: Path, end: CoordinatorEnd) -> None:
    """Protects a start in a deep state directory."""
    async with serving_unix(end, folder / ("x" * 100)) as path:
        assert path.parent.stat().st_mode & 0o777 == 0o700 and await can_connect(path)
    assert not path.parent.exists()
    await until_nothing_is_left()


async def test_what_is_no_socket_stays(folder: Path, end: CoordinatorEnd) -> None:
    """Protects a file of somebody's: the start is refused with the setting's name."""
    path = folder / "notes"
    path.write_text("kept")
    with pytest.raises(errors.InvalidRequest) as refusal:
        async with listener_at(path).serving(end):
            raise AssertionError("it serves")
    assert refusal.value.members["field"] == "link.listen" and path.read_text() == "kept"


async def test_another_cells_socket_in_its_place_stays(folder: Path, end: CoordinatorEnd) -> None:
    """Protects a handover: a cell that ends leaves the socket of the one that began meanwhile."""
    path = folder / "link"
    async with serving_unix(end, folder):
        path.unlink()
        left_socket(path)
    assert path.is_socket()


@pytest.mark.parametrize("refused", ["link.control_token_file", "link.certificate_file"])
def test_control_has_a_token_that_gateways_do_not_know(folder: Path, refused: str) -> None:
    """Protects the cell from a gateway that is taken over: over TCP the two tokens must differ, before anything is bound."""
    gateways, controls = folder / "token", folder / "control-token"
    gateways.write_text("g" * 32)
    controls.write_text(("g" if refused == "link.control_token_file" else "c") * 32)
    config = LinkConfig(listen="127.0.0.1:0", token_file=str(gateways), control_token_file=str(controls))
    with pytest.raises(errors.InvalidRequest) as refusal:
        LinkListener(config)
    assert refusal.value.members["field"] == refused
