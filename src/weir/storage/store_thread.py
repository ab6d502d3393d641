"""A thread that owns one database connection and runs one piece of work at a time, off the event loop.

It decides when to reconnect: after any fault of the database the connection is dropped, and the next work opens a fresh one, so
that a store recovers by itself when a full disk, a lock or a missing file goes away. It must never repeat work; its callers
know what may be repeated.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from weir import errors


class Closable(Protocol):
    """A connection as this module sees it."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)
T = TypeVar("T")


class StoreThread(Generic[C]):
    """connect: opens the connection, on the thread. faults: what the database raises. broken: those that are our bugs."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], C],
        faults: type[Exception],
        broken: type[Exception],
    ) -> None:
        self._connect = connect
        self._faults = faults
        self._broken = broken
        self._connection: C | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._closed = False

    async def run(self, work: Callable[[C], T]) -> T:
        """work's result, after all work asked for earlier. Raises LedgerUnavailable for a database fault, or once closed.

        A caller that is cancelled does not stop work that has begun.
        """
        if self._closed:
            raise errors.LedgerUnavailable("The store is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)

    def _run(self, work: Callable[[C], T]) -> T:
        try:
            return work(self._connection or self._open())
        except self._broken as broken:
            self._drop()
            raise AssertionError("the database refused a row that breaks an invariant") from broken
        except self._faults as fault:
            self._drop()
            raise errors.LedgerUnavailable("The store cannot be used now.") from fault
        except BaseException:
            self._drop()
            raise

    def _open(self) -> C:
        try:
            self._connection = self._connect()
        except self._faults as fault:
            raise errors.LedgerUnavailable("The store cannot be opened now.", not_written=True) from fault
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._faults):
                connection.close()

    async def aclose(self) -> None:
        """Finish the work that was asked for, close the connection, end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._drop)
            self._executor.shutdown()
