"""Between two attempts a relay waits for the coordinator's word, as a link with a delay lets it: in whatever order it comes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from weir.config import GatewayConfig
from weir.core.endings import FinishReason, Status
from weir.core.metering import InputBasis
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, EngineKind
from weir.core.request import InferenceRequest
from weir.engines.simulated import SimulatedEngine
from weir.errors import WeirError
from weir.gateway.client import Accepted
from weir.gateway.planning import Plan
from weir.gateway.relay import Relay, RelayParts
from weir.messages import (
    Admitted,
    DeliveryBooked,
    Ended,
    Finish,
    GenerationRecord,
    Granted,
    HoldBooked,
    Progress,
    ReplicaAddress,
    StandingView,
    Stopped,
    Up,
)
from weir.sim.clients import PATIENT, SimAnswer, SimClient
from weir.sim.virtual_loop import VirtualClock, VirtualLoop, run
from weir.sim.world import ALIAS, REVISION, principal_of

Message = TypeVar("Message")
STEP = 16


class Nobody:
    """A witness that looks away."""

    def opened(self, answer: SimAnswer, accepted: Accepted) -> None: ...

    def handed_out(self, answer: SimAnswer, texts: object) -> None: ...

    def answered(self, answer: SimAnswer, record: GenerationRecord, text: str) -> None: ...

    def refused(self, answer: SimAnswer, error: WeirError) -> None: ...


class Scene:
    """A relay whose link keeps what it sends; the test is the coordinator. reopened: refs that it was given anew."""

    def __init__(self, loop: VirtualLoop, tasks: asyncio.TaskGroup, *, stream: bool = True) -> None:
        clock = VirtualClock(loop)
        self.sent: list[Up] = []
        self.engine = SimulatedEngine()
        self.reopened: list[int] = []
        self._tasks = tasks
        parts = RelayParts(
            loop=loop,
            clock=clock,
            link=self,
            config=GatewayConfig(),
            step_tokens=STEP,
            store_wait_ms=2_000,
            engine_for=lambda kind: self.engine,
            salt_of=lambda plan: "salt",
            spawn=self._spawn,
            reopen=self._reopen,
            settled=lambda ref: None,
            is_heard=lambda: True,
        )
        request = InferenceRequest(ALIAS.name, "a question with an answer", stream=stream)
        workload = DEFAULT_WORKLOAD_CLASSES[0]
        plan = Plan(principal_of(0), request, "req-1", ALIAS, REVISION, workload, 9, InputBasis.EXACT, 40, 60_000)
        self.answer = SimAnswer("it", SimClient(clock, PATIENT, 1_000), Nobody())
        self.relay = Relay(parts, plan, self.answer)

    def admit(self) -> None:
        """It is queued with everything taken."""
        self.relay.deliver(Admitted(0, 1, StandingView()))

    def _reopen(self, ref: int) -> int:
        self.reopened.append(ref + 1)
        return ref + 1

    def send(self, message: Up) -> None:
        """The coordinator's port."""
        self.sent.append(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def grant(self, attempt: int) -> None:
        """A grant on a replica of its own."""
        name = f"r{attempt}"
        address = ReplicaAddress(
            name, "pool", REVISION.id, EngineKind.SIMULATED, "", REVISION.artifact, REVISION.context_tokens
        )
        self.relay.deliver(Granted(0, attempt, address, 0, STEP))

    def of(self, kind: type[Message]) -> list[Message]:
        """What was sent of one kind."""
        return [message for message in self.sent if isinstance(message, kind)]

    async def open(self) -> None:
        """Headers go out."""
        await self.answer.open(Accepted("gen", "it", ALIAS.name, REVISION.id, StandingView()))
        self.relay.open_output()

    async def lose_first_attempt(self) -> None:
        """The first attempt fails before anything was delivered."""
        self.grant(1)
        self.relay.deliver(HoldBooked(0))
        assert self.relay.is_startable
        await self.open()
        await asyncio.sleep(0.02)  # its first tokens wait for their step
        self.engine.lose("r1")
        await asyncio.sleep(0.001)
        [report] = self.of(Finish)
        assert (report.attempt, report.reason, report.delivered_tokens) == (1, FinishReason.REPLICA_LOST, 0)
        assert report.usage is not None and report.usage.input_tokens == 9 and report.usage.output_tokens > 0
        assert not self.relay.is_over and not self.relay.is_startable


def play(script: Callable[[Scene], Awaitable[None]], *, is_admitted: bool = True, stream: bool = True) -> None:
    """Run it in virtual time."""

    async def live() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.TaskGroup() as tasks:
            scene = Scene(loop, tasks, stream=stream)
            if is_admitted:
                scene.admit()
            await script(scene)
            scene.relay.stop(FinishReason.DISCONNECT)
            await scene.engine.aclose()

    run(live(), until_ms=60_000)


def test_a_step_of_the_first_attempt_lets_nothing_of_the_second_out() -> None:
    """Protects the books: what the second attempt hands out is covered by its own durable step, which recovery will find."""

    async def script(scene: Scene) -> None:
        await scene.lose_first_attempt()
        scene.grant(2)
        await asyncio.sleep(0.02)
        scene.relay.deliver(DeliveryBooked(0, 1, STEP))
        assert scene.answer.text == ""
        scene.relay.deliver(DeliveryBooked(0, 2, STEP))
        assert scene.answer.text
        assert [progress.attempt for progress in scene.of(Progress) if progress.first_output] == [2]

    play(script)


@pytest.mark.parametrize("granted", [False, True])
def test_a_client_that_leaves_between_two_attempts(granted: bool) -> None:
    """Protects engines and lanes: nothing is started for nobody, and a grant that was on its way gives its lane back."""

    async def script(scene: Scene) -> None:
        await scene.lose_first_attempt()
        scene.relay.client_lost()
        report = scene.of(Finish)[-1]
        assert (report.attempt, report.reason, report.usage) == (0, FinishReason.DISCONNECT, None)
        await asyncio.sleep(0.02)
        assert [(stopped.attempt, stopped.confirmed) for stopped in scene.of(Stopped)] == [(1, False)]
        if granted:
            scene.grant(2)
            assert scene.of(Stopped)[-1] == Stopped(0, 2)
            assert scene.engine.running("r2") == 0

    play(script)


def test_an_end_instead_of_a_second_attempt() -> None:
    """Protects the ending: where the coordinator grants no other attempt, its word is the one end of the request."""

    async def script(scene: Scene) -> None:
        await scene.lose_first_attempt()
        record = GenerationRecord("gen", "it", 1, ALIAS.name, REVISION.id, Status.FAILED, FinishReason.REPLICA_LOST)
        scene.relay.deliver(Ended(0, record))
        assert scene.relay.is_over and scene.relay.record == record
        scene.relay.stop(FinishReason.DEADLINE)
        assert len(scene.of(Finish)) == 1 and not scene.answer.text

    play(script)
