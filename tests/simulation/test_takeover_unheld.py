"""Another coordinator leads: what it does not hold, or whose end is booked, and what it tells while the store is away.

The gateways only listen; what they tell again is the test's choice. Each of two replicas has one lane.
"""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from tests.simulation.session_stand import Listening, Stand, finish_of, play, run_of
from tests.simulation.takeover_scenes import LEASE_S, STEP_TOKENS, booked_before_it_is_heard, settled
from tests.simulation.test_lost_gateways import LOST, OTHER, a_moment, fill

from weir import errors
from weir.core.endings import FinishReason
from weir.core.ledger.records import HoldRecord, ReleaseRecord
from weir.core.registry.snapshot import Snapshot
from weir.messages import (
    DeliveryBooked,
    EndBooked,
    Ended,
    Granted,
    NotHeld,
    Reattached,
    Rejected,
    Stopped,
)
from weir.sim.world import POOL, REVISION, SMALL_STEPS

# ── what is not held ─────────────────────────────────────────────────────────────────────────────────────────────────


async def runs_unheld(stand: Stand, one: Listening) -> Granted:
    """A request that runs, whose hold is not durable as its coordinator dies."""
    stand.store_s["write"] = 1.0
    ref = one.ask(LOST)
    [granted] = one.about(ref, Granted)
    await stand.take_over()
    stand.store_s.clear()
    assert not stand.ledger.records
    return granted


@pytest.mark.parametrize("end", ["confirmed", "unconfirmed", "lost"])
@pytest.mark.parametrize("fleet_s", [0.0, 0.5], ids=["replica known", "replica known later"])
def test_what_was_never_held_keeps_its_lane_until_its_engine_stopped(end: str, fleet_s: float) -> None:
    """Protects engines: nothing is held and the gateway may ask afresh, but what runs there has its lane until it is over."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        stand.fleet_s = fleet_s
        granted = await runs_unheld(stand, one)
        condemned: list[str] = []
        stand.fleet.on_condemned = condemned.append
        again, another = stand.again(one), stand.again(other)
        again.tell(granted.ref, run_of(granted))
        again.tell_all()
        another.tell_all()
        await asyncio.sleep(fleet_s + 0.1)
        assert again.about(granted.ref, NotHeld) == [NotHeld(granted.ref)]
        assert stand.running == 1 and stand.book.open_holds == 0
        asked = [another.ask(OTHER) for _ in range(2)]
        [started] = another.about(asked[0], Granted)
        assert started.replica.name != granted.replica.name and not another.about(asked[1], Granted)
        if end == "lost":
            stand.coordinator.lose("one.2")
        else:
            again.say(Stopped(granted.ref, 1, 2.0, confirmed=end == "confirmed"))
        if end == "unconfirmed":
            assert condemned == [granted.replica.name] and not another.about(asked[1], Granted)
            stand.fleet.gone(POOL, granted.replica.name)
            another.end(asked[0])
        assert another.about(asked[1], Granted)
        for ref in asked[end == "unconfirmed" :]:
            another.end(ref)

    play(script)


def test_what_was_never_held_is_asked_for_afresh_under_the_same_id() -> None:
    """Protects idempotency: nothing is bound, so the same request is admitted, and runs beside what is still stopping."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        granted = await runs_unheld(stand, one)
        again = stand.again(one)
        again.tell(granted.ref, run_of(granted))
        again.tell_all()
        ref = again.ask(LOST, request_id=f"id-{granted.ref}", generation_id=f"gen-{granted.ref}")
        await a_moment()
        [afresh] = again.about(ref, Granted)
        assert afresh.replica.name != granted.replica.name
        again.say(Stopped(granted.ref, 1, 2.0))
        assert stand.running == 1
        again.end(ref)
        await a_moment()
        [hold] = stand.records_of(granted.ref, HoldRecord)
        assert hold.id.execution == 1

    play(script)


@pytest.mark.parametrize("stopped", [True, False])
def test_what_ended_durably_unheard_is_told_as_it_is_booked(stopped: bool) -> None:
    """Protects the client and the lane: its gateway hears the end from the ledger, and its lane waits for the engine."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [granted] = one.about(ref, Granted)
        one.finish(ref)
        await a_moment()
        assert stand.end_of(ref).status == "completed"
        await stand.take_over()
        again = stand.again(one)
        again.tell(ref, run_of(granted, is_stopped=stopped, has_output=True), finish=finish_of(ref))
        again.tell_all()
        assert stand.running == int(not stopped)
        await a_moment()
        [booked] = again.about(ref, EndBooked)
        assert (booked.record.status, booked.record.output_tokens, booked.record.posted) == ("completed", 8, True)
        if not stopped:
            again.say(Stopped(ref, 1))
        assert stand.running == 0 and not again.about(ref, Reattached) and not again.about(ref, NotHeld)

    play(script)


def test_another_body_under_the_same_generation_is_not_taken_for_it() -> None:
    """Protects the tenant: only what was asked is held; whoever tells something else hears that it is not known."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [granted] = one.about(ref, Granted)
        await stand.take_over()
        again = stand.again(one)
        asked, at_ns = stand.asked[ref]
        stand.asked[ref] = msgspec.structs.replace(asked, generation_id="another"), at_ns
        again.tell(ref, run_of(granted))
        await a_moment()
        assert again.about(ref, NotHeld) == [NotHeld(ref)] and stand.book.open_holds == 1
        again.say(Stopped(ref, 1, 1.0))
        again.tell_all()
        await a_moment()
        stand.check_ended(ref)

    play(script)


