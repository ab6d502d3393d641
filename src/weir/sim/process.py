"""One process of the simulated cell: everything that a crash takes along, and the ways in which a process goes.

It dies at an instant, or it is superseded and lives on without knowing: then it hears nothing new of the world, and ends when
its first write is refused. It wires the real parts and changes none of their decisions.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from weir import errors
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Adapting, Fleet
from weir.coordinator.recovery import Recovered
from weir.coordinator.rejections import RejectionCounter
from weir.core.registry.snapshot import Snapshot
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import Register
from weir.sim.audit import Exchange
from weir.sim.faults import CellStore
from weir.sim.random_source import SeededEntropy, seeded_random
from weir.sim.wiretap import Echoes, Wire
from weir.telemetry import Telemetry

if TYPE_CHECKING:
    from weir.sim.world import World


class Cell:
    """One process. is_stale: another became the store's writer. store: as this process reaches it."""

    def __init__(self, world: "World", serial: int, store: CellStore, recovered: Recovered, snapshot: Snapshot) -> None:
        spec, clock = world.spec, world.clock
        telemetry = self.telemetry = Telemetry()
        self.store = store
        store.refused = self.die
        self.book = recovered.book
        self.journal = recovered.journal
        config = spec.coordinator
        self.fleet = Fleet(clock, Adapting(least_percent=config.concurrency_min_percent))
        self.inbox = Inbox(clock)
        self.engine = world.make_engine(serial)
        self.conversations: dict[asyncio.Task[None], Exchange] = {}
        self.services: list[asyncio.Task[None]] = []
        self.is_stale = False
        self.executions = ExecutionTable(store, config.remembered_executions, config.request_id_ms, config.store_wait_ms)
        parts = CoordinatorParts(
            clock=clock,
            config=config,
            fleet=self.fleet,
            book=recovered.book,
            journal=recovered.journal,
            executions=self.executions,
            rejections=RejectionCounter(store, clock),
            telemetry=telemetry,
        )
        self.coordinator = Coordinator(parts, snapshot)
        planner = Planner(self.inbox, lambda kind: self.engine, b"digest key", b"salt key")
        entropy = SeededEntropy(world.seed, f"entropy-{serial}")
        self.gateway = Gateway(clock, entropy, spec.gateway, self.inbox, planner, telemetry)
        echoes = Echoes(seeded_random(world.seed, f"echoes-{serial}"), spec.echoes)
        self.wire = Wire(self.inbox, world.checker.heard, echoes)
        self.wire.link = self.coordinator.connect(Register(f"gateway-{serial}"), self.wire)
        self.gateway.connect(self.wire, lambda kind: self.engine, config.delivery_step_tokens, config.store_wait_ms)
        places = world.checker.places
        places.fleet = self.fleet
        self.supervisor = world.make_supervisor(self, f"c{serial}")

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Start its loops."""
        loops = (self.coordinator.run, self.gateway.run, self.supervisor.run)
        self.services = [tasks.create_task(self._serve(loop)) for loop in loops]

    async def _serve(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop; a process that was superseded may end by that alone."""
        try:
            await loop()
        except BaseExceptionGroup as failure:
            _, rest = failure.split(errors.StaleEpoch)
            if not self.is_stale or rest is not None:
                raise

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight anywhere."""
        busy = self.conversations or self.gateway.in_flight or self.inbox.open_requests or self.book.open_holds
        return not (busy or self.journal.backlog or self.fleet.running())

    def die(self) -> None:
        """Nothing of this process takes effect from this instant on."""
        self.wire.cut()
        self.store.cut()
        for exchange in self.conversations.values():
            exchange.cut = exchange.is_done = True
            exchange.client.vanish()
        for task in (*self.conversations, *self.services):
            task.cancel()

    def supersede(self) -> None:
        """Another process is the writer from this instant on; this one goes on as if nothing were."""
        self.is_stale = True
        for exchange in self.conversations.values():
            exchange.cut = True

    async def gone(self) -> None:
        """Wait until a dead process has ended."""
        await self.engine.aclose()
        await wait_for((*self.conversations, *self.services))


async def wait_for(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until tasks ended, however."""
    waiting = list(tasks)
    if waiting:
        await asyncio.wait(waiting)
