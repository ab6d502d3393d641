"""A whole cell in virtual time: the real coordinator, journal, recovery, gateway and relay over a simulated engine and store.

It wires and starts, crashes and restarts, plays the supervisor, and asks the checkers. It changes no decision of the parts it
runs; what goes wrong is chosen by scenarios, through the methods here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

import msgspec

from weir import errors
from weir.config import CoordinatorConfig, GatewayConfig
from weir.coordinator.recovery import Recovered, recover
from weir.core.endings import FinishReason
from weir.core.ledger.records import SettleRecord
from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.request import InferenceRequest
from weir.core.tenancy import ApiKey, Application, Limits, Principal, Scope, ServiceClass, Tenant, digest_of_key, format_key
from weir.engines.simulated import SimulatedBounds, SimulatedEngine, SimulatedReplica
from weir.messages import GenerationRecord, ReplicaPace
from weir.ports import UsageQuery
from weir.sim.audit import Evidence, Exchange, audit, audit_balances
from weir.sim.checks import Checker
from weir.sim.clients import PATIENT, Habits, SimAnswer, SimClient
from weir.sim.faults import CellStore, EngineTraits, FaultyEngine, StepClock, StoreWeather
from weir.sim.process import Cell
from weir.sim.random_source import seeded_random, step_noise
from weir.sim.replicas import Keeper, PoolPlan, SimSupervisor
from weir.sim.virtual_loop import WALL_START_MS, VirtualLoop, run
from weir.storage.memory import MemoryLedger
from weir.units import Millis, Moment, Tokens

PRICE = Price(1, 200_000, 50_000, 600_000, batch_percent=50)
REVISION = Revision("sim@1", EngineKind.SIMULATED, "demo", 8_192, 2_048, 128, PRICE)
ALIAS = Alias("assistant", REVISION.id, 64)
BRIEF = Alias("brief", REVISION.id, 16)
POOL = "pool"
SMALL_STEPS = CoordinatorConfig(delivery_step_tokens=16, remembered_executions=500)
QUIET_S = 400.0
_POLL_S = 0.25
_STARTS_MAX = 200
_STALE_S = 2.0
CALLERS = (("app", 0), ("app", 1), ("other", 2), ("jobs", 3))
"""Each tenant's callers: an application and the number of its key."""
BATCH_CALLER = 3
BATCH_APPLICATION = CALLERS[BATCH_CALLER][0]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a world is made of. slowness: engine steps take this many times the demo row's two milliseconds.

    revisions: that pools may serve, beside the one that they serve where nothing else is said.
    replicas and concurrency: of its one pool, where pools names none. kv_tokens: of each engine, None for the row's. pace: what
    warm-ups show. time_zones: of the first tenants, the others have UTC; weights: likewise, the others have 1; leavers: tenants
    by number whose work may leave their pools. echoes: how often a finish is heard again. prefix_cache and counts_tokens: of
    engines, whether they keep what they read, and count inputs before they run.
    """

    replicas: int = 1
    concurrency: int = 2
    pools: Sequence[Pool] = ()
    revisions: Sequence[Revision] = ()
    kv_tokens: Tokens | None = None
    pace: ReplicaPace | None = None
    slowness: float = 10.0
    engine_idle_ms: Millis = 5_000
    engine_stop_ms: Millis = 3_000
    engine_burst: int = 1
    prefix_cache: bool = False
    counts_tokens: bool = True
    restart_ms: Millis = 2_000
    tenants: int = 2
    time_zones: Sequence[str] = ()
    weights: Sequence[int] = ()
    leavers: Sequence[int] = ()
    wall_start_ms: Millis = WALL_START_MS
    limits: Mapping[Scope, Limits] = field(default_factory=dict)
    echoes: float = 0.0
    coordinator: CoordinatorConfig = SMALL_STEPS
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    @property
    def kept_pools(self) -> Sequence[Pool]:
        """Its pools."""
        return self.pools or (Pool(POOL, REVISION.id, self.replicas, self.concurrency),)


@dataclass(frozen=True, slots=True)
class Order:
    """What a client sends, and how it behaves. tenant: its number, caller: its place in CALLERS.

    Prompts name requests, so each body has its own.
    """

    prompt: str
    tenant: int = 0
    caller: int = 0
    alias: str = ALIAS.name
    request_id: str | None = None
    stream: bool = True
    max_output_tokens: Tokens | None = None
    deadline_ms: Millis | None = None
    habits: Habits = PATIENT


def tenant_name(number: int) -> str:
    """The name of a tenant by its number."""
    return f"tenant-{number}"


def key_of(number: int, caller: int = 0) -> str:
    """The id of a tenant's key."""
    return f"{CALLERS[caller][1]:06x}{number:06x}"


