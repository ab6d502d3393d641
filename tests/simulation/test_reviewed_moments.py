"""Moments in which a few could stop the others: room that is kept, a slow store, a prompt that is read, newcomers."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest
from tests.simulation.stage import run_script
from tests.simulation.test_late_messages import ASKED, GROUP_MS

from weir.config import CoordinatorConfig
from weir.coordinator.coordinator import Coordinator, CoordinatorParts
from weir.coordinator.domain import fair_order
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.fleet import Fleet
from weir.coordinator.recovery import Recovered, recover
from weir.coordinator.rejections import RejectionCounter
from weir.core.endings import FinishReason
from weir.core.metering import Basis
from weir.core.registry.model import EngineKind, Pool
from weir.core.scheduling.fairness import TokenCosts
from weir.core.scheduling.orders import BYPASSES_MAX, Head, Order
from weir.core.tenancy import ServiceClass
from weir.messages import (
    AttemptUsage,
    CancelById,
    DeliveryBooked,
    Down,
    Ended,
    Finish,
    Granted,
    Progress,
    Register,
    Rejected,
    ReplicaAddress,
    ReplicaPace,
    Stopped,
    Up,
)
from weir.sim.faults import StepClock
from weir.sim.virtual_loop import VirtualLoop, run
from weir.sim.world import POOL, REVISION, Spec, World, first_snapshot, key_of, tenant_name
from weir.sim.world import Order as ClientOrder
from weir.storage.memory import MemoryLedger, Operation
from weir.telemetry import Telemetry
from weir.units import Millis

LARGE: dict[str, Any] = {"input_tokens": 900, "max_output_tokens": 200}
"""With its expected output more than half of a replica's memory: two are never beside each other."""
SMALL: dict[str, Any] = {"input_tokens": 20, "max_output_tokens": 8, "seconds": (0.05, 0.2)}
KV_TOKENS = 1_900
BATCH: dict[str, Any] = {
    "service_class": ServiceClass.BATCH,
    "workload_class": "batch",
    "application": "jobs",
    "key": key_of(0, 3),
}

Heard = TypeVar("Heard", bound=Down)


@dataclass(frozen=True, slots=True)
class Fittings:
    """What a stand is made of. pools: lanes of each replica, by name. paces: of replicas, in the order in which they answer."""

    replicas: int = 1
    pools: Mapping[str, int] = field(default_factory=lambda: {POOL: 4})
    kv_tokens: int | None = None
    paces: Sequence[ReplicaPace] = ()
    config: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    @property
    def spec(self) -> Spec:
        """Of the configuration."""
        return Spec(tenants=30, pools=[Pool(name, REVISION.id, self.replicas, lanes) for name, lanes in self.pools.items()])


@dataclass(slots=True)
class Question:
    """One request of the stand's gateway, and what came of it. seconds: from its start to first output and end, None: open."""

    ref: int
    tenant: str
    request_id: str
    input_tokens: int
    asked_s: float
    seconds: tuple[float, float] | None
    heard: list[tuple[float, Down]] = field(default_factory=list)
    is_over: bool = False

    def first(self, kind: type[Heard]) -> Heard | None:
        """What it heard first of a kind."""
        return next((message for _, message in self.heard if isinstance(message, kind)), None)

    @property
    def replica(self) -> str | None:
        """Where it started."""
        granted = self.first(Granted)
        return granted.replica.name if granted else None

    @property
    def waited_s(self) -> float | None:
        """From the question to its start."""
        starts = [at_s - self.asked_s for at_s, message in self.heard if isinstance(message, Granted)]
        return starts[0] if starts else None

    @property
    def code(self) -> str | None:
        """Why it was refused."""
        refused = self.first(Rejected)
        return refused.code if refused else None


