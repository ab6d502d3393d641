"""The one retry: a lost attempt is invisible to its client, paid by the platform, and followed by at most one other, elsewhere.

The checkers hold at every event that nothing is dispatched twice after output, on the same replica, or beyond the budget; the
audit recomputes each settlement from what both attempts used.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from tests.simulation.stage import LONG_PROMPTS, blocker, end_of, run_script, subject, until_output

from weir import errors
from weir.core.ledger.records import HoldRecord, SettleRecord, StepRecord
from weir.engines.simulated_text import count_prompt_tokens
from weir.ports import EngineCall
from weir.sim.audit import Exchange
from weir.sim.clients import Habits
from weir.sim.world import PRICE, SMALL_STEPS, Order, Spec, World

TWO = Spec(replicas=2)
TWO_LANES = Spec(replicas=2, concurrency=1, restart_ms=60_000)
NO_RETRIES = replace(SMALL_STEPS, retries_min=0, retry_percent=0)
INPUT = count_prompt_tokens(LONG_PROMPTS[0], chat=True)


def settled(world: World, request_id: str = "subject") -> SettleRecord:
    """The end of tenant 0's request, which was dispatched."""
    end = end_of(world, request_id)
    assert isinstance(end, SettleRecord)
    return end


def ending(world: World, request_id: str = "subject") -> str:
    """`status/finish reason` and the attempt that it ended in."""
    end = settled(world, request_id)
    return f"{end.status}/{end.finish_reason} {end.attempt}"


def lose_replica_of(world: World, prompt: str = LONG_PROMPTS[0]) -> None:
    """The replica where this prompt was started last is lost."""
    world.cell.supervisor.lose(next(call.replica for call in reversed(world.cell.engine.calls) if call.prompt == prompt))


def retries(world: World) -> float:
    """What the metric of the running cell counts."""
    lines = world.cell.telemetry.exposition().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("weir_retries_total"))


async def until_started(world: World, calls: int = 1) -> None:
    """Wait until the running cell's engines were given so many runs; the last one has no output yet."""
    for _ in range(5_000):
        if len(world.cell.engine.calls) >= calls:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no run was started")


async def fail_once(world: World, exchange: Exchange) -> None:
    """Lose the subject's replica when it runs there."""
    await until_started(world)
    lose_replica_of(world)
    await world.until(lambda: exchange.is_done)


# ── a client that notices nothing ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_lost_before_the_first_token(stream: bool) -> None:
    """Protects clients from a lost replica: one clean answer, charged once; the lost attempt's input is the platform's."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=stream))
        await fail_once(world, exchange)
        assert exchange.answer.record is not None and exchange.answer.record.posted
        assert retries(world) == 1

    world = run_script(script, TWO)
    end = settled(world)
    assert ending(world) == "completed/stop 2"
    assert end.cost_microusd == PRICE.cost(INPUT, 0, end.output_tokens)
    assert end.platform_microusd == PRICE.cost(INPUT, 0, 0)
    records = [record for record in world.ledger.records if record.id == end.id]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert isinstance(records[0], HoldRecord) and records[-1] == end
    assert sum(isinstance(record, HoldRecord | SettleRecord) for record in records) == 2
    assert [step.attempt for step in steps][:2] == [1, 2] and steps[0].replica != steps[1].replica == end.replica


def test_what_a_whole_answer_held_is_dropped() -> None:
    """Protects whole answers: the first attempt's text goes nowhere, and what it generated is the platform's."""
    emitted: list[int] = []

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=False))
        await asyncio.sleep(1)
        await fail_once(world, exchange)
        emitted.append(world.cell.engine.calls[0].emitted)

    world = run_script(script, TWO)
    end = settled(world)
    assert ending(world) == "completed/stop 2"
    assert end.platform_microusd == PRICE.cost(INPUT, 0, emitted[0]) > PRICE.cost(INPUT, 0, 1)


def test_headers_that_are_out_stay_out() -> None:
    """Protects open streams: `accepted` went out with the first attempt and comes once; output is the second's alone."""

    async def script(world: World) -> None:
        exchange = world.send(subject(max_output_tokens=20))
        await world.until(lambda: exchange.answer.accepted is not None)
        assert not exchange.answer.text
        await fail_once(world, exchange)

    assert ending(run_script(script, replace(TWO, slowness=200.0))) == "completed/length 2"


