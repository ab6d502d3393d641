"""A canary under traffic: its faults are in the evidence with exact counts, and nothing that another step or cell admitted.

Every world is audited at its end, as always. What is counted is compared with what the clients saw or the ledger says.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from tests.simulation.session_stand import Stand, play
from tests.simulation.stage import LONG_PROMPTS, run_script, until_output
from tests.simulation.takeover_scenes import some_run_and_some_wait, tell_running
from tests.simulation.test_lost_gateways import OTHER, a_moment

from weir import errors
from weir.app.running_view import RunningCell, gauges_of
from weir.control.cell_view import GatheredEvidence
from weir.core.ledger.records import ExecutionId, SettleRecord
from weir.core.registry.evidence import Evidence, Outcome, Tally, outcome_of
from weir.core.registry.model import Alias, Canary, Pool
from weir.ports import EngineCall
from weir.sim.audit import Exchange
from weir.sim.clients import Habits
from weir.sim.random_source import seeded_random
from weir.sim.world import ALIAS, BRIEF, REVISION, Order, Spec, World

TRIED, THIRD = replace(REVISION, id="sim@2"), replace(REVISION, id="sim@3")
POOLS = (
    Pool("stable", REVISION.id, 2, 8),
    Pool("canary", TRIED.id, 1, 8),
    Pool("other", THIRD.id, 1, 8),
)
SPEC = Spec(pools=POOLS, revisions=(TRIED, THIRD), slowness=2.0)
CANARY = Canary("ro-1", 0, TRIED.id, 50)
FAULT = (3, errors.EngineError("It broke."))
"""After three tokens: their client has them, so it is not tried again."""


def try_out(world: World, canary: Canary | None, alias: Alias = ALIAS) -> None:
    """The alias has this canary from now on."""
    world.change(aliases={**world.snapshot.aliases, alias.name: replace(alias, canary=canary)})


async def gathered(world: World, canary: Canary = CANARY) -> GatheredEvidence:
    """What control is told of a canary by the cell that runs."""
    cell = world.cell
    view = RunningCell(world.clock, cell.book, cell.coordinator, cell.fleet, lambda pool: None, cell.inbox)
    return await view.evidence(canary.rollout, canary.revision)


async def evidence_of(world: World, canary: Canary = CANARY) -> Evidence:
    """The evidence of its present step."""
    found = await gathered(world, canary)
    assert found.evidence is not None and found.step == canary.step
    return found.evidence


def send_some(world: World, number: int, alias: Alias = ALIAS, **changes: object) -> list[Exchange]:
    """So many clients at once, each with a prompt of its own."""
    first = len(world.exchanges)
    prompts = [f"question {first + each} about {alias.name}" for each in range(number)]
    return [world.send(Order(**{"prompt": prompt, "alias": alias.name} | changes)) for prompt in prompts]  # type: ignore[arg-type]


def send_long(world: World, number: int) -> list[Exchange]:
    """Clients whose answers take a second."""
    first = len(world.exchanges)
    return [world.send(Order(prompt=LONG_PROMPTS[first + each], max_output_tokens=400)) for each in range(number)]


async def done(world: World, exchanges: list[Exchange]) -> None:
    """They have their answers."""
    await world.until(lambda: all(exchange.is_done for exchange in exchanges))


def tallies(exchanges: list[Exchange]) -> Counter[tuple[str, str]]:
    """What the clients saw, by revision and status."""
    records = [exchange.answer.record for exchange in exchanges]
    return Counter((record.revision, record.status.value) for record in records if record is not None)


def is_of(evidence: Evidence, exchanges: list[Exchange]) -> bool:
    """Whether it is of these clients, who all got their answers, and of no others."""
    seen = tallies(exchanges)
    assert seen.total() == len(exchanges)
    stable, canary = seen[REVISION.id, "completed"], seen[TRIED.id, "completed"]
    return stable + canary == len(exchanges) and (evidence.stable, evidence.canary) == (Tally(stable), Tally(canary))


def fail_in(world: World, pool: str, *, every: int = 1) -> None:
    """From now on every so many-th call of a pool breaks."""
    calls = Counter[str]()

    def plan(call: EngineCall) -> tuple[int, errors.WeirError] | None:
        calls[call.replica.pool] += 1
        return FAULT if call.replica.pool == pool and calls[pool] % every == 0 else None

    world.cell.engine.fault_plan = plan


@pytest.mark.parametrize("stream", [True, False])
def test_a_canary_with_faults_shows_in_the_evidence(stream: bool) -> None:
    """Protects everybody from a bad revision: what its clients met is counted, each once, and the stable one's beside it."""

    async def script(world: World) -> None:
        try_out(world, CANARY)
        fail_in(world, "canary", every=3)
        exchanges: list[Exchange] = []
        for _ in range(10):
            exchanges += send_some(world, 12, stream=stream)
            await done(world, exchanges)
        seen, evidence = tallies(exchanges), await evidence_of(world)
        failed = seen[TRIED.id, "failed"]
        assert failed > 10 and seen[REVISION.id, "failed"] == 0
        assert evidence.canary == Tally(seen[TRIED.id, "completed"] + failed, errors=failed)
        assert evidence.stable == Tally(seen[REVISION.id, "completed"])
        assert evidence.canary.requests + evidence.stable.requests == len(exchanges)
        assert evidence.first_token.pairs > 30 and evidence.first_token.worse < evidence.first_token.pairs / 2

    run_script(script, SPEC)


