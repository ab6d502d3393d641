"""The gateway of a run in full: the real one, with prompts, clients and every token, watched at the link and at its clients.

It asks as the played side does, at the same moments, and counts the same things, so that the two can be compared. What passes
the link passes unchanged. It takes no decision for the gateway.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weir.config import CoordinatorConfig, GatewayConfig
from weir.core.registry.model import workload_class_of
from weir.core.request import InferenceRequest, Sampling
from weir.core.routing.retry import is_retryable
from weir.core.tenancy import Principal, ServiceClass
from weir.errors import WeirError
from weir.gateway.client import Accepted
from weir.gateway.inbox import Inbox
from weir.gateway.pipeline import Gateway
from weir.gateway.planning import Planner
from weir.messages import (
    Acquire,
    Admitted,
    Down,
    EndBooked,
    Ended,
    Finish,
    GenerationRecord,
    Granted,
    Rejected,
    Stopped,
    Up,
)
from weir.ports import CoordinatorLink, EngineCall
from weir.sim.clients import Habits, SimAnswer, SimClient
from weir.sim.random_source import SeededEntropy
from weir.sim.runs.arrivals import Arrival
from weir.sim.runs.courses import Course
from weir.sim.runs.figures import Figures
from weir.sim.runs.foresight import Foresight
from weir.sim.runs.gateway_side import ALIAS, APPLICATION, KEY, AskingRules
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.prompt_blocks import BYTES_PER_TOKEN
from weir.sim.runs.token_engine import TokenEngine
from weir.sim.virtual_loop import VirtualClock, VirtualLoop
from weir.telemetry import Telemetry

_BLOCK_BYTES = 2_048
"""Of a recorded block's text: 512 tokens."""


