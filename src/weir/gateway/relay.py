"""One request between its engine and its client: pumps output with backpressure, and ends exactly once, whatever happens first.

Everything here is a callback on the event loop: the coordinator's messages, the engine's output, the client's fate, timers. The
pipeline's coroutine only waits for a phase to be reached. No task, queue or iterator runs per chunk; what arrives in one read
leaves in one write.

How it ends. The first cause wins (`stop`, or the engine's own end once all its output is handed out); then the engine is
cancelled if it still runs, `finish` reports what was used and delivered, and `stopped` follows when the engine confirmed that
it runs nothing. An attempt that failed with nothing delivered is reported the same way, and then the coordinator's word is
awaited: another grant, or the end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from weir import errors
from weir.config import GatewayConfig
from weir.core.endings import FinishReason
from weir.core.routing.retry import is_retryable
from weir.gateway.answer_bounds import whole_answer_bytes_max
from weir.gateway.attempt import Attempt
from weir.gateway.client import Answer
from weir.gateway.planning import Plan
from weir.gateway.retelling import Retelling
from weir.gateway.signal import Signal
from weir.messages import (
    Acquire,
    Admitted,
    DeliveryBooked,
    Down,
    EndBooked,
    Ended,
    EndUnbooked,
    Finish,
    GenerationRecord,
    Granted,
    HoldBooked,
    NotHeld,
    Progress,
    Reattached,
    Rejected,
    StandingView,
    Stopped,
    StopRequest,
    Up,
)
from weir.ports import Clock, CoordinatorLink, Delta, Engine, EngineCall, EngineEnd, EngineRun
from weir.units import Millis, Nanos, Tokens, ns_from_ms

_MARK_EVERY_NS = 100_000_000
"""Granularity of the slow-client watch: marks of what was written when."""

_REASON_OF_FAULT: dict[type[errors.WeirError], FinishReason] = {
    errors.EngineError: FinishReason.ENGINE_ERROR,
    errors.ReplicaLost: FinishReason.REPLICA_LOST,
    errors.Stalled: FinishReason.STALLED,
    errors.EngineRejected: FinishReason.ENGINE_REJECTED,
}

_ANSWERLESS = (FinishReason.DISCONNECT, FinishReason.SLOW_CLIENT)

Secure: TypeAlias = Callable[[list[Delta]], Awaitable[None]]
"""Makes a whole answer durable, from its pieces. Raises StoreFault, and the request fails."""


@dataclass(frozen=True, slots=True)
class RelayParts:
    """What every relay of a gateway shares. spawn: runs a task of the gateway; reopen: another ref in the place of one.

    settled: told of a ref of which less is pending. is_heard: whether the coordinator was heard lately; else what does not come
    says nothing of its store.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    link: CoordinatorLink
    config: GatewayConfig
    step_tokens: Tokens
    store_wait_ms: Millis
    engine_for: Callable[..., Engine]
    salt_of: Callable[[Plan], str]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    reopen: Callable[[int], int]
    settled: Callable[[int], None]
    is_heard: Callable[[], bool]


