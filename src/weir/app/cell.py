"""The embedded cell: gateway, coordinator and control in one process, engines as child processes or behind URLs.

It composes and starts the parts, says when they are ready, and takes them down in order: refuse, let finish, end the rest, stop
engines, flush the journal, close the stores, release the state directory. Each part's failure ends the whole cell.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from weir.api.tenant_app import TenantApp
from weir.app.engine_choice import check_engine_names, check_further_pools, declare_models
from weir.app.running_view import RunningCell, gauges_of
from weir.app.servers import (
    MetricsServer,
    QuietServer,
    admin_server,
    listen,
    raise_open_files,
    tenant_server,
    url_of,
    within_open_files,
)
from weir.app.stores import Stores, open_stores
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig, environment_of_engine
from weir.control.bootstrap import BootstrapSecrets, bootstrap, draft_keys, shown_secrets
from weir.control.commands import Commands
from weir.control.pruning import Pruning
from weir.control.refresh import Refresh
from weir.control.supervisor import Supervisor
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Adapting, Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.registry.model import EngineKind
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import Replica, ReplicaState
from weir.engines.launcher import LocalLauncher
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import Register
from weir.ports import Acknowledgement, Engine, LedgerStore
from weir.storage.state_directory import BODY_DIGEST_SECRET, CACHE_SALT_SECRET, write_private_file
from weir.telemetry import Telemetry

_log = structlog.get_logger("weir.cell")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CellOptions:
    """How `weir up` was asked to start. listen: (host, port), port 0 for any free one."""

    engines: list[str]
    state: Path
    listen: tuple[str, int]
    config: WeirConfig
    ready_file: Path | None = None
    announce: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ready file says, as written."""

    api: str
    admin: str
    metrics: str
    secrets: BootstrapSecrets
    aliases: list[dict[str, str]]

    def content(self) -> dict[str, Any]:
        """The JSON object of the ready file."""
        return {
            "api": self.api,
            "admin": self.admin,
            "metrics": self.metrics,
            **self.secrets,
            "aliases": self.aliases,
        }


class Engines:
    """One client per engine kind."""

    def __init__(self, config: WeirConfig) -> None:
        first_output_ms, idle_ms = config.engine.first_output_ms, config.engine.idle_ms
        self._llamacpp = LlamaCppEngine(first_output_ms=first_output_ms, idle_ms=idle_ms)
        self._openai = OpenAICompatibleEngine(first_output_ms=first_output_ms, idle_ms=idle_ms)

    def of(self, kind: EngineKind) -> Engine:
        """The client that speaks to this kind of engine."""
        return self._llamacpp if kind is EngineKind.LLAMACPP else self._openai

    async def aclose(self) -> None:
        """Close every connection."""
        await self._llamacpp.aclose()
        await self._openai.aclose()


