"""The mixed scenario: a cell, its tenants and everything that goes wrong, all drawn from one seed.

It chooses and orders; it asserts nothing, which is the checkers' part. Every duration is virtual and every loop bounded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random

from weir import errors
from weir.config import CoordinatorConfig, GatewayConfig
from weir.core.registry.model import Pool
from weir.core.tenancy import ServiceClass
from weir.errors import WeirError
from weir.messages import ReplicaPace
from weir.ports import EngineCall
from weir.sim.changes import (
    ZONES,
    change_all_limits,
    change_one_limit,
    change_price,
    change_reach,
    change_time_zone,
    change_weights,
    limits_of,
    revoke,
    step_wall_clock,
    wall_start_of,
    weight_of,
)
from weir.sim.clients import PATIENT, Habits
from weir.sim.random_source import seeded_random
from weir.sim.world import ALIAS, BATCH_CALLER, BRIEF, CALLERS, POOL, REVISION, Order, Spec, World, play, tenant_name
from weir.units import Tokens

TENANTS = 3
BOTH = tuple(ServiceClass)
SPAN_S = 30.0

Fault = Callable[[World, Random], Awaitable[None]]


def run_mixed(seed: int) -> World:
    """One mixed world from its seed, audited; raises what it violates."""
    return play(spec_of(seed), seed, mixed)


def spec_of(seed: int) -> Spec:
    """The cell of a seed: small, with bounds that bite."""
    random = seeded_random(seed, "spec")
    coordinator = CoordinatorConfig(
        queue_entries_per_tenant=random.choice([2, 5, 256]),
        queue_entries=random.choice([4, 12, 2_000]),
        queue_bytes=random.choice([600, 100_000]),
        queue_wait_ms=random.choice([700, 2_500, 5_000]),
        store_wait_ms=random.choice([400, 1_000, 2_000]),
        delivery_step_tokens=random.choice([4, 16, 256]),
        remembered_executions=random.choice([40, 500]),
        retries_min=random.choice([0, 1, 3, 20]),
        backlog_percent=random.choice([5, 100, 500]),
        batch_share_percent=random.choice([1, 10, 60]),
        concurrency_min_percent=random.choice([25, 100]),
        request_id_ms=random.choice([86_400_000, 100 * 86_400_000]),
    )
    zones = random.choices(ZONES, k=TENANTS)
    gateway = GatewayConfig(
        stream_buffer_bytes=random.choice([600, 256 * 1024]),
        slow_client_grace_ms=random.choice([800, 3_000]),
        keep_alive_ms=random.choice([600, 10_000]),
        early_headers_ms=random.choice([300, 2_000]),
    )
    return Spec(
        pools=pools_of(random),
        kv_tokens=random.choice([None, 320, 480, 1_600]),
        pace=pace_of(random),
        prefix_cache=random.random() < 0.5,
        counts_tokens=random.random() < 0.8,
        slowness=random.choice([2.0, 10.0, 25.0, 40.0]),
        engine_idle_ms=random.choice([1_000, 5_000]),
        engine_stop_ms=random.choice([500, 3_000]),
        engine_burst=random.choice([1, 1, 4, 40]),
        tenants=TENANTS,
        time_zones=zones,
        weights=[weight_of(random) for _ in range(TENANTS)],
        leavers=[number for number in range(TENANTS) if random.random() < 0.3],
        wall_start_ms=wall_start_of(random, zones),
        limits=limits_of(random, TENANTS) if random.random() < 0.7 else {},
        echoes=random.choice([0.0, 0.3]),
        coordinator=coordinator,
        gateway=gateway,
    )


def pools_of(random: Random) -> list[Pool]:
    """The revision's pools: a shared one that takes nearly everything, and up to two that are for less, or for one tenant."""
    first = Pool(
        POOL,
        REVISION.id,
        random.randint(1, 3),
        random.choice([1, 2, 3, 4, 8]),
        service_classes=random.choice([BOTH, BOTH, BOTH, (ServiceClass.INTERACTIVE,)]),
        input_tokens_max=random.choice([None, None, None, 300]),
    )
    return [first, *(_further_pool(random, f"{POOL}-{number}") for number in range(random.choice([0, 1, 1, 2])))]


def _further_pool(random: Random, name: str) -> Pool:
    return Pool(
        name,
        REVISION.id,
        random.randint(1, 2),
        random.randint(1, 4),
        tenant=random.choice([None, tenant_name(0), tenant_name(0), tenant_name(1)]),
        service_classes=random.choice([BOTH, BOTH, (ServiceClass.BATCH,), (ServiceClass.INTERACTIVE,)]),
        input_tokens_max=random.choice([None, None, 14, 100, 600]),
    )


