"""A few connections to one PostgreSQL database, each running one piece of work at a time, on the event loop.

It decides when to reconnect: after any fault the connection is dropped and the next work opens a fresh one, so that a store
recovers by itself. It decides what a fault means: an error that the server answered wrote nothing, a connection that was lost
leaves the outcome unknown. It must never repeat work, nor show an address's password; its callers know what may be repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias, TypeVar

import asyncpg
from asyncpg.exceptions import ClientConfigurationError
from asyncpg.exceptions._base import DataError as UnencodableError
from asyncpg.exceptions._base import InternalClientError

from weir import errors
from weir.storage.postgres_address import Address, parse_address
from weir.units import Millis

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Work: TypeAlias = Callable[[Connection], Awaitable[T]]

STATEMENT_MS: Millis = 2_000
"""The server gives a statement up after this; whoever waits for a record has the same bound."""
CONNECT_MS: Millis = 2_000
_GRACE_MS: Millis = 1_000
"""How much later than the server the client gives up: then the connection is dead, and the outcome unknown."""
_IDLE_IN_TRANSACTION_MS: Millis = 10_000
"""A writer that is paused inside a transaction must not keep the cell's row from its successor."""

FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, InternalClientError)
"""Everything that the driver raises when the database, or the way to it, fails; also what it calls its own fault: a connection
that is cut in the middle of an answer."""
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
_OUTCOME_UNKNOWN = ("08", "57P", "40003")
"""States in which the server may have committed before the connection ended."""
_BROKEN = ("22", "23")
"""States of rows that can never be written: they break an invariant."""


async def connect(address: Address, statement_ms: Millis = STATEMENT_MS, opening: str = "", **settings: str) -> Connection:
    """A durable connection whose statements are bounded, on the server and here. opening: SQL first. Raises one of FAULTS."""
    bounds = {
        "application_name": "weir",
        "jit": "off",
        "statement_timeout": str(statement_ms),
        "idle_in_transaction_session_timeout": str(_IDLE_IN_TRANSACTION_MS),
    }
    try:
        connection: Connection = await asyncpg.connect(
            **address.arguments(),
            timeout=CONNECT_MS / 1000,
            command_timeout=(statement_ms + _GRACE_MS) / 1000,
            max_cacheable_statement_size=0,  # no bound: ours are few and long
            max_cached_statement_lifetime=0,
            server_settings=bounds | settings,
        )
    except FAULTS:
        raise
    except (ValueError, OverflowError, KeyError) as fault:  # an odd host name, a setting of the environment, an unknown user
        raise ClientConfigurationError("an address or a setting that cannot be one") from fault
    try:
        await connection.execute(f"{_DURABLE}; {opening}")
    except BaseException:
        connection.terminate()
        raise
    return connection


def _ended_unheard(task: "asyncio.Task[T]") -> None:
    """That the store failed is nobody's news once the caller is gone; whatever else it was, the loop hears."""
    fault = None if task.cancelled() else task.exception()
    if fault is not None and not isinstance(fault, errors.WeirError):
        task.get_loop().call_exception_handler(
            {"message": "Work failed whose caller is gone", "exception": fault, "task": task}
        )


class PostgresSession:
    """connections: how many pieces of work run at once. opening: SQL for each new one. settings: of the server, for them.

    Raises InvalidRequest for an address that is none.
    """

    def __init__(
        self, address: str, connections: int = 1, statement_ms: Millis = STATEMENT_MS, opening: str = "", **settings: str
    ) -> None:
        self._address = parse_address(address)
        self._statement_ms = statement_ms
        self._opening = opening
        self._settings = settings
        self._room = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    async def run(self, work: Work[T]) -> T:
        """work's result; with one connection, after all work asked for earlier. Raises LedgerUnavailable, or what work raises.

        A caller that is cancelled does not stop work that has begun. A row that breaks an invariant is an AssertionError.
        """
        if self._closed:
            raise errors.LedgerUnavailable("The store is closed.", not_written=True)
        task = asyncio.get_running_loop().create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_ended_unheard)
            raise

    async def _run(self, work: Work[T]) -> T:
        async with self._room:
            connection = await self._take()
            try:
                result = await work(connection)
            except FAULTS as fault:
                connection.terminate()
                raise _translated(fault) from fault
            except BaseException:
                connection.terminate()
                raise
            self._idle.append(connection)
            return result

    async def _take(self) -> Connection:
        while self._idle:  # bounded by the number of connections
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        try:
            return await connect(self._address, self._statement_ms, self._opening, **self._settings)
        except FAULTS as fault:
            raise errors.LedgerUnavailable("The store cannot be opened now.", not_written=True) from fault

    async def aclose(self) -> None:
        """Finish the work that was asked for, which is bounded, and close every connection. Idempotent."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._idle:
            connection = self._idle.pop()
            with suppress(*FAULTS):
                await connection.close(timeout=_GRACE_MS / 1000)


def _translated(fault: Exception) -> Exception:
    state = str(fault.sqlstate) if isinstance(fault, asyncpg.PostgresError) else ""
    if state.startswith(_BROKEN) or isinstance(fault, UnencodableError):
        return AssertionError("the database refused a row that breaks an invariant")
    not_written = bool(state) and not state.startswith(_OUTCOME_UNKNOWN)
    return errors.LedgerUnavailable("The store cannot be used now.", not_written=not_written)


def why_unusable(fault: BaseException | None) -> str:
    """A fault of the driver in words for an operator: never an address or a password."""
    if isinstance(fault, ClientConfigurationError):
        return "its address is not valid"
    if isinstance(fault, asyncpg.PostgresError):
        return str(fault).splitlines()[0].rstrip(".")
    if isinstance(fault, TimeoutError):
        return "no answer in time"
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return "no connection"
