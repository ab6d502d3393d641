"""Another coordinator leads: limits of what is held since before count exactly, and what is to stop is stopped, told or not.

The gateways only listen; what they tell again is the test's choice.
"""

import asyncio
from dataclasses import replace

import pytest
from tests.simulation.session_stand import INPUT_TOKENS, OUTPUT_TOKENS, Stand, finish_of, play
from tests.simulation.takeover_scenes import LEASE_S, WORST_TOKENS, found, settled, some_run_and_some_wait, tell_running
from tests.simulation.test_lost_gateways import LOST, a_moment, fill

from weir.core.endings import FinishReason
from weir.core.ledger.records import BucketTake, SettleRecord
from weir.core.tenancy import Limits, Scope, ServiceClass, scopes_of
from weir.messages import (
    Admitted,
    CancelById,
    EndBooked,
    Granted,
    Reattached,
    Rejected,
    Stopped,
    StopRequest,
)
from weir.sim.world import BATCH_APPLICATION, BATCH_CALLER, REVISION, key_of, tenant_name

# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(concurrency=2), "concurrency_limited"),
        (Limits(tokens_lifetime=2 * WORST_TOKENS + WORST_TOKENS - 1), "budget_exhausted"),
        (Limits(tokens_per_day=2 * WORST_TOKENS + WORST_TOKENS - 1), "budget_exhausted"),
        (Limits(tokens_per_minute=2 * WORST_TOKENS + 150), "tokens_limited"),
    ],
)
def test_what_is_held_since_before_counts_exactly(limits: Limits, code: str) -> None:
    """Protects limits through a takeover: no more is let through while old work is held, and what it gives back is there."""

    async def script(stand: Stand) -> None:
        stand.publish(replace(stand.snapshot, limits={Scope(tenant_name(LOST)): limits}))
        one = stand.gateway("one.1")
        first, second = await fill(one, LOST)
        await stand.take_over()
        again = stand.again(one)
        for ref in (first, second):
            tell_running(one, again, ref)
        again.tell_all()
        refused = again.ask(LOST)
        assert [message.code for message in again.about(refused, Rejected)] == [code]
        again.end(first)
        admitted = again.ask(LOST)
        assert again.about(admitted, Granted)
        again.end(second)
        again.end(admitted)

    play(script)


def test_what_nobody_tells_counts_until_the_lease_is_over() -> None:
    """Protects limits: concurrency and budget of what is not told stay taken for the lease, and are there at its end."""

    async def script(stand: Stand) -> None:
        limits = Limits(concurrency=2, tokens_lifetime=2 * WORST_TOKENS)
        stand.publish(replace(stand.snapshot, limits={Scope(tenant_name(LOST)): limits}))
        await fill(stand.gateway("one.1"), LOST)
        await stand.take_over()
        other = stand.gateway("other.1")
        await asyncio.sleep(LEASE_S - 0.1)
        assert other.about(other.ask(LOST), Rejected)
        await asyncio.sleep(0.2)
        ref = other.ask(LOST)
        assert other.about(ref, Granted)
        other.end(ref)

    play(script)


