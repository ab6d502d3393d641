"""Replicas that fail and requests that make them fail: who is left alone, who is tried again, and who is kept out.

Every world is audited at its end, so whatever is refused or ended here also keeps money, lanes and endings right.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.simulation.stage import LONG_PROMPTS, blocker, end_of, run_script, subject

from weir import errors
from weir.core.routing.breaker import TRIALS
from weir.core.routing.replica import Replica, ReplicaState
from weir.ports import EngineCall
from weir.sim.audit import Exchange
from weir.sim.world import SMALL_STEPS, Order, Spec, World

POISON = LONG_PROMPTS[0]
PREFILL_S = 0.005
PAUSES_S = [1, 2, 4, 8, 16, 30, 30, 30, 30]
SECONDS = 180
TEN_MINUTES_S = 600
THREE = Spec(replicas=3, restart_ms=1_000)
NO_RETRIES = replace(THREE, coordinator=replace(SMALL_STEPS, retries_min=0, retry_percent=0))


def poison(world: World) -> None:
    """From now on each replica that runs the prompt is lost while it reads it."""

    def plan(call: EngineCall) -> None:
        if call.prompt == POISON:
            asyncio.get_running_loop().call_later(PREFILL_S, world.cell.supervisor.lose, call.replica.name)

    world.cell.engine.fault_plan = plan


def ended(world: World, request_id: str = "subject") -> str:
    """The finish reason of tenant 0's request."""
    return end_of(world, request_id).finish_reason.value


def runs(world: World) -> int:
    """How often the running cell's engines were given the poisonous prompt."""
    return sum(call.prompt == POISON for call in world.cell.engine.calls)


async def until_run(world: World, times: int) -> None:
    """Wait until the engines were given the poisonous prompt so many times."""
    await world.until(lambda: runs(world) == times)


async def ask(world: World, order: Order) -> Exchange:
    """Send it and wait for its end."""
    exchange = world.send(order)
    await world.until(lambda: exchange.is_done)
    return exchange


# ── requests that crash replicas ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_crashes_two_replicas_is_refused(stream: bool) -> None:
    """Protects the fleet from a poisonous request: it takes no third replica, and no SDK is told to send it again."""

    async def script(world: World) -> None:
        poison(world)
        await ask(world, subject("first", stream=stream))
        for request_id in ("first", "second"):
            again = await ask(world, subject(request_id, stream=stream))
            refusal = again.answer.refusal
            assert isinstance(refusal, errors.Quarantined)
            assert refusal.retry_advice is False and refusal.retry_after_ms is None
        assert runs(world) == 2 and world.checker.rejections == ["quarantined"] * 2

    assert ended(run_script(script, THREE), "first") == "quarantined"


def test_the_same_body_sent_again_is_the_second_crash() -> None:
    """Protects the fleet from a client that sends its poison as new requests; each is told what it met."""

    async def script(world: World) -> None:
        poison(world)
        await ask(world, subject("first"))
        await ask(world, subject("second", deadline_ms=50_000))
        third = await ask(world, subject("third", stream=False))
        assert isinstance(third.answer.refusal, errors.Quarantined) and runs(world) == 2

    world = run_script(script, NO_RETRIES)
    assert (ended(world, "first"), ended(world, "second")) == ("replica_lost", "quarantined")


def test_a_quarantine_ends() -> None:
    """Protects a tenant whose request was unlucky, or whose engine was mended: ten minutes later it runs."""

    async def script(world: World) -> None:
        poison(world)
        await ask(world, subject("first"))
        world.cell.engine.fault_plan = lambda call: None
        await asyncio.sleep(TEN_MINUTES_S - 5)
        assert isinstance((await ask(world, subject("early"))).answer.refusal, errors.Quarantined)
        await asyncio.sleep(5)
        assert (await ask(world, subject("late"))).answer.refusal is None

    assert ended(run_script(script, THREE), "late") == "stop"


