"""Opening a SQLite database: create or migrate it, check it, and hand out the two stores that share it.

It decides whether this version may work on a file: damaged or newer ones are refused before anything is written to
them. It runs once at start, synchronously, under the lock of the state directory.
"""

import os
import sqlite3
from functools import partial
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from weir import errors
from weir.storage.sqlite_catalog import SqliteCatalog, create_sqlite_engine
from weir.storage.sqlite_ledger import SqliteLedger, connect
from weir.units import Bytes

_MIGRATIONS = Path(__file__).parent / "migrations"
_CHECKED_BYTES_MAX: Bytes = 256 * 2**20
"""A full check reads every page: about a second at this size. A larger file is checked page by page as it is read."""


def open_sqlite(path: Path) -> tuple[SqliteLedger, SqliteCatalog]:
    """The stores on the database at path, created (mode 0600) or migrated first. Raises StateUnreadable."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _prepare(path)
    except (OSError, SQLAlchemyError, sqlite3.Error) as fault:
        raise errors.StateUnreadable(f"The database {path} cannot be opened, or is damaged.") from fault
    return SqliteLedger(path), SqliteCatalog(path)


def _prepare(path: Path) -> None:
    engine = create_sqlite_engine(partial(connect, path))
    with engine.connect() as connection:
        _refuse_damaged(connection, path)
        with connection.begin():
            migrate(connection, str(path))


def _refuse_damaged(connection: Connection, path: Path) -> None:
    if path.stat().st_size > _CHECKED_BYTES_MAX:
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    connection.rollback()
    if found != "ok":
        raise errors.StateUnreadable(f"The database {path} is damaged. Restore it from a backup.")


def migrate(connection: Connection, shown: str) -> None:
    """Bring a schema to this version, in the caller's transaction. shown: its database. Raises StateUnreadable if newer."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in known:
        raise errors.StateUnreadable(f"The database {shown} was written by a newer version of Weir (schema {current}).")
    command.upgrade(config, "head")
