"""The values of an HTTP exchange with an engine: origin, request, response, and who receives one.

It decides what bytes a request is. Only our own headers are ever sent: nothing of a client reaches an engine. Sits below
`http_client`, which carries these over sockets.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from weir import errors

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding an engine's JSON raises: it may be anything, also nested without end."""
_REQUEST_HEAD = "{} {} HTTP/1.1\r\nHost: {}\r\nAccept: */*\r\n{}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go. root: the URL's path without a trailing slash or /v1."""

    host: str
    port: int
    tls: bool
    root: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@lru_cache(maxsize=1024)
def parse_origin(url: str) -> Origin:
    """The origin of a base URL, which may end in /v1. Raises EngineError, without the URL, when it is anything more or less."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise errors.EngineError("The replica's address is not a URL.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.EngineError("The replica's address is not an http or https URL.")
    if "@" in parts.netloc or "?" in url or "#" in url or not (url.isascii() and url.isprintable()) or " " in url:
        raise errors.EngineError("The replica's address has more than a host, a port and a path.")
    tls = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Origin(parts.hostname, port or (443 if tls else 80), tls, root)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request to a replica. url: its base URL; path: begins with a slash and comes after the base URL's root."""

    method: str
    url: str
    path: str
    body: bytes = b""
    api_key: str | None = None

    def encode(self, origin: Origin) -> bytes:
        """The request as bytes. Raises EngineError for a key that cannot stand in a header."""
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise errors.EngineError("The replica's API key cannot be sent.")
        authorization = f"Authorization: Bearer {key}\r\n" if key is not None else ""
        target = origin.root + self.path
        return _REQUEST_HEAD.format(self.method, target, origin.authority, authorization, len(self.body)).encode() + self.body


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response. headers: names in lower case, the last value of each."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class ResponseReceiver(Protocol):
    """Gets one response: on_head, any on_body, then on_complete; or on_lost instead of the rest. Must not raise."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_complete(self) -> None: ...

    def on_lost(self, fault: errors.EngineFault) -> None:
        """ReplicaLost: refused, unreachable or cut. EngineError: what arrived is not HTTP, or nothing could be sent."""
        ...
