"""Another coordinator leads, and a gateway was not heard: what is granted meanwhile is durable before its engine is called.

So whoever leads next finds each dispatch, whoever tells of it late. The gateways only listen, but for the last scenes. Each of
two replicas has one lane, unless a scene says otherwise; the gateway that is not heard has one of them.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from tests.simulation.link_world import LinkWorld, play_links, until
from tests.simulation.linked_gateway import Asked
from tests.simulation.session_stand import INPUT_TOKENS, Listening, Stand, play
from tests.simulation.takeover_scenes import LEASE_S, PRICE, STEP_TOKENS, settled, tell_running
from tests.simulation.test_lost_gateways import LOST, OTHER, a_moment

from weir import errors
from weir.core.endings import FinishReason
from weir.core.ledger.records import StepRecord
from weir.messages import (
    Admitted,
    DeliveryBooked,
    Down,
    EndBooked,
    Ended,
    Finish,
    Granted,
    HoldBooked,
    Rejected,
    Stopped,
    StopRequest,
)
from weir.sim.clients import Habits
from weir.sim.world import SMALL_STEPS

WRITE_S = 0.5
"""Of a ledger that is slow, and within its bound."""
STORE_S = 2.0
"""Its bound."""


def found_by_the_next(stand: Stand, gateway: Listening) -> None:
    """From now on this gateway hears of no grant that the ledger does not have."""
    deliver = gateway.deliver

    def check(message: Down) -> None:
        if isinstance(message, Granted):
            steps = stand.records_of(message.ref, StepRecord)
            assert message.attempt in [step.attempt for step in steps], f"{message} is not durable"
        deliver(message)

    gateway.deliver = check  # type: ignore[method-assign]


async def one_is_not_heard(
    stand: Stand, deadline_ms: int = 60_000, *, has_told_all: bool = True
) -> tuple[int, Listening, Listening]:
    """A request whose gateway has not told of it, that gateway's former session, and another gateway that is served."""
    silent, other = stand.gateway("silent.1"), stand.gateway("other.1")
    ref = silent.ask(LOST, deadline_left_ms=deadline_ms)
    await a_moment()
    assert silent.about(ref, Granted)
    await stand.take_over()
    again = stand.again(other)
    if has_told_all:
        again.tell_all()
    await asyncio.sleep(1.1)
    return ref, silent, again


def told_of(gateway: Listening, ref: int) -> list[type[Down]]:
    """What it was told of a request, in order."""
    return [type(message) for message in gateway.heard if getattr(message, "ref", None) == ref]


# ── while somebody was not heard ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("has_told_all", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_grant_waits_until_its_dispatch_is_durable(stream: bool, has_told_all: bool) -> None:
    """Protects engines: none is called for what the next coordinator could not find; then all is as ever, in order."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand, has_told_all=has_told_all)
        found_by_the_next(stand, other)
        stand.store_s["write"] = WRITE_S
        ref = other.ask(OTHER, stream=stream)
        await asyncio.sleep(WRITE_S - 0.05)
        assert told_of(other, ref) == [Admitted] and stand.running == 2
        await asyncio.sleep(0.1)
        assert told_of(other, ref) == [Admitted, HoldBooked, Granted, DeliveryBooked]
        other.end(ref)
        await asyncio.sleep(LEASE_S)
        assert settled(stand, ref).status == "completed"

    play(script)


@pytest.mark.parametrize("is_durable", [True, False])
def test_two_takeovers_in_a_row_give_no_lane_away(is_durable: bool) -> None:
    """Protects engines: of what was granted between, the last coordinator knows the lane, though nobody has told it yet."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        stand.store_s["write"] = WRITE_S
        ref = other.ask(OTHER)
        await asyncio.sleep(WRITE_S + (0.1 if is_durable else -0.1))
        stand.store_s.clear()
        await stand.take_over()
        new = stand.gateway("new.1")
        await asyncio.sleep(1.1)
        asked = new.ask(OTHER)
        await a_moment()
        assert len(other.about(ref, Granted)) + len(new.about(asked, Granted)) == 1
        if is_durable:
            again = stand.again(other)
            tell_running(other, again, ref)
            again.tell_all()
            again.end(ref)
            await a_moment()
            assert settled(stand, ref).status == "completed" and new.about(asked, Granted)
        new.end(asked)
        await asyncio.sleep(LEASE_S)

    play(script)


