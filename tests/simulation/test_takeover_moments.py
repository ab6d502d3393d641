"""Another coordinator leads: who tells what of what went on, what nobody tells, and what newcomers meet meanwhile.

The gateways only listen; what they tell again is the test's choice. A lease is 15 s, and recovering lasts a second at most.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.simulation.session_stand import Listening, Stand, play
from tests.simulation.takeover_scenes import LEASE_S, QUEUE_WAIT_S, WORST_TOKENS, found, some_run_and_some_wait, tell_running
from tests.simulation.test_lost_gateways import LOST, OTHER, a_moment, fill

from weir.core.endings import FinishReason
from weir.core.ledger.records import ReleaseRecord, SettleRecord, StepRecord
from weir.core.tenancy import Scope
from weir.messages import (
    Admitted,
    EndBooked,
    Ended,
    Finish,
    Granted,
    HoldBooked,
    Lookup,
    Reattached,
    Rejected,
    Stopped,
)
from weir.sim.world import POOL, tenant_name

# ── who tells, and who does not ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "former"), [("one.2", ""), ("one.2", "one.1"), ("new.1", "one.1")])
def test_a_gateway_that_tells_nothing_again_has_ended_what_it_carried(name: str, former: str) -> None:
    """Protects lanes and money: who registers without telling has nothing, so all of it ends at once, and newcomers start."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        running, waiting = await some_run_and_some_wait(one)
        await stand.take_over()
        assert stand.book.open_holds == 4
        registered = stand.gateway(name, former)
        assert stand.book.open_holds == 0 and stand.running == stand.waiting == 0
        ref = registered.ask(OTHER)
        assert registered.about(ref, Granted)
        registered.end(ref)
        await a_moment()
        for each in (*running, *waiting):
            stand.check_ended(each)
        assert not any(isinstance(message, Ended | EndBooked) and message.ref != ref for message in registered.heard)

    play(script)


def test_another_gateway_that_registers_ends_nothing() -> None:
    """Protects what is carried elsewhere: names of gateways that share a beginning are not the same."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        [running, other] = await fill(one, LOST)
        await stand.take_over()
        stand.gateway("one-2.1")
        stand.gateway("two.1", "two.0")
        again = stand.again(one)
        assert stand.book.open_holds == 2
        for ref in (running, other):
            tell_running(one, again, ref)
            assert again.about(ref, Reattached)
        again.tell_all()
        for ref in (running, other):
            again.end(ref)

    play(script)


def test_what_a_gateway_does_not_tell_is_lost_and_its_lane_is_free() -> None:
    """Protects lanes: what is not among the told ends as that is complete, not before, and what waits gets its place."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        (told, untold), (waits, left) = await some_run_and_some_wait(one)
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, told)
        again.tell(waits)
        await a_moment()
        assert stand.book.open_holds == 4 and not again.about(waits, Granted)
        again.tell_all()
        assert stand.book.open_holds == 2
        [granted] = again.about(waits, Granted)
        assert granted.replica != one.about(told, Granted)[0].replica
        await a_moment()
        for ref in (untold, left):
            stand.check_ended(ref)
        assert isinstance(stand.end_of(left), ReleaseRecord) and isinstance(stand.end_of(untold), SettleRecord)
        assert not again.about(untold, Ended) and not again.about(left, Ended)
        again.end(told)
        again.end(waits)
        await a_moment()
        assert stand.end_of(told).status == stand.end_of(waits).status == "completed"

    play(script)


