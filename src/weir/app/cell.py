"""A cell: coordinator and control in this process, the tenant side here too or in gateway processes.

It composes and starts the parts, says when they are ready, and takes them down in order: refuse, let finish, end the rest, stop
engines, flush the journal, close the stores, release the state directory. Each part's failure ends the whole cell.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from weir import errors
from weir.app.batch_side import BatchSide, files_placed
from weir.app.control_side import ACKNOWLEDGE_MS, ControlSide, aliases_of
from weir.app.coordinator_side import CoordinatorSide
from weir.app.engine_choice import check_engine_names, check_further_pools
from weir.app.fronts import Front, FrontParts, LinkedFront, OwnFront
from weir.app.listeners import Listeners
from weir.app.process_parts import ProcessParts, Watchdog
from weir.app.ready_file import Ready, ReadyFiles
from weir.app.retained_streams import placed
from weir.app.runtime import settle_garbage_collector, unless_stopped
from weir.app.servers import QuietServer
from weir.app.stores import Stores, open_stores
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig
from weir.control.declared_models import DeclaredModels
from weir.coordinator.coordinator import Coordinator
from weir.core.registry.snapshot import Snapshot
from weir.ports import Acknowledgement
from weir.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class CellOptions:
    """How `weir up` was asked to start. listen: (host, port), port 0 for any free one.

    gateways: how many in processes of their own; 0: one in this process. standby: wait until no other cell leads.
    """

    engines: list[str]
    state: Path
    listen: tuple[str, int]
    config: WeirConfig
    ready_file: Path | None = None
    gateways: int = 0
    standby: bool = False
    announce: Callable[[str], None] = field(default=lambda line: None)


class Cell:
    """One running cell. Create with `run_cell`."""

    def __init__(self, options: CellOptions, stores: Stores) -> None:
        self._options = options
        entropy = SystemEntropy()
        config = replace(
            options.config,
            retention=placed(options.config.retention, stores.directory.path, entropy),
            batches=files_placed(options.config.batches, stores.directory.path),
        )
        self._parts = ProcessParts(config, stores, SystemClock(), entropy, Telemetry(), options.announce)
        self._watchdog = Watchdog()
        self._ready_files = ReadyFiles([stores.directory.ready_file, options.ready_file])
        self._ready_files.remove()
        self._coordinating = CoordinatorSide(self._parts)
        self._fleet = self._coordinating.fleet
        # Where gateways outlive it, what a former cell called its replicas is nobody's name in this one.
        life = self._parts.entropy.token(4).hex() if options.config.link.listen is not None else ""
        self._control = ControlSide(self._parts, options.engines, self._fleet, self._put_in_force, life)
        self._control.commands.confirm = self._confirm
        self._fleet.on_demand = self._control.supervisor.demand
        self._fleet.on_condemned = self._control.supervisor.condemn
        self._front: Front | None = None
        self._draining = False

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
        """Serve until `stop` is set, then drain; set before it is ready, it ends the start. Raises what broke the cell."""
        options = self._options
        models = await unless_stopped(stop, self._control.declared())  # what may refuse a start comes before it replaces a cell
        if models is None:
            return
        async with Listeners(options.listen, options.config.gateway, self._parts.telemetry, options.announce) as listeners:
            run = self._run
            await self._coordinating.lead(stop, lambda: run(models, listeners, stop, on_ready), standby=options.standby)

    async def _run(
        self, models: DeclaredModels, listeners: Listeners, stop: asyncio.Event, on_ready: Callable[[Ready], None]
    ) -> None:
        secrets = await unless_stopped(stop, self._control.bootstrap(models))
        if secrets is None:
            return
        snapshot = self._control.snapshot
        coordinator = await self._coordinating.recover(snapshot)
        front = self._front = self._compose_front(coordinator)
        batches = BatchSide(self._parts, coordinator, self._control.engines, self._coordinating.terms)
        view = self._coordinating.view(self._control.supervisor.fault_of, front.inbox)
        listeners.begin()
        async with asyncio.TaskGroup() as tasks:
            upkeep = [*self._control.start(tasks, self._renew, view), *self._coordinating.start(tasks)]
            upkeep.append(tasks.create_task(self._watchdog.run()))
            admin = await self._control.admin_app(view)
            front.start(tasks, listeners)
            batches.start(tasks)
            server = listeners.serve_admin(tasks, admin, lambda: self._parts.new_name("req"))
            if await unless_stopped(stop, self._wait_ready(front)):
                urls = listeners.api_url, listeners.admin_url, listeners.metrics_url
                ready = Ready(*urls, secrets, aliases_of(snapshot), front.gateways)
                self._ready_files.write(ready)
                settle_garbage_collector()
                on_ready(ready)
                await stop.wait()
            batches.stop()
            await self._take_down(coordinator, front, server, batches)
            for task in upkeep:
                task.cancel()

    def _compose_front(self, coordinator: Coordinator) -> Front:
        coordinating = self._coordinating
        parts = FrontParts(
            process=self._parts,
            links=coordinating.links,
            terms=coordinating.terms,
            epoch=coordinating.epoch,
            is_ready=self._is_ready,
            on_broken=self._watchdog.fail,
        )
        own = None if self._options.gateways else OwnFront(parts, coordinator, self._control.engines)
        if own is not None and self._options.config.link.listen is None:
            return own
        return LinkedFront(parts, coordinator, self._options.gateways, own)

    async def _wait_ready(self, front: Front) -> bool:
        await self._control.wait_ready()
        return await front.wait_ready()

    async def aclose(self) -> None:
        """Nothing is ready any more, and no engine is spoken to."""
        self._ready_files.remove()
        self._coordinating.links.close()
        await self._control.aclose()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _put_in_force(self, snapshot: Snapshot) -> None:
        """Here at once, and everywhere once every gateway says so."""
        if self._coordinating.coordinator is not None:
            self._coordinating.coordinator.publish(snapshot)

    async def _confirm(self, acknowledged: Acknowledgement) -> Acknowledgement:
        """The gateways that are behind after a bound."""
        if self._front is None:
            return acknowledged
        return Acknowledgement(acknowledged.version, await self._front.all_hold(acknowledged.version, ACKNOWLEDGE_MS))

    def _renew(self) -> None:
        """What is in force was checked against the store."""
        assert self._coordinating.coordinator is not None
        self._coordinating.coordinator.renew(self._options.config.link.snapshot_valid_ms)

    def _is_ready(self) -> bool:
        return not self._draining and bool(self._fleet.ready_addresses())

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _take_down(self, coordinator: Coordinator, front: Front, admin: QuietServer, batches: BatchSide) -> None:
        self._draining = True
        await self._coordinating.drain()
        await batches.finish()
        admin.should_exit = True
        await front.stop()
        coordinator.close()


async def run_cell(options: CellOptions, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
    """Start a cell, serve until `stop` is set, drain, and release everything.

    Raises InvalidRequest for a wrong option, StateLocked, StateUnreadable, EngineError when an engine cannot be asked,
    StaleEpoch when a newer cell took the database over, and whatever broke the cell.
    """
    check_engine_names(options.engines, options.config.engine)
    check_further_pools(options.engines, options.config.pools)
    if options.standby and options.config.store.url is None:
        raise errors.InvalidRequest("--standby needs a PostgreSQL database.", members={"field": "--standby"})
    async with open_stores(options.state, options.config.store, options.announce) as stores:
        cell = Cell(options, stores)
        try:
            await cell.run(stop, on_ready)
        finally:
            await cell.aclose()
