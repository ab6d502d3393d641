"""Another coordinator leads: what nobody tells is held no longer than its deadline and the time that a gateway keeps a report.

The gateways only listen; what they tell again is the test's choice. A lease is 15 s, a gateway keeps a report for 10 s, and
all have the second of recovering to tell. Each of two replicas has one lane.
"""

import asyncio

import pytest
from tests.simulation.session_stand import Listening, Stand, finish_of, play, run_of
from tests.simulation.takeover_scenes import LEASE_S, WORST_TOKENS, found, settled, tell_running
from tests.simulation.test_lost_gateways import LOST, OTHER, a_moment

from weir.config import LinkConfig
from weir.core.endings import FinishReason
from weir.core.ledger.records import ReleaseRecord
from weir.core.tenancy import Scope
from weir.messages import Admitted, CancelById, EndBooked, Granted, Reattached, Rejected, Stopped
from weir.sim.world import tenant_name

KEPT_S = LinkConfig().silence_ms / 1e3
TELLING_S = 1.0
LOOK_S = 0.25
"""How often it is looked."""
HOUR_MS = 3_600_000


def now_s() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


async def until_s(at_s: float) -> None:
    """Wait for a moment of virtual time."""
    await asyncio.sleep(at_s - now_s())


async def one_runs_and_one_waits(gateway: Listening, deadline_s: float) -> tuple[int, int, int]:
    """A request with this deadline that runs, another one that waits, and one with a minute that runs; refs in that order."""
    short, patient = gateway.ask(LOST, deadline_left_ms=round(1e3 * deadline_s)), gateway.ask(LOST)
    waiting = gateway.ask(LOST, deadline_left_ms=round(1e3 * deadline_s))
    await a_moment()
    assert [len(gateway.about(ref, Granted)) for ref in (short, patient, waiting)] == [1, 1, 0]
    assert gateway.about(waiting, Admitted)
    return short, waiting, patient


async def leads_after(stand: Stand, away_s: float) -> float:
    """Nobody leads for so long, then another coordinator does; when it began."""
    stand.leading.cancel()
    await asyncio.sleep(away_s)
    await stand.take_over()
    return now_s()


@pytest.mark.parametrize("deadline_s", [1.5, 2.0, 4.0])
def test_what_nobody_tells_is_held_until_its_deadline_is_long_over(deadline_s: float) -> None:
    """Protects tenants and lanes: no hold outlives its deadline and the time of a report, and none with more time ends so."""

    async def script(stand: Stand) -> None:
        began_s = now_s()
        short, waiting, patient = await one_runs_and_one_waits(stand.gateway("one.1"), deadline_s)
        took_over_s = await leads_after(stand, 0.0)
        await until_s(began_s + deadline_s + KEPT_S - 0.01)
        assert stand.book.open_holds == 3 and stand.running == 2
        await asyncio.sleep(LOOK_S + 0.02)
        assert stand.book.open_holds == stand.running == 1
        assert stand.book.balance_of(Scope(tenant_name(LOST))).held_tokens == WORST_TOKENS
        await a_moment()
        for ref in (short, waiting):
            stand.check_ended(ref)
        assert isinstance(stand.end_of(waiting), ReleaseRecord)
        await until_s(took_over_s + LEASE_S - 0.01)
        assert stand.book.open_holds == stand.running == 1
        await asyncio.sleep(0.02 + 0.1)
        stand.check_ended(patient)

    play(script)


def test_no_hold_outlives_the_lease_for_its_deadline() -> None:
    """Protects tenants: a deadline so far away that the lease is over before ends nothing later."""

    async def script(stand: Stand) -> None:
        refs = await one_runs_and_one_waits(stand.gateway("one.1"), 20.0)
        await leads_after(stand, 0.0)
        await asyncio.sleep(LEASE_S - 0.01)
        assert stand.book.open_holds == 3
        await asyncio.sleep(0.02)
        assert stand.book.open_holds == stand.running == 0
        await a_moment()
        for ref in refs:
            stand.check_ended(ref)

    play(script)


def test_what_was_over_long_ago_is_held_for_the_second_of_recovering() -> None:
    """Protects newcomers after a long outage: what ended in it is given up with the second, and they get its lane at once."""

    async def script(stand: Stand) -> None:
        short, waiting, _ = await one_runs_and_one_waits(stand.gateway("one.1"), 2.0)
        took_over_s = await leads_after(stand, 30.0)
        new = stand.gateway("new.1")
        asked = [new.ask(OTHER) for _ in range(2)]
        await until_s(took_over_s + TELLING_S - 0.01)
        assert stand.book.open_holds == 3 and not new.about(asked[0], Granted)
        await asyncio.sleep(0.02 + 0.1)
        assert new.about(asked[0], Granted) and not new.about(asked[1], Granted)  # beside one with a minute
        for ref in (short, waiting):
            stand.check_ended(ref)
        await asyncio.sleep(LEASE_S)
        for ref in asked:
            new.end(ref)

    play(script)


