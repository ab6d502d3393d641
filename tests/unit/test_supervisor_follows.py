"""The supervisor follows what is wanted: pools come, change and go while it runs, and no work is lost by that."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.supervisor_stand import (
    GRACE_MS,
    OTHER,
    POOL,
    PROBE_S,
    REVISION,
    START_S,
    Launches,
    Stand,
    ToldFleet,
    play,
    wanted,
)

from weir.config import EngineConfig
from weir.control.supervisor import Supervisor
from weir.core.registry.model import Pool
from weir.core.routing.replica import ReplicaState
from weir.core.tenancy import ServiceClass
from weir.engines.simulated import SimulatedEngine
from weir.messages import ReplicaAddress
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run

READY, DRAINING, STARTING = ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STARTING
SECOND = Pool("q", "w", 1, 3)
QUIET_S = 3.0
GRACE_S = GRACE_MS / 1e3
URLS = replace(POOL, urls=("http://one", "http://two"))


# ── pools that come and go ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_is_wanted_now_is_started_beside_the_others() -> None:
    """Protects a new model: its replicas start while everything runs, and nothing else is touched."""

    async def script(stand: Stand) -> None:
        stand.follow(POOL, SECOND)
        assert stand.is_offered("q") and stand.states("q") == {}
        await stand.until(lambda: stand.lanes("q") == 3)
        assert stand.told() == ["pool q", "ready q-2"] and stand.states() == {"p-1": READY}
        stand.follow(POOL, SECOND)
        assert stand.told() == []

    play(script, POOL)


def test_a_pool_that_is_not_wanted_serves_until_nobody_needs_it() -> None:
    """Protects what was admitted before: nothing is drained while anything waits or runs, nor a moment later."""

    async def script(stand: Stand) -> None:
        stand.busy.add("p")
        stand.follow(SECOND)
        await asyncio.sleep(20)
        assert stand.states() == {"p-1": READY} and stand.is_offered()
        stand.busy.clear()
        await asyncio.sleep(QUIET_S - 0.5)
        assert stand.states() == {"p-1": READY}
        await stand.until(lambda: not stand.is_offered(), 2)
        assert stand.told() == ["drain p-1", "gone p-1", "withdraw p"] and stand.launches.running == 1

    play(script, POOL, SECOND)


def test_a_pool_that_never_rests_goes_after_the_grace() -> None:
    """Protects an operator from a pool that would stay for ever: the grace is the bound of all of it."""

    async def script(stand: Stand) -> None:
        stand.busy |= {"p", "p-1"}
        began_s = stand.now_s
        stand.follow(SECOND)
        await stand.until(lambda: not stand.is_offered())
        assert GRACE_S <= stand.now_s - began_s < GRACE_S + 2

    play(script, POOL, SECOND)


def test_what_a_replica_was_given_in_the_last_moment_is_finished() -> None:
    """Protects the request that was placed as control drained: its process is stopped once nothing runs there."""

    async def script(stand: Stand) -> None:
        stand.busy.add("p-1")
        stand.follow()
        await stand.until(lambda: stand.states() == {"p-1": DRAINING})
        await asyncio.sleep(15)
        assert stand.launches.running == 1
        stand.busy.clear()
        await stand.until(lambda: not stand.is_offered(), 2)

    play(script, POOL)


def test_a_pool_that_is_wanted_again_stays_as_it_is() -> None:
    """Protects a change that is taken back: whoever was let go and not drained serves on, and nothing is started."""

    async def script(stand: Stand) -> None:
        stand.follow()
        await asyncio.sleep(QUIET_S - 1)
        stand.follow(POOL)
        await asyncio.sleep(2 * GRACE_S)
        assert stand.told() == [] and stand.states() == {"p-1": READY}
        stand.follow()
        await stand.until(lambda: not stand.is_offered(), 10)

    play(script, POOL)


def test_a_pool_that_is_wanted_again_too_late_is_started_again() -> None:
    """Protects the same where it was drained: its successor starts beside it at once."""

    async def script(stand: Stand) -> None:
        stand.busy.add("p-1")
        stand.follow()
        await stand.until(lambda: stand.states() == {"p-1": DRAINING})
        stand.follow(POOL)
        await stand.until(lambda: stand.states() == {"p-1": DRAINING, "p-2": READY})
        stand.busy.clear()
        await stand.until(lambda: stand.states() == {"p-2": READY})
        assert stand.is_offered() and "withdraw p" not in stand.told()

    play(script, POOL)


def test_pools_of_a_revoked_revision_are_not_waited_for() -> None:
    """Protects from what must not run any more: drained at once, also where it was going slowly, and stopped as it rests."""

    async def script(stand: Stand) -> None:
        stand.busy.add("p")
        stand.follow(SECOND)
        await asyncio.sleep(1)
        assert stand.told() == []
        stand.follow(SECOND, revoked={"v"})
        assert stand.states() == {"p-1": READY}
        await asyncio.sleep(0)
        assert stand.told() == ["drain p-1"]
        await stand.until(lambda: not stand.is_offered(), 2)
        stand.follow(revoked={"v", "w"})
        await asyncio.sleep(0)
        assert stand.told() == ["gone p-1", "withdraw p", "drain q-2"]

    play(script, POOL, SECOND)


def test_a_replica_that_starts_is_stopped_at_once() -> None:
    """Protects machines: what never served has nothing to finish, and its process does not outlive the wish."""

    async def script(stand: Stand) -> None:
        stand.follow(POOL, SECOND)
        await asyncio.sleep(START_S / 2)
        stand.follow(POOL, revoked={"w"})
        await asyncio.sleep(0.5)
        assert not stand.is_offered("q") and stand.told() == ["pool q", "gone q-2", "withdraw q"]
        await asyncio.sleep(2 * START_S)
        assert stand.launches.running == 1 and len(stand.launches.processes) == 1

    play(script, POOL)


def test_a_pool_that_goes_before_anything_runs_leaves_nothing() -> None:
    """Protects the start: what is declared and then not wanted is never started, and not waited for."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stand = Stand(loop)
        stand.follow(POOL, SECOND)
        stand.follow(SECOND)
        assert stand.told() == ["pool p", "pool q", "withdraw p"]
        running = loop.create_task(stand.supervisor.run())
        assert await stand.supervisor.wait_ready({"v", "w"})
        assert [pool.name for pool in stand.launches.launched] == ["q"]
        running.cancel()
        await asyncio.wait([running])
        stand.follow()  # a change that comes as everything stops
        assert stand.told()[-1] == "withdraw q" and stand.launches.running == 0

    run(scene(), until_ms=60_000)


