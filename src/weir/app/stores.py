"""Which stores a cell keeps its books in: SQLite in the state directory, or a PostgreSQL database.

It decides once, at start. Secrets, addresses and the lock are in the state directory in either case. PostgreSQL's driver is an
extra, imported only where it is asked for.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from weir import errors
from weir.config import StoreConfig
from weir.ports import ControlStore, LeaderLease, LedgerStore
from weir.storage.database import open_sqlite
from weir.storage.state_directory import StateDirectory


@dataclass(frozen=True, slots=True)
class Stores:
    """What a cell remembers by. lease: of its leader; None where the state directory's lock is enough."""

    directory: StateDirectory
    ledger: LedgerStore
    catalog: ControlStore
    lease: LeaderLease | None = None


@contextlib.asynccontextmanager
async def open_stores(path: Path, config: StoreConfig, announce: Callable[[str], None]) -> AsyncIterator[Stores]:
    """The state directory at path, locked, with the stores; released at the end. Raises StoreFault, InvalidRequest."""
    directory = StateDirectory(path)
    try:
        ledger, catalog, lease = await _open_database(directory, config, announce)
        try:
            yield Stores(directory, ledger, catalog, lease)
        finally:
            await ledger.aclose()
            await catalog.aclose()
            if lease is not None:
                await lease.aclose()
    finally:
        directory.close()


async def _open_database(
    directory: StateDirectory, config: StoreConfig, announce: Callable[[str], None]
) -> tuple[LedgerStore, ControlStore, LeaderLease | None]:
    if config.url is None:
        return *open_sqlite(directory.database), None
    try:
        from weir.storage.postgres_address import parse_address
        from weir.storage.postgres_database import open_postgres
        from weir.storage.postgres_lease import PostgresLeaderLease
    except ImportError as missing:
        raise errors.InvalidRequest("A PostgreSQL database needs its driver: install weir[postgres].") from missing
    announce(f"database {parse_address(config.url).shown}")
    return *await open_postgres(config.url), PostgresLeaderLease(config.url)