class Relay:
    """Engine sink, coordinator's listener and client's watcher of one request."""

    def __init__(self, parts: RelayParts, plan: Plan, answer: Answer) -> None:
        self._parts = parts
        self._plan = plan
        self._answer = answer
        self._client = answer.client
        self._streamed = plan.request.stream
        self._keeps = plan.request.retain
        self._attempt = Attempt(plan, parts.step_tokens)
        self._changed = Signal(parts.loop)
        self._opened = False
        self._cause: FinishReason | None = None
        self._first_written_ns: Nanos | None = None
        self._written_ns: Nanos = parts.clock.monotonic_ns()
        self._marks: deque[tuple[int, Nanos]] = deque()
        self._retelling = Retelling(parts.clock)
        self.ref = 0
        self.secure: Secure | None = None
        self._secured: Attempt | None = None  # whose output is made durable
        self.decision: Admitted | Rejected | None = None
        self.hold_durable = False
        self.record: GenerationRecord | None = None
        self.end_booked = False
        self.is_lost = False

    # ── what the pipeline waits for ──────────────────────────────────────────────────────────────────────────────────

    async def until(self, reached: Callable[[], bool], timeout_ms: Millis | None = None) -> bool:
        """Wait until a phase is reached; False after the timeout."""
        if timeout_ms is None or reached():
            await self._wait_until(reached)
            return True
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                await self._wait_until(reached)
        except TimeoutError:
            return reached()
        return True

    async def _wait_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._changed.wait()

    @property
    def is_over(self) -> bool:
        """Whether a terminal record is known, none will come, or the request ended without being admitted."""
        if self.record is not None or self.is_lost:
            return True
        is_admitted = isinstance(self.decision, Admitted)
        return not is_admitted and (self._cause is not None or self.decision is not None)

    @property
    def is_too_late(self) -> bool:
        """Whether it ended because its deadline passed."""
        return self._cause is FinishReason.DEADLINE

    @property
    def is_open(self) -> bool:
        """Whether the headers of a stream are out."""
        return self._opened

    @property
    def is_startable(self) -> bool:
        """Whether headers may go out: dispatched with its hold durable."""
        return self._attempt.granted is not None and self.hold_durable

    @property
    def shows_no_answer(self) -> bool:
        """Whether nobody is there to read one, now or later."""
        is_kept = self._keeps and isinstance(self.decision, Admitted)
        return self._client.is_lost or (self._cause in _ANSWERLESS and not is_kept)

    def open_output(self) -> None:
        """Headers are out: write what waited for them, and from now on as it comes. What ended meanwhile gets no output."""
        self._opened = True
        pieces, self._attempt.pieces = self._attempt.pieces, []
        if self._cause is None:
            if pieces:
                self._write(pieces)
            self._ask_for_more()
        self._complete_if_done()

    def whole_output(self) -> list[Delta]:
        """The output of an answer that is not streamed."""
        return self._attempt.stream.drain()

    # ── the coordinator's messages ───────────────────────────────────────────────────────────────────────────────────

    def acquire(self, asked: Acquire) -> None:
        """Ask for a grant."""
        self._retelling.asked(asked)
        self._parts.link.send(asked)

    def deliver(self, message: Down) -> None:
        """One message about this request."""
        match message:
            case Admitted() | Rejected():
                self.decision = message
            case Granted():
                self._start(message)
            case HoldBooked():
                self.hold_durable = True
            case DeliveryBooked():
                if message.attempt == self._attempt.number:
                    self._book(message.delivered_max)
                return  # on the hot path: nobody waits for a step but the stream itself
            case Ended() | EndBooked() | EndUnbooked():
                self._end(message.record)
                self.end_booked |= not isinstance(message, Ended)
            case StopRequest():
                self.stop(message.reason)
            case Reattached():
                self.hold_durable = True
                self.decision = self.decision or Admitted(self.ref, message.execution, message.standing)
            case NotHeld():
                self._acquire_afresh(may_ask=message.is_known)
            case _:
                raise AssertionError(f"a relay got {type(message).__name__}")
        self._changed.set()

    def coordinator_lost(self) -> None:
        """Nobody will say how it ended: stop the engine, and let the pipeline tell what is known."""
        self.is_lost = True
        self.stop(FinishReason.COORDINATOR_LOST)
        self._changed.set()

    # ── another coordinator ──────────────────────────────────────────────────────────────────────────────────────────

    def reattach(self) -> Sequence[Up]:
        """What another coordinator must know of it: nothing where it has ended for good, or left before it was admitted."""
        if not self.is_pending and (self.end_booked or self.is_over):
            return ()
        return self._retelling.told(self._attempt, self.record, first_output=self._first_written_ns is not None)

    @property
    def is_pending(self) -> bool:
        """Whether it has ended, and that is not known to be durable, or its engine not known to have stopped."""
        has_ended = isinstance(self.decision, Admitted) and (self._cause is not None or self.record is not None)
        return has_ended and not self.is_lost and (not self.end_booked or self._retelling.is_stopping)

    def _acquire_afresh(self, *, may_ask: bool) -> None:
        """Another coordinator holds nothing of it, so nothing of it was delivered: it is asked for again, if it goes on."""
        if not may_ask or self._opened or self._cause is not None or self.record is not None:
            self.coordinator_lost()
            return
        self._drop_run()
        self._attempt = Attempt(self._plan, self._parts.step_tokens)
        self.decision, self.hold_durable = None, False
        self.ref = self._parts.reopen(self.ref)
        self.acquire(self._retelling.begin_again(self.ref))

    # ── an attempt ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, granted: Granted) -> None:
        if self._cause is not None or self.record is not None:  # it ended while the grant was on its way
            self._parts.link.send(Stopped(self.ref, granted.attempt))
            return
        self._retelling.granted()
        attempt = self._attempt
        attempt.granted, attempt.stream.asked = granted, granted.delivered_max
        attempt.granted_ns = self._parts.clock.monotonic_ns()
        request = self._plan.request
        call = EngineCall(
            replica=granted.replica,
            lane=granted.lane,
            prompt=request.prompt,
            chat=self._plan.revision.chat and not request.is_plain,
            max_output_tokens=self._plan.max_output_tokens,
            sampling=request.sampling,
            demands=request.demands,
            cache_salt=self._parts.salt_of(self._plan) if granted.replica.cache_salt else None,
        )
        attempt.run = self._parts.engine_for(granted.replica.engine).start(call, self)

    def _book(self, delivered_max: Tokens) -> None:
        attempt = self._attempt
        pieces = attempt.stream.book(delivered_max)
        if self._cause is not None:
            return
        if pieces:
            self._hand_out(pieces)
            attempt.held_since_ns = self._parts.clock.monotonic_ns() if attempt.stream.is_held else None
        self._ask_for_more()
        self._balance()
        if not self._opened:
            self._changed.set()
        self._complete_if_done()

    # ── the engine's output ──────────────────────────────────────────────────────────────────────────────────────────

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Everything that arrived in one read."""
        if self._cause is not None:
            return
        now_ns = self._parts.clock.monotonic_ns()
        attempt = self._attempt
        had_output = attempt.stream.arrived > 0
        pieces = attempt.stream.arrive(deltas, now_ns)
        attempt.counted = deltas[-1].tokens is not None
        if self._streamed and pieces:
            self._hand_out(pieces)
        if not had_output and attempt.stream.arrived and self._first_written_ns is None:
            self._parts.link.send(Progress(self.ref, attempt.number, has_output=True))
        if not self._streamed:
            self._bound_whole_answer()
            return
        if attempt.stream.is_held and attempt.held_since_ns is None:
            attempt.held_since_ns = now_ns
        self._ask_for_more()
        self._balance()

    def _bound_whole_answer(self) -> None:
        """An answer that is not streamed waits here whole: no engine may fill the memory with it."""
        if self._attempt.stream.held_bytes > whole_answer_bytes_max(self._plan):
            self._attempt.detail = "The engine sent more than what was asked for can take."
            self.stop(FinishReason.ENGINE_ERROR)

    def _ask_for_more(self) -> None:
        """Ask for the next delivery step when it is time; not before the headers are out, for nothing was delivered yet."""
        attempt = self._attempt
        wanted = attempt.stream.ask() if self._opened and attempt.granted is not None else None
        if wanted is not None:
            self._parts.link.send(Progress(self.ref, attempt.number, delivered_max=wanted))

    def on_end(self, end: EngineEnd) -> None:
        """The engine ended by itself."""
        self._attempt.end = end
        if end.fault is not None:
            self._attempt.detail = end.fault.detail
            self.stop(_REASON_OF_FAULT[type(end.fault)])
        else:
            self._complete_if_done()

    def _complete_if_done(self) -> None:
        """Complete once the engine ended and everything it produced was handed out."""
        end = self._attempt.end
        if end is None or end.reason is None or self._cause is not None:
            return
        if self._streamed and (self._attempt.stream.is_held or not self._opened):
            return
        if self._keeps and self._client.unsent:
            return  # what is not stored yet is not delivered
        if self.secure is None:
            self._finish(end.reason)
        elif self._secured is not self._attempt:
            self._secured = self._attempt
            self._parts.spawn(self._finish_secured(self.secure(self._attempt.stream.held), self._attempt, end.reason))

    async def _finish_secured(self, securing: Awaitable[None], attempt: Attempt, reason: FinishReason) -> None:
        """Nothing is reported as made, and so charged for, before it can be had after any crash."""
        try:
            await securing
        except errors.StoreFault as fault:
            attempt.detail, reason = fault.detail, FinishReason.LEDGER_UNAVAILABLE
        if self._attempt is attempt:
            self.stop(reason)

    # ── towards the client ───────────────────────────────────────────────────────────────────────────────────────────

    def _hand_out(self, pieces: list[Delta]) -> None:
        if self._opened:
            self._write(pieces)
        else:
            self._attempt.pieces += pieces

    def _write(self, pieces: list[Delta]) -> None:
        before = self._client.written
        self._answer.output(pieces)
        if self._client.written == before:
            return  # what this surface does not show: the client has seen nothing, and goes on waiting
        self._written_ns = self._parts.clock.monotonic_ns()
        if self._first_written_ns is None:
            self._first_written_ns = self._written_ns
            self._parts.link.send(Progress(self.ref, self._attempt.number, first_output=True))

    def _balance(self) -> None:
        """Pause the engine while more than the stream's buffer waits, for the socket or for a durable step."""
        waiting = self._attempt.stream.held_bytes + self._client.unsent
        self._attempt.hold_back(waiting > self._parts.config.stream_buffer_bytes)

    def client_lost(self) -> None:
        """Without retention nobody will read it: stop at once."""
        self.stop(FinishReason.DISCONNECT)
        self._changed.set()

    def client_blocked(self) -> None:
        """The transport holds more than its bound."""
        self._balance()

    def client_writable(self) -> None:
        """The transport has room again, or what is kept was stored."""
        self._balance()
        if self._keeps:
            self._complete_if_done()

    def client_not_kept(self) -> None:
        """The platform could not keep the stream, and nobody is there to read it."""
        self._attempt.detail = "The stream could not be kept."
        self.stop(FinishReason.LEDGER_UNAVAILABLE)

    def tick(self, now_ns: Nanos) -> None:
        """Called several times a second: slow client, late ledger, keep-alive."""
        if self._attempt.is_paused:
            self._balance()
        held_since_ns = self._attempt.held_since_ns
        is_kept = self._keeps and not self._client.is_lost  # who is slow then reads from the store, and is dropped there
        if not is_kept and self._oldest_unaccepted_ns(now_ns) > ns_from_ms(self._parts.config.slow_client_grace_ms):
            self._give_up_on_client()
        elif held_since_ns is not None and not self._parts.is_heard():
            self._attempt.held_since_ns = now_ns  # it is not the ledger that is late
        elif held_since_ns is not None and now_ns - held_since_ns > ns_from_ms(self._parts.store_wait_ms):
            self.stop(FinishReason.LEDGER_UNAVAILABLE)
        elif self._is_silent_for(now_ns, self._parts.config.keep_alive_ms):
            self._answer.keep_alive()
            self._written_ns = now_ns

    def _is_silent_for(self, now_ns: Nanos, bound_ms: Millis) -> bool:
        """Whether an open stream that has not ended wrote nothing for this long."""
        return self._opened and not self.is_over and now_ns - self._written_ns > ns_from_ms(bound_ms)

    def _give_up_on_client(self) -> None:
        if self.record is None:
            self.stop(FinishReason.SLOW_CLIENT)
        self._client.abort()

    def _oldest_unaccepted_ns(self, now_ns: Nanos) -> Nanos:
        """Age of the oldest byte that the socket has not accepted; 0 when it accepted all."""
        written, marks = self._client.written, self._marks
        accepted = written - self._client.unsent
        while marks and marks[0][0] <= accepted:
            marks.popleft()
        if accepted < written and (not marks or (marks[-1][0] < written and now_ns - marks[-1][1] >= _MARK_EVERY_NS)):
            marks.append((written, now_ns))
        return now_ns - marks[0][1] if marks else 0

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, reason: FinishReason) -> None:
        """End for this reason unless it has ended; idempotent. A failure may be followed by another grant instead."""
        comes_free_anyway = reason is FinishReason.PREEMPTED and self._attempt.end is not None
        if self._cause is None and self.record is None and not comes_free_anyway:
            self._finish(reason)

    def _finish(self, reason: FinishReason) -> None:
        attempt = self._attempt
        report = Finish(
            ref=self.ref,
            attempt=attempt.number,
            reason=reason,
            delivered_tokens=self._delivered(reason),
            usage=attempt.usage(reason),
            ttft_ms=self._ttft_ms(),
            tpot_ms=attempt.tpot_ms(),
            error_detail=attempt.detail,
            reached=attempt.reached,
        )
        if is_retryable(reason, attempt.number, delivered=self._first_written_ns is not None):
            self._attempt = Attempt(self._plan, self._parts.step_tokens)  # before the report: the grant may come within it
        else:
            self._cause = reason
        self._retelling.reported(attempt, report)
        self._parts.link.send(report)
        if attempt.granted is not None:
            self._stop_engine(attempt)
        self._changed.set()

    def _end(self, record: GenerationRecord) -> None:
        """It ended as the coordinator says; what it did not know to run is stopped."""
        self.record = record
        self.decision = self.decision or Admitted(self.ref, record.execution, StandingView())  # it was, and nobody said so
        if self._cause is None:
            self._drop_run()

    def _drop_run(self) -> None:
        if self._attempt.run is not None:
            self._stop_engine(self._attempt)

    def _stop_engine(self, attempt: Attempt) -> None:
        run, attempt.run = attempt.run, None  # which holds us as its sink: a pair that only the garbage collector could part
        assert run is not None
        if attempt.end is not None and attempt.end.fault is None:
            attempt.stopped = Stopped(self.ref, attempt.number)
            self._parts.link.send(attempt.stopped)
            return
        run.cancel()
        self._parts.spawn(self._confirm_stop(run, self.ref, attempt, self._parts.clock.monotonic_ns()))

    async def _confirm_stop(self, run: EngineRun, ref: int, attempt: Attempt, decided_ns: Nanos) -> None:
        confirmed = True
        try:
            await run.stopped()
        except errors.ReplicaLost:
            confirmed = False
        stop_ms = (self._parts.clock.monotonic_ns() - decided_ns) / 1e6
        attempt.stopped = Stopped(ref, attempt.number, stop_ms, confirmed)
        self._parts.link.send(attempt.stopped)
        self._parts.settled(ref)

    def _delivered(self, reason: FinishReason) -> Tokens:
        attempt = self._attempt
        if self._streamed:
            return attempt.stream.delivered if self._opened else 0
        return attempt.output_tokens() if attempt.end and attempt.end.reason is reason else 0

    def _ttft_ms(self) -> float | None:
        first_ns = self._first_written_ns if self._streamed else self._attempt.stream.first_ns
        return None if first_ns is None else (first_ns - self._client.read_ns) / 1e6