# ── pools that change ────────────────────────────────────────────────────────────────────────────────────────────────


def test_more_replicas_start_at_once_and_fewer_go_the_newest_first() -> None:
    """Protects capacity that is asked for, and the oldest replicas, which are known to serve."""

    async def script(stand: Stand) -> None:
        stand.follow(replace(POOL, replicas=4))
        await asyncio.sleep(0.1)
        assert list(stand.states().values()) == [READY, STARTING, STARTING, STARTING]
        await stand.until(lambda: stand.lanes() == 8)
        stand.busy.add("p-3")
        stand.told()
        stand.follow(replace(POOL, replicas=2))
        await asyncio.sleep(1.5)
        assert stand.told() == ["pool p", "drain p-3", "drain p-4", "gone p-4"]
        assert stand.states() == {"p-1": READY, "p-2": READY, "p-3": DRAINING}
        await stand.until(lambda: len(stand.states()) == 2)
        assert stand.launches.running == 2

    play(script, POOL)


def test_replicas_with_other_lanes_follow_one_another() -> None:
    """Protects service through a change: never fewer replicas than wanted, and never more than one beside them."""
    three = replace(POOL, replicas=3)

    async def script(stand: Stand) -> None:
        stand.follow(replace(three, concurrency=5))
        least, most = 99, 0
        while stand.lanes() != 15 or stand.launches.running > 3:
            serving = [replica for replica in stand.states().values() if replica is READY]
            least, most = min(least, len(serving)), max(most, len(stand.states()))
            await asyncio.sleep(0.1)
        assert (least, most) == (3, 4)
        assert [pool.concurrency for pool in stand.launches.launched] == [2, 2, 2, 5, 5, 5]
        order = [line for line in stand.told() if not line.startswith("pool")]
        pairs = [("p-4", "p-1"), ("p-5", "p-2"), ("p-6", "p-3")]
        assert order == [line for new, old in pairs for line in (f"ready {new}", f"drain {old}", f"gone {old}")]

    play(script, three)


def test_a_successor_that_does_not_start_takes_nothing_away() -> None:
    """Protects service from a setting that no engine starts with: who serves serves on, and the reason is to be read."""

    async def script(stand: Stand) -> None:
        stand.launches.faults["p"] = "no memory for so many slots"
        stand.follow(replace(POOL, concurrency=900))
        await stand.until(lambda: stand.supervisor.failures_of("p") == 3)
        assert stand.supervisor.fault_of("p") == "no memory for so many slots" and stand.states()["p-1"] is READY
        stand.follow(POOL)
        await asyncio.sleep(START_S + 1)
        assert stand.states() == {"p-1": READY}
        await asyncio.sleep(100)
        assert len(stand.launches.launched) <= 5, "the successor is still tried"

    play(script, POOL)


