"""Opening a store only to read it, beside the platform that writes it: for the check of its ledger.

It decides whether this version understands what is stored. It takes no lock, migrates nothing and changes nothing, so that it
may run at any time; a database of another version is refused, because its columns mean something else.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from alembic.script import ScriptDirectory

from weir import errors
from weir.ports import LedgerReport
from weir.storage import ledger_audit
from weir.storage.postgres_address import parse_address
from weir.storage.state_directory import DATABASE_FILE
from weir.units import Millis

_MIGRATIONS = Path(__file__).parent / "migrations"
_SCHEMA = "SELECT version_num FROM alembic_version"
_LOCK_WAIT_MS: Millis = 5_000
"""A reader waits only while a cell opens or closes the file."""
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PRIMARY_CODE = 0xFF


async def verify_state(state: Path, lock_wait_ms: Millis = _LOCK_WAIT_MS) -> LedgerReport:
    """Recount the ledger of a state directory in one consistent read. Raises StateUnreadable."""
    return await asyncio.to_thread(_verify_file, state / DATABASE_FILE, lock_wait_ms)


def _verify_file(path: Path, lock_wait_ms: Millis) -> LedgerReport:
    if not path.is_file():
        raise errors.StateUnreadable(f"There is no database {path}.")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=lock_wait_ms / 1000)) as database:
            database.execute("BEGIN")
            _check_schema(str(path), [row[0] for row in database.execute(_SCHEMA)])
            return ledger_audit.examine(lambda statement, given: database.execute(statement, given).fetchall())
    except sqlite3.Error as fault:
        if getattr(fault, "sqlite_errorcode", 0) & _PRIMARY_CODE in _LOCKED:
            raise errors.StateUnreadable(f"The database {path} is locked by another program: try again.") from fault
        raise errors.StateUnreadable(f"The database {path} cannot be read, or is damaged.") from fault


async def verify_database(address: str) -> LedgerReport:
    """Recount the ledger of a PostgreSQL database in one consistent read.

    Raises InvalidRequest for another address, StateUnreadable, LedgerUnavailable.
    """
    where = parse_address(address)
    try:
        from weir.storage.postgres_ledger import PostgresLedger
        from weir.storage.postgres_session import FAULTS, connect, why_unusable
    except ImportError as absent:
        raise errors.StateUnreadable("PostgreSQL needs the extra weir[postgres].") from absent
    try:
        connection = await connect(where)
        try:
            stored = [row[0] for row in await connection.fetch(_SCHEMA)]
        finally:
            connection.terminate()
    except FAULTS as fault:
        raise errors.StateUnreadable(f"The database {where.shown} cannot be read: {why_unusable(fault)}.") from fault
    _check_schema(where.shown, stored)
    ledger = PostgresLedger(address)
    try:
        return await ledger.verify()
    finally:
        await ledger.aclose()


def _check_schema(shown: str, stored: Sequence[str]) -> None:
    known = ScriptDirectory(str(_MIGRATIONS)).get_current_head()
    if list(stored) != [known]:
        found = ", ".join(stored) or "none"
        raise errors.StateUnreadable(
            f"The database {shown} has schema {found}, and this version of Weir reads schema {known}: "
            "use the version that runs the cell."
        )
