"""The check of a whole ledger: every balance recounted from its records, and the rules that records keep among themselves.

It decides what a clean ledger is, in SQL that every database runs, and reads only; the stores run it in one consistent read.
Balances are recounted tenant by tenant, so that it holds no more than one tenant's in memory. It names executions and sums,
never what was asked or answered.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from weir import errors
from weir.ports import LedgerReport
from weir.storage.ledger_rows import COPIED_COLUMNS, LEAF

Row: TypeAlias = Sequence[object]
Query: TypeAlias = Callable[[str, Sequence[str]], Sequence[Row]]
"""A statement with `?` for each of its parameters, to its rows."""
Leaf: TypeAlias = tuple[str, str, str, str, str, str]
"""Tenant, application, key, alias, service class and budget window."""

SHOWN_MAX = 10
_SEPARATOR = "\n"

_COUNTS = {
    "holds": "SELECT count(*) FROM ledger_hold",
    "open_holds": "SELECT count(*) FROM ledger_open",
    "settlements": "SELECT count(*) FROM ledger_settlement",
    "rolled_up": "SELECT coalesce(sum(requests), 0) FROM usage_rollup",
    "late": "SELECT count(*) FROM ledger_late",
    "balances": "SELECT count(*) FROM ledger_balance",
}
_TENANTS = (
    "SELECT tenant FROM ledger_balance UNION SELECT tenant FROM ledger_settlement UNION SELECT tenant FROM usage_rollup "
    "ORDER BY tenant"
)
_LEAF = f"{LEAF}, window_names"
_AMOUNTS = "cost_microusd, tenant_input_tokens, tenant_output_tokens"
_POSTED = (
    f"SELECT {_LEAF}, sum(cost_microusd), sum(tenant_input_tokens + tenant_output_tokens) FROM (SELECT {_LEAF}, {_AMOUNTS} "
    f"FROM ledger_settlement WHERE tenant = ? UNION ALL SELECT {_LEAF}, {_AMOUNTS} FROM usage_rollup WHERE tenant = ?) "
    f"AS ended GROUP BY {_LEAF}"
)
_STORED = f"SELECT {LEAF}, budget_window, spent_microusd, spent_tokens FROM ledger_balance WHERE tenant = ?"

_E = "e.tenant || '/' || e.request_id || ' execution ' || e.execution"
_H = "h.tenant || '/' || h.request_id || ' execution ' || h.execution"
_ENDED = "FROM ledger_settlement e JOIN ledger_hold h ON h.seq = e.hold_seq"
_COPIED = COPIED_COLUMNS.split(", ")


def _price(amount: str) -> str:
    """A pinned amount as the request's service class pays it, rounded up."""
    return f"CASE WHEN h.service_class = 'batch' THEN (p.{amount} * p.batch_percent + 99) / 100 ELSE p.{amount} END"


_EXACT = (
    f"((e.tenant_input_tokens - e.tenant_cached_input_tokens) * ({_price('input_microusd')}) + e.tenant_cached_input_tokens * "
    f"({_price('cached_input_microusd')}) + e.tenant_output_tokens * ({_price('output_microusd')}) + 999999) / 1000000"
)
_RULES = {
    "has not ended, and is not among the open holds": (
        f"SELECT {_H} FROM ledger_hold h LEFT JOIN ledger_settlement e ON e.hold_seq = h.seq LEFT JOIN ledger_open o "
        "ON o.hold_seq = h.seq WHERE e.hold_seq IS NULL AND o.hold_seq IS NULL"
    ),
    "is among the open holds, and has ended": (
        f"SELECT {_E} FROM ledger_settlement e JOIN ledger_open o ON o.hold_seq = e.hold_seq"
    ),
    "is open without a hold": (
        "SELECT 'record ' || o.hold_seq FROM ledger_open o LEFT JOIN ledger_hold h ON h.seq = o.hold_seq WHERE h.seq IS NULL"
    ),
    "has ended without a hold": (
        f"SELECT {_E} FROM ledger_settlement e LEFT JOIN ledger_hold h ON h.seq = e.hold_seq WHERE h.seq IS NULL"
    ),
    "ended as something else than was held": (
        f"SELECT {_E} {_ENDED} WHERE {' OR '.join(f'e.{name} <> h.{name}' for name in _COPIED)}"
    ),
    "is counted on another day than the one that it was held in": (
        # What was taken before days were counted names no day.
        f"SELECT {_E} {_ENDED} WHERE h.window_names <> 'lifetime' AND substr(h.window_names, 1, 14) <> 'day/' || e.day"
    ),
    "pins a price that its revision's schedule does not have": (
        f"SELECT {_E} FROM ledger_settlement e WHERE EXISTS (SELECT 1 FROM price p WHERE p.revision = e.revision) "
        "AND NOT EXISTS (SELECT 1 FROM price p WHERE p.revision = e.revision AND p.version = e.price_version)"
    ),
    "costs its tenant more than was held": (
        f"SELECT {_E} {_ENDED} WHERE e.cost_microusd > h.held_microusd OR e.tenant_input_tokens > h.choices * h.input_tokens "
        "OR e.tenant_output_tokens > h.choices * h.max_output_tokens"
    ),
    "costs its tenant something else than its tokens at the pinned price of its class": (
        f"SELECT {_E} {_ENDED} JOIN price p ON p.revision = e.revision AND p.version = e.price_version "
        f"WHERE e.cost_microusd <> CASE WHEN {_EXACT} < h.held_microusd THEN {_EXACT} ELSE h.held_microusd END"
    ),
    "delivered more than was booked ahead": (
        f"SELECT {_E} {_ENDED} WHERE h.stream AND e.delivered_tokens > "
        "(SELECT coalesce(max(s.delivered_max), 0) FROM ledger_step s WHERE s.hold_seq = h.seq AND s.attempt = e.attempt)"
    ),
    "ended uncertain, and below what was delivered": (
        f"SELECT {_E} {_ENDED} WHERE e.basis = 'uncertain' AND (e.cost_microusd > 0 OR e.output_tokens < "
        "(SELECT coalesce(max(s.delivered_max), 0) FROM ledger_step s WHERE s.hold_seq = h.seq AND s.attempt = e.attempt))"
    ),
    "is numbered above the cell's last record": (
        f"SELECT {_E} FROM ledger_settlement e WHERE e.seq > (SELECT last_seq FROM cell) "
        f"UNION ALL SELECT {_H} FROM ledger_hold h WHERE h.seq > (SELECT last_seq FROM cell)"
    ),
}
"""What no execution may be, with the statement that finds those that are."""


