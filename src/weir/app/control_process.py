"""Control in a process of its own: catalog, engines and management, on a link to whichever coordinator leads.

What it keeps it replays to every coordinator that it finds, and to the same one after a link that broke. Its engines outlive a
coordinator, and end with it. When it is asked to stop it says nothing to the coordinator, which goes on with what it knows, and
stops the engines that it started.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weir import errors
from weir.app.cell_over_link import LinkedCell
from weir.app.control_side import ACKNOWLEDGE_MS, ControlSide, aliases_of
from weir.app.coordinator_process import check_shared_database
from weir.app.engine_choice import check_engine_names, check_further_pools
from weir.app.process_parts import ProcessParts, Watchdog
from weir.app.ready_file import Ready, ReadyFiles
from weir.app.runtime import settle_garbage_collector, unless_stopped
from weir.app.servers import (
    MetricsServer,
    QuietServer,
    admin_server,
    begin_listening,
    bind,
    raise_open_files,
    url_of,
    within_open_files,
)
from weir.app.stores import Stores, open_stores
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig
from weir.link.control_end import ControlEnd
from weir.link.control_messages import AskBehind
from weir.link.control_reports import ReportedFleet
from weir.link.gateway_end import Connect
from weir.ports import Acknowledgement
from weir.telemetry import GaugeReading, Telemetry
from weir.units import Millis

_LIFE_BYTES = 4
_ON_THE_WAY_MS: Millis = 500
"""Beside the time that gateways have, for the question and its answer."""


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """How `weir control` was asked to start. connect: addresses of coordinators. listen, metrics: (host, port)."""

    engines: list[str]
    state: Path
    connect: Sequence[Connect]
    token: str
    listen: tuple[str, int]
    metrics: tuple[str, int]
    config: WeirConfig
    ready_file: Path | None = None
    announce: Callable[[str], None] = field(default=lambda line: None)


class ControlProcess:
    """One running control. Create with `run_control`."""

    def __init__(self, options: ControlOptions, stores: Stores) -> None:
        self._options = options
        self._clock = SystemClock()
        self._parts = ProcessParts(options.config, stores, self._clock, SystemEntropy(), Telemetry(), options.announce)
        self._watchdog = Watchdog()
        self._ready_files = ReadyFiles([stores.directory.ready_file, options.ready_file])
        self._ready_files.remove()
        life = self._parts.entropy.token(_LIFE_BYTES).hex()
        fleet = ReportedFleet()
        self._link = ControlEnd(self._clock, options.connect, options.token, life, fleet)
        self._control = ControlSide(self._parts, options.engines, fleet, self._link.publish, life)
        self._control.commands.confirm = self._confirm
        supervisor = self._control.supervisor
        supervisor.on_located = fleet.locate
        self._link.on_demanded, self._link.on_condemned = supervisor.demand, supervisor.condemn
        self._parts.telemetry.read_gauges_from(self._gauges)

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
        """Serve until `stop`. Raises what broke control, and LinkFault where a coordinator refuses or dismisses it."""
        options = self._options
        config = within_open_files(options.config.gateway, raise_open_files())
        listener = bind(*options.listen, config)
        metrics = MetricsServer(*options.metrics, self._parts.telemetry)
        try:
            models = await unless_stopped(stop, self._control.declared())
            secrets = None if models is None else await unless_stopped(stop, self._control.bootstrap(models))
            if secrets is None:
                return
            await self._link.publish(self._control.snapshot)
            self._renew()
            begin_listening(listener, config)
            ready = Ready(None, url_of(listener), metrics.url, secrets, aliases_of(self._control.snapshot))
            await self._serve(listener, ready, stop, on_ready)
        finally:
            await asyncio.to_thread(metrics.close)
            listener.close()

    async def _serve(
        self, listener: socket.socket, ready: Ready, stop: asyncio.Event, on_ready: Callable[[Ready], None]
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            linking = tasks.create_task(self._link.run())
            view = LinkedCell(self._link, self._control.supervisor.fault_of)
            upkeep = [*self._control.start(tasks, self._renew, view), tasks.create_task(self._watchdog.run())]
            server = await self._serve_admin(tasks, listener, view)
            if await unless_stopped(stop, self._wait_ready()):
                self._ready_files.write(ready)
                settle_garbage_collector()
                on_ready(ready)
                await stop.wait()
            server.should_exit = True
            linking.cancel()
            await asyncio.wait([linking])  # what becomes of the engines from here on is nobody's business
            for task in upkeep:
                task.cancel()

    async def _serve_admin(self, tasks: asyncio.TaskGroup, listener: socket.socket, view: LinkedCell) -> QuietServer:
        app = await self._control.admin_app(view)
        server = admin_server(app, lambda: self._parts.new_name("req"), self._options.config.gateway)
        tasks.create_task(server.serve(sockets=[listener]))
        return server

    async def _wait_ready(self) -> bool:
        await self._link.in_force.wait()
        return await self._control.wait_ready()

    async def aclose(self) -> None:
        """Nothing is ready any more, and no engine is spoken to."""
        self._ready_files.remove()
        await self._control.aclose()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _confirm(self, acknowledged: Acknowledgement) -> Acknowledgement:
        """The gateways that are behind after a bound, or the coordinator where it cannot say."""
        version = acknowledged.version
        try:
            question = AskBehind(version, ACKNOWLEDGE_MS)
            behind = await self._link.ask(question, tuple[str, ...], ACKNOWLEDGE_MS + _ON_THE_WAY_MS)
        except errors.CoordinatorLost:
            behind = ("coordinator",)
        return Acknowledgement(version, behind)

    def _renew(self) -> None:
        """What is in force was checked against the store."""
        self._link.renew(self._control.commands.published.version, self._options.config.link.snapshot_valid_ms)

    def _gauges(self) -> list[GaugeReading]:
        linked = "Whether a coordinator works by what control says."
        return [("weir_control_linked", linked, {}, float(self._link.is_linked))]


async def run_control(options: ControlOptions, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
    """Start control, serve until `stop` is set, stop its engines, and release everything.

    Raises InvalidRequest for a wrong option, StateLocked, StateUnreadable, EngineError when an engine cannot be asked,
    LinkFault where a coordinator refuses it or another control was started, and whatever broke it.
    """
    check_shared_database(options.config, "weir control")
    check_engine_names(options.engines, options.config.engine)
    check_further_pools(options.engines, options.config.pools)
    async with open_stores(options.state, options.config.store, options.announce) as stores:
        process = ControlProcess(options, stores)
        try:
            await process.run(stop, on_ready)
        finally:
            await process.aclose()
