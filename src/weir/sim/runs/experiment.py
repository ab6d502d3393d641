"""One run from its specification and a seed to its result: the real coordinator, book, queues and journal in virtual time.

It wires the parts and lets requests arrive. No decision is made here, and nothing but the seed and the specification goes into
the result: the same run gives the same bytes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, Protocol

from weir.config import CoordinatorConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Application, Tenant
from weir.messages import Down, Register, ReplicaAddress
from weir.ports import CoordinatorLink
from weir.sim.clients import PATIENT, Habits
from weir.sim.random_source import seeded_random
from weir.sim.runs.answering_store import AnsweringStore
from weir.sim.runs.arrivals import TOKENS_MAX, Arrival, Burst, Workload, with_burst
from weir.sim.runs.figures import Figures, window_seconds
from weir.sim.runs.foresight import Foresight
from weir.sim.runs.gateway_side import ALIAS, APPLICATION, POOL, REVISION, AskingRules, GatewaySide
from weir.sim.runs.keeper import Keeper, Keeping, Noise
from weir.sim.runs.outages import Outage, SlowClients
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.paces import EngineModel
from weir.sim.runs.policies import ORDERS, Policy
from weir.sim.runs.step_clock import StepClock
from weir.sim.runs.stepper import ReplicaMaking, SteppedReplica
from weir.sim.runs.token_engine import TokenEngine, TokenMaking
from weir.sim.runs.whole_gateway import WholeGateway
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.telemetry import Telemetry
from weir.units import Millis, Tokens

_PRICE = Price(1, 200_000, 50_000, 600_000)
_QUIET_MS: Millis = 60_000
_AFTER_MS: Millis = 6 * 3_600_000
"""What a run may take after its last request: the longest deadline, and stops that are not confirmed."""

OnProgress = Callable[[float], None]
"""Told the share of a run that is behind it, 0 … 1."""


class Fidelity(StrEnum):
    """schedule: the gateway is played and replicas tell first outputs and ends. full: the real gateway, and every token."""

    SCHEDULE = "schedule"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that makes a run, but its seed. duration_s: when requests stop coming. faults: as they were said.

    slow_clients: of the full fidelity alone; in the other one a client reads at once.
    max_output_tokens, deadline_ms and affinity: see `AskingRules`.
    """

    workload: Workload
    engine: EngineModel
    duration_s: float
    replicas: int = 1
    concurrency: int = 64
    noise_sigma: float = 0.05
    start_s: float = 30.0
    policy: Policy = Policy.FAIR
    weights: Mapping[str, int] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    bursts: tuple[Burst, ...] = ()
    slow_clients: tuple[SlowClients, ...] = ()
    faults: tuple[str, ...] = ()
    fidelity: Fidelity = Fidelity.SCHEDULE
    max_output_tokens: Tokens = 1_024
    deadline_ms: Millis | None = None
    affinity: bool = True
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    @property
    def window_tokens(self) -> Tokens:
        """Input and output that a replica can hold at most."""
        return min(2 * TOKENS_MAX, self.engine.step_time.row.kv_tokens // 16 * 16)

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "fidelity": self.fidelity.value,
            "workload": self.workload.label,
            "engine": self.engine.label,
            "duration_s": self.duration_s,
            "replicas": self.replicas,
            "concurrency": self.concurrency,
            "noise": self.noise_sigma,
            "start_s": self.start_s,
            "policy": self.policy.value,
            "weights": dict(sorted(self.weights.items())),
            "faults": list(self.faults),
            "max_output_tokens": self.max_output_tokens,
            "deadline_ms": self.deadline_ms,
            "affinity": self.affinity,
            "queue_wait_ms": self.coordinator.queue_wait_ms,
            "queue_entries": self.coordinator.queue_entries,
        }


def simulate(spec: RunSpec, seed: int, on_progress: OnProgress = lambda share: None) -> dict[str, Any]:
    """The result of one run. Raises AssertionError where something that must hold did not."""
    return run(_Experiment(spec, seed, on_progress).live(), until_ms=int(spec.duration_s * 1_000) + _AFTER_MS)


