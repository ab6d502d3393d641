"""Limits, balances and rolled-up usage by service class.

Limits that exist are of every class. What batch requests posted is counted again from their settlements, and what is rolled up
is of its application's class, interactive where there is no such application any more; the rest of each balance is interactive.
So no sum over the classes changes.
"""

from collections import defaultdict
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_PLACE = ("tenant", "application", "key", "alias")
_TOKENS = ("tenant_input_tokens", "tenant_cached_input_tokens", "tenant_output_tokens")
_SUMS = ("requests", *_TOKENS, "cost_microusd", "platform_microusd")
_CLASS_OF_ROLLUP = (
    "CASE WHEN EXISTS (SELECT 1 FROM application a WHERE a.tenant = r.tenant AND a.name = r.application "
    "AND a.service_class = 'batch') THEN 'batch' ELSE 'interactive' END"
)


def upgrade() -> None:
    """Put the class into each key; keys cannot be widened in place everywhere, so rows move to new tables."""
    _limits()
    _rollups()
    _balances()


def _create(table: str, texts: Sequence[str], numbers: Sequence[str], *, keys: Sequence[str], is_clustered: bool) -> None:
    op.rename_table(table, f"former_{table}")
    op.create_table(
        table,
        *(sa.Column(name, sa.Text, nullable=False) for name in texts),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in numbers),
        sa.PrimaryKeyConstraint(*keys, name=f"{table}_of_class"),
        **({"sqlite_with_rowid": False} if is_clustered else {}),
    )


def _limits() -> None:
    texts = (*_PLACE, "service_class", "limit_name")
    _create("limit_entry", texts, ["value"], keys=texts, is_clustered=False)
    former = ", ".join((*_PLACE, "limit_name", "value"))
    op.execute(sa.text(f"INSERT INTO limit_entry ({former}, service_class) SELECT {former}, '' FROM former_limit_entry"))
    op.drop_table("former_limit_entry")


def _rollups() -> None:
    rest = ("revision", "day", "status", "workload_class", "window_names")
    texts = (*_PLACE, "service_class", *rest)
    _create("usage_rollup", texts, ["ended_day_ms", *_SUMS], keys=(*texts, "ended_day_ms"), is_clustered=True)
    former = ", ".join((*_PLACE, *rest, "ended_day_ms", *_SUMS))
    op.execute(
        sa.text(
            f"INSERT INTO usage_rollup ({former}, service_class) SELECT {former}, {_CLASS_OF_ROLLUP} FROM former_usage_rollup r"
        )
    )
    op.drop_table("former_usage_rollup")


def _balances() -> None:
    texts, amounts = (*_PLACE, "service_class", "budget_window"), ["spent_microusd", "spent_tokens"]
    op.drop_index("ledger_balance_window", "ledger_balance")
    _create("ledger_balance", texts, amounts, keys=texts, is_clustered=True)
    op.create_index("ledger_balance_window", "ledger_balance", ["budget_window"])
    former = ", ".join((*_PLACE, "budget_window", *amounts))
    op.execute(
        sa.text(
            f"INSERT INTO ledger_balance ({former}, service_class) SELECT {former}, 'interactive' FROM former_ledger_balance"
        )
    )
    op.drop_table("former_ledger_balance")
    _move_batch()


def _move_batch() -> None:
    """From the interactive balances, where everything is, to those of batch what is theirs."""
    moved = [
        {**dict(zip((*_PLACE, "budget_window"), leaf, strict=True)), "microusd": microusd, "tokens": tokens}
        for leaf, (microusd, tokens) in _posted_by_batch().items()
    ]
    if not moved:
        return
    connection = op.get_bind()
    names = (*_PLACE, "budget_window")
    connection.execute(
        sa.text(
            f"INSERT INTO ledger_balance ({', '.join(names)}, service_class, spent_microusd, spent_tokens) "
            f"VALUES ({', '.join(f':{name}' for name in names)}, 'batch', :microusd, :tokens)"
        ),
        moved,
    )
    where = " AND ".join(f"{name} = :{name}" for name in names)
    connection.execute(
        sa.text(
            "UPDATE ledger_balance SET spent_microusd = spent_microusd - :microusd, spent_tokens = spent_tokens - :tokens "
            f"WHERE service_class = 'interactive' AND {where}"
        ),
        moved,
    )
    connection.execute(
        sa.text("DELETE FROM ledger_balance WHERE service_class = 'interactive' AND spent_microusd = 0 AND spent_tokens = 0")
    )


def _posted_by_batch() -> dict[tuple[str, ...], tuple[int, int]]:
    """Micro-dollars and tokens by place and window."""
    by = f"{', '.join(_PLACE)}, window_names"
    sums: defaultdict[tuple[str, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for table in ("ledger_settlement", "usage_rollup"):  # one by one: old and new tables may compare text by other rules here
        found = op.get_bind().execute(
            sa.text(
                f"SELECT {by}, sum(cost_microusd), sum(tenant_input_tokens + tenant_output_tokens) FROM {table} "
                "WHERE service_class = 'batch' AND cost_microusd + tenant_input_tokens + tenant_output_tokens > 0 "
                f"GROUP BY {by}"
            )
        )
        for *leaf, windows, microusd, tokens in found.all():
            for window in windows.split("\n"):
                before = sums[*leaf, window]
                sums[*leaf, window] = before[0] + int(microusd), before[1] + int(tokens)
    return dict(sums)
