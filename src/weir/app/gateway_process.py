"""A gateway in a process of its own: the tenant side on a link to the coordinator. It has no database and no state directory.

It may listen on a port that other gateways share, and always on one of its own. When it is asked to stop it is not ready at
once, finishes its streams within the grace, ends the rest, says goodbye and closes.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from weir import errors
from weir.api.tenant_app import TenantApp
from weir.app.batch_side import open_desk
from weir.app.engine_clients import EngineClients
from weir.app.issuer_documents import IssuerDocuments
from weir.app.process_parts import Watchdog
from weir.app.retained_streams import open_retention
from weir.app.runtime import settle_garbage_collector, unless_stopped
from weir.app.servers import (
    MetricsServer,
    QuietServer,
    begin_listening,
    raise_open_files,
    tenant_server,
    url_of,
    within_open_files,
)
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.gateway.sign_in import SignIn
from weir.link.gateway_end import Connect, GatewayEnd
from weir.telemetry import GaugeReading, Telemetry, snapshot_gauges

_LINK_ENDS_S = 0.1
"""The end of a cell shows on its gateways' inputs a moment before it shows on their links."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How a gateway was asked to start. connect: addresses of coordinators. listeners: bound, the one of its own first.

    metrics: (host, port). orphaned: set when the cell that started it is no more, or is done with it.
    """

    connect: Sequence[Connect]
    token: str
    listeners: Sequence[socket.socket]
    config: WeirConfig
    metrics: tuple[str, int]
    orphaned: asyncio.Event


class GatewayReady(msgspec.Struct, frozen=True):
    """Where a gateway listens: base URLs, each its own."""

    url: str
    metrics: str


class GatewayProcess:
    """One running gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._clock = SystemClock()
        self._entropy = SystemEntropy()
        self._telemetry = Telemetry()
        self._engines = EngineClients(options.config.engine)
        self._issuers = IssuerDocuments()
        self._sign_in = SignIn(self._clock, self._issuers, options.config.issuers)
        self._inbox = Inbox(self._clock)
        name = f"gw-{self._entropy.token(8).hex()}"
        self._link = GatewayEnd(self._clock, options.connect, options.token, self._inbox, name)
        self._retained = open_retention(options.config.retention, self._clock, self._entropy, self._inbox)
        self._link.on_lost, self._link.on_renewed = self._inbox.lose, self._inbox.renew
        self._draining = False
        self._refused: errors.LinkFault | None = None
        self._watchdog = Watchdog()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[GatewayReady], None]) -> None:
        """Serve until `stop`, then drain. Raises what broke the gateway, and LinkFault where no coordinator takes it."""
        metrics = MetricsServer(*self._options.metrics, self._telemetry)
        try:
            async with asyncio.TaskGroup() as tasks:
                link = tasks.create_task(self._keep_link(stop))
                if await unless_stopped(stop, self._link.opened.wait()):
                    await self._serve(tasks, stop, lambda: on_ready(self._ready(metrics)))
                    await self._link.leave()
                link.cancel()
            if self._refused is not None:
                raise self._refused
        finally:
            await self._sign_in.aclose()
            await self._issuers.aclose()
            await self._engines.aclose()
            if self._retained is not None:
                await self._retained.aclose()
            await asyncio.to_thread(metrics.close)
            for listener in self._options.listeners:
                listener.close()

    async def _keep_link(self, stop: asyncio.Event) -> None:
        """A coordinator that refuses for good ends the gateway, but not what its clients read in the middle of a word."""
        try:
            await self._link.run()
        except errors.LinkFault as refused:
            self._refused = refused
            self._inbox.lose()
            stop.set()

    async def _serve(self, tasks: asyncio.TaskGroup, stop: asyncio.Event, tell_ready: Callable[[], None]) -> None:
        gateway = self._compose()
        running = tasks.create_task(gateway.run())
        watchdog = tasks.create_task(self._watchdog.run())
        config = within_open_files(self._options.config.gateway, raise_open_files())
        app = TenantApp(gateway, self._clock, self._entropy, config, self._is_ready, self._watchdog.fail)
        app.door.sign_in = self._sign_in
        app.door.batches = open_desk(self._options.config.batches, self._clock, self._entropy)
        server = tenant_server(app, config)
        for listener in self._options.listeners:
            begin_listening(listener, config)
        serving = tasks.create_task(server.serve(sockets=list(self._options.listeners)))
        settle_garbage_collector()
        await server.is_up.wait()
        tell_ready()
        orphanage = tasks.create_task(self._when_orphaned(server))
        await stop.wait()
        self._draining = True
        await gateway.drain(self._options.config.coordinator.drain_grace_ms)
        server.should_exit = True
        await serving
        gateway.close()
        await running
        orphanage.cancel()
        watchdog.cancel()

    async def _when_orphaned(self, server: QuietServer) -> None:
        """The next cell needs the address, and nobody else decides about what is carried."""
        await self._options.orphaned.wait()
        server.refuse_connections()
        await asyncio.sleep(_LINK_ENDS_S)
        self._link.give_up()

    def _compose(self) -> Gateway:
        terms = self._link.terms
        assert terms is not None
        planner = Planner(self._inbox, self._engines.of, terms.digest_key, terms.salt_key)
        config = self._options.config.gateway
        gateway = Gateway(self._clock, self._entropy, config, self._inbox, planner, self._telemetry)
        if self._retained is not None:
            gateway.keep_with(self._retained)
        gateway.connect(self._link, self._engines.of, terms.step_tokens, terms.store_wait_ms, lambda: self._link.is_heard)
        self._telemetry.read_gauges_from(lambda: self._gauges(gateway))
        return gateway

    def _ready(self, metrics: MetricsServer) -> GatewayReady:
        return GatewayReady(url_of(self._options.listeners[0]), metrics.url)

    def _gauges(self, gateway: Gateway) -> list[GaugeReading]:
        linked = "Whether the link to the coordinator is up."
        return [
            ("weir_gateway_requests_in_flight", "Requests that this gateway carries.", {}, gateway.in_flight),
            ("weir_gateway_linked", linked, {}, float(self._link.is_linked)),
            *snapshot_gauges(self._inbox.snapshot.version, self._inbox.fresh_ms),
        ]

    def _is_ready(self) -> bool:
        inbox = self._inbox
        return not (self._draining or inbox.is_draining or inbox.is_lost) and inbox.has_replicas