class Cell:
    """One running cell. Create with `run_cell`."""

    def __init__(self, options: CellOptions, stores: Stores) -> None:
        self._options = options
        self._config = options.config
        self._stores = stores
        self._clock = SystemClock()
        self._entropy = SystemEntropy()
        self._telemetry = Telemetry()
        self._fleet = Fleet(self._clock, _adapting(options.config))
        self._fleet.on_state = _log_state
        self._engines = Engines(options.config)
        self._inbox = Inbox()
        config = options.config.coordinator
        self._executions = ExecutionTable(
            stores.ledger, config.remembered_executions, config.request_id_ms, config.store_wait_ms
        )
        self._coordinator: Coordinator | None = None
        self._draining = False
        self._commands = Commands(stores.catalog, self._publish, self._clock, self._entropy)
        threads = options.config.pool.threads
        launcher = LocalLauncher(threads=threads, start_ms=options.config.engine.start_ms, environment=environment_of_engine())
        self._supervisor = Supervisor(self._fleet, launcher, self._engines.of, options.config.engine, self._clock)
        self._supervisor.announce = options.announce
        self._fleet.on_demand = self._supervisor.demand
        self._fleet.on_condemned = self._supervisor.condemn
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
        """Serve until `stop` is set, then drain; set before it is ready, it ends the start. Raises what broke the cell."""
        secrets = await _unless_stopped(stop, self._bootstrap())
        if secrets is None:
            return
        await self._commands.refresh()
        snapshot = self._commands.published.serving(self._served_pools())
        recovered = await recover(self._stores.ledger, self._clock, snapshot, self._config.coordinator.group_ms)
        if recovered.resolved:
            self._options.announce(f"resolved {recovered.resolved} hold(s) that a crash left open")
        coordinator = self._coordinator = self._compose_coordinator(recovered, snapshot)
        gateway = self._compose_gateway(coordinator)
        view = RunningCell(self._clock, recovered.book, coordinator, self._fleet, self._supervisor, self._inbox)
        self._telemetry.read_gauges_from(
            lambda: gauges_of(coordinator, self._executions, recovered.book, self._fleet, lambda: recovered.journal.backlog)
        )
        async with _Listeners(self._options, self._telemetry) as listeners, asyncio.TaskGroup() as tasks:
            supervisor = tasks.create_task(self._supervisor.run())
            tasks.create_task(coordinator.run())
            tasks.create_task(gateway.run())
            watchdog = tasks.create_task(self._fail_when_broken())
            upkeep = [tasks.create_task(part.run()) for part in (self._compose_pruning(recovered), Refresh(self._commands))]
            admin = await asyncio.to_thread(_admin_app, self._commands, self._stores.ledger, view, self._entropy)
            app = TenantApp(gateway, self._clock, self._entropy, self._config.gateway, self._is_ready, self.fail)
            servers = [listeners.serve_tenants(tasks, app), listeners.serve_admin(tasks, admin, app.new_request_id)]
            if await _unless_stopped(stop, self._supervisor.wait_ready()):
                ready = self._ready(listeners, secrets, snapshot)
                self._write_ready_file(ready)
                _settle_garbage_collector()
                on_ready(ready)
                await stop.wait()
            await self._take_down(coordinator, gateway, servers)
            supervisor.cancel()
            watchdog.cancel()
            for task in upkeep:
                task.cancel()

    async def _bootstrap(self) -> BootstrapSecrets:
        """Demo catalog on an empty state directory; the models of this start in any case."""
        options, directory = self._options, self._stores.directory
        models = await declare_models(
            options.engines,
            self._config,
            directory.path / "models",
            self._engines.of(EngineKind.OPENAI),
            options.announce,
        )
        if not directory.bootstrap_keys:
            directory.keep_bootstrap_keys(draft_keys(self._entropy))
        await bootstrap(self._commands, models, directory.bootstrap_keys)
        for pool in models.pools:
            revision = next(entry for entry in models.revisions if entry.id == pool.revision)
            self._supervisor.add_pool(pool, revision)
        return shown_secrets(await self._stores.catalog.load(), directory.bootstrap_keys)

    def _compose_coordinator(self, recovered: Recovered, snapshot: Snapshot) -> Coordinator:
        config = self._config.coordinator
        parts = CoordinatorParts(
            clock=self._clock,
            config=config,
            fleet=self._fleet,
            book=recovered.book,
            journal=recovered.journal,
            executions=self._executions,
            rejections=RejectionCounter(self._stores.ledger, self._clock),
            telemetry=self._telemetry,
        )
        return Coordinator(parts, snapshot)

    def _compose_pruning(self, recovered: Recovered) -> Pruning:
        kept = self._config.ledger.retention_days
        return Pruning(self._stores.ledger, self._clock, recovered.journal.epoch, kept, self._telemetry.rolled_up.inc)

    def _compose_gateway(self, coordinator: Coordinator) -> Gateway:
        digest_key = self._stores.directory.secret(BODY_DIGEST_SECRET, self._entropy)
        salt_key = self._stores.directory.secret(CACHE_SALT_SECRET, self._entropy)
        planner = Planner(self._inbox, self._engines.of, digest_key, salt_key)
        gateway = Gateway(self._clock, self._entropy, self._config.gateway, self._inbox, planner, self._telemetry)
        link = coordinator.connect(Register(f"gw-{self._entropy.token(8).hex()}"), self._inbox)
        config = self._config.coordinator
        gateway.connect(link, self._engines.of, config.delivery_step_tokens, config.store_wait_ms)
        return gateway

    def _ready(self, listeners: "_Listeners", secrets: BootstrapSecrets, snapshot: Snapshot) -> Ready:
        aliases = [{"alias": alias.name, "model_revision": alias.revision} for alias in snapshot.aliases.values()]
        return Ready(listeners.api_url, listeners.admin_url, listeners.metrics_url, secrets, aliases)

    def _write_ready_file(self, ready: Ready) -> None:
        content = msgspec.json.format(msgspec.json.encode(ready.content()), indent=2) + b"\n"
        for path in self._ready_files():
            write_private_file(path, content)

    def _ready_files(self) -> list[Path]:
        asked = self._options.ready_file
        return [self._stores.directory.ready_file, *([asked] if asked else [])]

    def remove_ready_files(self) -> None:
        """Nothing is ready."""
        for path in self._ready_files():
            path.unlink(missing_ok=True)

    async def aclose(self) -> None:
        """Nothing is ready any more, and no engine is spoken to."""
        self.remove_ready_files()
        await self._engines.aclose()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        """In one process a snapshot is in force everywhere once it was handed over."""
        if self._coordinator is not None:
            self._coordinator.publish(await asyncio.to_thread(snapshot.serving, self._served_pools()))
        return Acknowledgement(snapshot.version)

    def _served_pools(self) -> set[str]:
        """What an earlier start declared stays on record, but only the pools of this one are served."""
        return {pool.name for pool in self._fleet.pools}

    def _is_ready(self) -> bool:
        return not self._draining and bool(self._fleet.ready_addresses())

    def fail(self, fault: BaseException) -> None:
        """A broken invariant ends the cell: it must not serve on wrong figures."""
        if not self.broken.done():
            self.broken.set_exception(fault)

    async def _fail_when_broken(self) -> None:
        await self.broken

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _take_down(self, coordinator: Coordinator, gateway: Gateway, servers: list[QuietServer]) -> None:
        self._draining = True
        self._options.announce(f"draining {gateway.in_flight} request(s)")
        await coordinator.drain(self._config.coordinator.drain_grace_ms)
        for server in servers:
            server.should_exit = True
        gateway.close()
        coordinator.close()


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What a part of the start gives; None when `stop` came first, and then that part was cancelled."""
    loop = asyncio.get_running_loop()
    tasks = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return None if tasks[0].cancelled() else tasks[0].result()


class _Listeners:
    """The sockets of a cell: bound at once, so that the ready file can name them, closed at the end.

    Management and metrics listen on loopback, on the two ports after the tenants' own, or on free ones where that is free.
    """

    def __init__(self, options: CellOptions, telemetry: Telemetry) -> None:
        host, port = options.listen
        config = within_open_files(options.config.gateway, raise_open_files())
        self._config = config
        if config.connections_max < options.config.gateway.connections_max:
            options.announce(
                f"room for {config.connections_max} connections: half of the open files that this process may have"
            )
        self._tenants = listen(host, port, config)
        self._admin = listen("127.0.0.1", port and port + 1, config)
        self._metrics = MetricsServer("127.0.0.1", port and port + 2, telemetry)
        self.api_url = url_of(self._tenants)
        self.admin_url = url_of(self._admin)
        self.metrics_url = self._metrics.url

    async def __aenter__(self) -> "_Listeners":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._metrics.close)
        self._tenants.close()
        self._admin.close()

    def serve_tenants(self, tasks: asyncio.TaskGroup, app: TenantApp) -> QuietServer:
        """Start the tenant side."""
        server = tenant_server(app, self._config)
        tasks.create_task(server.serve(sockets=[self._tenants]))
        return server

    def serve_admin(self, tasks: asyncio.TaskGroup, app: Any, new_request_id: Callable[[], str]) -> QuietServer:
        """Start the management side."""
        server = admin_server(app, new_request_id, self._config)
        tasks.create_task(server.serve(sockets=[self._admin]))
        return server


_YOUNG_OBJECTS = 20_000
"""Requests leave few cycles: collecting every 700 objects, as Python does, cost a tenth of the CPU of a request."""


def _adapting(config: WeirConfig) -> Adapting:
    """How replicas adapt."""
    coordinator = config.coordinator
    return Adapting(
        back_off_ms=config.engine.restart_backoff_ms,
        least_percent=coordinator.concurrency_min_percent,
    )


def _settle_garbage_collector() -> None:
    """What the start made lives as long as the process: leave it out of every collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)


