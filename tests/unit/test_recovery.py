"""A coordinator that starts: what a crash left open is ended durably, and the book continues where the records stopped."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from tests.contract.stores import hold, settle

from weir import errors
from weir.coordinator.recovery import Recovered, recover
from weir.core.ledger.records import BucketTake, ExecutionId, HoldRecord, LedgerRecord, SettleRecord, StepRecord
from weir.core.metering import Price
from weir.core.tenancy import Limits, Scope, ServiceClass, scopes_of
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run
from weir.sim.world import REVISION, Spec, first_snapshot
from weir.storage.memory import MemoryLedger
from weir.units import Moment

SCOPES = scopes_of("tenant-0", "app", "000000000000", "assistant", ServiceClass.INTERACTIVE)
LIMITS = {Scope("tenant-0"): Limits(tokens_per_minute=600)}
GROUP_MS = 5


def _hold(seq: int, name: str, at_ms: int) -> HoldRecord:
    return msgspec.structs.replace(
        hold(seq, ExecutionId("tenant-0", name, 1), at_ms=at_ms, key="000000000000"),
        revision=REVISION.id,
        max_output_tokens=200,
        choices=1,
        price_version=1,
        held_microusd=140,
        takes=(BucketTake(None, None, None, "tokens_per_minute", 300),),
    )


async def _recovered(ledger: MemoryLedger, *, age_ms: int) -> tuple[Recovered, int]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock = StepClock(loop)
    records: list[LedgerRecord] = [
        _hold(1, "waited", clock.wall_ms() - age_ms),
        _hold(2, "ran", clock.wall_ms() - age_ms),
        StepRecord(3, ExecutionId("tenant-0", "ran", 1), 1, "replica", 64),
    ]
    await ledger.write((await ledger.open_epoch(0)).epoch, records)
    recovered = await recover(ledger, clock, first_snapshot(Spec(limits=LIMITS)), GROUP_MS)
    return recovered, recovered.book.standing(SCOPES, clock.monotonic_ns()).tokens.remaining or 0


def test_open_holds_end_by_rule_before_anything_is_served() -> None:
    """Protects tenants after a crash: never dispatched is released; dispatched is the platform's, uncertain; both durable."""
    ledger = MemoryLedger()
    recovered, _ = run(_recovered(ledger, age_ms=0), until_ms=1_000)
    assert recovered.resolved == 2 and recovered.book.open_holds == 0 and recovered.journal.backlog == 0
    released, settled = ledger.records[3:]
    assert released.id.request_id == "waited" and not isinstance(released, SettleRecord)
    assert isinstance(settled, SettleRecord) and settled.finish_reason == "coordinator_lost"
    assert (settled.input_tokens, settled.output_tokens, settled.cost_microusd) == (100, 64, 0)
    assert settled.platform_microusd == REVISION.price.cost(100, 0, 64)
    assert recovered.journal.next_seq() == 6


@pytest.mark.parametrize(("age_ms", "remaining"), [(0, 0), (30_000, 300), (60_000, 600), (600_000, 600), (-5_000, 0)])
def test_buckets_continue_from_recent_takes(age_ms: int, remaining: int) -> None:
    """Protects rates through a restart: what was taken is still refilling, and a wall clock set back makes it new, not old."""
    assert run(_recovered(MemoryLedger(), age_ms=age_ms), until_ms=1_000)[1] == remaining


@pytest.mark.parametrize("service_class", ServiceClass)
def test_what_a_class_took_held_and_spent_is_its_own_again(service_class: ServiceClass) -> None:
    """Protects limits of a class through a restart: its bucket, its budget and its open holds, and nobody else's."""
    scopes = {each: Scope("tenant-0", service_class=each) for each in ServiceClass}
    limits = dict.fromkeys(scopes.values(), Limits(tokens_per_minute=600, concurrency=9, spend_microusd_lifetime=10_000))

    async def script() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, ledger, snapshot = StepClock(loop), MemoryLedger(), first_snapshot(Spec(limits=limits))
        takes = (BucketTake(None, None, None, "tokens_per_minute", 200, service_class),)
        ended, kept = (
            msgspec.structs.replace(
                _hold(seq, name, clock.wall_ms()),
                service_class=service_class,
                takes=takes,
                pool=next(iter(snapshot.pools)),
                gateway_session="gateway.1",
            )
            for seq, name in ((1, "ended"), (2, "kept"))
        )
        end = settle(3, ended.id, at_ms=clock.wall_ms(), cost=40)
        await ledger.write((await ledger.open_epoch(0)).epoch, [ended, kept, end])
        recovered = await recover(ledger, clock, snapshot, GROUP_MS, keeps_open=True)
        assert [found.hold.id for found in recovered.kept] == [kept.id]
        now = Moment(clock.monotonic_ns(), clock.wall_ms())
        shown = {
            (row["scope"]["service_class"], row["limit_name"]): (row["held"], row["spent"])
            for row in recovered.book.accounts_of("tenant-0", now)
        }
        other = next(each for each in ServiceClass if each is not service_class)
        figures = {"tokens_per_minute": (0, 400), "concurrency": (1, 0), "spend_microusd_lifetime": (140, 40)}
        assert shown == {(service_class, name): figure for name, figure in figures.items()} | {
            (other, name): (0, 0) for name in figures
        }

    run(script(), until_ms=1_000)


