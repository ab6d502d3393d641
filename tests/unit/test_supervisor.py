"""The supervisor: a replica that idles is drained before it is stopped, and what a warm-up showed stays with its replica."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from weir.clock import SystemClock
from weir.config import EngineConfig
from weir.control.supervisor import Supervisor
from weir.coordinator.fleet import Fleet
from weir.core.metering import Price
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.core.routing.replica import ReplicaState
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, EngineRun, EngineSink

REVISION = Revision("v", EngineKind.SIMULATED, "demo", 512, 128, 64, Price(1, 1, 1, 1))
POOL = Pool("p", "v", 1, 2, on_demand=True, idle_stop_ms=1)


class Process:
    """A process that runs until it is stopped."""

    url = "http://replica"
    api_key = None

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._gone = asyncio.Event()

    async def wait(self) -> int:
        await self._gone.wait()
        return 0

    async def stop(self, grace_ms: int) -> None:
        if not self._gone.is_set():
            self._on_stop()
        self._gone.set()


class Launches:
    """A launcher of processes that exist only here."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop

    async def launch(self, revision: Revision, pool: Pool) -> Process:
        return Process(self._on_stop)


async def test_an_idle_replica_takes_no_work_while_it_stops() -> None:
    """Protects the request that comes as an on-demand replica stops: it is not given to a process that ends."""
    fleet, engine, stopped = Fleet(SystemClock()), SimulatedEngine(), asyncio.Event()
    ready_then: list[int] = []

    def note_stop() -> None:
        ready_then.append(len(fleet.ready_addresses()))
        supervisor.demand("p")  # a request that finds nobody, in this very moment
        stopped.set()

    supervisor = Supervisor(fleet, Launches(note_stop), lambda kind: engine, EngineConfig(), SystemClock())
    supervisor.follow([(POOL, REVISION)])
    supervisor.demand("p")
    running = asyncio.get_running_loop().create_task(supervisor.run())
    try:
        async with asyncio.timeout(30):
            await stopped.wait()
            assert ready_then == [0]
            stopped.clear()
            await stopped.wait()  # the second replica, started by that request, idled as well
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.aclose()
    assert set(ready_then) == {0} and running.cancelled()


class Heard(SimulatedEngine):
    """A simulated engine that counts its calls. fails: its replicas are lost as they generate, and at once back."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(SimulatedReplica(kv_tokens=4_096))
        self.calls = 0
        self.called_twice = asyncio.Event()
        self._fails = fails

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        self.calls += 1
        if self.calls == 2:
            self.called_twice.set()
        if not self._fails:
            return super().start(call, sink)
        self.lose(call.replica.name)
        run = super().start(call, sink)
        self.restore(call.replica.name)
        return run


class HearingFleet(Fleet):
    """A fleet that remembers what probes answered."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.answers: list[ReplicaAddress] = []
        self._several = asyncio.Event()

    def answered(self, address: ReplicaAddress) -> None:
        super().answered(address)
        self.answers.append(address)
        if len(self.answers) == 3:
            self._several.set()

    async def same_address(self) -> ReplicaAddress:
        """The address of three answers, which must be the same."""
        await self._several.wait()
        assert len(set(self.answers[:3])) == 1
        return self.answers[0]


@asynccontextmanager
async def kept(engine: Heard, pool: Pool, revision: Revision) -> AsyncIterator[HearingFleet]:
    """The fleet of a pool that is kept while the block runs, for half a minute at most."""
    fleet, config = HearingFleet(), EngineConfig(probe_ms=10, restart_backoff_ms=10)
    supervisor = Supervisor(fleet, Launches(lambda: None), lambda kind: engine, config, SystemClock())
    supervisor.follow([(pool, revision)])
    running = asyncio.get_running_loop().create_task(supervisor.run())
    try:
        async with asyncio.timeout(30):
            yield fleet
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.aclose()


URL = Pool("p", "v", 1, 2, urls=("http://replica",))


