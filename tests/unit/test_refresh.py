"""Protects what is stored and was not published: it comes into force by itself, and never an older version over a newer one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import structlog
from tests.unit.test_commands import ManualClock, SeededEntropy

from weir import errors
from weir.control.commands import Commands
from weir.control.refresh import Refresh
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope
from weir.ports import Acknowledgement, AuditEntry, Catalog, CatalogChange
from weir.storage.memory import MemoryCatalog

PERIOD_S = 0.01
AUDIT = AuditEntry(0, "rival", "nothing", "nothing", "{}")


class FaultyCatalog(MemoryCatalog):
    """Loses the answers of the next changes, fails the next loads, or is away."""

    lost_answers = 0
    failing_loads = 0
    away = 0

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        version = await super().apply(expected_version, change)
        if self.lost_answers:
            self.lost_answers -= 1
            raise errors.LedgerUnavailable()
        return version

    async def load(self) -> Catalog:
        await asyncio.sleep(0)
        catalog = await super().load()
        if self.failing_loads and catalog.version:
            self.failing_loads -= 1
            raise errors.LedgerUnavailable()
        return catalog

    async def version(self) -> int:
        await asyncio.sleep(0)
        if self.away:
            self.away -= 1
            raise errors.LedgerUnavailable()
        return await super().version()


class Desk:
    """Commands on a faulty catalog, everything that they published, and a way to wait for it."""

    def __init__(self) -> None:
        self.store = FaultyCatalog()
        self.published: list[Snapshot] = []
        self.renewals = 0
        self._arrived = asyncio.Condition()
        self.commands = Commands(self.store, self._publish, ManualClock(), SeededEntropy())

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        async with self._arrived:
            self.published.append(snapshot)
            self._arrived.notify_all()
        return Acknowledgement(snapshot.version)

    def renew(self) -> None:
        self.renewals += 1

    async def wait_published(self, version: int) -> Snapshot:
        """The snapshot of this version, once it is in force."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: bool(self.published) and self.published[-1].version >= version)
        assert self.published[-1].version == version
        return self.published[-1]

    @asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        """The refresh runs meanwhile."""
        running = asyncio.get_running_loop().create_task(Refresh(self.commands, self.renew, PERIOD_S).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])
        assert running.cancelled()


async def test_a_change_whose_answer_was_lost_comes_into_force() -> None:
    """Protects a revocation: the store made it and could not say so; the key stops working without another change."""
    desk = Desk()
    await desk.commands.create_tenant("ann", "acme")
    await desk.commands.create_application("ann", "acme", "assistant")
    (key, secret), _ = await desk.commands.create_key("ann", "acme", "assistant")
    desk.store.lost_answers = 1
    with pytest.raises(errors.LedgerUnavailable):
        await desk.commands.revoke_key("ann", "acme", "assistant", key.id)
    assert desk.published[-1].authenticate(secret).key == key.id
    async with desk.refreshing():
        in_force = await desk.wait_published(4)
    with pytest.raises(errors.Revoked):
        in_force.authenticate(secret)
    assert desk.renewals


async def test_a_change_that_could_not_be_read_back_comes_into_force() -> None:
    """Protects a change whose answer was lost, and what is stored unreadable: it is asked again, and said to be away once."""
    desk = Desk()
    desk.store.lost_answers, desk.store.failing_loads, desk.store.away = 1, 3, 2
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(errors.LedgerUnavailable):
            await desk.commands.create_tenant("ann", "acme")
        async with desk.refreshing():
            assert "acme" in (await desk.wait_published(1)).tenants
    assert [entry["event"] for entry in logs] == ["refresh_postponed", "catalog_refreshed"]


async def test_a_gateway_that_is_behind_delays_its_own_change_only() -> None:
    """Protects administrators: who waits for a part that is behind keeps no other change, and no refresh, from being made."""
    desk = Desk()
    may_go = asyncio.Event()

    async def confirm(acknowledged: Acknowledgement) -> Acknowledgement:
        await may_go.wait()
        return replace(acknowledged, pending=("behind",))

    desk.commands.confirm = confirm
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        made = [group.create_task(desk.commands.create_tenant("ann", name)) for name in ("acme", "globex")]
        assert set((await desk.wait_published(2)).tenants) == {"acme", "globex"}
        assert not await desk.commands.refresh()
        may_go.set()
    assert [task.result()[1].pending for task in made] == [("behind",)] * 2


async def test_another_process_change_comes_into_force_once() -> None:
    """Protects the parts of a cell from being told again and again what they have."""
    desk = Desk()
    await desk.store.apply(0, CatalogChange(AUDIT, limits=[(Scope("acme"), Limits(concurrency=1))]))
    assert await desk.commands.refresh()
    assert not await desk.commands.refresh()
    assert [(snapshot.version, dict(snapshot.limits)) for snapshot in desk.published] == [
        (1, {Scope("acme"): Limits(concurrency=1)})
    ]


async def test_commands_and_refreshes_at_once_publish_rising_versions() -> None:
    """Protects what is in force from an older version, whoever publishes."""
    desk = Desk()
    async with desk.refreshing(), asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(desk.commands.create_tenant("ann", f"tenant-{number}"))
            group.create_task(desk.commands.refresh())
    assert [snapshot.version for snapshot in desk.published] == list(range(1, 21))
