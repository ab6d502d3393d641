"""The replicas of a run: added, probed, lost, stalled and replaced, and the fleet told of each as control's supervisor would.

It takes no part in placement. A replica that breaks off fails its runs at once; one that is silent fails them after the engine
client's own bound. Who does not confirm a stop is replaced.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

from weir.config import EngineConfig
from weir.coordinator.fleet import Fleet
from weir.core.registry.model import EngineKind, Pool
from weir.engines.simulated import SimulatedBounds
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.messages import ReplicaAddress
from weir.sim.random_source import seeded_random, step_noise
from weir.sim.runs.gateway_side import POOL, REVISION
from weir.sim.runs.outages import Outage, OutageKind
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.paces import EngineModel, warmed_up
from weir.sim.runs.stepper import SilenceBounds
from weir.sim.virtual_loop import VirtualLoop
from weir.units import NANOS_PER_SECOND, Tokens, ns_from_ms

_PROBE_S = 0.5
_SILENCE = SilenceBounds(ns_from_ms(EngineConfig().idle_ms), ns_from_ms(SimulatedBounds().stop_ms))

Noise = Callable[[float], float]
"""A step's milliseconds → what it really takes."""


class KeptReplica(Protocol):
    """A replica as its keeper sees it."""

    is_stalled: bool

    @property
    def address(self) -> ReplicaAddress:
        """What the fleet is told of it."""
        ...

    @property
    def load(self) -> int:
        """Requests that it runs."""
        ...

    def stall(self) -> None:
        """No step completes and none begins until `resume`."""
        ...

    def resume(self) -> None:
        """Go on where it stalled."""
        ...

    def break_off(self) -> None:
        """Everything in it is gone at once; it runs no more."""
        ...

    def look(self, bounds: SilenceBounds) -> None:
        """While it is stalled: fail what is silent for too long."""
        ...


R = TypeVar("R", bound=KeptReplica)


@dataclass(frozen=True, slots=True)
class Restart:
    """How a replacement comes: ready after start_s, and for slow_s from then at a share of its speed."""

    start_s: float
    slow_s: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept. noise_sigma: of each step's lognormal noise, 0 for exact times; start_s: from a loss to its replacement."""

    replicas: int
    concurrency: int
    window_tokens: Tokens
    noise_sigma: float
    start_s: float


class Keeper(Generic[R]):
    """Keeper of a run's replicas. make: one at an address. happened: outages as they came, (seconds, kind, replica)."""

    def __init__(
        self,
        loop: VirtualLoop,
        fleet: Fleet,
        keeping: Keeping,
        engine: EngineModel,
        make: Callable[[ReplicaAddress, Noise], R],
        oversight: Oversight,
    ) -> None:
        self._loop = loop
        self._fleet = fleet
        self._keeping = keeping
        self._engine = engine
        self._make = make
        self._pace = warmed_up(engine)
        self._oversight = oversight
        self._alive: dict[str, R] = {}
        self._serial = 0
        self._random_of: Callable[[str], Random] = lambda name: Random(name)
        self.happened: list[tuple[float, str, str]] = []

    def start(self, seed: int, outages: tuple[Outage, ...]) -> None:
        """Add the replicas, and set the outages."""
        self._random_of = lambda name: seeded_random(seed, name)
        self._fleet.add_pool(Pool(POOL, REVISION, self._keeping.replicas, self._keeping.concurrency))
        restart = Restart(self._keeping.start_s)
        self._fleet.on_condemned = lambda name: self._later(self._lose, name, restart)
        for _ in range(self._keeping.replicas):
            self._add(restart)
        for outage in outages:
            self._loop.call_at(outage.at_s, self._befall, outage)

    def find(self, name: str) -> R:
        """A replica that is alive. Raises KeyError for another."""
        return self._alive[name]

    def _later(self, what: Callable[[str, Restart], None], name: str, restart: Restart) -> None:
        self._loop.call_soon(what, name, restart)

    def _add(self, restart: Restart) -> None:
        keeping, name = self._keeping, f"replica-{self._serial + 1:03d}"
        self._serial += 1
        noise = step_noise(self._random_of(name), keeping.noise_sigma) if keeping.noise_sigma else _exact
        replica = self._alive[name] = self._make(self._address(name), self._slowed(noise, restart))
        self._fleet.add(name, POOL, keeping.concurrency)
        self._fleet.answered(replica.address)

    def _slowed(self, noise: Noise, restart: Restart) -> Noise:
        if not restart.slow_s:
            return noise
        until_ns = self._loop.now_ns + round(restart.slow_s * NANOS_PER_SECOND)
        return lambda duration_ms: noise(duration_ms) / (restart.speed if self._loop.now_ns < until_ns else 1.0)

    def _address(self, name: str) -> ReplicaAddress:
        return ReplicaAddress(
            name,
            POOL,
            REVISION,
            EngineKind.SIMULATED,
            url="",
            model=REVISION,
            context_tokens=self._keeping.window_tokens,
            cache_salt=True,
            kv_tokens=self._engine.step_time.row.kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            pace=self._pace,
        )

    def _befall(self, outage: Outage) -> None:
        alive = list(self._alive.values())
        if not alive:
            return
        if outage.replica is None:
            replica = max(alive, key=lambda each: each.load)
        else:
            replica = alive[min(outage.replica, len(alive)) - 1]
        name = replica.address.name
        self.happened.append((round(self._loop.time(), 6), outage.kind.value, name))
        if outage.kind is OutageKind.STALL:
            replica.stall()
            self._loop.call_later(outage.for_s, self._resume, replica)
        else:
            start_s = self._keeping.start_s if outage.start_s is None else outage.start_s
            self._lose(name, Restart(start_s, outage.for_s, outage.speed))

    def _resume(self, replica: R) -> None:
        if self._alive.get(replica.address.name) is replica:
            replica.resume()

    def _lose(self, name: str, restart: Restart) -> None:
        """The process dies: its runs break off, and then its exit is noticed."""
        replica = self._alive.pop(name, None)
        if replica is None:
            return
        replica.break_off()
        self._later(self._bury, name, restart)

    def _bury(self, name: str, restart: Restart) -> None:
        self._oversight.replica_gone(name)
        self._fleet.gone(POOL, name)
        self._loop.call_later(restart.start_s, self._add, restart)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(_PROBE_S)
            for replica in list(self._alive.values()):
                if replica.is_stalled:
                    self._fleet.doubted(POOL, replica.address.name)
                    replica.look(_SILENCE)
                else:
                    self._fleet.answered(replica.address)


def _exact(duration_ms: float) -> float:
    return duration_ms
