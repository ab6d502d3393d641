"""Protects `weir ledger verify`: it reads beside a writer, changes nothing, finds what is wrong, and refuses what it cannot
understand, on each durable store.
"""

import asyncio
import hashlib
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from tests.contract.stores import Cell, execution, hold, release, settle, step

from weir import errors
from weir.ports import LedgerReport, LedgerStore
from weir.storage.ledger_rows import COPIED_COLUMNS
from weir.storage.reading import verify_database, verify_state

DURABLE = ("sqlite", "postgres")


@pytest.fixture(params=DURABLE)
def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Cell:
    return Cell(request.param, tmp_path)


async def verified(cell: Cell) -> LedgerReport:
    return await (verify_state(cell.path.parent) if cell.kind == "sqlite" else verify_database(cell.url))


async def alter(cell: Cell, statement: str) -> None:
    """Somebody changes the database behind our back."""
    if cell.kind == "sqlite":
        with closing(sqlite3.connect(cell.path)) as database, database:
            database.execute(statement)
    else:
        connection = await asyncpg.connect(cell.url)
        await connection.execute(statement)
        await connection.close()


async def fill(ledger: LedgerStore) -> int:
    """Two ended executions and an open one; the writer's epoch."""
    epoch = (await ledger.open_epoch(0)).epoch
    ended = [execution("one"), execution("two")]
    records = [(hold(3 * n + 1, one), step(3 * n + 2, one), settle(3 * n + 3, one)) for n, one in enumerate(ended)]
    await ledger.write(epoch, [record for group in records for record in group] + [hold(7, execution("three"))])
    return epoch


async def test_a_ledger_is_read_beside_its_writer(cell: Cell) -> None:
    """Protects a running platform: the check waits for nothing, sees whole groups, and the writer goes on."""
    async with cell.ledger() as ledger:
        epoch = await fill(ledger)
        report = await verified(cell)
        assert report.is_clean, report.problems
        assert (report.epoch, report.last_seq, report.holds, report.open_holds, report.settlements) == (epoch, 7, 3, 1, 2)
        await ledger.write(epoch, [release(8, execution("three"))])
        assert (await verified(cell)).settlements == 3
    assert (await verified(cell)).is_clean


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE ledger_balance SET spent_microusd = spent_microusd + 1 WHERE budget_window = 'lifetime'", "lifetime is"),
        ("UPDATE ledger_balance SET service_class = 'batch'", "acme/app/key/assistant/batch for day/2026-01-01 is"),
        ("UPDATE ledger_settlement SET cost_microusd = 6000 WHERE request_id = 'one'", "more than was held"),
        ("DELETE FROM ledger_open", "is not among the open holds"),
        ("INSERT INTO ledger_open VALUES (1)", "is among the open holds, and has ended"),
        ("INSERT INTO ledger_open VALUES (99)", "record 99 is open without a hold"),
        ("DELETE FROM ledger_hold WHERE request_id = 'one'", "has ended without a hold"),
        ("UPDATE ledger_settlement SET day = '2026-01-02' WHERE request_id = 'one'", "on another day"),
        ("UPDATE ledger_hold SET window_names = 'month/2026-01\nday/2026-01-01\nlifetime'", "on another day"),
        ("INSERT INTO price VALUES ('rev-1', 8, 1, 1, 1, 100)", "its revision's schedule does not have"),
        ("INSERT INTO price VALUES ('rev-1', 7, 1, 1, 1, 100)", "at the pinned price"),
        ("UPDATE ledger_settlement SET delivered_tokens = 65 WHERE request_id = 'one'", "more than was booked ahead"),
        ("UPDATE ledger_settlement SET basis = 'uncertain' WHERE request_id = 'one'", "ended uncertain"),
        ("UPDATE cell SET last_seq = 3", "above the cell's last record"),
    ],
)
async def test_what_does_not_add_up_is_named(cell: Cell, damage: str, said: str) -> None:
    """Protects trust in the books: a changed balance, charge or record is found and named."""
    async with cell.ledger() as ledger:
        await fill(ledger)
    await alter(cell, damage)
    report = await verified(cell)
    assert not report.is_clean and any(said in problem for problem in report.problems), report.problems


@pytest.mark.parametrize(
    ("service_class", "percent", "is_clean"),
    [("batch", 50, True), ("batch", 55, False), ("batch", 100, False), ("interactive", 50, False), ("interactive", 100, False)],
)
async def test_a_charge_is_checked_at_the_price_of_its_class(
    cell: Cell, service_class: str, percent: int, is_clean: bool
) -> None:
    """Protects the check of discounts: each amount's part rounded up, for batch alone, by the pinned percent."""
    async with cell.ledger() as ledger:
        await fill(ledger)  # 71 uncached, 9 cached and 20 output tokens: at half of each amount, rounded up, 29.000009
    await alter(cell, f"INSERT INTO price VALUES ('rev-1', 7, 799999, 1, 59999, {percent})")
    for table in ("ledger_hold", "ledger_settlement", "ledger_balance"):
        await alter(cell, f"UPDATE {table} SET service_class = '{service_class}'")
    await alter(cell, "UPDATE ledger_settlement SET cost_microusd = 30")
    await alter(cell, "UPDATE ledger_balance SET spent_microusd = 60")
    problems = (await verified(cell)).problems
    said = ["at the pinned price of its class" in problem for problem in problems]
    assert said == ([] if is_clean else [True, True]), problems


