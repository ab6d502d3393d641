"""One exchange after another on a connection: the first one's end takes nothing from the second."""

from types import SimpleNamespace
from typing import Any

from weir.api.connection import SCOPE_KEY
from weir.api.exchange import HttpExchange
from weir.clock import SystemClock
from weir.config import GatewayConfig


class Watcher:
    """Wants to know."""

    def client_lost(self) -> None: ...

    def client_blocked(self) -> None: ...

    def client_writable(self) -> None: ...


async def nothing(*_: Any) -> None:
    """Neither receives nor sends."""


def exchange_on(connection: Any) -> HttpExchange:
    scope: dict[str, Any] = {"method": "POST", "path": "/", "http_version": "1.1", "headers": []}
    scope["extensions"] = {SCOPE_KEY: {"connection": connection}}
    return HttpExchange(scope, nothing, nothing, SystemClock(), GatewayConfig())


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