def test_what_was_admitted_before_a_step_is_not_counted() -> None:
    """Protects the comparison: a step is judged by what began in it, also where that waited for its end in the next."""

    async def script(world: World) -> None:
        before = send_long(world, 6)
        await asyncio.sleep(0.05)
        try_out(world, CANARY)
        first = send_some(world, 8)
        await done(world, before + first)
        assert is_of(await evidence_of(world), first)
        before = send_long(world, 8)
        await asyncio.sleep(0.05)
        further = replace(CANARY, step=1, weight=90)
        try_out(world, further)
        second = send_some(world, 8)
        await done(world, before + second)
        assert is_of(await evidence_of(world, further), second)
        assert tallies(before)[TRIED.id, "completed"] and tallies(before)[REVISION.id, "completed"]
        try_out(world, None)
        assert await gathered(world, further) == GatheredEvidence(0)

    run_script(script, SPEC)


def test_what_runs_on_a_canary_that_goes_back_is_told() -> None:
    """Protects its clients: the canary's replicas are known to be busy, with whatever runs there, until the last one ended."""

    async def script(world: World) -> None:
        try_out(world, replace(CANARY, weight=100))
        exchanges = send_long(world, 5)
        await until_output(world, exchanges[0])
        assert (await gathered(world)).running == 5
        try_out(world, None)
        assert await gathered(world) == GatheredEvidence(5)
        await done(world, exchanges)
        await world.until(lambda: not world.cell.executions.live_count)
        assert await gathered(world) == GatheredEvidence(0)
        assert tallies(exchanges) == {(TRIED.id, "completed"): 5}

    run_script(script, SPEC)


def test_a_lost_canary_replica_is_counted_once_per_request() -> None:
    """Protects the verdict: who had output lost it to the canary; whoever comes meanwhile is served by the stable revision."""

    async def script(world: World) -> None:
        try_out(world, replace(CANARY, weight=100))
        running = send_long(world, 4)
        for exchange in running:
            await until_output(world, exchange)
        [lost] = world.cell.fleet.pool("canary").replicas
        world.cell.supervisor.lose(lost)
        await done(world, running)
        meanwhile = send_some(world, 3)
        await done(world, meanwhile)
        assert tallies(running) == {(TRIED.id, "failed"): 4} and tallies(meanwhile) == {(REVISION.id, "completed"): 3}
        await asyncio.sleep(SPEC.restart_ms / 1e3)
        after = send_some(world, 2)
        await done(world, after)
        evidence = await evidence_of(world)
        assert evidence.canary == Tally(6, errors=4) and evidence.stable == Tally(3)

    run_script(script, SPEC)


