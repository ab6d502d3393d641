"""The contract of LeaderLease, in memory and in PostgreSQL: one holder at a time, by the store's clock, whatever breaks."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TypeAlias

import asyncpg
import pytest
from tests.contract.link_stand import HandClock
from tests.postgres_server import PostgresServer, shared_server, waiting_pid

from weir import errors
from weir.ports import LeaderLease
from weir.storage.memory_lease import MemoryLeaderLease
from weir.storage.postgres_lease import PostgresLeaderLease
from weir.storage.postgres_session import CONNECT_MS
from weir.units import Millis

TTL_MS = 60_000
BOUND_MS = 10_000
"""So generous that a busy machine never reaches it."""
ROUNDS = 25


class MemoryStand:
    """One lease in memory, which every holder shares."""

    def __init__(self) -> None:
        self._clock = HandClock()
        self._lease = MemoryLeaderLease(self._clock)

    def open(self) -> LeaderLease:
        return self._lease

    async def pass_ms(self, elapsed_ms: Millis) -> None:
        """The store's time passes."""
        self._clock.advance(elapsed_ms)


class PostgresStand:
    """A database of the test's own, and each holder with its own connection."""

    def __init__(self) -> None:
        self.url = shared_server().migrated_database()

    def open(self) -> LeaderLease:
        return PostgresLeaderLease(self.url, BOUND_MS)

    async def pass_ms(self, elapsed_ms: Millis) -> None:
        """The store's time passes: what is left of the lease becomes less."""
        connection = await asyncpg.connect(self.url)
        await connection.execute("UPDATE leader_lease SET until = until - $1::interval", timedelta(milliseconds=elapsed_ms))
        await connection.close()


AnyStand: TypeAlias = MemoryStand | PostgresStand
Open: TypeAlias = Callable[[], LeaderLease]
Foreign: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Leases: TypeAlias = tuple[PostgresLeaderLease, PostgresLeaderLease]


@pytest.fixture(params=[MemoryStand, PostgresStand], ids=["memory", "postgres"])
def stand(request: pytest.FixtureRequest) -> AnyStand:
    made: AnyStand = request.param()
    return made


@pytest.fixture
async def opened(stand: AnyStand) -> AsyncIterator[Open]:
    """Opens the lease once more; all are closed at the end."""
    async with AsyncExitStack() as stack:

        def open_one() -> LeaderLease:
            lease = stand.open()
            stack.push_async_callback(lease.aclose)
            return lease

        yield open_one


