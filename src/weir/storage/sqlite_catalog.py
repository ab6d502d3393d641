"""The catalog in SQLite: what was approved and who changed it, on a connection and a thread of its own.

It decides that a change is one transaction with its audit entry, made only on the version its author saw. It must never write
the ledger's tables, though it shares their file.
"""

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from weir import errors
from weir.ports import AuditEntry, Catalog, CatalogChange
from weir.storage import catalog_rows as rows
from weir.storage import schema
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
        return await self._thread.run(_load)

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        """Apply a change if the catalog is still at expected_version; the new version. Raises AlreadyExists when it is not."""
        return await self._thread.run(partial(_apply, expected_version, change))

    async def audit(self, limit: int, before_ms: Millis | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; before_ms: only those before that time."""
        return await self._thread.run(partial(_audit, limit, before_ms))

    async def aclose(self) -> None:
        """Finish what was asked for and close the connection. Idempotent."""
        await self._thread.aclose()


def _load(connection: Connection) -> Catalog:
    with connection.begin():
        return Catalog(
            version=connection.execute(select(schema.CATALOG.c.version)).scalar_one(),
            limits=rows.read_limits(connection),
            **{name: rows.read_entities(connection, name) for name in rows.ENTITIES},
        )


def _apply(expected_version: int, change: CatalogChange, connection: Connection) -> int:
    version = expected_version + 1
    catalog = schema.CATALOG
    with connection.begin():
        fenced = connection.execute(update(catalog).where(catalog.c.version == expected_version).values(version=version))
        if fenced.rowcount != 1:
            raise errors.AlreadyExists(f"The catalog is not at version {expected_version} any more.")
        for name in rows.ENTITIES:
            rows.replace_entities(connection, name, getattr(change, name))
        rows.replace_limits(connection, change.limits)
        audit = change.audit
        connection.execute(
            insert(schema.AUDIT).values(
                version=version,
                at_ms=audit.at_ms,
                actor=audit.actor,
                action=audit.action,
                subject=audit.subject,
                summary=audit.summary,
            )
        )
    return version


def _audit(limit: int, before_ms: Millis | None, connection: Connection) -> list[AuditEntry]:
    table = schema.AUDIT
    wanted = select(table.c.at_ms, table.c.actor, table.c.action, table.c.subject, table.c.summary)
    if before_ms is not None:
        wanted = wanted.where(table.c.at_ms < before_ms)
    with connection.begin():
        found = connection.execute(wanted.order_by(table.c.at_ms.desc(), table.c.id.desc()).limit(limit))
        return [AuditEntry(*row) for row in found]
