"""What the durable ledger alone must withstand: foreign locks, a full disk, a missing file, a killed writer."""

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.contract.stores import execution, hold, migrated_database, settle

from weir import errors
from weir.ports import Recovery, UsageQuery
from weir.storage import ledger_rows as rows
from weir.storage.sqlite_ledger import SqliteLedger

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
async def sqlite_ledger(tmp_path: Path) -> AsyncIterator[tuple[SqliteLedger, Path]]:
    path = migrated_database(tmp_path)
    ledger = SqliteLedger(path, lock_wait_ms=50)
    yield ledger, path
    await ledger.aclose()


async def test_a_lock_is_waited_for_briefly_and_reads_go_on(sqlite_ledger: tuple[SqliteLedger, Path]) -> None:
    """Protects: a foreign lock makes writes unavailable for as long as it lasts, never reads, and needs no restart."""
    ledger, path = sqlite_ledger
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, [hold(1, execution())])
    with closing(sqlite3.connect(path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.LedgerUnavailable) as refused:
            await ledger.write(epoch, [settle(2, execution())])
        assert isinstance(refused.value.__cause__, sqlite3.OperationalError)
        found = await ledger.find_execution("acme", "r")
        assert found is not None
        assert found.open
        foreign.execute("ROLLBACK")
    await ledger.write(epoch, [settle(2, execution())])
    assert (await ledger.usage(UsageQuery()))[0].requests == 1


@contextmanager
def no_space(path: Path) -> Iterator[None]:
    """No file of this process may grow beyond what the log of the database has: what a full disk does to a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(f"{path}-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_refuses_the_group_and_recovers(sqlite_ledger: tuple[SqliteLedger, Path]) -> None:
    """Protects: a write without space is refused whole, and the same group lands once there is space again."""
    ledger, path = sqlite_ledger
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, [hold(1, execution())])
    group = [hold(seq, execution(f"more{seq}")) for seq in range(2, 200)]
    with no_space(path), pytest.raises(errors.LedgerUnavailable):
        await ledger.write(epoch, group)
    assert await ledger.find_execution("acme", "more2") is None
    await ledger.write(epoch, group)
    assert (await ledger.open_epoch(0)).next_seq == 200


async def test_a_closed_or_missing_database_is_unavailable(tmp_path: Path) -> None:
    """Protects: after closing, or without its file, the store answers with its own error and creates nothing."""
    missing = SqliteLedger(tmp_path / "absent.sqlite3")
    with pytest.raises(errors.LedgerUnavailable):
        await missing.open_epoch(0)
    assert not (tmp_path / "absent.sqlite3").exists()
    await missing.aclose()
    await missing.aclose()
    with pytest.raises(errors.LedgerUnavailable):
        await missing.find_execution("acme", "r")


def test_recovery_and_look_ups_never_scan_what_has_ended(tmp_path: Path) -> None:
    """Protects: taking over and finding a request cost what is open or recent, whatever the ledger has grown to."""
    statements = {
        rows.OPEN_HOLDS: 0,
        rows.RECENT_TAKES: 1,
        rows.LATEST_EXECUTION: 2,
        rows.CLOSE_ENDED: 2,
        rows.POSTED_BY_LEAF: 2,
        rows.BALANCES: 2,
        rows.ROLL_UP: 2,
        **dict.fromkeys(rows.PRUNE, 2),
    }
    by_tenant, bounds = rows.usage_statement(UsageQuery(tenant="acme", from_ms=0, to_ms=1, group_by=("day",)))
    with closing(sqlite3.connect(migrated_database(tmp_path))) as database:
        for statement, parameters in (statements | {by_tenant: len(bounds)}).items():
            plan = [detail for *_, detail in database.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * parameters)]
            # What was found already may be walked: what is open, what is recent, what a report sums.
            walked = {rows.OPEN_HOLDS: {"SCAN o"}, rows.RECENT_TAKES: {"SCAN h"}}.get(statement, {"SCAN usage"})
            assert {line for line in plan if line.startswith("SCAN")} <= walked


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.contract.stores import execution, hold, settle, step
from weir.storage.sqlite_ledger import SqliteLedger

async def main() -> None:
    ledger = SqliteLedger(Path(sys.argv[1]))
    recovery = await ledger.open_epoch(0)
    seq = recovery.next_seq
    for group in range(100_000):
        records = []
        for i in range(5):
            named = execution(f"{recovery.epoch}-{group}-{i}")
            records += [hold(seq, named), step(seq + 1, named), settle(seq + 2, named, cost=1)]
            seq += 3
        await ledger.write(recovery.epoch, records)
        print(seq - 1, flush=True)

asyncio.run(main())
"""


def test_a_killed_writer_leaves_a_whole_prefix(tmp_path: Path) -> None:
    """Protects: after kill -9 in the middle of writing, what was acknowledged is there, in order, and no group is torn."""
    path = migrated_database(tmp_path)
    for acknowledged_groups in (3, 17):
        acknowledged = run_and_kill(path, acknowledged_groups)
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            seqs = [
                seq
                for (seq,) in database.execute(
                    "SELECT seq FROM ledger_hold UNION ALL SELECT seq FROM ledger_step "
                    "UNION ALL SELECT seq FROM ledger_settlement ORDER BY seq"
                )
            ]
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) >= acknowledged
        assert len(seqs) % 15 == 0
        recovery = asyncio.run(recover(path))
        assert recovery.next_seq == len(seqs) + 1
        assert recovery.open_holds == []
        assert {balance.spent_microusd for balance in recovery.balances} == {len(seqs) // 3}


def run_and_kill(path: Path, groups: int) -> int:
    """Start a writer, kill it after it acknowledged some groups; the last number that it acknowledged."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(groups)]
        os.kill(writer.pid, signal.SIGKILL)
        lines += writer.stdout.readlines()
        assert writer.wait(10) == -signal.SIGKILL
    return int([line for line in lines if line.endswith("\n")][-1])


async def recover(path: Path) -> Recovery:
    ledger = SqliteLedger(path)
    recovery = await ledger.open_epoch(0)
    await ledger.aclose()
    return recovery