def principal_of(number: int, caller: int = 0) -> Principal:
    """A caller of a tenant."""
    application = application_of(tenant_name(number), CALLERS[caller][0])
    return Principal(application.tenant, application.name, key_of(number, caller), application.service_class)


def application_of(tenant: str, name: str) -> Application:
    """One of a tenant's applications."""
    return Application(tenant, name, ServiceClass.BATCH if name == BATCH_APPLICATION else ServiceClass.INTERACTIVE)


def first_snapshot(spec: Spec) -> Snapshot:
    """The configuration that a world starts with."""
    keys: dict[bytes, ApiKey] = {}
    for number in range(spec.tenants):
        for caller, (application, _) in enumerate(CALLERS):
            key_id = key_of(number, caller)
            digest = digest_of_key(format_key(key_id, bytes(32)))
            assert digest is not None
            keys[digest] = ApiKey(key_id, tenant_name(number), application, digest)
    tenants, revisions = _tenants_of(spec), (REVISION, *spec.revisions)
    return Snapshot(
        version=1,
        tenants=tenants,
        applications={(name, each): application_of(name, each) for name in tenants for each, _ in CALLERS},
        keys=keys,
        aliases={alias.name: alias for alias in (ALIAS, BRIEF)},
        revisions={revision.id: revision for revision in revisions},
        pools={pool.name: pool for pool in spec.kept_pools},
        limits=spec.limits,
        prices={(revision.id, revision.price.version): revision.price for revision in revisions},
    )


def _tenants_of(spec: Spec) -> dict[str, Tenant]:
    zones, weights = [*spec.time_zones, *["UTC"] * spec.tenants], [*spec.weights, *[1] * spec.tenants]
    tenants = [
        Tenant(tenant_name(number), zones[number], weight=weights[number], leaves_its_pools=number in spec.leavers)
        for number in range(spec.tenants)
    ]
    return {tenant.name: tenant for tenant in tenants}


