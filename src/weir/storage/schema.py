"""Every table of the store, as metadata: the one description that migrations, queries and tests agree on.

It decides columns, keys and indexes, and must stay portable: big integers, text, bytes and composite keys, nothing that only
one database has. Executions are append-only rows (hold, step, settlement); the few rows that change are the cell's epoch, the
balances, the counters, the lease and the catalog. `ledger_open` names the holds that have not ended: what recovery reads.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

METADATA = MetaData()

_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers its rows only by a key that is declared INTEGER; it holds 64 bits all the same."""


def _required(name: str, kind: type[BigInteger | Text | LargeBinary | Boolean | JSON]) -> Column[object]:
    return Column(name, kind, nullable=False)


def _texts(*names: str) -> list[Column[object]]:
    return [_required(name, Text) for name in names]


def _numbers(*names: str) -> list[Column[object]]:
    return [_required(name, BigInteger) for name in names]


def _row_number(name: str) -> Column[int]:
    return Column(name, _ROW_NUMBER, primary_key=True, autoincrement=False)


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────

CELL = Table("cell", METADATA, _row_number("id"), *_numbers("epoch", "last_seq"))

LEDGER_HOLD = Table(
    "ledger_hold",
    METADATA,
    _row_number("seq"),
    *_numbers("epoch", "at_ms"),
    *_texts("tenant", "request_id"),
    _required("execution", BigInteger),
    _required("generation_id", Text),
    _required("body_digest", LargeBinary),
    *_texts("application", "key", "alias", "revision", "pool", "service_class", "workload_class", "surface"),
    _required("stream", Boolean),
    _required("input_tokens", BigInteger),
    _required("input_basis", Text),
    *_numbers("max_output_tokens", "choices", "price_version", "held_microusd"),
    _required("window_names", Text),
    Column("bucket_takes", LargeBinary),
    _required("deadline_at_ms", BigInteger),
    _required("gateway_session", Text),
    Index("ledger_hold_execution", "tenant", "request_id", "execution", unique=True),
    Index("ledger_hold_at", "at_ms"),
)

LEDGER_OPEN = Table("ledger_open", METADATA, _row_number("hold_seq"))

LEDGER_STEP = Table(
    "ledger_step",
    METADATA,
    *_numbers("hold_seq", "seq", "attempt"),
    _required("replica", Text),
    _required("delivered_max", BigInteger),
    PrimaryKeyConstraint("hold_seq", "seq"),
    sqlite_with_rowid=False,
)

LEDGER_SETTLEMENT = Table(
    "ledger_settlement",
    METADATA,
    _row_number("seq"),
    *_numbers("hold_seq", "epoch", "at_ms"),
    *_texts("day", "tenant", "request_id"),
    _required("execution", BigInteger),
    *_texts("application", "key", "alias", "revision", "pool", "service_class", "workload_class", "surface"),
    _required("stream", Boolean),
    _required("price_version", BigInteger),
    _required("window_names", Text),
    _required("attempt", BigInteger),
    Column("replica", Text),
    *_texts("status", "finish_reason"),
    Column("basis", Text),
    *_numbers("input_tokens", "cached_input_tokens", "output_tokens", "delivered_tokens"),
    *_numbers("tenant_input_tokens", "tenant_cached_input_tokens", "tenant_output_tokens"),
    *_numbers("cost_microusd", "platform_microusd"),
    *(Column(name, Float) for name in ("queue_ms", "ttft_ms", "tpot_ms", "total_ms")),
    Column("bucket_returns", LargeBinary),
    *(Column(name, Text) for name in ("error_code", "error_detail")),
    Index("ledger_settlement_hold", "hold_seq", unique=True),
    Index("ledger_settlement_tenant_at", "tenant", "at_ms"),
    Index("ledger_settlement_at", "at_ms", "seq"),
)

LEDGER_LATE = Table(
    "ledger_late",
    METADATA,
    _row_number("seq"),
    _required("at_ms", BigInteger),
    *_texts("tenant", "request_id"),
    _required("execution", BigInteger),
    _required("record", LargeBinary),
)

LEDGER_BALANCE = Table(
    "ledger_balance",
    METADATA,
    *_texts("tenant", "application", "key", "alias", "service_class", "budget_window"),
    *_numbers("spent_microusd", "spent_tokens"),
    PrimaryKeyConstraint(
        "tenant", "application", "key", "alias", "service_class", "budget_window", name="ledger_balance_of_class"
    ),
    Index("ledger_balance_window", "budget_window"),
    sqlite_with_rowid=False,
)

USAGE_ROLLUP = Table(
    "usage_rollup",
    METADATA,
    *_texts("tenant", "application", "key", "alias", "service_class", "revision", "day", "status", "workload_class"),
    _required("window_names", Text),
    *_numbers("ended_day_ms", "requests", "tenant_input_tokens", "tenant_cached_input_tokens", "tenant_output_tokens"),
    *_numbers("cost_microusd", "platform_microusd"),
    PrimaryKeyConstraint(
        *("tenant", "application", "key", "alias", "service_class", "revision", "day", "status", "workload_class"),
        *("window_names", "ended_day_ms"),
        name="usage_rollup_of_class",
    ),
    sqlite_with_rowid=False,
)
"""What is left of executions past the retention: their sums. ended_day_ms: the first millisecond of the UTC day they ended."""

