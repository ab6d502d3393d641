"""The simulated supervisor: keeps a pool at its number of replicas, probes them, and replaces what is lost or condemned.

It reports facts to the fleet as control's supervisor does, with names that are never used twice. It takes no part in placement.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weir import errors
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import EngineKind, Revision
from weir.messages import ReplicaAddress
from weir.sim.faults import FaultyEngine
from weir.units import Millis

_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What is kept. restart_ms: from a loss to the replacement being ready."""

    pool: str
    revision: Revision
    replicas: int
    concurrency: int
    restart_ms: Millis


class SimSupervisor:
    """Keeper of one pool in one cell. prefix: makes names unique over cells; gone: told of each replica that is no more."""

    def __init__(self, fleet: Fleet, engine: FaultyEngine, plan: PoolPlan, prefix: str, gone: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._engine = engine
        self._plan = plan
        self._prefix = prefix
        self._gone = gone
        self._serial = 0
        self._alive: dict[str, ReplicaAddress] = {}
        fleet.add_pool(plan.pool, plan.revision.id)
        fleet.on_condemned = self._condemned
        for _ in range(plan.replicas):
            self._add()

    @property
    def names(self) -> list[str]:
        """Replicas that exist now."""
        return list(self._alive)

    def _add(self) -> None:
        plan = self._plan
        self._serial += 1
        name = f"{self._prefix}-r{self._serial}"
        revision = plan.revision
        address = ReplicaAddress(
            name,
            plan.pool,
            revision.id,
            EngineKind.SIMULATED,
            "",
            revision.artifact,
            revision.context_tokens,
            counts_tokens=True,
        )
        self._alive[name] = address
        self._fleet.add(name, plan.pool, plan.concurrency)
        self._fleet.answered(address)

    def lose(self, name: str) -> None:
        """The replica's process dies; a replacement comes after a while."""
        if name in self._alive:
            del self._alive[name]
            self._engine.inner.lose(name)
            asyncio.get_running_loop().call_soon(self._bury, name)

    def _condemned(self, name: str) -> None:
        asyncio.get_running_loop().call_soon(self.lose, name)

    def _bury(self, name: str) -> None:
        """Its exit is noticed after its connections broke."""
        self._gone(name)
        self._fleet.gone(self._plan.pool, name)
        asyncio.get_running_loop().call_later(self._plan.restart_ms / 1e3, self._add)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(_PROBE_S)
            for name, address in list(self._alive.items()):
                try:
                    self._fleet.answered(await self._engine.probe(address))
                except errors.EngineFault:
                    self._fleet.doubted(self._plan.pool, name)
