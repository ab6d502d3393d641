"""Opening a PostgreSQL database: migrate it, one starter at a time, and hand out the two stores on it.

It decides whether this version may work on a database, and that text is compared there byte by byte, as on SQLite, whatever
locale its owner created it with. It must never show an address's password.
"""

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from weir import errors
from weir.storage.database import migrate
from weir.storage.postgres_address import parse_address
from weir.storage.postgres_catalog import PostgresCatalog, create_postgres_engine
from weir.storage.postgres_ledger import PostgresLedger
from weir.storage.postgres_session import FAULTS, why_unusable
from weir.storage.schema import METADATA
from weir.units import Millis

_MIGRATION_MS: Millis = 120_000
"""How long a statement of a migration, or the wait for another starter's, may take."""
_LOCK = 0x57656972
"""The advisory lock of whoever migrates: the letters of our name."""

_TEXT_BY_LOCALE = text(
    "SELECT table_name, string_agg(format('ALTER COLUMN %I TYPE text COLLATE \"C\"', column_name), ', ') "
    "FROM information_schema.columns WHERE table_schema = current_schema() AND data_type = 'text' "
    "AND collation_name IS DISTINCT FROM 'C' AND table_name = ANY (:names) GROUP BY table_name"
)


async def open_postgres(address: str) -> tuple[PostgresLedger, PostgresCatalog]:
    """The stores on the database at a URL, migrated first. Raises InvalidRequest, StateUnreadable."""
    await prepare_postgres(address)
    return PostgresLedger(address), PostgresCatalog(address)


async def prepare_postgres(address: str) -> None:
    """Bring a database to this version; starters wait for each other. Raises InvalidRequest, StateUnreadable."""
    shown = parse_address(address).shown
    engine = create_postgres_engine(address, _MIGRATION_MS)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_prepare, shown)
    except (SQLAlchemyError, *FAULTS) as fault:
        driver_fault = fault.orig.__cause__ if isinstance(fault, DBAPIError) and fault.orig else fault
        raise errors.StateUnreadable(f"The database {shown} cannot be opened: {why_unusable(driver_fault)}.") from fault
    finally:
        await engine.dispose()


def _prepare(connection: Connection, shown: str) -> None:
    encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise errors.StateUnreadable(f"The database {shown} is encoded as {encoding}; Weir needs UTF8.")
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    migrate(connection, shown)
    _compare_by_bytes(connection)


def _compare_by_bytes(connection: Connection) -> None:
    for table, changes in connection.execute(_TEXT_BY_LOCALE, {"names": sorted(METADATA.tables)}).all():
        connection.execute(text(f"ALTER TABLE {table} {changes}"))