def test_what_nobody_tells_is_held_until_its_lease_is_over() -> None:
    """Protects money and clients: for the whole lease it counts as what it was, and its id is in flight; then it ends."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        running, waiting = await some_run_and_some_wait(one)
        held = stand.book.balance_of(Scope(tenant_name(LOST))).held_microusd
        await stand.take_over()
        again = stand.again(other)
        again.tell_all()
        await asyncio.sleep(LEASE_S - 0.1)
        balance = stand.book.balance_of(Scope(tenant_name(LOST)))
        assert (balance.held_microusd, balance.held_tokens, stand.book.open_holds) == (held, 4 * WORST_TOKENS, 4)
        assert stand.running == 2
        for query, ref, status in ((900, running[0], "running"), (901, waiting[0], "queued")):
            again.say(Lookup(query, tenant_name(LOST), f"id-{ref}"))
            [answer] = found(again, query)
            assert answer.record is not None and answer.record.status == status
            same = again.ask(LOST, request_id=f"id-{ref}", request_id_given=True, body_digest=b"%d" % ref)
            [refused] = again.about(same, Rejected)
            assert refused.code == "request_in_flight" and refused.generation is not None
            assert refused.generation.status == status
        await asyncio.sleep(0.2)
        assert stand.book.open_holds == 0 and stand.running == 0
        await a_moment()
        for ref in (*running, *waiting):
            stand.check_ended(ref)

    play(script)


def test_a_gateway_that_comes_after_the_lease_hears_how_it_ended() -> None:
    """Protects the end that is written: who tells late hears what was booked, and its engine keeps a lane until it stops."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        [ref, _] = await fill(one, LOST)
        await stand.take_over()
        await asyncio.sleep(LEASE_S + 1)
        again = stand.again(one)
        tell_running(one, again, ref)
        again.tell_all()
        assert stand.running == 1
        await a_moment()
        [booked] = again.about(ref, EndBooked)
        assert booked.record.finish_reason is FinishReason.COORDINATOR_LOST and booked.record.cost_microusd == 0
        again.say(Stopped(ref, 1))
        assert stand.running == 0

    play(script)


def test_a_gateway_that_dies_while_it_tells() -> None:
    """Protects both halves: what it told ends with its session, what it did not tell is held until the lease is over."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        (told, untold), (waits, left) = await some_run_and_some_wait(one)
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, told)
        again.tell(waits)
        stand.coordinator.lose("one.2")
        assert stand.book.open_holds == 2 and stand.waiting == 0
        await a_moment()
        stand.check_ended(told)
        stand.check_ended(waits)
        await asyncio.sleep(LEASE_S - 0.3)
        assert stand.book.open_holds == 2
        await asyncio.sleep(0.3)
        assert stand.book.open_holds == 0 and stand.running == 0
        stand.check_ended(untold)
        stand.check_ended(left)

    play(script)


def test_a_gateway_that_tells_again_after_its_session_was_lost() -> None:
    """Protects what goes on: a third session takes what was not told, and hears the end of what was lost with the second."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        [told, untold] = await fill(one, LOST)
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, told)
        stand.coordinator.lose("one.2")
        await a_moment()
        third = stand.again(again)
        for ref in (told, untold):
            tell_running(one, third, ref)
        third.tell_all()
        await a_moment()
        assert third.about(untold, Reattached) and not third.about(told, Reattached)
        [booked] = third.about(told, EndBooked)
        assert booked.record.finish_reason is FinishReason.COORDINATOR_LOST
        third.say(Stopped(told, 1))
        third.end(untold)
        await a_moment()
        assert stand.end_of(untold).status == "completed"

    play(script)


