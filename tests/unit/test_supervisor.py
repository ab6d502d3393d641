"""The supervisor: a replica that idles is drained before it is stopped."""

import asyncio
from collections.abc import Callable

from weir.clock import SystemClock
from weir.config import EngineConfig
from weir.control.supervisor import Supervisor
from weir.coordinator.fleet import Fleet
from weir.core.metering import Price
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.engines.simulated import SimulatedEngine

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
    supervisor.add_pool(POOL, REVISION)
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
