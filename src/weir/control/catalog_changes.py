"""What a catalog is after a change, without reading it back: a catalog of 100,000 keys takes a second to load.

Pure, and exactly what the store has then, in its order by key; the contract suite of the stores compares the two.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from weir.core.registry.model import CATALOG_KEYS, Revision, RevisionPrice
from weir.core.tenancy import Limits, Scope
from weir.ports import Catalog, CatalogChange

Row = TypeVar("Row")


def changed_catalog(catalog: Catalog, change: CatalogChange, version: int) -> Catalog:
    """The catalog with a change that the store applied to it, at its new version. What is not changed is shared."""
    return Catalog(
        version=version,
        limits=_with_limits(catalog.limits, change.limits),
        prices=_with_prices(catalog.prices, change.revisions),
        **{name: _merged(getattr(catalog, name), getattr(change, name), key_of) for name, key_of in CATALOG_KEYS.items()},
    )


def _merged(rows: Sequence[Row], changed: Sequence[Row], key_of: Callable[[Row], Any]) -> Sequence[Row]:
    """The rows with the changed ones in the place of those with their keys, in the order of the keys."""
    if not changed:
        return rows
    by_key = {key_of(row): row for row in changed}
    merged = [by_key.pop(key_of(row), row) for row in rows]
    for row in by_key.values():
        insort(merged, row, key=key_of)
    return merged


def _with_limits(
    entries: Sequence[tuple[Scope, Limits]], changed: Sequence[tuple[Scope, Limits]]
) -> Sequence[tuple[Scope, Limits]]:
    merged = _merged(entries, changed, lambda entry: entry[0].order)
    return [entry for entry in merged if not entry[1].is_empty] if changed else entries


def _with_prices(schedule: Sequence[RevisionPrice], revisions: Iterable[Revision]) -> Sequence[RevisionPrice]:
    """The schedule with the prices of these revisions: a version that it has is never changed."""
    known = {(entry.revision, entry.price.version) for entry in schedule}
    new = [RevisionPrice(each.id, each.price) for each in revisions if (each.id, each.price.version) not in known]
    return _merged(schedule, new, lambda entry: (entry.revision, entry.price.version))
