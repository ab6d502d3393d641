"""A small story, interrupted at each of its points: the process dies, or is superseded, between two chosen turns of its loop.

Between two turns every task awaits, so that the numbers of the turns name all the moments at which a process can be caught:
before and while a record is written, before it is answered for, in a look-up, in a step of recovery. It chooses and orders; the
checkers assert.
"""

import asyncio
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from weir.config import CoordinatorConfig
from weir.sim.changes import limits_of
from weir.sim.clients import PATIENT, Habits
from weir.sim.random_source import seeded_random
from weir.sim.virtual_loop import VirtualLoop
from weir.sim.world import ALIAS, BRIEF, Order, Spec, World, play

_STORY_S = 3.0
_RESTARTS_MAX = 4


class Way(StrEnum):
    """How a process is interrupted: lands: a write that is under way becomes durable; again: its successor's recovery dies."""

    DIES = "dies"
    LANDS = "lands"
    SUPERSEDED = "superseded"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Interruption:
    """The turn of the story at which it comes. recovery_turns: after how many turns recoveries die, for `again`."""

    turn: int
    way: Way
    recovery_turns: tuple[int, ...] = ()


def spec_of_story(seed: int) -> Spec:
    """A small cell with quick engines and small steps."""
    random = seeded_random(seed, "story")
    return Spec(
        replicas=2,
        concurrency=random.choice([1, 2]),
        slowness=random.choice([1.0, 3.0]),
        limits=limits_of(random, 2) if random.random() < 0.5 else {},
        coordinator=CoordinatorConfig(delivery_step_tokens=random.choice([2, 4]), remembered_executions=500),
    )


def turns_of_story(seed: int) -> int:
    """How many turns it takes undisturbed."""
    counted: list[int] = []

    async def story(world: World) -> None:
        before = _loop().turns
        _begin(world)
        await world.until(lambda: all(exchange.is_done for exchange in world.exchanges))
        counted.append(_loop().turns - before)

    play(spec_of_story(seed), seed, story)
    return counted[0]


def run_interrupted(seed: int, interruption: Interruption) -> World:
    """The story, interrupted, continued by another process, and everything asked again; audited."""

    async def story(world: World) -> None:
        orders = await _interrupt(world, interruption)
        for order in orders:
            world.send(replace(order, habits=PATIENT, stream=not order.stream))
        await world.until(lambda: all(exchange.is_done for exchange in world.exchanges))

    return play(spec_of_story(seed), seed, story)


def run_some_points(seed: int, number: int) -> list[World]:
    """Some interruptions of one story, drawn from its seed."""
    random, turns = seeded_random(seed, "points"), turns_of_story(seed)
    return [run_interrupted(seed, drawn_interruption(random, turns)) for _ in range(number)]


def drawn_interruption(random: Random, turns: int) -> Interruption:
    """Any of the story's points, in any way."""
    way = random.choice(list(Way))
    deaths = tuple(random.randint(1, 12) for _ in range(random.choice([1, 2]))) if way is Way.AGAIN else ()
    return Interruption(random.randint(1, turns), way, deaths)


def _begin(world: World) -> list[Order]:
    """Clients of two tenants at once: streams, whole answers, one that cancels, one that leaves."""
    random = seeded_random(world.seed, "orders")
    habits = [PATIENT, PATIENT, Habits(cancels_after_ms=random.randint(0, 40)), Habits(leaves_after_ms=random.randint(0, 40))]
    orders = [
        Order(
            prompt=f"story {world.seed} {number}",
            tenant=number % 2,
            caller=random.choice([0, 1]),
            alias=random.choice([ALIAS.name, BRIEF.name]),
            request_id=f"order-{number}",
            stream=number % 2 == 0 or random.random() < 0.5,
            max_output_tokens=random.randint(3, 12),
            habits=habit,
        )
        for number, habit in enumerate(habits)
    ]
    for order in orders:
        world.send(order)
    return orders


async def _interrupt(world: World, interruption: Interruption) -> list[Order]:
    reached = asyncio.Event()
    is_superseded = interruption.way is Way.SUPERSEDED

    def strike() -> None:
        reached.set()
        if not is_superseded:
            world.die()

    _loop().at_turn(_loop().turns + interruption.turn, strike)
    orders = _begin(world)
    try:
        await asyncio.wait_for(reached.wait(), _STORY_S)
    except TimeoutError as late:
        raise AssertionError(f"the story has no turn {interruption.turn}") from late
    if is_superseded:
        await world.take_over()
        return orders
    deaths = iter(interruption.recovery_turns)
    for _ in range(_RESTARTS_MAX):
        await world.bury(land=interruption.way is not Way.DIES)
        if (death := next(deaths, None)) is not None:
            _loop().at_turn(_loop().turns + death, world.die)
        if await world.start() and death is None:
            return orders
        await world.until(lambda: world.cell.store.is_cut)
    raise AssertionError("it dies too often")


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
