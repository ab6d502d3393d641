"""One scheduling domain as the coordinator keeps it: a class's queue of a pool, what its requests cost, and how fast it is.

It turns an execution into a queue entry with its expected cost, keeps that charge true while the execution runs, and predicts
how long a newcomer waits. It takes no lane, writes nothing and ends nothing.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from weir.config import CoordinatorConfig
from weir.coordinator.execution import Execution, Placement
from weir.core.admission import Times
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import EndRecord, ExecutionId, SettleRecord
from weir.core.registry.model import Revision, WorkloadClass
from weir.core.routing.capacity import Need
from weir.core.routing.retry import RetryBudget
from weir.core.scheduling.fairness import FairOrder, TokenCosts
from weir.core.scheduling.feasibility import (
    Caution,
    DecodeTime,
    FloorPace,
    PrefillTime,
    ServiceRate,
    TurnPace,
    WaitBias,
    predicted_wait_ms,
)
from weir.core.scheduling.orders import Cost, Order
from weir.core.scheduling.output_lengths import Caller, OutputLengths
from weir.core.scheduling.queues import DomainQueue, Entry, Waiting
from weir.messages import Acquire, ReplicaPace
from weir.units import NANOS_PER_MILLI, Millis, Nanos, Tokens, ns_from_ms

_PRIOR_LANE_NS: Nanos = 1_000 * NANOS_PER_MILLI
_PRIOR_INPUT_TOKENS: Tokens = 100
_PRIOR_OUTPUT_TOKENS: Tokens = 128
"""Before anything was measured: a short question and answer, rather too quick than too slow, so that the door is not locked."""
_WARM_UP_DOUBT = 2
"""How many times too slow a warm-up may have been, before anything is refused for good."""
_PACED_TOKENS: Tokens = 8
"""Of an answer, whose time per token says something."""

_BIAS_FROM_MS: Millis = 20
"""Shorter predictions say nothing: a lane frees when it frees."""
_BIASES_MAX = 1_000
"""Tenants whose predictions are corrected, those who waited first forgotten first."""

MakeOrder = Callable[[Callable[[str], int]], Order]
"""The order between tenants of a new domain, from their weights."""


def fair_order(config: CoordinatorConfig) -> MakeOrder:
    """The product's order: fair, with the configured slack for deadlines and burst for those who come back."""
    token = TokenCosts().input
    return lambda weight_of: FairOrder(weight_of, config.fair_slack_tokens * token, config.fair_burst_tokens * token)


class Lanes(msgspec.Struct, frozen=True, gc=False):
    """What a newcomer's wait is reckoned with. usable: all lanes that can be used; part: how many of them work like its own.

    read_ms: where only unread prompts are in the way, until those that are before it are read; else None.
    """

    usable: int
    part: float
    read_ms: float | None = None


