"""The simulated supervisor: keeps pools at their numbers of replicas, probes them, and replaces what is lost or condemned.

It reports facts to the fleet as control's supervisor does, with names that are never used twice. It takes no part in placement.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir import errors
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import EngineKind, Pool, Revision
from weir.messages import ReplicaAddress, ReplicaPace
from weir.sim.faults import FaultyEngine
from weir.units import Millis

_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What is kept. restart_ms: from a loss to the replacement being ready; pace: what a warm-up shows, None: nothing.

    is_salted: its engines keep what they read, apart for each salt.
    """

    pool: Pool
    revision: Revision
    restart_ms: Millis
    pace: ReplicaPace | None = None
    is_salted: bool = False


class Register(Protocol):
    """Who is told which replicas there are."""

    def added(self, replica: str, pool: str) -> None: ...

    def gone(self, replica: str) -> None: ...


class Keeper(Protocol):
    """Keeps the replicas of one cell."""

    @property
    def names(self) -> list[str]:
        """Replicas that exist now."""
        ...

    def lose(self, name: str) -> None:
        """A replica's process dies."""
        ...

    async def run(self) -> None:
        """Until cancelled."""
        ...


class SimSupervisor:
    """Keeper of the pools of one cell. prefix: makes names unique over cells."""

    def __init__(self, fleet: Fleet, engine: FaultyEngine, plans: Sequence[PoolPlan], prefix: str, register: Register) -> None:
        self._fleet = fleet
        self._engine = engine
        self._prefix = prefix
        self._register = register
        self._serial = 0
        self._alive: dict[str, tuple[PoolPlan, ReplicaAddress]] = {}
        fleet.on_condemned = self._condemned
        for plan in plans:
            fleet.add_pool(plan.pool)
            for _ in range(plan.pool.replicas):
                self._add(plan)

    @property
    def names(self) -> list[str]:
        """Replicas that exist now."""
        return list(self._alive)

    def _add(self, plan: PoolPlan) -> None:
        self._serial += 1
        name = f"{self._prefix}-r{self._serial}"
        revision = plan.revision
        address = ReplicaAddress(
            name,
            plan.pool.name,
            revision.id,
            EngineKind.SIMULATED,
            "",
            revision.artifact,
            revision.context_tokens,
            counts_tokens=True,
            cache_salt=plan.is_salted,
            pace=plan.pace,
        )
        self._alive[name] = plan, address
        self._register.added(name, plan.pool.name)
        self._fleet.add(name, plan.pool.name, plan.pool.concurrency)
        self._fleet.answered(address)

    def lose(self, name: str) -> None:
        """The replica's process dies; a replacement comes after a while."""
        if name in self._alive:
            plan, _ = self._alive.pop(name)
            self._engine.inner.lose(name)
            asyncio.get_running_loop().call_soon(self._bury, plan, name)

    def _condemned(self, name: str) -> None:
        asyncio.get_running_loop().call_soon(self.lose, name)

    def _bury(self, plan: PoolPlan, name: str) -> None:
        """Its exit is noticed after its connections broke."""
        self._register.gone(name)
        self._fleet.gone(plan.pool.name, name)
        asyncio.get_running_loop().call_later(plan.restart_ms / 1e3, self._add, plan)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(_PROBE_S)
            for name, (plan, address) in list(self._alive.items()):
                try:
                    self._fleet.answered(await self._engine.probe(address))
                except errors.EngineFault:
                    self._fleet.doubted(plan.pool.name, name)