@pytest.mark.parametrize("changes", [{"prompt": "hello"}, {"max_output_tokens": 5}, {"tenant": 1}])
def test_only_that_body_of_that_tenant_is_kept_out(changes: dict[str, object]) -> None:
    """Protects everybody else: another body, and the same body of another tenant, run."""

    async def script(world: World) -> None:
        poison(world)
        await ask(world, subject("first"))
        world.cell.engine.fault_plan = lambda call: None
        assert (await ask(world, subject("other", **changes))).answer.refusal is None

    run_script(script, THREE)


def test_crashes_that_are_far_apart_are_forgotten() -> None:
    """Protects the innocent: a second loss after ten minutes is a first one."""

    async def script(world: World) -> None:
        poison(world)
        for request_id in ("first", "second", "third"):
            await ask(world, subject(request_id))
            await asyncio.sleep(TEN_MINUTES_S + 1)

    world = run_script(script, NO_RETRIES)
    assert [ended(world, request_id) for request_id in ("first", "second", "third")] == ["replica_lost"] * 3


def test_who_was_only_there_goes_on() -> None:
    """Protects neighbours of a poisonous request: one crash is no reason, and theirs run to their end elsewhere."""

    async def script(world: World) -> None:
        beside = [world.send(blocker(number, stream=False, request_id=f"beside {number}")) for number in range(3)]
        poison(world)
        await ask(world, subject(stream=False))
        await world.until(lambda: all(exchange.is_done for exchange in beside))
        assert all(exchange.answer.record and exchange.answer.record.finish_reason == "stop" for exchange in beside)

    assert ended(run_script(script, replace(THREE, concurrency=2))) == "quarantined"


def test_a_copy_that_waits_is_ended_as_well() -> None:
    """Protects the third replica from what was admitted before: its place is free at once, and it costs its tenant nothing."""

    async def script(world: World) -> None:
        poison(world)
        sent = [world.send(subject(f"copy {number}")) for number in range(4)]
        await world.until(lambda: all(exchange.is_done for exchange in sent))
        assert runs(world) == 2

    world = run_script(script, Spec(replicas=2, concurrency=1, restart_ms=3_000))
    assert [ended(world, f"copy {number}") for number in range(4)] == ["quarantined"] * 4


def _stall(world: World, name: str) -> None:
    world.cell.engine.inner.stall(name)


def _stop(world: World, name: str) -> None:
    """Taken out of service by us, and not waited for."""
    world.cell.fleet.drain("pool", name)
    world.cell.supervisor.lose(name)


@pytest.mark.parametrize(("what", "reason"), [(_stall, "stalled"), (_stop, "replica_lost")])
def test_what_is_no_crash_is_not_counted(what: Callable[[World, str], None], reason: str) -> None:
    """Protects requests that met silence, or a replica that we stopped: twice, and the body is still welcome."""

    async def script(world: World) -> None:
        world.send(subject(stream=False))
        for number in (1, 2):
            await until_run(world, number)
            what(world, world.cell.engine.calls[-1].replica)
        await world.until(lambda: world.exchanges[0].is_done)
        await asyncio.sleep(10)
        assert (await ask(world, subject("again"))).answer.refusal is None

    world = run_script(script, THREE)
    assert (ended(world), ended(world, "again")) == (reason, "stop")


def test_an_outage_is_no_crash() -> None:
    """Protects everybody when all engines are away: what could not even be sent there has crashed nothing."""

    async def script(world: World) -> None:
        for name in world.cell.supervisor.names:
            world.cell.engine.inner.lose(name)
        await ask(world, subject())
        assert runs(world) == 2
        for name in world.cell.supervisor.names:
            world.cell.engine.inner.restore(name)
        await asyncio.sleep(3)
        assert (await ask(world, subject("again"))).answer.refusal is None

    world = run_script(script, THREE)
    assert (ended(world), ended(world, "again")) == ("replica_lost", "stop")


def test_a_restart_of_the_cell_counts_nothing() -> None:
    """Protects what ran as the coordinator died: its replicas did not crash, and one crash before is forgotten with it."""

    async def script(world: World) -> None:
        poison(world)
        await ask(world, subject("first"))
        world.cell.engine.fault_plan = lambda call: None
        world.send(subject("second", stream=False))
        await until_run(world, 2)
        await world.crash(land=True)
        await world.start()
        assert (await ask(world, subject("third"))).answer.refusal is None

    world = run_script(script, NO_RETRIES)
    assert [ended(world, name) for name in ("first", "second", "third")] == ["replica_lost", "coordinator_lost", "stop"]


