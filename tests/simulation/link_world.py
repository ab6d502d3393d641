"""Real gateways on real link ends before the stand's coordinator, over connections of memory that carry, stand still and break.

All gateways use the same engines, which never hold more than their lanes. Whatever happens to links, every client has one
answer at the end, every hold one end, and nothing is left: no task, timer, connection, nor anything that a session kept.
"""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tests.simulation.cables import Cable
from tests.simulation.front_stand import REPLICAS, now_s, timers_set
from tests.simulation.linked_gateway import Asked, Heard, HeardLink, LinkedGateway, Moment
from tests.simulation.session_stand import Stand, play, virtual_loop

from weir import errors
from weir.core.endings import Status
from weir.core.ledger.records import EndRecord, ExecutionId, SettleRecord, StepRecord
from weir.core.metering import Basis
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.gateway.client import Accepted
from weir.link.channel import Channel
from weir.link.coordinator_end import CoordinatorEnd
from weir.link.endpoint import Endpoint
from weir.link.frames import Terms
from weir.messages import Down, GenerationRecord, Granted, Register, Up
from weir.ports import EngineCall, GatewayInbox
from weir.sim.checks import Durable
from weir.sim.clients import SimAnswer
from weir.sim.faults import EngineTraits, FaultyEngine
from weir.sim.random_source import seeded_random
from weir.sim.world import POOL, SMALL_STEPS
from weir.units import Millis

STEP_MS = 40
"""Of an engine: one token of each run."""
TERMS = Terms(b"digest key", b"salt key", SMALL_STEPS.delivery_step_tokens, SMALL_STEPS.store_wait_ms)
_REST_S = 40.0
"""In which everything that was under way ends: more than a grace, a greeting and a lease."""
_GREETING_S = 3.1

Hearing: TypeAlias = Callable[["LinkedGateway | None", Moment, Up | Down], None]
"""Hears each message as it is given to a link, and as it comes out of one. The gateway is None where the coordinator is."""


class _Host:
    """A coordinator as its end knows it, overheard."""

    def __init__(self, world: "LinkWorld") -> None:
        self._world = world
        self._coordinator = world.stand.coordinator
        self.lost_s: dict[str, float] = {}

    def connect(self, register: Register, inbox: GatewayInbox) -> HeardLink:
        world = self._world
        world.sessions.append(weakref.ref(inbox))

        def hear(moment: Moment, message: Up | Down) -> None:
            if isinstance(message, Granted):
                self._check(message, register.session)
            self._hear(moment, message)

        heard = Heard(hear, inbox, "sent")
        return HeardLink(self._hear, self._coordinator.connect(register, heard))

    def _check(self, granted: Granted, session: str) -> None:
        """While a gateway that carried something was not heard, whoever leads next finds each dispatch."""
        if not self._coordinator._takeover._former:
            return
        self._world.granted_in_between += 1
        carried = self._coordinator._sessions.find(session)
        assert carried is not None
        name, records = carried.by_ref[granted.ref].id, self._world.stand.ledger.records
        steps = [step for step in records if isinstance(step, StepRecord) and step.id == name]
        assert granted.attempt in [step.attempt for step in steps], f"{name} is granted and its dispatch is not durable"

    def _hear(self, moment: Moment, message: Up | Down) -> None:
        self._world.hear(None, moment, message)

    def lose(self, session: str) -> None:
        self.lost_s[session] = now_s()
        self._coordinator.lose(session)

    @property
    def fresh_ms(self) -> Millis | None:
        return self._coordinator.fresh_ms