def pace_of(random: Random) -> ReplicaPace | None:
    """What warm-ups show: nothing, or a pace at which a backlog of prompts soon is too long."""
    input_ms = random.choice([None, 0.0, 0.25, 2.0])
    return None if input_ms is None else ReplicaPace(random.choice([5.0, 40.0]), input_ms, random.choice([5.0, 40.0]))


async def mixed(world: World) -> None:
    """Clients and faults for SPAN_S, then fair weather until all of it has ended."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_arrivals(world, seeded_random(world.seed, "clients")))
        tasks.create_task(_faults(world, seeded_random(world.seed, "faults")))


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _arrivals(world: World, random: Random) -> None:
    """One after the other, or most of them together with others, so that tenants wait for their turns."""
    orders: list[Order] = []
    topics = random.choice([("",), ("",), ("", *(f"topic {topic} " + "y" * random.randint(0, 2_500) for topic in range(3)))])
    total, together = random.choice([random.randint(20, 90), 150]), random.choice([0.0, 0.0, 0.9])
    for number in range(total):
        if random.random() >= together:
            await asyncio.sleep(random.expovariate((1 - together) * total / SPAN_S))
        order = _repeat(random, orders) if orders and random.random() < 0.2 else _order(random, number, topics)
        orders.append(order)
        if world.is_accepting:
            world.send(order)


def _order(random: Random, number: int, topics: Sequence[str]) -> Order:
    """topics: what prompts begin with."""
    return Order(
        prompt=f"{random.choice(topics)}question {number} " + "x" * random.choice([0, 20, 300]),
        tenant=random.randrange(TENANTS),
        caller=random.choice([0, random.randrange(len(CALLERS)), BATCH_CALLER]),
        alias=random.choice([ALIAS.name, ALIAS.name, BRIEF.name]),
        request_id=f"order-{number}",
        stream=random.random() < 0.65,
        max_output_tokens=random.choice([None, None, 1, 8, 100, 300]),
        deadline_ms=random.choice([None, None, None, random.randint(1, 200), random.randint(200, 6_000)]),
        habits=_habits(random),
    )


def _repeat(random: Random, orders: list[Order]) -> Order:
    """An earlier order again: as it was, without its id, or with another body under its id."""
    earlier = random.choice([order for order in orders if order.request_id])
    kind = random.random()
    if kind < 0.7:
        return replace(earlier, habits=_habits(random), stream=random.random() < 0.5)
    if kind < 0.85:
        return replace(earlier, prompt=f"{earlier.prompt} again {len(orders)}")
    return replace(earlier, prompt=f"{earlier.prompt} anew {len(orders)}", request_id=None, habits=PATIENT)


def _habits(random: Random) -> Habits:
    kind = random.randrange(12)
    if kind == 0:
        return Habits(bytes_per_s=random.choice([200, 2_000]))
    if kind == 1:
        return Habits(stuck_after=random.randint(0, 1_500))
    if kind == 2:
        return Habits(leaves_after_bytes=random.randint(1, 2_000))
    if kind in (3, 4):
        return Habits(leaves_after_ms=random.choice([0, 5, random.randint(0, 3_000)]))
    if kind in (5, 6):
        return Habits(cancels_after_ms=random.choice([0, 5, random.randint(0, 3_000)]))
    if kind == 7:
        return Habits(headers_ms=random.randint(1, 1_500), cancels_after_ms=random.choice([None, random.randint(0, 2_000)]))
    return PATIENT


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _faults(world: World, random: Random) -> None:
    processes = asyncio.Lock()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(random.randint(0, 10)):
            fault, lock = random.choice(FAULTS), None
            if fault in (_crash, _restart, _take_over):
                lock = processes
            tasks.create_task(_strike(world, fault, seeded_random(world.seed, f"fault {random.random()}"), lock))


async def _strike(world: World, fault: Fault, random: Random, lock: asyncio.Lock | None) -> None:
    await asyncio.sleep(random.uniform(0, SPAN_S))
    if lock is None:
        await fault(world, random)
        return
    async with lock:
        await fault(world, random)


async def _lose_replica(world: World, random: Random) -> None:
    supervisor = world.cell.supervisor
    if supervisor.names:
        supervisor.lose(random.choice(supervisor.names))


async def _stall(world: World, random: Random) -> None:
    cell = world.cell
    if not cell.supervisor.names:
        return
    name = random.choice(cell.supervisor.names)
    cell.engine.inner.stall(name)
    await asyncio.sleep(random.choice([0.3, 2.0, 12.0]))
    if cell is world.cell and world.is_accepting:
        cell.engine.inner.unstall(name)


async def _slow_store(world: World, random: Random) -> None:
    world.weather.extra_ms = random.choice([50, 300, 1_500, 6_000])
    await asyncio.sleep(random.uniform(0.5, 8))
    world.weather.extra_ms = 0


async def _failing_store(world: World, random: Random) -> None:
    world.weather.failing = True
    await asyncio.sleep(random.uniform(0.1, 6))
    world.weather.failing = False


async def _lost_answers(world: World, random: Random) -> None:
    world.weather.losing_answers = True
    await asyncio.sleep(random.uniform(0.1, 6))
    world.weather.losing_answers = False


async def _crash(world: World, random: Random) -> None:
    """At any moment; every other time in the middle of a slow write, when much waits for it."""
    if random.random() < 0.5:
        world.weather.extra_ms = random.choice([300, 1_000])
        await asyncio.sleep(random.uniform(0.1, 2.0))
    if not world.is_accepting:
        return
    world.die()
    for more in random.choice([(), (), (True,), (True, True)]):  # again, and again, while it recovers
        await world.bury(land=random.random() < 0.5)
        world.weather.extra_ms = random.choice([0, 5])
        await _die_while_starting(world, random.choice([0.001, 0.004, 0.02]) if more else 0)
    if world.cell.store.is_cut:
        await world.bury(land=random.random() < 0.5)
        await asyncio.sleep(random.choice([0, 1]))
        await world.start()


async def _die_while_starting(world: World, after_s: float) -> None:
    """Start a process that dies after a while, if it has not recovered by then; if it has, it dies all the same."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.start())
        await asyncio.sleep(after_s)
        world.die()


