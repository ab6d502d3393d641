"""What one transaction of the catalog does, on whatever SQL database the connection leads to.

It decides that a change is one transaction with its audit entry, made only on the version its author saw. It must never write
the ledger's tables, though it shares their database.
"""

from dataclasses import asdict

from sqlalchemy import Connection, insert, select, update

from weir import errors
from weir.ports import AuditEntry, Catalog, CatalogChange
from weir.storage import catalog_rows as rows
from weir.storage import schema
from weir.units import Millis


def load(connection: Connection) -> Catalog:
    """The whole catalog; one consistent read where the connection's snapshots are."""
    with connection.begin():
        return Catalog(
            version=_version(connection),
            limits=rows.read_limits(connection),
            prices=rows.read_prices(connection),
            **{name: rows.read_entities(connection, name) for name in rows.ENTITIES},
        )


def version(connection: Connection) -> int:
    """The catalog's version, which every change raises by one."""
    with connection.begin():
        return _version(connection)


def _version(connection: Connection) -> int:
    return int(connection.execute(select(schema.CATALOG.c.version)).scalar_one())


def apply(expected_version: int, change: CatalogChange, connection: Connection) -> int:
    """Make a change with its audit entry on expected_version; the new version. Raises AlreadyExists where that is not it."""
    version = expected_version + 1
    catalog = schema.CATALOG
    with connection.begin():
        fenced = connection.execute(update(catalog).where(catalog.c.version == expected_version).values(version=version))
        if fenced.rowcount != 1:
            raise errors.AlreadyExists(f"The catalog is not at version {expected_version} any more.")
        for name in rows.ENTITIES:
            rows.replace_entities(connection, name, getattr(change, name))
        rows.replace_limits(connection, change.limits)
        rows.keep_prices(connection, change.revisions)
        connection.execute(insert(schema.AUDIT).values(version=version, **asdict(change.audit)))
    return version


def audit(limit: int, before_ms: Millis | None, subject: str | None, connection: Connection) -> list[AuditEntry]:
    """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
    table = schema.AUDIT
    wanted = select(table.c.at_ms, table.c.actor, table.c.action, table.c.subject, table.c.summary)
    if before_ms is not None:
        wanted = wanted.where(table.c.at_ms < before_ms)
    if subject is not None:
        wanted = wanted.where(table.c.subject == subject)
    with connection.begin():
        found = connection.execute(wanted.order_by(table.c.at_ms.desc(), table.c.id.desc()).limit(limit))
        return [AuditEntry(*row) for row in found]