# ── while it recovers ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("told_s", [None, 0.4])
def test_newcomers_wait_until_all_have_told_or_a_second_passed(told_s: float | None) -> None:
    """Protects lanes and limits of what runs: nothing is decided before it is known, and no wait for it is without bound."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        [ref, _] = await fill(one, LOST)
        await stand.take_over()
        new = stand.gateway("new.1")
        asked = new.ask(OTHER)
        left = new.ask(OTHER)
        new.say(Finish(left, 0, FinishReason.DISCONNECT))
        again = stand.again(one)
        tell_running(one, again, ref)
        await asyncio.sleep((told_s or 1.0) - 0.02)
        assert not new.about(asked, Admitted) and not new.about(asked, Rejected)
        if told_s is not None:
            again.tell_all()
        await asyncio.sleep(0.04)
        assert new.about(asked, Admitted) and not new.about(left, Admitted)
        again.end(ref)
        await a_moment()
        if told_s is None:
            again.tell_all()
        [granted] = new.about(asked, Granted)
        execution = stand.execution(asked)
        assert execution is not None and granted.attempt == 1
        waited_ms = (execution.admitted_ns - execution.arrived_ns) / 1e6
        assert 1_000 * (told_s or 1.0) - 50 < waited_ms < 1_000 * (told_s or 1.0) + 50
        assert execution.deadline_ns - execution.arrived_ns == 60_000_000_000
        new.end(asked)

    play(script)


def test_who_leaves_while_it_recovers_is_never_asked_for() -> None:
    """Protects everybody from work for nobody: a gateway that is lost before the decision gets none."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        await fill(one, LOST)
        await stand.take_over()
        new = stand.gateway("new.1")
        new.ask(OTHER)
        stand.coordinator.lose("new.1")
        stand.gateway("one.2")
        await asyncio.sleep(1.5)
        assert stand.book.open_holds == 0 and not any(record.id.tenant == tenant_name(OTHER) for record in stand.ledger.records)

    play(script)


