"""A cell: coordinator and control in this process, the tenant side here too or in gateway processes.

It composes and starts the parts, says when they are ready, and takes them down in order: refuse, let finish, end the rest, stop
engines, flush the journal, close the stores, release the state directory. Each part's failure ends the whole cell.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from weir import errors
from weir.app.engine_choice import check_engine_names, check_further_pools, declare_models
from weir.app.engine_clients import EngineClients
from weir.app.fronts import Front, FrontParts, LinkedFront, OwnFront
from weir.app.link_sockets import LinkListener
from weir.app.listeners import Listeners
from weir.app.running_view import RunningCell, gauges_of
from weir.app.runtime import settle_garbage_collector, unless_stopped
from weir.app.servers import QuietServer
from weir.app.stores import Stores, open_stores
from weir.clock import SystemClock, SystemEntropy
from weir.config import WeirConfig, environment_of_engine
from weir.control.bootstrap import BootstrapSecrets, bootstrap, draft_keys, shown_secrets
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.control.pruning import Pruning
from weir.control.refresh import Refresh
from weir.control.supervisor import Supervisor
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Adapting, Fleet
from weir.coordinator.leadership import Leadership
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.registry.model import EngineKind
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import Replica, ReplicaState
from weir.engines.launcher import LocalLauncher
from weir.link.frames import Terms
from weir.ports import Acknowledgement, LedgerStore
from weir.storage.state_directory import BODY_DIGEST_SECRET, CACHE_SALT_SECRET, StateDirectory, write_private_file
from weir.telemetry import Telemetry
from weir.units import Millis

_log = structlog.get_logger("weir.cell")

SNAPSHOT_VALID_MS: Millis = 60_000
"""How long the approved configuration may be worked by without having been checked against the store."""
_ACKNOWLEDGE_MS: Millis = 2_000
"""How long a change waits for all gateways before it is answered with those that are behind."""


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


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ready file says, as written. gateways: only where they are processes of their own."""

    api: str
    admin: str
    metrics: str
    secrets: BootstrapSecrets
    aliases: list[dict[str, str]]
    gateways: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """The JSON object of the ready file."""
        return {
            "api": self.api,
            "admin": self.admin,
            "metrics": self.metrics,
            **self.secrets,
            "aliases": self.aliases,
            **({"gateways": self.gateways} if self.gateways else {}),
        }


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
        self._engines = EngineClients(options.config.engine)
        config = options.config.coordinator
        self._executions = ExecutionTable(
            stores.ledger, config.remembered_executions, config.request_id_ms, config.store_wait_ms
        )
        lease = stores.lease
        self._leadership = Leadership(lease, self._clock, self._entropy.token(12).hex()) if lease is not None else None
        self._terms = _terms_of(options.config, stores.directory, self._entropy)
        self._links = LinkListener(options.config.link)
        self._coordinator: Coordinator | None = None
        self._front: Front | None = None
        self._draining = False
        self._commands = Commands(stores.catalog, self._publish, self._clock, self._entropy)
        self._commands.confirm = self._confirm
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
        options, leadership = self._options, self._leadership
        models = await unless_stopped(stop, self._declared())  # what may refuse a start comes before it replaces a cell
        if models is None:
            return
        async with Listeners(options.listen, self._config.gateway, self._telemetry, options.announce) as listeners:
            if leadership is None:
                await self._run(models, listeners, stop, on_ready)
            elif await unless_stopped(stop, self._win(leadership)):
                async with asyncio.TaskGroup() as tasks:
                    leading = tasks.create_task(leadership.run())
                    await self._run(models, listeners, stop, on_ready)
                    leading.cancel()
                await leadership.give_back()

    async def _win(self, leadership: Leadership) -> bool:
        if self._options.standby:
            self._options.announce("standing by until the cell that leads is gone")
        return await leadership.win(by_force=not self._options.standby)

    async def _run(
        self, models: DeclaredModels, listeners: Listeners, stop: asyncio.Event, on_ready: Callable[[Ready], None]
    ) -> None:
        secrets = await unless_stopped(stop, self._bootstrap(models))
        if secrets is None:
            return
        await self._commands.refresh()
        snapshot = self._commands.published.serving(self._served_pools())
        recovered = await recover(
            self._stores.ledger,
            self._clock,
            snapshot,
            self._config.coordinator.group_ms,
            keeps_open=self._config.link.listen is not None,
        )
        if recovered.resolved:
            self._options.announce(f"resolved {recovered.resolved} hold(s) that a crash left open")
        coordinator = self._coordinator = self._compose_coordinator(recovered, snapshot)
        coordinator.renew(SNAPSHOT_VALID_MS)
        if self._leadership is not None:
            self._leadership.on_regained = coordinator.leads_again
        front = self._front = self._compose_front(coordinator, recovered.journal.epoch)
        view = RunningCell(self._clock, recovered.book, coordinator, self._fleet, self._supervisor, front.inbox)
        self._telemetry.read_gauges_from(
            lambda: gauges_of(coordinator, self._executions, recovered.book, self._fleet, lambda: recovered.journal.backlog)
        )
        listeners.begin()
        async with asyncio.TaskGroup() as tasks:
            supervisor = tasks.create_task(self._supervisor.run())
            tasks.create_task(coordinator.run())
            watchdog = tasks.create_task(self._fail_when_broken())
            refresh = Refresh(self._commands, self._renew)
            upkeep = [tasks.create_task(part.run()) for part in (self._compose_pruning(recovered), refresh)]
            admin = await asyncio.to_thread(_admin_app, self._commands, self._stores.ledger, view, self._entropy)
            front.start(tasks, listeners)
            server = listeners.serve_admin(tasks, admin, self._new_request_id)
            if await unless_stopped(stop, self._wait_ready(front)):
                ready = self._ready(listeners, secrets, snapshot, front.gateways)
                self._write_ready_file(ready)
                settle_garbage_collector()
                on_ready(ready)
                await stop.wait()
            await self._take_down(coordinator, front, server)
            supervisor.cancel()
            watchdog.cancel()
            for task in upkeep:
                task.cancel()

    async def _declared(self) -> DeclaredModels:
        """What the engines of this start serve. Raises EngineError."""
        folder, engine = self._stores.directory.path / "models", self._engines.of(EngineKind.OPENAI)
        return await declare_models(self._options.engines, self._config, folder, engine, self._options.announce)

    async def _bootstrap(self, models: DeclaredModels) -> BootstrapSecrets:
        """Demo catalog on an empty state directory; the models of this start in any case."""
        directory = self._stores.directory
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
            leads=self._leadership.holds if self._leadership is not None else lambda: True,
            kept=recovered.kept if self._config.link.listen is not None else None,
            lease_ms=self._config.link.lease_ms,
        )
        return Coordinator(parts, snapshot)

    def _compose_pruning(self, recovered: Recovered) -> Pruning:
        kept = self._config.ledger.retention_days
        return Pruning(self._stores.ledger, self._clock, recovered.journal.epoch, kept, self._telemetry.rolled_up.inc)

    def _compose_front(self, coordinator: Coordinator, epoch: int) -> Front:
        parts = FrontParts(
            clock=self._clock,
            entropy=self._entropy,
            telemetry=self._telemetry,
            config=self._config,
            folder=self._stores.directory.path,
            links=self._links,
            terms=self._terms,
            epoch=epoch,
            is_ready=self._is_ready,
            on_broken=self.fail,
        )
        own = None if self._options.gateways else OwnFront(parts, coordinator, self._engines)
        if own is not None and self._config.link.listen is None:
            return own
        return LinkedFront(parts, coordinator, self._options.gateways, own)

    def _new_request_id(self) -> str:
        return f"req-{self._entropy.token(12).hex()}"

    async def _wait_ready(self, front: Front) -> bool:
        await self._supervisor.wait_ready()
        return await front.wait_ready()

    def _ready(self, listeners: Listeners, secrets: BootstrapSecrets, snapshot: Snapshot, gateways: list[str]) -> Ready:
        aliases = [{"alias": alias.name, "model_revision": alias.revision} for alias in snapshot.aliases.values()]
        return Ready(listeners.api_url, listeners.admin_url, listeners.metrics_url, secrets, aliases, gateways)

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
        self._links.close()
        await self._engines.aclose()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        """It is in force here when it was handed over, and everywhere once every gateway says so."""
        if self._coordinator is not None:
            self._coordinator.publish(await asyncio.to_thread(snapshot.serving, self._served_pools()))
        return Acknowledgement(snapshot.version)

    async def _confirm(self, acknowledged: Acknowledgement) -> Acknowledgement:
        """The gateways that are behind after a bound."""
        if self._front is None:
            return acknowledged
        return Acknowledgement(acknowledged.version, await self._front.all_hold(acknowledged.version, _ACKNOWLEDGE_MS))

    def _renew(self) -> None:
        """What is in force was checked against the store."""
        assert self._coordinator is not None
        self._coordinator.renew(SNAPSHOT_VALID_MS)

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

    async def _take_down(self, coordinator: Coordinator, front: Front, admin: QuietServer) -> None:
        self._draining = True
        self._options.announce(f"draining {self._executions.in_flight} request(s)")
        await coordinator.drain(self._config.coordinator.drain_grace_ms)
        admin.should_exit = True
        await front.stop()
        coordinator.close()


