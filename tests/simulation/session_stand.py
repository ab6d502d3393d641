"""A coordinator in virtual time with several gateways that only listen, each in a session of its own that can be lost.

What the gateways say is the test's choice. At its end a scene is audited: no hold is open, no lane taken, the ledger clean.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from tests.simulation.test_late_messages import ASKED, GROUP_MS

from weir import errors
from weir.config import CoordinatorConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution import Execution
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.endings import FinishReason
from weir.core.ledger.records import EndRecord, HoldRecord, ReleaseRecord, SettleRecord, StepRecord
from weir.core.metering import Basis
from weir.core.registry.model import EngineKind, Pool
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope
from weir.messages import (
    Acquire,
    AttemptUsage,
    Down,
    Finish,
    Granted,
    Progress,
    Reattach,
    ReattachedAll,
    Register,
    ReplicaAddress,
    Run,
    Stopped,
    Up,
    later,
)
from weir.ports import CoordinatorLink
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run
from weir.sim.world import POOL, REVISION, Spec, first_snapshot, key_of, tenant_name
from weir.storage.memory import MemoryLedger, Operation
from weir.telemetry import Telemetry
from weir.units import Nanos, ceil_ms_from_ns

CONFIG = CoordinatorConfig()
INPUT_TOKENS = 100
OUTPUT_TOKENS = 128
REQUESTS_PER_MINUTE = 600
TOKENS_PER_MINUTE = 600_000
"""Never the bound; what is missing of them shows what is taken."""
TENANTS = 4
LIMITS = Limits(requests_per_minute=REQUESTS_PER_MINUTE, tokens_per_minute=TOKENS_PER_MINUTE, concurrency=500)
SPEC = Spec(
    tenants=TENANTS,
    limits={Scope(tenant_name(number)): LIMITS for number in range(TENANTS)},
)

Heard = TypeVar("Heard", bound=Down)


class Listening:
    """A gateway that says what it is told to. heard: all that it was told, in order."""

    def __init__(self, stand: "Stand", register: Register) -> None:
        self._stand = stand
        self.name = register.session
        self.heard: list[Down] = []
        self.link: CoordinatorLink = stand.coordinator.connect(register, self)
        self.on_granted: Callable[[Granted], None] = lambda granted: None

    def deliver(self, message: Down) -> None:
        """Its inbox."""
        self.heard.append(message)
        if isinstance(message, Granted):
            self.on_granted(message)

    def about(self, ref: int, kind: type[Heard]) -> list[Heard]:
        """What it was told of one kind about a request."""
        return [message for message in self.heard if isinstance(message, kind) and getattr(message, "ref", 0) == ref]

    def say(self, message: Up) -> None:
        """Tell the coordinator."""
        self.link.send(message)

    def ask(self, tenant: int = 0, **changes: Any) -> int:
        """A tenant asks now; the ref of its request."""
        ref = self._stand.next_ref()
        ids = {"ref": ref, "request_id": f"id-{ref}", "generation_id": f"gen-{ref}", "body_digest": b"%d" % ref}
        sizes = {"input_tokens": INPUT_TOKENS, "max_output_tokens": OUTPUT_TOKENS}
        whose = {"tenant": tenant_name(tenant), "key": key_of(tenant)}
        asked = msgspec.structs.replace(ASKED, **ids | sizes | whose | changes)
        self._stand.tenants[ref] = asked.tenant
        self._stand.asked[ref] = asked, self._stand.clock.monotonic_ns()
        self.say(asked)
        return ref

    def tell(self, ref: int, run: Run | None = None, earlier: Run | None = None, finish: Finish | None = None) -> None:
        """It carries this request, as its session before did."""
        asked, at_ns = self._stand.asked[ref]
        elapsed_ms = ceil_ms_from_ns(self._stand.clock.monotonic_ns() - at_ns)
        self.say(Reattach(later(asked, elapsed_ms), run, earlier, finish=finish))

    def tell_all(self) -> None:
        """That was everything."""
        self.say(ReattachedAll())

    def show(self, ref: int, attempt: int = 1, delivered_max: int | None = None) -> None:
        """Its first output is with its client, and it may want the next step."""
        self.say(Progress(ref, attempt, first_output=True, delivered_max=delivered_max))

    def finish(self, ref: int, attempt: int = 1, reason: FinishReason = FinishReason.STOP, tokens: int = 8) -> None:
        """It ended, by itself unless there is a reason."""
        self.say(finish_of(ref, attempt, reason, tokens))

    def end(self, ref: int, attempt: int = 1) -> None:
        """Its answer is whole, and its engine runs nothing for it."""
        self.finish(ref, attempt)
        self.say(Stopped(ref, attempt))


def finish_of(ref: int, attempt: int = 1, reason: FinishReason = FinishReason.STOP, tokens: int = 8) -> Finish:
    """A gateway's report of an end, measured by the engine."""
    delivered = 0 if reason is FinishReason.REPLICA_LOST else tokens
    return Finish(ref, attempt, reason, delivered, AttemptUsage(INPUT_TOKENS, 0, tokens, Basis.ENGINE))


