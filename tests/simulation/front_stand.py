"""A real gateway before the stand's coordinator, over a link that takes its time and can be cut, with clients that watch it.

It can lose its session at any moment and begin another. At the end of a scene everybody is answered or gone, and nothing that
the gateway started is left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.simulation.session_stand import Listening, Stand, play, virtual_loop
from tests.simulation.stage import LONG_PROMPTS

from weir import errors
from weir.config import GatewayConfig
from weir.core.request import InferenceRequest
from weir.engines.simulated import SimulatedEngine, SimulatedReplica
from weir.errors import WeirError
from weir.gateway.client import Accepted
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import Down, GenerationRecord, Register, Up
from weir.ports import CoordinatorLink, GatewayInbox
from weir.sim.clients import PATIENT, Habits, SimAnswer, SimClient
from weir.sim.faults import EngineTraits, FaultyEngine
from weir.sim.random_source import SeededEntropy
from weir.sim.world import ALIAS, POOL, SMALL_STEPS, principal_of

REPLICAS = ("first", "second")
LANES = 2
"""Of each of the two replicas."""


class Unmoved:
    """Witness of answers: it lets everything pass."""

    def opened(self, answer: SimAnswer, accepted: Accepted) -> None:
        """Headers."""

    def handed_out(self, answer: SimAnswer, texts: Sequence[str]) -> None:
        """Output."""

    def answered(self, answer: SimAnswer, record: GenerationRecord, text: str) -> None:
        """The end; a whole answer's output is kept where a stream's is."""
        if answer.accepted is None:
            answer.text = text

    def refused(self, answer: SimAnswer, error: WeirError) -> None:
        """A refusal."""


class Line:
    """One session's link. delay_s: how long a message takes; once it is cut, also what is under way is lost."""

    def __init__(self, inbox: GatewayInbox, delay_s: float) -> None:
        self._inbox = inbox
        self._delay_s = delay_s
        self.is_cut = False
        self.link: CoordinatorLink | None = None

    def _carry(self, take: Callable[[], None]) -> None:
        def arrive() -> None:
            if not self.is_cut:
                take()

        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, arrive)
        else:
            arrive()

    def send(self, message: Up) -> None:
        """Gateway to coordinator."""
        self._carry(lambda: self.link.send(message) if self.link is not None else None)

    def deliver(self, message: Down) -> None:
        """Coordinator to gateway."""
        self._carry(lambda: self._inbox.deliver(message))


@dataclass
class Asked:
    """One client's request. done_s: when it was answered to the last byte, None: it was not."""

    client: SimClient
    answer: SimAnswer
    stream: bool
    done_s: float | None = None

    def check_lost(self) -> None:
        """AssertionError unless its one answer says that the coordinator was lost, without any output."""
        record = self.answer.record
        assert record is not None and self.answer.refusal is None
        assert (record.status, record.finish_reason, record.error_code) == ("failed", "coordinator_lost", "coordinator_lost")
        assert not record.posted and (self.stream or not self.answer.text)

    def check_refused(self) -> None:
        """AssertionError unless it was refused for want of a coordinator."""
        refusal = self.answer.refusal
        assert isinstance(refusal, errors.CoordinatorLost) and refusal.http_status == 503 and refusal.retry_after_ms == 1_000
        assert self.answer.record is None and self.answer.accepted is None