class WholeGateway:
    """The coordinator's link as the gateway has it, and its inbox. link and foresight are set at the start."""

    link: CoordinatorLink
    foresight: Foresight
    _engine: TokenEngine

    def __init__(
        self,
        loop: VirtualLoop,
        rules: AskingRules,
        oversight: Oversight,
        figures: Figures,
        habits_of: Callable[[Arrival], Habits],
        seed: int,
    ) -> None:
        self._loop = loop
        self._clock = VirtualClock(loop)
        self._rules = rules
        self._oversight = oversight
        self._figures = figures
        self._habits_of = habits_of
        self._config = GatewayConfig()
        self._inbox = Inbox(self._clock)
        planner = Planner(self._inbox, lambda kind: self._engine, b"digests", b"salts")
        self._gateway = Gateway(self._clock, SeededEntropy(seed, "gateway"), self._config, self._inbox, planner, Telemetry())
        self._tasks: asyncio.TaskGroup | None = None
        self._numbers = 0
        self._conversing: dict[int, Course] = {}  # by number
        self._asking: dict[asyncio.Task[Any], Course] = {}
        self._courses: dict[int, Course] = {}  # by the gateway's ref, as long as something is pending
        self._request_ids: dict[int, str] = {}
        self._lanes: dict[tuple[int, int], tuple[str, int]] = {}
        self._running: set[int] = set()
        self.emptied = asyncio.Event()
        self._heard: dict[type, Callable[[Course, Any], None]] = {
            Admitted: self._on_admitted,
            Rejected: self._on_rejected,
            Granted: self._on_granted,
            Ended: self._on_ended,
            EndBooked: self._on_end_booked,
        }

    def connect(self, engine: TokenEngine) -> None:
        """Use these replicas; once, before `run`."""
        self._engine = engine
        step_tokens, store_wait_ms = self._rules.step_tokens, CoordinatorConfig().store_wait_ms
        self._gateway.connect(self, lambda kind: engine, step_tokens, store_wait_ms)

    async def run(self) -> None:
        """Own the gateway and its conversations until `close`."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._gateway.run()

    def close(self) -> None:
        """Let `run` return once engines confirmed their stops."""
        self._gateway.close()

    @property
    def open(self) -> int:
        """Requests of which something is pending, or whose client still reads."""
        return len(self._courses) + len(self._conversing)

    def course_of(self, call: EngineCall) -> Course:
        """Whose an engine's call is."""
        assert call.sampling.seed is not None
        return self._conversing[call.sampling.seed]

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, arrival: Arrival) -> None:
        """A request was read now."""
        assert self._tasks is not None
        rules = self._rules
        workload = workload_class_of(rules.classes, ServiceClass.INTERACTIVE, arrival.input_tokens)
        self._numbers += 1
        course = Course(self._numbers, arrival, workload, self._loop.now_ns)
        self._figures.offered(course)
        wanted = min(rules.window_tokens, max(rules.max_output_tokens, arrival.output_tokens))
        room = rules.window_tokens - arrival.input_tokens
        course.max_output_tokens = min(room, wanted) if room >= arrival.output_tokens else wanted
        self._conversing[course.ref] = course
        self._tasks.create_task(self._converse(course))

    async def _converse(self, course: Course) -> None:
        arrival, task = course.arrival, asyncio.current_task()
        assert task is not None
        client = SimClient(self._clock, self._habits_of(arrival), self._config.slow_client_grace_ms)
        request = InferenceRequest(
            model_alias=ALIAS,
            prompt=prompt_of(arrival, course.ref),
            max_output_tokens=course.max_output_tokens,
            deadline_ms=self._rules.deadline_ms,
            stream=True,
            sampling=Sampling(seed=course.ref),
        )
        principal = Principal(arrival.tenant, APPLICATION, KEY, ServiceClass.INTERACTIVE)
        self._asking[task] = course
        answer = SimAnswer(f"request {course.ref}", client, _ClientWitness(course, self._loop, self._figures))
        await self._gateway.generate(principal, request, answer, "sim")
        del self._asking[task], self._conversing[course.ref]
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if not self.open:
            self.emptied.set()

    def _watch_backlog(self, ref: int, course: Course) -> None:
        """Whether it waits now, so that its tenant is backlogged."""
        waits = course.is_admitted and not (course.is_over or course.is_ended or ref in self._running)
        if waits != course.is_waiting:
            course.is_waiting = waits
            self._figures.waits(course.arrival.tenant, 1 if waits else -1)

    # ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Up) -> None:
        """Gateway to coordinator."""
        if isinstance(message, Acquire):
            self._acquire(message)
        elif isinstance(message, Finish) and (course := self._courses.get(message.ref)) is not None:
            self._finish(course, message)
        else:
            if isinstance(message, Stopped):
                self._on_stopped(message)
            self.link.send(message)

    def _acquire(self, message: Acquire) -> None:
        task = asyncio.current_task()
        assert task is not None
        course = self._courses[message.ref] = self._asking[task]
        self._request_ids[message.ref] = message.request_id
        self._oversight.asked()
        self.link.send(message if self._rules.affinity else msgspec.structs.replace(message, prefix=()))
        self._watch_backlog(message.ref, course)

    def _finish(self, course: Course, message: Finish) -> None:
        self._running.discard(message.ref)
        if is_retryable(message.reason, message.attempt, delivered=course.handed_ns is not None):
            course.leave_attempt()  # before the report: the grant may come within it
        else:
            course.is_over = True
        self.link.send(message)
        self._watch_backlog(message.ref, course)

    def _on_stopped(self, message: Stopped) -> None:
        replica, lane = self._lanes.pop((message.ref, message.attempt))
        if message.confirmed:
            self._oversight.lane_freed(replica, lane)

    # ── down ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, message: Down) -> None:
        """Coordinator to gateway."""
        heard = self._heard.get(type(message))
        if heard is not None:
            about: Any = message
            heard(self._courses[about.ref], message)
        self._inbox.deliver(message)

    def _on_admitted(self, course: Course, message: Admitted) -> None:
        self._oversight.admitted(course)
        course.is_admitted = True
        tenant, request_id = course.arrival.tenant, self._request_ids[message.ref]
        self._figures.admitted(course, self.foresight.wait_ms(tenant, request_id))

    def _on_rejected(self, course: Course, message: Rejected) -> None:
        self._oversight.ended(course, admitted=False)
        course.is_over = course.is_ended = True
        tenant, request_id = course.arrival.tenant, self._request_ids[message.ref]
        self._figures.rejected(course, message.code, self.foresight.allowed_ms(tenant, request_id, message))
        self._forget(message.ref)

    def _on_granted(self, course: Course, message: Granted) -> None:
        self._oversight.granted(course, message)
        self._lanes[message.ref, message.attempt] = message.replica.name, message.lane
        if course.is_over:  # it ended while the grant was on its way
            return
        course.attempt = message.attempt
        self._figures.granted(course, message.replica.name, self._loop.now_ns)
        course.granted_ns = self._loop.now_ns
        self._running.add(message.ref)
        self._watch_backlog(message.ref, course)

    def _on_ended(self, course: Course, message: Ended) -> None:
        self._oversight.ended(course, admitted=True)
        course.is_over = course.is_ended = True
        self._running.discard(message.ref)
        self._watch_backlog(message.ref, course)
        self._figures.ended(course, message.record)

    def _on_end_booked(self, course: Course, message: EndBooked) -> None:
        assert course.is_ended, f"{course.ref}: its end is booked and was not told"
        self._forget(message.ref)

    def _forget(self, ref: int) -> None:
        del self._courses[ref], self._request_ids[ref]
        self._tell_if_empty()


class _ClientWitness:
    """Sees what a client gets, and when."""

    def __init__(self, course: Course, loop: VirtualLoop, figures: Figures) -> None:
        self._course = course
        self._loop = loop
        self._figures = figures

    def opened(self, answer: SimAnswer, accepted: Accepted) -> None:
        """Headers are no output."""

    def handed_out(self, answer: SimAnswer, texts: Sequence[str]) -> None:
        """The first output is its time to first token."""
        if self._course.handed_ns is None:
            self._course.handed_ns = self._loop.now_ns
            self._figures.handed(self._course)

    def answered(self, answer: SimAnswer, record: GenerationRecord, text: str) -> None:
        """Its end was heard at the link."""

    def refused(self, answer: SimAnswer, error: WeirError) -> None:
        """What the gateway refused by itself; the coordinator's refusals were heard at the link."""
        if not self._course.is_ended:
            self._course.is_ended = True
            self._figures.rejected(self._course, error.code)


def prompt_of(arrival: Arrival, number: int) -> str:
    """A prompt of as many tokens: what is recorded of its beginning, and then the request's own."""
    size = BYTES_PER_TOKEN * arrival.input_tokens
    shared = "".join(f"{block:024d}".ljust(_BLOCK_BYTES, ".") for block in arrival.blocks)[:size]
    return (shared + f"{number} ".ljust(size - len(shared), "."))[:size]