def test_a_second_attempt_waits_as_well() -> None:
    """Protects engines and streams: the grant of a retry is durable too, before its steps, and is paid as ever."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        found_by_the_next(stand, other)
        ref = other.ask(OTHER)
        await a_moment()
        [first] = other.about(ref, Granted)
        stand.store_s["write"] = WRITE_S
        other.finish(ref, reason=FinishReason.REPLICA_LOST, tokens=3)
        other.say(Stopped(ref, 1))
        assert len(other.about(ref, Granted)) == 1
        await asyncio.sleep(WRITE_S + 0.1)
        [_, second] = other.about(ref, Granted)
        assert (second.attempt, second.replica == first.replica) == (2, False)
        assert told_of(other, ref)[-2:] == [Granted, DeliveryBooked]
        other.end(ref, 2)
        await asyncio.sleep(LEASE_S)
        end = settled(stand, ref)
        assert (end.status, end.attempt, end.platform_microusd) == ("completed", 2, PRICE.cost(INPUT_TOKENS, 0, 3))

    play(script, lanes=2)


async def tells(stand: Stand, silent: Listening, ref: int) -> None:
    """It tells."""
    again = stand.again(silent)
    tell_running(silent, again, ref)
    again.tell_all()
    again.end(ref)


async def has_nothing(stand: Stand, silent: Listening, ref: int) -> None:
    """It registers, and carries nothing."""
    stand.gateway("silent.2", "silent.1")


async def its_lease_ends(stand: Stand, silent: Listening, ref: int) -> None:
    """It never comes."""
    await asyncio.sleep(LEASE_S)


async def its_deadline_is_over(stand: Stand, silent: Listening, ref: int) -> None:
    """It never comes, and what it carried is over before its lease."""
    await asyncio.sleep(11.5)


@pytest.mark.parametrize("happens", [tells, has_nothing, its_lease_ends, its_deadline_is_over])
def test_nothing_waits_once_nobody_is_waited_for(happens: Callable[[Stand, Listening, int], Awaitable[None]]) -> None:
    """Protects answers' quickness: with everybody heard, or given up, engines start while the ledger still writes."""

    async def script(stand: Stand) -> None:
        ref, silent, other = await one_is_not_heard(stand, 2_000 if happens is its_deadline_is_over else 60_000)
        await happens(stand, silent, ref)
        await a_moment()
        stand.store_s["write"] = WRITE_S
        asked = other.ask(OTHER)
        assert told_of(other, asked) == [Admitted, Granted]
        other.end(asked)

    play(script)


# ── it ends before ───────────────────────────────────────────────────────────────────────────────────────────────────


async def dispatched(stand: Stand, other: Listening) -> int:
    """A request that has a lane and whose grant waits for the ledger, which is slow."""
    other.on_granted = lambda granted: other.say(Stopped(granted.ref, granted.attempt))  # as one that has ended it
    stand.store_s["write"] = WRITE_S
    ref = other.ask(OTHER)
    await asyncio.sleep(0.1)
    assert stand.running == 2 and not other.about(ref, Granted)
    return ref


def check_ended_unpaid(stand: Stand, gateway: Listening, ref: int, reason: FinishReason) -> None:
    """AssertionError unless it ended so, for nobody's money, and its gateway knows that."""
    end = settled(stand, ref)
    assert (end.finish_reason, end.cost_microusd, end.platform_microusd, end.output_tokens) == (reason, 0, 0, 0)
    [ended], [booked] = gateway.about(ref, Ended), gateway.about(ref, EndBooked)
    assert ended.record.finish_reason is booked.record.finish_reason is reason


