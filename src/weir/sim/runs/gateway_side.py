"""The gateway's side of the link in a run: asks for grants, starts runs on replicas, reports progress and ends. No text at all.

It says what a gateway says, at the same moments: first output once it is booked, the next delivery step one step early, one
finish per attempt, stopped when the engine runs nothing. Every message is a call on the loop; no task or timer per request, and
none per token. What must hold whatever the coordinator decides is asserted by the oversight at each message.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weir.core.endings import FinishReason
from weir.core.metering import Basis, InputBasis
from weir.core.registry.model import WorkloadClass, workload_class_of
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.retry import is_retryable
from weir.core.tenancy import ServiceClass
from weir.messages import (
    Acquire,
    Admitted,
    AttemptUsage,
    DeliveryBooked,
    Down,
    Draining,
    EndBooked,
    Ended,
    Finish,
    FleetView,
    Granted,
    HoldBooked,
    Progress,
    Rejected,
    Stopped,
    StopRequest,
)
from weir.ports import CoordinatorLink
from weir.sim.runs.arrivals import Arrival
from weir.sim.runs.courses import Course
from weir.sim.runs.figures import Figures
from weir.sim.runs.foresight import Foresight
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.prompt_blocks import BYTES_PER_TOKEN, prefix_of
from weir.sim.runs.stepper import Run, SteppedReplica
from weir.sim.virtual_loop import VirtualLoop
from weir.units import NANOS_PER_SECOND, Millis, Nanos, Tokens, ns_from_ms

ALIAS, APPLICATION, KEY, REVISION, POOL = "assistant", "app", "key", "revision", "pool"
"""The one model of a run, and how each tenant asks for it."""


@dataclass(frozen=True, slots=True)
class AskingRules:
    """How requests are asked for. window_tokens: input and output at most; step_tokens: of a delivery step.

    max_output_tokens: asked for at most, its output where that is longer; deadline_ms: None for the workload class's own.
    affinity: whether the coordinator is told how prompts begin.
    """

    classes: tuple[WorkloadClass, ...]
    window_tokens: Tokens
    step_tokens: Tokens
    max_output_tokens: Tokens
    deadline_ms: Millis | None
    affinity: bool = True


class GatewaySide:
    """Inbox of the coordinator's messages, and listener of the replicas. link, find and foresight are set at the start."""

    link: CoordinatorLink
    foresight: Foresight
    find: Callable[[str], SteppedReplica]

    def __init__(self, loop: VirtualLoop, rules: AskingRules, oversight: Oversight, figures: Figures) -> None:
        self._loop = loop
        self._rules = rules
        self._oversight = oversight
        self._figures = figures
        self._courses: dict[int, Course] = {}
        self._runs: dict[int, Run] = {}
        self._refs = 0
        self._deadlines: list[tuple[Nanos, int]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self.emptied = asyncio.Event()
        self._receivers: dict[type, Callable[[Course, Any], None]] = {
            Admitted: self._on_admitted,
            Rejected: self._on_rejected,
            Granted: self._on_granted,
            HoldBooked: self._on_hold_booked,
            DeliveryBooked: self._on_delivery_booked,
            StopRequest: self._on_stop_request,
            Ended: self._on_ended,
            EndBooked: self._on_end_booked,
        }

    @property
    def open(self) -> int:
        """Requests of which something is pending."""
        return len(self._courses)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, arrival: Arrival) -> None:
        """A request was read now."""
        rules = self._rules
        workload = workload_class_of(rules.classes, ServiceClass.INTERACTIVE, arrival.input_tokens)
        self._refs += 1
        course = Course(self._refs, arrival, workload, self._loop.now_ns)
        self._figures.offered(course)
        if arrival.input_tokens + arrival.output_tokens > rules.window_tokens:
            self._figures.rejected(course, "input_too_long")
            return
        room = rules.window_tokens - arrival.input_tokens
        course.max_output_tokens = min(room, max(rules.max_output_tokens, arrival.output_tokens))
        deadline_ms = rules.deadline_ms or workload.default_deadline_ms
        course.deadline_ns = course.arrived_ns + ns_from_ms(deadline_ms)
        self._courses[course.ref] = course
        self._oversight.asked()
        self.link.send(self._acquire_of(course, deadline_ms))
        self._watch_backlog(course)
        if not course.is_over:
            self._watch_deadline(course)

    def _acquire_of(self, course: Course, deadline_ms: Millis) -> Acquire:
        ref, arrival = course.ref, course.arrival
        name, size = _request_id(ref), BYTES_PER_TOKEN * arrival.input_tokens
        return Acquire(
            ref=ref,
            request_id=name,
            request_id_given=False,
            generation_id=name,
            body_digest=name.encode(),
            tenant=arrival.tenant,
            application=APPLICATION,
            key=KEY,
            service_class=course.workload.service_class,
            workload_class=course.workload.name,
            alias=ALIAS,
            revision=REVISION,
            surface="sim",
            stream=True,
            input_tokens=arrival.input_tokens,
            input_basis=InputBasis.EXACT,
            input_bytes=size,
            max_output_tokens=course.max_output_tokens,
            choices=1,
            deadline_left_ms=deadline_ms,
            waited_ns=0,
            prefix=prefix_of(arrival.tenant, arrival.blocks, size) if self._rules.affinity else (),
        )

    def _watch_backlog(self, course: Course) -> None:
        """After a question: whether it waits now, so that its tenant is backlogged."""
        waits = course.is_admitted and not (course.is_over or course.is_ended or course.ref in self._runs)
        if waits != course.is_waiting:
            course.is_waiting = waits
            self._figures.waits(course.arrival.tenant, 1 if waits else -1)

    # ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch_deadline(self, course: Course) -> None:
        heapq.heappush(self._deadlines, (course.deadline_ns, course.ref))
        if self._deadlines[0][1] == course.ref:
            self._arm_deadline()

    def _arm_deadline(self) -> None:
        """One timer, for the next deadline of a request that has not ended."""
        while self._deadlines and self._is_done(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._deadlines:
            self._deadline = self._loop.call_at(self._deadlines[0][0] / NANOS_PER_SECOND, self._meet_deadlines)

    def _is_done(self, ref: int) -> bool:
        course = self._courses.get(ref)
        return course is None or course.is_over

    def _meet_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._loop.now_ns:
            course = self._courses.get(heapq.heappop(self._deadlines)[1])
            if course is not None:
                self._stop(course, FinishReason.DEADLINE)
        self._arm_deadline()

    # ── the coordinator's messages ───────────────────────────────────────────────────────────────────────────────────

    def deliver(self, message: Down) -> None:
        """One message of the coordinator."""
        receive = self._receivers.get(type(message))
        if receive is None:
            assert isinstance(message, Snapshot | FleetView | Draining), f"a run got {type(message).__name__}"
            return
        about: Any = message
        receive(self._courses[about.ref], message)

    def _on_admitted(self, course: Course, message: Admitted) -> None:
        self._oversight.admitted(course)
        course.is_admitted = True
        self._figures.admitted(course, self.foresight.wait_ms(course.arrival.tenant, _request_id(course.ref)))

    def _on_rejected(self, course: Course, message: Rejected) -> None:
        self._oversight.ended(course, admitted=False)
        course.is_over = course.is_ended = True
        allowed_ms = self.foresight.allowed_ms(course.arrival.tenant, _request_id(course.ref), message)
        self._figures.rejected(course, message.code, allowed_ms)
        self._forget(course)

    def _on_granted(self, course: Course, message: Granted) -> None:
        replica = self.find(message.replica.name)
        self._oversight.granted(course, message)
        if course.is_over:  # it ended while the grant was on its way
            self._stopped_at_once(course, message)
            return
        course.attempt, course.asked = message.attempt, message.delivered_max
        now_ns = self._loop.now_ns
        self._figures.granted(course, replica.name, now_ns)
        course.granted_ns = now_ns
        self._runs[course.ref] = replica.submit(course, message.lane)
        if course.is_waiting:
            self._watch_backlog(course)

    def _stopped_at_once(self, course: Course, message: Granted) -> None:
        self._oversight.lane_freed(message.replica.name, message.lane)
        self.link.send(Stopped(course.ref, message.attempt))

    def _on_hold_booked(self, course: Course, message: HoldBooked) -> None:
        assert not course.hold_booked, f"{course.ref}: its hold is booked twice"
        course.hold_booked = True
        self._hand_out(course)

    def _on_delivery_booked(self, course: Course, message: DeliveryBooked) -> None:
        if message.attempt == course.attempt and not course.is_over:
            course.booked = max(course.booked, message.delivered_max)
            self._hand_out(course)

    def _on_stop_request(self, course: Course, message: StopRequest) -> None:
        self._stop(course, message.reason)

    def _on_ended(self, course: Course, message: Ended) -> None:
        self._oversight.ended(course, admitted=True)
        course.is_over = course.is_ended = True
        if course.is_waiting:
            self._watch_backlog(course)
        self._figures.ended(course, message.record)

    def _on_end_booked(self, course: Course, message: EndBooked) -> None:
        assert course.is_ended, f"{course.ref}: its end is booked and was not told"
        self._forget(course)

    def _forget(self, course: Course) -> None:
        del self._courses[course.ref]
        if not self._courses:
            self.emptied.set()

    # ── the engine's output ──────────────────────────────────────────────────────────────────────────────────────────

    def on_mark(self, run: Run, tokens: Tokens) -> None:
        """The first output, or of a further delivery step: hand out what may be, and ask one step ahead."""
        course = run.course
        if tokens == 1:
            course.first_ns = self._loop.now_ns
            self._figures.computed(course, course.arrival.input_tokens, 1)
            self._figures.cached(course, run.cached_tokens or 0)
            self._hand_out(course)
            if course.handed_ns is None:
                self.link.send(Progress(course.ref, course.attempt, has_output=True))
        else:
            self._figures.computed(course, 0, self._rules.step_tokens)
            if course.handed_ns is not None:
                self._ask_ahead(course, tokens, first=False)

    def on_finished(self, run: Run) -> None:
        """The engine ended by itself; its end is reported once everything is handed out."""
        course = run.course
        course.last_ns = self._loop.now_ns
        rest = (course.arrival.output_tokens - 1) % self._rules.step_tokens
        self._figures.computed(course, 0, rest)
        self._complete_if_handed_out(course)

    def on_left(self, run: Run) -> None:
        """A cancelled run is in its batch no more."""
        assert run.cancelled_ns is not None
        self._report_stop(run, confirmed=True)

    def _hand_out(self, course: Course) -> None:
        """The first output leaves once it and the hold are durable."""
        if course.is_over or course.first_ns is None:
            return
        if course.handed_ns is None:
            if not course.hold_booked or not course.booked:
                return
            course.handed_ns = self._loop.now_ns
            self._figures.handed(course)
            self._ask_ahead(course, self._emitted(self._runs[course.ref]), first=True)
        self._complete_if_handed_out(course)

    def _emitted(self, run: Run) -> Tokens:
        return run.course.arrival.output_tokens if run.course.last_ns is not None else run.replica.emitted(run)

    def _ask_ahead(self, course: Course, emitted: Tokens, *, first: bool) -> None:
        step = self._rules.step_tokens
        wanted = min(course.max_output_tokens, (emitted - 1) // step * step + 2 * step)
        wanted_or_none = wanted if wanted > course.asked else None
        course.asked = max(course.asked, wanted)
        if first or wanted_or_none is not None:
            self.link.send(Progress(course.ref, course.attempt, first, wanted_or_none))

    def _complete_if_handed_out(self, course: Course) -> None:
        if course.last_ns is None or course.is_over or course.handed_ns is None:
            return
        if course.booked < course.arrival.output_tokens:
            self._ask_ahead(course, course.arrival.output_tokens, first=False)
            return
        is_full = course.arrival.output_tokens == course.max_output_tokens
        self._finish(course, FinishReason.LENGTH if is_full else FinishReason.STOP)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, course: Course, reason: FinishReason) -> None:
        if not course.is_over:
            self._finish(course, reason)

    def _finish(self, course: Course, reason: FinishReason) -> None:
        """Report an end: of the request, or of an attempt that the coordinator may grant again."""
        run = self._runs.pop(course.ref, None)
        report = self._report_of(course, run, reason)
        ref, attempt, has_ended = course.ref, course.attempt, course.last_ns is not None
        if is_retryable(reason, report.attempt, delivered=course.handed_ns is not None):
            course.leave_attempt()  # before the report: the grant may come within it
        else:
            course.is_over = True
        self.link.send(report)
        self._watch_backlog(course)
        if run is None:
            return
        if has_ended:
            self._oversight.lane_freed(run.replica.name, run.lane)
            self.link.send(Stopped(ref, attempt))
        else:
            run.replica.cancel(run)

    def _report_of(self, course: Course, run: Run | None, reason: FinishReason) -> Finish:
        if run is None:
            return Finish(course.ref, 0, reason)
        emitted = self._emitted(run)
        return Finish(
            ref=course.ref,
            attempt=course.attempt,
            reason=reason,
            delivered_tokens=min(emitted, course.booked) if course.handed_ns is not None else 0,
            usage=AttemptUsage(course.arrival.input_tokens, run.cached_tokens or 0, emitted, Basis.ENGINE),
            ttft_ms=course.ttft_ms,
            tpot_ms=course.tpot_ms,
        )

    def fail(self, run: Run, reason: FinishReason) -> None:
        """A run's replica broke off or is silent for too long."""
        if self._runs.get(run.course.ref) is run:
            self._stop(run.course, reason)

    def give_up(self, run: Run) -> None:
        """The engine of a cancelled run did not confirm that it stopped, or cannot any more."""
        run.replica.runs.pop(run.sequence, None)
        self._report_stop(run, confirmed=False)

    def _report_stop(self, run: Run, *, confirmed: bool) -> None:
        assert run.cancelled_ns is not None
        stop_ms = (self._loop.now_ns - run.cancelled_ns) / 1e6
        if confirmed:
            self._oversight.lane_freed(run.replica.name, run.lane)
        self.link.send(Stopped(run.course.ref, run.attempt, stop_ms, confirmed))


def _request_id(ref: int) -> str:
    return f"r{ref}"
