"""Whether a refusal's `Retry-After` is true: one caller, alone under its limits, waits exactly as long as it was told.

A moment earlier the same limit still refuses; then it does not. What a per-minute limit tells is waited for; the end of a
budget's window is reached by setting the wall clock. Everything is drawn from the seed; the tally checks the figures beside it.
"""

import asyncio
from dataclasses import replace
from random import Random

from weir import errors
from weir.core.tenancy import LIMIT_NAMES, Limits, Scope, ServiceClass
from weir.sim.changes import ZONES, scopes_of_tenant, wall_start_of
from weir.sim.random_source import seeded_random
from weir.sim.world import SMALL_STEPS, Order, Spec, World, play
from weir.units import Millis

_REQUESTS = 8
_PROBES_PER_REQUEST = 4
_TURNS_OF_A_REFUSAL = 30
_AMOUNTS = {"requests": (1, 3, 20), "tokens": (130, 300, 700), "spend": (30, 60, 120)}
"""Room for one, for a few, and for nearly all that a probe asks for."""
_PROBED = [name for name in LIMIT_NAMES if name != "concurrency"]


def run_probes(seed: int) -> World:
    """One caller's requests, each repeated as its refusals say; audited."""
    random = seeded_random(seed, "probes")
    zones = [random.choice(ZONES)]
    coordinator = replace(SMALL_STEPS, request_id_ms=100 * 86_400_000)
    spec = Spec(tenants=1, time_zones=zones, wall_start_ms=wall_start_of(random, zones), limits=_limits(random))
    return play(replace(spec, slowness=1.0, coordinator=coordinator), seed, _probe)


def _limits(random: Random) -> dict[Scope, Limits]:
    """Limits of one tenant on scopes that its first caller lies in."""
    scopes = [
        scope
        for scope in scopes_of_tenant(0)
        if scope.application in (None, "app") and scope.service_class in (None, ServiceClass.INTERACTIVE)
    ]
    return {
        scope: Limits(**{name: random.choice(_AMOUNTS[name.partition("_")[0]]) for name in random.sample(_PROBED, 2)})
        for scope in random.sample(scopes, 3)
    }


async def _probe(world: World) -> None:
    random = seeded_random(world.seed, "waits")
    for number in range(_REQUESTS):
        order = Order(f"probe {number} {'x' * random.choice([0, 60])}", max_output_tokens=random.choice([8, 40, 90]))
        refused = await _ask(world, order)
        for _ in range(_PROBES_PER_REQUEST):
            if refused is None or refused.retry_after_ms is None:
                break
            refused = await _wait_as_told(world, order, refused, refused.retry_after_ms)
        await asyncio.sleep(random.choice([0, 1, 20]))


async def _ask(world: World, order: Order) -> errors.WeirError | None:
    exchange = world.send(replace(order, prompt=f"{order.prompt} {len(world.exchanges):04}"))
    for _ in range(_TURNS_OF_A_REFUSAL):
        await asyncio.sleep(0)
    await world.until(lambda: exchange.is_done)
    refusal = exchange.answer.refusal
    assert refusal is None or "scope" in refusal.members, f"{refusal} is not about a limit"
    return refusal


async def _wait_as_told(world: World, order: Order, refused: errors.WeirError, told_ms: Millis) -> errors.WeirError | None:
    """Ask a millisecond early, then in time; the refusal of another limit may follow."""
    limit = _limit_of(refused)
    if told_ms > 1:
        await _pass(world, refused, told_ms - 1)
        begun_ns, early = world.clock.monotonic_ns(), await _ask(world, order)
        assert early is not None and limit == _limit_of(early), f"{limit} passes earlier than it says"
        assert world.clock.monotonic_ns() == begun_ns
    await _pass(world, refused, 1)
    again = await _ask(world, order)
    assert again is None or limit != _limit_of(again), f"{limit} refuses after the time that it told"
    world.checker.note(f"probed {limit} {told_ms}")
    return again


def _limit_of(refused: errors.WeirError) -> tuple[object, object]:
    return refused.members.get("limit_name", refused.members.get("limit")), refused.members["scope"]


async def _pass(world: World, refused: errors.WeirError, by_ms: Millis) -> None:
    """Let this time pass for the limit that refused."""
    if isinstance(refused, errors.BudgetExhausted):
        world.step_wall(by_ms)
    else:
        await asyncio.sleep(by_ms / 1e3)