def test_an_answer_that_the_ledger_was_too_late_for_says_nothing() -> None:
    """Protects the canary from the store: an answer that was whole, and was given up, is neither its success nor its fault."""

    async def script(world: World) -> None:
        try_out(world, replace(CANARY, weight=100))
        [lost] = send_some(world, 1, prompt=LONG_PROMPTS[0], max_output_tokens=400, stream=False)
        await asyncio.sleep(0.3)
        world.weather.failing = True
        await world.until(lambda: any(each.waits_to_be_shown for each in world.cell.executions.live))
        await done(world, [lost])
        assert tallies([lost]) == {(TRIED.id, "failed"): 1}
        world.weather.clear()
        await world.until(lambda: world.cell.is_quiet)
        await done(world, send_some(world, 2, stream=False))
        assert (await evidence_of(world)).canary == Tally(2)

    run_script(script, SPEC)


def test_two_rollouts_are_judged_apart() -> None:
    """Protects one rollout from the other's faults: each has its alias's requests, of its own step."""

    async def script(world: World) -> None:
        other = Canary("ro-2", 3, THIRD.id, 100)
        try_out(world, CANARY)
        try_out(world, other, BRIEF)
        fail_in(world, "other")
        mine, theirs = send_some(world, 12), send_some(world, 7, BRIEF)
        await done(world, mine + theirs)
        evidence, seen = await evidence_of(world), tallies(mine)
        assert evidence.canary == Tally(seen[TRIED.id, "completed"]) and evidence.stable == Tally(
            seen[REVISION.id, "completed"]
        )
        assert evidence.canary.requests + evidence.stable.requests == 12
        assert (await evidence_of(world, other)).canary == Tally(7, errors=7)
        try_out(world, None)
        assert (await evidence_of(world, other)).canary == Tally(7, errors=7)

    run_script(script, SPEC)


def test_another_coordinator_begins_the_step_anew() -> None:
    """Protects from half of the evidence: what died with a coordinator is not known, and nothing but the counts is lost."""

    async def script(world: World) -> None:
        try_out(world, CANARY)
        await done(world, send_some(world, 12))
        running = send_long(world, 6)
        await until_output(world, running[0])
        assert (await evidence_of(world)) != Evidence()
        await world.crash(land=True)
        assert await world.start()
        assert await gathered(world) == GatheredEvidence(0, CANARY.step, Evidence())
        after = send_some(world, 12)
        await done(world, after)
        evidence, seen = await evidence_of(world), tallies(after)
        assert evidence.canary == Tally(seen[TRIED.id, "completed"]) and evidence.stable == Tally(
            seen[REVISION.id, "completed"]
        )

    run_script(script, SPEC)


def test_what_a_former_coordinator_admitted_counts_nowhere() -> None:
    """Protects the comparison across a takeover: what goes on under the next one is known to run, and is no evidence."""

    async def script(stand: Stand) -> None:
        stable = replace(REVISION, id="sim@0")
        tried = replace(ALIAS, revision=stable.id, canary=Canary("ro-1", 0, REVISION.id, 100))
        revisions = {**stand.snapshot.revisions, stable.id: stable}
        stand.publish(replace(stand.snapshot, aliases={ALIAS.name: tried}, revisions=revisions))

        def counted() -> int:
            step = stand.coordinator.canaries.step_of("ro-1")
            assert step is not None and step.canary == tried.canary
            return step.window.evidence().canary.requests

        def live() -> int:
            return stand.coordinator.canaries.running_on(REVISION.id)

        one = stand.gateway("one.1")
        [ended, running], waiting = await some_run_and_some_wait(one)
        assert (counted(), live()) == (0, 4)
        one.end(ended)
        await a_moment()
        assert (counted(), live()) == (1, 3)
        await stand.take_over()
        assert (counted(), live()) == (0, 3)
        again = stand.again(one)
        tell_running(one, again, running)
        tell_running(one, again, waiting[0])
        again.tell(waiting[1])
        again.tell_all()
        again.end(running)
        newcomer = again.ask(OTHER)
        await a_moment()
        for ref in waiting:
            again.end(ref)
            await a_moment()
        assert (counted(), live()) == (0, 1)
        again.end(newcomer)
        await a_moment()
        assert (counted(), live()) == (1, 0)

    play(script)