def test_output_that_waits_for_its_step_is_not_delivered() -> None:
    """Protects streams while the store is slow: text that was held back is dropped, and the other attempt's is whole."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 400
        exchange = world.send(subject(max_output_tokens=60))
        await asyncio.sleep(0.7)
        assert world.cell.engine.calls[0].emitted and not exchange.answer.text
        await fail_once(world, exchange)
        world.weather.clear()

    assert ending(run_script(script, TWO)) == "completed/length 2"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stall_before_the_first_token(stream: bool) -> None:
    """Protects against silence: it runs elsewhere, and the silent replica's lane stays taken until that one is replaced."""

    async def script(world: World) -> None:
        cell = world.cell
        exchange = world.send(subject(stream=stream))
        await until_started(world)
        silent = cell.engine.calls[0].replica
        cell.engine.inner.stall(silent)
        await world.until(lambda: len(cell.engine.calls) == 2)
        assert cell.fleet.running() == 2
        await world.until(lambda: exchange.is_done)
        await world.until(lambda: silent not in cell.supervisor.names)

    assert ending(run_script(script, TWO)) == "completed/stop 2"


# ── where it stops ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_retried_after_output() -> None:
    """Protects clients from output twice: one delivered token, and a loss is an ending."""

    async def script(world: World) -> None:
        exchange = world.send(subject())
        await until_output(world, exchange)
        lose_replica_of(world)
        await world.until(lambda: exchange.is_done)

    world = run_script(script, TWO)
    assert ending(world) == "failed/replica_lost 1"
    assert settled(world).delivered_tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 30])
def test_a_second_failure_is_the_end(stream: bool, tokens: int) -> None:
    """Protects engines: two attempts at most; the tenant pays nothing and the platform both."""

    async def script(world: World) -> None:
        world.cell.engine.fault_plan = lambda call: (tokens, errors.EngineError())
        exchange = world.send(subject(stream=stream))
        await world.until(lambda: exchange.is_done)
        assert len(world.cell.engine.calls) == (1 if stream and tokens else 2)

    world = run_script(script, TWO)
    end = settled(world)
    assert ending(world) == ("failed/engine_error 1" if stream and tokens else "failed/engine_error 2")
    assert end.cost_microusd == 0
    assert end.platform_microusd == end.attempt * PRICE.cost(INPUT, 0, tokens)


def test_a_refusal_is_not_retried() -> None:
    """Protects the other replica from what one refused."""

    async def script(world: World) -> None:
        world.cell.engine.fault_plan = lambda call: (0, errors.EngineRejected())
        world.send(subject())

    assert ending(run_script(script, TWO)) == "failed/engine_rejected 1"


def _first_attempts_fail(world: World) -> None:
    seen: set[object] = set()

    def plan(call: EngineCall) -> tuple[int, errors.WeirError] | None:
        is_first = call.prompt not in seen
        seen.add(call.prompt)
        return (0, errors.EngineError()) if is_first else None

    world.cell.engine.fault_plan = plan


def test_a_budget_bounds_retries() -> None:
    """Protects a failing pool from twice its load: three in ten seconds, the rest fails; ten seconds later three more."""

    async def script(world: World) -> None:
        _first_attempts_fail(world)
        for late in (False, True):
            for number in range(5):
                world.send(subject(f"r{number}{late}", prompt=f"question {number} {late}", max_output_tokens=5))
            await asyncio.sleep(11)

    world = run_script(script, replace(TWO, concurrency=8))
    for late in (False, True):
        endings = sorted(ending(world, f"r{number}{late}") for number in range(5))
        assert endings == ["completed/length 2"] * 3 + ["failed/engine_error 1"] * 2


@pytest.mark.parametrize(
    ("spec", "deadline_ms"),
    [
        (replace(TWO, coordinator=NO_RETRIES), None),
        (TWO_LANES, 700),  # the only other lane is predicted to be free after most of a second
        (replace(TWO_LANES, coordinator=replace(SMALL_STEPS, queue_wait_ms=1_000)), None),
        (Spec(replicas=1, concurrency=2), None),
    ],
    ids=["no budget", "no time", "no place", "no other replica"],
)
def test_a_retry_that_cannot_be_is_the_end(spec: Spec, deadline_ms: int | None) -> None:
    """Protects truth: without budget, time, a place to wait or another replica the failure is told at once."""

    async def script(world: World) -> None:
        other = world.send(blocker())
        await until_started(world)
        exchange = world.send(subject(deadline_ms=deadline_ms))
        await until_started(world, 2)
        lose_replica_of(world)
        await world.until(lambda: exchange.is_done)
        assert other.is_done == (spec.replicas == 1)

    assert ending(run_script(script, spec)) == "failed/replica_lost 1"


# ── waiting for the second attempt ───────────────────────────────────────────────────────────────────────────────────


