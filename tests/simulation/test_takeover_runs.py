"""Another coordinator leads: what runs keeps its lane, its booked steps and its attempts, whatever was durable of it.

The gateways only listen; what they tell again is the test's choice. Each of two replicas has one lane.
"""

import asyncio

import msgspec
import pytest
from tests.simulation.session_stand import INPUT_TOKENS, OUTPUT_TOKENS, Listening, Stand, finish_of, play, run_of
from tests.simulation.takeover_scenes import LEASE_S, PRICE, STEP_TOKENS, booked_before_it_is_heard, settled, tell_running
from tests.simulation.test_lost_gateways import LOST, OTHER, a_moment, fill, waits_again

from weir.core.endings import FinishReason
from weir.core.ledger.records import HoldRecord, StepRecord
from weir.messages import (
    CancelById,
    DeliveryBooked,
    EndBooked,
    Ended,
    Finish,
    Granted,
    Reattached,
    Stopped,
)
from weir.sim.world import POOL, SMALL_STEPS, tenant_name


async def runs_undurably(stand: Stand, one: Listening, other: Listening) -> tuple[int, int]:
    """A request whose hold is durable and whose dispatch is not, as its coordinator dies; what ended before it, unheard."""
    running = await fill(other, OTHER)
    ref = one.ask(LOST)
    await a_moment()
    stand.store_s["write"] = 1.0
    other.end(running[0])
    assert one.about(ref, Granted)
    await stand.take_over()
    stand.store_s.clear()
    assert stand.records_of(ref, HoldRecord) and not stand.records_of(ref, StepRecord)
    return ref, running[1]


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dispatch_that_was_not_durable_is_booked_before_output() -> None:
    """Protects the books: what runs without a record may hand out nothing before the new coordinator has booked it."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        ref, running = await runs_undurably(stand, one, other)
        again, another = stand.again(one), stand.again(other)
        booked_before_it_is_heard(stand, again)
        tell_running(one, again, ref)
        tell_running(other, another, running)
        another.tell_all()
        again.tell_all()
        assert again.about(ref, Reattached) and not again.about(ref, DeliveryBooked)
        await a_moment()
        assert [(each.attempt, each.delivered_max) for each in again.about(ref, DeliveryBooked)] == [(1, OUTPUT_TOKENS)]
        again.show(ref)
        again.end(ref)
        another.end(running)
        await a_moment()
        assert settled(stand, ref).status == "completed"

    play(script)


@pytest.mark.parametrize("asked", [STEP_TOKENS, 3 * STEP_TOKENS, 1_000])
def test_the_next_step_is_booked_as_far_as_it_was_asked_for(asked: int) -> None:
    """Protects streams and books: what is durable is confirmed at once, what was asked for beyond it once it is, no more."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [granted] = one.about(ref, Granted)
        await stand.take_over()
        again = stand.again(one)
        booked_before_it_is_heard(stand, again)
        again.tell(ref, run_of(granted, delivered_max=asked, has_output=True, first_output=True))
        again.tell_all()
        assert [each.delivered_max for each in again.about(ref, DeliveryBooked)] == [STEP_TOKENS]
        await a_moment()
        assert again.about(ref, DeliveryBooked)[-1].delivered_max == min(asked, OUTPUT_TOKENS)
        again.finish(ref, tokens=STEP_TOKENS)
        again.say(Stopped(ref, 1))

    play(script, config=SMALL_STEPS)


