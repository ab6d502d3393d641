"""One exchange after another on a connection: the first one's end takes nothing from the second, and a cut is no fault."""

import asyncio
import contextlib
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from weir.api.connection import SCOPE_KEY
from weir.api.exchange import ArrivingBodies, HttpExchange
from weir.app.servers import tenant_server
from weir.clock import SystemClock
from weir.config import GatewayConfig


class Watcher:
    """Wants to know."""

    def client_lost(self) -> None: ...

    def client_blocked(self) -> None: ...

    def client_writable(self) -> None: ...

    def client_not_kept(self) -> None: ...


async def nothing(*_: Any) -> None:
    """Neither receives nor sends."""


def exchange_on(connection: Any) -> HttpExchange:
    scope: dict[str, Any] = {"method": "POST", "path": "/", "http_version": "1.1", "headers": []}
    scope["extensions"] = {SCOPE_KEY: {"connection": connection}}
    return HttpExchange(scope, nothing, nothing, SystemClock(), GatewayConfig(), ArrivingBodies(1))


def test_nothing_is_not_a_chunk() -> None:
    """Protects framing: an empty chunk would end the body while the stream goes on, and the rest would be another answer."""
    sent: list[bytes] = []
    exchange = exchange_on(SimpleNamespace(watcher=None, transport=SimpleNamespace(write=sent.append), is_lost=False))
    exchange.write(b"")
    exchange.write(b"a")
    assert sent == [b"1\r\na\r\n"] and exchange.written == 1


def test_the_end_of_an_exchange_blinds_no_later_one() -> None:
    """Protects cancellation on kept-alive connections: an exchange that ends late leaves its successor's watcher alone."""
    connection = SimpleNamespace(watcher=None, transport=None, is_lost=False)
    first, second, watcher = exchange_on(connection), exchange_on(connection), Watcher()
    first.watch(Watcher())
    second.watch(watcher)
    first.watch(None)
    assert connection.watcher is watcher
    second.watch(None)
    assert connection.watcher is None


class CuttingApp:
    """Cuts every connection, with its headers out or not."""

    def new_request_id(self) -> str:
        return "unused"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send, SystemClock(), GatewayConfig(), ArrivingBodies(1))
        if exchange.path == "/started":
            await exchange.start(200, [])
            exchange.write(b"x")
        exchange.abort()


@pytest.mark.parametrize("path", ["started", "unanswered"])
async def test_a_cut_is_not_logged_as_a_missing_answer(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Protects logs: whom the application cuts, it owes no answer, and the server says nothing of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    app: Any = CuttingApp()
    server = tenant_server(app, GatewayConfig())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        with contextlib.suppress(ConnectionResetError):
            assert b"500" not in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        server.should_exit = True
    listener.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
