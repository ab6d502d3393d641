"""A supervisor in virtual time over a fleet that remembers what it was told, with processes that exist only here."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from weir import errors
from weir.config import EngineConfig
from weir.control.kept_pools import Wanted
from weir.control.supervisor import Supervisor
from weir.coordinator.fleet import Fleet
from weir.core.metering import Price
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.core.routing.replica import ReplicaState
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.messages import ReplicaAddress
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run

REVISION = Revision("v", EngineKind.SIMULATED, "demo", 512, 128, 64, Price(1, 1, 1, 1))
OTHER = replace(REVISION, id="w")
POOL = Pool("p", "v", 1, 2)
START_S = 5.0
GRACE_MS = 30_000
PROBE_S = 2.0


def wanted(*pools: Pool) -> list[Wanted]:
    """The pools with what they serve."""
    return [(pool, replace(REVISION, id=pool.revision)) for pool in pools]


class Process:
    """A process that runs until it is stopped, or exits."""

    api_key = None

    def __init__(self, url: str) -> None:
        self.url = url
        self.gone = asyncio.Event()

    async def wait(self) -> int:
        await self.gone.wait()
        return 0

    async def stop(self, grace_ms: int) -> None:
        self.gone.set()


class Launches:
    """Starts processes in START_S. launched: the pool of each start as it was told; faults: of starts to come, by pool."""

    def __init__(self) -> None:
        self.launched: list[Pool] = []
        self.processes: list[Process] = []
        self.faults: dict[str, str] = {}

    async def launch(self, revision: Revision, pool: Pool) -> Process:
        assert revision.id == pool.revision
        self.launched.append(pool)
        await asyncio.sleep(START_S)
        if (fault := self.faults.get(pool.name)) is not None:
            raise errors.EngineError(fault)
        process = Process(f"http://{len(self.processes)}")
        self.processes.append(process)
        return process

    @property
    def running(self) -> int:
        """Processes that run."""
        return sum(not process.gone.is_set() for process in self.processes)


class ToldFleet(Fleet):
    """A fleet that remembers what it was told, in order."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__(clock)
        self.told: list[str] = []

    def add_pool(self, pool: Pool) -> None:
        super().add_pool(pool)
        self.told.append(f"pool {pool.name}")

    def withdraw(self, pool: str) -> None:
        self.told.append(f"withdraw {pool}")
        super().withdraw(pool)

    def answered(self, address: ReplicaAddress) -> None:
        if self.known_address(address.name) is None:
            self.told.append(f"ready {address.name}")
        super().answered(address)

    def drain(self, pool: str, name: str) -> None:
        self.told.append(f"drain {name}")
        super().drain(pool, name)

    def gone(self, pool: str, name: str) -> None:
        self.told.append(f"gone {name}")
        super().gone(pool, name)


class Stand:
    """busy: pools and replicas on which something runs or waits."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        clock = StepClock(loop)
        self.fleet = ToldFleet(clock)
        self.busy: set[str] = set()
        self.fleet.carries = lambda pool, replica: (replica or pool) in self.busy
        self.launches = Launches()
        self.engine = SimulatedEngine(SimulatedReplica())
        config = EngineConfig(probe_ms=int(PROBE_S * 1_000), restart_backoff_ms=1_000)
        self.supervisor = Supervisor(self.fleet, self.launches, lambda kind: self.engine, config, clock)
        self.supervisor.drain_grace_ms = GRACE_MS
        self.announced: list[str] = []
        self.supervisor.announce = self.announced.append

    @property
    def now_s(self) -> float:
        """Virtual seconds since it began."""
        return self._loop.time()

    def follow(self, *pools: Pool, revoked: set[str] | None = None) -> None:
        """These pools are wanted from now on, and no others."""
        self.supervisor.follow(wanted(*pools), revoked or ())

    def states(self, pool: str = "p") -> dict[str, ReplicaState]:
        """Of a pool's replicas."""
        return {name: replica.state for name, replica in self.fleet.pool(pool).replicas.items()}

    def lanes(self, pool: str = "p") -> int:
        """That work could use now."""
        return self.fleet.pool(pool).lanes.usable

    def is_offered(self, pool: str = "p") -> bool:
        """Whether the fleet has the pool for its revision."""
        view = self.fleet.pool(pool)
        return view in self.fleet.pools_of(view.revision)

    def told(self) -> list[str]:
        """What the fleet was told since this was asked."""
        told, self.fleet.told = self.fleet.told, []
        return told

    async def until(self, reached: Callable[[], bool], bound_s: float = 600.0) -> None:
        """Wait for a condition, looked at ten times a second."""
        ends_s = self.now_s + bound_s
        while not reached():
            assert self.now_s < ends_s, "never"
            await asyncio.sleep(0.1)


def play(script: Callable[[Stand], Awaitable[None]], *pools: Pool) -> Stand:
    """Run a script beside a supervisor that keeps these pools, which are ready; at its end every process has stopped."""

    async def scene() -> Stand:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        stand = Stand(loop)
        stand.follow(*pools)
        running = loop.create_task(stand.supervisor.run())
        async with asyncio.timeout(3_600):
            await stand.supervisor.wait_ready({pool.revision for pool in pools})
            await stand.until(lambda: all(stand.lanes(pool.name) == _lanes_of(pool) for pool in pools))
            stand.told()
            await script(stand)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        await stand.engine.aclose()
        assert stand.launches.running == 0 and not any(view.replicas for view in stand.fleet.pools)
        return stand

    return run(scene(), until_ms=7_200_000)


def _lanes_of(pool: Pool) -> int:
    return 0 if pool.on_demand else pool.replicas_wanted * pool.concurrency