@pytest.mark.parametrize("pool", [Pool("p", "v", 1, 2), URL])
async def test_a_replica_keeps_its_pace(pool: Pool) -> None:
    """Protects predictions: warmed up once, before anything is given to it; every later probe says the same."""
    engine = Heard()
    async with kept(engine, pool, REVISION) as fleet:
        address = await fleet.same_address()
    assert address.pace is not None and address.pace.output_ms > 1 and address.kv_tokens == 4_096
    assert engine.calls == 3


async def test_an_engine_of_others_is_not_asked_to_generate() -> None:
    """Protects the bill: a hosted replica is ready without a generation, and has no pace."""
    engine = Heard()
    async with kept(engine, URL, replace(REVISION, external=True)) as fleet:
        assert (await fleet.same_address()).pace is None
    assert not engine.calls


async def test_a_warm_up_that_fails_is_told_and_changes_nothing_behind_a_url() -> None:
    """Protects service: whether a replica behind a URL is ready, its probes say; an operator reads what it did not do."""
    engine = Heard(fails=True)
    with capture_logs() as logs:
        async with kept(engine, URL, REVISION) as fleet:
            assert (await fleet.same_address()).pace is None
            [view] = fleet.pools
            assert [replica.state for replica in view.replicas.values()] == [ReplicaState.READY]
    [line] = logs
    assert (line["event"], line["log_level"], line["pool"], engine.calls) == ("replica_not_warm", "warning", "p", 1)


async def test_a_launched_replica_that_does_not_generate_is_never_ready() -> None:
    """Protects requests from a process that listens and does no work: it fails, and is started again."""
    engine = Heard(fails=True)
    async with kept(engine, Pool("p", "v", 1, 2), REVISION) as fleet:
        await engine.called_twice.wait()
    assert not fleet.answers


async def test_a_life_is_in_the_names_of_its_replicas() -> None:
    """Protects a fleet that outlives the supervisor: no other life ever gives the name, and what runs already is located."""
    fleet, located = HearingFleet(), list[tuple[str, str]]()
    engine, config = Heard(), EngineConfig(probe_ms=10)
    supervisor = Supervisor(fleet, Launches(lambda: None), lambda kind: engine, config, SystemClock(), life="5e1f")
    supervisor.on_located = lambda name, url: located.append((name, url))
    supervisor.follow([(URL, REVISION)])
    running = asyncio.get_running_loop().create_task(supervisor.run())
    try:
        async with asyncio.timeout(30):
            assert (await fleet.same_address()).name == "p-5e1f-1"
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.aclose()
    assert located == [("p-5e1f-1", "http://replica")]


async def test_a_pool_that_is_not_kept_is_nothing_to_a_supervisor() -> None:
    """Protects control from a coordinator that knows more pools: demand for them starts nothing, and they have no fault."""
    engine = Heard()
    supervisor = Supervisor(Fleet(SystemClock()), Launches(lambda: None), lambda kind: engine, EngineConfig(), SystemClock())
    supervisor.demand("other")
    assert supervisor.fault_of("other") is None
    await engine.aclose()


class LateFleet(Fleet):
    """A fleet that learns of a request only as its replica is drained. asked: how often since, of which twice it runs."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.asked: int | None = None

    def drain(self, pool: str, name: str) -> None:
        super().drain(pool, name)
        self.asked = 0

    def is_unused(self, pool: str, name: str) -> bool:
        assert self.asked is not None, "it was not drained"
        self.asked += 1
        return self.asked > 2


async def test_what_an_idle_replica_was_given_in_the_last_moment_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the request that a coordinator placed as control drained: the process is stopped once nothing runs there."""
    monkeypatch.setattr("weir.control.replica_upkeep._IDLE_CHECK_S", 0.01)
    fleet, engine, stopped_after = LateFleet(), SimulatedEngine(), asyncio.Queue[int | None]()
    launches = Launches(lambda: stopped_after.put_nowait(fleet.asked))
    supervisor = Supervisor(fleet, launches, lambda kind: engine, EngineConfig(), SystemClock())
    supervisor.follow([(POOL, REVISION)])
    supervisor.demand("p")
    running = asyncio.get_running_loop().create_task(supervisor.run())
    try:
        async with asyncio.timeout(30):
            assert await stopped_after.get() == 3
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.aclose()