class Stand:
    """A coordinator with a fleet of the test's choice, and a gateway whose engines answer as each question says."""

    def __init__(self, ledger: MemoryLedger, recovered: Recovered, fittings: Fittings) -> None:
        self._loop = asyncio.get_running_loop()
        clock, self._questions = StepClock(virtual_loop()), dict[int, Question]()
        config = fittings.config
        self.fleet = Fleet(clock)
        self.executions = ExecutionTable(ledger, 100, config.request_id_ms, config.store_wait_ms)
        rejections = RejectionCounter(ledger, clock)
        parts = CoordinatorParts(
            clock, config, self.fleet, recovered.book, recovered.journal, self.executions, rejections, Telemetry()
        )
        self.coordinator = Coordinator(parts, first_snapshot(fittings.spec))
        for pool in fittings.spec.kept_pools:
            self._furnish(pool, fittings)
        self.link = self.coordinator.connect(Register("gateway"), self)

    def _furnish(self, pool: Pool, fittings: Fittings) -> None:
        self.fleet.add_pool(pool)
        paces = [*fittings.paces, *[None] * fittings.replicas]
        for number in range(fittings.replicas):
            name = f"{pool.name}-{number}"
            address = ReplicaAddress(name, pool.name, REVISION.id, EngineKind.SIMULATED, "", "model", 100_000)
            self.fleet.add(name, pool.name, pool.concurrency)
            self.fleet.answered(msgspec.structs.replace(address, kv_tokens=fittings.kv_tokens, pace=paces[number]))

    def ask(self, tenant: int = 0, seconds: tuple[float, float] | None = None, **changes: Any) -> Question:
        """A tenant asks now. changes: of what it asks."""
        ref = len(self._questions) + 1
        ids = {"ref": ref, "request_id": f"id-{ref}", "generation_id": f"gen-{ref}", "body_digest": b"%d" % ref}
        whose = {"tenant": tenant_name(tenant), "key": key_of(tenant)}
        asked = msgspec.structs.replace(ASKED, **ids | whose | {"input_tokens": 100, "max_output_tokens": 128} | changes)
        made = Question(ref, asked.tenant, asked.request_id, asked.input_tokens, self._loop.time(), seconds)
        self._questions[ref] = made
        self.link.send(asked)
        return made

    def predicted_ms(self, question: Question) -> Millis:
        """With what wait it was admitted."""
        execution = self.executions.get(question.tenant, question.request_id)
        assert execution is not None
        return execution.predicted_wait_ms

    def deliver(self, message: Down) -> None:
        """The gateway's inbox."""
        question = self._questions.get(getattr(message, "ref", 0))
        if question is None:
            return
        question.heard.append((self._loop.time(), message))
        if isinstance(message, Granted) and question.seconds is not None:
            first_s, end_s = question.seconds
            self._loop.call_later(first_s, self.show, question)
            self._loop.call_later(end_s, self.end, question)

    def show(self, question: Question) -> None:
        """Its first output is with its client."""
        self.link.send(Progress(question.ref, 1, first_output=True))

    def end(self, question: Question, output_tokens: int = 8, tpot_ms: float | None = None) -> None:
        """Its answer is whole, and its engine runs nothing for it."""
        question.is_over = True
        usage = AttemptUsage(question.input_tokens, 0, output_tokens, Basis.ENGINE)
        self.link.send(Finish(question.ref, 1, FinishReason.STOP, output_tokens, usage, tpot_ms=tpot_ms))
        self.link.send(Stopped(question.ref, 1))

    def leave(self, question: Question) -> None:
        """Its client goes away while it waits."""
        self.link.send(Finish(question.ref, 0, FinishReason.DISCONNECT))

    async def close(self) -> None:
        """Everything ends, and the coordinator with it."""
        for question in self._questions.values():
            if question.waited_s is None and question.first(Rejected) is None and question.first(Ended) is None:
                self.leave(question)
        await asyncio.sleep(1)
        for question in self._questions.values():
            if question.waited_s is not None and not question.is_over:
                self.end(question)
        await asyncio.sleep(1)
        self.coordinator.close()


