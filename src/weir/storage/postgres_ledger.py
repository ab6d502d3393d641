"""The ledger in PostgreSQL: one connection that writes, and reads on connections of their own that never wait for a write.

It decides what is one transaction: a group is one statement, which is fenced by the epoch inside. The writer's snapshots are
repeatable, so that a group that overlaps an older write of its own is refused unwritten instead of missing what that one wrote.
It must never answer before the group is durable. A write whose outcome was lost may simply be repeated, as on SQLite.
"""

import asyncio
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
from sqlalchemy.util import await_only, greenlet_spawn

from weir import errors
from weir.core.ledger.records import EndRecord, HoldRecord, LedgerRecord, StepRecord
from weir.core.windows import floors_of
from weir.ports import LedgerReport, Recovery, StoredExecution, UsageQuery, UsageRow
from weir.storage import ledger_audit
from weir.storage import ledger_rows as rows
from weir.storage import postgres_statements as statements
from weir.storage.postgres_session import STATEMENT_MS, Connection, PostgresSession
from weir.units import Millis

VERIFY_MS: Millis = 600_000
"""A check reads the whole ledger."""
RECOVERY_MS: Millis = 60_000
"""A takeover reads all that is open, recent or in a present window, while nobody waits for a record."""
REPORT_MS: Millis = 60_000
"""A report reads every row of its range, on connections of its own: look-ups of requests do not wait for it."""
_READERS = 4
_REPORTERS = 2
_PLANS = {
    "default_transaction_isolation": "repeatable read",
    # The tables grow faster than their statistics: plan once, hash what came with the group, find the rest by index.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_nestloop": "off",
    "enable_mergejoin": "off",
}
_BY_INDEX = "SET LOCAL enable_nestloop = on; SET LOCAL enable_hashjoin = off"
"""For a transaction that is not a group: nothing comes with it, and all that it looks for is found by index."""