# ── the store is away ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_store_is_away_while_a_gateway_tells() -> None:
    """Protects output and ids: what is held goes on within what is booked; of the rest nothing may be said or asked afresh."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        held, ended = await fill(one, LOST)
        grants = {ref: one.about(ref, Granted)[0] for ref in (held, ended)}
        one.end(ended)
        await a_moment()
        await stand.take_over()
        stand.ledger.fault = lambda operation: errors.LedgerUnavailable()
        again = stand.again(one)
        booked_before_it_is_heard(stand, again)
        again.tell(held, run_of(grants[held], delivered_max=2 * STEP_TOKENS, first_output=True))
        again.tell(ended, run_of(grants[ended], is_stopped=True), finish=finish_of(ended))
        again.tell_all()
        assert again.about(held, Reattached)
        await a_moment()
        assert [each.delivered_max for each in again.about(held, DeliveryBooked)] == [STEP_TOKENS]
        assert again.about(ended, NotHeld) == [NotHeld(ended, is_known=False)]
        await asyncio.sleep(3)
        refused = again.ask(LOST)
        assert [message.code for message in again.about(refused, Rejected)] == ["ledger_unavailable"]
        again.finish(held)
        again.say(Stopped(held, 1))
        assert again.about(held, Ended) and not again.about(held, EndBooked)
        stand.ledger.fault = lambda operation: None
        await asyncio.sleep(2)
        assert again.about(held, EndBooked) and settled(stand, held).status == "completed"

    play(script, config=SMALL_STEPS)


def test_the_store_does_not_answer_in_time_while_a_gateway_tells() -> None:
    """Protects who waits: after the store's bound it is said that nothing can be said."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        granted = await runs_unheld(stand, one)
        stand.store_s["find_execution"] = 60.0
        again = stand.again(one)
        again.tell(granted.ref, run_of(granted))
        again.tell_all()
        await asyncio.sleep(1.9)
        assert not again.about(granted.ref, NotHeld)
        await asyncio.sleep(0.2)
        assert again.about(granted.ref, NotHeld) == [NotHeld(granted.ref, is_known=False)]
        again.say(Stopped(granted.ref, 1, 1.0))

    play(script)


def test_what_is_over_here_and_not_durable_is_not_asked_for_afresh() -> None:
    """Protects ids: what was given up here is held in the store until its end is written, so nothing can be said of it."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        [granted] = one.about(ref, Granted)
        await stand.take_over()
        stand.store_s["write"] = 1.0
        await asyncio.sleep(LEASE_S + 0.1)
        assert stand.book.open_holds == 0
        again = stand.again(one)
        again.tell(ref, run_of(granted))
        again.tell_all()
        await a_moment()
        assert again.about(ref, NotHeld) == [NotHeld(ref, is_known=False)]
        again.say(Stopped(ref, 1, 1.0))
        await asyncio.sleep(2)
        stand.check_ended(ref)

    play(script)


@pytest.mark.parametrize("revision", [None, "other@9"], ids=["it is gone", "it serves another revision"])
def test_what_its_pool_serves_no_more_has_ended(revision: str | None) -> None:
    """Protects the pinned revision: what waits or runs for one that is served no more ends at the start, and is told so."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        running = await fill(one, LOST)
        waiting = one.ask(LOST)
        await a_moment()
        stand.snapshot = _serving(stand.snapshot, revision)
        recovered = await stand.take_over()
        assert not recovered.kept and stand.book.open_holds == 0
        assert isinstance(stand.end_of(waiting), ReleaseRecord)
        again = stand.again(one)
        for ref in running:
            again.tell(ref, run_of(one.about(ref, Granted)[0]))
        again.tell(waiting)
        again.tell_all()
        await a_moment()
        for ref in (*running, waiting):
            [booked] = again.about(ref, EndBooked)
            assert booked.record.finish_reason is FinishReason.COORDINATOR_LOST and not again.about(ref, Granted)
            stand.check_ended(ref)
            again.say(Stopped(ref, 1, 1.0))

    play(script)


def _serving(before: Snapshot, revision: str | None) -> Snapshot:
    """What is in force from now on: the pool serves another revision, or is gone."""
    if revision is None:
        return replace(before, pools={})
    other = replace(REVISION, id=revision)
    return replace(
        before,
        revisions={**before.revisions, other.id: other},
        prices={**before.prices, (other.id, other.price.version): other.price},
        pools={POOL: replace(before.pools[POOL], revision=other.id)},
    )


def test_several_that_were_never_held() -> None:
    """Protects lanes: each keeps its own until its engine stopped, also where replicas become known one after the other."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        stand.store_s["write"] = 1.0
        refs = [one.ask(LOST) for _ in range(2)]
        grants = [one.about(ref, Granted)[0] for ref in refs]
        stand.fleet_s = 0.5
        await stand.take_over()
        stand.store_s.clear()
        again = stand.again(one)
        for granted in grants:
            again.tell(granted.ref, run_of(granted))
        again.tell_all()
        await a_moment()
        again.say(Stopped(refs[0], 1, 1.0))
        again.say(Stopped(refs[0], 1, 1.0))
        again.say(Stopped(900, 1, 1.0))
        await asyncio.sleep(1)
        assert stand.running == 1 and stand.fleet.pool(POOL).replicas[grants[1].replica.name].running == 1
        stand.coordinator.lose("one.2")
        assert stand.running == 0

    play(script)


def test_a_coordinator_that_ends_asks_its_store_no_more() -> None:
    """Protects who waits: of what is not held nothing is said but that nothing can be said."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        granted = await runs_unheld(stand, one)
        again = stand.again(one)
        stand.coordinator.close()
        again.tell(granted.ref, run_of(granted, is_stopped=True))
        assert again.about(granted.ref, NotHeld) == [NotHeld(granted.ref, is_known=False)]

    play(script)
