"""The replicas of a run: added, probed, lost, stalled and replaced, and the fleet told of each as control's supervisor would.

It takes no part in placement. A replica that breaks off fails its runs at once; one that is silent fails them after the engine
client's own bound. Who does not confirm a stop is replaced.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from weir.config import EngineConfig
from weir.coordinator.fleet import Fleet
from weir.core.endings import FinishReason
from weir.core.registry.model import EngineKind
from weir.engines.simulated import SimulatedBounds
from weir.messages import ReplicaAddress
from weir.sim.random_source import seeded_random, step_noise
from weir.sim.runs.gateway_side import POOL, REVISION, GatewaySide
from weir.sim.runs.outages import Outage, OutageKind
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.step_clock import StepClock
from weir.sim.runs.stepper import ReplicaMaking, SteppedReplica
from weir.sim.virtual_loop import VirtualLoop
from weir.units import Tokens, ns_from_ms

_PROBE_S = 0.5
_SILENT_NS = ns_from_ms(EngineConfig().idle_ms)
_UNCONFIRMED_NS = ns_from_ms(SimulatedBounds().stop_ms)


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept. noise_sigma: of each step's lognormal noise, 0 for exact times; start_s: from a loss to its replacement."""

    replicas: int
    concurrency: int
    window_tokens: Tokens
    noise_sigma: float
    start_s: float


class Keeper:
    """Keeper of a run's replicas. happened: outages as they came, (seconds, kind, replica)."""

    def __init__(
        self, loop: VirtualLoop, fleet: Fleet, keeping: Keeping, making: ReplicaMaking, side: GatewaySide, oversight: Oversight
    ) -> None:
        self._loop = loop
        self._clock = StepClock(loop)
        self._fleet = fleet
        self._keeping = keeping
        self._making = making
        self._side = side
        self._oversight = oversight
        self._alive: dict[str, SteppedReplica] = {}
        self._serial = 0
        self._random_of: Callable[[str], Random] = lambda name: Random(name)
        self.happened: list[tuple[float, str, str]] = []

    def start(self, seed: int, outages: tuple[Outage, ...]) -> None:
        """Add the replicas, and set the outages."""
        self._random_of = lambda name: seeded_random(seed, name)
        self._fleet.add_pool(POOL, REVISION)
        self._fleet.on_condemned = lambda name: self._later(self._lose, name, self._keeping.start_s)
        self._side.find = self._alive.__getitem__
        for _ in range(self._keeping.replicas):
            self._add()
        for outage in outages:
            self._loop.call_at(outage.at_s, self._befall, outage)

    def _later(self, what: Callable[[str, float], None], name: str, start_s: float) -> None:
        self._loop.call_soon(what, name, start_s)

    def _add(self) -> None:
        keeping, name = self._keeping, f"replica-{self._serial + 1:03d}"
        self._serial += 1
        address = ReplicaAddress(name, POOL, REVISION, EngineKind.SIMULATED, "", REVISION, keeping.window_tokens)
        noise = step_noise(self._random_of(name), keeping.noise_sigma) if keeping.noise_sigma else _exact
        self._alive[name] = SteppedReplica(address, self._making, noise, self._clock)
        self._fleet.add(name, POOL, keeping.concurrency)
        self._fleet.answered(address)

    def _befall(self, outage: Outage) -> None:
        alive = list(self._alive.values())
        if not alive:
            return
        if outage.replica is None:
            replica = max(alive, key=lambda each: len(each.runs))
        else:
            replica = alive[min(outage.replica, len(alive)) - 1]
        self.happened.append((round(self._loop.time(), 6), outage.kind.value, replica.name))
        if outage.kind is OutageKind.STALL:
            replica.stall()
            self._loop.call_later(outage.for_s, self._resume, replica)
        else:
            self._lose(replica.name, self._keeping.start_s if outage.start_s is None else outage.start_s)

    def _resume(self, replica: SteppedReplica) -> None:
        if self._alive.get(replica.name) is replica:
            replica.resume()

    def _lose(self, name: str, start_s: float) -> None:
        """The process dies: its runs break off, and then its exit is noticed."""
        replica = self._alive.pop(name, None)
        if replica is None:
            return
        runs = replica.lose()
        for run in runs:
            self._side.fail(run, FinishReason.REPLICA_LOST)
        for run in runs:
            self._side.give_up(run)
        self._loop.call_soon(self._bury, name, start_s)

    def _bury(self, name: str, start_s: float) -> None:
        self._oversight.replica_gone(name)
        self._fleet.gone(POOL, name)
        self._loop.call_later(start_s, self._add)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await asyncio.sleep(_PROBE_S)
            for replica in list(self._alive.values()):
                if replica.is_stalled:
                    self._fleet.doubted(POOL, replica.name)
                    self._look_at_silent(replica)
                else:
                    self._fleet.answered(replica.address)

    def _look_at_silent(self, replica: SteppedReplica) -> None:
        now_ns = self._loop.now_ns
        for run in list(replica.runs.values()):
            if run.cancelled_ns is not None and now_ns - run.cancelled_ns >= _UNCONFIRMED_NS:
                self._side.give_up(run)
            elif run.cancelled_ns is None and now_ns - max(run.since_ns, replica.stepped_ns) >= _SILENT_NS:
                self._side.fail(run, FinishReason.STALLED)


def _exact(duration_ms: float) -> float:
    return duration_ms
