"""The coordinator in a process of its own: it decides and books, for gateways and for control on links, and runs batches where
files have a shared place. It keeps no engines.

What is approved it reads once, so that it can recover; from then on control says what is in force and for how long. It serves
metrics and nothing else. When it is asked to stop it leaves what runs to a coordinator that stands by, or finishes it within
the grace where none does.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from weir import errors
from weir.app.batch_side import BatchSide
from weir.app.cell_over_link import answer_of
from weir.app.coordinator_side import CoordinatorSide
from weir.app.engine_clients import EngineClients
from weir.app.process_parts import ProcessParts, Watchdog
from weir.app.runtime import settle_garbage_collector, unless_stopped
from weir.app.servers import MetricsServer, raise_open_files
from weir.app.stores import Stores, open_stores
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig
from weir.control.cell_view import CellView
from weir.control.snapshots import snapshot_on_record
from weir.coordinator.coordinator import Coordinator
from weir.core.registry.snapshot import Snapshot
from weir.gateway.inbox import Inbox
from weir.link.control_desk import ControlDesk
from weir.link.control_fleet import ControlledFleet
from weir.link.control_messages import AskBehind, Question
from weir.link.coordinator_end import CoordinatorEnd
from weir.messages import Register
from weir.telemetry import Telemetry
from weir.units import Millis

_log = structlog.get_logger("weir.coordinator")


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """How `weir coordinator` was asked to start. metrics: (host, port). standby: wait until no other one leads."""

    state: Path
    config: WeirConfig
    metrics: tuple[str, int]
    standby: bool = False
    announce: Callable[[str], None] = field(default=lambda line: None)


class CoordinatorReady(msgspec.Struct, frozen=True):
    """It leads. metrics: base URL. epoch: the number of its turn."""

    metrics: str
    epoch: int


class _Host:
    """Implements ControlledHost."""

    def __init__(self, coordinating: CoordinatorSide, coordinator: Coordinator, end: CoordinatorEnd, view: CellView) -> None:
        self._fleet = coordinating.fleet
        self._coordinator = coordinator
        self._end = end
        self._view = view

    def publish(self, snapshot: Snapshot) -> None:
        """Put it in force, unless it is older than what is."""
        if snapshot.version >= self._coordinator.snapshot.version:
            self._coordinator.publish(snapshot)
        else:
            _log.warning("older_snapshot_ignored", version=snapshot.version, in_force=self._coordinator.snapshot.version)

    def renew(self, version: int, valid_ms: Millis) -> None:
        """What is in force, if it is of this version, may be worked by for so long."""
        if version == self._coordinator.snapshot.version:
            self._coordinator.renew(valid_ms)

    def running(self) -> Mapping[str, int]:
        """By pool, above 0 where anything runs or waits."""
        return self._fleet.occupied()

    async def answer(self, question: Question) -> Any:
        """What the running coordinator knows."""
        if isinstance(question, AskBehind):
            return await self._end.all_hold(question.version, question.bound_ms)
        return await answer_of(self._view, question)


class CoordinatorProcess:
    """One running coordinator. Create with `run_coordinator`."""

    def __init__(self, options: CoordinatorOptions, stores: Stores) -> None:
        self._options = options
        self._parts = ProcessParts(options.config, stores, SystemClock(), SystemEntropy(), Telemetry(), options.announce)
        self._watchdog = Watchdog()
        self._coordinating = CoordinatorSide(self._parts)
        self._is_stopping = False

    async def run(self, stop: asyncio.Event, on_ready: Callable[[CoordinatorReady], None]) -> None:
        """Lead until `stop` is set, then hand over, or drain where nobody stands by. Raises what broke the coordinator."""
        raise_open_files()
        metrics = MetricsServer(*self._options.metrics, self._parts.telemetry)

        def tell_ready() -> None:
            settle_garbage_collector()
            on_ready(CoordinatorReady(metrics.url, self._coordinating.epoch))

        try:
            await self._coordinating.lead(stop, lambda: self._run(stop, tell_ready), standby=self._options.standby)
        finally:
            await asyncio.to_thread(metrics.close)

    async def _run(self, stop: asyncio.Event, tell_ready: Callable[[], None]) -> None:
        coordinating, parts = self._coordinating, self._parts
        catalog = await unless_stopped(stop, parts.stores.catalog.load())
        if catalog is None:
            return
        snapshot = await asyncio.to_thread(snapshot_on_record, catalog)
        coordinator = await coordinating.recover(snapshot)
        end = CoordinatorEnd(parts.clock, coordinator, coordinating.epoch, coordinating.terms, coordinating.links.token)
        desk = self._compose_desk(coordinator, end, snapshot)
        async with asyncio.TaskGroup() as tasks:
            upkeep = [*coordinating.start(tasks), tasks.create_task(self._watchdog.run()), tasks.create_task(desk.run())]
            serving = tasks.create_task(self._serve(end, tell_ready))
            engines = EngineClients(parts.config.engine)
            batches = self._begin_batches(tasks, coordinator, engines)
            await stop.wait()
            if batches is not None:
                batches.stop()
            await coordinating.finish()
            if batches is not None:
                await batches.finish()
            await engines.aclose()
            self._is_stopping = True
            for task in (serving, *upkeep):
                task.cancel()
            await asyncio.wait([serving])
            coordinator.close()

    def _begin_batches(self, tasks: asyncio.TaskGroup, coordinator: Coordinator, engines: EngineClients) -> BatchSide | None:
        """Run batches where files have a place that gateways share; a state directory is this process's alone."""
        config = self._parts.config.batches
        if config.directory is None and config.bucket is None:
            return None
        batches = BatchSide(self._parts, coordinator, engines, self._coordinating.terms)
        batches.start(tasks)
        return batches

    def _compose_desk(self, coordinator: Coordinator, end: CoordinatorEnd, snapshot: Snapshot) -> ControlDesk:
        """Where control comes in; the pools on record are known before it does, so that requests are told to wait for it."""
        parts, fleet = self._parts, self._coordinating.fleet
        inbox = Inbox(parts.clock)
        inbox.link = coordinator.connect(Register(parts.new_name("view")), inbox)
        view = self._coordinating.view(lambda pool: None, inbox)
        controlled = ControlledFleet(fleet, self._coordinating.carries)
        controlled.declare(snapshot.pools.values())
        fleet.on_condemned, fleet.on_demand = controlled.condemned, controlled.demanded
        host = _Host(self._coordinating, coordinator, end, view)
        desk = ControlDesk(parts.clock, host, controlled, self._coordinating.epoch, parts.config.link.heartbeat_ms)
        if (token := self._coordinating.links.control_token) is not None:
            end.take_control(desk.greet, token)
        return desk

    async def _serve(self, end: CoordinatorEnd, tell_ready: Callable[[], None]) -> None:
        """Links, until cancelled; a failure tells gateways at once to look for another coordinator."""
        async with self._coordinating.links.serving(end), asyncio.TaskGroup() as ends:
            ends.create_task(end.run())
            tell_ready()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                if not self._is_stopping:
                    end.abandon()

    async def aclose(self) -> None:
        """No link comes in any more."""
        self._coordinating.links.close()


async def run_coordinator(
    options: CoordinatorOptions, stop: asyncio.Event, on_ready: Callable[[CoordinatorReady], None]
) -> None:
    """Start a coordinator, lead until `stop` is set, hand over or drain, and release everything.

    Raises InvalidRequest for a wrong option, StateLocked, StateUnreadable, StaleEpoch when a newer coordinator took the
    database over, and whatever broke it.
    """
    check_shared_database(options.config, "weir coordinator")
    if options.config.link.listen is None:
        detail = "weir coordinator needs link.listen, where gateways and control connect."
        raise errors.InvalidRequest(detail, members={"field": "link.listen"})
    async with open_stores(options.state, options.config.store, options.announce) as stores:
        process = CoordinatorProcess(options, stores)
        try:
            await process.run(stop, on_ready)
        finally:
            await process.aclose()


def check_shared_database(config: WeirConfig, command: str) -> None:
    """Raises InvalidRequest without PostgreSQL: SQLite is one process's."""
    if config.store.url is None:
        detail = f"{command} needs a PostgreSQL database: give --database, or store.url."
        raise errors.InvalidRequest(detail, members={"field": "--database"})