async def wait_again(world: World, **changes: object) -> Exchange:
    """The subject lost its replica after some tokens and waits for the lane that a blocker has."""
    world.send(blocker())
    await until_started(world)
    exchange = world.send(subject(**{"stream": False} | changes))  # type: ignore[arg-type]
    await until_started(world, 2)
    await asyncio.sleep(0.3)
    lose_replica_of(world)
    await asyncio.sleep(0.05)
    assert world.cell.coordinator.queued_in("pool") == 1
    return exchange


async def _revoke(world: World) -> None:
    keys = {digest: replace(key, revoked=key.tenant == "tenant-0") for digest, key in world.snapshot.keys.items()}
    world.publish(replace(world.snapshot, version=world.snapshot.version + 1, keys=keys))


async def _drain(world: World) -> None:
    await world.shut_down(100)
    await world.start()


async def _pass(world: World) -> None:
    """It comes by itself."""


@pytest.mark.parametrize(
    ("reason", "order", "do"),
    [
        ("disconnect", {"habits": Habits(leaves_after_ms=1_000)}, _pass),
        ("client", {"habits": Habits(cancels_after_ms=1_000)}, _pass),
        ("deadline", {"deadline_ms": 3_000}, _pass),
        ("queue_wait", {}, _pass),
        ("revoked", {}, _revoke),
        ("shutdown", {}, _drain),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_end_between_two_attempts(
    reason: str, order: dict[str, object], do: Callable[[World], Awaitable[None]], stream: bool
) -> None:
    """Protects money: whoever ends it, nothing was delivered, so what the lost attempt used is the platform's, once."""

    async def script(world: World) -> None:
        world.weather.extra_ms = 600 * stream  # a stream's first tokens wait for their step, so nothing is delivered
        exchange = await wait_again(world, stream=stream, **order)
        world.weather.clear()
        await do(world)
        await world.until(lambda: exchange.is_done)

    spec = replace(TWO_LANES, slowness=40.0, coordinator=replace(SMALL_STEPS, queue_wait_ms=3_000))
    world = run_script(script, spec)
    end = settled(world)
    assert (end.attempt, end.finish_reason, end.cost_microusd) == (1, reason, 0)
    assert end.output_tokens > 0 and end.platform_microusd == PRICE.cost(end.input_tokens, 0, end.output_tokens)


def test_it_waits_ahead_of_its_queue() -> None:
    """Protects who was lost: the first lane that is free elsewhere is its, before those that came while it ran."""
    granted: list[int] = []

    async def script(world: World) -> None:
        world.send(blocker(max_output_tokens=60))
        await until_started(world)
        exchange = world.send(subject(stream=False, max_output_tokens=60))
        await until_started(world, 2)
        later = world.send(Order("later", tenant=1, max_output_tokens=5))
        await asyncio.sleep(0.1)
        lose_replica_of(world)
        await world.until(lambda: exchange.is_done and later.is_done)
        prompts = [call.prompt for call in world.cell.engine.calls]
        granted.extend(prompts.index(prompt, 2) for prompt in (LONG_PROMPTS[0], "later"))

    assert ending(run_script(script, TWO_LANES)) == "completed/length 2"
    assert granted == [2, 3]


@pytest.mark.parametrize(("spec", "attempt"), [(TWO_LANES, 1), (TWO, 2)], ids=["it waits", "it runs"])
def test_a_crash_around_the_second_attempt(spec: Spec, attempt: int) -> None:
    """Protects recovery: it goes by the last step, costs the tenant nothing, and the id runs again."""

    async def script(world: World) -> None:
        world.send(blocker())
        await until_started(world)
        exchange = world.send(subject(stream=False))
        await until_started(world, 2)
        lose_replica_of(world)
        await asyncio.sleep(0.1)
        await world.crash(land=True)
        assert exchange.cut
        await world.start()
        again = world.send(subject(stream=False))
        await world.until(lambda: again.is_done)
        assert again.answer.record is not None and again.answer.record.execution == 2

    end = settled(run_script(script, spec))
    assert (end.finish_reason, end.attempt, end.cost_microusd) == ("coordinator_lost", attempt, 0)


def test_a_settlement_that_is_late_keeps_the_lost_attempt() -> None:
    """Protects the books: a whole answer that is dropped because the store is away leaves both attempts to the platform."""

    async def script(world: World) -> None:
        exchange = world.send(subject(stream=False, max_output_tokens=30))
        await until_started(world)
        lose_replica_of(world)
        await asyncio.sleep(0.3)
        world.weather.failing = True
        await world.until(lambda: exchange.is_done)
        world.weather.clear()

    world = run_script(script, TWO)
    end = settled(world)
    assert ending(world) == "failed/ledger_unavailable 2"
    assert end.platform_microusd == PRICE.cost(INPUT, 0, 30) + PRICE.cost(INPUT, 0, 0)
