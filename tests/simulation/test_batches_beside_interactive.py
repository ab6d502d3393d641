"""Batches beside interactive work: on pools of their own they change nothing for it, on shared ones they have their share."""

import asyncio
from dataclasses import replace

from tests.simulation.batch_world import Batches
from tests.simulation.stage import run_script
from tests.simulation.test_batches_in_time import bodies_of

from weir.core.batches.batch_records import BatchStatus
from weir.core.ledger.records import SettleRecord
from weir.core.registry.model import Pool
from weir.core.tenancy import ServiceClass
from weir.sim.random_source import seeded_random
from weir.sim.world import REVISION, SMALL_STEPS, Order, Spec, World

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
TALK = Pool("talk", REVISION.id, 2, 4, service_classes=(INTERACTIVE,))
NIGHT = Pool("night", REVISION.id, 2, 4, service_classes=(BATCH,))
SHARED = Pool("shared", REVISION.id, 2, 4)
CONVERSATION_S = 60
QUESTIONS_PER_S = 3.0


def world_of(*pools: Pool) -> Spec:
    """Two tenants on these pools."""
    return Spec(pools=pools, coordinator=replace(SMALL_STEPS, queue_wait_ms=60_000))


async def conversation(world: World) -> None:
    """Interactive streams of tenant 1, at the same moments in every run."""
    chance = seeded_random(7, "questions")
    ends = asyncio.get_running_loop().time() + CONVERSATION_S
    number = 0
    while asyncio.get_running_loop().time() < ends:
        await asyncio.sleep(chance.expovariate(QUESTIONS_PER_S))
        world.send(Order(f"question {number}", tenant=1, request_id=f"question-{number}", max_output_tokens=48))
        number += 1


def talked(spec: Spec, lines: int) -> tuple[list[float], list[float]]:
    """First-token and per-token times of the conversation, sorted, beside a batch of so many lines."""
    times: list[tuple[float, float]] = []

    async def script(world: World) -> None:
        batches = Batches(world)
        life = batches.live()
        batch = await batches.submit(bodies_of(lines)) if lines else None
        await conversation(world)
        if batch is not None:
            view = await batches.view(batch)
            assert view.end is None and view.counts.completed > lines // 4, "it runs all the while"
        life.worker.stop()
        await life.task
        await world.until(lambda: world.cell.is_quiet)
        world.checker.catch_up()
        for end in world.checker.durable.ends.values():
            if isinstance(end, SettleRecord) and end.id.tenant == "tenant-1" and end.timing.tpot_ms is not None:
                assert end.timing.ttft_ms is not None
                times.append((end.timing.ttft_ms, end.timing.tpot_ms))

    run_script(script, spec)
    assert len(times) > CONVERSATION_S
    return sorted(ttft for ttft, _ in times), sorted(tpot for _, tpot in times)


def p95(rising: list[float]) -> float:
    """Of sorted values."""
    return rising[int(0.95 * len(rising))]


def test_a_batch_on_its_own_pools_changes_nothing() -> None:
    """Protects interactive work: with the batch's pools full all the time, first tokens and pace are what they were."""
    spec = world_of(TALK, NIGHT)
    alone_first, alone_pace = talked(spec, 0)
    beside_first, beside_pace = talked(spec, 1_500)
    assert p95(beside_first) <= 1.05 * p95(alone_first) + 1 and p95(beside_pace) <= 1.05 * p95(alone_pace)


def test_idle_interactive_capacity_is_used_only_where_that_is_switched_on() -> None:
    """Protects interactive pools: a batch that no pool takes waits for one, and ends no line as an error for it."""

    async def script(world: World) -> None:
        batches = Batches(world)
        life = batches.live()
        batch = await batches.submit(bodies_of(10))
        await asyncio.sleep(120)
        view = await batches.view(batch)
        assert view.end is None and (view.counts.completed, view.counts.failed) == (0, 0) and not batches.started
        await batches.desk.cancel(batches.principal(), batch.record.id)
        done = await batches.until_done(batch)
        _, error = await batches.results(batch)
        assert done.status is BatchStatus.CANCELLED and {line["error"]["code"] for line in error} == {"batch_cancelled"}
        life.worker.stop()
        await life.task

    run_script(script, world_of(TALK))


def test_on_a_shared_pool_neither_starves() -> None:
    """Protects both: beside more interactive work than a pool can do, a batch still gets its share, and no more."""

    async def script(world: World) -> None:
        batches = Batches(world)
        life = batches.live()
        batch = await batches.submit(bodies_of(400))
        flood = asyncio.get_running_loop().create_task(flooded(world))
        await asyncio.sleep(60)
        flood.cancel()
        view = await batches.view(batch)
        interactive = [
            end for end in world.checker.durable.ends.values() if isinstance(end, SettleRecord) and end.id.tenant == "tenant-1"
        ]
        assert 10 <= view.counts.completed <= 0.6 * len(interactive) and view.counts.failed == 0
        life.worker.stop()
        await life.task

    run_script(script, world_of(SHARED))


async def flooded(world: World) -> None:
    """More questions than the pool can answer."""
    number = 0
    while True:
        world.send(Order(f"flood {number}", tenant=1, max_output_tokens=24, stream=False))
        number += 1
        await asyncio.sleep(0.05)
