"""Lines of a batch on lanes that were idle: they give them up at once when somebody waits, and end all the same."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

from tests.simulation.batch_world import Batches
from tests.simulation.test_batches_in_time import played

from weir.coordinator.preemption import RUNS_IN_VAIN_MAX
from weir.core.batches.batch_records import BatchStatus
from weir.core.batches.batch_view import BatchView
from weir.core.endings import FinishReason
from weir.core.ledger.records import SettleRecord
from weir.core.registry.model import Pool
from weir.engines.simulated_text import NATURAL_TOKENS_MAX, natural_output_tokens
from weir.sim.world import REVISION, SMALL_STEPS, Order, Spec, World
from weir.units import Tokens

LANES = 4
SHARED = Pool("shared", REVISION.id, 1, LANES)
SPEC = Spec(pools=(SHARED,), slowness=20.0, coordinator=replace(SMALL_STEPS, queue_wait_ms=60_000))
LONG: Tokens = 150
"""Output tokens of a line that takes six seconds and more."""
SECOND_MS = 1_000.0


def long_lines(number: int) -> list[dict[str, Any]]:
    """Lines of which each takes long."""
    prompts = (f"line {each} asks for something long" for each in range(10_000))
    found = (prompt for prompt in prompts if natural_output_tokens(prompt) >= LONG)
    return [{"input": prompt, "max_output_tokens": NATURAL_TOKENS_MAX} for prompt in islice(found, number)]


def questions(world: World) -> list[SettleRecord]:
    """How those that somebody waited for ended."""
    world.checker.catch_up()
    ends = world.checker.durable.ends.values()
    return [end for end in ends if isinstance(end, SettleRecord) and end.id.tenant == "tenant-1"]


def preempted(world: World) -> Counter[str]:
    """How often each line gave up its lane."""
    world.checker.catch_up()
    ends = world.checker.durable.ends.items()
    return Counter(name.request_id for name, end in ends if end.finish_reason is FinishReason.PREEMPTED)


async def ask(world: World, number: int, times: int = 1) -> None:
    """Short questions of somebody who waits."""
    for each in range(times):
        world.send(Order(f"question {number}.{each}", tenant=1, max_output_tokens=8))
    await world.until(lambda: len(questions(world)) >= (number + 1) * times)


async def check_whole(batches: Batches, batch: BatchView, lines: int) -> None:
    """Every line is in the results once, and paid for once."""
    done = await batches.until_done(batch)
    output, error = await batches.results(batch)
    assert done.status is BatchStatus.COMPLETED and (len(output), len(error)) == (lines, 0)
    assert len({line["custom_id"] for line in output}) == lines
    assert [len(ends) for ends in batches.paid(batch).values()] == [1] * lines


def test_somebody_who_waits_gets_an_idle_lane_back_within_a_second() -> None:
    """Protects interactive work on a shared pool: with all lanes lent to long lines, first output comes within a second."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(long_lines(12))
        for number in range(3):
            await asyncio.sleep(6)
            await ask(world, number, 2)
        asked = questions(world)
        assert len(asked) == 6 and all(end.timing.ttft_ms and end.timing.ttft_ms < SECOND_MS for end in asked)
        gave_up = preempted(world)
        assert 3 <= gave_up.total() <= 6, "no more than were waited for, and not none"
        await check_whole(batches, batch, 12)

    played(script, SPEC)


def test_nobody_is_refused_for_lines_that_would_give_way() -> None:
    """Protects short deadlines: long lines on every lane are no reason to refuse what one of them makes room for."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(long_lines(8))
        await asyncio.sleep(2)
        world.send(Order("in a hurry", tenant=1, max_output_tokens=8, deadline_ms=3_000))
        await world.until(lambda: bool(questions(world)))
        (end,) = questions(world)
        assert end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        await check_whole(batches, batch, 8)

    played(script, SPEC)


def test_a_line_that_gave_way_often_ends_all_the_same() -> None:
    """Protects batches: beside questions that come again before any line has ended, each line ends after a few tries."""

    async def script(world: World, batches: Batches) -> None:
        batch = await batches.submit(long_lines(LANES))
        asking = True

        async def keep_asking() -> None:
            number = 0
            while asking:
                await asyncio.sleep(4)
                await ask(world, number, LANES)
                number += 1

        task = asyncio.get_running_loop().create_task(keep_asking())
        await check_whole(batches, batch, LANES)
        asking = False
        await task
        gave_up = preempted(world)
        assert max(gave_up.values()) >= RUNS_IN_VAIN_MAX, "the questions came as often as this test needs"
        # Of those that gave way often one at a time keeps its lane, and the others go on giving way.
        slow = [end for end in questions(world) if end.timing.ttft_ms and end.timing.ttft_ms >= SECOND_MS]
        assert not slow

    played(script, SPEC)