def test_a_change_of_everything_comes_to_rest() -> None:
    """Protects from changes on top of changes: what is wanted last is what there is in the end."""

    async def script(stand: Stand) -> None:
        for number, (replicas, concurrency) in enumerate([(3, 2), (1, 4), (2, 4), (5, 1), (2, 3)]):
            stand.follow(replace(POOL, replicas=replicas, concurrency=concurrency))
            await asyncio.sleep(3 * number)
        await stand.until(lambda: stand.lanes() == 6 and len(stand.states()) == 2)
        assert stand.launches.running == 2

    play(script, POOL)


def test_addresses_that_are_added_and_taken_away() -> None:
    """Protects engines behind URLs: a new one is probed and serves, one that is taken away is drained at once."""

    async def script(stand: Stand) -> None:
        stand.busy.add("p-1")
        stand.follow(replace(POOL, urls=("http://two", "http://three")))
        await stand.until(lambda: stand.states() == {"p-1": DRAINING, "p-2": READY, "p-3": READY})
        assert stand.fleet.address_of("p-3").url == "http://three"
        stand.follow(replace(POOL, urls=("http://two",)))
        await asyncio.sleep(1)
        assert stand.states() == {"p-1": DRAINING, "p-2": READY}
        assert stand.launches.launched == []

    play(script, URLS)


def test_the_lanes_of_an_address_change_without_a_gap() -> None:
    """Protects the only engine of a pool: it has its new lanes before the old ones take no more work."""

    async def script(stand: Stand) -> None:
        stand.follow(replace(POOL, urls=("http://one",), concurrency=7))
        await stand.until(lambda: stand.lanes() == 7)
        assert stand.told() == ["pool p", "ready p-2", "drain p-1", "gone p-1"]

    play(script, replace(POOL, urls=("http://one",)))


def test_what_only_the_coordinator_has_to_know_restarts_nothing() -> None:
    """Protects running replicas: whom a pool serves, and how long an input, is in force at once."""
    narrow = replace(POOL, tenant="acme", service_classes=(ServiceClass.BATCH,), input_tokens_max=9, idle_stop_ms=5)

    async def script(stand: Stand) -> None:
        stand.follow(narrow)
        assert stand.told() == ["pool p"] and stand.fleet.pool("p").pool == narrow
        await asyncio.sleep(GRACE_S)
        assert stand.told() == [] and stand.states() == {"p-1": READY}

    play(script, POOL)


def test_a_pool_becomes_one_on_demand_and_back() -> None:
    """Protects machines that idle: its replica stops once nobody asked for a while, and starts when it is wanted always."""
    asked = replace(POOL, on_demand=True, idle_stop_ms=10_000)

    async def script(stand: Stand) -> None:
        stand.follow(asked)
        await asyncio.sleep(9)
        assert stand.states() == {"p-1": READY}
        await stand.until(lambda: stand.states() == {}, 5)
        stand.supervisor.demand("p")
        await stand.until(lambda: stand.lanes() == 2, 10)
        await stand.until(lambda: stand.states() == {}, 20)
        stand.follow(POOL)
        await stand.until(lambda: stand.lanes() == 2, 10)
        await asyncio.sleep(100)
        assert stand.lanes() == 2

    play(script, POOL)


def test_a_pool_never_serves_another_revision() -> None:
    """Protects requests that were promised one: whoever wants that makes another pool."""

    async def script(stand: Stand) -> None:
        with pytest.raises(AssertionError):
            stand.follow(replace(POOL, revision="w"))

    play(script, POOL)


# ── how it goes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_does_not_start_says_why_and_how_often() -> None:
    """Protects whoever waits for a new model: the reason of the last failure, and how many there were since it was ready."""

    async def script(stand: Stand) -> None:
        supervisor, faults = stand.supervisor, stand.launches.faults
        assert (supervisor.fault_of("p"), supervisor.failures_of("p")) == (None, 0)
        assert (supervisor.fault_of("q"), supervisor.failures_of("q")) == (None, 0)
        faults["q"] = "no such file"
        stand.follow(POOL, SECOND)
        await stand.until(lambda: supervisor.failures_of("q") == 1)
        assert supervisor.fault_of("q") == "no such file"
        await stand.until(lambda: supervisor.failures_of("q") == 4)
        faults.clear()
        await stand.until(lambda: stand.lanes("q") == 3)
        assert supervisor.failures_of("q") == 0
        stand.launches.processes[-1].gone.set()
        await stand.until(lambda: supervisor.failures_of("q") == 1)
        assert supervisor.fault_of("q") == "The engine process exited."
        stand.follow(POOL, revoked={"w"})
        await asyncio.sleep(0.5)
        assert (supervisor.fault_of("q"), supervisor.failures_of("q")) == (None, 0)

    play(script, POOL)