def test_a_price_that_changed_meanwhile_is_not_that_of_what_was_held() -> None:
    """Protects the tenant: a hold keeps the version of the price with which it was taken, also at another coordinator."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        ref = one.ask(LOST)
        await a_moment()
        price = replace(REVISION.price, version=2, input_microusd=9 * REVISION.price.input_microusd)
        revisions = {REVISION.id: replace(REVISION, price=price)}
        stand.publish(replace(stand.snapshot, revisions=revisions, prices={**stand.snapshot.prices, (REVISION.id, 2): price}))
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, ref)
        again.tell_all()
        again.end(ref)
        await a_moment()
        end = stand.end_of(ref)
        assert isinstance(end, SettleRecord) and end.cost_microusd == REVISION.price.cost(INPUT_TOKENS, 0, 8)

    play(script)


@pytest.mark.parametrize("retried", [False, True])
def test_a_batch_request_settles_at_another_coordinator_by_the_part_that_it_was_held_by(retried: bool) -> None:
    """Protects discounts: the pinned version's part is paid, and counted of a lost attempt, whatever batch pays by now."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        batch = {"application": BATCH_APPLICATION, "key": key_of(LOST, BATCH_CALLER), "service_class": ServiceClass.BATCH}
        ref = one.ask(LOST, **batch, workload_class="batch")
        await a_moment()
        price = replace(REVISION.price, version=2, batch_percent=1)
        revisions = {REVISION.id: replace(REVISION, price=price)}
        stand.publish(replace(stand.snapshot, revisions=revisions, prices={**stand.snapshot.prices, (REVISION.id, 2): price}))
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, ref)
        again.tell_all()
        await a_moment()
        if retried:
            again.say(finish_of(ref, 1, FinishReason.REPLICA_LOST, tokens=3))
            again.say(Stopped(ref, 1))
            await asyncio.sleep(5)
        again.end(ref, 2 if retried else 1)
        await a_moment()
        end, half = settled(stand, ref), REVISION.price.of(ServiceClass.BATCH)
        assert half.output_microusd * 2 == REVISION.price.output_microusd
        assert (end.status, end.cost_microusd) == ("completed", half.cost(INPUT_TOKENS, 0, 8))
        assert end.platform_microusd == (half.cost(INPUT_TOKENS, 0, 3) if retried else 0)

    play(script)


def test_a_day_that_ended_meanwhile_keeps_what_was_spent_since() -> None:
    """Protects budgets at midnight: what was spent today counts, though a request of yesterday is still held."""

    async def script(stand: Stand) -> None:
        limits = Limits(tokens_per_day=2 * WORST_TOKENS)
        stand.publish(replace(stand.snapshot, limits={Scope(tenant_name(LOST)): limits}))
        one = stand.gateway("one.1")
        yesterday = one.ask(LOST)
        await a_moment()
        stand.clock.step_wall(86_400_000)
        today = one.ask(LOST)
        one.say(finish_of(today, tokens=OUTPUT_TOKENS))
        one.say(Stopped(today, 1))
        await a_moment()
        await stand.take_over()
        again = stand.again(one)
        tell_running(one, again, yesterday)
        again.tell_all()
        first, second = again.ask(LOST), again.ask(LOST)
        assert again.about(first, Granted)
        assert [message.code for message in again.about(second, Rejected)] == ["budget_exhausted"]
        again.end(yesterday)
        again.end(first)

    play(script)


def test_buckets_get_back_what_was_not_used_at_a_settlement_after_a_takeover() -> None:
    """Protects the tenant's minute: what was taken before is missing, what was not used returns, and the record says so."""

    async def script(stand: Stand) -> None:
        stand.publish(replace(stand.snapshot, limits={Scope(tenant_name(LOST)): Limits(tokens_per_minute=6_000)}))
        one = stand.gateway("one.1")
        first, second = await fill(one, LOST)
        assert one.about(second, Admitted)[0].standing.tokens.remaining == 6_000 - 2 * WORST_TOKENS
        await stand.take_over()
        again = stand.again(one)
        for ref in (first, second):
            tell_running(one, again, ref)
        [reattached] = again.about(second, Reattached)
        elapsed_ms = 102  # so much of it has refilled, a token each 10 ms
        assert reattached.standing.tokens.remaining == 6_000 - 2 * WORST_TOKENS + elapsed_ms // 10
        again.tell_all()
        again.end(first)
        again.end(second)
        standing = stand.book.standing(
            scopes_of(tenant_name(LOST), "app", key_of(LOST), "assistant", ServiceClass.INTERACTIVE), stand.clock.monotonic_ns()
        )
        assert standing.tokens.remaining == 6_000 - 2 * (INPUT_TOKENS + 8) + elapsed_ms // 10
        await a_moment()
        for ref in (first, second):
            assert stand.end_of(ref).returns == (BucketTake(None, None, None, "tokens_per_minute", OUTPUT_TOKENS - 8),)

    play(script)


