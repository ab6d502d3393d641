"""Protects the retention: past it executions become sums, sums and balances stay as they were, on every store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from tests.contract.stores import KINDS, NEXT_DAY, T0_MS, AnyLedger, Cell, execution, hold, release, settle, step

from weir import errors
from weir.control.pruning import GROUP_ROWS, PAUSE_S, Pruning
from weir.core.ledger.records import LedgerRecord
from weir.ports import USAGE_GROUPS, LedgerReport, UsageQuery, UsageRow
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.storage.memory import MemoryLedger

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RETENTION_DAYS = 3


class ManualClock:
    """Stands until it is moved."""

    now_ms = T0_MS

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


@pytest.fixture(params=KINDS)
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyLedger]:
    async with Cell(request.param, tmp_path).ledger() as opened:
        yield opened


async def fill(ledger: AnyLedger, first_day: int) -> int:
    """First `first_day` executions on the first day, then one released and one open, and one on the next; the epoch."""
    epoch = (await ledger.open_epoch(0)).epoch
    named = [execution(f"r{number}") for number in range(first_day)]
    records = [(hold(3 * n + 1, one), step(3 * n + 2, one), settle(3 * n + 3, one)) for n, one in enumerate(named)]
    seq = 3 * first_day
    left = execution("left")
    rest: list[LedgerRecord] = [hold(seq + 1, left), release(seq + 2, left), hold(seq + 3, execution("open"))]
    late_ms = T0_MS + DAY_MS + 5_000
    last = execution("next day")
    rest += [hold(seq + 4, last, at_ms=late_ms, windows=NEXT_DAY), step(seq + 5, last), settle(seq + 6, last, at_ms=late_ms)]
    await ledger.write(epoch, [*(record for group in records for record in group), *rest])
    return epoch


async def seen(ledger: AnyLedger) -> tuple[list[UsageRow], list[UsageRow], object]:
    """Everything that must not change: usage by every column, of the first day by dates, and the balances."""
    whole = await ledger.usage(UsageQuery(group_by=USAGE_GROUPS))
    by_dates = await ledger.usage(UsageQuery(tenant="acme", from_ms=T0_MS, to_ms=T0_MS + DAY_MS))
    return whole, by_dates, (await ledger.open_epoch(T0_MS)).balances


def shape(report: LedgerReport) -> tuple[int, int, int]:
    assert report.is_clean, report.problems
    return report.settlements, report.rolled_up, report.open_holds


async def test_past_the_retention_sums_remain(ledger: AnyLedger) -> None:
    """Protects invoices: whole UTC days are rolled up, group after group, and no sum or balance moves; what is open stays."""
    many = 2 * GROUP_ROWS + 1
    await fill(ledger, many)
    before = await seen(ledger)
    epoch = (await ledger.open_epoch(T0_MS)).epoch
    clock, counted = ManualClock(), [0]
    sweeper = Pruning(ledger, clock, epoch, RETENTION_DAYS, counted.append)
    for days, rolled_up in ((0, 0), (RETENTION_DAYS, 0), (RETENTION_DAYS + 1, many + 1), (RETENTION_DAYS + 1, 0)):
        clock.now_ms = T0_MS + days * DAY_MS + DAY_MS // 2
        assert await sweeper.sweep() == rolled_up, days
    assert sum(counted) == many + 1 and max(counted) == GROUP_ROWS
    assert shape(await ledger.verify()) == (1, many + 1, 1)
    assert await seen(ledger) == before
    assert await ledger.find_execution("acme", "r0") is None
    assert await ledger.find_execution("acme", "open") is not None
    clock.now_ms += 900 * DAY_MS
    sweeper = Pruning(ledger, clock, (await ledger.open_epoch(T0_MS)).epoch, RETENTION_DAYS, counted.append)
    assert await sweeper.sweep() == 1
    assert shape(await ledger.verify()) == (0, many + 2, 1)
    assert (await seen(ledger))[:2] == before[:2]


async def test_ends_that_a_fast_clock_stamped_keep_nothing_else(ledger: AnyLedger) -> None:
    """Protects the retention: what ended at a later date by mistake waits for it; older ends go, in the order of their time."""
    epoch = (await ledger.open_epoch(0)).epoch
    ahead_ms = T0_MS + 3_650 * DAY_MS
    times = [ahead_ms, ahead_ms, T0_MS + 3, T0_MS + 1, T0_MS + 2, T0_MS + 2]
    named = [execution(f"r{number}") for number in range(len(times))]
    records = [
        (hold(3 * n + 1, one), step(3 * n + 2, one), settle(3 * n + 3, one, at_ms=times[n])) for n, one in enumerate(named)
    ]
    await ledger.write(epoch, [record for group in records for record in group])
    left: list[list[int]] = []
    for expected in (2, 2, 0):
        assert await ledger.prune(epoch, T0_MS + DAY_MS, 2) == expected
        found = [await ledger.find_execution("acme", one.request_id) for one in named]
        left.append([number for number, kept in enumerate(found) if kept is not None])
    assert left == [[0, 1, 2, 5], [0, 1], [0, 1]]
    assert shape(await ledger.verify()) == (2, 4, 0)
    assert [row.requests for row in await ledger.usage(UsageQuery())] == [6]


def virtual_clock(wall_start_ms: int) -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return VirtualClock(loop, wall_start_ms)


def test_a_group_is_bounded_and_others_write_in_between() -> None:
    """Protects requests: between two groups the writer is free, however much there is to roll up."""

    async def world() -> list[str]:
        ledger, order = MemoryLedger(), list[str]()
        epoch = await fill(ledger, 3 * GROUP_ROWS)
        clock = virtual_clock(T0_MS + 30 * DAY_MS)
        sweeper = Pruning(ledger, clock, epoch, RETENTION_DAYS, lambda number: order.append(f"rolled up {number}"))

        async def write() -> None:
            await asyncio.sleep(1.5 * PAUSE_S)
            await ledger.write(epoch, [hold(10_000, execution("meanwhile"))])
            order.append("written")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sweeper.sweep())
            tasks.create_task(write())
        return order

    whole = f"rolled up {GROUP_ROWS}"
    assert run(world(), until_ms=10_000) == [whole, whole, "written", whole, "rolled up 2"]


def test_every_hour_and_a_store_that_is_away_is_asked_again() -> None:
    """Protects the cell: what cannot be pruned now waits an hour, and says so; what gets too old goes within one."""

    async def world() -> list[tuple[int, int]]:
        ledger, seen = MemoryLedger(), list[tuple[int, int]]()
        epoch = await fill(ledger, 1)
        faults = iter([errors.LedgerUnavailable(), errors.LedgerUnavailable()])
        ledger.fault = lambda operation: next(faults, None)
        clock = virtual_clock(T0_MS + RETENTION_DAYS * DAY_MS)
        started_ms = clock.wall_ms()

        def rolled_up(number: int) -> None:
            if number:
                seen.append((round((clock.wall_ms() - started_ms) / HOUR_MS), number))

        running = asyncio.get_running_loop().create_task(Pruning(ledger, clock, epoch, RETENTION_DAYS, rolled_up).run())
        await asyncio.sleep(3 * 24 * 3_600)
        running.cancel()
        await asyncio.wait([running])
        return seen

    with structlog.testing.capture_logs() as logs:
        assert run(world(), until_ms=4 * DAY_MS) == [(24, 2), (48, 1)]
    assert [entry["event"] for entry in logs] == ["pruning_postponed"] * 2


async def test_a_replaced_writer_prunes_nothing_and_ends() -> None:
    """Protects the ledger from two writers: a newer coordinator ends this one."""
    ledger = MemoryLedger()
    epoch = await fill(ledger, 1)
    await ledger.open_epoch(0)
    with pytest.raises(errors.StaleEpoch):
        await Pruning(ledger, ManualClock(), epoch, RETENTION_DAYS, lambda _: None).run()
    assert shape(await ledger.verify()) == (3, 0, 1)