def test_what_was_granted_unheard_waits_again() -> None:
    """Protects lanes: a dispatch that its gateway never heard runs nowhere; it starts again, once, and is paid once."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        ref, blocking = one.ask(LOST), other.ask(OTHER)
        await a_moment()
        await stand.take_over()
        again, another = stand.again(one), stand.again(other)
        tell_running(other, another, blocking)
        another.tell_all()
        again.tell(ref)
        assert not again.about(ref, Granted)
        again.tell_all()
        [granted] = again.about(ref, Granted)
        assert (granted.attempt, stand.running) == (1, 2)
        again.end(ref)
        another.end(blocking)
        await a_moment()
        end = settled(stand, ref)
        assert (end.attempt, end.output_tokens, end.platform_microusd) == (1, 8, 0)

    play(script)


@pytest.mark.parametrize("is_dispatched", [True, False], ids=["a dispatch is booked", "it waits"])
def test_who_left_before_a_grant_was_heard(is_dispatched: bool) -> None:
    """Protects lanes and the tenant: what its gateway ended, or asks to be ended, while nothing ran for it costs nothing."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        running = [] if is_dispatched else await fill(other, OTHER)
        left, cancelled = one.ask(LOST), one.ask(LOST)
        await a_moment()
        await stand.take_over()
        again, another = stand.again(one), stand.again(other)
        another.say(CancelById(900, tenant_name(LOST), f"id-{cancelled}"))
        again.tell(left, finish=Finish(left, 0, FinishReason.DISCONNECT))
        again.tell(cancelled)
        again.tell_all()
        for ref in running:
            tell_running(other, another, ref)
        another.tell_all()
        assert (stand.running, stand.waiting, stand.book.open_holds) == (len(running), 0, len(running))
        await a_moment()
        for ref, reason in ((left, FinishReason.DISCONNECT), (cancelled, FinishReason.CLIENT)):
            [booked] = again.about(ref, EndBooked)
            assert (booked.record.finish_reason, booked.record.cost_microusd) == (reason, 0)
        for ref in running:
            another.end(ref)

    play(script)


def test_what_was_cancelled_while_it_waited_and_ran_all_the_same() -> None:
    """Protects a cancel and a lane: whoever runs what has ended meanwhile hears so, and its lane waits for the engine."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        ref, running = await runs_undurably(stand, one, other)
        execution = stand.execution(ref)
        assert execution is not None
        stand.coordinator._ask_to_stop(execution, FinishReason.CLIENT)
        again, another = stand.again(one), stand.again(other)
        tell_running(one, again, ref)
        assert again.about(ref, Ended)[0].record.finish_reason is FinishReason.CLIENT
        tell_running(other, another, running)
        another.tell_all()
        again.tell_all()
        new = another.ask(OTHER)
        assert stand.running == 2 and not another.about(new, Granted)
        again.say(Stopped(ref, 1, 2.0))
        assert another.about(new, Granted)
        another.end(new)
        another.end(running)
        await a_moment()
        assert stand.end_of(ref).finish_reason is FinishReason.CLIENT and again.about(ref, EndBooked)

    play(script)


# ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def runs_a_second_time(stand: Stand, one: Listening, other: Listening, *, is_durable: bool) -> tuple[Granted, Granted]:
    """A request of one whose first attempt failed with three tokens and whose second runs, as its coordinator dies."""
    ref, blocking = await waits_again(stand, one, other)
    await a_moment()
    if not is_durable:
        stand.store_s["write"] = 1.0
    other.end(blocking)
    if is_durable:
        await a_moment()
    first, second = one.about(ref, Granted)
    assert (first.attempt, second.attempt) == (1, 2)
    await stand.take_over()
    stand.store_s.clear()
    assert [step.attempt for step in stand.records_of(ref, StepRecord)] == [1, 2] if is_durable else [1]
    return first, second


@pytest.mark.parametrize("is_stopped", [True, False], ids=["first has stopped", "first is stopping"])
@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "not durable"])
def test_a_second_attempt_goes_on(is_durable: bool, is_stopped: bool) -> None:
    """Protects the platform's books and lanes: the first attempt's cost is the platform's, once, as it was booked."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        first, second = await runs_a_second_time(stand, one, other, is_durable=is_durable)
        ref = first.ref
        stand.gateway("other.2")
        again = stand.again(one)
        booked_before_it_is_heard(stand, again)
        again.tell(ref, run_of(second), run_of(first, is_stopped=is_stopped))
        again.tell_all()
        assert stand.running == 2 - is_stopped
        if not is_stopped:
            again.say(Stopped(ref, 1))
        assert stand.running == 1
        await a_moment()
        assert [(each.attempt, each.delivered_max) for each in again.about(ref, DeliveryBooked)] == [(2, OUTPUT_TOKENS)]
        again.end(ref, 2)
        await a_moment()
        end = settled(stand, ref)
        assert (end.attempt, end.status, end.cost_microusd) == (2, "completed", PRICE.cost(INPUT_TOKENS, 0, 8))
        assert end.platform_microusd == PRICE.cost(INPUT_TOKENS, 0, OUTPUT_TOKENS)

    play(script)