def run_of(granted: Granted, **changes: Any) -> Run:
    """What a gateway tells of an attempt that it was granted a moment ago."""
    run = Run(granted.attempt, granted.replica, granted.lane, 10_000_000, granted.delivered_max)
    return msgspec.structs.replace(run, **changes)


class Stand:
    """The coordinator, its fleet and its ledger. store_s: how long each operation of the store takes, by its name.

    leads: whether it may grant now. snapshot: the configuration that coordinators work by; asked: each question, and when.
    """

    def __init__(
        self,
        ledger: MemoryLedger,
        recovered: Recovered,
        lanes: int,
        kv_tokens: int | None,
        config: CoordinatorConfig = CONFIG,
    ) -> None:
        self.clock = StepClock(virtual_loop())
        self.ledger, self.store_s, self.leads = ledger, dict[Operation, float](), True
        ledger.delay = self._delay
        self._config, self._lanes, self._kv_tokens = config, lanes, kv_tokens
        self.snapshot = first_snapshot(SPEC)
        self.tenants: dict[int, str] = {}
        self.asked: dict[int, tuple[Acquire, Nanos]] = {}
        self._last_ref = 0
        self.fleet_s = 0.0
        self._takes_over = False
        self.replaced: list[asyncio.Task[None]] = []
        self.lead(recovered)

    def lead(self, recovered: Recovered) -> None:
        """A coordinator begins on what was recovered. fleet_s: after which it hears of its replicas."""
        config, ledger = self._config, self.ledger
        self.book, self.fleet = recovered.book, Fleet(self.clock)
        self.executions = ExecutionTable(ledger, 1_000, config.request_id_ms, config.store_wait_ms)
        self.telemetry = Telemetry()
        parts = CoordinatorParts(
            clock=self.clock,
            config=config,
            fleet=self.fleet,
            book=self.book,
            journal=recovered.journal,
            executions=self.executions,
            rejections=RejectionCounter(ledger, self.clock),
            telemetry=self.telemetry,
            leads=lambda: self.leads,
            kept=recovered.kept if self._takes_over else None,
        )
        self.fleet.add_pool(Pool(POOL, REVISION.id, 2, self._lanes))
        self.coordinator = Coordinator(parts, self.snapshot)
        if self.fleet_s:
            virtual_loop().call_later(self.fleet_s, self._find_replicas, self.fleet)
        else:
            self._find_replicas(self.fleet)

    def _find_replicas(self, fleet: Fleet) -> None:
        """As control names them: all of them, and what changes is announced once."""
        with fleet.at_once():
            for name in ("first", "second"):
                fleet.add(name, POOL, self._lanes)
                address = ReplicaAddress(
                    name,
                    POOL,
                    REVISION.id,
                    EngineKind.SIMULATED,
                    f"at {name}",
                    "model",
                    4_096,
                    counts_tokens=True,
                    kv_tokens=self._kv_tokens,
                )
                fleet.answered(address)

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """Run its coordinator; one that finds that another leads ends quietly."""
        self._tasks = tasks
        self.leading = tasks.create_task(_until_replaced(self.coordinator))

    async def take_over(self, *, is_killed: bool = True) -> Recovered:
        """Another coordinator leads on the same ledger; the former one is killed before, or finds out by itself."""
        if is_killed:
            self.leading.cancel()
        else:
            self.replaced.append(self.leading)
        recovered = await recover(self.ledger, self.clock, self.snapshot, GROUP_MS, keeps_open=True)
        self._takes_over = True
        self.lead(recovered)
        self.run_in(self._tasks)
        await asyncio.sleep(0)
        return recovered

    async def _delay(self, operation: Operation) -> None:
        await asyncio.sleep(self.store_s.get(operation, 0.001))

    def next_ref(self) -> int:
        """A number for a request that no gateway used."""
        self._last_ref += 1
        return self._last_ref

    def publish(self, snapshot: Snapshot) -> None:
        """A newer configuration comes into force, and stays so through a takeover."""
        self.snapshot = replace(snapshot, version=self.snapshot.version + 1)
        self.coordinator.publish(self.snapshot)

    def gateway(self, name: str, former: str = "") -> Listening:
        """One more gateway, or another session of one that tells nothing again."""
        return Listening(self, Register(name, former))

    def again(self, gateway: Listening) -> Listening:
        """The next session of a gateway, which tells what it carries."""
        of, _, number = gateway.name.rpartition(".")
        name = f"{of}.{int(number) + 1}" if of else f"{gateway.name}.2"
        return Listening(self, Register(name, gateway.name, reattaches=True))

    def execution(self, ref: int) -> Execution | None:
        """The coordinator's own entry of a request; None: it was not admitted."""
        return self.executions.get(self.tenants[ref], f"id-{ref}")

    @property
    def running(self) -> int:
        """Lanes that are taken."""
        return self.fleet.pool(POOL).running

    @property
    def waiting(self) -> int:
        """Requests that wait for a lane."""
        return self.coordinator.queued_in(POOL)

    def records_of(self, ref: int, kind: type[Any]) -> list[Any]:
        """Durable records of one kind about a request, in order."""
        return [record for record in self.ledger.records if record.id.request_id == f"id-{ref}" and isinstance(record, kind)]

    def end_of(self, ref: int) -> EndRecord:
        """The one durable end of a request; AssertionError where there is none, or more."""
        [end] = [*self.records_of(ref, SettleRecord), *self.records_of(ref, ReleaseRecord)]
        assert isinstance(end, SettleRecord | ReleaseRecord)
        return end

    def check_ended(self, ref: int) -> None:
        """AssertionError unless it ended as what its gateway's loss ends: by what it was, and for the platform alone."""
        end, steps = self.end_of(ref), self.records_of(ref, StepRecord)
        assert (end.status, end.finish_reason, end.error_code) == ("failed", "coordinator_lost", "coordinator_lost")
        assert isinstance(end, SettleRecord) == bool(steps), f"{ref}: released after a dispatch, or settled without one"
        if isinstance(end, SettleRecord):
            assert (end.cost_microusd, end.tenant_input_tokens, end.tenant_output_tokens) == (0, 0, 0)
            assert end.platform_microusd >= REVISION.price.cost(INPUT_TOKENS, 0, 0)

    def check_accounts(self, tenant: int = 0) -> None:
        """AssertionError unless a tenant holds nothing, and spent what was settled."""
        name = tenant_name(tenant)
        ends = [record for record in self.ledger.records if isinstance(record, SettleRecord) and record.id.tenant == name]
        balance = self.book.balance_of(Scope(name))
        assert self.book.open_holds_of(name) == 0 and (balance.held_microusd, balance.held_tokens) == (0, 0)
        assert balance.spent_microusd == sum(end.cost_microusd for end in ends)
        assert balance.spent_tokens == sum(end.tenant_input_tokens + end.tenant_output_tokens for end in ends)


