"""The SQL of the ledger in PostgreSQL: one statement that writes a whole group, fenced, and the portable reads renumbered.

A group arrives as an array of rows per kind. The statement locks the cell's row if it is of the writer's epoch, keeps what is
above the last durable number, and writes holds, steps, ends, late ends, open holds and balances: all of it or nothing. Its
parts cannot see each other's rows in the tables, so an end finds its hold among those just inserted, or by the index.
"""

from sqlalchemy import BigInteger, Boolean, Float, LargeBinary, Table, Text

from weir.core.ledger.records import EndRecord, StepRecord
from weir.storage import ledger_rows as rows
from weir.storage import schema

_GIVEN_AS = {BigInteger: "bigint", Text: "text", LargeBinary: "bytea", Boolean: "bigint", Float: "double precision"}
_IDENTITY = "tenant, request_id, execution"
_STEP_GIVEN = "seq, attempt, replica, delivered_max, tenant, request_id, execution"
_END_GIVEN = f"{rows.END_COLUMNS}, {_IDENTITY}, record"


def numbered(statement: str) -> str:
    """A portable statement with PostgreSQL's numbered parameters."""
    first, *rest = statement.split("?")
    return first + "".join(f"${number}{text}" for number, text in enumerate(rest, 1))


def _row_type(name: str, columns: str, *tables: Table) -> str:
    """A type of the session's own for given rows; each column as the first of the tables that has it."""
    kinds = [next(table.c[column].type for table in tables if column in table.c) for column in columns.split(", ")]
    given = ", ".join(f"{column} {_GIVEN_AS[type(kind)]}" for column, kind in zip(columns.split(", "), kinds, strict=True))
    return f"CREATE TYPE pg_temp.{name} AS ({given})"


ROW_TYPES = "; ".join(
    (
        _row_type("given_hold", rows.HOLD_COLUMNS, schema.LEDGER_HOLD),
        _row_type("given_step", _STEP_GIVEN, schema.LEDGER_STEP, schema.LEDGER_HOLD),
        _row_type("given_end", _END_GIVEN, schema.LEDGER_SETTLEMENT, schema.LEDGER_LATE),
    )
)
"""Made once in each session that writes. An array of rows costs the driver a quarter of what an array per column does."""


def _of(alias: str, columns: str) -> str:
    return ", ".join(f"{alias}.{name}" for name in columns.split(", "))


def _same_execution(one: str, other: str) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in _IDENTITY.split(", "))


def _given(kind: str, number: int) -> str:
    """The rows of one kind whose numbers are above the last durable one; none where the epoch is not the writer's."""
    rows_given = f"unnest(${number}::pg_temp.{kind}[]) AS given"
    return f"{kind} AS MATERIALIZED (SELECT given.* FROM fence, {rows_given} WHERE given.seq > fence.last_seq)"


def _write_statement() -> str:
    hold_values = rows.HOLD_COLUMNS.replace(" stream,", " stream <> 0,")
    return f"""
    WITH fence AS MATERIALIZED (SELECT last_seq FROM cell WHERE epoch = $1 FOR UPDATE),
    moved AS (UPDATE cell SET last_seq = $2 FROM fence WHERE fence.last_seq < $2),
    {_given("given_hold", 3)},
    {_given("given_step", 4)},
    {_given("given_end", 5)},
    held AS (
        INSERT INTO ledger_hold ({rows.HOLD_COLUMNS}) SELECT {hold_values} FROM given_hold
        RETURNING seq, {rows.COPIED_COLUMNS}
    ),
    known AS MATERIALIZED (
        SELECT seq, {rows.COPIED_COLUMNS} FROM held
        UNION ALL
        SELECT found.* FROM (SELECT {_IDENTITY} FROM given_step UNION SELECT {_IDENTITY} FROM given_end) AS named,
        LATERAL (
            SELECT seq, {rows.COPIED_COLUMNS} FROM ledger_hold AS hold WHERE {_same_execution("hold", "named")} LIMIT 1
        ) AS found
    ),
    stepped AS (
        INSERT INTO ledger_step (hold_seq, seq, attempt, replica, delivered_max)
        SELECT known.seq, step.seq, step.attempt, step.replica, step.delivered_max
        FROM given_step AS step LEFT JOIN known ON {_same_execution("known", "step")} AND known.seq < step.seq
    ),
    ended AS (
        INSERT INTO ledger_settlement (hold_seq, day, {rows.COPIED_COLUMNS}, {rows.END_COLUMNS})
        SELECT known.seq, {rows.DAY}, {_of("known", rows.COPIED_COLUMNS)}, {_of("given_end", rows.END_COLUMNS)}
        FROM given_end JOIN known ON {_same_execution("known", "given_end")} AND known.seq < given_end.seq
        ORDER BY given_end.seq
        ON CONFLICT (hold_seq) DO NOTHING
        RETURNING seq, hold_seq, {rows.LEAF}, window_names, cost_microusd,
            tenant_input_tokens + tenant_output_tokens AS tokens
    ),
    late AS (
        INSERT INTO ledger_late (seq, at_ms, {_IDENTITY}, record) SELECT seq, at_ms, {_IDENTITY}, record
        FROM given_end WHERE seq NOT IN (SELECT seq FROM ended)
    ),
    closed AS (DELETE FROM ledger_open WHERE hold_seq = ANY (ARRAY(SELECT hold_seq FROM ended))),
    opened AS (
        INSERT INTO ledger_open (hold_seq) SELECT seq FROM held WHERE seq NOT IN (SELECT hold_seq FROM ended)
    ),
    posted AS (
        INSERT INTO ledger_balance AS balance ({rows.LEAF}, budget_window, spent_microusd, spent_tokens)
        SELECT {rows.LEAF}, budget_window, sum(cost_microusd), sum(tokens)
        FROM ended, unnest(string_to_array(window_names, E'\\n')) AS budget_window
        WHERE cost_microusd + tokens > 0
        GROUP BY {rows.LEAF}, budget_window
        ON CONFLICT ({rows.LEAF}, budget_window) DO UPDATE SET
            spent_microusd = balance.spent_microusd + excluded.spent_microusd,
            spent_tokens = balance.spent_tokens + excluded.spent_tokens
    )
    SELECT count(*) FROM fence
    """


WRITE = _write_statement()
"""Parameters: the epoch, the group's last number, then the rows of holds, steps and ends. 0 for another epoch."""


def step_row(step: StepRecord) -> rows.Row:
    """A step's given columns."""
    return rows.step_row(step)[:-1]


def end_row(end: EndRecord, epoch: int) -> rows.Row:
    """An end's given columns."""
    return *rows.end_row(end, epoch)[:-1], rows.late_row(end)[-1]


LATEST_EXECUTION = numbered(rows.LATEST_EXECUTION)
OPEN_HOLDS = rows.OPEN_HOLDS
BALANCES = numbered(rows.BALANCES)
RECENT_TAKES = numbered(rows.RECENT_TAKES)
ADD_REJECTIONS = numbered(rows.ADD_REJECTIONS)
ROLL_UP = numbered(rows.ROLL_UP)
PRUNE = tuple(numbered(statement) for statement in rows.PRUNE)
PRUNE_OTHERS = (numbered(rows.PRUNE_LATE), numbered(rows.PRUNE_REJECTIONS))