def test_a_second_attempt_that_nobody_tells() -> None:
    """Protects the platform's books: both attempts count, each as far as it was booked, and once."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        first, _ = await runs_a_second_time(stand, one, other, is_durable=True)
        stand.gateway("other.2")
        await asyncio.sleep(LEASE_S + 0.5)
        end = settled(stand, first.ref)
        assert (end.finish_reason, end.cost_microusd, end.attempt) == (FinishReason.COORDINATOR_LOST, 0, 2)
        assert end.platform_microusd == 2 * PRICE.cost(INPUT_TOKENS, 0, OUTPUT_TOKENS)
        assert stand.running == 0

    play(script)


@pytest.mark.parametrize("was_granted", [True, False], ids=["granted unheard", "not answered"])
def test_a_failure_that_was_not_answered_is_tried_again(was_granted: bool) -> None:
    """Protects the one retry: the report counts at the next coordinator, what was measured is the platform's, once."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        if was_granted:
            first, _ = await runs_a_second_time(stand, one, other, is_durable=True)
            ref = first.ref
        else:
            ref = one.ask(LOST)
            await a_moment()
            [first] = one.about(ref, Granted)
            await stand.take_over()
        stand.gateway("other.2")
        again = stand.again(one)
        again.tell(ref, run_of(first), finish=finish_of(ref, reason=FinishReason.REPLICA_LOST, tokens=3))
        assert again.about(ref, Reattached) and not again.about(ref, Granted)
        again.tell_all()
        [second] = again.about(ref, Granted)
        assert second.attempt == 2 and second.replica != first.replica and stand.running == 2
        again.say(Stopped(ref, 1))
        again.end(ref, 2)
        await a_moment()
        end = settled(stand, ref)
        assert (end.status, end.attempt) == ("completed", 2)
        assert end.platform_microusd == PRICE.cost(INPUT_TOKENS, 0, 3)

    play(script)


def test_a_report_that_was_not_answered_settles() -> None:
    """Protects what was served: an end that its coordinator did not hear is the end, and is booked by the next one."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        streamed, whole = one.ask(LOST), one.ask(LOST, stream=False)
        await a_moment()
        grants = {ref: one.about(ref, Granted)[0] for ref in (streamed, whole)}
        await stand.take_over()
        again = stand.again(one)
        for ref, granted in grants.items():
            again.tell(ref, run_of(granted, is_stopped=True, has_output=True), finish=finish_of(ref))
        again.tell_all()
        assert stand.running == 0 and stand.book.open_holds == 0
        await a_moment()
        for ref in grants:
            [booked] = again.about(ref, EndBooked)
            assert booked.record.posted and booked.record.output_tokens == 8
            assert settled(stand, ref).status == "completed"

    play(script)


@pytest.mark.parametrize("told_s", [0.1, 1.5], ids=["while it recovers", "later"])
@pytest.mark.parametrize("reason", [FinishReason.REPLICA_LOST, FinishReason.QUEUE_WAIT, FinishReason.DISCONNECT])
def test_what_has_ended_after_a_failure_stays_ended(reason: FinishReason, told_s: float) -> None:
    """Protects holds and replicas: the end that its gateway has is the end, also where the failure before it is tried again."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [first] = one.about(ref, Granted)
        await stand.take_over()
        await asyncio.sleep(told_s)
        again = stand.again(one)
        again.tell(ref, run_of(first, is_stopped=True), finish=finish_of(ref, reason=FinishReason.REPLICA_LOST, tokens=3))
        again.say(Finish(ref, 0, reason))
        again.tell_all()
        await a_moment()
        for granted in again.about(ref, Granted):
            again.say(Stopped(ref, granted.attempt))
        assert bool(again.about(ref, Granted)) == (told_s > 1) and stand.book.open_holds == stand.running == 0
        await a_moment()
        end = settled(stand, ref)
        assert (end.finish_reason, end.cost_microusd) == (reason, 0)
        assert end.platform_microusd == PRICE.cost(INPUT_TOKENS, 0, 3)
        other = "second" if first.replica.name == "first" else "first"
        assert stand.fleet.pool(POOL).replicas[other].takes_work

    play(script)