# ── replicas that fail ───────────────────────────────────────────────────────────────────────────────────────────────


def _bad(world: World) -> Replica:
    """The replica that is asked first."""
    [pool] = world.cell.fleet.pools
    return min(pool.replicas.values(), key=lambda replica: replica.name)


async def _fail_twice(world: World, bad: Replica, fault: errors.WeirError) -> None:
    """Two requests in a row fail on the only replica, which answers probes; then it is tried."""
    world.cell.engine.fault_plan = lambda call: (0, fault)
    for number in range(2):
        await world.until(lambda: bad.state is ReplicaState.READY)
        await ask(world, subject(f"failing-{number}", prompt=f"failing {number}", stream=False))
        assert bad.usable == 0
    world.cell.engine.fault_plan = lambda call: None
    await world.until(lambda: bad.state is ReplicaState.HALF_OPEN)


@pytest.mark.parametrize("fault", [errors.ReplicaLost, errors.Stalled])
def test_a_replica_that_answers_probes_and_fails_every_request(fault: type[errors.WeirError]) -> None:
    """Protects clients and the retry budget: after two failures one at a time, ever more rarely; every client is answered."""

    async def script(world: World) -> None:
        bad, begun_s = _bad(world), list[float]()
        loop = asyncio.get_running_loop()
        met = Counter[ReplicaState]()

        def plan(call: EngineCall) -> tuple[int, errors.WeirError] | None:
            if call.replica.name != bad.name:
                return None
            begun_s.append(loop.time())
            met[bad.state] += 1
            assert bad.state is ReplicaState.READY or bad.running == 1, "two trials at once"
            return 3, fault()

        world.cell.engine.fault_plan = plan
        for number in range(SECONDS * 10):
            world.send(Order(f"question {number}", stream=False, max_output_tokens=10))
            await asyncio.sleep(0.1)
        await world.until(lambda: all(exchange.is_done for exchange in world.exchanges))
        records = [exchange.answer.record for exchange in world.exchanges]
        assert all(record is not None and record.status == "completed" for record in records)
        assert met[ReplicaState.READY] == 2 and met[ReplicaState.HALF_OPEN] == len(begun_s) - 2
        pauses_s = [later - earlier for earlier, later in pairwise(begun_s[1:])]
        assert len(pauses_s) == len(PAUSES_S)
        for pause_s, least_s in zip(pauses_s, PAUSES_S, strict=True):
            assert least_s <= pause_s < least_s + 1

    run_script(script, Spec(replicas=2, concurrency=2))


def test_a_replica_that_recovered_serves_in_full_again() -> None:
    """Protects capacity: three generations that end well, the next one begun as the last one speaks, and all is as before."""

    async def script(world: World) -> None:
        bad = _bad(world)
        await _fail_twice(world, bad, errors.ReplicaLost())
        trials = [world.send(blocker(number, max_output_tokens=20)) for number in range(TRIALS + 1)]
        await asyncio.sleep(0.001)
        assert (bad.running, bad.free, world.cell.coordinator.queued_in("pool")) == (1, 0, TRIALS)
        await world.until(lambda: all(exchange.is_done for exchange in trials))
        assert bad.usable == bad.free == 4

    run_script(script, Spec(replicas=1, concurrency=4))


def test_a_client_that_leaves_says_nothing_of_the_replica() -> None:
    """Protects a replica on trial from its clients: a cancel is no failure, and the next trial follows."""

    async def script(world: World) -> None:
        bad = _bad(world)
        await _fail_twice(world, bad, errors.Stalled())
        for number in range(5):
            leaving = world.send(blocker(number))
            await asyncio.sleep(0.5)
            leaving.client.leave()
            await asyncio.sleep(0.5)
        assert bad.state is ReplicaState.HALF_OPEN and bad.free == 1

    run_script(script, Spec(replicas=1))
