"""What the stores in PostgreSQL alone must withstand: lost connections, stopped servers, slow statements, two writers."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Iterator

import asyncpg
import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, make_url
from tests.contract.stores import T0_MS, execution, hold, settle, step
from tests.postgres_server import PostgresServer, shared_server, waiting_pid

from weir import errors
from weir.core.ledger.records import LedgerRecord
from weir.ports import UsageQuery
from weir.storage.postgres_catalog import create_postgres_engine
from weir.storage.postgres_database import open_postgres, prepare_postgres
from weir.storage.postgres_ledger import PostgresLedger
from weir.storage.postgres_session import PostgresSession
from weir.storage.schema import METADATA

STATEMENT_MS = 300


@pytest.fixture
def url() -> str:
    return shared_server().migrated_database()


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[PostgresLedger]:
    opened = PostgresLedger(url, STATEMENT_MS)
    yield opened
    await opened.aclose()


@pytest.fixture
async def foreign(url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A connection of somebody else's."""
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


def group(first_seq: int, name: str) -> list[LedgerRecord]:
    """One execution from its hold to its end."""
    named = execution(name)
    return [hold(first_seq, named), step(first_seq + 1, named), settle(first_seq + 2, named, cost=40)]


async def check_landed_once(ledger: PostgresLedger, requests: int) -> None:
    """Every group so far is there exactly once, and the books agree."""
    [row] = await ledger.usage(UsageQuery())
    assert (row.requests, row.cost_microusd) == (requests, 40 * requests)
    report = await ledger.verify()
    assert report.is_clean and (report.settlements, report.late, report.open_holds) == (requests, 0, 0)


