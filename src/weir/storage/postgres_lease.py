"""The leader's lease in PostgreSQL: one row, the server's clock, and a connection that nothing else can delay.

It decides who may be the coordinator of the cell, each time in one statement, and gives up waiting early enough that two more
tries fit into the lease. It must never be the only thing between two coordinators: a lease can be lost unseen, while its
holder is paused, so the ledger's epoch fences what such a holder still writes.
"""

import asyncio
from contextlib import suppress

from weir import errors
from weir.storage.postgres_address import parse_address
from weir.storage.postgres_session import FAULTS, Connection, connect
from weir.units import Millis

OPERATION_MS: Millis = 600
"""How long an operation may take, whatever the lease; connecting is part of it."""
_TRIES = 3
"""Of a lease's time each try has this part at most: it is renewed as often."""
_CLOSE_MS: Millis = 1_000
_ISOLATION = "read committed"
"""Of two statements at once the second waits, and decides by what the first one left."""

# The time is taken once the row is locked, not before that wait: of a holder's own statements that overlap, none ends sooner
# than one that is answered promised.
_TAKE = """
INSERT INTO leader_lease AS lease (id, holder, until)
VALUES (1, $1, clock_timestamp() + $2::bigint * interval '1 millisecond')
ON CONFLICT (id) DO UPDATE SET holder = $1, until = clock_timestamp() + $2::bigint * interval '1 millisecond'
WHERE lease.holder = $1 OR lease.until <= clock_timestamp() OR $3::boolean
RETURNING true
"""
_GIVE_BACK = "DELETE FROM leader_lease WHERE holder = $1"
# Who waits holds a lock of its session, so that it ends with the process, whatever that one dies of.
_WAIT = "SELECT pg_advisory_lock_shared(1466263922, 1)"
_WAIT_NO_MORE = "SELECT pg_advisory_unlock_all()"
_IS_AWAITED = """
SELECT EXISTS (
    SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = 1466263922 AND objid = 1 AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
"""


class PostgresLeaderLease:
    """LeaderLease on a migrated database. operation_ms: what an operation may take at most.

    Raises InvalidRequest for an address that is none.
    """

    def __init__(self, address: str, operation_ms: Millis = OPERATION_MS) -> None:
        self._address = parse_address(address)
        self._operation_ms = operation_ms
        self._turn = asyncio.Lock()
        self._connection: Connection | None = None
        self._waits = False  # on this connection
        self._closed = False

    async def take(self, holder: str, ttl_ms: Millis, *, by_force: bool = False) -> bool:
        """Take or renew it for ttl_ms, if nobody else has it or by force; whether it is the holder's now.

        Raises LedgerUnavailable after ttl_ms / 3 at the latest; the lease may be the holder's all the same.
        """
        bound_ms = min(self._operation_ms, ttl_ms // _TRIES)
        taken = await self._run(bound_ms, _TAKE, holder, ttl_ms, by_force) is not None
        if taken is self._waits:
            with suppress(errors.LedgerUnavailable):  # the connection is gone, and with it what it said
                await self._run(bound_ms, _WAIT_NO_MORE if taken else _WAIT)
                self._waits = not taken
        return taken

    async def give_back(self, holder: str) -> None:
        """Let another one have it at once, if it is still this one's. Raises LedgerUnavailable."""
        await self._run(self._operation_ms, _GIVE_BACK, holder)

    async def is_awaited(self, holder: str) -> bool:
        """Whether another one that lives asked for it in vain. Raises LedgerUnavailable."""
        return bool(await self._run(self._operation_ms, _IS_AWAITED))

    async def _run(self, bound_ms: Millis, statement: str, *arguments: object) -> object:
        """The first value that a statement answers, after those asked for earlier."""
        try:
            async with asyncio.timeout(bound_ms / 1000), self._turn:
                return await self._ask(statement, *arguments)
        except FAULTS as fault:
            raise errors.LedgerUnavailable("The lease cannot be reached now.") from fault

    async def _ask(self, statement: str, *arguments: object) -> object:
        """A connection serves on only after an answer: any other end leaves it in doubt."""
        if self._closed:
            raise errors.LedgerUnavailable("The lease is closed.", not_written=True)
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            connection = await connect(self._address, self._operation_ms, default_transaction_isolation=_ISOLATION)
            self._waits = False
        try:
            answer: object = await connection.fetchval(statement, *arguments)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        return answer

    async def aclose(self) -> None:
        """Close the connection, after what was asked for, which is bounded. The lease stays whose it is. Idempotent."""
        self._closed = True
        async with self._turn:
            connection, self._connection = self._connection, None
            if connection is not None:
                with suppress(*FAULTS):
                    await connection.close(timeout=_CLOSE_MS / 1000)
