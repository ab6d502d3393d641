"""The sockets of links: Unix sockets between processes of one host, TCP with TLS and a token between hosts.

A Unix socket is its owner's alone (mode 0600 in a directory of mode 0700), so it needs no token.
"""

import asyncio
import contextlib
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from weir import errors
from weir.config import LinkConfig
from weir.link.channel import Channel
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.gateway_end import Connect

_UNIX = "unix:"
_UNIX_BYTES_MAX = 100
"""Of a socket's path, on every system."""
_TOKEN_CHARS_MIN = 32
_HANDSHAKE_S = 3.0


def address_of(text: str, config: LinkConfig) -> Connect:
    """How a coordinator at `unix:PATH` or HOST:PORT is reached. Raises InvalidRequest."""
    if text.startswith(_UNIX) and len(text) > len(_UNIX):
        return _unix(text.removeprefix(_UNIX))
    host, port = host_and_port(text, "--connect")
    return _tcp(host, port, _client_tls(config))


def host_and_port(text: str, field: str) -> tuple[str, int]:
    """HOST:PORT, a port of 0 for any free one. Raises InvalidRequest."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise errors.InvalidRequest(f"{field} takes HOST:PORT, not {text!r}.", members={"field": field})
    return host.strip("[]"), int(port)


def _unix(path: str) -> Connect:
    async def connect(make: Callable[[], Channel]) -> None:
        await asyncio.get_running_loop().create_unix_connection(make, path)

    return connect


def _tcp(host: str, port: int, tls: ssl.SSLContext) -> Connect:
    async def connect(make: Callable[[], Channel]) -> None:
        await asyncio.get_running_loop().create_connection(make, host, port, ssl=tls)

    return connect


def _client_tls(config: LinkConfig) -> ssl.SSLContext:
    authority = _file(config.authority_file, "link.authority_file")
    return _tls("link.authority_file", lambda: ssl.create_default_context(cafile=authority))


def _server_tls(config: LinkConfig) -> ssl.SSLContext:
    certificate = _file(config.certificate_file, "link.certificate_file")
    key = _file(config.private_key_file, "link.private_key_file")

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        return context

    return _tls("link.certificate_file", make)


def _tls(field: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    try:
        return make()
    except OSError as fault:  # ssl.SSLError is one
        raise errors.InvalidRequest(f"{field} cannot be used: {fault.strerror}.", members={"field": field}) from fault


def check_link(config: LinkConfig) -> None:
    """Whether what a coordinator needs for its links is there, before it leads. Raises InvalidRequest."""
    if needs_token(config):
        assert config.listen is not None
        host_and_port(config.listen, "link.listen")
        token_of(config)
        _server_tls(config)


def token_of(config: LinkConfig) -> str:
    """What links over TCP show. Raises InvalidRequest."""
    path = _file(config.token_file, "link.token_file")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise errors.InvalidRequest("link.token_file cannot be read.", members={"field": "link.token_file"}) from fault
    if len(token) < _TOKEN_CHARS_MIN:
        detail = f"link.token_file must hold a token of {_TOKEN_CHARS_MIN} characters or more."
        raise errors.InvalidRequest(detail, members={"field": "link.token_file"})
    return token


def _file(path: str | None, field: str) -> str:
    if path is None:
        raise errors.InvalidRequest(f"A link over TCP needs {field}.", members={"field": field})
    return path


async def _listening(end: CoordinatorEnd, address: str, config: LinkConfig) -> asyncio.AbstractServer:
    loop = asyncio.get_running_loop()
    if needs_token(config):
        host, port = host_and_port(address, "link.listen")
        return await loop.create_server(
            end.accept, host, port, ssl=_server_tls(config), ssl_handshake_timeout=_HANDSHAKE_S, reuse_address=True
        )
    path = Path(address.removeprefix(_UNIX))
    server = await loop.create_unix_server(end.accept, str(path))
    await asyncio.to_thread(path.chmod, 0o600)
    return server


@contextlib.asynccontextmanager
async def serving_unix(end: CoordinatorEnd, folder: Path) -> AsyncIterator[Path]:
    """Serve links on a Unix socket of this user's own: in the folder, or elsewhere if that has too long a name for one."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        path = folder / "link"
        if len(os.fsencode(path)) > _UNIX_BYTES_MAX:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))) / "link"
        server = await loop.create_unix_server(end.accept, str(path))
        try:
            path.chmod(0o600)
            yield path
        finally:
            server.close()
            path.unlink(missing_ok=True)


def needs_token(config: LinkConfig) -> bool:
    """Whether links come over TCP."""
    return config.listen is not None and not config.listen.startswith(_UNIX)


@contextlib.asynccontextmanager
async def serving_configured(end: CoordinatorEnd, config: LinkConfig) -> AsyncIterator[None]:
    """Serve links where `link.listen` says. Raises InvalidRequest."""
    if config.listen is None:
        yield
        return
    try:
        server = await _listening(end, config.listen, config)
    except (OSError, UnicodeError) as fault:
        raise errors.InvalidRequest(
            f"Cannot listen on {config.listen}: {getattr(fault, 'strerror', None) or fault}.", members={"field": "link.listen"}
        ) from fault
    path = None if needs_token(config) else Path(config.listen.removeprefix(_UNIX))
    identity = _identity(path) if path is not None else None
    try:
        yield
    finally:
        server.close()
        if path is not None and _identity(path) == identity:
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a socket's file: another cell may have put its own in its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