async def _take_over(world: World, random: Random) -> None:
    """A second process starts while the first one lives on, often with a write under way and more behind it."""
    if random.random() < 0.7:
        world.weather.extra_ms = random.choice([100, 600])
        await asyncio.sleep(random.uniform(0.1, 1.0))
    if world.is_accepting:
        await world.take_over()
    world.weather.extra_ms = 0


async def _settle_late(world: World, random: Random) -> None:
    """Settlements arrive for executions that have ended, most of all for those that recovery ended."""
    for _ in range(random.randint(1, 3)):
        world.settle_late(random)
        await asyncio.sleep(random.uniform(0, 3))


async def _restart(world: World, random: Random) -> None:
    if world.is_accepting:
        world.weather.clear()  # a process that stops waits for its store
        await world.shut_down(random.choice([1, 500, 10_000]))
        await world.start()


async def _engine_faults(world: World, random: Random) -> None:
    engine = world.cell.engine

    def plan(call: EngineCall) -> tuple[Tokens, WeirError] | None:
        if random.random() < 0.5:
            return None
        tokens = random.choice([0, 1, 7, 40])
        return (tokens, errors.EngineError()) if tokens or random.random() < 0.5 else (0, errors.EngineRejected())

    engine.fault_plan = plan
    await asyncio.sleep(random.uniform(0.5, 5))
    engine.fault_plan = lambda call: None


async def _failing_replica(world: World, random: Random) -> None:
    """One replica goes on taking work and fails it early."""
    cell = world.cell
    if not cell.supervisor.names:
        return
    name, tokens = random.choice(cell.supervisor.names), random.choice([0, 0, 1, 12])
    cell.engine.fault_plan = lambda call: (tokens, errors.EngineError()) if call.replica.name == name else None
    await asyncio.sleep(random.uniform(1, 10))
    cell.engine.fault_plan = lambda call: None


FAULTS: tuple[Fault, ...] = (
    _lose_replica,
    _stall,
    _slow_store,
    _slow_store,
    _failing_store,
    _lost_answers,
    _crash,
    _crash,
    _restart,
    _take_over,
    _settle_late,
    _engine_faults,
    _failing_replica,
    _failing_replica,
    step_wall_clock,
    step_wall_clock,
    step_wall_clock,
    change_all_limits,
    change_one_limit,
    change_one_limit,
    change_time_zone,
    change_time_zone,
    change_weights,
    change_weights,
    change_reach,
    change_reach,
    change_price,
    revoke,
)
