"""Messages that cross a decision: what is said of an attempt that is over, and a look-up that outlasts the drain."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from weir.config import CoordinatorConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.endings import FinishReason
from weir.core.ledger.records import SettleRecord
from weir.core.metering import Basis, InputBasis
from weir.core.registry.model import EngineKind, Pool
from weir.core.tenancy import ServiceClass
from weir.messages import Acquire, AttemptUsage, Down, Finish, Granted, Register, Rejected, ReplicaAddress, Stopped
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run
from weir.sim.world import POOL, REVISION, Spec, first_snapshot
from weir.storage.memory import MemoryLedger, Operation
from weir.telemetry import Telemetry

ASKED = Acquire(
    ref=1,
    request_id="it",
    request_id_given=False,
    generation_id="gen-it",
    body_digest=b"digest",
    tenant="tenant-0",
    application="app",
    key="000000000000",
    service_class=ServiceClass.INTERACTIVE,
    workload_class="short",
    alias="assistant",
    revision=REVISION.id,
    surface="native",
    stream=True,
    input_tokens=5,
    input_basis=InputBasis.EXACT,
    input_bytes=5,
    max_output_tokens=10,
    choices=1,
    deadline_left_ms=60_000,
    waited_ns=0,
)
ASKED_BY_ID = msgspec.structs.replace(ASKED, request_id_given=True)
LOST = Finish(1, 1, FinishReason.REPLICA_LOST, usage=AttemptUsage(5, 0, 3, Basis.ENGINE))
GROUP_MS = 5


class Desk:
    """A coordinator with two replicas, and a gateway that only listens."""

    def __init__(self, ledger: MemoryLedger, recovered: Recovered) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, config = StepClock(loop), CoordinatorConfig()
        fleet = Fleet(clock)
        self.ledger, self.heard, self.book = ledger, list[Down](), recovered.book
        self.executions = ExecutionTable(ledger, 100, config.request_id_ms, config.store_wait_ms)
        parts = CoordinatorParts(
            clock,
            config,
            fleet,
            recovered.book,
            recovered.journal,
            self.executions,
            RejectionCounter(ledger, clock),
            Telemetry(),
        )
        self.coordinator = Coordinator(parts, first_snapshot(Spec()))
        fleet.add_pool(Pool(POOL, REVISION.id, 2, 1))
        for name in ("first", "second"):
            fleet.add(name, POOL, 1)
            fleet.answered(ReplicaAddress(name, POOL, REVISION.id, EngineKind.SIMULATED, "", "model", 1_000))
        self.link = self.coordinator.connect(Register("gateway"), self)

    def deliver(self, message: Down) -> None:
        """The gateway's inbox."""
        self.heard.append(message)

    def heard_of(self, kind: type[Down]) -> list[Down]:
        """Messages of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]


def play(script: Callable[[Desk], Awaitable[None]]) -> None:
    """Run a script against a fresh desk in virtual time."""

    async def scene() -> None:
        ledger, loop = MemoryLedger(), asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        desk = Desk(ledger, await recover(ledger, StepClock(loop), first_snapshot(Spec()), GROUP_MS))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(desk.coordinator.run())
            await asyncio.sleep(0)
            await script(desk)
            desk.coordinator.close()
        assert desk.book.open_holds == 0 and (await ledger.verify()).is_clean

    run(scene(), until_ms=60_000)


def test_a_second_word_about_a_lost_attempt_does_not_end_the_one_that_runs() -> None:
    """Protects a retried request and its price: a repeated `finish` of the first attempt is counted as late, nothing more."""

    async def script(desk: Desk) -> None:
        desk.link.send(ASKED)
        desk.link.send(LOST)
        desk.link.send(LOST)
        desk.link.send(Stopped(1, 1))
        desk.link.send(Finish(1, 2, FinishReason.STOP, delivered_tokens=4, usage=AttemptUsage(5, 0, 4, Basis.ENGINE)))
        desk.link.send(Stopped(1, 2))
        await asyncio.sleep(1)
        assert [granted.attempt for granted in desk.heard_of(Granted) if isinstance(granted, Granted)] == [1, 2]
        [settled] = [record for record in desk.ledger.records if isinstance(record, SettleRecord)]
        assert (settled.attempt, settled.status, settled.output_tokens) == (2, "completed", 4)
        assert settled.platform_microusd == REVISION.price.cost(5, 0, 3)

    play(script)


def test_a_look_up_that_outlasts_the_drain_admits_nothing() -> None:
    """Protects holds at shutdown: what still asked the store for its id as the drain began is refused, and holds nothing."""

    async def slow(operation: Operation) -> None:
        if operation == "find_execution":
            await asyncio.sleep(0.5)

    async def script(desk: Desk) -> None:
        desk.ledger.delay = slow
        desk.link.send(ASKED_BY_ID)
        await asyncio.sleep(0.1)
        await desk.coordinator.drain(1_000)
        await asyncio.sleep(1)
        [refusal] = desk.heard_of(Rejected)
        assert isinstance(refusal, Rejected) and refusal.code == "draining"
        assert not desk.heard_of(Granted) and not desk.ledger.records

    play(script)
