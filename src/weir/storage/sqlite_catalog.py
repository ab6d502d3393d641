"""The catalog in SQLite: what was approved and who changed it, on a connection and a thread of its own.

It decides that a change is one transaction with its audit entry, made only on the version its author saw. It must never write
the ledger's tables, though it shares their file.
"""

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from weir.ports import AuditEntry, Catalog, CatalogChange
from weir.storage import catalog_transactions as work
from weir.storage.sqlite_ledger import LOCK_WAIT_MS, connect
from weir.storage.store_thread import StoreThread
from weir.units import Millis


def create_sqlite_engine(opening: Callable[[], sqlite3.Connection]) -> Engine:
    """An engine that opens its connections so, keeps none, and begins transactions truly (the driver would only at a write)."""
    engine = create_engine("sqlite://", creator=opening, poolclass=NullPool)
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


class SqliteCatalog:
    """ControlStore on a migrated database file. Every method raises LedgerUnavailable where the store cannot be used."""

    def __init__(self, path: Path, lock_wait_ms: Millis = LOCK_WAIT_MS) -> None:
        engine = create_sqlite_engine(partial(connect, path, lock_wait_ms))
        self._thread = StoreThread("catalog", engine.connect, SQLAlchemyError, IntegrityError)

    async def load(self) -> Catalog:
        """The whole catalog in one consistent read."""
        return await self._thread.run(work.load)

    async def version(self) -> int:
        """The catalog's version, which every change raises by one."""
        return await self._thread.run(work.version)

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        """Apply a change if the catalog is still at expected_version; the new version. Raises AlreadyExists when it is not."""
        return await self._thread.run(partial(work.apply, expected_version, change))

    async def audit(self, limit: int, before_ms: Millis | None = None, subject: str | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
        return await self._thread.run(partial(work.audit, limit, before_ms, subject))

    async def aclose(self) -> None:
        """Finish what was asked for and close the connection. Idempotent."""
        await self._thread.aclose()