def _admin_app(commands: Commands, ledger: LedgerStore, view: RunningCell, entropy: SystemEntropy) -> Any:
    """The management application; its framework takes a second to import, so this runs off the loop."""
    from weir.api.admin import AdminParts, create_admin_app

    return create_admin_app(AdminParts(commands, ledger, view, entropy))


async def run_cell(options: CellOptions, stop: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
    """Start a cell, serve until `stop` is set, drain, and release everything.

    Raises InvalidRequest for a wrong option, StateLocked, StateUnreadable, EngineError when an engine cannot be asked,
    StaleEpoch when a newer cell took the database over, and whatever broke the cell.
    """
    check_engine_names(options.engines, options.config.engine)
    check_further_pools(options.engines, options.config.pools)
    async with open_stores(options.state, options.config.store, options.announce) as stores:
        cell = Cell(options, stores)
        cell.remove_ready_files()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: _loop_fault(cell, context))
        try:
            await cell.run(stop, on_ready)
        finally:
            await cell.aclose()


def _loop_fault(cell: Cell, context: dict[str, Any]) -> None:
    """A callback of the loop failed; a broken invariant in it ends the cell like any other."""
    fault = context.get("exception")
    _log.error("loop_fault", message=context.get("message"), fault=type(fault).__name__, exc_info=fault)
    if isinstance(fault, AssertionError):
        cell.fail(fault)


def _log_state(replica: Replica, before: ReplicaState, why: str) -> None:
    if before is not ReplicaState.STARTING:  # a start is announced as such
        structlog.get_logger("weir.fleet").warning(
            "replica_state", replica=replica.name, before=before.value, now=replica.state.value, why=why
        )