@dataclass
class LinkWorld:
    """Gateways, their cables and clients; the witness of all answers. lanes: of each of the two replicas.

    hear: hears every message at both ends of the links. told: how often each ending or refusal was shown.
    takeovers: how often another coordinator led. granted_in_between: grants while it had not heard every gateway.
    """

    stand: Stand
    tasks: asyncio.TaskGroup
    seed: int
    terms: Terms
    lanes: int
    gateways: list[LinkedGateway] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    takeovers: int = 0
    granted_in_between: int = 0

    def __post_init__(self) -> None:
        self.hear: Hearing = lambda gateway, moment, message: None
        self._is_leaderless = False
        self._serve(epoch=1)
        inner = SimulatedEngine(SimulatedReplica(concurrency=self.lanes, noise=lambda step_ms: STEP_MS / 2 * step_ms))
        self.engine = FaultyEngine(inner, EngineTraits({POOL: self.lanes}, idle_ms=20_000), self._starts)
        self._watched: list[weakref.ref[Any]] = []
        self._durable = Durable()
        self._read = 0
        self._ids: dict[str, ExecutionId] = {}

    def _serve(self, epoch: int) -> None:
        self.host = _Host(self)
        self.end = CoordinatorEnd(self.stand.clock, self.host, epoch, self.terms)
        self._serving = self.tasks.create_task(self.end.run())
        self.sessions: list[weakref.ref[Any]] = []  # of this coordinator: what a dead one had is another process's

    def _accept(self) -> Channel:
        if self._is_leaderless:
            raise ConnectionRefusedError
        return self.end.accept()

    async def take_over(self, after_s: float = 0.1, *, is_killed: bool = True) -> None:
        """The coordinator dies now, or stands still, and another one leads so much later, unless one is about to."""
        if self._is_leaderless:
            return
        self._is_leaderless = True
        if any(each.placements and not each.hold_durable for each in self.stand.executions.live):
            self.engine.spare = self.lanes  # nobody but their gateways knows of these, who may be late to tell
        for gateway in self.gateways:
            gateway.cable.cut(*((0.0, 0.0) if is_killed else (None, None)))
        serving = self._serving
        if is_killed:
            self.stand.leading.cancel()
            serving.cancel()
        await asyncio.sleep(after_s)
        recovered = await self.stand.take_over(is_killed=is_killed)
        self.takeovers += 1
        self._durable.may_be_unheard = True
        self._serve(recovered.journal.epoch)
        serving.cancel()
        self._is_leaderless = False

    def add(self, delay_s: tuple[float, float] = (0.001, 0.003), cable: Cable | None = None) -> LinkedGateway:
        """One more gateway, on a cable of its own or on that of one that died."""
        name = f"gateway-{len(self.gateways)}"
        found = cable or Cable(seeded_random(self.seed, name), self._accept, delay_s)
        self.gateways.append(LinkedGateway(self, name, found))
        return self.gateways[-1]

    @property
    def living(self) -> list[LinkedGateway]:
        """Gateways that did not die."""
        return [gateway for gateway in self.gateways if not gateway.is_dead]

    def watch(self, kept: object) -> None:
        """Something of a session, that is to go with it."""
        self._watched.append(weakref.ref(kept))

    def publish(self) -> int:
        """Another snapshot comes into force; its version."""
        snapshot = self.stand.coordinator.snapshot
        tenants = {name: replace(row, weight=row.weight + 1) for name, row in snapshot.tenants.items()}
        self.stand.coordinator.publish(replace(snapshot, version=snapshot.version + 1, tenants=tenants))
        return snapshot.version + 1

    @property
    def engine_runs(self) -> int:
        """Runs that engines have."""
        loads = [self.engine.inner.load(name) for name in REPLICAS]
        return sum(load.running + load.waiting for load in loads)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way, and every gateway that lives has its session."""
        sessions = {
            gateway.session for gateway in self.living if gateway.is_open and gateway.is_quiet and gateway.end.is_linked
        }
        return not self.stand.executions.live_count and len(sessions) == len(self.living) and sessions == set(self.end.sessions)

    # ── what clients see ─────────────────────────────────────────────────────────────────────────────────────────────

    def _starts(self, call: EngineCall) -> None:
        """An engine is given a call."""
        assert isinstance(call.prompt, str)
        assert not self.asked[call.prompt].answer.text, f"{call.prompt} is dispatched again after output"

    def _catch_up(self) -> None:
        records = self.stand.ledger.records
        for record in records[self._read :]:
            self._durable.add(record)
        self._read = len(records)
        self._ids = {hold.generation_id: name for name, hold in self._durable.holds.items()}

    def durable_end(self, asked: Asked) -> EndRecord | None:
        """The durable end of what a client knows; None where there is none."""
        self._catch_up()
        name = self._ids.get(asked.generation or "")
        return self._durable.ends.get(name) if name is not None else None

    def opened(self, answer: SimAnswer, accepted: Accepted) -> None:
        """Headers go out: the hold is durable."""
        self._catch_up()
        assert accepted.generation_id in self._ids, f"{answer.name} was accepted before its hold was durable"

    def handed_out(self, answer: SimAnswer, texts: Sequence[str]) -> None:
        """Output goes out: so much was durable before."""
        self._catch_up()
        assert answer.accepted is not None
        tokens = answer.text.count(" ") + "".join(texts).count(" ")
        booked = self._durable.delivered_max(self._ids[answer.accepted.generation_id])
        assert tokens <= booked, f"{answer.name} gets {tokens} tokens where {booked} are durable"

    def answered(self, answer: SimAnswer, record: GenerationRecord, text: str) -> None:
        """The end. A whole answer's settlement is durable before it is shown, and so is all that is said to be posted."""
        self._catch_up()
        self.told[record.finish_reason or ""] += 1
        if record.posted or (answer.accepted is None and record.status is Status.COMPLETED):
            assert self._ids[record.generation_id] in self._durable.ends, f"{answer.name} was shown before it was durable"
        if answer.accepted is None:
            answer.text = text

    def refused(self, answer: SimAnswer, error: errors.WeirError) -> None:
        """A refusal."""
        self.told[error.code] += 1

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def mend(self) -> None:
        """No fault any more."""
        self.stand.store_s.clear()
        for gateway in self.gateways:
            gateway.cable.mend()

    async def finish(self, *, collects: bool) -> None:
        """Wait until everything has ended, check what is there, stop, and check that nothing is. collects: also memory."""
        await until(lambda: self.is_quiet, _REST_S, "the world rests")
        await asyncio.sleep(5 * self.terms.heartbeat_ms / 1e3)  # what is left to acknowledge is, with a beat
        for asked in self.asked.values():
            self._check(asked)
        for gateway in self.living:
            assert gateway.is_open and gateway.is_quiet, f"{gateway.name} does not rest"
            assert gateway.end.is_linked and not gateway.inbox.is_lost, f"{gateway.name} has no coordinator"
            assert gateway.inbox.snapshot.version == self.stand.coordinator.snapshot.version
            assert gateway.inbox.snapshot.tenants == self.stand.coordinator.snapshot.tenants
        assert sorted(self.end.sessions) == sorted(gateway.session for gateway in self.living)
        left = self.engine_runs, self.stand.running, self.stand.waiting, self.stand.executions.live_count
        assert left == (0, 0, 0, 0), f"runs, lanes, waiting and live: {left}"
        self._check_memory(collects)
        for gateway in self.living:
            await gateway.leave()
        await asyncio.sleep(0.5)
        assert self.end.sessions == (), "a gateway that left has a session"
        for zombie in (*self.stand.replaced, self._serving):
            zombie.cancel()
        await asyncio.sleep(_GREETING_S)
        assert not any(gateway.cable.connections for gateway in self.gateways), "a connection is left"
        await self.engine.aclose()

    def _check_memory(self, collects: bool) -> None:
        """Nothing waits for an acknowledgement; of a session that is over nothing is left."""
        live: list[Endpoint] = [gateway.end._endpoint for gateway in self.living]
        live += [session.endpoint for session in self.end._sessions.values()]
        for endpoint in live:
            assert (endpoint._outbox._bytes, endpoint._waiting, endpoint._outbox.unacknowledged()) == (0, [], [])
        if collects:
            gc.collect()
            kept = [found for found in (each() for each in (*self._watched, *self.sessions)) if found is not None]
            dead = [gateway.end._endpoint for gateway in self.gateways if gateway.is_dead]
            allowed = [*live, *self.end._sessions.values(), *dead]
            assert not [each for each in kept if not any(each is other for other in allowed)], "a session is kept"

    def _check(self, asked: Asked) -> None:
        """One request against its client, the ledger and the engines."""
        answer, name = asked.answer, asked.answer.name
        assert asked.was_cut or asked.done_s is not None, f"{name} hangs"
        assert answer.is_over or asked.client.is_lost, f"{name} got no answer"
        calls = [call for call in self.engine.calls if call.prompt == asked.prompt]
        assert len(calls) <= 2 * (1 + self.takeovers)
        end = self.durable_end(asked)
        if asked.generation is None:
            assert not asked.tokens
            return
        if self.takeovers and asked.generation not in self._ids:  # its hold died with a coordinator, before it was durable
            assert answer.accepted is None and not asked.tokens, f"{name} was never held"
            return
        assert end is not None, f"{name} has no end"
        if answer.record is not None:
            self._check_shown(asked, answer.record, end)
        if not isinstance(end, SettleRecord):
            assert not asked.tokens and (self.takeovers or not calls), f"{name} was released and had run"
        elif end.basis is Basis.UNCERTAIN:
            assert end.output_tokens >= asked.tokens * asked.stream and end.cost_microusd == 0, f"{name}: {end}"
        else:
            assert end.output_tokens <= max((call.emitted for call in calls), default=0), f"{name}: {end}"
            assert not asked.stream or end.delivered_tokens == asked.tokens, f"{name}: {asked.tokens} shown, {end}"

    def _check_shown(self, asked: Asked, record: GenerationRecord, end: EndRecord) -> None:
        name, shown = asked.answer.name, (record.status, record.finish_reason)
        if self.takeovers and not record.posted and end.finish_reason == "coordinator_lost":
            return  # told as pending, and its report reached no coordinator: the platform pays
        if record.status is Status.COMPLETED:
            assert isinstance(end, SettleRecord) and (end.status, end.finish_reason) == shown, f"{name} shown {shown}: {end}"
            assert asked.tokens and end.tenant_output_tokens <= asked.tokens == end.output_tokens, f"{name}: {end}"
        elif record.finish_reason == "coordinator_lost":
            assert asked.stream or not asked.tokens
        elif record.finish_reason != "ledger_unavailable" or record.posted or asked.stream:
            assert (end.status, end.finish_reason) == shown, f"{name} shown {shown}: {end}"


