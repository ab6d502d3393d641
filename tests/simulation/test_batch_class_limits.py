"""A tenant's batches under limits of their class: they wait at those, and leave the rest of its limits to who waits."""

import asyncio
from collections import Counter

import pytest
from tests.simulation.batch_world import Batches
from tests.simulation.stage import run_script
from tests.simulation.test_batches_in_time import bodies_of, check_whole

from weir.core.batches.batch_records import BatchStatus
from weir.core.registry.model import Pool
from weir.core.tenancy import Limits, Principal, Scope, ServiceClass
from weir.sim.random_source import seeded_random
from weir.sim.world import REVISION, Order, Spec, World, principal_of

TENANT = Scope("tenant-0")
JOBS = Scope("tenant-0", service_class=ServiceClass.BATCH)
LINES = 120
TALK_S = 40


class BatchesOfTalk(Batches):
    """Batches that an interactive application sends."""

    def principal(self, tenant: int = 0) -> Principal:
        """Whose batches they are."""
        return principal_of(tenant)


async def talk(world: World) -> list[str | None]:
    """Interactive requests of the same application, never more than a few at once; the code of each one's refusal."""
    chance, number = seeded_random(7, "questions"), 0
    ends, asked = asyncio.get_running_loop().time() + TALK_S, []
    while asyncio.get_running_loop().time() < ends:
        await asyncio.sleep(0.5 + chance.random())
        asked.append(world.send(Order(f"question {number}", request_id=f"question-{number}", max_output_tokens=24)))
        number += 1
    await world.until(lambda: all(exchange.is_done for exchange in asked))
    return [None if exchange.answer.refusal is None else exchange.answer.refusal.code for exchange in asked]


def refused_beside_a_batch(limits: dict[Scope, Limits]) -> tuple[Counter[str | None], int]:
    """How interactive requests were refused beside a batch under these limits, and the most lines that ran at once."""
    refused: list[str | None] = []
    most = 0

    async def script(world: World) -> None:
        nonlocal most
        batches = BatchesOfTalk(world)
        life = batches.live()
        batch = await batches.submit(bodies_of(LINES))
        talking = asyncio.get_running_loop().create_task(talk(world))
        while not talking.done():
            holds = world.checker.durable
            world.checker.catch_up()
            lines = [name for name, hold in holds.holds.items() if hold.service_class is ServiceClass.BATCH]
            most = max(most, sum(name not in holds.ends for name in lines))
            await asyncio.sleep(0.05)
        refused.extend(talking.result())
        done = await batches.until_done(batch)
        assert done.status is BatchStatus.COMPLETED and done.counts.failed == 0
        await check_whole(batches, batch, LINES)
        life.worker.stop()
        await life.task

    run_script(script, Spec(pools=(Pool("shared", REVISION.id, 4, 4),), limits=limits))
    return Counter(refused), most


@pytest.mark.parametrize(
    ("whole", "part", "code"),
    [
        (Limits(concurrency=8), Limits(concurrency=3), "concurrency_limited"),
        (Limits(requests_per_minute=90), Limits(requests_per_minute=30), "requests_limited"),
    ],
)
def test_a_batch_at_its_classs_limits_leaves_the_rest_to_who_waits(whole: Limits, part: Limits, code: str) -> None:
    """Protects a tenant's own users: its batch takes all of a limit that both share, and of its class's no more than that."""
    beside, _ = refused_beside_a_batch({TENANT: whole})
    assert beside[code] > 0 and set(beside) <= {None, code}, "without limits of its own a batch takes what it can get"
    beside, most = refused_beside_a_batch({TENANT: whole, JOBS: part})
    assert set(beside) == {None} and beside.total() > TALK_S // 2
    assert part.concurrency is None or most == part.concurrency
