"""The ledger's hot statements and how records become rows and rows become values again. Raw SQL, built once at import.

It decides nothing about transactions: `sqlite_ledger` does. A settlement's row copies its dimensions from the hold inside the
database, so that an end without a hold, or a second one, inserts nothing, and a report never needs a join.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from weir import errors
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import (
    BucketTake,
    EndRecord,
    ExecutionId,
    HoldRecord,
    ReleaseRecord,
    SettleRecord,
    StepRecord,
    Timing,
)
from weir.core.metering import Basis, InputBasis
from weir.core.tenancy import ServiceClass
from weir.messages import GenerationRecord
from weir.ports import USAGE_GROUPS, LeafBalance, OpenHold, RecentTake, StoredExecution, UsageQuery, UsageRow
from weir.units import Millis

Row: TypeAlias = tuple[Any, ...]

_WINDOW_SEPARATOR = "\n"

HOLD_COLUMNS = (
    "seq, epoch, at_ms, tenant, request_id, execution, generation_id, body_digest, application, key, alias, revision, pool, "
    "service_class, workload_class, surface, stream, input_tokens, input_basis, max_output_tokens, choices, price_version, "
    "held_microusd, window_names, bucket_takes, deadline_at_ms, gateway_session"
)
COPIED_COLUMNS = (
    "tenant, request_id, execution, application, key, alias, revision, pool, service_class, workload_class, surface, stream, "
    "price_version, window_names"
)
END_COLUMNS = (
    "seq, epoch, at_ms, attempt, replica, status, finish_reason, basis, input_tokens, cached_input_tokens, output_tokens, "
    "delivered_tokens, tenant_input_tokens, tenant_cached_input_tokens, tenant_output_tokens, cost_microusd, "
    "platform_microusd, queue_ms, ttft_ms, tpot_ms, total_ms, bucket_returns, error_code, error_detail"
)
LEAF = "tenant, application, key, alias, service_class"
"""What balances are kept by, in every window."""
DAY = "substr(window_names, 5, 10)"
"""The date in `day/YYYY-MM-DD`, which comes first."""
_OF_HELD_BEFORE = "tenant = ? AND request_id = ? AND execution = ? AND seq < ?"


def _marks(columns: str) -> str:
    return ", ".join("?" * (columns.count(",") + 1))


INSERT_HOLD = f"INSERT INTO ledger_hold ({HOLD_COLUMNS}) VALUES ({_marks(HOLD_COLUMNS)})"
INSERT_OPEN = "INSERT INTO ledger_open (hold_seq) VALUES (?)"
INSERT_STEP = (
    "INSERT INTO ledger_step (hold_seq, seq, attempt, replica, delivered_max) "
    f"SELECT seq, ?, ?, ?, ? FROM ledger_hold WHERE {_OF_HELD_BEFORE}"
)
INSERT_END = (
    f"INSERT INTO ledger_settlement (hold_seq, day, {COPIED_COLUMNS}, {END_COLUMNS}) "
    f"SELECT seq, {DAY}, {COPIED_COLUMNS}, {_marks(END_COLUMNS)} FROM ledger_hold WHERE {_OF_HELD_BEFORE} "
    "ON CONFLICT (hold_seq) DO NOTHING"
)
CLOSE_ENDED = "DELETE FROM ledger_open WHERE hold_seq IN (SELECT hold_seq FROM ledger_settlement WHERE seq BETWEEN ? AND ?)"
ENDED_SEQS = "SELECT seq FROM ledger_settlement WHERE seq BETWEEN ? AND ?"
INSERT_LATE = "INSERT INTO ledger_late (seq, at_ms, tenant, request_id, execution, record) VALUES (?, ?, ?, ?, ?, ?)"
POSTED_BY_LEAF = (
    f"SELECT {LEAF}, window_names, sum(cost_microusd), sum(tenant_input_tokens + tenant_output_tokens) "
    "FROM ledger_settlement WHERE seq BETWEEN ? AND ? AND cost_microusd + tenant_input_tokens + tenant_output_tokens > 0 "
    f"GROUP BY {LEAF}, window_names"
)
ADD_TO_BALANCE = (
    f"INSERT INTO ledger_balance ({LEAF}, budget_window, spent_microusd, spent_tokens) "
    f"VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT ({LEAF}, budget_window) DO UPDATE SET "
    "spent_microusd = spent_microusd + excluded.spent_microusd, spent_tokens = spent_tokens + excluded.spent_tokens"
)
_SUMMED = (
    "tenant_input_tokens",
    "tenant_cached_input_tokens",
    "tenant_output_tokens",
    "cost_microusd",
    "platform_microusd",
)
_ROLLED_BY = f"{LEAF}, revision, day, status, workload_class, window_names"
_OLD = "FROM ledger_settlement WHERE seq IN (SELECT seq FROM ledger_settlement WHERE at_ms < ? ORDER BY at_ms, seq LIMIT ?)"
"""By time, not by number: ends that a fast clock stamped with a later day must not keep those after them."""
ROLL_UP = (
    f"INSERT INTO usage_rollup ({_ROLLED_BY}, ended_day_ms, requests, {', '.join(_SUMMED)}) "
    f"SELECT {_ROLLED_BY}, at_ms - at_ms % 86400000, count(*), {', '.join(f'sum({name})' for name in _SUMMED)} {_OLD} "
    f"GROUP BY {_ROLLED_BY}, at_ms - at_ms % 86400000 ON CONFLICT ({_ROLLED_BY}, ended_day_ms) DO UPDATE SET "
    + ", ".join(f"{name} = usage_rollup.{name} + excluded.{name}" for name in ("requests", *_SUMMED))
)
PRUNE = (
    f"DELETE FROM ledger_step WHERE hold_seq IN (SELECT hold_seq {_OLD})",
    f"DELETE FROM ledger_hold WHERE seq IN (SELECT hold_seq {_OLD})",
    f"DELETE {_OLD}",
)
"""Parameters of each, and of ROLL_UP before them: the time, and how many. The last deletes what the others choose by."""
PRUNE_LATE = "DELETE FROM ledger_late WHERE at_ms < ?"
PRUNE_REJECTIONS = "DELETE FROM rejection WHERE minute_ms < ?"
ADD_REJECTIONS = (
    "INSERT INTO rejection (tenant, code, minute_ms, number) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (tenant, code, minute_ms) DO UPDATE SET number = rejection.number + excluded.number"
)
_BALANCE = f"SELECT {LEAF}, budget_window, spent_microusd, spent_tokens FROM ledger_balance"
BALANCES = (
    f"{_BALANCE} WHERE budget_window = 'lifetime' "
    f"UNION ALL {_BALANCE} WHERE budget_window >= ? AND budget_window < 'day0' "
    f"UNION ALL {_BALANCE} WHERE budget_window >= ? AND budget_window < 'month0' "
    f"ORDER BY {LEAF}, budget_window"
)
"""Parameters: the floors of day and month windows that may be present. (`0` follows the `/` that ends a window's kind.)

Three reads of an index, whatever a planner makes of alternatives: windows that are over are kept for ever.
"""
RECENT_TAKES_MAX = 250_000
"""Two minutes at twice what a cell admits. A clock that was set back makes every hold since then look recent."""
RECENT_TAKES = (
    "SELECT h.tenant, h.request_id, h.execution, h.at_ms, h.bucket_takes, e.seq, e.bucket_returns FROM "
    "(SELECT seq, tenant, request_id, execution, at_ms, bucket_takes FROM ledger_hold "
    f"WHERE at_ms >= ? AND bucket_takes IS NOT NULL ORDER BY at_ms DESC LIMIT {RECENT_TAKES_MAX}) AS h "
    "LEFT JOIN ledger_settlement e ON e.hold_seq = h.seq ORDER BY h.seq"
)
_LAST_STEP = "s.hold_seq = h.seq AND s.seq = (SELECT max(seq) FROM ledger_step WHERE hold_seq = h.seq)"
LATEST_EXECUTION = (
    "SELECT h.tenant, h.request_id, h.execution, h.body_digest, s.attempt, e.delivered_tokens, "
    "e.tenant_input_tokens + e.tenant_output_tokens, e.at_ms, "
    "h.generation_id, h.alias, h.revision, e.status, e.finish_reason, e.input_tokens, e.cached_input_tokens, e.output_tokens, "
    "e.cost_microusd, e.basis, e.queue_ms, e.ttft_ms, e.tpot_ms, e.total_ms, e.error_code, e.error_detail "
    f"FROM ledger_hold h LEFT JOIN ledger_settlement e ON e.hold_seq = h.seq LEFT JOIN ledger_step s ON {_LAST_STEP} "
    "WHERE h.tenant = ? AND h.request_id = ? ORDER BY h.execution DESC LIMIT 1"
)
OPEN_HOLDS = (
    f"SELECT {', '.join(f'h.{name}' for name in HOLD_COLUMNS.split(', '))}, s.attempt, s.replica, s.delivered_max, "
    "(SELECT max(delivered_max) FROM ledger_step WHERE hold_seq = h.seq AND attempt < s.attempt) "
    f"FROM ledger_open o JOIN ledger_hold h ON h.seq = o.hold_seq LEFT JOIN ledger_step s ON {_LAST_STEP} ORDER BY o.hold_seq"
)

_encode = msgspec.json.Encoder().encode
_decode_takes = msgspec.json.Decoder(tuple[BucketTake, ...]).decode


def _identity(named: ExecutionId) -> Row:
    return named.tenant, named.request_id, named.execution


def hold_row(hold: HoldRecord, epoch: int) -> Row:
    """Parameters of INSERT_HOLD."""
    return (
        hold.seq,
        epoch,
        hold.at_ms,
        *_identity(hold.id),
        hold.generation_id,
        hold.body_digest,
        hold.application,
        hold.key,
        hold.alias,
        hold.revision,
        hold.pool,
        hold.service_class.value,
        hold.workload_class,
        hold.surface,
        int(hold.stream),
        hold.input_tokens,
        hold.input_basis.value,
        hold.max_output_tokens,
        hold.choices,
        hold.price_version,
        hold.held_microusd,
        _window_names(hold.windows),
        _encode(hold.takes) if hold.takes else None,
        hold.deadline_at_ms,
        hold.gateway_session,
    )


def step_row(step: StepRecord) -> Row:
    """Parameters of INSERT_STEP."""
    return step.seq, step.attempt, step.replica, step.delivered_max, *_identity(step.id), step.seq


def end_row(end: EndRecord, epoch: int) -> Row:
    """Parameters of INSERT_END."""
    timing = end.timing
    return (
        end.seq,
        epoch,
        end.at_ms,
        *(_settled_columns(end) if isinstance(end, SettleRecord) else _released_columns(end)),
        timing.queue_ms,
        timing.ttft_ms,
        timing.tpot_ms,
        timing.total_ms,
        _encode(end.returns) if end.returns else None,
        end.error_code,
        end.error_detail,
        *_identity(end.id),
        end.seq,
    )


def _settled_columns(end: SettleRecord) -> Row:
    return (
        end.attempt,
        end.replica,
        end.status.value,
        end.finish_reason.value,
        end.basis.value,
        end.input_tokens,
        end.cached_input_tokens,
        end.output_tokens,
        end.delivered_tokens,
        end.tenant_input_tokens,
        end.tenant_cached_input_tokens,
        end.tenant_output_tokens,
        end.cost_microusd,
        end.platform_microusd,
    )


def _released_columns(end: ReleaseRecord) -> Row:
    return 0, None, end.status.value, end.finish_reason.value, None, 0, 0, 0, 0, 0, 0, 0, 0, 0


def late_row(end: EndRecord) -> Row:
    """Parameters of INSERT_LATE."""
    return end.seq, end.at_ms, *_identity(end.id), _encode(end)


@lru_cache(1_024)
def _window_names(windows: tuple[str, ...]) -> str:
    return _WINDOW_SEPARATOR.join(windows)


def balance_rows(posted: Iterable[Row]) -> list[Row]:
    """Parameters of ADD_TO_BALANCE from the rows of POSTED_BY_LEAF: one per leaf and budget window."""
    return [
        (*leaf, window, microusd, tokens)
        for *leaf, names, microusd, tokens in posted
        for window in names.split(_WINDOW_SEPARATOR)
        if window
    ]


def leaf_balance(row: Sequence[Any]) -> LeafBalance:
    """A row of BALANCES as the port's value."""
    tenant, application, key, alias, service_class, *posted = row
    return LeafBalance(tenant, application, key, alias, ServiceClass(service_class), *posted)


def recent_takes(rows: Iterable[Row]) -> list[RecentTake]:
    """The takes of RECENT_TAKES, net of returns; those returned wholly are left out."""
    found: list[RecentTake] = []
    for tenant, request_id, execution, at_ms, takes, ended_seq, returns in rows:
        hold = ExecutionId(tenant, request_id, execution)
        back = None if ended_seq is None else _decode_takes(returns) if returns else ()
        found += net_takes(hold, at_ms, _decode_takes(takes), back)
    return found


def net_takes(
    hold: ExecutionId, at_ms: Millis, takes: Iterable[BucketTake], returns: Iterable[BucketTake] | None
) -> Iterable[RecentTake]:
    """One hold's takes less what its end returned, None while it has none; those returned wholly are left out."""
    returned = {back.bucket: back.units for back in returns or ()}
    maker = hold if returns is None else None
    for take in takes:
        units = take.units - returned.get(take.bucket, 0)
        if units > 0:
            place = (hold.tenant, take.application, take.key, take.alias)
            yield RecentTake(*place, take.limit, units, at_ms, maker, take.service_class)


def stored_execution(row: Row) -> StoredExecution:
    """A row of LATEST_EXECUTION as the port's value."""
    tenant, request_id, execution, digest, attempt, delivered_tokens, tenant_tokens, ended_at_ms = row[:8]
    return StoredExecution(
        id=ExecutionId(tenant, request_id, execution),
        body_digest=digest,
        record=_generation_record(row[8:], request_id, execution, dispatched=attempt is not None),
        delivered_tokens=delivered_tokens or 0,
        tenant_tokens=tenant_tokens or 0,
        ended_at_ms=ended_at_ms,
    )


def open_hold(row: Row) -> OpenHold:
    """A row of OPEN_HOLDS as the port's value."""
    named = dict(zip(HOLD_COLUMNS.split(", "), row, strict=False))
    attempt, replica, delivered_max, lost_delivered_max = row[-4:]
    takes = named.pop("bucket_takes")
    del named["epoch"]
    record = HoldRecord(
        id=ExecutionId(named.pop("tenant"), named.pop("request_id"), named.pop("execution")),
        service_class=ServiceClass(named.pop("service_class")),
        stream=bool(named.pop("stream")),
        input_basis=InputBasis(named.pop("input_basis")),
        windows=tuple(named.pop("window_names").split(_WINDOW_SEPARATOR)),
        takes=_decode_takes(takes) if takes else (),
        **named,
    )
    return OpenHold(record, attempt or 0, replica, delivered_max or 0, lost_delivered_max or 0)


def _generation_record(row: Row, request_id: str, execution: int, *, dispatched: bool) -> GenerationRecord:
    generation_id, alias, revision, status, reason, input_tokens, cached, output, cost, basis = row[:10]
    *timing, error_code, error_detail = row[10:]
    if status is None:
        open_status = Status.RUNNING if dispatched else Status.QUEUED
        return GenerationRecord(generation_id, request_id, execution, alias, revision, open_status)
    return GenerationRecord(
        generation_id,
        request_id,
        execution,
        alias,
        revision,
        Status(status),
        FinishReason(reason),
        input_tokens,
        cached,
        output,
        cost,
        Basis(basis) if basis is not None else None,
        posted=True,
        timing=Timing(*timing),
        error_code=error_code,
        error_detail=error_detail,
    )


def check_groups(group_by: Sequence[str]) -> None:
    """Raises InvalidRequest unless every name is a column that usage can be grouped by, given once."""
    if set(group_by) <= set(USAGE_GROUPS) and len(set(group_by)) == len(group_by):
        return
    known = set(group_by) <= set(USAGE_GROUPS)
    detail = "group_by takes each of its columns once." if known else "group_by names a column that there is not."
    raise errors.InvalidRequest(detail, members={"field": "group_by", "accepted": list(USAGE_GROUPS)})


def check_group_count(query: UsageQuery, number: int) -> None:
    """Raises InvalidRequest for more groups than the query allows."""
    if number > query.groups_max:
        accepted = f"columns and a range of time that give at most {query.groups_max} groups"
        raise errors.InvalidRequest(
            "There are too many groups: narrow `from` and `to`, ask for one tenant, or group by less.",
            members={"field": "group_by", "accepted": accepted},
        )


def usage_statement(query: UsageQuery) -> tuple[str, Row]:
    """The sums of a query and its parameters; at most one group too many. Raises InvalidRequest for groups that are none."""
    check_groups(query.group_by)
    kept, parameters = _selection(query, "at_ms")
    rolled_up, _ = _selection(query, "ended_day_ms")
    columns = ", ".join(query.group_by)
    head = f"{columns}, " if columns else ""
    grouping = f" GROUP BY {columns} ORDER BY {columns}" if columns else ""
    sums = ", ".join(f"sum({name})" for name in ("requests", *_SUMMED))
    amounts = ", ".join(_SUMMED)
    statement = (
        f"SELECT {head}{sums} FROM (SELECT {head}1 AS requests, {amounts} FROM ledger_settlement WHERE {kept} "
        f"UNION ALL SELECT {head}requests, {amounts} FROM usage_rollup WHERE {rolled_up}) AS usage{grouping} "
        f"LIMIT {query.groups_max + 1}"
    )
    return statement, parameters + parameters


def _selection(query: UsageQuery, ended: str) -> tuple[str, Row]:
    bounds = (("tenant = ?", query.tenant), (f"{ended} >= ?", query.from_ms), (f"{ended} < ?", query.to_ms))
    where = " AND ".join(text for text, value in bounds if value is not None) or "1 = 1"
    return where, tuple(value for _, value in bounds if value is not None)


def usage_rows(query: UsageQuery, rows: Sequence[Row]) -> list[UsageRow]:
    """The rows of a usage statement as the port's values; nothing found is no row. Raises InvalidRequest for too many."""
    check_group_count(query, len(rows))
    width = len(query.group_by)
    return [UsageRow(dict(zip(query.group_by, row, strict=False)), *row[width:]) for row in rows if row[width]]