async def test_one_holds_it_until_its_time_is_over(stand: AnyStand, opened: Open) -> None:
    """Protects: who comes second gets it once the first one's time is over, and not a moment earlier."""
    first, second = opened(), opened()
    assert await first.take("a", TTL_MS)
    await stand.pass_ms(TTL_MS // 2)
    assert not await second.take("b", TTL_MS)
    await stand.pass_ms(TTL_MS // 2)
    assert await second.take("b", TTL_MS)
    assert not await first.take("a", TTL_MS)


async def test_who_waits_is_known_until_it_has_it(stand: AnyStand, opened: Open) -> None:
    """Protects a handover: the holder learns that another one asks, again and again, and that nobody does any more."""
    first, second = opened(), opened()
    assert await first.take("a", TTL_MS)
    assert not await first.is_awaited("a")
    for _ in range(2):
        assert not await second.take("b", TTL_MS)
        assert await first.take("a", TTL_MS)
        assert await first.is_awaited("a")
    await first.give_back("a")
    assert await second.take("b", TTL_MS)
    assert not await second.is_awaited("b")
    assert not await first.take("a", TTL_MS)
    assert await second.is_awaited("b")


async def test_who_waited_and_is_gone_waits_no_more() -> None:
    """Protects a handover to nobody: what a standby said ends with its connection."""
    stand = PostgresStand()
    first, second = stand.open(), stand.open()
    assert await first.take("a", TTL_MS) and not await second.take("b", TTL_MS)
    await second.aclose()
    for _ in range(1_000):
        if not await first.is_awaited("a"):
            break
        await asyncio.sleep(0.01)  # the server ends a session in its own time
    assert not await first.is_awaited("a")
    await first.aclose()


async def test_renewing_extends_it(stand: AnyStand, opened: Open) -> None:
    """Protects a living holder: each renewal counts from itself, and asking for what another one has extends nothing."""
    first, second = opened(), opened()
    assert await first.take("a", TTL_MS)
    for _ in range(4):
        await stand.pass_ms(TTL_MS * 2 // 3)
        assert not await second.take("b", TTL_MS)
        assert await first.take("a", TTL_MS)
    await stand.pass_ms(TTL_MS * 2 // 3)
    assert not await second.take("b", TTL_MS)
    await stand.pass_ms(TTL_MS // 3)
    assert await second.take("b", TTL_MS)


async def test_a_holder_that_comes_late_renews_what_nobody_took(stand: AnyStand, opened: Open) -> None:
    """Protects a cell without a standby: a pause longer than the lease costs it nothing."""
    lease, other = opened(), opened()
    assert await lease.take("a", TTL_MS)
    await stand.pass_ms(10 * TTL_MS)
    assert await lease.take("a", TTL_MS)
    assert not await other.take("b", TTL_MS)


async def test_force_takes_it_from_a_living_holder(opened: Open) -> None:
    """Protects a takeover by hand: it is the new one's at once, and the old one hears so with its next renewal."""
    first, second = opened(), opened()
    assert await second.take("b", TTL_MS, by_force=True)
    assert await first.take("a", TTL_MS, by_force=True)
    assert not await second.take("b", TTL_MS)
    assert await first.take("a", TTL_MS)


async def test_giving_back_frees_it_at_once_and_only_ones_own(opened: Open) -> None:
    """Protects: a standby need not wait for a coordinator that went by itself; nobody can give back what is another's."""
    first, second = opened(), opened()
    await first.give_back("a")
    assert await first.take("a", TTL_MS)
    await second.give_back("b")
    assert not await second.take("b", TTL_MS)
    await first.give_back("a")
    assert await second.take("b", TTL_MS)
    await first.give_back("a")
    assert not await first.take("a", TTL_MS)


async def test_of_several_at_once_exactly_one_gets_it(stand: AnyStand, opened: Open) -> None:
    """Protects: however they meet, when it is free for the first time, was given back, or its time is over, one has it."""
    holders = {name: opened() for name in ("a", "b", "c", "d")}
    for number in range(ROUNDS):
        answers = await asyncio.gather(*(lease.take(name, TTL_MS) for name, lease in holders.items()))
        [holder] = [name for name, taken in zip(holders, answers, strict=True) if taken]
        if number % 2:
            await holders[holder].give_back(holder)
        else:
            await stand.pass_ms(TTL_MS)


# ── PostgreSQL alone ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def url() -> str:
    return shared_server().migrated_database()


@pytest.fixture
async def leases(url: str) -> AsyncIterator[Leases]:
    """Two processes' leases."""
    both = PostgresLeaderLease(url, BOUND_MS), PostgresLeaderLease(url, BOUND_MS)
    yield both
    for lease in both:
        await lease.aclose()


@pytest.fixture
async def foreign(url: str) -> AsyncIterator[Foreign]:
    """A connection of somebody else's."""
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


async def test_its_time_is_the_servers_and_passes_by_itself(leases: Leases, foreign: Foreign) -> None:
    """Protects: no clock of a holder decides: the time that is stored is the server's own, and so is that of every answer."""
    first, second = leases
    before = await foreign.fetchval("SELECT clock_timestamp()")
    assert await first.take("a", TTL_MS)
    until, after = [await foreign.fetchval(f"SELECT {time} FROM leader_lease") for time in ("until", "clock_timestamp()")]
    assert before <= until - timedelta(milliseconds=TTL_MS) <= after
    await foreign.execute("UPDATE leader_lease SET until = clock_timestamp() + interval '300 milliseconds'")
    async with asyncio.timeout(10):
        while not await second.take("b", TTL_MS):
            assert await foreign.fetchval("SELECT holder FROM leader_lease") == "a"
    assert await foreign.fetchval("SELECT clock_timestamp()") >= before + timedelta(milliseconds=300)


async def test_a_renewal_that_waited_counts_from_its_end(leases: Leases, foreign: Foreign) -> None:
    """Protects: of two renewals that overlap the earlier one cannot shorten what the later one was promised."""
    lease, _ = leases
    assert await lease.take("a", TTL_MS)
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM leader_lease FOR UPDATE")
        renewing = asyncio.get_running_loop().create_task(lease.take("a", TTL_MS))
        await waiting_pid(foreign)
        freed = await foreign.fetchval("SELECT clock_timestamp()")
    assert await renewing
    assert await foreign.fetchval("SELECT until FROM leader_lease") >= freed + timedelta(milliseconds=TTL_MS)


async def test_whoever_waited_decides_by_what_it_finds_then(leases: Leases, foreign: Foreign) -> None:
    """Protects: a lease that was over as one asked, and another's as it was its turn, is the other's."""
    lease, _ = leases
    assert await lease.take("a", TTL_MS)
    await foreign.execute("UPDATE leader_lease SET until = clock_timestamp()")
    async with foreign.transaction():
        await foreign.execute("UPDATE leader_lease SET holder = 'b', until = clock_timestamp() + interval '1 minute'")
        late = asyncio.get_running_loop().create_task(lease.take("a", TTL_MS))
        await waiting_pid(foreign)
    assert not await late


async def test_a_connection_killed_in_the_middle_of_a_renewal(leases: Leases, foreign: Foreign) -> None:
    """Protects: a renewal without an answer is no renewal to whoever asked; repeated, it works, and nobody else has it."""
    first, second = leases
    assert await first.take("a", TTL_MS)
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM leader_lease FOR UPDATE")
        interrupted = asyncio.get_running_loop().create_task(first.take("a", TTL_MS))
        await foreign.execute("SELECT pg_terminate_backend($1)", await waiting_pid(foreign))
        with pytest.raises(errors.LedgerUnavailable):
            await interrupted
    assert not await second.take("b", TTL_MS)
    assert await first.take("a", TTL_MS)


async def test_connections_that_are_killed_at_any_moment_never_make_two_holders(leases: Leases, foreign: Foreign) -> None:
    """Protects: whichever connections die while several ask, at most one is told that it has it, and it does."""

    async def ask(lease: PostgresLeaderLease, name: str) -> bool:
        """The last answer of several; False where it was lost."""
        answer = False
        for _ in range(5):
            try:
                answer = await lease.take(name, TTL_MS)
            except errors.LedgerUnavailable:
                answer = False
        return answer

    async def kill() -> None:
        while not all(task.done() for task in asking.values()):
            await foreign.execute(f"SELECT pg_terminate_backend(pid) {others}")

    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    for _ in range(ROUNDS):
        async with asyncio.TaskGroup() as tasks:
            asking = {name: tasks.create_task(ask(lease, name)) for name, lease in zip("ab", leases, strict=True)}
            tasks.create_task(kill())
        told = [name for name, task in asking.items() if task.result()]
        assert told in ([], [await foreign.fetchval("SELECT holder FROM leader_lease")])
        await foreign.execute("DELETE FROM leader_lease")


async def test_waiting_is_bounded_and_leaves_nothing_behind(url: str, leases: Leases, foreign: Foreign) -> None:
    """Protects a holder's own clock: no answer within the bound, or a third of the time, is a fault; the next try works."""
    lease, _ = leases
    short = PostgresLeaderLease(url, 300)
    assert await lease.take("a", TTL_MS)
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM leader_lease FOR UPDATE")
        for slow in (lease.take("a", 900), short.take("b", TTL_MS), short.give_back("a")):
            with pytest.raises(errors.LedgerUnavailable):
                async with asyncio.timeout(5):
                    await slow
    await short.aclose()
    assert await lease.take("a", TTL_MS)


async def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    """Protects: connecting is within the bound, too, and so is waiting for one's own earlier try."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        lease = PostgresLeaderLease(f"postgresql://weir@127.0.0.1:{mute.getsockname()[1]}/weir", BOUND_MS)
        async with asyncio.timeout(CONNECT_MS / 1000 / 2):
            answers = await asyncio.gather(*(lease.take("a", 1_500) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [errors.LedgerUnavailable] * 3
        await lease.aclose()


async def test_a_caller_that_stops_waiting_harms_no_other(leases: Leases, foreign: Foreign) -> None:
    """Protects: a renewal that is cancelled leaves the lease usable, and whose it is."""
    first, second = leases
    assert await first.take("a", TTL_MS)
    async with foreign.transaction():
        await foreign.execute("SELECT * FROM leader_lease FOR UPDATE")
        caller = asyncio.get_running_loop().create_task(first.take("a", TTL_MS))
        await waiting_pid(foreign)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert await first.take("a", TTL_MS)
    assert not await second.take("b", TTL_MS)


async def test_a_closed_lease_is_refused_and_stays_whose_it_is(
    leases: Leases,
) -> None:
    """Protects: closing gives nothing back by itself, may be repeated, and no connection is opened after it."""
    first, second = leases
    assert await first.take("a", TTL_MS)
    for _ in range(2):
        await first.aclose()
    for closed in (first.take("a", TTL_MS), first.give_back("a")):
        with pytest.raises(errors.LedgerUnavailable):
            await closed
    assert not await second.take("b", TTL_MS)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    own = PostgresServer()
    own.start()
    yield own
    own.remove()


async def test_a_server_that_goes_away_and_comes_back(server: PostgresServer) -> None:
    """Protects: without the server nobody is told that it has the lease; with it, it is still whose it was."""
    url = server.migrated_database()
    first, second = PostgresLeaderLease(url, BOUND_MS), PostgresLeaderLease(url, BOUND_MS)
    assert await first.take("a", TTL_MS)
    assert not await second.take("b", TTL_MS)
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(BOUND_MS / 1000):
        for lost in (first.take("a", TTL_MS), second.take("b", TTL_MS), second.take("b", TTL_MS), first.give_back("a")):
            with pytest.raises(errors.LedgerUnavailable):
                await lost
    await asyncio.to_thread(server.start)
    assert not await second.take("b", TTL_MS)
    assert await first.take("a", TTL_MS)
    await first.give_back("a")
    assert await second.take("b", TTL_MS)
    for lease in (first, second):
        await lease.aclose()
