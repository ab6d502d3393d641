"""What a review of the takeover found, kept: ends that were told, engines that still stop, what changed meanwhile."""

import asyncio

import msgspec
import pytest
from tests.simulation.link_world import LinkWorld, Setting, play_links, until
from tests.simulation.linked_gateway import Asked, LinkedGateway, Moment
from tests.simulation.session_stand import INPUT_TOKENS, Stand, finish_of, play, run_of
from tests.simulation.stage import LONG_PROMPTS
from tests.simulation.test_lost_gateways import a_moment, fill
from tests.simulation.test_takeover_lies import never_held, taken_over, with_revoked

from weir import errors
from weir.core.endings import FinishReason
from weir.core.ledger.records import SettleRecord
from weir.core.metering import Basis
from weir.core.routing.replica import ReplicaState
from weir.messages import AttemptUsage, Down, Ended, Granted, Reattach, Stopped, StopRequest, Up
from weir.sim.world import POOL, REVISION, key_of


def state_of(stand: Stand, name: str) -> ReplicaState:
    """Of a replica, by its name."""
    return stand.fleet.pool(POOL).replicas[name].state


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def calls_of(world: LinkWorld, asked: Asked) -> int:
    """How often engines were given a request."""
    return sum(call.prompt == asked.prompt for call in world.engine.calls)


def ends_heard(world: LinkWorld, gateway: LinkedGateway) -> list[Ended]:
    """From now on, each end that the coordinator tells a gateway before it is durable."""
    told: list[Ended] = []

    def hear(hearer: LinkedGateway | None, moment: Moment, message: Up | Down) -> None:
        if hearer is gateway and moment == "arrived" and isinstance(message, Ended):
            told.append(message)

    world.hear = hear
    return told


def check_told(world: LinkWorld, asked: Asked, status: str, reason: str) -> None:
    """AssertionError unless its client was told what is durable, and it ran once."""
    record, end = asked.answer.record, world.durable_end(asked)
    assert record is not None and end is not None
    assert (record.status, record.finish_reason) == (end.status, end.finish_reason) == (status, reason)
    assert calls_of(world, asked) == 1


def test_what_a_coordinator_ended_is_not_tried_again() -> None:
    """Protects who was told: an end that a gateway heard stays, though its record died, and nothing is tried again."""

    async def script(world: LinkWorld) -> None:
        gateway = world.gateways[0]
        blocker = gateway.ask(tenant=1, max_output_tokens=200)
        await until(lambda: blocker.tokens, 5, "one replica is taken")
        world.engine.fault_plan = lambda call: (0, errors.EngineError()) if call.prompt == LONG_PROMPTS[1] else None
        asked = gateway.ask(request_id="named")
        await until(lambda: world.stand.waiting == 1, 5, "it waits for its second attempt")
        told = ends_heard(world, gateway)
        world.stand.store_s["write"] = 0.6
        gateway.cancel(0, "named")
        await until(lambda: told, 5, "its end is heard")
        blocker.client.leave()
        await world.take_over(0.05)
        world.stand.store_s.clear()
        await until(lambda: asked.done_s is not None, 10, "it ends")
        await until(lambda: world.is_quiet, 10, "it rests")
        check_told(world, asked, "cancelled", "client")

    play_links(script, Setting(gateways=1, lanes=1))


def test_a_failure_that_was_the_end_is_not_tried_again() -> None:
    """Protects who was told: no other replica was there to try it again; the next coordinator has one, and it has ended."""

    async def script(world: LinkWorld) -> None:
        gateway = world.gateways[0]
        world.stand.fleet.gone(POOL, "second")
        world.engine.fault_plan = lambda call: (10, errors.EngineError())
        asked = gateway.ask(stream=False)
        await until(lambda: any(each.hold_durable for each in world.stand.executions.live), 5, "its hold is durable")
        told = ends_heard(world, gateway)
        world.stand.store_s["write"] = 0.6
        await until(lambda: told, 5, "its end is heard")
        await world.take_over(0.05)
        world.stand.store_s.clear()
        await until(lambda: asked.done_s is not None, 10, "it ends")
        await until(lambda: world.is_quiet, 10, "it rests")
        check_told(world, asked, "failed", "engine_error")

    play_links(script, Setting(gateways=1, lanes=1))


