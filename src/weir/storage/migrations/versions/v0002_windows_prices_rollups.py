"""Budget windows by day and month, the price schedule, former time zones, and the sums of what is past the retention."""

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add what is new; holds that are open get the windows of the UTC day in which they were taken."""
    _roll_up()
    _keep_prices()
    op.add_column("tenant", sa.Column("former_time_zones", sa.JSON, nullable=False, server_default="[]"))
    op.drop_column("ledger_hold", "window_takes")
    op.create_index("ledger_settlement_at", "ledger_settlement", ["at_ms", "seq"])
    op.create_index("ledger_balance_window", "ledger_balance", ["budget_window"])
    _name_windows()


def _roll_up() -> None:
    texts = ["tenant", "application", "key", "alias", "revision", "day", "status", "workload_class", "window_names"]
    sums = "requests tenant_input_tokens tenant_cached_input_tokens tenant_output_tokens cost_microusd platform_microusd"
    op.create_table(
        "usage_rollup",
        *(sa.Column(name, sa.Text, nullable=False) for name in texts),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("ended_day_ms", *sums.split())),
        sa.PrimaryKeyConstraint(*texts, "ended_day_ms"),
        sqlite_with_rowid=False,
    )


def _keep_prices() -> None:
    amounts = ["version", "input_microusd", "cached_input_microusd", "output_microusd"]
    op.create_table(
        "price",
        sa.Column("revision", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in amounts),
        sa.PrimaryKeyConstraint("revision", "version"),
    )
    columns = ", ".join(f"price_{name}" for name in amounts)
    op.execute(f"INSERT INTO price (revision, {', '.join(amounts)}) SELECT id, {columns} FROM revision")


def _name_windows() -> None:
    connection = op.get_bind()
    found = connection.execute(sa.text("SELECT seq, at_ms FROM ledger_hold WHERE seq IN (SELECT hold_seq FROM ledger_open)"))
    for seq, at_ms in found.all():
        day = datetime.fromtimestamp(at_ms / 1000, UTC).date().isoformat()
        names = f"day/{day}\nmonth/{day[:7]}\nlifetime"
        connection.execute(
            sa.text("UPDATE ledger_hold SET window_names = :names WHERE seq = :seq"), {"names": names, "seq": seq}
        )