# ── what is to stop ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_told", [True, False])
def test_a_cancel_of_what_nobody_has_told_yet(is_told: bool) -> None:
    """Protects who cancels: what waits ends at once, what runs as it is told, or with the lease; each cancel is answered."""

    async def script(stand: Stand) -> None:
        one, other = stand.gateway("one.1"), stand.gateway("other.1")
        (running, _), (waiting, _) = await some_run_and_some_wait(one)
        await stand.take_over()
        asking = stand.again(other)
        asking.tell_all()
        asking.say(CancelById(900, tenant_name(LOST), f"id-{running}"))
        asking.say(CancelById(901, tenant_name(LOST), f"id-{waiting}"))
        await a_moment()
        [answer] = found(asking, 901)
        assert answer.record is not None and answer.record.finish_reason is FinishReason.CLIENT
        assert not found(asking, 900)
        reason = FinishReason.COORDINATOR_LOST
        if is_told:
            again = stand.again(one)
            tell_running(one, again, running)
            again.tell(waiting)
            again.tell_all()
            assert [message.reason for message in again.about(running, StopRequest)] == [FinishReason.CLIENT]
            again.say(finish_of(running, reason=FinishReason.CLIENT))
            again.say(Stopped(running, 1, 1.0))
            await a_moment()
            [booked] = again.about(waiting, EndBooked)
            assert booked.record.finish_reason is FinishReason.CLIENT
            reason = FinishReason.CLIENT
        else:
            await asyncio.sleep(LEASE_S)
        [answer] = found(asking, 900)
        assert answer.record is not None and answer.record.finish_reason is reason
        assert stand.end_of(running).finish_reason is reason

    play(script)


def test_a_revocation_of_what_nobody_has_told_yet() -> None:
    """Protects a revocation: what waits ends at once, what runs is stopped as soon as its gateway is known."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        (running, other), (waiting, left) = await some_run_and_some_wait(one)
        await stand.take_over()
        keys = {digest: replace(key, revoked=key.id == key_of(LOST)) for digest, key in stand.snapshot.keys.items()}
        stand.publish(replace(stand.snapshot, keys=keys))
        await a_moment()
        for ref in (waiting, left):
            assert stand.end_of(ref).finish_reason is FinishReason.REVOKED
        again = stand.again(one)
        for ref in (running, other):
            tell_running(one, again, ref)
            assert [message.reason for message in again.about(ref, StopRequest)] == [FinishReason.REVOKED]
        again.tell_all()
        for ref in (running, other):
            again.say(finish_of(ref, reason=FinishReason.REVOKED))
            again.say(Stopped(ref, 1, 1.0))
        await a_moment()
        assert stand.end_of(running).finish_reason is FinishReason.REVOKED

    play(script)


def test_a_drain_while_something_is_not_told_yet() -> None:
    """Protects a stop in order: within the grace old work may go on, newcomers are refused, then what runs is asked to stop."""

    async def script(stand: Stand) -> None:
        one = stand.gateway("one.1")
        running, untold = await fill(one, LOST)
        await stand.take_over()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stand.coordinator.drain(2_000))
            await asyncio.sleep(0)
            again = stand.again(one)
            tell_running(one, again, running)
            refused = again.ask(LOST)
            await asyncio.sleep(1.1)
            assert [message.code for message in again.about(refused, Rejected)] == ["draining"]
            assert not again.about(running, StopRequest)
            await asyncio.sleep(1)
            assert again.about(running, StopRequest)
            again.say(finish_of(running, reason=FinishReason.SHUTDOWN))
            again.say(Stopped(running, 1, 1.0))
            tell_running(one, again, untold)
            assert [message.reason for message in again.about(untold, StopRequest)] == [FinishReason.SHUTDOWN]
            again.tell_all()
            again.say(finish_of(untold, reason=FinishReason.SHUTDOWN))
            again.say(Stopped(untold, 1, 1.0))
        assert stand.executions.live_count == 0

    play(script)