def test_operators_see_weight_and_evidence() -> None:
    """Protects dashboards: a series for each alias with a canary, and none where there is none."""

    async def script(world: World) -> None:
        def read() -> dict[tuple[str, ...], float]:
            cell = world.cell
            gauges = gauges_of(cell.coordinator, cell.executions, cell.book, cell.fleet, lambda: 0)
            return {(name, *labels.values()): value for name, _, labels, value in gauges if name.startswith("weir_canary")}

        assert read() == {}
        try_out(world, replace(CANARY, weight=100))
        fail_in(world, "canary", every=2)
        await done(world, send_some(world, 4))
        await done(world, send_some(world, 1, habits=Habits(leaves_after_bytes=100), max_output_tokens=60))
        ends = {"good": 2, "error": 2, "cancelled": 1}
        expected = {("weir_canary_requests", "assistant", "ro-1", "canary", outcome): n for outcome, n in ends.items()}
        expected |= {("weir_canary_requests", "assistant", "ro-1", "stable", outcome): 0 for outcome in ends}
        assert read() == expected | {("weir_canary_weight", "assistant", "ro-1"): 100}
        try_out(world, None)
        assert read() == {}

    run_script(script, SPEC)


# ── at random ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recount:
    """Evidence counted from the ledger: of an alias, what was admitted since its step began."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: set[ExecutionId] = set()

    def begin(self) -> None:
        """A step begins: what is admitted is not of it."""
        self._world.checker.catch_up()
        live = {execution.id for execution in self._world.cell.executions.live}
        self._before = live | set(self._world.checker.durable.holds)

    def tally(self, revision: str) -> Tally:
        """Of an arm, once everything is durable."""
        self._world.checker.catch_up()
        durable, outcomes = self._world.checker.durable, Counter[Outcome]()
        for name, end in durable.ends.items():
            hold = durable.holds[name]
            if name not in self._before and (hold.alias, hold.revision) == (ALIAS.name, revision):
                outcomes[outcome_of(end.finish_reason, was_dispatched=isinstance(end, SettleRecord))] += 1
        del outcomes[Outcome.NOT_COUNTED]
        return Tally(outcomes.total(), outcomes[Outcome.ERROR], outcomes[Outcome.CANCELLED])


def some_habits(random: Random) -> Habits:
    """Most clients are patient."""
    match random.randrange(8):
        case 0:
            return Habits(leaves_after_ms=random.randrange(1_000))
        case 1:
            return Habits(leaves_after_bytes=random.randrange(60, 400))
        case _:
            return Habits()


def some_order(random: Random, number: int) -> Order:
    """A request of any tenant."""
    return Order(
        prompt=f"question {number}",
        tenant=random.randrange(2),
        alias=random.choice([ALIAS.name, ALIAS.name, BRIEF.name]),
        stream=random.random() < 0.6,
        max_output_tokens=random.choice([4, 16, 60]),
        deadline_ms=random.choice([None, None, 300]),
        habits=some_habits(random),
    )


@pytest.mark.parametrize("seed", range(20))
def test_evidence_is_what_the_ledger_says_of_the_step(seed: int) -> None:
    """Protects counts from whatever comes between: faults, lost replicas, a slow store, clients that leave, other steps."""

    async def script(world: World) -> None:
        random, recount, canary, faults = seeded_random(seed, "canary"), Recount(world), CANARY, seeded_random(seed, "faults")
        world.cell.engine.fault_plan = lambda call: (faults.randrange(4), FAULT[1]) if faults.random() < 0.1 else None
        exchanges = []
        for number in range(200):
            exchanges.append(world.send(some_order(random, number)))
            await asyncio.sleep(random.uniform(0, 0.06))
            if number in (20, 60, 100):
                canary = replace(canary, step=canary.step + 1, weight=random.choice([10, 50, 90]))
                recount.begin()
                try_out(world, canary)
            if random.random() < 0.02 and world.cell.supervisor.names:
                world.cell.supervisor.lose(random.choice(world.cell.supervisor.names))
            if random.random() < 0.05:
                world.weather.extra_ms = random.choice([0, 0, 30, 600])
        world.weather.clear()
        await done(world, exchanges)
        await world.until(lambda: world.cell.is_quiet)
        evidence = await evidence_of(world, canary)
        assert evidence.canary == recount.tally(TRIED.id) and evidence.stable == recount.tally(REVISION.id)
        assert evidence.canary.requests + evidence.stable.requests > 20

    run_script(script, SPEC, seed)
