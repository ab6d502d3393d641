"""A snapshot in parts, as a gateway gets it: what differs from the one that it has, few rows at a time.

A gateway needs who may ask and what a name means. Limits and the price schedule stay with the coordinator, which decides. Rows
are compared by value, so the same change read twice is told once. Parts of one change arrive in order, and nothing is in force
before the last one.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec

from weir.core.registry.model import Alias, Pool, Revision, WorkloadClass
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Tenant

Key = TypeVar("Key")
Row = TypeVar("Row")

ROWS_PER_PART = 2_000
"""About 300 kB: a part delays what is behind it on a link by a few milliseconds."""

_TABLES = ("tenants", "applications", "keys", "aliases", "revisions", "pools")


class SnapshotPart(msgspec.Struct, frozen=True, tag="snapshot_part", omit_defaults=True):
    """Part of the change from version base to version. base 0: from nothing. Rows replace those of the same key.

    gone: (table, key) of rows that are no more. is_last: the change is complete. workload_classes: with the last part only.
    """

    base: int
    version: int
    is_last: bool = False
    tenants: tuple[Tenant, ...] = ()
    applications: tuple[Application, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    aliases: tuple[Alias, ...] = ()
    revisions: tuple[Revision, ...] = ()
    pools: tuple[Pool, ...] = ()
    gone_tenants: tuple[str, ...] = ()
    gone_applications: tuple[tuple[str, str], ...] = ()
    gone_keys: tuple[bytes, ...] = ()
    gone_aliases: tuple[str, ...] = ()
    gone_revisions: tuple[str, ...] = ()
    gone_pools: tuple[str, ...] = ()
    workload_classes: tuple[WorkloadClass, ...] = ()


def parts_between(before: Snapshot, after: Snapshot, rows_max: int = ROWS_PER_PART) -> Iterator[SnapshotPart]:
    """What turns one snapshot into another, at least one part. rows_max ≥ 1. Linear in the rows of both."""
    differences = chain.from_iterable(_differences(getattr(before, table), getattr(after, table), table) for table in _TABLES)
    rows: list[tuple[str, Any]] = []
    room = rows_max
    for name, row in differences:
        weight = _weight(row)
        if rows and weight > room:
            yield _part(before.version, after, rows, is_last=False)
            rows, room = [], rows_max
        rows.append((name, row))
        room -= weight
    yield _part(before.version, after, rows, is_last=True)


def _weight(row: Any) -> int:
    """How many rows it counts for: a list in one has no bound of its own, and a part must fit a frame."""
    match row:
        case Application(aliases=frozenset() as aliases):
            return 1 + len(aliases)
        case Pool():
            return 1 + len(row.urls)
    return 1


def _differences(before: Mapping[Key, Row], after: Mapping[Key, Row], table: str) -> Iterator[tuple[str, Any]]:
    for key, row in after.items():
        known = before.get(key)
        if known is not row and known != row:
            yield table, row
    for key in before:
        if key not in after:
            yield f"gone_{table}", key


def _part(base: int, after: Snapshot, rows: list[tuple[str, Any]], *, is_last: bool) -> SnapshotPart:
    columns: dict[str, list[Any]] = {}
    for name, row in rows:
        columns.setdefault(name, []).append(row)
    found = {name: tuple(column) for name, column in columns.items()}
    classes = after.workload_classes if is_last else ()
    return SnapshotPart(base=base, version=after.version, is_last=is_last, workload_classes=classes, **found)


class SnapshotAssembly:
    """Puts snapshots together from their parts. current: the last one that is complete."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self._tables: dict[str, dict[Any, Any]] | None = None

    def take(self, part: SnapshotPart) -> Snapshot | None:
        """The snapshot that the part completes, or None. A change that starts from nothing replaces everything."""
        if self._tables is None:
            base = Snapshot() if part.base == 0 else self.current
            assert part.base in (0, base.version)
            self._tables = {table: dict(getattr(base, table)) for table in _TABLES}
        tables = self._tables
        for table, key_of in _KEYS.items():
            for row in getattr(part, table):
                tables[table][key_of(row)] = row
            for key in getattr(part, f"gone_{table}"):
                tables[table].pop(key, None)
        if not part.is_last:
            return None
        self._tables = None
        self.current = Snapshot(version=part.version, workload_classes=part.workload_classes, **tables)
        return self.current


_KEYS: dict[str, Any] = {
    "tenants": lambda row: row.name,
    "applications": lambda row: (row.tenant, row.name),
    "keys": lambda row: row.secret_sha256,
    "aliases": lambda row: row.name,
    "revisions": lambda row: row.id,
    "pools": lambda row: row.name,
}