@pytest.mark.parametrize("told_s", [0.9, 3.0], ids=["within the second", "later"])
def test_a_report_that_comes_in_time_is_the_end(told_s: float) -> None:
    """Protects what was served: a gateway that ended it at its deadline tells so for ten seconds, or has its second."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        short, waiting, patient = await one_runs_and_one_waits(one, 2.0)
        await leads_after(stand, 30.0 if told_s < TELLING_S else 5.0)
        await asyncio.sleep(told_s)
        again = stand.again(one)
        [granted] = one.about(short, Granted)
        again.tell(short, run_of(granted, is_stopped=True), finish=finish_of(short, reason=FinishReason.DEADLINE))
        again.tell(waiting, finish=finish_of(waiting, attempt=0, reason=FinishReason.DEADLINE, tokens=0))
        tell_running(one, again, patient)
        again.tell_all()
        assert all(again.about(ref, Reattached) for ref in (short, waiting, patient))
        again.end(patient)
        await a_moment()
        assert settled(stand, short).finish_reason is stand.end_of(waiting).finish_reason is FinishReason.DEADLINE
        assert settled(stand, patient).status == "completed"

    play(script)


def test_a_report_that_comes_too_late_changes_nothing() -> None:
    """Protects the end that is written: who tells later hears what was booked, and its engine has a lane until it stops."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        short, _, patient = await one_runs_and_one_waits(one, 2.0)
        await leads_after(stand, 30.0)
        await asyncio.sleep(TELLING_S + 0.1)
        again = stand.again(one)
        [granted] = one.about(short, Granted)
        again.tell(short, run_of(granted), finish=finish_of(short, reason=FinishReason.DEADLINE))
        tell_running(one, again, patient)
        again.tell_all()
        assert stand.running == 2 and again.about(patient, Reattached) and not again.about(short, Reattached)
        await a_moment()
        [booked] = again.about(short, EndBooked)
        assert booked.record.finish_reason is FinishReason.COORDINATOR_LOST and booked.record.cost_microusd == 0
        again.say(Stopped(short, 1))
        again.end(patient)
        stand.check_ended(short)

    play(script)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_wall_clock_that_was_set_forward_leaves_gateways_their_second(is_told: bool) -> None:
    """Protects what runs: by a clock that is ahead every deadline is over, and who tells within the second goes on."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        short, waiting, patient = await one_runs_and_one_waits(one, 30.0)
        stand.clock.step_wall(HOUR_MS)
        await leads_after(stand, 0.0)
        again = None
        await asyncio.sleep(TELLING_S - 0.01)
        assert stand.book.open_holds == 3
        if is_told:
            again = stand.again(one)
            for ref in (short, patient):
                tell_running(one, again, ref)
            again.tell(waiting)
            again.tell_all()
        await asyncio.sleep(0.02 + 0.1)
        assert stand.book.open_holds == (3 if is_told else 0)
        for ref in (short, patient, waiting):
            if again is None:
                stand.check_ended(ref)
            else:
                again.end(ref)
                await a_moment()
                assert stand.end_of(ref).status == "completed"

    play(script)


def test_a_wall_clock_that_was_set_back_ends_nothing_later_than_the_lease() -> None:
    """Protects tenants: by a clock that is behind no deadline is ever over, and the lease is the bound."""

    async def script(stand: Stand) -> None:
        refs = await one_runs_and_one_waits(stand.gateway("one.1"), 2.0)
        stand.clock.step_wall(-HOUR_MS)
        await leads_after(stand, 0.0)
        await asyncio.sleep(LEASE_S - 0.01)
        assert stand.book.open_holds == 3
        await asyncio.sleep(0.02)
        assert stand.book.open_holds == 0
        await a_moment()
        for ref in refs:
            stand.check_ended(ref)

    play(script)


def test_a_cancel_is_answered_as_its_deadline_is_long_over() -> None:
    """Protects who cancels: what nobody tells is terminal then, and its id is not in flight any more."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        short, waiting, _ = await one_runs_and_one_waits(one, 2.0)
        await leads_after(stand, 5.0)
        asking = stand.again(other)
        asking.tell_all()
        for query, ref in ((900, short), (901, waiting)):
            asking.say(CancelById(query, tenant_name(LOST), f"id-{ref}"))
        await a_moment()
        assert found(asking, 901) and not found(asking, 900)
        await asyncio.sleep(KEPT_S)
        [answer] = found(asking, 900)
        assert answer.record is not None and answer.record.finish_reason is FinishReason.COORDINATOR_LOST
        assert stand.end_of(waiting).finish_reason is FinishReason.CLIENT
        same = asking.ask(LOST, request_id=f"id-{short}", request_id_given=True, body_digest=b"%d" % short)
        assert [refused.code for refused in asking.about(same, Rejected)] == ["output_not_retained"]
        await asyncio.sleep(LEASE_S)

    play(script)


def test_what_was_cancelled_and_whose_gateway_came_is_over_already() -> None:
    """Protects the process: what ended while nobody told of it, in a session that is over, is not ended another time."""

    async def script(stand: Stand) -> None:
        one, silent, other = (stand.gateway(f"{name}.1") for name in ("one", "silent", "other"))
        running, patient = one.ask(LOST, deadline_left_ms=2_000), silent.ask(LOST)
        waiting = one.ask(LOST, deadline_left_ms=2_000)
        await a_moment()
        await leads_after(stand, 0.0)
        asking = stand.again(other)
        asking.say(CancelById(900, tenant_name(LOST), f"id-{waiting}"))
        await a_moment()
        stand.gateway("one.2", "one.1")
        await a_moment()
        stand.check_ended(running)
        await asyncio.sleep(LEASE_S)
        assert stand.end_of(waiting).finish_reason is FinishReason.CLIENT
        stand.check_ended(patient)

    play(script)