class _Experiment:
    """The parts of one run."""

    def __init__(self, spec: RunSpec, seed: int, on_progress: OnProgress) -> None:
        self._spec = spec
        self._seed = seed
        self._on_progress = on_progress
        self._store = AnsweringStore()
        self._config = replace(spec.coordinator, remembered_executions=100, explained_requests=1)  # nobody asks afterwards
        self._snapshot = _snapshot(spec)
        self._oversight = Oversight(spec.concurrency)

    async def live(self) -> dict[str, Any]:
        """Let requests arrive, wait for the last end, check that nothing is left."""
        spec, loop = self._spec, asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = VirtualClock(loop)
        fleet = Fleet(clock)
        recovered = await recover(self._store, clock, self._snapshot, self._config.group_ms)
        parts = self._parts(clock, fleet, recovered)
        coordinator = Coordinator(parts, self._snapshot)
        figures = Figures(window_seconds(spec.duration_s), spec.weights, lambda: loop.now_ns)
        stage = (self._full if spec.fidelity is Fidelity.FULL else self._schedule)(loop, fleet, figures)
        side, keeper = stage.side, stage.keeper
        side.foresight = Foresight(parts.executions, coordinator.timelines, self._config.queue_bounds.door_ms_max)
        side.link = coordinator.connect(Register("gateway-1"), side)
        keeper.start(self._seed, spec.outages)
        async with asyncio.TaskGroup() as tasks:
            coordinating = tasks.create_task(coordinator.run())
            serving = tasks.create_task(stage.serve())
            probing = tasks.create_task(keeper.run())
            await asyncio.sleep(0)  # let each begin
            await _Pump(loop, side, self._arrivals(), spec.duration_s, self._on_progress).done.wait()
            while side.open:
                side.emptied.clear()
                await side.emptied.wait()
            await coordinator.drain(_QUIET_MS)
            probing.cancel()
            stage.close()
            await serving
            coordinator.close()
            await coordinating
        self._check_rest(coordinator, recovered, fleet)
        outages = [dict(zip(("at_s", "kind", "replica"), each, strict=True)) for each in keeper.happened]
        return {"seed": self._seed, **figures.document(), "outages": outages}

    def _schedule(self, loop: VirtualLoop, fleet: Fleet, figures: Figures) -> "_Stage":
        """The gateway's side is played, and replicas tell only what changes a request's course."""
        spec = self._spec
        side = GatewaySide(loop, self._rules(), self._oversight, figures)
        making, steps = ReplicaMaking(spec.engine, spec.concurrency, self._config.delivery_step_tokens, side), StepClock(loop)

        def make(address: ReplicaAddress, noise: Noise) -> SteppedReplica:
            return SteppedReplica(address, making, noise, steps)

        keeper = Keeper(loop, fleet, self._keeping(), spec.engine, make, self._oversight)
        side.find = keeper.find
        return _Stage(side, keeper)

    def _full(self, loop: VirtualLoop, fleet: Fleet, figures: Figures) -> "_Stage":
        """The gateway is the real one, and engines emit every token."""
        spec = self._spec
        habits = _Readers(spec.slow_clients, seeded_random(self._seed, "clients"))
        side = WholeGateway(loop, self._rules(), self._oversight, figures, habits.of, self._seed)
        making = TokenMaking(spec.engine, spec.concurrency, self._config.delivery_step_tokens)
        engine = TokenEngine(loop, making, side.course_of, figures)
        side.connect(engine)
        keeper = Keeper(loop, fleet, self._keeping(), spec.engine, engine.add, self._oversight)
        return _Stage(side, keeper, side.run, side.close)

    def _keeping(self) -> Keeping:
        spec = self._spec
        return Keeping(spec.replicas, spec.concurrency, spec.window_tokens, spec.noise_sigma, spec.start_s)

    def _arrivals(self) -> Iterator[Arrival]:
        arrivals = self._spec.workload.arrivals(seeded_random(self._seed, "arrivals"))
        for number, burst in enumerate(self._spec.bursts):
            arrivals = with_burst(arrivals, burst, seeded_random(self._seed, f"burst-{number}"))
        return arrivals

    def _rules(self) -> AskingRules:
        spec = self._spec
        return AskingRules(
            classes=self._snapshot.workload_classes,
            window_tokens=spec.window_tokens,
            step_tokens=self._config.delivery_step_tokens,
            max_output_tokens=spec.max_output_tokens,
            deadline_ms=spec.deadline_ms,
            affinity=spec.affinity,
        )

    def _parts(self, clock: VirtualClock, fleet: Fleet, recovered: Recovered) -> CoordinatorParts:
        config = self._config
        return CoordinatorParts(
            clock=clock,
            config=config,
            fleet=fleet,
            book=recovered.book,
            journal=recovered.journal,
            executions=ExecutionTable(self._store, config.remembered_executions, config.request_id_ms, config.store_wait_ms),
            rejections=RejectionCounter(self._store, clock),
            telemetry=Telemetry(),
            order=ORDERS[self._spec.policy],
        )

    def _check_rest(self, coordinator: Coordinator, recovered: Recovered, fleet: Fleet) -> None:
        self._oversight.at_rest(
            {
                "open holds in the book": recovered.book.open_holds,
                "open holds in the store": self._store.open_holds,
                "queue entries": coordinator.queued_in(POOL),
                "lanes": fleet.running(),
                "records that are not durable": recovered.journal.backlog,
            }
        )


