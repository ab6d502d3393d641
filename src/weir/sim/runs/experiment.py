"""One run from its specification and a seed to its result: the real coordinator, book, queues and journal in virtual time.

It wires the parts and lets requests arrive. No decision is made here, and nothing but the seed and the specification goes into
the result: the same run gives the same bytes.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
from weir.messages import Register
from weir.sim.random_source import seeded_random
from weir.sim.runs.answering_store import AnsweringStore
from weir.sim.runs.arrivals import TOKENS_MAX, Arrival, Burst, Workload, with_burst
from weir.sim.runs.figures import Figures, window_seconds
from weir.sim.runs.gateway_side import ALIAS, APPLICATION, POOL, REVISION, AskingRules, GatewaySide
from weir.sim.runs.keeper import Keeper, Keeping
from weir.sim.runs.outages import Outage
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.paces import EngineModel
from weir.sim.runs.policies import ORDERS, Policy
from weir.sim.runs.stepper import ReplicaMaking
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.telemetry import Telemetry
from weir.units import Millis, Tokens

_PRICE = Price(1, 200_000, 50_000, 600_000)
_QUIET_MS: Millis = 60_000
_AFTER_MS: Millis = 6 * 3_600_000
"""What a run may take after its last request: the longest deadline, and stops that are not confirmed."""

OnProgress = Callable[[float], None]
"""Told the share of a run that is behind it, 0 … 1."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that makes a run, but its seed. duration_s: when requests stop coming. faults: as they were said.

    max_output_tokens and deadline_ms: see `AskingRules`.
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
    faults: tuple[str, ...] = ()
    max_output_tokens: Tokens = 1_024
    deadline_ms: Millis | None = None
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    @property
    def window_tokens(self) -> Tokens:
        """Input and output that a replica can hold at most."""
        return min(2 * TOKENS_MAX, self.engine.step_time.row.kv_tokens // 16 * 16)

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return {
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
        coordinator = Coordinator(self._parts(clock, fleet, recovered), self._snapshot)
        figures = Figures(window_seconds(spec.duration_s), spec.weights, lambda: loop.now_ns)
        side = GatewaySide(loop, self._rules(), self._oversight, figures)
        side.link = coordinator.connect(Register("gateway-1"), side)
        making = ReplicaMaking(spec.engine, spec.concurrency, self._config.delivery_step_tokens, side)
        keeping = Keeping(spec.replicas, spec.concurrency, spec.window_tokens, spec.noise_sigma, spec.start_s)
        keeper = Keeper(loop, fleet, keeping, making, side, self._oversight)
        keeper.start(self._seed, spec.outages)
        async with asyncio.TaskGroup() as tasks:
            coordinating = tasks.create_task(coordinator.run())
            probing = tasks.create_task(keeper.run())
            await _Pump(loop, side, self._arrivals(), spec.duration_s, self._on_progress).done.wait()
            while side.open:
                side.emptied.clear()
                await side.emptied.wait()
            await coordinator.drain(_QUIET_MS)
            probing.cancel()
            coordinator.close()
            await coordinating
        self._check_rest(coordinator, recovered, fleet)
        outages = [dict(zip(("at_s", "kind", "replica"), each, strict=True)) for each in keeper.happened]
        return {"seed": self._seed, **figures.document(), "outages": outages}

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


class _Pump:
    """Lets requests arrive, one timer at a time. done: set once there are no more."""

    def __init__(
        self, loop: VirtualLoop, side: GatewaySide, arrivals: Iterator[Arrival], duration_s: float, on_progress: OnProgress
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
    revision = Revision(REVISION, EngineKind.SIMULATED, REVISION, spec.window_tokens, spec.window_tokens, 256, _PRICE)
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