async def test_a_connection_killed_in_the_middle_of_a_write(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: a write whose connection died is reported as unknown, and lands once when it is repeated."""
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, group(1, "before"))
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM cell FOR UPDATE")
        interrupted = asyncio.get_running_loop().create_task(ledger.write(epoch, group(4, "killed")))
        await foreign.execute("SELECT pg_terminate_backend($1)", await waiting_pid(foreign))
        with pytest.raises(errors.LedgerUnavailable) as lost:
            await interrupted
        assert not lost.value.not_written
    assert await ledger.find_execution("acme", "killed") is None
    for _ in range(2):
        await ledger.write(epoch, group(4, "killed"))
    await check_landed_once(ledger, 2)


async def test_a_slow_write_is_given_up_unwritten(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: a statement is bounded; one that is given up wrote nothing, reads go on, and the same group lands later."""
    epoch = (await ledger.open_epoch(0)).epoch
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM cell FOR UPDATE")
        with pytest.raises(errors.LedgerUnavailable) as late:
            await ledger.write(epoch, group(1, "late"))
        assert late.value.not_written
        assert await ledger.find_execution("acme", "late") is None
    await ledger.write(epoch, group(1, "late"))
    await check_landed_once(ledger, 1)


async def test_a_takeover_may_take_longer_than_a_write(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects a start on a large or a busy database: what is read once has a bound of its own, on the server and here."""
    async with foreign.transaction():
        await foreign.execute("LOCK TABLE ledger_balance IN ACCESS EXCLUSIVE MODE")
        taking_over = asyncio.get_running_loop().create_task(ledger.open_epoch(0))
        await waiting_pid(foreign)
        await foreign.execute("SELECT pg_sleep($1)", (4 * STATEMENT_MS + 1_000) / 1000)  # the client's grace, too
        assert not taking_over.done()
    recovery = await taking_over
    await ledger.write(recovery.epoch, group(1, "after"))
    await check_landed_once(ledger, 1)


async def test_a_cancelled_caller_leaves_the_write_whole(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: whoever stops waiting for a write neither stops it nor harms the next one, and closing waits for it."""
    epoch = (await ledger.open_epoch(0)).epoch
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM cell FOR UPDATE")
        caller = asyncio.get_running_loop().create_task(ledger.write(epoch, group(1, "left")))
        await waiting_pid(foreign)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    await ledger.write(epoch, group(4, "next"))
    await check_landed_once(ledger, 2)


async def test_a_write_that_meets_its_own_earlier_try_is_refused(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: a group that is repeated while its first try still runs cannot miss what that one writes: it is refused."""
    epoch = (await ledger.open_epoch(0)).epoch
    async with foreign.transaction():
        await foreign.execute("UPDATE cell SET last_seq = 3")  # what a first try does before it commits
        repeated = asyncio.get_running_loop().create_task(ledger.write(epoch, [*group(1, "tried"), *group(4, "next")]))
        await waiting_pid(foreign)
    with pytest.raises(errors.LedgerUnavailable) as overlapped:
        await repeated
    assert overlapped.value.not_written
    assert await ledger.find_execution("acme", "next") is None
    await ledger.write(epoch, group(4, "next"))
    assert await ledger.find_execution("acme", "next") is not None


async def test_a_replaced_writer_waits_and_is_refused(
    url: str, ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: a write that meets a takeover in progress writes nothing, whichever of them came first."""
    old = await ledger.open_epoch(0)
    async with foreign.transaction():
        await foreign.execute("UPDATE cell SET epoch = epoch + 1")
        write = asyncio.get_running_loop().create_task(ledger.write(old.epoch, group(1, "zombie")))
        await waiting_pid(foreign)
    with pytest.raises(errors.LedgerUnavailable) as overlapped:
        await write
    assert overlapped.value.not_written
    with pytest.raises(errors.StaleEpoch):
        await ledger.write(old.epoch, group(1, "zombie"))
    assert await ledger.find_execution("acme", "zombie") is None


async def test_reports_have_time_and_connections_of_their_own(
    ledger: PostgresLedger, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: a report may take longer than a write, and however many are asked for, requests are still looked up."""
    epoch = (await ledger.open_epoch(0)).epoch
    await ledger.write(epoch, group(1, "one"))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        async with foreign.transaction():
            await foreign.execute("LOCK TABLE usage_rollup, rejection, ledger_late")
            reports = [tasks.create_task(ledger.usage(UsageQuery())) for _ in range(4)]
            refusals = tasks.create_task(ledger.rejections())
            await waiting_pid(foreign)
            await foreign.execute("SELECT pg_sleep($1)", 2 * STATEMENT_MS / 1000)
            assert await ledger.find_execution("acme", "one") is not None
        assert [(await report)[0].requests for report in reports] == [1] * 4
        assert await refusals == []


async def test_text_that_an_engine_made_is_stored_as_far_as_it_can_be(ledger: PostgresLedger) -> None:
    """Protects: an engine's error with characters that the database refuses cannot stop the ledger."""
    epoch = (await ledger.open_epoch(0)).epoch
    ended = msgspec.structs.replace(settle(2, execution("odd")), error_detail="a\0b\ud800c")
    await ledger.write(epoch, [hold(1, execution("odd")), ended])
    found = await ledger.find_execution("acme", "odd")
    assert found is not None and found.record.error_detail == "a\N{REPLACEMENT CHARACTER}b?c"


_ROWS_READ = (
    "SELECT sum(idx_tup_read) + (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname LIKE 'ledger%') "
    "FROM pg_stat_user_indexes WHERE relname LIKE 'ledger%'"
)


async def rows_read(foreign: "asyncpg.Connection[asyncpg.Record]") -> int:
    """How many rows of the ledger were read so far, once every other connection has gone and has reported its own."""
    async with asyncio.timeout(10):
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        while await foreign.fetchval(others) > 1:
            await foreign.execute("SELECT pg_sleep(0.01)")
    await foreign.execute("SELECT pg_stat_clear_snapshot()")
    return int(await foreign.fetchval(_ROWS_READ))


async def test_taking_over_writing_and_finding_never_read_what_has_ended(
    url: str, foreign: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Protects: these cost what is open or recent, whatever the ledger has grown to since its statistics were made."""
    grown = PostgresLedger(url)
    epoch, seq = (await grown.open_epoch(0)).epoch, 1
    for i in range(20):
        names = [execution(f"r{i}-{n}") for n in range(100)]
        await grown.write(epoch, [hold(seq + n, named) for n, named in enumerate(names)])
        await grown.write(epoch, [step(seq + 100 + n, named) for n, named in enumerate(names)])
        await grown.write(epoch, [settle(seq + 200 + n, named) for n, named in enumerate(names)])
        seq += 300
    await grown.aclose()
    await foreign.execute("VACUUM ledger_open")  # as the server does by itself every minute
    await foreign.execute(
        "INSERT INTO ledger_balance SELECT 'acme', 'app', 'key', 'alias', 'batch', 'day/' || date '2020-01-01' + number, 1, 1 "
        "FROM generate_series(1, 2000) AS number"
    )
    before = await rows_read(foreign)
    ledger = PostgresLedger(url)
    recovery = await ledger.open_epoch(T0_MS + 1)
    await ledger.write(recovery.epoch, [hold(seq, execution("new"))])
    await ledger.write(recovery.epoch, [step(seq + 1, execution("new")), settle(seq + 2, execution("new"))])
    assert await ledger.prune(recovery.epoch, T0_MS + 2_000, 10) == 10
    found = await ledger.find_execution("acme", "r10-5")
    assert found is not None and not found.open
    await ledger.aclose()
    assert await rows_read(foreign) - before < 200


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    own = PostgresServer()
    own.start()
    yield own
    own.remove()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
async def test_a_server_that_goes_away_and_comes_back(server: PostgresServer, number: signal.Signals) -> None:
    """Protects: nothing acknowledged is lost, an interrupted write lands once, and neither store needs a new start."""
    ledger, catalog = await open_postgres(server.migrated_database())
    epoch, acknowledged = (await ledger.open_epoch(0)).epoch, 0
    stopping = asyncio.Event()

    async def write_until_refused() -> int:
        """The number of the group whose outcome is not known."""
        nonlocal acknowledged
        for i in range(100_000):
            try:
                await ledger.write(epoch, group(3 * i + 1, f"r{i}"))
            except errors.LedgerUnavailable:
                return i
            acknowledged = i + 1
            if acknowledged == 20:
                stopping.set()
        raise AssertionError("the server never stopped")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write_until_refused())
        await stopping.wait()
        await asyncio.to_thread(server.stop, number)
    with pytest.raises(errors.LedgerUnavailable) as refused:
        await ledger.write(epoch, group(3 * acknowledged + 1, f"r{acknowledged}"))
    assert refused.value.not_written
    with pytest.raises(errors.LedgerUnavailable):
        await ledger.find_execution("acme", "r0")
    with pytest.raises(errors.LedgerUnavailable):
        await catalog.load()
    await asyncio.to_thread(server.start)
    interrupted = writing.result()
    for i in (interrupted, interrupted + 1):
        await ledger.write(epoch, group(3 * i + 1, f"r{i}"))
    await check_landed_once(ledger, interrupted + 2)
    assert (await catalog.load()).version == 0
    recovery = await ledger.open_epoch(0)
    assert (recovery.epoch, recovery.next_seq) == (epoch + 1, 3 * (interrupted + 2) + 1)
    await ledger.aclose()
    await catalog.aclose()


# ── the database ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_starters_migrate_one_after_the_other() -> None:
    """Protects: cells that start at once on an empty database all find it migrated, once."""
    server = shared_server()
    url = server.create_database()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(prepare_postgres(url))
    assert server.sql("SELECT count(*), (SELECT count(*) FROM cell) FROM alembic_version", database=name_of(url)) == "1|1\n"


def differences(connection: Connection) -> list[object]:
    """Between the tables as they are and the metadata."""
    return list(compare_metadata(MigrationContext.configure(connection), METADATA))


async def test_migrations_and_metadata_agree(url: str) -> None:
    """Protects: a migrated database is what the metadata describes."""
    engine = create_postgres_engine(url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_text_is_compared_by_bytes_whatever_the_locale() -> None:
    """Protects: order, and the floors of windows, are the same on a database whose owner chose a language."""
    server = shared_server()
    url = server.create_database("template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'")
    ledger, catalog = await open_postgres(url)
    epoch = (await ledger.open_epoch(0)).epoch
    records = [record for i, key in enumerate("bBaA") for record in group_of_key(2 * i + 1, key)]
    await ledger.write(epoch, records)
    balances = (await ledger.open_epoch(T0_MS)).balances
    assert [balance.key for balance in balances if balance.window == "lifetime"] == ["A", "B", "a", "b"]
    assert [row.group["key"] for row in await ledger.usage(UsageQuery(group_by=("key",)))] == ["A", "B", "a", "b"]
    await ledger.aclose()
    await catalog.aclose()


def group_of_key(first_seq: int, key: str) -> list[LedgerRecord]:
    """One execution of a key, held and ended."""
    named = execution(f"of-{first_seq}")
    return [hold(first_seq, named, key=key), settle(first_seq + 1, named)]


async def test_a_database_that_cannot_be_used_is_refused_without_its_password() -> None:
    """Protects: a start on a newer, wrongly encoded, absent or unreachable database is refused, and shows no password."""
    server = shared_server()
    newer, latin = server.migrated_database(), server.create_database("template0 ENCODING 'LATIN1' LOCALE 'C'")
    server.sql("UPDATE alembic_version SET version_num = '9999'", database=name_of(newer))
    absent, nowhere = server.url("absent"), "postgresql://weir:hunter2@127.0.0.1:1/weir"
    said = {newer: "newer version", latin: "encoded as LATIN1", absent: '"absent" does not exist', nowhere: "Connect call"}
    for address, reason in said.items():
        secret = str(make_url(address).set(password="hunter2").render_as_string(hide_password=False))
        with pytest.raises(errors.StateUnreadable) as refused:
            await open_postgres(secret)
        assert reason in refused.value.detail and "hunter2" not in refused.value.detail


def name_of(url: str) -> str:
    """The database of a URL."""
    return url.rpartition("/")[2]


@pytest.mark.parametrize(
    ("fault", "is_told"), [(OSError("away"), False), (AssertionError("a bug"), True)], ids=["store", "bug"]
)
async def test_what_fails_for_a_caller_that_is_gone(url: str, fault: Exception, is_told: bool) -> None:
    """Protects logs: a store that fails behind a time limit is no fault of the loop's, and a bug there is."""
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context.get("exception")))
    session, begun, go_on = PostgresSession(url), asyncio.Event(), asyncio.Event()

    async def work(connection: object) -> None:
        begun.set()
        await go_on.wait()
        raise fault

    asked = asyncio.get_running_loop().create_task(session.run(work))
    await begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    go_on.set()
    await session.aclose()
    fault.__traceback__ = None
    del asked
    gc.collect()
    assert told == ([fault] if is_told else [])
