"""A database that an earlier schema wrote, with money in it, opened by this version: nothing is lost, and the books agree."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection
from tests.contract.stores import T0_MS
from tests.postgres_server import shared_server

from weir.core.metering import Price
from weir.core.registry.model import Alias, Canary, Pool, RevisionPrice, RevisionState
from weir.core.tenancy import Limits, Retention, Scope, ServiceClass, Tenant
from weir.core.windows import FormerZone
from weir.ports import AuditEntry, CatalogChange, ControlStore, LedgerStore, UsageQuery
from weir.storage import database
from weir.storage.database import open_sqlite
from weir.storage.postgres_catalog import create_postgres_engine
from weir.storage.postgres_database import open_postgres
from weir.storage.sqlite_catalog import create_sqlite_engine
from weir.storage.sqlite_ledger import connect

Write: TypeAlias = Callable[[Connection], None]

MIGRATIONS = Path(database.__file__).parent / "migrations"
DIMENSIONS = {
    "tenant": "acme",
    "application": "app",
    "key": "key",
    "alias": "assistant",
    "revision": "rev-1",
    "pool": "pool-1",
    "service_class": "interactive",
    "workload_class": "short",
    "surface": "native",
    "stream": True,
    "price_version": 3,
    "window_names": "lifetime",
    "execution": 1,
    "epoch": 1,
}
HOLD = {
    **DIMENSIONS,
    "at_ms": T0_MS,
    "body_digest": b"digest",
    "input_tokens": 100,
    "input_basis": "exact",
    "max_output_tokens": 200,
    "choices": 1,
    "held_microusd": 140,
    "window_takes": b"[]",
    "deadline_at_ms": T0_MS + 60_000,
    "gateway_session": "gateway",
}
ENDED = {
    **DIMENSIONS,
    "at_ms": T0_MS + 1_000,
    "day": "2026-01-01",
    "attempt": 1,
    "replica": "replica",
    "status": "completed",
    "finish_reason": "stop",
    "basis": "engine",
    "input_tokens": 100,
    "cached_input_tokens": 0,
    "output_tokens": 50,
    "delivered_tokens": 50,
    "tenant_input_tokens": 100,
    "tenant_cached_input_tokens": 0,
    "tenant_output_tokens": 50,
    "cost_microusd": 50,
    "platform_microusd": 0,
}
STEP = {"attempt": 1, "replica": "replica", "delivered_max": 64}
ROWS: list[tuple[str, Mapping[str, Any]]] = [
    ("tenant", {"name": "acme", "time_zone": "Asia/Tokyo", "disabled": False, "revoked": False, "external_allowed": False}),
    (
        "revision",
        {
            "id": "rev-1",
            "engine": "simulated",
            "artifact": "a",
            "context_tokens": 2_048,
            "max_output_tokens": 1_024,
            "typical_output_tokens": 128,
            "price_version": 3,
            "price_input_microusd": 200_000,
            "price_cached_input_microusd": 50_000,
            "price_output_microusd": 600_000,
            "chat": True,
            "external": False,
            "revoked": False,
        },
    ),
    ("ledger_hold", {**HOLD, "seq": 1, "request_id": "ended", "generation_id": "gen-1"}),
    ("ledger_step", {**STEP, "hold_seq": 1, "seq": 2}),
    ("ledger_settlement", {**ENDED, "seq": 3, "hold_seq": 1, "request_id": "ended"}),
    ("ledger_hold", {**HOLD, "seq": 4, "request_id": "open", "generation_id": "gen-2"}),
    ("ledger_open", {"hold_seq": 4}),
    ("ledger_step", {**STEP, "hold_seq": 4, "seq": 5}),
    (
        "ledger_balance",
        {
            "tenant": "acme",
            "application": "app",
            "key": "key",
            "alias": "assistant",
            "budget_window": "lifetime",
            "spent_microusd": 50,
            "spent_tokens": 150,
        },
    ),
]
ROWS_OF_THE_SECOND: list[tuple[str, Mapping[str, Any]]] = [
    (
        "tenant",
        {
            "name": "globex",
            "time_zone": "UTC",
            "disabled": True,
            "revoked": False,
            "external_allowed": True,
            "former_time_zones": '[{"time_zone": "Asia/Tokyo", "until_ms": 5}]',
        },
    ),
]


ROWS_OF_THE_THIRD: list[tuple[str, Mapping[str, Any]]] = [
    (
        "tenant",
        {
            "name": "initech",
            "time_zone": "UTC",
            "disabled": False,
            "revoked": False,
            "external_allowed": False,
            "former_time_zones": "[]",
            "weight": 7,
        },
    ),
    (
        "pool",
        {
            "name": "pool-1",
            "revision": "rev-1",
            "replicas": 2,
            "concurrency": 4,
            "urls": '["http://127.0.0.1:1"]',
            "on_demand": False,
            "idle_stop_ms": 600_000,
        },
    ),
]


ROWS_OF_THE_FIFTH: list[tuple[str, Mapping[str, Any]]] = [
    ("revision", {**ROWS[1][1], "id": "rev-2", "revoked": True}),
    ("alias", {"name": "assistant", "revision": "rev-1", "default_max_output_tokens": 256}),
]


ROWS_OF_THE_SIXTH: list[tuple[str, Mapping[str, Any]]] = [
    ("tenant", {**ROWS_OF_THE_THIRD[0][1], "name": "umbrella", "revoked": True, "leaves_its_pools": True}),
]


HOLD_OF_THE_SEVENTH = {name: value for name, value in HOLD.items() if name != "window_takes"} | {"service_class": "batch"}
ROWS_OF_THE_SEVENTH: list[tuple[str, Mapping[str, Any]]] = [
    ("ledger_hold", {**HOLD_OF_THE_SEVENTH, "seq": 6, "request_id": "batch", "generation_id": "gen-3"}),
    ("ledger_settlement", {**ENDED, "seq": 8, "hold_seq": 6, "request_id": "batch", "service_class": "batch"}),
    ("ledger_step", {**STEP, "hold_seq": 6, "seq": 7}),
]


ROLLED_UP = {
    **{name: DIMENSIONS[name] for name in ("tenant", "application", "key", "alias", "revision", "workload_class")},
    **{name: ENDED[name] for name in ("day", "status", "platform_microusd", "tenant_cached_input_tokens")},
    "window_names": "day/2026-01-01\nlifetime",
    "ended_day_ms": T0_MS,
    "requests": 3,
    "tenant_input_tokens": 4,
    "tenant_output_tokens": 5,
    "cost_microusd": 30,
}
BALANCE = {"tenant": "acme", "key": "key", "alias": "assistant", "spent_tokens": 9}
DAY = {"budget_window": "day/2026-01-01"}
LIMIT = {"tenant": "acme", "application": "", "key": "", "alias": "", "limit_name": "concurrency", "value": 3}
ROWS_OF_THE_EIGHTH: list[tuple[str, Mapping[str, Any]]] = [
    ("application", {"tenant": "acme", "name": "jobs", "service_class": "batch", "revoked": False}),
    ("application", {"tenant": "acme", "name": "app", "service_class": "interactive", "revoked": False}),
    ("ledger_step", {**STEP, "hold_seq": 9, "seq": 9}),
    ("usage_rollup", ROLLED_UP),
    ("usage_rollup", {**ROLLED_UP, "application": "jobs", "cost_microusd": 7}),
    ("usage_rollup", {**ROLLED_UP, "application": "gone", "cost_microusd": 8}),
    ("ledger_hold", {**HOLD_OF_THE_SEVENTH, "seq": 9, "request_id": "both", "generation_id": "gen-4"}),
    ("ledger_settlement", {**ENDED, "seq": 10, "hold_seq": 9, "request_id": "both", "service_class": "batch"}),
    ("ledger_balance", {**BALANCE, **DAY, "application": "app", "spent_microusd": 30}),
    ("ledger_balance", {**BALANCE, **DAY, "application": "jobs", "spent_microusd": 7}),
    ("ledger_balance", {**BALANCE, **DAY, "application": "gone", "spent_microusd": 8}),
    ("ledger_balance", {**BALANCE, "application": "jobs", "spent_microusd": 7, "budget_window": "lifetime"}),
    ("ledger_balance", {**BALANCE, "application": "gone", "spent_microusd": 8, "budget_window": "lifetime"}),
    ("limit_entry", LIMIT),
    ("limit_entry", {**LIMIT, "alias": "assistant", "limit_name": "tokens_per_day", "value": 0}),
]


def _write_as_the_first_schema(connection: Connection) -> None:
    _upgrade(connection, "0001")
    connection.execute(sa.text("UPDATE cell SET epoch = 1, last_seq = 5"))
    _insert(connection, ROWS)


def _write_as_the_second_schema(connection: Connection) -> None:
    _write_as_the_first_schema(connection)
    _upgrade(connection, "0002")
    _insert(connection, ROWS_OF_THE_SECOND)


def _write_as_the_third_schema(connection: Connection) -> None:
    _write_as_the_second_schema(connection)
    _upgrade(connection, "0003")
    _insert(connection, ROWS_OF_THE_THIRD)


def _write_as_the_fifth_schema(connection: Connection) -> None:
    _write_as_the_third_schema(connection)
    _upgrade(connection, "0005")
    _insert(connection, ROWS_OF_THE_FIFTH)


def _write_as_the_sixth_schema(connection: Connection) -> None:
    _write_as_the_fifth_schema(connection)
    _upgrade(connection, "0006")
    _insert(connection, ROWS_OF_THE_SIXTH)


def _write_as_the_seventh_schema(connection: Connection) -> None:
    _write_as_the_sixth_schema(connection)
    _upgrade(connection, "0007")
    _insert(connection, ROWS_OF_THE_SEVENTH)
    connection.execute(sa.text("UPDATE cell SET last_seq = 8"))
    connection.execute(sa.text("UPDATE ledger_balance SET spent_microusd = 100, spent_tokens = 300"))


def _write_as_the_eighth_schema(connection: Connection) -> None:
    _write_as_the_seventh_schema(connection)
    _upgrade(connection, "0008")
    connection.execute(sa.text("UPDATE cell SET last_seq = 10"))
    connection.execute(sa.text("UPDATE ledger_balance SET spent_microusd = 180, spent_tokens = 459"))
    _insert(connection, ROWS_OF_THE_EIGHTH)


def _upgrade(connection: Connection, schema: str) -> None:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS))
    command.upgrade(config, schema)


def _insert(connection: Connection, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    for table, row in rows:
        names = ", ".join(row)
        values = ", ".join(f":{name}" for name in row)
        connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({values})"), dict(row))


async def _sqlite(folder: Path, write: Write) -> tuple[LedgerStore, ControlStore]:
    path = folder / "weir.sqlite3"
    path.touch()
    with create_sqlite_engine(partial(connect, path)).begin() as connection:
        write(connection)
    return await asyncio.to_thread(open_sqlite, path)


async def _postgres(_: Path, write: Write) -> tuple[LedgerStore, ControlStore]:
    address = shared_server().create_database()
    engine = create_postgres_engine(address)
    async with engine.begin() as connection:
        await connection.run_sync(write)
    await engine.dispose()
    return await open_postgres(address)


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_what_the_first_schema_wrote_is_kept(opening: Any, tmp_path: Path) -> None:
    """Protects an upgrade with money in the books: usage, balances, prices and open holds stay, and the check is clean."""
    ledger, catalog = await opening(tmp_path, _write_as_the_first_schema)
    try:
        recovery = await ledger.open_epoch(T0_MS)
        assert (recovery.epoch, recovery.next_seq) == (2, 6)
        assert [(balance.window, balance.spent_microusd) for balance in recovery.balances] == [("lifetime", 50)]
        [found] = recovery.open_holds
        assert (found.hold.id.request_id, found.delivered_max, found.hold.price_version) == ("open", 64, 3)
        [usage] = await ledger.usage(UsageQuery(group_by=("day",)))
        assert (usage.group, usage.requests, usage.cost_microusd) == ({"day": "2026-01-01"}, 1, 50)
        loaded = await catalog.load()
        assert loaded.prices == [RevisionPrice("rev-1", Price(3, 200_000, 50_000, 600_000))]
        assert loaded.tenants == [Tenant("acme", "Asia/Tokyo")]
        report = await ledger.verify()
        assert report.is_clean and (report.holds, report.open_holds) == (2, 1)
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_tenants_of_the_second_schema_get_a_weight_of_one(opening: Any, tmp_path: Path) -> None:
    """Protects tenants through an upgrade: they weigh alike, nothing else of them changes, and a weight can be set."""
    ledger, catalog = await opening(tmp_path, _write_as_the_second_schema)
    try:
        acme = Tenant("acme", "Asia/Tokyo")
        globex = Tenant("globex", disabled=True, external_allowed=True, former_time_zones=(FormerZone("Asia/Tokyo", 5),))
        loaded = await catalog.load()
        assert (loaded.tenants, [tenant.weight for tenant in loaded.tenants]) == ([acme, globex], [1, 1])
        heavier = replace(globex, weight=1_000)
        await catalog.apply(loaded.version, CatalogChange(AuditEntry(T0_MS, "ada", "tenant.patch", "globex", "{}"), [heavier]))
        assert (await catalog.load()).tenants == [acme, heavier]
        report = await ledger.verify()
        assert report.is_clean and (report.holds, report.open_holds) == (2, 1)
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_pools_of_the_third_schema_stay_shared_and_take_everything(opening: Any, tmp_path: Path) -> None:
    """Protects pools and tenants through an upgrade: nobody gains or loses a pool, and one can be dedicated."""
    ledger, catalog = await opening(tmp_path, _write_as_the_third_schema)
    try:
        initech, pool = Tenant("initech", weight=7), Pool("pool-1", "rev-1", 2, 4, ("http://127.0.0.1:1",), declared=True)
        loaded = await catalog.load()
        assert (loaded.tenants[-1], loaded.pools) == (initech, [pool])
        assert (pool.tenant, pool.service_classes, pool.input_tokens_max) == (None, tuple(ServiceClass), None)
        assert not any(tenant.leaves_its_pools for tenant in loaded.tenants)
        leaving = replace(initech, leaves_its_pools=True)
        kept = replace(pool, tenant="initech", service_classes=(ServiceClass.BATCH,), input_tokens_max=9)
        audit = AuditEntry(T0_MS, "ada", "models.register", "pool-1", "{}")
        await catalog.apply(loaded.version, CatalogChange(audit, [leaving], pools=[kept]))
        changed = await catalog.load()
        assert (changed.tenants[-1], changed.pools) == (leaving, [kept])
        report = await ledger.verify()
        assert report.is_clean and (report.holds, report.open_holds) == (2, 1)
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_what_served_in_the_fifth_schema_serves_on(opening: Any, tmp_path: Path) -> None:
    """Protects revisions and aliases through an upgrade: what was live is, what was revoked stays so, names are shared."""
    ledger, catalog = await opening(tmp_path, _write_as_the_fifth_schema)
    try:
        loaded = await catalog.load()
        states = {revision.id: revision.state for revision in loaded.revisions}
        assert states == {"rev-1": RevisionState.LIVE, "rev-2": RevisionState.REVOKED}
        assert loaded.aliases == [Alias("assistant", "rev-1", 256)]
        own = Alias("assistant", "rev-1", 8, Canary("ro-1", 0, "rev-2", 1), "acme")
        audit = AuditEntry(T0_MS, "ada", "alias.set", "assistant", "{}")
        await catalog.apply(loaded.version, CatalogChange(audit, aliases=[own]))
        assert (await catalog.load()).aliases == [Alias("assistant", "rev-1", 256), own]
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_tenants_of_the_sixth_schema_keep_nothing_and_are_not_deleted(opening: Any, tmp_path: Path) -> None:
    """Protects tenants through an upgrade: nothing of theirs is kept unasked, none is gone, and both can be set."""
    ledger, catalog = await opening(tmp_path, _write_as_the_sixth_schema)
    try:
        umbrella = Tenant("umbrella", revoked=True, weight=7, leaves_its_pools=True)
        loaded = await catalog.load()
        assert [tenant.name for tenant in loaded.tenants] == ["acme", "globex", "initech", "umbrella"]
        assert loaded.tenants[-1] == umbrella
        assert {(tenant.retention, tenant.deleted) for tenant in loaded.tenants} == {(None, False)}
        keeping, deleted = replace(loaded.tenants[0], retention=Retention(60, 2**20)), replace(umbrella, deleted=True)
        audit = AuditEntry(T0_MS, "ada", "tenant.patch", "acme", "{}")
        await catalog.apply(loaded.version, CatalogChange(audit, [keeping, deleted]))
        assert (await catalog.load()).tenants == [keeping, *loaded.tenants[1:-1], deleted]
        report = await ledger.verify()
        assert report.is_clean and (report.holds, report.open_holds) == (2, 1)
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_prices_of_the_seventh_schema_have_no_discount(opening: Any, tmp_path: Path) -> None:
    """Protects money through an upgrade: what batch requests paid stays right, and the next version may let them pay less."""
    ledger, catalog = await opening(tmp_path, _write_as_the_seventh_schema)
    try:
        loaded = await catalog.load()
        price = Price(3, 200_000, 50_000, 600_000, 100)
        assert {revision.price for revision in loaded.revisions} == {price} == {entry.price for entry in loaded.prices}
        cheaper = replace(loaded.revisions[0], price=replace(price, version=4, batch_percent=50))
        audit = AuditEntry(T0_MS, "ada", "price.set", "rev-1", "{}")
        await catalog.apply(loaded.version, CatalogChange(audit, revisions=[cheaper]))
        changed = await catalog.load()
        assert changed.revisions[0] == cheaper and RevisionPrice("rev-1", cheaper.price) in changed.prices
        report = await ledger.verify()
        assert report.is_clean, report.problems
        assert (report.holds, report.open_holds, report.settlements) == (3, 1, 2)
    finally:
        await ledger.aclose()
        await catalog.aclose()


@pytest.mark.parametrize("opening", [_sqlite, _postgres])
async def test_balances_of_the_eighth_schema_are_told_apart_by_class(opening: Any, tmp_path: Path) -> None:
    """Protects money through an upgrade: each class gets what its records say, every sum stays, and limits are of all classes.

    What is rolled up says no class: it gets its application's, and interactive where there is no such application any more.
    """
    ledger, catalog = await opening(tmp_path, _write_as_the_eighth_schema)
    try:
        report = await ledger.verify()
        assert report.is_clean, report.problems
        assert (report.holds, report.settlements, report.rolled_up, report.balances) == (4, 3, 9, 7)
        recovery = await ledger.open_epoch(T0_MS)
        found = {(each.application, each.service_class, each.window): each for each in recovery.balances}
        day, jobs, talk = DAY["budget_window"], ServiceClass.BATCH, ServiceClass.INTERACTIVE
        assert {key: (each.spent_microusd, each.spent_tokens) for key, each in found.items()} == {
            ("app", talk, "lifetime"): (80, 159),
            ("app", jobs, "lifetime"): (100, 300),
            ("app", talk, day): (30, 9),
            ("jobs", jobs, "lifetime"): (7, 9),
            ("jobs", jobs, day): (7, 9),
            ("gone", talk, "lifetime"): (8, 9),
            ("gone", talk, day): (8, 9),
        }
        [usage] = await ledger.usage(UsageQuery())
        assert (usage.requests, usage.cost_microusd) == (12, 195)
        loaded = await catalog.load()
        kept = [(Scope("acme"), Limits(concurrency=3)), (Scope("acme", alias="assistant"), Limits(tokens_per_day=0))]
        assert loaded.limits == kept
        scope = Scope("acme", service_class=jobs)
        audit = AuditEntry(T0_MS, "ada", "limits.put", "acme", "{}")
        await catalog.apply(loaded.version, CatalogChange(audit, limits=[(scope, Limits(concurrency=1))]))
        assert (await catalog.load()).limits == [kept[0], (scope, Limits(concurrency=1)), kept[1]]
    finally:
        await ledger.aclose()
        await catalog.aclose()
