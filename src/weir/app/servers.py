"""Listeners: the tenant side and the management side on the event loop, metrics on a thread of their own."""

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn

from weir import errors
from weir.api.connection import Connection
from weir.api.tenant_app import TenantApp
from weir.config import GatewayConfig
from weir.telemetry import Telemetry

_GRACE_AFTER_DRAIN_S = 5
_LAST_REQUESTS_S = 0.25
"""A client that connected is about to send its request: it gets a refusal to read, not an end without a word."""
_SCRAPES_AT_ONCE = 8
_SCRAPE_SILENCE_S = 10


def raise_open_files() -> int:
    """Raise this process's limit of open files to what it may have, once, before anything listens; the limit in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems say "no limit" and mean a lower one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def within_open_files(config: GatewayConfig, open_files: int) -> GatewayConfig:
    """The same where connections take at most half of the open files: each may need one to an engine as well."""
    return replace(config, connections_max=max(1, min(config.connections_max, open_files // 2)))


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handling: the cell drains first. is_up: set once it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve."""
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone."""
        yield

    def refuse_connections(self) -> None:
        """Give the addresses up at once; who is connected is served on."""
        for server in self.servers:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, hear those out that were just made, then close."""
        self.refuse_connections()
        await asyncio.sleep(_LAST_REQUESTS_S)
        await super().shutdown(sockets)


def bind(host: str, port: int, config: GatewayConfig, *, shared: bool = False) -> socket.socket:
    """A bound socket whose accepted sockets have a bounded send buffer. Raises InvalidRequest when the address is taken.

    It takes connections once `begin_listening` was called. shared: with other processes that ask for the same; the system
    spreads connections over them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
        listener.bind((host, port))
    except OSError as fault:
        listener.close()
        raise _cannot_listen(host, port, fault) from fault
    listener.setblocking(False)
    return listener


def begin_listening(listener: socket.socket, config: GatewayConfig) -> None:
    """Take connections, which wait for whoever serves them. Raises InvalidRequest when another process was quicker."""
    try:
        listener.listen(config.backlog)
    except OSError as fault:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, fault) from fault


def _cannot_listen(host: str, port: int, fault: OSError) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"Cannot listen on {host}:{port}: {fault.strerror}.", members={"field": "--listen"})


def url_of(listener: socket.socket) -> str:
    """The base URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def tenant_server(app: TenantApp, config: GatewayConfig) -> QuietServer:
    """The server that tenants reach."""
    return QuietServer(_uvicorn_config(app, app.new_request_id, config))


def admin_server(app: Any, new_request_id: Callable[[], str], config: GatewayConfig) -> QuietServer:
    """The server of the management API. new_request_id: names what the application never sees."""
    return QuietServer(_uvicorn_config(app, new_request_id, config))


def _uvicorn_config(app: Any, new_request_id: Callable[[], str], config: GatewayConfig) -> uvicorn.Config:
    members = {"limits": config, "new_request_id": staticmethod(new_request_id)}
    protocol: Any = type("BoundConnection", (Connection,), members)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, config.idle_connection_ms // 1000),
        timeout_graceful_shutdown=_GRACE_AFTER_DRAIN_S,
    )


class _ScrapeServer(ThreadingHTTPServer):
    """A thread for each scrape, few at a time; one too many is closed unanswered."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], scrape: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_SCRAPES_AT_ONCE)
        super().__init__(address, scrape)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection from its first byte to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class MetricsServer:
    """`/metrics` on a thread: a scrape formats thousands of lines and must not hold up a token."""

    def __init__(self, host: str, port: int, telemetry: Telemetry) -> None:
        class Scrape(BaseHTTPRequestHandler):
            """Answers GET /metrics."""

            timeout = _SCRAPE_SILENCE_S

            def do_GET(self) -> None:
                """Prometheus' text format, or 404."""
                found = self.path.split("?")[0] == "/metrics"
                body = telemetry.exposition() if found else b"only /metrics is here\n"
                self.send_response(200 if found else 404)
                self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8" if found else "text/plain")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library's name
                """Scrapes are not logged."""

        try:
            self._server = _ScrapeServer((host, port), Scrape)
        except OSError as fault:
            raise _cannot_listen(host, port, fault) from fault
        self._thread = threading.Thread(target=self._server.serve_forever, name="weir-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
