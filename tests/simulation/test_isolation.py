"""Timing across tenants in virtual time: a seed decides everything, so what is found is found again."""

import pytest
from tests.isolation_probe import Probe, Send

from weir.sim.world import Order, Spec, World, play

ROUNDS = 60
WORDS = 1_200


def sender(world: World, tenant: int, caller: int = 0) -> Send:
    """Sends through the gateway; the time to the first token in milliseconds, as Weir measures it."""

    async def send(prompt: str) -> float:
        number = len(world.exchanges)  # a world tells requests apart by their prompts
        exchange = world.send(Order(f"{prompt} {number}", tenant, caller, max_output_tokens=1))
        await world.until(lambda: exchange.is_done)
        record = exchange.answer.record
        assert record is not None and record.timing.ttft_ms is not None
        return record.timing.ttft_ms

    return send


@pytest.mark.parametrize("seed", [1, 2])
def test_first_tokens_tell_nothing_of_another_tenants_prompts(seed: int) -> None:
    """Between tenants the probe is a coin; between two applications of one tenant, which share its cache, it finds out."""

    async def script(world: World) -> None:
        victim, attacker, colleague = sender(world, 0), sender(world, 1), sender(world, 1, caller=2)
        await Probe(victim, attacker, WORDS).check_finds_nothing(ROUNDS, seed=10 * seed)
        await Probe(colleague, attacker, WORDS).check_finds_out(ROUNDS, seed=10 * seed + 5)

    play(Spec(prefix_cache=True), seed, script)