REJECTION = Table(
    "rejection",
    METADATA,
    *_texts("tenant", "code"),
    *_numbers("minute_ms", "number"),
    PrimaryKeyConstraint("tenant", "code", "minute_ms"),
    sqlite_with_rowid=False,
)

LEADER_LEASE = Table(
    "leader_lease",
    METADATA,
    _row_number("id"),
    _required("holder", Text),
    Column("until", DateTime(timezone=True), nullable=False),
)
"""Who may be the coordinator, until when by the server's clock: one row at most. SQLite, with one process, leaves it empty."""

# ── the catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────

CATALOG = Table("catalog", METADATA, _row_number("id"), _required("version", BigInteger))

TENANT = Table(
    "tenant",
    METADATA,
    Column("name", Text, primary_key=True),
    _required("time_zone", Text),
    *(_required(name, Boolean) for name in ("disabled", "revoked", "external_allowed")),
    _required("former_time_zones", JSON),
    _required("weight", BigInteger),
    _required("leaves_its_pools", Boolean),
    Column("retention", JSON(none_as_null=True)),
    _required("deleted", Boolean),
)

APPLICATION = Table(
    "application",
    METADATA,
    *_texts("tenant", "name", "service_class"),
    Column("aliases", JSON(none_as_null=True)),
    _required("revoked", Boolean),
    PrimaryKeyConstraint("tenant", "name"),
)

API_KEY = Table(
    "api_key",
    METADATA,
    Column("id", Text, primary_key=True),
    *_texts("tenant", "application"),
    _required("secret_sha256", LargeBinary),
    _required("revoked", Boolean),
)

ADMIN_KEY = Table(
    "admin_key",
    METADATA,
    Column("id", Text, primary_key=True),
    *_texts("actor", "role"),
    _required("secret_sha256", LargeBinary),
    _required("revoked", Boolean),
)

REVISION = Table(
    "revision",
    METADATA,
    Column("id", Text, primary_key=True),
    *_texts("engine", "artifact"),
    *_numbers("context_tokens", "max_output_tokens", "typical_output_tokens"),
    *_numbers("price_version", "price_input_microusd", "price_cached_input_microusd", "price_output_microusd"),
    *(_required(name, Boolean) for name in ("chat", "external")),
    _required("state", Text),
    _required("arguments", JSON),
    *(Column(name, Text) for name in ("artifact_digest", "evaluation", "tenant", "adapter_of", "registered_by", "approved_by")),
    _required("price_batch_percent", BigInteger),
)

PRICE = Table(
    "price",
    METADATA,
    _required("revision", Text),
    *_numbers("version", "input_microusd", "cached_input_microusd", "output_microusd", "batch_percent"),
    PrimaryKeyConstraint("revision", "version"),
)
"""The price schedule: append-only, because holds and usage rows name a version."""

ALIAS = Table(
    "alias",
    METADATA,
    *_texts("tenant", "name", "revision"),
    _required("default_max_output_tokens", BigInteger),
    Column("canary", JSON(none_as_null=True)),
    PrimaryKeyConstraint("tenant", "name", name="alias_of_tenant"),
)
"""tenant: empty for a shared one."""

POOL = Table(
    "pool",
    METADATA,
    Column("name", Text, primary_key=True),
    _required("revision", Text),
    *_numbers("replicas", "concurrency"),
    _required("urls", JSON),
    _required("on_demand", Boolean),
    _required("idle_stop_ms", BigInteger),
    Column("tenant", Text),
    _required("service_classes", JSON),
    Column("input_tokens_max", BigInteger),
    *(_required(name, Boolean) for name in ("declared", "retired")),
)

SIGNING_KEY = Table(
    "signing_key",
    METADATA,
    Column("name", Text, primary_key=True),
    _required("public_key", Text),
    _required("roles", JSON),
    Column("tenant", Text),
    _required("not_before_ms", BigInteger),
    Column("not_after_ms", BigInteger),
    _required("revoked", Boolean),
)

ROLLOUT = Table(
    "rollout",
    METADATA,
    Column("id", Text, primary_key=True),
    _required("alias", Text),
    Column("tenant", Text),
    *_texts("stable", "canary"),
    *(_required(name, JSON) for name in ("plan", "state")),
    Column("score", JSON(none_as_null=True)),
    *(_required(name, JSON) for name in ("pools", "former_pools")),
    _required("proposed_by", Text),
    _required("proposed_at_ms", BigInteger),
)

LIMIT_ENTRY = Table(
    "limit_entry",
    METADATA,
    *_texts("tenant", "application", "key", "alias", "service_class", "limit_name"),
    _required("value", BigInteger),
    PrimaryKeyConstraint("tenant", "application", "key", "alias", "service_class", "limit_name", name="limit_entry_of_class"),
)
"""One row per limit that is set. A scope's absent parts are empty text: no part of a key may be null everywhere."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("id", _ROW_NUMBER, primary_key=True),
    *_numbers("version", "at_ms"),
    *_texts("actor", "action", "subject", "summary"),
    Index("audit_at", "at_ms"),
    Index("audit_of_subject", "subject", "at_ms"),
)