class _Side(Protocol):
    """What asks the coordinator."""

    link: CoordinatorLink
    foresight: Foresight
    emptied: asyncio.Event

    @property
    def open(self) -> int: ...

    def ask(self, arrival: Arrival) -> None: ...

    def deliver(self, message: Down) -> None: ...


async def _nothing_to_serve() -> None:
    return


@dataclass(frozen=True, slots=True)
class _Stage:
    """The parts of a fidelity. serve: until `close`."""

    side: _Side
    keeper: Keeper[Any]
    serve: Callable[[], Coroutine[Any, Any, None]] = _nothing_to_serve
    close: Callable[[], None] = lambda: None


class _Readers:
    """How each request's client reads."""

    def __init__(self, slow: Sequence[SlowClients], random: Random) -> None:
        self._slow = slow
        self._random = random

    def of(self, arrival: Arrival) -> Habits:
        """Drawn once per request."""
        for each in self._slow:
            if each.covers(arrival) and self._random.random() < each.share:
                return Habits(bytes_per_s=each.bytes_per_s)
        return PATIENT


class _Pump:
    """Lets requests arrive, one timer at a time. done: set once there are no more."""

    def __init__(
        self, loop: VirtualLoop, side: _Side, arrivals: Iterator[Arrival], duration_s: float, on_progress: OnProgress
    ) -> None:
        self._loop = loop
        self._side = side
        self._arrivals = arrivals
        self._duration_s = duration_s
        self._on_progress = on_progress
        self._percent = 0
        self._coming = next(arrivals, None)
        self.done = asyncio.Event()
        self._wait()

    def _wait(self) -> None:
        coming = self._coming
        if coming is None or coming.at_s > self._duration_s:
            self._on_progress(1.0)
            self.done.set()
        else:
            self._loop.call_at(coming.at_s, self._arrive, coming.at_s)

    def _arrive(self, at_s: float) -> None:
        """Everything that comes at this instant, together."""
        percent = int(100 * at_s / self._duration_s) if self._duration_s else 100
        if percent > self._percent:
            self._percent = percent
            self._on_progress(percent / 100)
        while self._coming is not None and self._coming.at_s == at_s:
            self._side.ask(self._coming)
            self._coming = next(self._arrivals, None)
        self._wait()


def _snapshot(spec: RunSpec) -> Snapshot:
    revision = Revision(
        REVISION, EngineKind.SIMULATED, REVISION, spec.window_tokens, spec.window_tokens, 256, _PRICE, chat=False
    )
    names = spec.workload.tenants
    return Snapshot(
        version=1,
        tenants={name: Tenant(name, weight=spec.weights.get(name, 1)) for name in names},
        applications={(name, APPLICATION): Application(name, APPLICATION) for name in names},
        aliases={ALIAS: Alias(ALIAS, REVISION, spec.max_output_tokens)},
        revisions={REVISION: revision},
        pools={POOL: Pool(POOL, REVISION, spec.replicas, spec.concurrency)},
        prices={(REVISION, _PRICE.version): _PRICE},
    )