def test_a_crash_in_the_second_attempt_books_the_first_one_too() -> None:
    """Protects the platform's books: an attempt that was lost and retried is paid for, also when its successor dies with us."""

    async def script() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, ledger, named = StepClock(loop), MemoryLedger(), ExecutionId("tenant-0", "ran", 1)
        steps = [
            StepRecord(2 + n, named, attempt, "replica", most) for n, (attempt, most) in enumerate([(1, 64), (1, 96), (2, 32)])
        ]
        await ledger.write((await ledger.open_epoch(0)).epoch, [_hold(1, "ran", clock.wall_ms()), *steps])
        await recover(ledger, clock, first_snapshot(Spec(limits=LIMITS)), GROUP_MS)
        settled = ledger.records[-1]
        assert isinstance(settled, SettleRecord)
        assert (settled.attempt, settled.output_tokens, settled.cost_microusd) == (2, 32, 0)
        assert settled.platform_microusd == REVISION.price.cost(100, 0, 32) + REVISION.price.cost(100, 0, 96)
        assert (await ledger.verify()).is_clean

    run(script(), until_ms=1_000)


def test_a_crash_books_batch_at_its_price_of_the_version_that_was_held() -> None:
    """Protects the platform's books: a batch request's lost work costs the pinned version's part, whatever the price is now."""

    async def script() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, ledger, named = StepClock(loop), MemoryLedger(), ExecutionId("tenant-0", "ran", 1)
        held = msgspec.structs.replace(_hold(1, "ran", clock.wall_ms()), service_class=ServiceClass.BATCH)
        steps = [StepRecord(2, named, 1, "replica", 64), StepRecord(3, named, 2, "replica", 32)]
        await ledger.write((await ledger.open_epoch(0)).epoch, [held, *steps])
        before, now = replace(REVISION.price, batch_percent=33), replace(REVISION.price, version=2, batch_percent=10)
        prices = {(REVISION.id, price.version): price for price in (before, now)}
        snapshot = replace(first_snapshot(Spec()), prices=prices, revisions={REVISION.id: replace(REVISION, price=now)})
        await recover(ledger, clock, snapshot, GROUP_MS)
        settled, paid = ledger.records[-1], Price(1, 66_000, 16_500, 198_000)
        assert isinstance(settled, SettleRecord) and settled.cost_microusd == 0
        assert settled.platform_microusd == paid.cost(100, 0, 32) + paid.cost(100, 0, 64)

    run(script(), until_ms=1_000)


def test_a_store_that_is_away_stops_the_start() -> None:
    """Protects money: without the store's word there is no coordinator."""
    ledger = MemoryLedger(fault=lambda operation: errors.LedgerUnavailable())
    with pytest.raises(errors.LedgerUnavailable):
        run(_recovered(ledger, age_ms=0), until_ms=1_000)


def test_a_limit_lowered_before_the_restart_does_not_block_for_hours() -> None:
    """Protects Retry-After: takes made under a higher limit count as under the present one, clamped to its capacity."""

    async def script() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, ledger = StepClock(loop), MemoryLedger()
        await ledger.write((await ledger.open_epoch(0)).epoch, [_hold(1, "big", clock.wall_ms())])
        limits = {Scope("tenant-0"): Limits(tokens_per_minute=60)}  # the hold took 300
        recovered = await recover(ledger, clock, first_snapshot(Spec(limits=limits)), GROUP_MS)
        standing = recovered.book.standing(SCOPES, clock.monotonic_ns()).tokens
        assert standing.remaining == 0
        assert standing.reset_ms is not None and standing.reset_ms <= 60_000

    run(script(), until_ms=1_000)
