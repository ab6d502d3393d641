"""Ends: every way out of an execution posts once, frees what it held, and tells its gateway.

The tenant's concurrency, buckets and budgets settle in memory when the end is decided; the record lands with the next group. An
answer that is not streamed becomes COMPLETED only once that record is durable; when the store is away for too long the output
is dropped and the record, if no write has taken it yet, becomes zero for the tenant. What an attempt used that was retried is
kept until then: it is in the one settlement, as the platform's.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from weir.coordinator.execution import Execution, queue_timing, shown_as
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.explain import WatchedSessions
from weir.coordinator.journal import Journal
from weir.coordinator.ledger_entries import Outcome, Stamp, outcome_of, release_record, sane_usage, settle_record
from weir.core.endings import FinishReason, Status, ending
from weir.core.ledger import reservation
from weir.core.ledger.book import Book
from weir.core.ledger.records import EndRecord, SettleRecord, Timing
from weir.core.metering import NO_CHARGE, Price, Usage, charge
from weir.core.request import End, Requeue, advance
from weir.messages import EndBooked, Ended, EndUnbooked, Finish, Found
from weir.ports import Clock
from weir.telemetry import Telemetry
from weir.units import MicroDollars


class Settler:
    """Ends executions. sessions: of their gateways; idle is set while nothing is live.

    on_ended: told once of each end, as it is decided; on_concluded: once of each terminal status.
    """

    def __init__(
        self,
        clock: Clock,
        book: Book,
        journal: Journal,
        executions: ExecutionTable,
        sessions: WatchedSessions,
        telemetry: Telemetry,
    ) -> None:
        self._clock = clock
        self._book = book
        self._journal = journal
        self._executions = executions
        self.sessions = sessions
        self._telemetry = telemetry
        self.on_ended: Callable[[Execution], None] = lambda execution: None
        self.on_concluded: Callable[[Execution], None] = lambda execution: None
        self.idle = asyncio.Event()
        self.idle.set()

    async def is_idle_within(self, bound_s: float) -> bool:
        """Whether nothing is live any more, as soon as that is so, or after the bound."""
        try:
            await asyncio.wait_for(self.idle.wait(), bound_s)
        except TimeoutError:
            return False
        return True

    def lose(self, execution: Execution, finish: Finish) -> None:
        """An attempt failed and is retried: nothing ends, and what it used is the platform's whatever follows."""
        execution.lost, _ = sane_usage(finish.usage)
        execution.delivered_max = 0
        execution.state = advance(execution.state, Requeue())
        self._telemetry.retries.labels(execution.acquire.revision).inc()

    def end_waiting(self, execution: Execution, reason: FinishReason) -> None:
        """End an execution that waits for a replica: the tenant pays nothing, and the platform what a lost attempt used."""
        lost = execution.lost
        if lost is None:
            self._release(execution, reason)
            return
        unpaid = msgspec.structs.replace(NO_CHARGE, platform_microusd=_cost(lost, execution.admit.price))
        timing = queue_timing(execution, self._clock.monotonic_ns())
        self._post(execution, Outcome(reason, lost, 0, unpaid), timing, None)

    def _release(self, execution: Execution, reason: FinishReason) -> None:
        execution.reservation, first = reservation.release(execution.reservation)
        assert first
        now_ns = self._clock.monotonic_ns()
        returns = self._book.end(execution.id, NO_CHARGE, now_ns)
        record = release_record(execution, reason, self._stamp(), returns, queue_timing(execution, now_ns))
        self._append(execution, record)
        self._conclude(execution)

    def settle(self, execution: Execution, finish: Finish) -> None:
        """Post what the gateway reported of an execution that was dispatched."""
        outcome = outcome_of(finish, execution.admit.worst, execution.admit.price)
        outcome = _with_lost(outcome, execution)
        if outcome.charge.clamped:
            self._telemetry.clamped.labels(execution.acquire.revision).inc()
        timing = queue_timing(execution, self._clock.monotonic_ns())
        timing = Timing(timing.queue_ms, finish.ttft_ms, finish.tpot_ms, timing.total_ms)
        self._post(execution, outcome, timing, finish.error_detail)

    def _post(self, execution: Execution, outcome: Outcome, timing: Timing, detail: str | None) -> None:
        execution.reservation, first = reservation.settle(execution.reservation, outcome.charge, outcome.usage.basis)
        assert first
        returns = self._book.end(execution.id, outcome.charge, self._clock.monotonic_ns())
        record = settle_record(execution, outcome, self._stamp(), returns, timing, detail)
        self._append(execution, record)
        if execution.acquire.stream or record.status is not Status.COMPLETED:
            self._conclude(execution)

    def _append(self, execution: Execution, record: EndRecord) -> None:
        execution.end_record = record
        execution.decided_ns = self._clock.monotonic_ns()
        self.on_ended(execution)
        self._journal.append(record, partial(self._is_durable, execution))
        self.sessions.deliver(execution, Ended(execution.acquire.ref, shown_as(execution, record, posted=False)))

    def _conclude(self, execution: Execution) -> None:
        """The end record's status becomes the execution's terminal one, and is counted."""
        record = execution.end_record
        assert record is not None
        execution.state = advance(execution.state, End(record.finish_reason))
        self._telemetry.ended(execution.workload, execution.acquire.revision, record)
        self.on_concluded(execution)
        if execution.placements:
            waited_ms = (execution.placements[0].lane_taken_ns - execution.admitted_ns) / 1e6
            self._telemetry.predicted(execution.acquire.revision, waited_ms - execution.predicted_wait_ms)

    def _is_durable(self, execution: Execution) -> None:
        if not execution.is_ended:
            self._conclude(execution)
        execution.end_durable = True
        self.sessions.deliver(execution, EndBooked(execution.acquire.ref, execution.public()))
        self.answer_cancel_queries(execution)
        self.forget_if_quiet(execution)

    def forget_if_quiet(self, execution: Execution) -> None:
        """Let go of an execution once its end is durable and its engine stopped."""
        if not execution.end_durable or execution.holds_lane:
            return
        self.sessions.forget(execution)
        self._executions.end(execution)
        if not self._executions.live_count:
            self.idle.set()

    def answer_cancel_queries(self, execution: Execution) -> None:
        """Answer whoever cancelled it by id and waits for its terminal status; without one, the store could not be asked."""
        for session, query in execution.cancel_queries:
            answer = Found(query, execution.public()) if execution.is_ended else Found(query, None, unavailable=True)
            self.sessions.tell(session, answer)
        execution.cancel_queries.clear()

    def give_up_completion(self, execution: Execution, reason: FinishReason = FinishReason.LEDGER_UNAVAILABLE) -> None:
        """A whole answer that nobody will get: drop the output; a settlement that no write has taken becomes zero."""
        record = execution.end_record
        assert isinstance(record, SettleRecord)
        usage = Usage(record.input_tokens, record.cached_input_tokens, record.output_tokens, record.basis)
        due = charge(ending(reason), usage, 0, execution.admit.worst, execution.admit.price)
        outcome = _with_lost(Outcome(reason, usage, 0, due), execution)
        stamp = Stamp(record.seq, record.at_ms)
        instead = settle_record(execution, outcome, stamp, record.returns, record.timing, None)
        if self._journal.withdraw(record.seq, instead, partial(self._is_durable, execution)):
            tokens = record.tenant_input_tokens + record.tenant_output_tokens
            self._book.forgive(execution.admit.scopes, execution.windows, record.cost_microusd, tokens)
            execution.end_record = instead
            self._conclude(execution)
        execution.given_up = True
        self.sessions.deliver(execution, EndUnbooked(execution.acquire.ref, shown_as(execution, instead, posted=False)))

    def _stamp(self) -> Stamp:
        return Stamp(self._journal.next_seq(), self._clock.wall_ms())


def _with_lost(outcome: Outcome, execution: Execution) -> Outcome:
    """The same with the cost of the attempt that was retried, which is the platform's."""
    if execution.lost is None:
        return outcome
    platform = outcome.charge.platform_microusd + _cost(execution.lost, execution.admit.price)
    due = msgspec.structs.replace(outcome.charge, platform_microusd=platform)
    return msgspec.structs.replace(outcome, charge=due)


def _cost(usage: Usage, price: Price) -> MicroDollars:
    return price.cost(usage.input_tokens, usage.cached_input_tokens, usage.output_tokens)