Script = Callable[[LinkWorld], Awaitable[None]]


@dataclass(frozen=True)
class Setting:
    """What a scene plays in. lanes: of each replica; delay_s: the least and the most that a piece of a link takes."""

    gateways: int = 2
    lanes: int = 2
    delay_s: tuple[float, float] = (0.001, 0.003)
    terms: Terms = TERMS


def play_links(script: Script, setting: Setting = Setting(), *, seed: int = 0, collects: bool = True) -> LinkWorld:
    """Run a script with gateways that are ready, and check everything at its end. The world as it was then."""
    worlds: list[LinkWorld] = []

    async def scene(stand: Stand) -> None:
        compute_on_the_loop()
        await asyncio.sleep(0.1)
        before, timers = asyncio.all_tasks(), timers_set()
        async with asyncio.TaskGroup() as tasks:
            world = LinkWorld(stand, tasks, seed, setting.terms, setting.lanes)
            worlds.append(world)
            for _ in range(setting.gateways):
                world.add(setting.delay_s)
            await until(lambda: all(gateway.is_open for gateway in world.gateways), 1, "gateways open")
            await script(world)
            world.mend()
            await world.finish(collects=collects)
        assert timers_set() <= timers or worlds[0].takeovers  # the timers of the dead are another process's
        assert len(asyncio.all_tasks()) == len(before)

    play(scene, lanes=setting.lanes, config=SMALL_STEPS)
    return worlds[0]


def compute_on_the_loop() -> None:
    """There are no threads in virtual time: what is given to one is done at once, and known a little later."""
    loop = virtual_loop()

    def run_in_executor(executor: None, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done, found = loop.create_future(), work(*args)
        loop.call_later(0.002, tell, done, found)
        return done

    def tell(done: asyncio.Future[Any], found: Any) -> None:
        if not done.done():
            done.set_result(found)

    loop.run_in_executor = run_in_executor  # type: ignore[method-assign,assignment]


async def until(reached: Callable[[], object], bound_s: float, what: str) -> None:
    """Wait for a condition, and look a hundred times a second. AssertionError past the bound."""
    ends_s = now_s() + bound_s
    while not reached():
        assert now_s() < ends_s, f"never: {what}"
        await asyncio.sleep(0.01)