class PostgresLedger:
    """LedgerStore on a migrated database. statement_ms: of any statement but a takeover's, a report's or a check's.

    Raises InvalidRequest for an address that is none.
    """

    def __init__(self, address: str, statement_ms: Millis = STATEMENT_MS) -> None:
        self._writer = PostgresSession(address, 1, statement_ms, statements.ROW_TYPES, **_PLANS)
        self._readers = PostgresSession(address, _READERS, statement_ms)
        self._reports = PostgresSession(address, _REPORTERS, REPORT_MS)
        self._checks = PostgresSession(address, 1, VERIFY_MS)

    async def open_epoch(self, recent_since_ms: Millis) -> Recovery:
        """Become the writer: epoch + 1, and everything needed to continue. Raises LedgerUnavailable."""
        return await self._writer.run(partial(_open_epoch, recent_since_ms))

    async def write(self, epoch: int, records: Sequence[LedgerRecord]) -> None:
        """Write a group in one statement, in order; durable on return. Raises StaleEpoch, or LedgerUnavailable.

        After LedgerUnavailable the same group may be written again, whatever became of it.
        """
        given = _given_rows(records, epoch)
        last_seq = records[-1].seq if records else 0
        fenced = await self._writer.run(lambda database: database.fetchval(statements.WRITE, epoch, last_seq, *given))
        if not fenced:
            raise errors.StaleEpoch()

    async def find_execution(self, tenant: str, request_id: str) -> StoredExecution | None:
        """The latest execution of a request id. Raises LedgerUnavailable."""
        found = await self._readers.run(lambda database: database.fetchrow(statements.LATEST_EXECUTION, tenant, request_id))
        return rows.stored_execution(tuple(found)) if found else None

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums over the rows of ended executions, by the time they ended. Raises InvalidRequest, LedgerUnavailable."""
        statement, parameters = rows.usage_statement(query)
        found = await self._reports.run(lambda database: database.fetch(statements.numbered(statement), *parameters))
        return await asyncio.to_thread(_usage_rows, query, found)

    async def verify(self) -> LedgerReport:
        """Recount everything in one consistent read, also while another process writes. Raises LedgerUnavailable."""
        return await self._checks.run(_verify)

    async def prune(self, epoch: int, before_ms: Millis, rows_max: int) -> int:
        """Replace up to rows_max executions that ended before a time by their sums; how many. Sums and balances stay.

        Raises StaleEpoch, or LedgerUnavailable.
        """
        return await self._writer.run(partial(_prune, epoch, before_ms, rows_max))

    async def count_rejections(self, counts: Sequence[tuple[str, str, Millis, int]]) -> None:
        """Add (tenant, code, minute as wall-clock ms, number) to the rejection counters. Raises LedgerUnavailable."""
        await self._readers.run(lambda database: database.executemany(statements.ADD_REJECTIONS, counts))

    async def rejections(self, tenant: str | None = None) -> list[tuple[str, str, Millis, int]]:
        """The rejection counters, by tenant, code and minute. Raises LedgerUnavailable."""
        where, parameters = ("WHERE tenant = $1", (tenant,)) if tenant is not None else ("", ())
        statement = f"SELECT tenant, code, minute_ms, number FROM rejection {where} ORDER BY tenant, code, minute_ms"
        found = await self._reports.run(lambda database: database.fetch(statement, *parameters))
        return [(row[0], row[1], row[2], row[3]) for row in found]

    async def aclose(self) -> None:
        """Finish what was asked for and close every connection. Idempotent."""
        for session in (self._writer, self._readers, self._reports, self._checks):
            await session.aclose()


async def _open_epoch(recent_since_ms: Millis, database: Connection) -> Recovery:
    """Its row of the cell is locked first, so that each read after it sees every group that was written."""
    async with database.transaction(isolation="read_committed"):
        await database.execute(_BY_INDEX)
        cell = await database.fetchrow("UPDATE cell SET epoch = epoch + 1 RETURNING epoch, last_seq")
        assert cell is not None
        await database.execute(f"SET LOCAL statement_timeout = {RECOVERY_MS}")
        fetch = partial(database.fetch, timeout=RECOVERY_MS / 1000)
        balances = await fetch(statements.BALANCES, *floors_of(recent_since_ms))
        open_holds = await fetch(statements.OPEN_HOLDS)
        takes = await fetch(statements.RECENT_TAKES, recent_since_ms)
        return Recovery(
            epoch=cell["epoch"],
            next_seq=cell["last_seq"] + 1,
            balances=[rows.leaf_balance(tuple(row)) for row in balances],
            open_holds=[rows.open_hold(tuple(row)) for row in open_holds],
            recent_takes=rows.recent_takes(map(tuple, takes)),
        )


async def _verify(database: Connection) -> LedgerReport:
    async with database.transaction(isolation="repeatable_read", readonly=True):
        return await greenlet_spawn(
            ledger_audit.examine, lambda statement, given: await_only(database.fetch(statements.numbered(statement), *given))
        )


async def _prune(epoch: int, before_ms: Millis, rows_max: int, database: Connection) -> int:
    """Its row of the cell is written, so that a group whose snapshot is older is refused, and repeated."""
    async with database.transaction(isolation="read_committed"):
        await database.execute(_BY_INDEX)
        if await database.fetchval("UPDATE cell SET last_seq = last_seq WHERE epoch = $1 RETURNING epoch", epoch) is None:
            raise errors.StaleEpoch()
        old = (before_ms, rows_max)
        await database.execute(statements.ROLL_UP, *old)
        answers = [await database.execute(statement, *old) for statement in statements.PRUNE]
        pruned = int(answers[-1].rpartition(" ")[2])
        for statement in statements.PRUNE_OTHERS if pruned < rows_max else ():  # without an index by time: once a sweep
            await database.execute(statement, before_ms)
        return pruned


def _given_rows(records: Sequence[LedgerRecord], epoch: int) -> tuple[list[rows.Row], list[rows.Row], list[rows.Row]]:
    """What the write statement takes: the rows of holds, of steps and of ends."""
    holds: list[rows.Row] = []
    steps: list[rows.Row] = []
    ends: list[rows.Row] = []
    last_seq = 0
    for record in records:
        assert record.seq > last_seq, "records are written in the order of their numbers"
        last_seq = record.seq
        if isinstance(record, HoldRecord):
            holds.append(rows.hold_row(record, epoch))
        elif isinstance(record, StepRecord):
            steps.append(statements.step_row(record))
        else:
            ends.append(statements.end_row(_storable(record), epoch))
    return holds, steps, ends


def _storable(end: EndRecord) -> EndRecord:
    """An end whose detail, which may quote an engine, is text as PostgreSQL takes it: without NUL and half characters."""
    detail = end.error_detail
    if detail is None:
        return end
    storable = detail.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    return end if storable == detail else msgspec.structs.replace(end, error_detail=storable)


def _usage_rows(query: UsageQuery, found: Iterable[Iterable[Any]]) -> list[UsageRow]:
    return rows.usage_rows(query, [tuple(map(_whole, row)) for row in found])


def _whole(value: Any) -> Any:
    """Sums of integers come as decimals."""
    return int(value) if isinstance(value, Decimal) else value