def virtual_loop() -> VirtualLoop:
    """The loop of virtual time that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def play(script: Callable[[Stand], Awaitable[None]], fittings: Fittings) -> None:
    """Run a script against a fresh stand; at its end no hold is open, no lane taken, and the ledger is clean."""

    async def scene() -> None:
        ledger = MemoryLedger()
        recovered = await recover(ledger, StepClock(virtual_loop()), first_snapshot(fittings.spec), GROUP_MS)
        stand = Stand(ledger, recovered, fittings)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stand.coordinator.run())
            await asyncio.sleep(0)
            await script(stand)
            await stand.close()
        assert recovered.book.open_holds == 0 and (await ledger.verify()).is_clean
        assert all(stand.fleet.pool(pool).running == 0 for pool in fittings.pools)

    run(scene(), until_ms=600_000)


# ── room that is kept ────────────────────────────────────────────────────────────────────────────────────────────────


async def occupied(stand: Stand, replicas: int) -> list[Question]:
    """A long answer on each replica, by name: none has room for another large one."""
    runs = [stand.ask(1, **LARGE) for _ in range(replicas)]
    await asyncio.sleep(0.1)
    for each in runs:
        stand.show(each)
    assert len({each.replica for each in runs}) == replicas
    return sorted(runs, key=lambda each: str(each.replica))


async def small_ones(stand: Stand, number: int) -> list[Question]:
    """Small questions of three tenants, twenty a second."""
    asked = []
    for place in range(number):
        asked.append(stand.ask(2 + place % 3, **SMALL))
        await asyncio.sleep(0.05)
    return asked


@pytest.mark.parametrize("changes", [{}, BATCH], ids=["interactive", "batch"])
def test_a_large_request_that_fits_nowhere_stops_nobody(changes: dict[str, Any]) -> None:
    """Protects everybody from one tenant's large requests: small ones start at once, and it does when one replica drained."""

    async def script(stand: Stand) -> None:
        runs = await occupied(stand, 4)
        large = stand.ask(0, **LARGE | changes)
        before = await small_ones(stand, 3 * BYPASSES_MAX)
        assert large.waited_s is None
        assert [each.waited_s for each in before] == [0.0] * len(before)
        stand.end(runs[0])
        assert large.replica == runs[0].replica
        after = await small_ones(stand, BYPASSES_MAX)
        assert [each.waited_s for each in after] == [0.0] * len(after)

    play(script, Fittings(replicas=4, pools={POOL: 16}, kv_tokens=KV_TOKENS))


def test_a_replica_is_kept_until_a_large_request_fits() -> None:
    """Protects the large request: others that would fill every gap leave one replica to drain, and go on at the other three."""

    async def script(stand: Stand) -> None:
        medium: dict[str, Any] = {"input_tokens": 300, "max_output_tokens": 8, "seconds": (0.01, 0.6)}
        huge: dict[str, Any] = {"input_tokens": 1_800, "max_output_tokens": 8, "seconds": (0.01, 0.1)}
        asked, large = [], stand.ask(0, **huge)
        for place in range(160):
            if place == 60:
                large = stand.ask(0, **huge)
            asked.append(stand.ask(2 + place % 3, **medium))
            await asyncio.sleep(0.02)
        assert large.waited_s is not None and 0.2 < large.waited_s < 1.2
        began_s = large.asked_s + large.waited_s
        beside = {each.replica for each in asked if began_s - 0.2 < each.asked_s + (each.waited_s or 0) < began_s}
        assert beside - {None} == {f"{POOL}-{place}" for place in range(4)} - {large.replica}

    play(script, Fittings(replicas=4, pools={POOL: 16}, kv_tokens=KV_TOKENS))


def test_many_large_heads_hide_no_small_one() -> None:
    """Protects small requests from many tenants' large ones: however many heads fit nowhere, those behind them are seen."""

    async def script(stand: Stand) -> None:
        await occupied(stand, 4)
        larges = [stand.ask(10 + place, **LARGE) for place in range(5)]
        await asyncio.sleep(0.1)
        smalls = await small_ones(stand, 40)
        assert [each.waited_s for each in smalls] == [0.0] * len(smalls)
        assert [each.waited_s for each in larges] == [None] * len(larges)

    play(script, Fittings(replicas=4, pools={POOL: 16}, kv_tokens=KV_TOKENS))