def test_a_second_attempt_of_which_neither_dispatch_was_durable() -> None:
    """Protects the platform's books: of the first attempt its input at least is the platform's, though no record names it."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        running = await fill(other, OTHER)
        ref = one.ask(LOST)
        await a_moment()
        stand.store_s["write"] = 1.0
        other.end(running[0])
        one.finish(ref, reason=FinishReason.REPLICA_LOST, tokens=3)
        other.end(running[1])
        first, second = one.about(ref, Granted)
        await stand.take_over()
        stand.store_s.clear()
        stand.gateway("other.2")
        assert not stand.records_of(ref, StepRecord)
        again = stand.again(one)
        again.tell(ref, run_of(second), run_of(first, is_stopped=True))
        again.tell_all()
        again.end(ref, 2)
        await a_moment()
        end = settled(stand, ref)
        assert (end.status, end.attempt, end.platform_microusd) == ("completed", 2, PRICE.cost(INPUT_TOKENS, 0, 0))

    play(script)


# ── replicas that are not known yet ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("has_ended", [False, True], ids=["it runs", "its engine is stopping"])
def test_the_lane_of_what_runs_is_taken_before_anything_is_dispatched_there(has_ended: bool) -> None:
    """Protects engines: as its replica is named late, what runs or stops there has its lane before whatever waits."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        running = await fill(other, OTHER)
        waiting = [one.ask(LOST) for _ in range(2)]
        await a_moment()
        [granted] = other.about(running[0], Granted)
        stand.fleet_s = 2.5
        await stand.take_over()
        again, another = stand.again(one), stand.again(other)
        another.tell(running[0], run_of(granted))
        another.tell_all()
        for ref in waiting:
            again.tell(ref)
        again.tell_all()
        await asyncio.sleep(1.5)
        if has_ended:
            another.finish(running[0])
            await a_moment()
            assert another.about(running[0], EndBooked)
        assert stand.waiting == 2 and not again.about(waiting[0], Granted)
        await asyncio.sleep(1.5)
        [started] = again.about(waiting[0], Granted)
        assert started.replica.name != granted.replica.name and stand.running == 2
        assert not again.about(waiting[1], Granted)
        if has_ended:
            another.say(Stopped(running[0], 1))
        else:
            another.end(running[0])
        [second] = again.about(waiting[1], Granted)
        assert second.replica.name == granted.replica.name
        for ref in waiting:
            again.end(ref)

    play(script)


def test_what_ended_and_stopped_before_its_replica_is_known_takes_nothing() -> None:
    """Protects capacity: once an engine runs nothing there, a replica that is named later has all its lanes."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        running = await fill(one, LOST)
        stand.fleet_s = 2.0
        await stand.take_over()
        again = stand.again(one)
        for ref in running:
            tell_running(one, again, ref)
        again.tell_all()
        again.end(running[0])
        again.say(finish_of(running[1]))
        await a_moment()
        assert stand.executions.live_count == 1
        again.say(Stopped(running[1], 1, confirmed=False))
        await asyncio.sleep(2.5)
        assert stand.running == 0 and stand.executions.live_count == 0

    play(script)


def test_a_replica_that_another_supervisor_named_otherwise_is_found_by_its_address() -> None:
    """Protects engines behind addresses: their lane is taken under whatever name they have now."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [granted] = one.about(ref, Granted)
        await stand.take_over()
        again = stand.again(one)
        replica = msgspec.structs.replace(granted.replica, name="as it was called")
        again.tell(ref, run_of(granted, replica=replica))
        again.tell_all()
        assert stand.fleet.pool(POOL).replicas[granted.replica.name].running == 1
        again.end(ref)

    play(script)


def test_a_failure_told_before_replicas_are_known_is_tried_again() -> None:
    """Protects the one retry: a takeover that does not know its replicas yet waits for them before it gives a request up."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [first] = one.about(ref, Granted)
        stand.fleet_s = 0.3  # well within the second of recovering
        await stand.take_over()
        again = stand.again(one)
        again.tell(ref, run_of(first, is_stopped=True), finish=finish_of(ref, reason=FinishReason.REPLICA_LOST, tokens=3))
        again.tell_all()
        await asyncio.sleep(0.5)
        [second] = again.about(ref, Granted)
        again.end(ref, second.attempt)

    play(script)
