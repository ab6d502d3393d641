"""A snapshot in parts: what differs from the one that the other side has, few rows at a time.

A gateway needs who may ask and what a name means, and gets `SnapshotPart`. The coordinator, which decides, needs limits and
the price schedule too, and gets `WholePart` from control; a gateway's part has no place for them. Rows are compared by value,
so the same change read twice is told once. Parts of one change arrive in order, and nothing is in force before the last one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import msgspec

from weir.core.registry.model import Alias, Pool, Revision, RevisionPrice, WorkloadClass
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Limits, Scope, Tenant

Key = TypeVar("Key")
Row = TypeVar("Row")
Part = TypeVar("Part", bound="SnapshotPart")

ROWS_PER_PART = 2_000
"""About 300 kB: a part delays what is behind it on a link by a few milliseconds."""


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
    tenant_aliases: tuple[Alias, ...] = ()
    revisions: tuple[Revision, ...] = ()
    pools: tuple[Pool, ...] = ()
    gone_tenants: tuple[str, ...] = ()
    gone_applications: tuple[tuple[str, str], ...] = ()
    gone_keys: tuple[bytes, ...] = ()
    gone_aliases: tuple[str, ...] = ()
    gone_tenant_aliases: tuple[tuple[str, str], ...] = ()
    gone_revisions: tuple[str, ...] = ()
    gone_pools: tuple[str, ...] = ()
    workload_classes: tuple[WorkloadClass, ...] = ()


class WholePart(SnapshotPart, frozen=True, tag="whole_part", omit_defaults=True):
    """The same with limits and the price schedule: for the coordinator alone."""

    limits: tuple[tuple[Scope, Limits], ...] = ()
    prices: tuple[RevisionPrice, ...] = ()
    gone_limits: tuple[Scope, ...] = ()
    gone_prices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """One mapping of a snapshot in rows. row_of: of a key and its value; item_of: the key and the value of a row."""

    row_of: Callable[[Any, Any], Any]
    item_of: Callable[[Any], tuple[Any, Any]]


def _keyed(key_of: Callable[[Any], Any]) -> _Table:
    """A table whose values have their keys in them."""
    return _Table(lambda key, value: value, lambda row: (key_of(row), row))


_TOLD: Mapping[str, _Table] = {
    "tenants": _keyed(lambda tenant: tenant.name),
    "applications": _keyed(lambda application: (application.tenant, application.name)),
    "keys": _keyed(lambda key: key.secret_sha256),
    "aliases": _keyed(lambda alias: alias.name),
    "tenant_aliases": _keyed(lambda alias: (alias.tenant, alias.name)),
    "revisions": _keyed(lambda revision: revision.id),
    "pools": _keyed(lambda pool: pool.name),
}
_WHOLE: Mapping[str, _Table] = {
    **_TOLD,
    "limits": _Table(lambda scope, limits: (scope, limits), lambda row: row),
    "prices": _Table(
        lambda key, price: RevisionPrice(key[0], price), lambda row: ((row.revision, row.price.version), row.price)
    ),
}


def _tables_of(kind: type[SnapshotPart]) -> Mapping[str, _Table]:
    """The tables that a kind of part has columns for."""
    return _WHOLE if issubclass(kind, WholePart) else _TOLD


def parts_between(before: Snapshot, after: Snapshot, rows_max: int = ROWS_PER_PART) -> Iterator[SnapshotPart]:
    """What turns a gateway's snapshot into another, at least one part. rows_max ≥ 1. Linear in the rows of both."""
    return _parts(SnapshotPart, before, after, rows_max)


def whole_parts_between(before: Snapshot, after: Snapshot, rows_max: int = ROWS_PER_PART) -> Iterator[WholePart]:
    """The same for the coordinator, with limits and prices."""
    return _parts(WholePart, before, after, rows_max)


def _parts(kind: type[Part], before: Snapshot, after: Snapshot, rows_max: int) -> Iterator[Part]:
    differences = chain.from_iterable(
        _differences(getattr(before, name), getattr(after, name), name, table) for name, table in _tables_of(kind).items()
    )
    rows: list[tuple[str, Any]] = []
    room = rows_max
    for column, row in differences:
        weight = _weight(row)
        if rows and weight > room:
            yield _part(kind, before.version, after, rows)
            rows, room = [], rows_max
        rows.append((column, row))
        room -= weight
    last = _part(kind, before.version, after, rows)
    yield msgspec.structs.replace(last, is_last=True, workload_classes=after.workload_classes)


def _weight(row: Any) -> int:
    """How many rows it counts for: a list in one has no bound of its own, and a part must fit a frame."""
    match row:
        case Application(aliases=frozenset() as aliases):
            return 1 + len(aliases)
        case Pool():
            return 1 + len(row.urls)
    return 1


def _differences(before: Mapping[Key, Row], after: Mapping[Key, Row], name: str, table: _Table) -> Iterator[tuple[str, Any]]:
    for key, value in after.items():
        known = before.get(key)
        if known is not value and known != value:
            yield name, table.row_of(key, value)
    for key in before:
        if key not in after:
            yield f"gone_{name}", key


def _part(kind: type[Part], base: int, after: Snapshot, rows: list[tuple[str, Any]]) -> Part:
    columns: dict[str, list[Any]] = {}
    for column, row in rows:
        columns.setdefault(column, []).append(row)
    found: dict[str, Any] = {column: tuple(content) for column, content in columns.items()}
    return kind(base=base, version=after.version, **found)


class SnapshotAssembly:
    """Puts snapshots together from their parts. current: the last one that is complete."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self._base: Snapshot | None = None
        self._changed: dict[str, dict[Any, Any]] = {}

    def take(self, part: SnapshotPart) -> Snapshot | None:
        """The snapshot that the part completes, or None. A change that starts from nothing replaces everything.

        Tables in which nothing changes are shared with the one before.
        """
        if self._base is None:
            self._base = Snapshot() if part.base == 0 else self.current
            assert part.base in (0, self._base.version)
        for name, table in _tables_of(type(part)).items():
            rows, gone = getattr(part, name), getattr(part, f"gone_{name}")
            if rows or gone:
                self._change(self._base, name, map(table.item_of, rows), gone)
        if not part.is_last:
            return None
        changed: dict[str, Any] = self._changed
        self.current = replace(self._base, version=part.version, workload_classes=part.workload_classes, **changed)
        self._base, self._changed = None, {}
        return self.current

    def _change(self, base: Snapshot, name: str, items: Iterable[tuple[Any, Any]], gone: Iterable[Any]) -> None:
        content = self._changed.get(name)
        if content is None:
            content = self._changed[name] = getattr(base, name).copy()  # a proxy's own: no key is hashed again
        content.update(items)
        for key in gone:
            content.pop(key, None)
