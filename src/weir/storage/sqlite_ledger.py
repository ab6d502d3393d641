"""The ledger in SQLite: one writer thread, and reads on connections of their own that never wait for a write.

It decides what one group of records does to the tables, all or nothing, in a transaction that first checks the epoch. It must
never answer before the group is on the disk (WAL, synchronous=FULL). A record whose number is not above the last durable one is
there already and is skipped, so a write whose outcome was lost may simply be repeated.
"""

import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from weir import errors
from weir.core.ledger.records import EndRecord, HoldRecord, LedgerRecord, StepRecord
from weir.core.windows import floors_of
from weir.ports import LedgerReport, Recovery, StoredExecution, UsageQuery, UsageRow
from weir.storage import ledger_audit
from weir.storage import ledger_rows as rows
from weir.storage.store_thread import StoreThread
from weir.units import Millis

LOCK_WAIT_MS = 1_000
"""Only the catalog's short transactions and backups take the write lock beside us; the caller's own bound is two seconds."""

T = TypeVar("T")


def connect(path: Path, lock_wait_ms: Millis = LOCK_WAIT_MS) -> sqlite3.Connection:
    """A durable connection without implicit transactions, for a database that exists. Raises sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=lock_wait_ms / 1000)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class SqliteLedger:
    """LedgerStore on a migrated database file."""

    def __init__(self, path: Path, lock_wait_ms: Millis = LOCK_WAIT_MS) -> None:
        self._writer, self._reader, self._reports = (
            StoreThread(name, partial(connect, path, lock_wait_ms), sqlite3.Error, sqlite3.IntegrityError)
            for name in ("ledger-writer", "ledger-reader", "ledger-reports")
        )

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """Become the writer: epoch + 1, and everything needed to continue. Raises LedgerUnavailable."""
        return await self._writer.run(partial(_open_epoch, recent_since_ms))

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """Write a group in one transaction, in order; durable on return. Raises StaleEpoch, or LedgerUnavailable.

        After LedgerUnavailable the same group may be written again, whatever became of it.
        """
        await self._writer.run(partial(_write, epoch, tuple(records)))

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """The latest execution of a request id. Raises LedgerUnavailable."""
        found = await self._reader.run(
            lambda database: database.execute(rows.LATEST_EXECUTION, (tenant, request_id)).fetchone()
        )
        return rows.stored_execution(found) if found else None

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums over the rows of ended executions, by the time they ended. Raises InvalidRequest, LedgerUnavailable."""
        statement, parameters = rows.usage_statement(query)
        return await self._reports.run(
            lambda database: rows.usage_rows(query, database.execute(statement, parameters).fetchall())
        )

    async def verify(self) -> LedgerReport:
        """Recount everything in one consistent read, also while another process writes. Raises LedgerUnavailable."""
        return await self._reports.run(_verify)

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """Replace up to rows_max executions that ended before a time by their sums; how many. Sums and balances stay.

        Raises StaleEpoch, or LedgerUnavailable.
        """
        return await self._writer.run(partial(_prune, epoch, before_ms, rows_max))

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """Add (tenant, code, minute as wall-clock ms, number) to the rejection counters. Raises LedgerUnavailable."""
        await self._writer.run(partial(_count_rejections, tuple(counts)))

    async def rejections(self, tenant: str | None = None) -> list[tuple[str, str, Millis, int]]:
        """The rejection counters, by tenant, code and minute. Raises LedgerUnavailable."""
        where, parameters = ("WHERE tenant = ?", (tenant,)) if tenant is not None else ("", ())
        statement = f"SELECT tenant, code, minute_ms, number FROM rejection {where} ORDER BY tenant, code, minute_ms"
        return await self._reports.run(lambda database: database.execute(statement, parameters).fetchall())

    async def aclose(self) -> None:
        """Finish what was asked for and close every connection. Idempotent."""
        for thread in (self._writer, self._reader, self._reports):
            await thread.aclose()