@dataclass
class Front:
    """A gateway before the stand's coordinator, with engines of its own, in one session after another."""

    stand: Stand
    tasks: asyncio.TaskGroup
    delay_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = self.stand.clock
        inner = SimulatedEngine(SimulatedReplica(concurrency=LANES, noise=lambda step_ms: 10.0 * step_ms))
        self.engine = FaultyEngine(inner, EngineTraits({POOL: LANES}, idle_ms=20_000), lambda call: None)
        self.inbox = Inbox(clock)
        planner = Planner(self.inbox, lambda kind: self.engine, b"digest key", b"salt key")
        config = GatewayConfig()
        self.gateway = Gateway(clock, SeededEntropy(1), config, self.inbox, planner, self.stand.telemetry)
        self._grace_ms = config.slow_client_grace_ms
        self._sessions = 0
        self.line = self.connect()
        self.gateway.connect(self, lambda kind: self.engine, SMALL_STEPS.delivery_step_tokens, SMALL_STEPS.store_wait_ms)

    def send(self, message: Up) -> None:
        """The gateway's link: whichever session there is."""
        self.line.send(message)

    @property
    def session(self) -> str:
        """The name of the session."""
        return f"front-{self._sessions}"

    def connect(self) -> Line:
        """A new session."""
        self._sessions += 1
        self.line = Line(self.inbox, self.delay_s)
        self.line.link = self.stand.coordinator.connect(Register(self.session), self.line)
        return self.line

    def lose(self) -> None:
        """The gateway gives its session up; the coordinator does a little later."""
        self.line.is_cut = True
        self.inbox.lose()
        asyncio.get_running_loop().call_later(0.5, self.stand.coordinator.lose, self.session)

    def ask(self, *, habits: Habits = PATIENT, stream: bool = True, **changes: Any) -> Asked:
        """A client asks now. changes: of its request."""
        client = SimClient(self.stand.clock, habits, self._grace_ms)
        asked = Asked(client, SimAnswer(f"exchange-{len(self.asked)}", client, Unmoved()), stream)
        self.asked.append(asked)
        request: dict[str, Any] = {
            "model_alias": ALIAS.name,
            "prompt": LONG_PROMPTS[0],
            "max_output_tokens": 400,
            "stream": stream,
        }
        self.tasks.create_task(self._converse(asked, InferenceRequest(**request | changes)))
        if habits.leaves_after_ms is not None:
            asyncio.get_running_loop().call_later(habits.leaves_after_ms / 1e3, client.leave)
        return asked

    async def _converse(self, asked: Asked, request: InferenceRequest) -> None:
        await self.gateway.generate(principal_of(0), request, asked.answer, "sim")
        asked.done_s = asyncio.get_running_loop().time()

    @property
    def engines_run(self) -> int:
        """Runs that its engines have."""
        loads = [self.engine.inner.load(name) for name in REPLICAS]
        return sum(load.running + load.waiting for load in loads)


Script = Callable[[Stand, Front], Awaitable[None]]


def play_front(script: Script, delay_s: float = 0.0) -> None:
    """Run a script with a gateway; at its end everybody is answered or gone, and no listener, task, run or timer is left."""

    async def scene(stand: Stand) -> None:
        await asyncio.sleep(0.1)
        before, timers = asyncio.all_tasks(), timers_set()
        async with asyncio.TaskGroup() as tasks:
            front = Front(stand, tasks, delay_s)
            tasks.create_task(front.gateway.run())
            await asyncio.sleep(0.1)
            await script(stand, front)
            await asyncio.sleep(20)
            assert front.gateway.in_flight == front.inbox.open_requests == front.engines_run == 0
            for asked in front.asked:
                assert asked.done_s is not None, f"{asked.answer.name} hangs"
                assert asked.answer.is_over or asked.client.is_lost, f"{asked.answer.name} got no answer"
            front.gateway.close()
        assert timers_set() <= timers and asyncio.all_tasks() == before
        await front.engine.aclose()

    play(scene, lanes=LANES)


def timers_set() -> int:
    """Timers of the loop that are due some time."""
    return sum(not timer.cancelled() for timer in virtual_loop()._scheduled)


def now_s() -> float:
    """Virtual seconds."""
    return virtual_loop().time()


async def lose_and_wait(front: Front) -> float:
    """Lose the coordinator, and give answers a moment; when it was."""
    at_s = now_s()
    front.lose()
    await asyncio.sleep(0.3)
    return at_s


async def fails(question: Coroutine[Any, Any, Any]) -> float:
    """Ask in vain; when that was known."""
    with pytest.raises(errors.CoordinatorLost) as caught:
        await question
    assert caught.value.retry_after_ms == 1_000
    return now_s()


async def occupied(stand: Stand) -> tuple[Listening, list[int]]:
    """Another gateway takes every lane."""
    other = stand.gateway("other")
    return other, [other.ask(1) for _ in range(2 * LANES)]