@pytest.mark.parametrize("how", ["cancel", "disconnect", "expiry"])
def test_what_waits_behind_kept_room_starts_when_it_is_kept_no_more(how: str) -> None:
    """Protects those behind: the one whose room is kept is cancelled, left or waits in vain, and they start in that instant."""

    async def script(stand: Stand) -> None:
        await occupied(stand, 1)
        large = stand.ask(0, **LARGE)
        passed = await small_ones(stand, BYPASSES_MAX)
        assert [each.waited_s for each in passed] == [0.0] * BYPASSES_MAX
        behind = await small_ones(stand, 3)
        assert [each.waited_s for each in behind] == [None] * 3
        if how == "cancel":
            stand.link.send(CancelById(1, large.tenant, large.request_id))
        elif how == "disconnect":
            stand.leave(large)
        else:
            await asyncio.sleep(large.asked_s + 5.0 - asyncio.get_running_loop().time())
        [ended_s] = [at_s for at_s, message in large.heard if isinstance(message, Ended)]
        assert [each.asked_s + (each.waited_s or 0) for each in behind] == [ended_s] * 3

    play(script, Fittings(replicas=1, pools={POOL: 16}, kv_tokens=KV_TOKENS))


# ── a slow store ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("delay_s", [0.2, 0.8])
def test_a_slow_store_stops_no_dispatch(delay_s: float) -> None:
    """Protects capacity from the store's pace: an input that is read counts as read before any of the output is booked."""
    passing: list[Up | Down] = []

    async def slow(operation: Operation) -> None:
        await asyncio.sleep(delay_s)

    async def script(world: World) -> None:
        world.ledger.delay = slow
        heard = world.cell.wire.heard

        def listen(message: Up | Down) -> None:
            passing.append(message)
            heard(message)

        world.cell.wire.heard = listen
        exchanges = []
        for place in range(20):
            prompt = f"question {place} " + "word " * 100
            exchanges.append(world.send(ClientOrder(prompt, tenant=place % 2, max_output_tokens=16)))
            await asyncio.sleep(0.1)
        await world.until(lambda: all(exchange.is_done for exchange in exchanges))

    spec = Spec(concurrency=16, slowness=1.0, pace=ReplicaPace(2.0, 0.25, 2.0))
    world = run_script(script, spec)
    ends = list(world.checker.durable.ends.values())
    assert len(ends) == 20 and max(end.timing.queue_ms or 0 for end in ends) == 0
    for ref in {message.ref for message in passing if isinstance(message, Granted)}:
        about = [each for each in passing if isinstance(each, Progress | DeliveryBooked) and each.ref == ref]
        assert isinstance(about[0], Progress) and about[0].has_output and not about[0].first_output


# ── a prompt that is read ────────────────────────────────────────────────────────────────────────────────────────────


async def whole_answers(stand: Stand, number: int, seconds: float, tpot_ms: float = 20.0) -> None:
    """Evidence: one after another, each with its lane for so long."""
    for _ in range(number):
        question = stand.ask(5)
        await asyncio.sleep(0.1)
        stand.show(question)
        await asyncio.sleep(seconds)
        stand.end(question, 128, tpot_ms)
    await asyncio.sleep(0.1)


def test_a_prompt_that_is_read_locks_no_door() -> None:
    """Protects the second question: answers take half a minute, lanes are free, and it waits for the first to be read only."""

    async def script(stand: Stand) -> None:
        await whole_answers(stand, 4, 30.0)
        first = stand.ask(0, seconds=(0.12, 30.0))
        await asyncio.sleep(0.05)
        second = stand.ask(1, seconds=(0.12, 30.0))
        assert first.waited_s == 0 and second.code is None
        assert 40 <= stand.predicted_ms(second) <= 80
        await asyncio.sleep(0.1)
        assert second.waited_s == pytest.approx(0.07)

    play(script, Fittings(paces=[ReplicaPace(20, 1.0, 20)]))


async def tries_until_let_in(stand: Stand, tenant: int, **changes: Any) -> tuple[int, float]:
    """Who asks again each time after its Retry-After: after how many refusals, and how many seconds, it is let in."""
    began_s = asyncio.get_running_loop().time()
    for refusals in range(5):
        refused = stand.ask(tenant, **changes).first(Rejected)
        if refused is None:
            return refusals, asyncio.get_running_loop().time() - began_s
        assert refused.retry_after_ms is not None
        await asyncio.sleep(refused.retry_after_ms / 1e3)
    raise AssertionError("its Retry-After never helps")


