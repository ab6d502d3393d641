"""The catalog in PostgreSQL: what was approved and who changed it, on a few connections of its own.

It decides how the catalog's transactions run on the event loop's driver, and which snapshots they see. It must never write the
ledger's tables, though it shares their database.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from weir import errors
from weir.ports import AuditEntry, Catalog, CatalogChange
from weir.storage import catalog_transactions as work
from weir.storage.postgres_address import parse_address
from weir.storage.postgres_session import FAULTS, STATEMENT_MS, connect
from weir.units import Millis

_CONNECTIONS = 2
T = TypeVar("T")


def create_postgres_engine(address: str, statement_ms: Millis = STATEMENT_MS) -> AsyncEngine:
    """An engine on our own connections: few, and each asked whether it still lives before it is used. Raises InvalidRequest."""
    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=partial(connect, parse_address(address), statement_ms),
        pool_size=_CONNECTIONS,
        max_overflow=0,
        pool_timeout=statement_ms / 1000,
        pool_pre_ping=True,
        hide_parameters=True,
    )


class PostgresCatalog:
    """ControlStore on a migrated database. Every method raises LedgerUnavailable where the store cannot be used."""

    def __init__(self, address: str, statement_ms: Millis = STATEMENT_MS) -> None:
        self._engine = create_postgres_engine(address, statement_ms)
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._closed = False

    async def load(self) -> Catalog:
        """The whole catalog in one consistent read."""
        return await self._run(self._reading, work.load)

    async def version(self) -> int:
        """The catalog's version, which every change raises by one."""
        return await self._run(self._engine, work.version)

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        """Apply a change if the catalog is still at expected_version; the new version. Raises AlreadyExists when it is not."""
        return await self._run(self._engine, partial(work.apply, expected_version, change))

    async def audit(self, limit: int, before_ms: Millis | None = None, subject: str | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
        return await self._run(self._engine, partial(work.audit, limit, before_ms, subject))

    async def _run(self, engine: AsyncEngine, transaction: Callable[[Connection], T]) -> T:
        if self._closed:
            raise errors.LedgerUnavailable("The store is closed.")
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(transaction)
        except IntegrityError as broken:
            raise AssertionError("the database refused a row that breaks an invariant") from broken
        except (SQLAlchemyError, *FAULTS) as fault:
            raise errors.LedgerUnavailable("The store cannot be used now.") from fault

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        await self._engine.dispose()
