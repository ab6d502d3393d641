"""How the catalog's values become table rows and rows become values again; shared by every SQL control store.

It decides nothing: a field of a value is a column of the same name, except that a price is spread over five columns, a
scope's limits are one row each, and what is shared has an empty tenant where that is part of a key. Replacing is deleting by
key and inserting, which every database can do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, Table, bindparam, delete, insert, select

from weir.core.metering import Price
from weir.core.registry.key_ring import SigningKey
from weir.core.registry.model import Alias, Pool, Revision, RevisionPrice
from weir.core.registry.rollout_record import Rollout
from weir.core.tenancy import AdminKey, ApiKey, Application, Limits, Scope, Tenant
from weir.storage import schema

Entity: TypeAlias = Tenant | Application | ApiKey | AdminKey | Alias | Revision | Pool | SigningKey | Rollout

ENTITIES: Mapping[str, tuple[Table, type[Entity]]] = {
    "tenants": (schema.TENANT, Tenant),
    "applications": (schema.APPLICATION, Application),
    "keys": (schema.API_KEY, ApiKey),
    "admin_keys": (schema.ADMIN_KEY, AdminKey),
    "aliases": (schema.ALIAS, Alias),
    "revisions": (schema.REVISION, Revision),
    "pools": (schema.POOL, Pool),
    "signing_keys": (schema.SIGNING_KEY, SigningKey),
    "rollouts": (schema.ROLLOUT, Rollout),
}
"""Each sequence of a catalog with its table and type."""

_PRICE_PREFIX = "price_"
_SCOPE_PARTS = tuple(field.name for field in fields(Scope))


def read_entities(connection: Connection, name: str) -> list[Any]:
    """Every value of one of the catalog's sequences, ordered by key."""
    table, kind = ENTITIES[name]
    found = connection.execute(select(table).order_by(*table.primary_key))
    return [_value(kind, {str(column): value for column, value in row.items()}) for row in found.mappings()]


def replace_entities(connection: Connection, name: str, values: Sequence[Entity]) -> None:
    """Insert values, in place of those with the same keys."""
    if not values:
        return
    table, _ = ENTITIES[name]
    rows = [_row(value) for value in values]
    keys = [column.name for column in table.primary_key]
    matches = [table.c[key] == bindparam(f"key_{key}") for key in keys]
    connection.execute(delete(table).where(*matches), [{f"key_{key}": row[key] for key in keys} for row in rows])
    connection.execute(insert(table), rows)


def _row(value: Entity) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    if isinstance(value, Application) and value.aliases is not None:
        row["aliases"] = sorted(value.aliases)
    if isinstance(value, SigningKey):
        row["roles"] = sorted(value.roles)
    if isinstance(value, Alias):
        row["tenant"] = value.tenant or ""
    for name, amount in row.pop("price", {}).items():
        row[_PRICE_PREFIX + name] = amount
    return row


def _value(kind: type[Entity], row: dict[str, Any]) -> Entity:
    if kind is Revision:
        names = [name for name in row if name.startswith(_PRICE_PREFIX)]
        row["price"] = {name.removeprefix(_PRICE_PREFIX): row.pop(name) for name in names}
    if kind is Alias:
        row["tenant"] = row["tenant"] or None
    return msgspec.convert(row, kind, builtin_types=(bytes,))


def read_prices(connection: Connection) -> list[RevisionPrice]:
    """The whole price schedule, by revision and version."""
    found = connection.execute(select(schema.PRICE).order_by(*schema.PRICE.primary_key))
    return [RevisionPrice(revision, Price(*amounts)) for revision, *amounts in found]


def keep_prices(connection: Connection, revisions: Sequence[Revision]) -> None:
    """Add what is new to the schedule. An entry that differs from the stored one breaks an invariant: the key refuses it."""
    table = schema.PRICE
    for revision in revisions:
        row = {"revision": revision.id, **msgspec.to_builtins(revision.price)}
        same = select(table.c.version).where(*(table.c[name] == value for name, value in row.items()))
        if connection.execute(same).first() is None:
            connection.execute(insert(table), row)


def read_limits(connection: Connection) -> list[tuple[Scope, Limits]]:
    """Every scope with limits, ordered by scope, absent parts first."""
    table = schema.LIMIT_ENTRY
    found: dict[Scope, dict[str, int]] = {}
    for row in connection.execute(select(table).order_by(*table.primary_key)).mappings():
        scope = msgspec.convert({part: row[part] for part in _SCOPE_PARTS if row[part]}, Scope)
        found.setdefault(scope, {})[row["limit_name"]] = row["value"]
    return [(scope, Limits(**values)) for scope, values in found.items()]


def replace_limits(connection: Connection, entries: Sequence[tuple[Scope, Limits]]) -> None:
    """Put each scope's limits in place of those it has; none removes them."""
    table = schema.LIMIT_ENTRY
    for scope, limits in entries:
        key = {part: getattr(scope, part) or "" for part in _SCOPE_PARTS}
        connection.execute(delete(table).where(*(table.c[part] == value for part, value in key.items())))
        values = {field.name: getattr(limits, field.name) for field in fields(limits)}
        rows = [key | {"limit_name": name, "value": value} for name, value in values.items() if value is not None]
        if rows:
            connection.execute(insert(table), rows)