def test_a_refusal_behind_a_long_prompt_helps_who_comes_again() -> None:
    """Protects callers from a Retry-After in vain: whoever follows it is let in when the prompt is read, or soon after."""

    async def script(stand: Stand) -> None:
        stand.ask(0, seconds=(4.0, 30.0), input_tokens=4_000, workload_class="long")
        refused = stand.ask(1)
        assert refused.code == "queue_wait_exceeded"
        refusals, after_s = await tries_until_let_in(stand, 1)
        assert 1 <= refusals <= 3 and after_s < 5.0

    play(script, Fittings(paces=[ReplicaPace(20, 1.0, 20)]))


# ── newcomers ────────────────────────────────────────────────────────────────────────────────────────────────────────

REQUEST_COST = 50_000


def worked(order: Order, tenant: str, turns: int) -> None:
    """A tenant had so many turns."""
    for _ in range(turns):
        order.close(order.charge(tenant, REQUEST_COST), REQUEST_COST)


def turns_before(order: Order, tenant: str) -> Counter[str]:
    """How often each of the others goes before it has its next turn, all of them always waiting."""
    turns: Counter[str] = Counter()
    while (first := order.first()) not in (None, tenant) and turns.total() < 10_000:
        assert first is not None
        worked(order, first, 1)
        turns[first] += 1
    return turns


def turns_in_a_burst(config: CoordinatorConfig) -> int:
    """How many requests a newcomer may have before one who waits: its burst and the slack, and the one that ends it."""
    return (config.fair_burst_tokens + config.fair_slack_tokens) * TokenCosts().input // REQUEST_COST + 1


@pytest.mark.parametrize("newcomers", [1, 2, 100])
def test_newcomers_put_nobody_back_by_more_than_one_burst(newcomers: int) -> None:
    """Protects who works already: a hundred that join at once have one burst each before its turn, not each a burst more."""
    config = CoordinatorConfig()
    order = fair_order(config)(lambda tenant: 1)
    order.joined("busy", Head(0, 0))
    worked(order, "busy", 300)
    for number in range(newcomers):
        order.joined(f"newcomer-{number}", Head(1 + number, 0))
    turns = turns_before(order, "busy")
    assert len(turns) == newcomers and max(turns.values()) <= turns_in_a_burst(config)


@pytest.mark.parametrize("lone", [0, 50])
def test_lone_requests_lower_the_floor_for_nobody(lone: int) -> None:
    """Protects who worked before: fifty tenants that asked once of an idle fleet leave the next one no lead but its burst."""
    config = CoordinatorConfig()
    order = fair_order(config)(lambda tenant: 1)
    order.joined("busy", Head(0, 0))
    worked(order, "busy", 300)
    order.left("busy")
    for number in range(lone):
        order.joined(f"lone-{number}", Head(1 + number, 0))
        ticket = order.charge(f"lone-{number}", REQUEST_COST // 10)
        order.left(f"lone-{number}")
        order.close(ticket, REQUEST_COST // 10)
    order.joined("next", Head(1_000, 0))
    order.joined("busy", Head(1_001, 0))
    assert turns_before(order, "busy")["next"] <= turns_in_a_burst(config)


def test_a_newcomers_large_request_lets_small_ones_pass() -> None:
    """Protects everybody where requests are small: the newcomer's burst does not put them beyond the bound of bypasses."""

    async def script(stand: Stand) -> None:
        for place in range(240):  # who works already: beyond a newcomer by its burst
            stand.ask(2 + place % 3, input_tokens=200, max_output_tokens=8, seconds=(0.01, 0.1))
            await asyncio.sleep(0.02)
        for place in range(40):  # ten answers that last, on each of four replicas: a large one fits nowhere
            stand.ask(2 + place % 3, **SMALL | {"seconds": (0.05, 60.0)})
            await asyncio.sleep(0.05)
        large = stand.ask(0, input_tokens=1_800, max_output_tokens=8)
        smalls = await small_ones(stand, 40)
        assert large.waited_s is None
        assert [each.waited_s for each in smalls] == [0.0] * 40

    play(script, Fittings(replicas=4, pools={POOL: 16}, kv_tokens=KV_TOKENS))
