"""A whole cell in virtual time: the real coordinator, journal, recovery, gateway and relay over a simulated engine and store.

It wires and starts, crashes and restarts, plays the supervisor, and asks the checkers. It changes no decision of the parts it
runs; what goes wrong is chosen by scenarios, through the methods here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weir import errors
from weir.config import CoordinatorConfig, GatewayConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest
from weir.core.tenancy import ApiKey, Application, Limits, Principal, Scope, ServiceClass, Tenant, digest_of_key, format_key
from weir.engines.simulated import SimulatedBounds, SimulatedEngine, SimulatedReplica
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import GenerationRecord, Register
from weir.ports import UsageQuery
from weir.sim.audit import Evidence, Exchange, audit, audit_balances
from weir.sim.checks import Checker
from weir.sim.clients import PATIENT, Habits, SimAnswer, SimClient
from weir.sim.faults import CellStore, EngineTraits, FaultyEngine, StepClock, StoreWeather
from weir.sim.random_source import SeededEntropy, seeded_random, step_noise
from weir.sim.replicas import PoolPlan, SimSupervisor
from weir.sim.virtual_loop import VirtualLoop, run
from weir.sim.wiretap import Wire
from weir.storage.memory import MemoryLedger
from weir.telemetry import Telemetry
from weir.units import Millis, Tokens

PRICE = Price(1, 200_000, 50_000, 600_000)
REVISION = Revision("sim@1", EngineKind.SIMULATED, "demo", 8_192, 2_048, 128, PRICE)
ALIAS = Alias("assistant", REVISION.id, 64)
POOL = "pool"
SMALL_STEPS = CoordinatorConfig(delivery_step_tokens=16, remembered_executions=500)
QUIET_S = 400.0
_POLL_S = 0.25
_STARTS_MAX = 200


@dataclass(frozen=True, slots=True)
class Spec:
    """What a world is made of. slowness: engine steps take this many times the demo row's two milliseconds."""

    replicas: int = 1
    concurrency: int = 2
    slowness: float = 10.0
    engine_idle_ms: Millis = 5_000
    engine_stop_ms: Millis = 3_000
    engine_burst: int = 1
    restart_ms: Millis = 2_000
    tenants: int = 2
    limits: Mapping[Scope, Limits] = field(default_factory=dict)
    coordinator: CoordinatorConfig = SMALL_STEPS
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


@dataclass(frozen=True, slots=True)
class Order:
    """What a client sends, and how it behaves. tenant: its number; prompts name requests, so each body has its own."""

    prompt: str
    tenant: int = 0
    request_id: str | None = None
    stream: bool = True
    max_output_tokens: Tokens | None = None
    deadline_ms: Millis | None = None
    habits: Habits = PATIENT


def tenant_name(number: int) -> str:
    """The name of a tenant by its number."""
    return f"tenant-{number}"


def principal_of(number: int) -> Principal:
    """The one caller of a tenant."""
    return Principal(tenant_name(number), "app", f"{number:012x}", ServiceClass.INTERACTIVE)


def first_snapshot(spec: Spec) -> Snapshot:
    """The configuration that a world starts with."""
    keys: dict[bytes, ApiKey] = {}
    for number in range(spec.tenants):
        digest = digest_of_key(format_key(f"{number:012x}", bytes(32)))
        assert digest is not None
        keys[digest] = ApiKey(f"{number:012x}", tenant_name(number), "app", digest)
    names = [tenant_name(number) for number in range(spec.tenants)]
    return Snapshot(
        version=1,
        tenants={name: Tenant(name) for name in names},
        applications={(name, "app"): Application(name, "app") for name in names},
        keys=keys,
        aliases={ALIAS.name: ALIAS},
        revisions={REVISION.id: REVISION},
        pools={POOL: Pool(POOL, REVISION.id, spec.replicas, spec.concurrency)},
        limits=spec.limits,
    )