@pytest.mark.parametrize("stream", [True, False])
def test_who_never_heard_of_an_admission_hears_its_end(stream: bool) -> None:
    """Protects a client from a hang: it was admitted and cancelled, all durably, while its gateway heard nothing of either."""

    async def script(world: LinkWorld) -> None:
        deaf, other = world.gateways
        blockers = [other.ask(tenant=1, max_output_tokens=60) for _ in range(4)]
        await until(lambda: world.stand.running == len(blockers), 5, "lanes are taken")
        deaf.cable.stand(up=False, down=True)
        asked = deaf.ask(stream=stream, request_id="named")
        await until(lambda: world.stand.waiting == 1, 5, "it is admitted")
        other.cancel(0, "named")
        await until(lambda: world.stand.waiting == 0 and world.stand.book.open_holds == 4, 5, "it is cancelled")
        await world.take_over()
        deaf.cable.go_on()
        await until(lambda: asked.done_s is not None, 12, "it is told")
        record = asked.answer.record
        assert record is not None and (record.status, record.finish_reason) == ("cancelled", "client")

    play_links(script)


def test_what_no_gateway_says_ends_its_own_session_alone() -> None:
    """Protects everybody else: a gateway that tells what it cannot loses its session, and others do not notice."""

    async def script(world: LinkWorld) -> None:
        liar, other = world.gateways
        asked = other.ask()
        await until(lambda: asked.tokens, 5, "it runs")
        [execution] = world.stand.executions.live
        liar.send(Reattach(execution.acquire))
        await until(lambda: asked.done_s is not None, 10, "it ends")
        assert (len(liar.lost_s), len(other.lost_s), asked.tokens) == (1, 0, 40)

    play_links(script)


# ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_is_still_stopping_keeps_its_lane() -> None:
    """Protects engines: its end is durable, its stop is not confirmed, and no other request starts beside it under the next."""

    async def script(world: LinkWorld) -> None:
        gateway = world.gateways[0]
        left = gateway.ask()
        await until(lambda: left.tokens, 5, "it runs")
        [call] = world.engine.calls
        world.engine.inner.stall(call.replica)
        left.client.leave()
        await until(lambda: world.durable_end(left) is not None, 5, "its end is durable")
        await world.take_over()
        await until(lambda: gateway.renewed_s, 5, "its gateway told")
        await asyncio.sleep(1)
        assert world.stand.running == world.engine_runs == 1
        asked = [gateway.ask() for _ in range(2)]
        await until(lambda: world.stand.waiting == 1, 5, "one of them waits")
        world.engine.inner.unstall(call.replica)
        await until(lambda: all(each.done_s is not None for each in asked), 20, "they end")

    play_links(script, Setting(gateways=1, lanes=1))