def _open_epoch(recent_since_ms: Millis, database: sqlite3.Connection) -> Recovery:
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE cell SET epoch = epoch + 1")
    epoch, last_seq = database.execute("SELECT epoch, last_seq FROM cell").fetchone()
    recovery = Recovery(
        epoch=epoch,
        next_seq=last_seq + 1,
        balances=[rows.leaf_balance(row) for row in database.execute(rows.BALANCES, floors_of(recent_since_ms))],
        open_holds=[rows.open_hold(row) for row in database.execute(rows.OPEN_HOLDS)],
        recent_takes=rows.recent_takes(database.execute(rows.RECENT_TAKES, (recent_since_ms,))),
    )
    database.execute("COMMIT")
    return recovery


def _write(epoch: int, records: Sequence[LedgerRecord], database: sqlite3.Connection) -> None:
    try:
        _write_uncommitted(epoch, records, database)
    except sqlite3.IntegrityError:
        raise
    except sqlite3.Error as fault:
        raise errors.LedgerUnavailable("The store cannot be written now.", not_written=True) from fault
    database.execute("COMMIT")


def _write_uncommitted(epoch: int, records: Sequence[LedgerRecord], database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    stored_epoch, last_seq = database.execute("SELECT epoch, last_seq FROM cell").fetchone()
    if stored_epoch != epoch:
        raise errors.StaleEpoch()
    fresh = [record for record in records if record.seq > last_seq]
    if fresh:
        database.execute("UPDATE cell SET last_seq = ?", (fresh[-1].seq,))
        _write_fresh(database, epoch, fresh)


def _write_fresh(database: sqlite3.Connection, epoch: int, records: Sequence[LedgerRecord]) -> None:
    """Rows by kind: a hold precedes its steps, steps their end, and ends keep their order among themselves."""
    holds: list[HoldRecord] = []
    steps: list[StepRecord] = []
    ends: list[EndRecord] = []
    last_seq = 0
    for record in records:
        assert record.seq > last_seq, "records are written in the order of their numbers"
        last_seq = record.seq
        if isinstance(record, HoldRecord):
            holds.append(record)
        elif isinstance(record, StepRecord):
            steps.append(record)
        else:
            ends.append(record)
    if holds:
        database.executemany(rows.INSERT_HOLD, [rows.hold_row(hold, epoch) for hold in holds])
        database.executemany(rows.INSERT_OPEN, [(hold.seq,) for hold in holds])
    if steps:
        inserted = database.executemany(rows.INSERT_STEP, [rows.step_row(step) for step in steps]).rowcount
        assert inserted == len(steps), "a step's hold is written before it"
    if ends:
        _write_ends(database, epoch, ends)


def _write_ends(database: sqlite3.Connection, epoch: int, ends: Sequence[EndRecord]) -> None:
    span = (ends[0].seq, ends[-1].seq)
    inserted = database.executemany(rows.INSERT_END, [rows.end_row(end, epoch) for end in ends]).rowcount
    if inserted < len(ends):
        ended = {seq for (seq,) in database.execute(rows.ENDED_SEQS, span)}
        database.executemany(rows.INSERT_LATE, [rows.late_row(end) for end in ends if end.seq not in ended])
    database.execute(rows.CLOSE_ENDED, span)
    database.executemany(rows.ADD_TO_BALANCE, rows.balance_rows(database.execute(rows.POSTED_BY_LEAF, span).fetchall()))


def _verify(database: sqlite3.Connection) -> LedgerReport:
    database.execute("BEGIN")
    try:
        return ledger_audit.examine(lambda statement, given: database.execute(statement, given).fetchall())
    finally:
        database.execute("ROLLBACK")


def _prune(epoch: int, before_ms: Millis, rows_max: int, database: sqlite3.Connection) -> int:
    database.execute("BEGIN IMMEDIATE")
    if database.execute("SELECT epoch FROM cell").fetchone() != (epoch,):
        raise errors.StaleEpoch()
    old = (before_ms, rows_max)
    database.execute(rows.ROLL_UP, old)
    pruned = [database.execute(statement, old).rowcount for statement in rows.PRUNE][-1]
    if pruned < rows_max:  # these have no index by time: once a sweep is enough
        database.execute(rows.PRUNE_LATE, (before_ms,))
        database.execute(rows.PRUNE_REJECTIONS, (before_ms,))
    database.execute("COMMIT")
    return pruned


def _count_rejections(counts: Sequence[tuple[str, str, Millis, int]], database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.executemany(rows.ADD_REJECTIONS, counts)
    database.execute("COMMIT")