class Cell:
    """One process: everything that a crash takes along."""

    def __init__(self, world: "World", serial: int, store: CellStore, recovered: Recovered) -> None:
        spec, clock = world.spec, world.clock
        telemetry = self.telemetry = Telemetry()
        self.store = store
        self.book = recovered.book
        self.journal = recovered.journal
        self.fleet = Fleet()
        self.inbox = Inbox()
        self.engine = world.make_engine(serial)
        self.conversations: dict[asyncio.Task[None], Exchange] = {}
        self.services: list[asyncio.Task[None]] = []
        config = spec.coordinator
        self.executions = ExecutionTable(store, config.remembered_executions, config.request_id_ms, config.store_wait_ms)
        parts = CoordinatorParts(
            clock=clock,
            config=config,
            fleet=self.fleet,
            book=recovered.book,
            journal=recovered.journal,
            executions=self.executions,
            rejections=RejectionCounter(store, clock),
            telemetry=telemetry,
        )
        self.coordinator = Coordinator(parts, world.snapshot)
        planner = Planner(self.inbox, lambda kind: self.engine, b"digest key", b"salt key")
        entropy = SeededEntropy(world.seed, f"entropy-{serial}")
        self.gateway = Gateway(clock, entropy, spec.gateway, self.inbox, planner, telemetry)
        self.wire = Wire(self.inbox, world.checker.heard)
        self.wire.link = self.coordinator.connect(Register(f"gateway-{serial}"), self.wire)
        self.gateway.connect(self.wire, lambda kind: self.engine, config.delivery_step_tokens, config.store_wait_ms)
        plan = PoolPlan(POOL, REVISION, spec.replicas, spec.concurrency, spec.restart_ms)
        self.supervisor = SimSupervisor(self.fleet, self.engine, plan, f"c{serial}", world.checker.replica_gone)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight anywhere."""
        busy = self.conversations or self.gateway.in_flight or self.inbox.open_requests or self.book.open_holds
        return not (busy or self.journal.backlog or self.fleet.running())


class World:
    """One cell after another over one ledger. Use `play`, which runs it in virtual time."""

    def __init__(self, spec: Spec, seed: int, loop: VirtualLoop, tasks: asyncio.TaskGroup) -> None:
        self.spec = spec
        self.seed = seed
        self.clock = StepClock(loop)
        self.ledger = MemoryLedger()
        self.weather = StoreWeather(seeded_random(seed, "store"))
        self.weather.apply_to(self.ledger)
        self.snapshot = first_snapshot(spec)
        self.checker = Checker(self.clock, self.ledger, PRICE, spec.coordinator, spec.concurrency)
        self.checker.limits = spec.limits
        self.exchanges: list[Exchange] = []
        self._orders: dict[tuple[str, str], None] = {}
        self._tasks = tasks
        self._serial = 0
        self._engines: list[FaultyEngine] = []
        self._cell: Cell | None = None
        self.is_accepting = False

    @property
    def cell(self) -> Cell:
        """The cell that runs."""
        assert self._cell is not None
        return self._cell

    def make_engine(self, serial: int) -> FaultyEngine:
        """Fresh engine processes for a cell."""
        spec = self.spec
        noise = step_noise(seeded_random(self.seed, f"engine-{serial}"))
        replica = SimulatedReplica(concurrency=spec.concurrency, noise=lambda step_ms: spec.slowness * noise(step_ms))
        inner = SimulatedEngine(replica, bounds=SimulatedBounds(stop_ms=spec.engine_stop_ms))
        traits = EngineTraits(spec.concurrency, spec.engine_idle_ms, spec.engine_burst)
        engine = FaultyEngine(inner, traits, self.checker.engine_started)
        self._engines.append(engine)
        return engine

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start a cell on what is durable; a process that cannot reach its store is started again."""
        self._serial += 1
        store = CellStore(self.ledger)
        recovered = await self._recover(store)
        self.checker.cell_started()
        cell = self._cell = Cell(self, self._serial, store, recovered)
        services = (cell.coordinator.run(), cell.gateway.run(), cell.supervisor.run())
        cell.services = [self._tasks.create_task(service) for service in services]
        await asyncio.sleep(0)  # let each begin
        self.is_accepting = True

    async def _recover(self, store: CellStore) -> Recovered:
        for _ in range(_STARTS_MAX):
            try:
                return await recover(store, self.clock, self.snapshot)
            except errors.LedgerUnavailable:
                await asyncio.sleep(_POLL_S)
        raise AssertionError("the store stays away")

    async def crash(self, *, land: bool) -> None:
        """The process dies now; land: a write that is under way becomes durable all the same. The weather clears."""
        cell, self.is_accepting = self.cell, False
        cell.wire.cut()
        cell.store.cut()
        for exchange in cell.conversations.values():
            exchange.cut = exchange.is_done = True
            exchange.client.vanish()
        self.checker.cell_died()
        await cell.engine.aclose()
        await _cancel(cell.conversations)
        await _cancel(cell.services)
        self.weather.clear()
        if land and cell.store.writing is not None:
            await self.ledger.write(*cell.store.writing)

    async def shut_down(self, grace_ms: Millis) -> None:
        """Drain, then stop in order."""
        cell = self.cell
        await cell.coordinator.drain(grace_ms)
        self.is_accepting = False
        await self.until(lambda: not cell.conversations)
        cell.gateway.close()
        cell.coordinator.close()
        await _cancel(cell.services[2:])
        await asyncio.wait(cell.services, timeout=QUIET_S)
        assert all(service.done() for service in cell.services), "a part does not stop"
        if cell.journal.backlog:  # the store stayed away: what was not written is lost with the process
            self.checker.cell_died()
        await cell.engine.aclose()

    def publish(self, snapshot: Snapshot) -> None:
        """Put a configuration in force."""
        self.snapshot = snapshot
        self.cell.coordinator.publish(snapshot)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, order: Order) -> Exchange:
        """A client sends a request now."""
        cell, name = self.cell, f"exchange-{len(self.exchanges)}"
        client = SimClient(self.clock, order.habits, self.spec.gateway.slow_client_grace_ms)
        exchange = Exchange(client, SimAnswer(name, client, self.checker))
        self.checker.prompts[name] = order.prompt
        self.exchanges.append(exchange)
        if order.request_id is not None:
            self._orders[tenant_name(order.tenant), order.request_id] = None
        self._join(cell, exchange, self._converse(cell, order, exchange))
        if order.habits.cancels_after_ms is not None:
            self._join(cell, exchange, self._cancel_by_id(cell, order, exchange))
        return exchange

    def _join(self, cell: Cell, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        cell.conversations[task] = exchange
        task.add_done_callback(cell.conversations.__delitem__)

    async def _converse(self, cell: Cell, order: Order, exchange: Exchange) -> None:
        habits = order.habits
        if habits.leaves_after_ms is not None:
            asyncio.get_running_loop().call_later(habits.leaves_after_ms / 1e3, exchange.client.leave)
        request = InferenceRequest(
            model_alias=ALIAS.name,
            prompt=order.prompt,
            max_output_tokens=order.max_output_tokens,
            deadline_ms=order.deadline_ms,
            stream=order.stream,
            request_id=order.request_id,
        )
        await cell.gateway.generate(principal_of(order.tenant), request, exchange.answer, "sim")
        exchange.is_done = True

    async def _cancel_by_id(self, cell: Cell, order: Order, exchange: Exchange) -> None:
        after_ms = order.habits.cancels_after_ms
        assert after_ms is not None and order.request_id is not None
        await asyncio.sleep(after_ms / 1e3)
        try:
            found = await cell.inbox.cancel(tenant_name(order.tenant), order.request_id)
        except errors.LedgerUnavailable:
            return
        exchange.cancelled = found.record

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition, at most QUIET_S of virtual time."""
        for _ in range(int(QUIET_S / _POLL_S)):
            if reached():
                return
            await asyncio.sleep(_POLL_S)
        raise AssertionError("the world does not become quiet")

    async def quiet(self) -> None:
        """Wait until nothing is in flight, then audit."""
        await self.until(lambda: self.cell.is_quiet)
        emitted: dict[str, Tokens] = {}
        for engine in self._engines:
            for prompt, tokens in engine.emitted_by_prompt().items():
                emitted[prompt] = max(tokens, emitted.get(prompt, 0))
        lookups = await self._look_up_all()
        step = self.spec.coordinator.delivery_step_tokens
        takes_are_dated = self._serial == 1 or not self.clock.was_stepped
        audit(Evidence(self.checker, self.exchanges, lookups, emitted, step, PRICE, takes_are_dated))

    async def _look_up_all(self) -> dict[tuple[str, str], GenerationRecord | None]:
        return {name: (await self.cell.inbox.lookup(*name)).record for name in self._orders}

    async def finish(self) -> None:
        """Audit as it is, after a restart that remembers only what is durable, and the store's own sums."""
        self.weather.clear()
        await self.quiet()
        await self.shut_down(1_000)
        await self.start()
        await self.quiet()
        await self.shut_down(1_000)
        usage = await self.ledger.usage(UsageQuery(group_by=("tenant",)))
        audit_balances(self.checker, await self.ledger.open_epoch(0), usage)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel and wait until they ended."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if cancelled:
        await asyncio.wait(cancelled)


Script = Callable[[World], Awaitable[None]]


def play(spec: Spec, seed: int, scenario: Script, *, until_ms: Millis = 3_600_000) -> World:
    """Run a scenario in a fresh world to its end and audit it; the world as it is then."""

    async def live() -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.TaskGroup() as tasks:
            world = World(spec, seed, loop, tasks)
            await world.start()
            await scenario(world)
            await world.finish()
        return world

    return run(live(), until_ms=until_ms)
