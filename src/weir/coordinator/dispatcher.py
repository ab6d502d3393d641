"""Who waits, what starts on which replica, and the one retry: the queues and retry budgets of a cell's scheduling domains.

The core decides whose turn it is and where it fits; this class takes the lane, appends the step and tells the gateway. An
attempt that failed with nothing delivered goes back ahead of its queue if the door would let it in and the budget allows it,
with the same hold and deadline. It never admits, never settles an end itself, and never places a retry where it failed.
"""

import asyncio
from functools import partial

from weir.config import CoordinatorConfig
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.fleet import START_EXPECTED_MS, Fleet, PoolView
from weir.coordinator.journal import Journal
from weir.coordinator.sessions import Sessions
from weir.coordinator.settler import Settler
from weir.core.admission import Door, door_refusal
from weir.core.endings import FinishReason
from weir.core.ledger.records import ExecutionId, StepRecord
from weir.core.request import Dispatch, Dispatched, Queued, advance
from weir.core.routing.retry import RetryBudget, is_retryable
from weir.core.scheduling.feasibility import predicted_wait_ms
from weir.core.scheduling.queues import DomainQueue
from weir.core.scheduling.schedule import Start, next_start
from weir.messages import Acquire, DeliveryBooked, Finish, Granted
from weir.ports import Clock
from weir.units import Tokens, ms_from_ns, ns_from_ms


class Dispatcher:
    """Owner of the queues. settler: ends what waits; sessions: carries grants and booked steps to their gateways."""

    def __init__(
        self,
        clock: Clock,
        config: CoordinatorConfig,
        fleet: Fleet,
        journal: Journal,
        settler: Settler,
        sessions: Sessions,
    ) -> None:
        self._clock = clock
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._settler = settler
        self._sessions = sessions
        self._queues: dict[str, DomainQueue[ExecutionId]] = {}
        self._queued: dict[ExecutionId, Execution] = {}
        self._budgets: dict[str, RetryBudget] = {}

    # ── who waits ────────────────────────────────────────────────────────────────────────────────────────────────────

    def waiting_in(self, pool: str) -> int:
        """Admitted requests that wait in a pool's domain."""
        queue = self._queues.get(pool)
        return len(queue) if queue is not None else 0

    def door(self, pool: PoolView, asked: Acquire, avoid: str | None = None) -> Door:
        """The domain as a newcomer meets it; as a retry does, with the replica to avoid: the others, and who is ahead."""
        queue = self._queue(pool.name)
        lanes, free = self._fleet.lanes(pool, avoid)
        waiting = len(queue) if avoid is None else queue.ahead
        return Door(
            lanes=lanes,
            queue_refusal=queue.refusal(asked.tenant, asked.input_bytes),
            predicted_wait_ms=predicted_wait_ms(waiting, lanes, free, pool.occupancy) if lanes else 0,
            wait_ms_max=queue.bounds.wait_ms_max,
            no_capacity_retry_ms=START_EXPECTED_MS,
        )

    def enqueue(self, execution: Execution) -> None:
        """An admitted execution waits at the end of its flow; `start` follows."""
        asked = execution.acquire
        self._budget(execution.pool).admitted(execution.admitted_ns)
        self._queue(execution.pool).push(asked.tenant, execution.id, asked.input_bytes)
        self._queued[execution.id] = execution

    def start(self, execution: Execution) -> None:
        """Dispatch what can start; if this one must wait, watch how long."""
        self.schedule()
        if isinstance(execution.state, Queued):
            self._watch_the_wait(execution)

    def end_waiting(self, execution: Execution, reason: FinishReason) -> None:
        """End an execution that waits in its queue; it leaves at once."""
        self._queues[execution.pool].remove(execution.id.tenant, execution.id)
        self._queued.pop(execution.id, None)
        execution.cancel_timer()
        self._settler.end_waiting(execution, reason)

    def _queue(self, pool: str) -> DomainQueue[ExecutionId]:
        queue = self._queues.get(pool)
        if queue is None:
            queue = self._queues[pool] = DomainQueue(self._config.queue_bounds)
        return queue

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
        self._queues[start.domain].serve(start.waiting)
        execution = self._queued.pop(start.waiting.key)
        execution.cancel_timer()
        now_ns = self._clock.monotonic_ns()
        if now_ns >= execution.deadline_ns:
            self._settler.end_waiting(execution, FinishReason.DEADLINE)
            return
        asked, replica = execution.acquire, start.replica
        execution.state = advance(execution.state, Dispatch(ms_from_ns(now_ns), replica.name))
        assert isinstance(execution.state, Dispatched)
        attempt = execution.state.attempt
        lane = replica.take_lane()
        execution.placements.append(Placement(replica, lane, attempt, now_ns))
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

    # ── the one retry ────────────────────────────────────────────────────────────────────────────────────────────────

    def retry(self, execution: Execution, finish: Finish) -> bool:
        """Queue the execution of a failed attempt again, ahead, for another replica; False when it has to end."""
        placement = execution.placement
        assert placement is not None
        if not self._may_retry(execution, finish, placement):
            return False
        self._settler.lose(execution, finish)
        asked = execution.acquire
        self._queue(execution.pool).push_ahead(asked.tenant, execution.id, asked.input_bytes, placement.replica.name)
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
        return self._budget(execution.pool).take(now_ns)

    def _budget(self, pool: str) -> RetryBudget:
        budget = self._budgets.get(pool)
        if budget is None:
            config = self._config
            window_ns = ns_from_ms(config.retry_window_ms)
            budget = self._budgets[pool] = RetryBudget(config.retries_min, config.retry_percent, window_ns)
        return budget