@pytest.mark.parametrize("reason", [FinishReason.DISCONNECT, FinishReason.DEADLINE])
def test_who_leaves_or_is_too_late_before_the_grant(reason: FinishReason) -> None:
    """Protects lanes and tenants: nothing ran, so nothing is paid, and the lane is free as the grant meets nobody."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        ref = await dispatched(stand, other)
        other.say(Finish(ref, 0, reason))
        assert other.about(ref, Ended) and stand.book.open_holds == 1
        await asyncio.sleep(3 * WRITE_S)
        check_ended_unpaid(stand, other, ref, reason)
        assert len(other.about(ref, Granted)) == 1 and stand.running == 1
        await asyncio.sleep(LEASE_S)

    play(script)


@pytest.mark.parametrize("reason", [FinishReason.CLIENT, FinishReason.REVOKED, FinishReason.SHUTDOWN])
def test_what_is_stopped_before_the_grant(reason: FinishReason) -> None:
    """Protects who cancels, revokes or stops: the gateway hears of it before the grant, and starts no engine for that."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        ref = await dispatched(stand, other)
        execution = stand.execution(ref)
        assert execution is not None
        stand.coordinator._ask_to_stop(execution, reason)
        assert other.about(ref, StopRequest) == [StopRequest(ref, reason)]
        other.say(Finish(ref, 0, reason))
        await asyncio.sleep(3 * WRITE_S)
        check_ended_unpaid(stand, other, ref, reason)
        assert told_of(other, ref).index(StopRequest) < told_of(other, ref).index(Granted) and stand.running == 1
        await asyncio.sleep(LEASE_S)

    play(script)


def test_a_session_that_is_lost_before_the_grant() -> None:
    """Protects lanes: with its gateway goes its lane, at once, and no grant comes to that gateway's next session."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        ref = await dispatched(stand, other)
        stand.coordinator.lose(other.name)
        assert stand.running == 1
        again = stand.gateway("other.3", other.name)
        asked = again.ask(OTHER)
        await asyncio.sleep(3 * WRITE_S)
        assert not other.about(ref, Granted) and not again.about(ref, Granted) and again.about(asked, Granted)
        stand.check_ended(ref)
        again.end(asked)
        await asyncio.sleep(LEASE_S)

    play(script)


# ── the store is away ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_is_away_ends_who_waits_for_a_grant() -> None:
    """Protects who waits: a grant that cannot become durable is waited for no longer than any other record."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        running, waiting = other.ask(OTHER), other.ask(OTHER)
        await a_moment()
        other.on_granted = lambda granted: other.say(Stopped(granted.ref, granted.attempt))
        stand.ledger.fault = lambda operation: errors.LedgerUnavailable(not_written=True)
        other.end(running)
        assert stand.waiting == 0 and stand.running == 2 and not other.about(waiting, Granted)
        await asyncio.sleep(STORE_S - 0.05)
        assert not other.about(waiting, StopRequest)
        await asyncio.sleep(0.35)
        assert other.about(waiting, StopRequest) == [StopRequest(waiting, FinishReason.LEDGER_UNAVAILABLE)]
        other.say(Finish(waiting, 0, FinishReason.LEDGER_UNAVAILABLE))
        assert other.about(waiting, Ended) and not other.about(waiting, Granted)
        stand.ledger.fault = lambda operation: None
        await asyncio.sleep(2)
        check_ended_unpaid(stand, other, waiting, FinishReason.LEDGER_UNAVAILABLE)
        assert stand.running == 1
        await asyncio.sleep(LEASE_S)

    play(script)


