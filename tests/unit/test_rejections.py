"""Rejection counters: bounded whatever the store does, and nothing counted is lost by a flush that fails or is cut short."""

import asyncio

import pytest

from weir import errors
from weir.coordinator.rejections import RejectionCounter
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.storage.memory import MemoryLedger


def _counter(ledger: MemoryLedger) -> RejectionCounter:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return RejectionCounter(ledger, VirtualClock(loop))


def test_a_failed_flush_keeps_its_counts() -> None:
    """Protects the reports: what the store did not take is added with the next flush."""

    async def script() -> None:
        ledger = MemoryLedger()
        counter = _counter(ledger)
        counter.count("acme", "queue_full")
        ledger.fault = lambda operation: errors.LedgerUnavailable()
        await counter.flush()
        ledger.fault = lambda operation: None
        counter.count("acme", "queue_full")
        await counter.flush()
        assert [number for *_, number in await ledger.rejections("acme")] == [2]

    run(script(), until_ms=1_000)


def test_a_cancelled_flush_keeps_its_counts() -> None:
    """Protects the last counts at shutdown: a flush that is cut short goes on, and counts once."""

    async def script() -> None:
        ledger = MemoryLedger(delay=lambda operation: asyncio.sleep(5))
        counter = _counter(ledger)
        counter.count("acme", "queue_full")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await counter.flush()
        await counter.flush()
        assert [number for *_, number in await ledger.rejections("acme")] == [1]

    run(script(), until_ms=20_000)


def test_memory_stays_bounded_while_the_store_is_away() -> None:
    """Protects memory: many tenants and a store that is away for long leave a bounded number of keys, and the right sum."""

    async def script() -> None:
        ledger = MemoryLedger()
        counter = _counter(ledger)
        ledger.fault = lambda operation: errors.LedgerUnavailable()
        for turn in range(4):
            for number in range(6_000):
                counter.count(f"tenant-{turn}-{number}", "queue_full")
            await counter.flush()
        ledger.fault = lambda operation: None
        await counter.flush()
        found = await ledger.rejections()
        assert len(found) <= 10_001
        assert sum(number for *_, number in found) == 24_000

    run(script(), until_ms=1_000)