def test_a_deadline_that_passes_while_it_recovers() -> None:
    """Protects callers with little time: who cannot be served in time any more is refused, whatever the wait was for."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        [ref, other] = await fill(one, LOST)
        await stand.take_over()
        new = stand.gateway("new.1")
        late = new.ask(OTHER, deadline_left_ms=500)
        await asyncio.sleep(1.1)
        [refused] = new.about(late, Rejected)
        assert refused.code.startswith("deadline_")
        again = stand.again(one)
        for each in (ref, other):
            tell_running(one, again, each)
            again.end(each)
        again.tell_all()

    play(script)


def test_without_anything_open_only_replicas_are_waited_for() -> None:
    """Protects a quiet takeover: with a replica it decides at once, without one after a second, by what there is then."""

    async def script(stand: Stand) -> None:
        await stand.take_over()
        await a_moment()
        new = stand.gateway("new.1")
        ref = new.ask(OTHER)
        assert new.about(ref, Granted)
        new.end(ref)
        await a_moment()
        stand.fleet_s = 2.0
        await stand.take_over()
        await a_moment()
        newer = stand.gateway("new.2")
        ref = newer.ask(OTHER)
        await asyncio.sleep(0.8)
        assert not newer.about(ref, Rejected)
        await asyncio.sleep(0.2)
        [refused] = newer.about(ref, Rejected)
        assert refused.code == "no_capacity"
        await asyncio.sleep(1)
        ref = newer.ask(OTHER)
        assert newer.about(ref, Granted)
        newer.end(ref)

    play(script)


# ── who waits ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def asked_now(gateway: Listening) -> int:
    """One more request, a moment before the next one."""
    ref = gateway.ask(LOST)
    await a_moment()
    return ref


def tell_all(gateways: Iterable[Listening]) -> None:
    """None of them carries anything else."""
    for gateway in gateways:
        gateway.tell_all()


def test_the_queue_keeps_its_order() -> None:
    """Protects fairness: in whatever order gateways tell what waits, who came first starts first."""

    async def script(stand: Stand) -> None:
        other, one, two = (stand.gateway(f"{name}.1") for name in ("other", "one", "two"))
        running = await fill(other, OTHER)
        waiting = [(gateway, await asked_now(gateway)) for gateway in (one, two, one, two)]
        await stand.take_over()
        again = {gateway: stand.again(gateway) for gateway in (other, two, one)}
        for gateway, ref in reversed(waiting):
            again[gateway].tell(ref)
            assert again[gateway].about(ref, Reattached)
        for ref in running:
            tell_running(other, again[other], ref)
        tell_all(again.values())
        assert stand.waiting == 4 and stand.running == 2
        started: list[int] = []
        for gateway in (again[one], again[two]):
            gateway.on_granted = lambda granted: started.append(granted.ref)
        for ref in running:
            again[other].end(ref)
        for gateway, ref in waiting:
            again[gateway].end(ref)
        assert started == [ref for _, ref in waiting]

    play(script)


def test_the_wait_keeps_its_bound() -> None:
    """Protects callers: the time that was waited before a takeover counts, and so does what the takeover took."""

    async def script(stand: Stand) -> None:
        other, one = stand.gateway("other.1"), stand.gateway("one.1")
        running = await fill(other, OTHER)
        began_s = asyncio.get_running_loop().time()
        ref = one.ask(LOST)
        await asyncio.sleep(2.5)
        await stand.take_over()
        await asyncio.sleep(0.5)
        again, another = stand.again(one), stand.again(other)
        again.tell(ref)
        for each in running:
            tell_running(other, another, each)
        again.tell_all()
        another.tell_all()
        await asyncio.sleep(began_s + QUEUE_WAIT_S - 0.05 - asyncio.get_running_loop().time())
        assert stand.waiting == 1 and not again.about(ref, Ended)
        await asyncio.sleep(0.1)
        [ended] = again.about(ref, Ended)
        assert (ended.record.status, ended.record.finish_reason) == ("expired", "queue_wait")
        for each in running:
            another.end(each)

    play(script)


# ── again and again ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_told", [True, False], ids=["told between", "not told between"])
def test_two_takeovers_in_a_row(is_told: bool) -> None:
    """Protects what goes on through two deaths: it keeps its hold, its place and its lane, and ends once."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        (running, other), (waiting, left) = await some_run_and_some_wait(one)
        await stand.take_over()
        again = stand.again(one)
        if is_told:
            for ref in (running, other):
                tell_running(one, again, ref)
            for ref in (waiting, left):
                again.tell(ref)
            again.tell_all()
            await a_moment()
        await stand.take_over()
        assert stand.book.open_holds == 4
        third = stand.again(again)
        for ref in (running, other):
            tell_running(one, third, ref)
        for ref in (left, waiting):
            third.tell(ref)
        third.tell_all()
        assert (stand.running, stand.waiting, stand.book.open_holds) == (2, 2, 4)
        for ref in (running, other, waiting, left):
            assert third.about(ref, Reattached) and not third.about(ref, HoldBooked)
            third.end(ref)
            await a_moment()
            [booked] = third.about(ref, EndBooked)
            assert booked.record.status == "completed" and stand.end_of(ref).status == "completed"
            assert {step.attempt for step in stand.records_of(ref, StepRecord)} == {1}

    play(script)


# ── pools that go ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_pool_that_goes_still_has_goes_on() -> None:
    """Protects requests of a model that is taken away as another coordinator leads: they end there, and keep its replicas."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        running, waiting = await some_run_and_some_wait(one)
        on_record = stand.snapshot
        stand.publish(replace(on_record, pools={}))
        stand.snapshot, stand.fleet_s = on_record, 0.3
        await stand.take_over()
        stand.publish(replace(on_record, pools={}))
        fleet = stand.fleet
        assert not fleet.is_idle(POOL) and not fleet.is_unused(POOL, "first")
        again = stand.again(one)
        for ref in running:
            tell_running(one, again, ref)
        for ref in waiting:
            again.tell(ref)
        again.tell_all()
        await asyncio.sleep(0.5)
        assert stand.running == 2 and not fleet.is_unused(POOL, "first")
        for ref in (*running, *waiting):
            assert again.about(ref, Granted) or ref in running
            again.end(ref)
            await a_moment()
            assert stand.end_of(ref).status == "completed"
        assert fleet.is_idle(POOL) and fleet.is_unused(POOL, "first")

    play(script)