def test_an_engine_of_another_place_takes_no_lane() -> None:
    """Protects capacity: a replica of the same name that is elsewhere is not the one on which the request ran."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        elsewhere = msgspec.structs.replace(granted.replica, url="an engine that died with the former coordinator")
        gateway.tell(ref, run_of(granted, replica=elsewhere))
        gateway.tell_all()
        assert stand.running == 0
        gateway.finish(ref, reason=FinishReason.DISCONNECT)
        gateway.say(Stopped(ref, 1, 100.0, confirmed=False))
        await a_moment()
        assert state_of(stand, "first") is ReplicaState.READY

    play(script)


def test_what_a_gateway_in_the_same_process_carried_has_ended() -> None:
    """Protects lanes and money: it died with its coordinator, so the next one waits for nobody and holds nothing for it."""

    async def script(stand: Stand) -> None:
        own = stand.gateway("own")
        refs = [own.ask() for _ in range(3)]
        await a_moment()
        recovered = await stand.take_over()
        assert not recovered.kept and stand.book.open_holds == stand.running == 0
        await a_moment()
        for ref in refs:
            stand.check_ended(ref)

    play(script)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("fleet_s", [0.0, 0.5], ids=["replicas known", "replicas unknown"])
def test_a_replica_that_did_not_confirm_a_stop_is_replaced(is_held: bool, fleet_s: float) -> None:
    """Protects engines: what may still run there is told to control, also where the replica is named later, and none starts."""

    async def script(stand: Stand) -> None:
        stand.fleet_s = fleet_s
        ref, granted, gateway = await taken_over(stand)
        condemned: list[str] = []
        stand.fleet.on_condemned = condemned.append
        told = Reattach(stand.asked[ref][0], run_of(granted)) if is_held else never_held(stand, ref, granted)
        finish = msgspec.structs.replace(finish_of(ref, reason=FinishReason.DISCONNECT), ref=told.acquire.ref)
        gateway.say(msgspec.structs.replace(told, finish=finish))
        gateway.say(Stopped(told.acquire.ref, 1, 5_000.0, confirmed=False))
        gateway.tell_all()
        await asyncio.sleep(1)
        assert condemned == [granted.replica.name] and state_of(stand, granted.replica.name) is ReplicaState.DRAINING
        stand.fleet.gone(POOL, granted.replica.name)

    play(script)


def test_a_replica_with_fewer_lanes_than_run_on_it_takes_no_more() -> None:
    """Protects engines whose concurrency was lowered meanwhile: what runs has a lane each, and nothing starts beside it."""

    async def script(stand: Stand) -> None:
        former = stand.gateway("gateway.1")
        refs = [former.ask() for _ in range(6)]
        await a_moment()
        stand._lanes = 1
        await stand.take_over()
        gateway = stand.again(former)
        for ref in refs:
            gateway.tell(ref, run_of(former.about(ref, Granted)[0]))
        gateway.tell_all()
        assert stand.running == 6
        waiting = gateway.ask()
        for ref in refs[:4]:  # of three on each replica two
            gateway.end(ref)
            await a_moment()
            assert not gateway.about(waiting, Granted)
        for ref in (*refs[4:], waiting):
            gateway.end(ref)
            await a_moment()
        assert gateway.about(waiting, Granted)

    play(script, lanes=3)


def test_a_second_attempt_avoids_the_engine_of_the_first() -> None:
    """Protects the one retry: where the first one failed is known by its address, whatever it is called by now."""

    async def script(stand: Stand) -> None:
        ref, granted, gateway = await taken_over(stand)
        former_name = msgspec.structs.replace(granted.replica, name="former")
        told = run_of(granted, replica=former_name, is_stopped=True)
        gateway.tell(ref, told, finish=finish_of(ref, reason=FinishReason.REPLICA_LOST))
        gateway.tell_all()
        [again] = gateway.about(ref, Granted)
        assert (again.attempt, again.replica.url) == (2, "at second")
        gateway.end(ref, attempt=2)

    play(script)


def test_what_a_lost_attempt_used_is_as_it_was_measured() -> None:
    """Protects the platform's books: the cost of the first attempt is what its engine said, not all that was booked."""

    async def script(stand: Stand) -> None:
        former = stand.gateway("gateway.1")
        ref = former.ask()
        former.finish(ref, reason=FinishReason.REPLICA_LOST, tokens=3)
        former.say(Stopped(ref, 1))
        await a_moment()
        first, second = former.about(ref, Granted)
        await stand.take_over()
        gateway = stand.again(former)
        used = AttemptUsage(INPUT_TOKENS, 0, 3, Basis.ENGINE)
        earlier = run_of(first, is_stopped=True)
        gateway.say(Reattach(stand.asked[ref][0], run_of(second), earlier, lost=used))
        gateway.tell_all()
        gateway.end(ref, attempt=2)
        await a_moment()
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and end.platform_microusd == REVISION.price.cost(INPUT_TOKENS, 0, 3)

    play(script)


# ── what changed meanwhile ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_revoked_meanwhile_is_stopped() -> None:
    """Protects a revocation that no coordinator told: what waits ends with the takeover, what runs as it is told."""

    async def script(stand: Stand) -> None:
        former = stand.gateway("gateway.1")
        running = await fill(former, 0)
        waiting = former.ask()
        await a_moment()
        stand.snapshot = with_revoked(stand.snapshot, key_of(0))
        await stand.take_over()
        await a_moment()
        assert stand.end_of(waiting).finish_reason == "revoked"
        gateway = stand.again(former)
        for ref in running:
            gateway.tell(ref, run_of(former.about(ref, Granted)[0]))
            assert gateway.about(ref, StopRequest) == [StopRequest(ref, FinishReason.REVOKED)]
            gateway.finish(ref, reason=FinishReason.REVOKED)
            gateway.say(Stopped(ref, 1))
        gateway.tell_all()

    play(script)


@pytest.mark.parametrize("step_ms", [6_000, -60_000])
def test_a_wall_clock_that_was_set_ends_nothing_that_waits(step_ms: int) -> None:
    """Protects who waits: its times are those that its gateway measured, so it has its place and no wait below zero."""

    async def script(stand: Stand) -> None:
        former = stand.gateway("gateway.1")
        running = await fill(former, 0)
        waiting = former.ask()
        await a_moment()
        stand.clock.step_wall(step_ms)
        await stand.take_over()
        gateway = stand.again(former)
        for ref in running:
            gateway.tell(ref, run_of(former.about(ref, Granted)[0]))
        gateway.tell(waiting)
        gateway.tell_all()
        execution = stand.execution(waiting)
        assert stand.waiting == 1 and execution is not None and execution.arrived_ns <= execution.admitted_ns
        for ref in (*running, waiting):
            gateway.end(ref)
        await a_moment()
        end = stand.end_of(waiting)
        queue_ms = end.timing.queue_ms
        assert end.status == "completed" and queue_ms is not None and 100 <= queue_ms < 1_000

    play(script)
