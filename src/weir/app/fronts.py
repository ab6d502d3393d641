"""The tenant side of a cell: a gateway in the cell's own process, or several in processes of their own.

Both give control a session of its own for look-ups. A front starts in the cell's task group and stops once nothing is admitted
any more.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from weir.api.tenant_app import TenantApp
from weir.app.batch_side import open_desk
from weir.app.engine_clients import EngineClients
from weir.app.gateway_keeper import GatewayKeeper
from weir.app.issuer_documents import IssuerDocuments
from weir.app.link_sockets import LinkListener, serving_unix
from weir.app.listeners import Listeners
from weir.app.process_parts import ProcessParts
from weir.app.retained_streams import open_retention
from weir.app.servers import QuietServer
from weir.config import LinkConfig, StoreConfig
from weir.coordinator.coordinator import Coordinator
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.gateway.sign_in import SignIn
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.frames import Terms
from weir.messages import Register
from weir.units import Millis


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What both kinds work with. is_ready: whether new work is welcome; on_broken: a broken invariant ends the cell.

    terms: what gateways are told. epoch: the coordinator's. links: where those come in that the cell does not start itself.
    """

    process: ProcessParts
    links: LinkListener
    terms: Terms
    epoch: int
    is_ready: Callable[[], bool]
    on_broken: Callable[[BaseException], None]


class Front(Protocol):
    """The tenant side. inbox: a session for look-ups."""

    @property
    def inbox(self) -> Inbox: ...

    @property
    def gateways(self) -> list[str]:
        """Base URLs of gateways that are reachable by themselves."""
        ...

    def start(self, tasks: asyncio.TaskGroup, listeners: Listeners) -> None:
        """Serve tenants on their socket."""
        ...

    async def wait_ready(self) -> bool:
        """True, once it serves."""
        ...

    async def all_hold(self, version: int, bound_ms: Millis) -> tuple[str, ...]:
        """Which gateways do not work by this snapshot version, once all do or after the bound."""
        ...

    async def stop(self) -> None:
        """Serve nobody any more. Nothing is admitted and little runs by now."""
        ...


class OwnFront:
    """A gateway in this process."""

    def __init__(self, parts: FrontParts, coordinator: Coordinator, engines: EngineClients) -> None:
        self._parts = parts
        self._server: QuietServer | None = None
        process = parts.process
        self.inbox = Inbox(process.clock)
        self._issuers = IssuerDocuments()
        self._sign_in = SignIn(process.clock, self._issuers, process.config.issuers)
        planner = Planner(self.inbox, engines.of, parts.terms.digest_key, parts.terms.salt_key)
        config = process.config.gateway
        self._gateway = Gateway(process.clock, process.entropy, config, self.inbox, planner, process.telemetry)
        retained = open_retention(process.config.retention, process.clock, process.entropy, self.inbox)
        if retained is not None:
            self._gateway.keep_with(retained)
        link = coordinator.connect(Register(process.new_name("gw")), self.inbox)
        self._gateway.connect(link, engines.of, parts.terms.step_tokens, parts.terms.store_wait_ms)

    @property
    def gateways(self) -> list[str]:
        """None: the cell's own address is the only one."""
        return []

    def start(self, tasks: asyncio.TaskGroup, listeners: Listeners) -> None:
        """Serve tenants on their socket."""
        parts, process = self._parts, self._parts.process
        tasks.create_task(self._gateway.run())
        config = process.config.gateway
        app = TenantApp(self._gateway, process.clock, process.entropy, config, parts.is_ready, parts.on_broken)
        app.door.sign_in = self._sign_in
        app.door.batches = open_desk(process.config.batches, process.clock, process.entropy)
        self._server = listeners.serve_tenants(tasks, app)

    async def wait_ready(self) -> bool:
        """At once."""
        return True

    async def all_hold(self, version: int, bound_ms: Millis) -> tuple[str, ...]:
        """In one process a snapshot is in force everywhere once it was handed over."""
        return ()

    async def stop(self) -> None:
        """Close once what is written was taken."""
        if self._server is not None:
            self._server.should_exit = True
        self._gateway.close()
        await self._sign_in.aclose()
        await self._issuers.aclose()
        if self._gateway.retained is not None:
            await self._gateway.retained.aclose()


class LinkedFront:
    """Gateways in processes of their own: a number of them on this host, and those that connect where `link.listen` says.

    own: the gateway in this process, where no number of others is asked for.
    """

    def __init__(self, parts: FrontParts, coordinator: Coordinator, number: int, own: OwnFront | None) -> None:
        self._parts = parts
        self._number = number
        self._own = own
        clock = parts.process.clock
        self._near_end = CoordinatorEnd(clock, coordinator, parts.epoch, parts.terms)
        self._far_end = CoordinatorEnd(clock, coordinator, parts.epoch, parts.terms, parts.links.token)
        self._keeper: GatewayKeeper | None = None
        self._serving: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._is_stopping = False
        self.inbox = Inbox(clock)
        self.inbox.link = coordinator.connect(Register(parts.process.new_name("control")), self.inbox)

    @property
    def gateways(self) -> list[str]:
        """Of this host's."""
        return self._keeper.urls if self._keeper is not None else []

    def start(self, tasks: asyncio.TaskGroup, listeners: Listeners) -> None:
        """Serve links, and start this host's gateways."""
        if self._own is not None:
            self._own.start(tasks, listeners)
        self._serving = tasks.create_task(self._run(listeners))

    async def _run(self, listeners: Listeners) -> None:
        # A gateway gets no credentials of a database, and needs none for the socket of its own cell.
        process = self._parts.process
        config = replace(process.config, store=StoreConfig(), pools={}, link=LinkConfig())
        near = serving_unix(self._near_end, process.stores.directory.path)
        far = self._parts.links.serving(self._far_end)
        async with near as path, far, asyncio.TaskGroup() as ends, asyncio.TaskGroup() as gateways:
            ends.create_task(self._near_end.run())
            ends.create_task(self._far_end.run())
            if self._number:
                self._keeper = GatewayKeeper(self._number, path, listeners.tenants, config)
                gateways.create_task(self._keeper.run())
            self._started.set()
            await self._until_over(listeners)

    async def _until_over(self, listeners: Listeners) -> None:
        """A stop waits for the gateways; a failure tells them at once that there is no coordinator any more."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._own is None:
                listeners.tenants.close()  # the gateways' copies are what clients reach
            if not self._is_stopping:
                self._near_end.abandon()
                self._far_end.abandon()

    async def wait_ready(self) -> bool:
        """True, once all of this host's listen."""
        await self._started.wait()
        return self._keeper is None or await self._keeper.wait_ready()

    async def all_hold(self, version: int, bound_ms: Millis) -> tuple[str, ...]:
        """Asked of every session."""
        behind = await asyncio.gather(*(end.all_hold(version, bound_ms) for end in (self._near_end, self._far_end)))
        return tuple(name for names in behind for name in names)

    async def stop(self) -> None:
        """Let the gateways finish, then close the links."""
        if self._own is not None:
            await self._own.stop()
        assert self._serving is not None
        self._is_stopping = True
        self._serving.cancel()
        await asyncio.wait([self._serving])
