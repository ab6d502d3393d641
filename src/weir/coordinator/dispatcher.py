"""Who waits, what starts on which replica, and the one retry: the queues and retry budgets of a cell's scheduling domains.

The core decides whose turn it is and where it fits; this class takes the lane, appends the step and tells the gateway. An
attempt that failed with nothing delivered goes back ahead of its queue if the door would let it in and the budget allows it,
with the same hold and deadline. It never admits, never settles an end itself, and never places a retry where it failed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from weir.config import CoordinatorConfig
from weir.coordinator.domain import Domain, MakeOrder, fair_order
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.explain import candidates_of
from weir.coordinator.fleet import START_EXPECTED_MS, Fleet, PoolView
from weir.coordinator.journal import Journal
from weir.coordinator.settler import Settler
from weir.core.admission import Door, door_refusal
from weir.core.endings import FinishReason
from weir.core.ledger.records import ExecutionId, StepRecord
from weir.core.request import Dispatch, Dispatched, Queued, advance
from weir.core.routing.retry import is_retryable
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import DomainQueue
from weir.core.scheduling.schedule import Start, next_start
from weir.messages import Acquire, DeliveryBooked, Finish, Granted
from weir.ports import Clock
from weir.units import Tokens, ms_from_ns, ns_from_ms


@dataclass(frozen=True, slots=True)
class Turns:
    """Who comes before whom. weight_of: a tenant's weight now; order: None for the product's own."""

    weight_of: Callable[[str], int]
    order: MakeOrder | None = None


class Dispatcher:
    """Owner of the domains. settler: ends what waits; sessions: carries grants and booked steps to their gateways."""

    def __init__(
        self,
        clock: Clock,
        config: CoordinatorConfig,
        fleet: Fleet,
        journal: Journal,
        settler: Settler,
        turns: Turns,
    ) -> None:
        self._clock = clock
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._settler = settler
        self._sessions = settler.sessions
        self._timelines = settler.sessions.timelines
        self._weight_of = turns.weight_of
        self._make_order = turns.order or fair_order(config)
        self._domains: dict[str, Domain] = {}
        self._queues: dict[str, DomainQueue[ExecutionId]] = {}
        self._queued: dict[ExecutionId, Execution] = {}
        self._lengths = OutputLengths()
        settler.on_ended = self._ended

    # ── who waits ────────────────────────────────────────────────────────────────────────────────────────────────────

    def waiting_in(self, pool: str) -> int:
        """Admitted requests that wait in a pool's domain."""
        queue = self._queues.get(pool)
        return len(queue) if queue is not None else 0

    def door(self, pool: PoolView, asked: Acquire, avoid: str | None = None) -> Door:
        """The domain as a newcomer meets it; as a retry does, with the replica to avoid: the others, and who is ahead."""
        domain, now_ns = self._domain(pool.name), self._clock.monotonic_ns()
        lanes, free = self._fleet.lanes(pool, avoid)
        if not lanes:
            wait_ms = 0
        elif avoid is None:
            wait_ms = domain.predicted_wait_ms(asked.tenant, lanes, free, now_ns)
        else:
            wait_ms = domain.predicted_retry_ms(lanes, free, now_ns)
        return Door(
            lanes=lanes,
            queue_refusal=domain.queue.refusal(asked.tenant, asked.input_bytes),
            predicted_wait_ms=wait_ms,
            prefill_ms=ms_from_ns(domain.prefill_ns(asked.input_tokens * asked.choices, now_ns)),
            wait_ms_max=domain.queue.bounds.door_ms_max,
            no_capacity_retry_ms=START_EXPECTED_MS,
        )

    def enqueue(self, execution: Execution) -> None:
        """An admitted execution waits in its flow; `start` follows."""
        domain = self._domain(execution.pool)
        domain.retries.admitted(execution.admitted_ns)
        domain.push(execution)
        self._queued[execution.id] = execution

    def start(self, execution: Execution) -> None:
        """Dispatch what can start; if this one must wait, watch how long."""
        self.schedule()
        if isinstance(execution.state, Queued):
            lost, replicas = execution.placement, self._fleet.replicas_by_pool()[execution.pool]
            self._timelines.queued(execution, None, self.waiting_in(execution.pool) - 1)
            self._timelines.considered(execution, candidates_of(replicas, lost.replica.name if lost else None))
            self._watch_the_wait(execution)

    def end_waiting(self, execution: Execution, reason: FinishReason) -> None:
        """End an execution that waits in its queue; it leaves at once."""
        if reason is FinishReason.QUEUE_WAIT and not execution.placements:
            self._domains[execution.pool].expired(execution, self._clock.monotonic_ns())
        self._queues[execution.pool].remove(execution.id.tenant, execution.id)
        self._queued.pop(execution.id, None)
        execution.cancel_timer()
        self._settler.end_waiting(execution, reason)

    def _domain(self, pool: str) -> Domain:
        domain = self._domains.get(pool)
        if domain is None:
            domain = self._domains[pool] = Domain(self._config, self._make_order(self._weight_of), self._lengths)
            self._queues[pool] = domain.queue
        return domain

    def _watch_the_wait(self, execution: Execution) -> None:
        now_ns = self._clock.monotonic_ns()
        bound_ns = now_ns + ns_from_ms(self._config.queue_wait_ms)
        due_ns = min(bound_ns, execution.deadline_ns)
        reason = FinishReason.QUEUE_WAIT if bound_ns < execution.deadline_ns else FinishReason.DEADLINE
        delay_s = max(0, due_ns - now_ns) / 1e9
        execution.timer = asyncio.get_running_loop().call_later(delay_s, self.end_waiting, execution, reason)

    # ── what starts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> None:
        """Dispatch as long as something that waits can start."""
        while (start := next_start(self._queues, self._fleet.replicas_by_pool())) is not None:
            self._dispatch(start)

    def _dispatch(self, start: Start[ExecutionId]) -> None:
        execution = self._queued[start.waiting.key]
        domain, now_ns = self._domains[start.domain], self._clock.monotonic_ns()
        if now_ns + domain.prefill_ns(execution.admit.worst.input_tokens, now_ns) >= execution.deadline_ns:
            self.end_waiting(execution, FinishReason.DEADLINE)
            return
        if start.waiting.avoid is None:
            domain.waited(execution, now_ns)
        domain.serve(start.waiting, execution, now_ns)
        del self._queued[execution.id]
        execution.cancel_timer()
        asked, replica = execution.acquire, start.replica
        execution.state = advance(execution.state, Dispatch(ms_from_ns(now_ns), replica.name))
        assert isinstance(execution.state, Dispatched)
        attempt = execution.state.attempt
        candidates = candidates_of(self._fleet.replicas_by_pool()[start.domain], start.waiting.avoid, replica)
        lane = replica.take_lane()
        execution.placements.append(Placement(replica, lane, attempt, now_ns))
        self._timelines.dispatched(execution, replica, candidates)
        most = min(self._config.delivery_step_tokens, execution.admit.worst.output_tokens)
        self.append_step(execution, most if asked.stream else 0)
        self._sessions.deliver(
            execution,
            Granted(
                ref=asked.ref,
                attempt=attempt,
                replica=self._fleet.address_of(replica.name),
                lane=lane,
                delivered_max=execution.delivered_max,
            ),
        )

    def append_step(self, execution: Execution, delivered_max: Tokens) -> None:
        """Book output up to delivered_max ahead of its delivery; the gateway hears once it is durable."""
        placement = execution.placement
        assert placement is not None
        execution.delivered_max = delivered_max
        record = StepRecord(self._journal.next_seq(), execution.id, placement.attempt, placement.replica.name, delivered_max)
        booked = DeliveryBooked(execution.acquire.ref, placement.attempt, delivered_max)
        self._journal.append(record, partial(self._sessions.deliver, execution, booked))

    # ── what runs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def wants_delivery(self, execution: Execution, delivered_max: Tokens) -> None:
        """Its gateway asks for the next step of delivery, up to two steps ahead of what it has."""
        self._domain(execution.pool).produced(execution, max(0, delivered_max - 2 * self._config.delivery_step_tokens))
        self.append_step(execution, delivered_max)

    def showed_output(self, execution: Execution) -> None:
        """Its first output came."""
        placement = execution.placement
        assert placement is not None
        now_ns = self._clock.monotonic_ns()
        self._domain(execution.pool).showed_output(execution, now_ns - placement.lane_taken_ns, now_ns)
        if placement.lane is not None:
            self._fleet.showed_output(placement.replica, placement.lane)

    def lane_freed(self, execution: Execution, placement: Placement) -> None:
        """A lane that it took is free again; `schedule` follows."""
        self._domain(execution.pool).lane_freed(execution, placement, self._clock.monotonic_ns())

    def _ended(self, execution: Execution) -> None:
        self._domain(execution.pool).ended(execution)

    # ── the one retry ────────────────────────────────────────────────────────────────────────────────────────────────

    def retry(self, execution: Execution, finish: Finish) -> bool:
        """Queue the execution of a failed attempt again, ahead, for another replica; False when it has to end."""
        placement = execution.placement
        assert placement is not None
        if not self._may_retry(execution, finish, placement):
            return False
        self._timelines.lost(execution, finish)
        self._settler.lose(execution, finish)
        self._domain(execution.pool).push_ahead(execution, placement.replica.name)
        self._queued[execution.id] = execution
        self.start(execution)
        return True

    def _may_retry(self, execution: Execution, finish: Finish, placement: Placement) -> bool:
        """The failure allows it, nobody asked it to stop, another replica can start it in time, and the budget is not spent."""
        delivered = not isinstance(execution.state, Dispatched) or finish.delivered_tokens > 0
        pool = self._fleet.pool_of(execution.acquire.revision)
        if pool is None or execution.stop_asked or not is_retryable(finish.reason, placement.attempt, delivered=delivered):
            return False
        now_ns = self._clock.monotonic_ns()
        door = self.door(pool, execution.acquire, placement.replica.name)
        if door_refusal(door, ms_from_ns(execution.deadline_ns - now_ns)) is not None:
            return False
        return self._domain(execution.pool).retries.take(now_ns)
