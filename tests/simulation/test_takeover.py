"""Another coordinator leads while requests run: each goes on where it was, and ends once, for client, ledger and engine."""

import os
from collections import Counter
from random import Random

import pytest
from tests.simulation.link_world import LinkWorld, Setting, play_links, until
from tests.simulation.linked_gateway import Moment
from tests.simulation.session_stand import virtual_loop
from tests.simulation.test_links_in_time import (
    COLLECTED_EVERY,
    FAULTS_S,
    MESSAGES,
    OF_STREAMS,
    Story,
    once,
    world_of_seed,
)

from weir.core.ledger.records import SettleRecord
from weir.sim.random_source import seeded_random

pytestmark = pytest.mark.usefixtures("quick_collection_without_logs")
SEEDS = int(os.environ.get("WEIR_SIM_SEEDS", "200"))
BLOCK = 50


# ── at every step of a request ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fleet_s", [0.0, 0.5], ids=["replicas known", "replicas unknown"])
@pytest.mark.parametrize("moment", ["sent", "arrived"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_takeover_at_a_step_changes_no_answer(kind: str, moment: Moment, fleet_s: float) -> None:
    """Protects running requests: their coordinator dies as a message left or came, and each answer is whole all the same."""
    for stream in (True,) if kind in OF_STREAMS else (True, False):

        async def script(world: LinkWorld, stream: bool = stream) -> None:
            gateway, deaths = world.gateways[0], Counter[str]()
            world.stand.fleet_s = fleet_s

            def die() -> None:
                deaths["died"] += 1
                world.tasks.create_task(world.take_over())

            world.hear = once(MESSAGES[kind], moment, die)
            asked = gateway.ask(stream=stream)
            await until(lambda: asked.done_s is not None, 12, "it ends")
            assert deaths["died"] == 1
            record = asked.answer.record
            assert record is not None and (record.status, record.finish_reason, asked.tokens) == ("completed", "length", 40)
            await until(lambda: world.is_quiet, 10, "it rests")
            assert len(gateway.renewed_s) == 1 and not gateway.lost_s
            end = world.durable_end(asked)
            assert isinstance(end, SettleRecord) and (end.tenant_output_tokens, end.basis) == (40, "engine")

        play_links(script, Setting(gateways=1))


# ── at random ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Succession(Story):
    """A story in which the coordinator is replaced as well."""

    def begin(self) -> None:
        """Set every moment."""
        super().begin()
        self._world.stand.fleet_s = self._random.choice((0.0, 0.3, 1.5))
        for _ in range(self._random.choice((1, 1, 2, 3))):
            self._loop.call_later(self._random.uniform(0, FAULTS_S), self._replace)

    def _replace(self) -> None:
        after_s, is_killed = self._random.uniform(0.01, 0.8), self._random.random() < 0.7
        self._world.tasks.create_task(self._world.take_over(after_s, is_killed=is_killed))


def run_seed(seed: int, *, collects: bool = False) -> LinkWorld:
    """The world of a seed, at its end. Raises SeedFailed."""
    random: Random = seeded_random(seed, "takeovers")

    async def script(world: LinkWorld) -> None:
        Succession(world, random).begin()
        await until(lambda: virtual_loop().time() > FAULTS_S + 3, FAULTS_S + 4, "the story ends")

    return world_of_seed(seed, random, script, (1, 2, 3), collects=collects)


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_a_seed_keeps_every_promise(first: int) -> None:
    """Protects clients, money, lanes and memory: coordinators are replaced while links, gateways and the store fail."""
    for seed in range(first, first + BLOCK):
        run_seed(seed, collects=seed % COLLECTED_EVERY == 0)