@pytest.mark.parametrize("column", COPIED_COLUMNS.split(", "))
async def test_an_end_that_does_not_say_what_its_hold_says_is_named(cell: Cell, column: str) -> None:
    """Protects reports, which read the ends alone: each column that an end copies from its hold is compared."""
    async with cell.ledger() as ledger:
        await fill(ledger)
    other = {"execution": "7", "price_version": "8", "stream": "NOT stream"}.get(column, f"{column} || 'x'")
    await alter(cell, f"UPDATE ledger_settlement SET {column} = {other} WHERE request_id = 'one'")
    report = await verified(cell)
    assert any("ended as something else than was held" in problem for problem in report.problems), report.problems


async def test_every_tenant_is_recounted_and_the_report_is_short(cell: Cell) -> None:
    """Protects the check of many tenants: one with balances alone is found, in order, and no report grows with the damage."""
    async with cell.ledger() as ledger:
        await fill(ledger)
    await alter(
        cell,
        "WITH RECURSIVE one(number) AS (SELECT 10 UNION ALL SELECT number + 1 FROM one WHERE number < 40) INSERT INTO "
        "ledger_balance SELECT 'tenant-' || number, 'app', 'key', 'assistant', 'batch', 'lifetime', 1, 1 FROM one",
    )
    *named, last = (await verified(cell)).problems
    assert [problem.split("/")[0] for problem in named] == [f"The balance of tenant-{number}" for number in range(10, 20)]
    assert last == "There are more of this kind."


@pytest.mark.parametrize("change", ["UPDATE alembic_version SET version_num = '9999'", "DELETE FROM alembic_version"])
async def test_another_schema_is_refused_and_not_migrated(cell: Cell, change: str) -> None:
    """Protects figures from being read as what they are not, and the database from a check that changes it."""
    await alter(cell, change)
    for _ in range(2):
        with pytest.raises(errors.StateUnreadable, match="this version of Weir reads schema"):
            await verified(cell)


async def test_a_state_directory_is_left_as_it_is(tmp_path: Path) -> None:
    """Protects the database of a stopped cell: not a byte of it changes, and no lock is taken."""
    cell = Cell("sqlite", tmp_path)
    async with cell.ledger() as ledger:
        await fill(ledger)
    before = hashlib.sha256(cell.path.read_bytes()).digest()
    assert (await verified(cell)).is_clean
    assert hashlib.sha256(cell.path.read_bytes()).digest() == before
    assert not (cell.path.parent / "lock").exists()


async def test_what_is_no_database_is_refused_in_words(tmp_path: Path) -> None:
    """Protects a person from a traceback: an empty directory, a file of something else, a torn database."""
    with pytest.raises(errors.StateUnreadable, match="There is no database"):
        await verify_state(tmp_path)
    (tmp_path / "weir.sqlite3").write_text("something else, and long enough to be looked at" * 100)
    with pytest.raises(errors.StateUnreadable, match="damaged"):
        await verify_state(tmp_path)
    cell = Cell("sqlite", tmp_path)
    content = cell.path.read_bytes()
    cell.path.write_bytes(content[:4_096] + b"\xff" * (len(content) - 4_096))
    with pytest.raises(errors.StateUnreadable, match="damaged"):
        await verified(cell)


async def test_a_ledger_without_its_cell_is_damaged(cell: Cell) -> None:
    """Protects a script from taking what could not be checked for books that do not add up."""
    await alter(cell, "DELETE FROM cell")
    with pytest.raises(errors.StateUnreadable, match="damaged"):
        await verified(cell)


async def test_a_locked_database_is_not_called_damaged(tmp_path: Path) -> None:
    """Protects an operator from restoring a backup because of a program that holds the file for a moment."""
    cell = Cell("sqlite", tmp_path)
    with closing(sqlite3.connect(cell.path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(errors.StateUnreadable, match="locked by another program"):
            await verify_state(cell.path.parent, lock_wait_ms=10)
    assert (await verified(cell)).is_clean


async def test_an_address_that_does_not_answer_is_refused_without_its_password() -> None:
    """Protects a password from the terminal's history of errors."""
    with pytest.raises(errors.StateUnreadable) as refused:
        await asyncio.wait_for(verify_database("postgresql://weir:hidden@127.0.0.1:1/weir"), 10)
    assert "hidden" not in refused.value.detail and "127.0.0.1:1/weir" in refused.value.detail
    with pytest.raises(errors.InvalidRequest):
        await verify_database("sqlite:///x")


async def test_without_its_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an operator from guessing what is missing."""
    monkeypatch.delitem(sys.modules, "weir.storage.postgres_ledger", raising=False)
    monkeypatch.delitem(sys.modules, "weir.storage.postgres_session", raising=False)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(errors.StateUnreadable, match=r"weir\[postgres\]"):
        await verify_database("postgresql://weir@127.0.0.1:1/weir")
