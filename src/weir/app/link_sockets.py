"""The sockets of links: Unix sockets between processes of one host, TCP with TLS and a token between hosts.

A Unix socket is its owner's alone (mode 0600 in a directory of mode 0700), so it needs no token.
"""

import asyncio
import contextlib
import os
import socket
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


def token_of(config: LinkConfig) -> str:
    """What gateways' links over TCP show. Raises InvalidRequest."""
    return _token_in(config.token_file, "link.token_file")


def control_token_of(config: LinkConfig) -> str:
    """What control's link over TCP shows. Raises InvalidRequest."""
    return _token_in(config.control_token_file, "link.control_token_file")


def _token_in(named: str | None, field: str) -> str:
    path = _file(named, field)
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise errors.InvalidRequest(f"{field} cannot be read.", members={"field": field}) from fault
    if len(token) < _TOKEN_CHARS_MIN:
        detail = f"{field} must hold a token of {_TOKEN_CHARS_MIN} characters or more."
        raise errors.InvalidRequest(detail, members={"field": field})
    return token


def _file(path: str | None, field: str) -> str:
    if path is None:
        raise errors.InvalidRequest(f"A link over TCP needs {field}.", members={"field": field})
    return path


@contextlib.asynccontextmanager
async def serving_unix(end: CoordinatorEnd, folder: Path) -> AsyncIterator[Path]:
    """Serve links on a Unix socket of this user's own: in the folder, or elsewhere if that has too long a name for one."""
    async with contextlib.AsyncExitStack() as stack:
        path = folder / "link"
        if len(os.fsencode(path)) > _UNIX_BYTES_MAX:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))) / "link"
        await stack.enter_async_context(_serving_at(end, path))
        yield path


@contextlib.asynccontextmanager
async def _serving_at(end: CoordinatorEnd, path: Path) -> AsyncIterator[None]:
    """Serve links at a path. What another process puts in the socket's place meanwhile stays. Raises OSError."""
    listener = await asyncio.to_thread(_bound_at, path)
    identity = _identity(path)
    server = await asyncio.get_running_loop().create_unix_server(end.accept, sock=listener)
    try:
        yield
    finally:
        server.close()
        if _identity(path) == identity:
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _bound_at(path: Path) -> socket.socket:
    """A socket of this user's own before anyone can connect; one that was left there is replaced. Raises OSError."""
    if path.is_socket():
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class LinkListener:
    """Where `link.listen` says. What it needs is looked at, and its port bound, before the cell leads. Raises InvalidRequest.

    token: what gateways' links show. control_token: what control's does; None where none may come in.
    """

    def __init__(self, config: LinkConfig) -> None:
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self.token = ""
        self.control_token: str | None = ""
        if config.listen is None:
            return
        if config.listen.startswith(_UNIX):
            self._path = _checked_path(config.listen.removeprefix(_UNIX))
        else:
            address = host_and_port(config.listen, "link.listen")
            self.token = token_of(config)
            self.control_token = control_token_of(config) if config.control_token_file is not None else None
            if self.control_token == self.token:
                detail = "link.control_token_file must hold another token than link.token_file, which gateways know."
                raise errors.InvalidRequest(detail, members={"field": "link.control_token_file"})
            self._tls = _server_tls(config)
            self._socket = _bound(*address)

    @contextlib.asynccontextmanager
    async def serving(self, end: CoordinatorEnd) -> AsyncIterator[None]:
        """Serve links there, if anywhere. Raises InvalidRequest when another process was quicker."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                if self._path is not None:
                    await stack.enter_async_context(_serving_at(end, self._path))
                elif self._socket is not None:
                    stack.callback((await self._serving_tcp(end, self._socket)).close)
            except OSError as fault:
                raise _cannot_listen(str(self._path or "link.listen"), fault) from fault
            yield

    async def _serving_tcp(self, end: CoordinatorEnd, listener: socket.socket) -> asyncio.Server:
        assert self._tls is not None
        loop = asyncio.get_running_loop()
        return await loop.create_server(end.accept, sock=listener, ssl=self._tls, ssl_handshake_timeout=_HANDSHAKE_S)

    def close(self) -> None:
        """Give the port up."""
        if self._socket is not None:
            self._socket.close()


def _checked_path(text: str) -> Path:
    """The path of a socket that can be made. Raises InvalidRequest."""
    path = Path(text)
    if not text or len(os.fsencode(path)) > _UNIX_BYTES_MAX or not os.access(path.parent, os.W_OK):
        detail = (
            f"link.listen takes unix:PATH of at most {_UNIX_BYTES_MAX} bytes in a directory that can be written, not {text!r}."
        )
        raise errors.InvalidRequest(detail, members={"field": "link.listen"})
    return path


def _bound(host: str, port: int) -> socket.socket:
    """Raises InvalidRequest."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as fault:
        listener.close()
        raise _cannot_listen(f"{host}:{port}", fault) from fault
    listener.setblocking(False)
    return listener


def _cannot_listen(where: str, fault: Exception) -> errors.InvalidRequest:
    reason = getattr(fault, "strerror", None) or fault
    return errors.InvalidRequest(f"Cannot listen on {where}: {reason}.", members={"field": "link.listen"})


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a socket's file: another cell may have put its own in its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