def test_a_pool_behind_urls_counts_probes_until_the_first_that_is_answered() -> None:
    """Protects the same for engines that run elsewhere: once one served, what fails later is no failed start."""

    async def script(stand: Stand) -> None:
        stand.engine.lose("p-1")
        await asyncio.sleep(3 * PROBE_S)
        assert stand.supervisor.failures_of("p") == 0 and stand.states()["p-1"] is ReplicaState.SUSPECT
        stand.engine.lose("q-2")
        stand.follow(replace(POOL, urls=("http://one",)), replace(SECOND, urls=("http://two",)))
        await stand.until(lambda: stand.supervisor.failures_of("q") >= 2)
        stand.engine.restore("q-2")
        await stand.until(lambda: stand.lanes("q") == 3)
        assert stand.supervisor.failures_of("q") == 0

    play(script, replace(POOL, urls=("http://one",)))


@pytest.mark.parametrize("gone", [True, False])
def test_a_start_waits_for_what_is_wanted_and_no_longer(gone: bool) -> None:
    """Protects a start from a pool that cannot be ready: one that is not wanted any more, on demand, or wants nobody."""

    async def script(stand: Stand) -> None:
        stand.launches.faults["q"] = "never"
        stand.follow(POOL, SECOND)
        waiting = asyncio.get_running_loop().create_task(stand.supervisor.wait_ready({"v", "w"}))
        await asyncio.sleep(60)
        assert not waiting.done()
        if gone:
            stand.follow(POOL)
        else:
            stand.follow(POOL, SECOND, Pool("second", "w", 1, 1))
            assert not waiting.done()
        await asyncio.wait_for(waiting, START_S + 1)
        for pool in (Pool("idle", "x", 1, 1, on_demand=True), Pool("none", "x", 0, 1)):
            stand.follow(POOL, pool)
            await asyncio.wait_for(stand.supervisor.wait_ready({"v", "x", "unheard of"}), 0.1)

    play(script, POOL)


class LastMoment(SimulatedEngine):
    """An engine whose third answer to a probe of a replica comes in the moment in which it is let go."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        super().__init__()
        self._let_go = let_go

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        if replica.pace is not None:
            self._let_go()
        return await super().probe(replica)


def test_a_replica_that_is_let_go_as_it_gets_ready_is_given_nothing() -> None:
    """Protects the request that would be placed on it: it ends with the process, which is about to stop."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = StepClock(loop)
        fleet, launches = ToldFleet(clock), Launches()
        engine = LastMoment(lambda: supervisor.follow([], {REVISION.id}))
        supervisor = Supervisor(fleet, launches, lambda kind: engine, EngineConfig(), clock)
        supervisor.follow(wanted(POOL))
        running = loop.create_task(supervisor.run())
        await asyncio.sleep(60)
        assert "ready p-1" not in fleet.told and fleet.told[-2:] == ["gone p-1", "withdraw p"] and launches.running == 0
        running.cancel()
        await asyncio.wait([running])
        await engine.aclose()

    run(scene(), until_ms=120_000)


def test_a_failure_of_the_supervisor_itself_ends_all_of_it() -> None:
    """Protects from a supervisor that goes on by halves: what no engine does is raised, and every process is stopped."""

    class Broken(Launches):
        async def launch(self, revision: object, pool: Pool) -> object:  # type: ignore[override]
            if pool.name == "q":
                raise ValueError("a fault of ours")
            return await super().launch(REVISION, pool)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stand = Stand(loop)
        launches = Broken()
        engine = SimulatedEngine()
        supervisor = Supervisor(stand.fleet, launches, lambda kind: engine, EngineConfig(), StepClock(loop))  # type: ignore[arg-type]
        supervisor.follow(wanted(POOL))
        running = loop.create_task(supervisor.run())
        await supervisor.wait_ready({"v"})
        supervisor.follow([*wanted(POOL), (SECOND, OTHER)])
        await asyncio.wait([running])
        assert isinstance(running.exception(), ExceptionGroup) and launches.running == 0
        supervisor.follow([])
        await engine.aclose()

    run(scene(), until_ms=60_000)