async def _until_replaced(coordinator: Coordinator) -> None:
    with contextlib.suppress(errors.StaleEpoch):
        try:
            await coordinator.run()
        except* errors.StaleEpoch as replaced:
            raise replaced.exceptions[0] from None


def virtual_loop() -> VirtualLoop:
    """The loop of virtual time that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def play(
    script: Callable[[Stand], Awaitable[None]],
    lanes: int = 1,
    kv_tokens: int | None = None,
    config: CoordinatorConfig = CONFIG,
) -> None:
    """Run a script against a fresh stand with two replicas of so many lanes and tokens of memory, and audit what is left."""

    async def scene() -> None:
        ledger = MemoryLedger()
        clock = StepClock(virtual_loop())
        stand = Stand(ledger, await recover(ledger, clock, first_snapshot(SPEC), GROUP_MS), lanes, kv_tokens, config)
        async with asyncio.TaskGroup() as tasks:
            stand.run_in(tasks)
            await asyncio.sleep(0)
            await script(stand)
            await asyncio.sleep(10)
            assert stand.executions.live_count == 0 and stand.running == stand.waiting == 0
            stand.coordinator.close()
        report = await ledger.verify()
        assert report.is_clean and report.open_holds == 0 and report.late == 0, report.problems
        assert report.holds == report.settlements == sum(isinstance(record, HoldRecord) for record in ledger.records)
        assert stand.book.open_holds == 0
        for tenant in range(TENANTS):
            stand.check_accounts(tenant)

    run(scene(), until_ms=600_000)