def _terms_of(config: WeirConfig, directory: StateDirectory, entropy: SystemEntropy) -> Terms:
    """What gateways are told. Raises InvalidRequest for bounds that contradict each other."""
    coordinator, link = config.coordinator, config.link
    if not 3 * link.heartbeat_ms < link.silence_ms <= link.lease_ms - 4 * link.heartbeat_ms:
        raise errors.InvalidRequest(
            "link.silence_ms must be above 3 times link.heartbeat_ms, and at least 4 times that below link.lease_ms.",
            members={"field": "link.silence_ms"},
        )
    return Terms(
        digest_key=directory.secret(BODY_DIGEST_SECRET, entropy),
        salt_key=directory.secret(CACHE_SALT_SECRET, entropy),
        step_tokens=coordinator.delivery_step_tokens,
        store_wait_ms=coordinator.store_wait_ms,
        heartbeat_ms=link.heartbeat_ms,
        silence_ms=link.silence_ms,
        lease_ms=link.lease_ms,
    )


def _adapting(config: WeirConfig) -> Adapting:
    """How replicas adapt."""
    coordinator = config.coordinator
    return Adapting(
        back_off_ms=config.engine.restart_backoff_ms,
        least_percent=coordinator.concurrency_min_percent,
    )


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
    if options.standby and options.config.store.url is None:
        raise errors.InvalidRequest("--standby needs a PostgreSQL database.", members={"field": "--standby"})
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
