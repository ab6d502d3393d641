"""The first schema: every table, and the two rows that always exist.

It is frozen. Later changes are later migrations, whatever becomes of `weir.storage.schema`.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _columns(kind: Any, names: str, *, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names.split()]


def _row_number(name: str) -> sa.Column[int]:
    return sa.Column(name, _ROW_NUMBER, primary_key=True, autoincrement=False)


def _texts(names: str) -> list[sa.Column[Any]]:
    return _columns(sa.Text, names)


def _numbers(names: str) -> list[sa.Column[Any]]:
    return _columns(sa.BigInteger, names)


def upgrade() -> None:
    """Create every table, with the two rows that always exist."""
    cell = op.create_table("cell", _row_number("id"), *_numbers("epoch last_seq"))
    catalog = op.create_table("catalog", _row_number("id"), *_numbers("version"))
    op.bulk_insert(cell, [{"id": 1, "epoch": 0, "last_seq": 0}])
    op.bulk_insert(catalog, [{"id": 1, "version": 0}])
    _create_holds()
    _create_settlements()
    _create_sums()
    _create_identities()
    _create_models()


def _create_holds() -> None:
    op.create_table(
        "ledger_hold",
        _row_number("seq"),
        *_numbers("epoch at_ms"),
        *_texts("tenant request_id"),
        *_numbers("execution"),
        *_texts("generation_id"),
        *_columns(sa.LargeBinary, "body_digest"),
        *_texts("application key alias revision pool service_class workload_class surface"),
        *_columns(sa.Boolean, "stream"),
        *_numbers("input_tokens"),
        *_texts("input_basis"),
        *_numbers("max_output_tokens choices price_version held_microusd"),
        *_texts("window_names"),
        *_columns(sa.LargeBinary, "window_takes"),
        *_columns(sa.LargeBinary, "bucket_takes", nullable=True),
        *_numbers("deadline_at_ms"),
        *_texts("gateway_session"),
    )
    op.create_index("ledger_hold_execution", "ledger_hold", ["tenant", "request_id", "execution"], unique=True)
    op.create_index("ledger_hold_at", "ledger_hold", ["at_ms"])
    op.create_table("ledger_open", _row_number("hold_seq"))
    op.create_table(
        "ledger_step",
        *_numbers("hold_seq seq attempt"),
        *_texts("replica"),
        *_numbers("delivered_max"),
        sa.PrimaryKeyConstraint("hold_seq", "seq"),
        sqlite_with_rowid=False,
    )


def _create_settlements() -> None:
    op.create_table(
        "ledger_settlement",
        _row_number("seq"),
        *_numbers("hold_seq epoch at_ms"),
        *_texts("day tenant request_id"),
        *_numbers("execution"),
        *_texts("application key alias revision pool service_class workload_class surface"),
        *_columns(sa.Boolean, "stream"),
        *_numbers("price_version"),
        *_texts("window_names"),
        *_numbers("attempt"),
        *_columns(sa.Text, "replica", nullable=True),
        *_texts("status finish_reason"),
        *_columns(sa.Text, "basis", nullable=True),
        *_numbers("input_tokens cached_input_tokens output_tokens delivered_tokens"),
        *_numbers("tenant_input_tokens tenant_cached_input_tokens tenant_output_tokens"),
        *_numbers("cost_microusd platform_microusd"),
        *_columns(sa.Float, "queue_ms ttft_ms tpot_ms total_ms", nullable=True),
        *_columns(sa.LargeBinary, "bucket_returns", nullable=True),
        *_columns(sa.Text, "error_code error_detail", nullable=True),
    )
    op.create_index("ledger_settlement_hold", "ledger_settlement", ["hold_seq"], unique=True)
    op.create_index("ledger_settlement_tenant_at", "ledger_settlement", ["tenant", "at_ms"])
    op.create_table(
        "ledger_late",
        _row_number("seq"),
        *_numbers("at_ms"),
        *_texts("tenant request_id"),
        *_numbers("execution"),
        *_columns(sa.LargeBinary, "record"),
    )


def _create_sums() -> None:
    op.create_table(
        "ledger_balance",
        *_texts("tenant application key alias budget_window"),
        *_numbers("spent_microusd spent_tokens"),
        sa.PrimaryKeyConstraint("tenant", "application", "key", "alias", "budget_window"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rejection",
        *_texts("tenant code"),
        *_numbers("minute_ms number"),
        sa.PrimaryKeyConstraint("tenant", "code", "minute_ms"),
        sqlite_with_rowid=False,
    )


def _create_identities() -> None:
    op.create_table(
        "tenant",
        sa.Column("name", sa.Text, primary_key=True),
        *_texts("time_zone"),
        *_columns(sa.Boolean, "disabled revoked external_allowed"),
    )
    op.create_table(
        "application",
        *_texts("tenant name service_class"),
        *_columns(sa.JSON(none_as_null=True), "aliases", nullable=True),
        *_columns(sa.Boolean, "revoked"),
        sa.PrimaryKeyConstraint("tenant", "name"),
    )
    for table, names in (("api_key", "tenant application"), ("admin_key", "actor role")):
        op.create_table(
            table,
            sa.Column("id", sa.Text, primary_key=True),
            *_texts(names),
            *_columns(sa.LargeBinary, "secret_sha256"),
            *_columns(sa.Boolean, "revoked"),
        )
    op.create_table(
        "limit_entry",
        *_texts("tenant application key alias limit_name"),
        *_numbers("value"),
        sa.PrimaryKeyConstraint("tenant", "application", "key", "alias", "limit_name"),
    )
    op.create_table(
        "audit",
        sa.Column("id", _ROW_NUMBER, primary_key=True),
        *_numbers("version at_ms"),
        *_texts("actor action subject summary"),
    )
    op.create_index("audit_at", "audit", ["at_ms"])


def _create_models() -> None:
    op.create_table(
        "revision",
        sa.Column("id", sa.Text, primary_key=True),
        *_texts("engine artifact"),
        *_numbers("context_tokens max_output_tokens typical_output_tokens"),
        *_numbers("price_version price_input_microusd price_cached_input_microusd price_output_microusd"),
        *_columns(sa.Boolean, "chat external revoked"),
    )
    op.create_table(
        "alias", sa.Column("name", sa.Text, primary_key=True), *_texts("revision"), *_numbers("default_max_output_tokens")
    )
    op.create_table(
        "pool",
        sa.Column("name", sa.Text, primary_key=True),
        *_texts("revision"),
        *_numbers("replicas concurrency"),
        *_columns(sa.JSON, "urls"),
        *_columns(sa.Boolean, "on_demand"),
        *_numbers("idle_stop_ms"),
    )
