"""The sockets of a cell, bound before anything else: a start that cannot have them changes nothing. Closed at the end."""

import asyncio
from collections.abc import Callable
from typing import Any

from weir.api.tenant_app import TenantApp
from weir.app.servers import (
    MetricsServer,
    QuietServer,
    admin_server,
    begin_listening,
    bind,
    raise_open_files,
    tenant_server,
    url_of,
    within_open_files,
)
from weir.config import GatewayConfig
from weir.telemetry import Telemetry


class Listeners:
    """tenants: the socket that they connect to, which gateways in processes of their own inherit.

    Management and metrics listen on loopback, on the two ports after the tenants' own, or on free ones where that is free.
    """

    def __init__(
        self, address: tuple[str, int], config: GatewayConfig, telemetry: Telemetry, announce: Callable[[str], None]
    ) -> None:
        host, port = address
        self._config = within_open_files(config, raise_open_files())
        room = self._config.connections_max
        if room < config.connections_max:
            announce(f"room for {room} connections: half of the open files that this process may have")
        self.tenants = bind(host, port, config)
        self._admin = bind("127.0.0.1", port and port + 1, config)
        self._metrics = MetricsServer("127.0.0.1", port and port + 2, telemetry)
        self.api_url = url_of(self.tenants)
        self.admin_url = url_of(self._admin)
        self.metrics_url = self._metrics.url

    async def __aenter__(self) -> "Listeners":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._metrics.close)
        self.tenants.close()
        self._admin.close()

    def begin(self) -> None:
        """Take connections, which wait until they are served. Raises InvalidRequest."""
        for listener in (self.tenants, self._admin):
            begin_listening(listener, self._config)

    def serve_tenants(self, tasks: asyncio.TaskGroup, app: TenantApp) -> QuietServer:
        """Start the tenant side."""
        server = tenant_server(app, self._config)
        tasks.create_task(server.serve(sockets=[self.tenants]))
        return server

    def serve_admin(self, tasks: asyncio.TaskGroup, app: Any, new_request_id: Callable[[], str]) -> QuietServer:
        """Start the management side."""
        server = admin_server(app, new_request_id, self._config)
        tasks.create_task(server.serve(sockets=[self._admin]))
        return server
