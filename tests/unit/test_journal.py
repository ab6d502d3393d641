"""The journal keeps order and durability: groups, repeats, withdrawals, lateness, and how it closes."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

from weir import errors
from weir.coordinator.journal import Journal
from weir.core.ledger.records import ExecutionId, LedgerRecord, StepRecord
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.units import ns_from_ms


class _Store:
    """Keeps what is written; fails as often as told."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.fails = 0
        self.error: Callable[[], errors.WeirError] = errors.LedgerUnavailable
        self.write_s = 0.01

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        assert epoch == 3
        await asyncio.sleep(self.write_s)
        if self.fails:
            self.fails -= 1
            raise self.error()
        self.groups.append([record.seq for record in records])


class _Stand:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.store = _Store()
        self.journal = Journal(self.store, VirtualClock(loop), 3, 1, group_ms=5)  # type: ignore[arg-type]
        self.durable: list[int] = []

    def append(self) -> int:
        seq = self.journal.next_seq()
        self.journal.append(_step(seq), lambda: self.durable.append(seq))
        return seq


def _step(seq: int, delivered_max: int = 1) -> StepRecord:
    return StepRecord(seq, ExecutionId("acme", "r", 1), 1, "replica", delivered_max)


def _play(script: Callable[[_Stand], Coroutine[Any, Any, None]]) -> _Stand:
    async def live() -> _Stand:
        stand = _Stand()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stand.journal.run())
            await script(stand)
            stand.journal.close()
        return stand

    return run(live(), until_ms=100_000)


def test_records_that_come_during_a_write_form_the_next_group() -> None:
    """Protects throughput and order: one write for all that waited, callbacks in order."""

    async def script(stand: _Stand) -> None:
        stand.append()
        await asyncio.sleep(0.005)
        stand.append()
        stand.append()
        assert stand.journal.backlog == 3

    stand = _play(script)
    assert stand.store.groups == [[1], [2, 3]] and stand.durable == [1, 2, 3]
    assert stand.journal.backlog == 0 and stand.journal.late_ns() == 0


def test_records_gather_for_an_interval_unless_there_was_a_pause() -> None:
    """Protects CPU on a quick disk, and the first record after a pause from waiting for nothing."""

    async def script(stand: _Stand) -> None:
        stand.store.write_s = 0
        stand.append()
        await asyncio.sleep(0.001)
        assert stand.durable == [1]
        for _ in range(3):
            stand.append()
            await asyncio.sleep(0.001)
        assert stand.durable == [1]
        await asyncio.sleep(0.0011)
        assert stand.durable == [1, 2, 3, 4]
        await asyncio.sleep(0.1)
        stand.append()
        await asyncio.sleep(0.001)
        assert stand.durable == [1, 2, 3, 4, 5]

    assert _play(script).store.groups == [[1], [2, 3, 4], [5]]


def test_a_group_is_bounded() -> None:
    """Protects the store from one enormous transaction."""

    async def script(stand: _Stand) -> None:
        for _ in range(2_001):
            stand.append()

    assert [len(group) for group in _play(script).store.groups] == [2_000, 1]


def test_a_failed_write_is_repeated_until_it_lands() -> None:
    """Protects settlements through an outage: once, in order, and lateness is told meanwhile."""

    async def script(stand: _Stand) -> None:
        stand.store.fails = 5
        stand.append()
        await asyncio.sleep(1)
        assert stand.journal.late_ns() == ns_from_ms(1_000) and not stand.durable
        stand.append()
        await asyncio.sleep(3)

    stand = _play(script)
    assert stand.store.groups == [[1], [2]] and stand.durable == [1, 2]


def test_only_what_no_write_has_taken_can_be_withdrawn() -> None:
    """Protects the store's word: a record under way is the store's to decide."""

    async def script(stand: _Stand) -> None:
        first = stand.append()
        await asyncio.sleep(0.005)
        second, told = stand.append(), []
        assert not stand.journal.withdraw(first, _step(first, 9))
        assert not stand.journal.withdraw(99, _step(99, 9))
        assert stand.journal.withdraw(second, _step(second, 9), lambda: told.append("instead"))
        await asyncio.sleep(0.1)
        assert told == ["instead"]

    assert _play(script).durable == [1]


def test_a_group_that_surely_was_not_written_can_still_be_withdrawn_from() -> None:
    """Protects dropped answers: only a write whose outcome is unknown binds the journal to what it said."""

    async def script(stand: _Stand) -> None:
        stand.store.fails, stand.store.error = 4, partial(errors.LedgerUnavailable, not_written=True)
        first, told = stand.append(), []
        await asyncio.sleep(0.03)  # refused once, waiting for its next try
        assert stand.journal.withdraw(first, _step(first, 9), lambda: told.append("instead"))
        await asyncio.sleep(2)
        assert told == ["instead"]

    stand = _play(script)
    assert stand.store.groups == [[1]] and not stand.durable


def test_an_unknown_outcome_binds_the_group_through_later_refusals() -> None:
    """Protects the store's word: once a write may have landed, its records are repeated as they are."""

    async def script(stand: _Stand) -> None:
        stand.store.fails = 1
        first = stand.append()
        await asyncio.sleep(0.03)
        stand.store.fails, stand.store.error = 3, partial(errors.LedgerUnavailable, not_written=True)
        await asyncio.sleep(0.2)
        assert not stand.journal.withdraw(first, _step(first, 9))
        await asyncio.sleep(2)

    assert _play(script).durable == [1]


def test_closing_gives_up_on_a_store_that_stays_away() -> None:
    """Protects shutdown: after a few more tries the rest is left to recovery."""

    async def script(stand: _Stand) -> None:
        stand.store.fails = 10_000
        stand.append()
        await asyncio.sleep(5)

    stand = _play(script)
    assert not stand.durable and stand.journal.backlog == 1


def test_a_newer_epoch_ends_the_journal() -> None:
    """Protects the ledger from a paused coordinator that comes back: it is not repeated."""

    async def script(stand: _Stand) -> None:
        stand.store.fails, stand.store.error = 1, errors.StaleEpoch
        stand.append()

    with pytest.raises(ExceptionGroup) as caught:
        _play(script)
    assert caught.group_contains(errors.StaleEpoch)