class Domain:
    """order: between its tenants. lengths: of answers, shared by the domains of a cell. pace_of: of an idle replica now."""

    def __init__(
        self,
        config: CoordinatorConfig,
        order: Order,
        lengths: OutputLengths,
        pace_of: Callable[[], ReplicaPace | None] = lambda: None,
    ) -> None:
        self.queue: DomainQueue[ExecutionId] = DomainQueue(config.queue_bounds, order)
        self.retries = RetryBudget(config.retries_min, config.retry_percent, ns_from_ms(config.retry_window_ms))
        self._costs = TokenCosts()
        self._lengths = lengths
        self._backlog_percent = config.backlog_percent
        self._pace_of = pace_of
        self._assumed: ReplicaPace | None = None
        self._prefill = PrefillTime()
        self._decode = DecodeTime()
        self._turns = TurnPace()
        self._pace = FloorPace()
        self._caution = Caution()
        self._last_turn: tuple[Cost, Nanos] | None = None  # the floor and the time, while others wait on
        self._biases: OrderedDict[str, WaitBias] = OrderedDict()
        self._rate = ServiceRate(_PRIOR_LANE_NS, self._costs.cost(_PRIOR_INPUT_TOKENS, 0, _PRIOR_OUTPUT_TOKENS))

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def need_of(self, asked: Acquire, revision: Revision, workload: WorkloadClass) -> Need:
        """What a request is expected to take of a replica."""
        caller = (asked.tenant, asked.application, asked.revision)
        expected = self._lengths.expected(caller, asked.max_output_tokens, revision.typical_output_tokens)
        input_tokens = asked.choices * asked.input_tokens
        return Need(
            kv_tokens=input_tokens + asked.choices * expected,
            input_tokens=input_tokens,
            prefix=asked.prefix,
            prefix_bytes=asked.input_bytes,
            backlog_ms=self._scaled(workload.backlog_ms),
            of_many_backlog_ms=self._scaled(workload.of_many_backlog_ms),
        )

    def _scaled(self, backlog_ms: Millis | None) -> Millis | None:
        return None if backlog_ms is None else max(1, backlog_ms * self._backlog_percent // 100)

    def expect(self, execution: Execution) -> None:
        """What one that an earlier coordinator admitted is expected to take of a replica, and of the domain."""
        need = self.need_of(execution.acquire, execution.admit.revision, execution.workload)
        execution.need, execution.cost = need, self._cost_of_need(need)

    def _cost_of_need(self, need: Need) -> Cost:
        return self._costs.cost(need.input_tokens, 0, need.kv_tokens - need.input_tokens)

    def push(self, execution: Execution) -> None:
        """Wait in the tenant's flow, at the cost that is expected now."""
        self.queue.push(self._entry(execution))

    def push_ahead(self, execution: Execution, avoid: str) -> None:
        """Wait for another replica, ahead of every flow."""
        self.queue.push_ahead(self._entry(execution), avoid)

    def _entry(self, execution: Execution) -> Entry[ExecutionId]:
        need = execution.need
        return Entry(
            tenant=execution.id.tenant,
            key=execution.id,
            size=execution.acquire.input_bytes,
            cost=self._cost_of_need(need),
            start_by_ns=self._start_by_ns(execution),
            need=need,
        )

    def _start_by_ns(self, execution: Execution) -> Nanos:
        """When its wait is over, or it is too late for its deadline: patient requests must not starve behind hasty ones."""
        wait_over_ns = execution.admitted_ns + ns_from_ms(self.queue.bounds.wait_ms_max)
        prefill_ns = self.prefill_ns(execution.admit.worst.input_tokens, execution.admitted_ns)
        return min(wait_over_ns, execution.deadline_ns - prefill_ns)

    def predicted_wait_ms(self, tenant: str, lanes: Lanes, free: int, now_ns: Nanos) -> Millis:
        """How long one more request of this tenant would wait; 0 while a lane is free for everybody."""
        queue = self.queue
        self._assume()
        if len(queue) - queue.ahead < free:
            return 0
        wait_ms = self._wait_behind_ms(queue.work_before(tenant), lanes, now_ns)
        wait_ms = max(wait_ms, self._pace.wait_ns(queue.lead(tenant)) / NANOS_PER_MILLI)
        bias = self._biases.get(tenant)
        factor = self._caution.factor(now_ns) * (bias.factor(now_ns) if bias else 1.0)
        return int(wait_ms * factor) + 1

    def _wait_behind_ms(self, work: Cost, lanes: Lanes, now_ns: Nanos) -> float:
        """Until work is done and one more gets its turn: by the pace of turns, else by what ended lately, or is to be read."""
        if lanes.read_ms is not None and not self.queue:
            return lanes.read_ms
        one_more = self.queue.mean_cost or self._turns.mean_cost
        lane_ns = self._turns.lane_ns(work + one_more, now_ns)
        if lane_ns is None and lanes.read_ms is not None:
            return lanes.read_ms
        if lane_ns is None:
            return predicted_wait_ms(work, lanes.part, self._rate, now_ns)
        return lane_ns / lanes.usable / NANOS_PER_MILLI

    def caution(self, now_ns: Nanos) -> float:
        """By how much waits were longer than predicted of late, ≥ 1."""
        return self._caution.factor(now_ns)

    def has_to_wait(self, usable: int, now_ns: Nanos) -> None:
        """One that was pushed could not start, on so many lanes that can be used."""
        self._turns.waits(usable, now_ns)

    def remove(self, execution: Execution, now_ns: Nanos) -> None:
        """It waits no more, and got no turn."""
        self.queue.remove(execution.id.tenant, execution.id)
        if not self.queue:
            self._turns.nobody_waits(now_ns)
            self._last_turn = None

    def expired(self, execution: Execution, now_ns: Nanos) -> None:
        """Its wait is over, and it had no turn."""
        self._caution.expired(now_ns)
        self.waited(execution, now_ns)

    def waited(self, execution: Execution, now_ns: Nanos) -> None:
        """It has left the queue: how long it waited corrects what is predicted next for its tenant."""
        if execution.is_hastened or execution.predicted_wait_ms < _BIAS_FROM_MS:
            return
        tenant = execution.id.tenant
        bias = self._biases.get(tenant)
        if bias is None:
            bias = self._biases[tenant] = WaitBias(now_ns)
            if len(self._biases) > _BIASES_MAX:
                self._biases.popitem(last=False)
        waited_ms = (now_ns - execution.admitted_ns) / NANOS_PER_MILLI
        bias.observe(execution.predicted_wait_ms, waited_ms, now_ns)

    def predicted_retry_ms(self, lanes: Lanes, free: int, now_ns: Nanos) -> Millis:
        """How long a second attempt would wait: only behind other second attempts."""
        queue = self.queue
        return 0 if queue.ahead < free else int(self._wait_behind_ms(queue.work_ahead, lanes, now_ns)) + 1

    def _assume(self) -> None:
        """A warm-up says how long a short question and answer takes an idle replica."""
        pace = self._pace_of()
        if pace is not None and pace is not self._assumed:
            self._assumed = pace
            decode_ms = _PRIOR_OUTPUT_TOKENS * pace.output_ms
            self._rate.assume(ns_from_ms(1) + int((_idle_prefill_ms(pace, _PRIOR_INPUT_TOKENS) + decode_ms) * NANOS_PER_MILLI))

    def prefill_ns(self, input_tokens: Tokens, now_ns: Nanos) -> Nanos:
        """How long an input is expected to take from its dispatch to the first output; 0 while nothing was measured."""
        pace = self._pace_of()
        if pace is None:
            return self._prefill.expected_ns(input_tokens, now_ns)
        idle_ns = int(_idle_prefill_ms(pace, input_tokens) * NANOS_PER_MILLI)
        return self._prefill.expected_ns(input_tokens, now_ns, idle_ns, pace.input_ms * NANOS_PER_MILLI)

    def times(self, need: Need, cached_tokens: Tokens, now_ns: Nanos, *, is_exact: bool = True) -> Times:
        """What a deadline is compared with. cached_tokens: of its input, held by some replica. is_exact: input was counted."""
        uncached = need.input_tokens - cached_tokens
        prefill_ms = self.prefill_ns(uncached, now_ns) // NANOS_PER_MILLI
        pace = self._pace_of()
        if pace is None:
            return Times(prefill_ms)
        later = need.kv_tokens - need.input_tokens - 1
        idle_prefill_ms = int(_idle_prefill_ms(pace, uncached))
        least_ms = min(prefill_ms, idle_prefill_ms) // _WARM_UP_DOUBT if is_exact else 0
        decode_ms = int(later * self._decode.expected_ms(now_ns, pace.output_ms))
        return Times(prefill_ms, decode_ms, idle_prefill_ms + int(later * pace.output_ms), least_ms, idle_prefill_ms)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def serve(
        self, waiting: Waiting[ExecutionId], execution: Execution, now_ns: Nanos, usable: int = 1, cached_tokens: Tokens = 0
    ) -> Cost:
        """It is dispatched: its flow pays, once however often it is tried; what its dispatch costs its class.

        usable: lanes that can be used; cached_tokens: of its input, held by the replica.
        """
        self._observe_pace(now_ns)
        saved = cached_tokens * (self._costs.input - self._costs.cached_input)
        ticket = self.queue.serve(waiting, saved)
        if ticket is not None:
            execution.ticket, execution.cost = ticket, ticket.cost + saved
        self._rate.began(execution.cost, now_ns)
        self._turns.turn(execution.cost, usable, now_ns)
        if not self.queue:
            self._turns.nobody_waits(now_ns)
        return ticket.cost if ticket is not None else 0

    def resume(self, execution: Execution, placement: Placement) -> None:
        """It runs since an earlier coordinator dispatched it."""
        self._rate.began(execution.cost, placement.lane_taken_ns)

    def _observe_pace(self, now_ns: Nanos) -> None:
        """Between two turns of a time in which more than one request waited."""
        queue = self.queue
        if self._last_turn is not None:
            floor, at_ns = self._last_turn
            self._pace.observe(queue.floor - floor, now_ns - at_ns)
        self._last_turn = (queue.floor, now_ns) if len(queue) > 1 else None

    def produced(self, execution: Execution, output_tokens: Tokens) -> None:
        """It has this much output by now: what goes beyond the expected is charged at once."""
        ticket = execution.ticket
        if ticket is None:
            return  # an earlier coordinator dispatched it, and its flow paid there
        cost = self._costs.cost(execution.admit.worst.input_tokens, 0, output_tokens)
        if cost > ticket.cost:
            execution.ticket = self.queue.correct(ticket, cost)

    def showed_output(self, execution: Execution, took_ns: Nanos, now_ns: Nanos) -> None:
        """Its first output came this long after its dispatch."""
        placement = execution.placement
        assert placement is not None
        self._prefill.observe(execution.need.input_tokens - placement.cached_tokens, took_ns, now_ns)

    def ended(self, execution: Execution) -> None:
        """It ended: its flow pays what it cost. One that ended before its time still pays for its input."""
        end, ticket = execution.end_record, execution.ticket
        if ticket is None:
            return
        execution.ticket = None
        assert end is not None
        self.queue.close(ticket, self._cost_of(execution, end))
        if isinstance(end, SettleRecord) and end.status is Status.COMPLETED:
            self._lengths.observe(_caller(execution), end.output_tokens // execution.acquire.choices)

    def pace_of_answer(self, execution: Execution, now_ns: Nanos) -> float | None:
        """Time per output token ÷ its class's target, of an answer that completed and was long enough to say."""
        end = execution.end_record
        if not isinstance(end, SettleRecord) or end.status is not Status.COMPLETED:
            return None
        if end.output_tokens // execution.acquire.choices < _PACED_TOKENS:
            return None
        token_ms = end.timing.tpot_ms
        if token_ms is None:
            return None
        self._decode.observe(token_ms, now_ns)
        return token_ms / execution.workload.tpot_target_ms

    def _cost_of(self, execution: Execution, end: EndRecord) -> Cost:
        """What an engine reports beyond the worst case is no measurement; what it refused, or made for nobody, took nothing."""
        worst = execution.admit.worst
        if end.finish_reason in (FinishReason.ENGINE_REJECTED, FinishReason.PREEMPTED):
            return 1
        if not isinstance(end, SettleRecord) or not end.input_tokens:
            produced = end.output_tokens if isinstance(end, SettleRecord) else 0
            return self._costs.cost(worst.input_tokens, 0, min(produced, worst.output_tokens))
        input_tokens = min(end.input_tokens, worst.input_tokens)
        cached_tokens = min(end.cached_input_tokens, input_tokens)
        return self._costs.cost(input_tokens, cached_tokens, min(end.output_tokens, worst.output_tokens))

    def lane_freed(self, execution: Execution, placement: Placement, now_ns: Nanos) -> None:
        """A lane that it took is free again: whole answers say how long work takes, in the measure in which it waits."""
        self._rate.left(execution.cost, placement.lane_taken_ns)
        end = execution.end_record
        if placement is execution.placement and end is not None and end.status is Status.COMPLETED:
            self._rate.observe(execution.cost, now_ns - placement.lane_taken_ns, now_ns)


def _idle_prefill_ms(pace: ReplicaPace, input_tokens: Tokens) -> float:
    return pace.first_ms + pace.input_ms * input_tokens


def _caller(execution: Execution) -> Caller:
    asked = execution.acquire
    return asked.tenant, asked.application, asked.revision