class World:
    """One cell after another over one ledger. Use `play`, which runs it in virtual time."""

    def __init__(self, spec: Spec, seed: int, loop: VirtualLoop, tasks: asyncio.TaskGroup) -> None:
        self.spec = spec
        self.seed = seed
        self.clock = StepClock(loop, spec.wall_start_ms)
        self.ledger = MemoryLedger()
        self.weather = StoreWeather(seeded_random(seed, "store"))
        self.weather.apply_to(self.ledger)
        self.snapshot = first_snapshot(spec)
        self.checker = Checker(self.clock, self.ledger, spec.coordinator, spec.kept_pools)
        self.checker.tally.first(self.snapshot)
        self.exchanges: list[Exchange] = []
        self._orders: dict[tuple[str, str], None] = {}
        self._tasks = tasks
        self._serial = 0
        self._engines: list[FaultyEngine] = []
        self._cell: Cell | None = None
        self._starting: tuple[CellStore, asyncio.Task[Recovered]] | None = None
        self._dead_store: CellStore | None = None
        self.is_accepting = False

    @property
    def cell(self) -> Cell:
        """The cell that runs."""
        assert self._cell is not None
        return self._cell

    def make_engine(self, serial: int) -> FaultyEngine:
        """Fresh engine processes for a cell."""
        spec = self.spec
        concurrency = {pool.name: pool.concurrency for pool in spec.kept_pools}
        noise = step_noise(seeded_random(self.seed, f"engine-{serial}"))
        replica = SimulatedReplica(
            concurrency=max(concurrency.values()),
            kv_tokens=spec.kv_tokens,
            noise=lambda step_ms: spec.slowness * noise(step_ms),
            prefix_cache=spec.prefix_cache,
        )
        inner = SimulatedEngine(replica, bounds=SimulatedBounds(stop_ms=spec.engine_stop_ms))
        traits = EngineTraits(concurrency, spec.engine_idle_ms, spec.engine_burst, spec.counts_tokens)
        engine = FaultyEngine(inner, traits, self.checker.engine_started)
        self._engines.append(engine)
        return engine

    def make_supervisor(self, cell: Cell, prefix: str) -> Keeper:
        """Who keeps a cell's replicas. prefix: of their names, which are unique over cells."""
        spec, snapshot = self.spec, self.snapshot
        plans = [
            PoolPlan(pool, snapshot.revisions[pool.revision], spec.restart_ms, spec.pace, spec.prefix_cache)
            for pool in snapshot.pools.values()
        ]
        return SimSupervisor(cell.fleet, cell.engine, plans, prefix, self.checker.places)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> bool:
        """Start a cell on what is durable; False if it dies while it recovers.

        A process that cannot reach its store is started again.
        """
        self._serial += 1
        store, snapshot = CellStore(self.ledger, self._supersede), self.snapshot
        recovering = self._tasks.create_task(self._recover(store, snapshot))
        self._starting = store, recovering
        await asyncio.wait([recovering])
        if not store.is_cut:
            await self._verify_if_there()
        self._starting = None
        if store.is_cut:
            return False
        self.checker.cell_started(snapshot)
        cell = self._cell = Cell(self, self._serial, store, recovering.result(), snapshot)
        if self.snapshot is not snapshot:
            cell.coordinator.publish(self.snapshot)
        cell.run_in(self._tasks)
        await asyncio.sleep(0)  # let each begin
        self.is_accepting = True
        return True

    async def _recover(self, store: CellStore, snapshot: Snapshot) -> Recovered:
        for _ in range(_STARTS_MAX):
            try:
                return await recover(store, self.clock, snapshot, self.spec.coordinator.group_ms)
            except errors.LedgerUnavailable:
                await asyncio.sleep(_POLL_S)
        raise AssertionError("the store stays away")

    def die(self) -> None:
        """The process dies at this instant, also one that is starting."""
        self.is_accepting = False
        if self._starting is not None:
            self._dead_store, recovering = self._starting
            self._dead_store.cut()
            recovering.cancel()
            return
        cell = self.cell
        self._dead_store = cell.store
        cell.die()
        self.checker.cell_died()

    async def bury(self, *, land: bool) -> None:
        """Wait for the end of a process that died. land: a write that was under way becomes durable. The weather clears."""
        store = self._dead_store
        assert store is not None
        if self._cell is not None and self._cell.store is store:
            await self._cell.gone()
        self.weather.clear()
        if land and store.writing is not None:
            with suppress(errors.LedgerUnavailable):  # the weather turned again meanwhile
                await self.ledger.write(*store.writing)

    async def crash(self, *, land: bool) -> None:
        """The process dies now; land: a write that is under way becomes durable all the same. The weather clears."""
        self.die()
        await self.bury(land=land)

    async def take_over(self) -> None:
        """A second process becomes the writer while the first one lives on; the first is buried a little later."""
        old, self.is_accepting = self.cell, False
        assert await self.start()
        await asyncio.sleep(_STALE_S)
        await old.coordinator.drain(1)  # it ends what it has, and writes that
        old.die()
        await old.gone()

    def _supersede(self) -> None:
        """The store has a new writer."""
        self.checker.tally.opened()
        cell = self._cell
        if cell is not None and not cell.store.is_cut and not cell.is_stale:
            cell.supersede()
            cell.wire.heard = self.checker.heard_of_stale
            cell.engine.on_start = lambda call: None
            self.checker.cell_died()

    async def shut_down(self, grace_ms: Millis) -> None:
        """Drain, then stop in order."""
        cell = self.cell
        await cell.coordinator.drain(grace_ms)
        self.is_accepting = False
        await self.until(lambda: not cell.conversations)
        cell.gateway.close()
        cell.coordinator.close()
        for service in cell.services[2:]:
            service.cancel()
        await asyncio.wait(cell.services, timeout=QUIET_S)
        assert all(service.done() for service in cell.services), "a part does not stop"
        cell.store.cut()
        if cell.journal.backlog:  # the store stayed away: what was not written is lost with the process
            self.checker.cell_died()
        await cell.engine.aclose()

    def settle_late(self, random: Random) -> None:
        """A settlement arrives for an execution that has ended: it is to be recorded, and to change nothing."""
        self.checker.catch_up()
        durable = self.checker.durable
        lost = [end for end in durable.ends.values() if end.finish_reason is FinishReason.COORDINATOR_LOST]
        ended = [end for end in lost or durable.ends.values() if isinstance(end, SettleRecord)]
        if self.is_accepting and ended:
            seq, end = self.cell.journal.next_seq(), random.choice(ended)
            late = msgspec.structs.replace(end, seq=seq, cost_microusd=90, tenant_output_tokens=150)
            durable.late.append(late)
            self.cell.journal.append(late)

    def publish(self, snapshot: Snapshot) -> None:
        """Put a configuration in force."""
        self.look_at_clock()
        self.snapshot = snapshot
        self.cell.coordinator.publish(snapshot)

    def change(self, **parts: Any) -> None:
        """Put the next version in force, with these parts of it changed."""
        self.publish(replace(self.snapshot, version=self.snapshot.version + 1, **parts))

    def look_at_clock(self) -> None:
        """Let both calendars see the present windows: each remembers the latest that it was asked about."""
        if self.is_accepting:
            self.checker.tally.look_at_clock()
            for tenant in self.snapshot.tenants:
                self.cell.book.windows_of(tenant, Moment(self.clock.monotonic_ns(), self.clock.wall_ms()))

    def step_wall(self, by_ms: Millis) -> None:
        """Somebody sets the wall clock, forward or back; not while a process starts, which looks at it once."""
        if self._starting is None:
            self.look_at_clock()
            self.clock.step_wall(by_ms)
            self.look_at_clock()

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, order: Order) -> Exchange:
        """A client sends a request now."""
        cell, name = self.cell, f"exchange-{len(self.exchanges)}"
        client = SimClient(self.clock, order.habits, self.spec.gateway.slow_client_grace_ms)
        exchange = Exchange(client, SimAnswer(name, client, self.checker))
        self.checker.prompts[name] = order.prompt
        self.checker.ids[order.prompt] = tenant_name(order.tenant), order.request_id or name
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
            model_alias=order.alias,
            prompt=order.prompt,
            max_output_tokens=order.max_output_tokens,
            deadline_ms=order.deadline_ms,
            stream=order.stream,
            request_id=order.request_id,
            yields=principal_of(order.tenant, order.caller).service_class is ServiceClass.BATCH,
        )
        await cell.gateway.generate(principal_of(order.tenant, order.caller), request, exchange.answer, "sim")
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
        audit(Evidence(self.checker, self.exchanges, lookups, emitted, step, self._prices(), takes_are_dated))

    def _prices(self) -> dict[int, Price]:
        return {version: price for (_, version), price in self.snapshot.prices.items()}

    async def _look_up_all(self) -> dict[tuple[str, str], GenerationRecord | None]:
        return {name: (await self.cell.inbox.lookup(*name)).record for name in self._orders}

    async def _verify_if_there(self) -> None:
        """The store's own check, unless it is away."""
        try:
            await self.verify()
        except errors.LedgerUnavailable:
            self.checker.note("not verified")

    async def verify(self) -> None:
        """The store's own check, while nothing is open."""
        report, durable = await self.ledger.verify(), self.checker.durable
        self.checker.catch_up()
        assert report.is_clean, report.problems
        assert report.open_holds == 0 and report.holds == report.settlements == len(durable.ends)
        assert report.late == durable.late_count, f"{report.late} records are late"

    async def finish(self) -> None:
        """Audit as it is, after a restart that remembers only what is durable, and the store's own sums."""
        self.weather.clear()
        await self.quiet()
        await self.shut_down(1_000)
        await self.start()
        await self.quiet()
        await self.shut_down(1_000)
        await self.verify()
        usage = await self.ledger.usage(UsageQuery(group_by=("tenant", "day")))
        audit_balances(self.checker, await self.ledger.open_epoch(0), usage)


Script = Callable[[World], Awaitable[None]]
AnyWorld = TypeVar("AnyWorld", bound=World)


def play(spec: Spec, seed: int, scenario: Script, *, until_ms: Millis = 3_600_000) -> World:
    """Run a scenario in a fresh world to its end and audit it; the world as it is then."""
    return play_in(World, spec, seed, scenario, until_ms=until_ms)


def play_in(
    kind: type[AnyWorld],
    spec: Spec,
    seed: int,
    scenario: Callable[[AnyWorld], Awaitable[None]],
    *,
    until_ms: Millis = 3_600_000,
) -> AnyWorld:
    """The same in another kind of world."""

    async def live() -> AnyWorld:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.TaskGroup() as tasks:
            world = kind(spec, seed, loop, tasks)
            await world.start()
            await scenario(world)
            await world.finish()
        return world

    return run(live(), until_ms=until_ms)