def test_a_store_that_is_back_in_time_grants() -> None:
    """Protects who waits: within the bound nothing ends, and one that runs by then is ended by no bound of the store."""

    async def script(stand: Stand) -> None:
        _, _, other = await one_is_not_heard(stand)
        running, waiting = other.ask(OTHER), other.ask(OTHER)
        await a_moment()
        stand.ledger.fault = lambda operation: errors.LedgerUnavailable(not_written=True)
        other.end(running)
        await asyncio.sleep(STORE_S - 1)
        stand.ledger.fault = lambda operation: None
        await asyncio.sleep(1)
        assert other.about(waiting, Granted)
        stand.ledger.fault = lambda operation: errors.LedgerUnavailable(not_written=True)
        other.show(waiting, delivered_max=2 * STEP_TOKENS)
        await asyncio.sleep(STORE_S + 1)
        assert not other.about(waiting, StopRequest)
        stand.ledger.fault = lambda operation: None
        other.end(waiting)
        await asyncio.sleep(LEASE_S)
        assert settled(stand, waiting).status == "completed"

    play(script, config=SMALL_STEPS)


def test_a_coordinator_that_was_replaced_grants_nothing_more() -> None:
    """Protects engines: one whose record is refused because another one leads never tells of that dispatch."""

    async def script(stand: Stand) -> None:
        ref, silent, other = await one_is_not_heard(stand)
        stand.store_s["write"] = WRITE_S
        asked = other.ask(OTHER)
        await stand.take_over(is_killed=False)
        stand.store_s.clear()
        await asyncio.sleep(2 * WRITE_S)
        assert not other.about(asked, Granted)
        again, told = stand.again(other), stand.again(silent)
        again.tell(asked)
        again.tell_all()
        tell_running(silent, told, ref)
        told.tell_all()
        await a_moment()
        assert not any(isinstance(message, Rejected) for message in again.heard)
        told.end(ref)

    play(script)


# ── real gateways ────────────────────────────────────────────────────────────────────────────────────────────────────


async def one_is_cut_off(world: LinkWorld) -> Asked:
    """A long request whose gateway finds no coordinator any more, as another one leads and has recovered."""
    silent = world.gateways[0]
    asked = silent.ask(max_output_tokens=200)
    await until(lambda: asked.tokens, 5, "it runs")
    silent.cable.refuses = True
    await world.take_over()
    await asyncio.sleep(1.5)
    return asked


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_asked_meanwhile_is_served(stream: bool) -> None:
    """Protects clients: a gateway that is cut off delays others by a write of the ledger, and by nothing else."""

    async def script(world: LinkWorld) -> None:
        cut = await one_is_cut_off(world)
        world.stand.store_s["write"] = WRITE_S
        asked = world.gateways[1].ask(stream=stream)
        await asyncio.sleep(WRITE_S - 0.1)
        assert world.engine_runs == 1
        await until(lambda: asked.done_s is not None, 10, "it ends")
        assert asked.answer.record is not None and asked.answer.record.status == "completed" and asked.tokens == 40
        world.gateways[0].cable.mend()
        await until(lambda: cut.done_s is not None, 20, "it ends")
        assert cut.answer.record is not None and cut.answer.record.status == "completed"

    play_links(script)


@pytest.mark.parametrize("how", ["leaves", "late", "cancelled", "killed"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_ends_before_its_grant_starts_no_engine(how: str, stream: bool) -> None:
    """Protects engines and lanes: whoever ends while the grant waits for the ledger, nothing runs, and nothing is left."""

    async def script(world: LinkWorld) -> None:
        await one_is_cut_off(world)
        gateway, runs = world.gateways[1], Counter(call.prompt for call in world.engine.calls)
        world.stand.store_s["write"] = 1.0
        habits = Habits(leaves_after_ms=300 if how == "leaves" else None)
        deadline_ms = 500 if how == "late" else None
        asked = gateway.ask(stream=stream, habits=habits, deadline_ms=deadline_ms, request_id="named")
        await asyncio.sleep(0.2)
        assert world.stand.running == 2
        if how == "cancelled":
            gateway.cancel(0, "named")
        if how == "killed":
            gateway.die()
        await asyncio.sleep(2.5)
        world.stand.store_s.clear()
        await until(lambda: asked.was_cut or asked.done_s is not None, 5, "it ends")
        assert Counter(call.prompt for call in world.engine.calls) == runs

    play_links(script)