def examine(query: Query) -> LedgerReport:
    """Check the ledger behind a query, whose answers must all come from one moment. Raises StateUnreadable if damaged."""
    cells = query("SELECT epoch, last_seq FROM cell", ())
    if len(cells) != 1:
        raise errors.StateUnreadable("The ledger is damaged: it does not say who writes it, nor its last record.")
    epoch, last_seq = cells[0]
    counts = {name: _integer(query(statement, ())[0][0]) for name, statement in _COUNTS.items()}
    problems = _shown(_differing_balances(query))
    for rule, statement in _RULES.items():
        problems += _shown(f"{row[0]} {rule}." for row in query(f"{statement} LIMIT {SHOWN_MAX + 1}", ()))
    return LedgerReport(_integer(epoch), _integer(last_seq), **counts, problems=tuple(problems))


def _differing_balances(query: Query) -> Iterator[str]:
    for (tenant,) in query(_TENANTS, ()):
        name = str(tenant)
        yield from _differences(_by_leaf(query(_STORED, (name,))), _by_leaf(query(_POSTED, (name, name))))


def differing_balances(stored: Mapping[Leaf, tuple[int, int]], posted: Mapping[Leaf, tuple[int, int]]) -> list[str]:
    """A sentence for each balance (micro-dollars, tokens) that is not the sum of its records."""
    return _shown(_differences(stored, posted))


def _differences(stored: Mapping[Leaf, tuple[int, int]], posted: Mapping[Leaf, tuple[int, int]]) -> Iterator[str]:
    nothing = (0, 0)
    for leaf in sorted(stored.keys() | posted.keys()):
        kept, counted = stored.get(leaf, nothing), posted.get(leaf, nothing)
        if kept != counted:
            yield (
                f"The balance of {'/'.join(leaf[:-1])} for {leaf[-1]} is {kept} and its records say {counted} "
                "(micro-dollars, tokens)."
            )


def _by_leaf(rows: Iterable[Row]) -> dict[Leaf, tuple[int, int]]:
    """Sums by leaf and window of rows that each name one window or several."""
    sums: defaultdict[Leaf, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tenant, application, key, alias, service_class, names, microusd, tokens in rows:
        for window in str(names).split(_SEPARATOR):
            leaf = (str(tenant), str(application), str(key), str(alias), str(service_class), window)
            sums[leaf] = (sums[leaf][0] + _integer(microusd), sums[leaf][1] + _integer(tokens))
    return dict(sums)


def _integer(value: object) -> int:
    """A sum as every driver gives it: an integer, or a decimal without a fraction."""
    return int(str(value))


def _shown(sentences: Iterable[str]) -> list[str]:
    """The first of them; those beyond are not even looked for."""
    first = list(islice(sentences, SHOWN_MAX + 1))
    return first if len(first) <= SHOWN_MAX else [*first[:SHOWN_MAX], "There are more of this kind."]
