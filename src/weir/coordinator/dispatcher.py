"""Who waits, what starts on which replica, and the one retry: the scheduling domains of a cell, one per pool and class.

The core decides whose turn it is and where it fits; this class takes the lane, appends the step and tells the gateway. An
attempt that failed with nothing delivered goes back ahead of its queue if the door would let it in and the budget allows it,
with the same hold and deadline. It never admits, never settles an end itself, and never places a retry where it failed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from weir import errors
from weir.config import CoordinatorConfig
from weir.coordinator.candidates import Candidates, candidates_of
from weir.coordinator.domain import Domain, Lanes, MakeOrder, fair_order
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.explain import DoorFigures
from weir.coordinator.fleet import START_EXPECTED_MS, Fleet, PoolView
from weir.coordinator.journal import Journal
from weir.coordinator.pool_domains import PoolDomains
from weir.coordinator.preemption import Preemption
from weir.coordinator.settler import Settler
from weir.core.admission import Door, door_refusal
from weir.core.endings import FinishReason
from weir.core.ledger.records import ExecutionId, StepRecord
from weir.core.metering import InputBasis
from weir.core.registry.model import Revision, WorkloadClass
from weir.core.request import Dispatch, Dispatched, Queued, advance
from weir.core.routing.capacity import Need
from weir.core.routing.placement import Site
from weir.core.routing.prefixes import cached_tokens
from weir.core.routing.replica import Replica
from weir.core.routing.retry import is_retryable
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import DomainQueue
from weir.core.scheduling.schedule import Start, next_start
from weir.core.tenancy import ServiceClass
from weir.messages import Acquire, DeliveryBooked, Finish, Granted
from weir.ports import Clock
from weir.units import Millis, Nanos, Tokens, ms_from_ns, ns_from_ms


@dataclass(frozen=True, slots=True)
class Turns:
    """Who comes before whom. weight_of: a tenant's weight now; order: None for the product's own."""

    weight_of: Callable[[str], int]
    order: MakeOrder | None = None


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What a pool can do for a request, before anything is taken. is_hastened: a line of a batch makes room for it."""

    pool: PoolView
    need: Need
    door: Door
    is_hastened: bool = False


def _start_of(deadline_ms: Millis, offer: Offer) -> tuple[bool, bool, Millis]:
    """What pools are compared by: whether they refuse, and for good, then when the first output is expected."""
    door = offer.door
    refusal = door_refusal(door, deadline_ms)
    is_final = isinstance(refusal, errors.DeadlineInfeasible)
    return is_final, refusal is not None, door.predicted_wait_ms + door.times.prefill_ms


class Dispatcher:
    """Owner of the domains. settler: ends what waits; sessions: carries grants and booked steps to their gateways.

    may_grant: whether anything may start now. grants_when_durable: gateways hear of a grant only once its dispatch is durable.
    """

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
        self._shares = {
            ServiceClass.INTERACTIVE: 100 - config.batch_share_percent,
            ServiceClass.BATCH: config.batch_share_percent,
        }
        self._pools: dict[str, PoolDomains] = {}
        self._queued: dict[ExecutionId, Execution] = {}
        self._lengths = OutputLengths()
        self.may_grant: Callable[[], bool] = lambda: True
        self.preemption = Preemption(clock, config.yield_after_ms, config.batch_share_percent, lambda: self.may_grant())
        self.grants_when_durable = False
        settler.on_ended = self._ended

    # ── who waits ────────────────────────────────────────────────────────────────────────────────────────────────────

    def waiting_in(self, pool: str) -> int:
        """Admitted requests that wait in a pool's domains."""
        domains = self._pools.get(pool)
        return domains.waiting if domains is not None else 0

    def offer(self, pools: Sequence[PoolView], asked: Acquire, revision: Revision, workload: WorkloadClass) -> Offer:
        """The pool that would start it first, of one or more; one that refuses it only if all do."""
        offers = [self._offer(pool, asked, revision, workload) for pool in pools]
        return min(offers, key=partial(_start_of, asked.deadline_left_ms)) if len(offers) > 1 else offers[0]

    def _offer(self, pool: PoolView, asked: Acquire, revision: Revision, workload: WorkloadClass) -> Offer:
        domain = self._domain(pool.name, asked.service_class)
        need = domain.need_of(asked, revision, workload)
        offer = Offer(pool, need, self._door(pool, asked, need))
        if offer.door.predicted_wait_ms and asked.service_class is not ServiceClass.BATCH:
            shortened_ms = self.preemption.shortened_ms(pool, need, domain.caution(self._clock.monotonic_ns()))
            if shortened_ms is not None and shortened_ms < offer.door.predicted_wait_ms:
                return Offer(pool, need, msgspec.structs.replace(offer.door, predicted_wait_ms=shortened_ms), is_hastened=True)
        return offer

    def _door(self, pool: PoolView, asked: Acquire, need: Need, avoid: str | None = None) -> Door:
        """The domain as a newcomer meets it; as a retry does, with the replica to avoid: the others, and who is ahead."""
        domains, now_ns = self._pools[pool.name], self._clock.monotonic_ns()
        domain = domains.of(asked.service_class)
        usable, free = self._fleet.lanes(pool, avoid)
        if avoid is None and domain.queue.is_one_of_many(asked.tenant, 1):
            need = need.of_many()
        wait_ms = 0
        if usable:
            lanes, free = self._lanes(domains, asked.service_class, need, (usable, free), avoid)
            if avoid is None:
                wait_ms = domain.predicted_wait_ms(asked.tenant, lanes, free, now_ns)
            else:
                wait_ms = domain.predicted_retry_ms(lanes, free, now_ns)
        return Door(
            lanes=usable,
            queue_refusal=domain.queue.refusal(asked.tenant, asked.input_bytes),
            predicted_wait_ms=wait_ms,
            times=domain.times(need, self._held_anywhere(need), now_ns, is_exact=asked.input_basis is InputBasis.EXACT),
            wait_ms_max=domain.queue.bounds.door_ms_max,
            no_capacity_retry_ms=START_EXPECTED_MS,
        )

    def _lanes(
        self, domains: PoolDomains, service_class: ServiceClass, need: Need, counted: tuple[int, int], avoid: str | None
    ) -> tuple[Lanes, int]:
        """What a wait is reckoned with, and how many lanes are free for it. counted: (usable, free) of the pool."""
        usable, free = counted
        view, part, read_ms = domains.view, float(usable), None
        if free and not view.has_room(need, avoid):
            free = 0
            if view.has_memory(need, avoid):
                read_ms = view.read_ms(need, self._clock.monotonic_ns(), avoid) * (1 + domains.waiting / len(view.replicas))
            else:
                part = float(max(1, view.running))  # no more than run now fit
        others = domains.waiting_beside(service_class)
        if others:
            part, free = part * domains.part(service_class), free - others
        return Lanes(usable, part, read_ms), free

    def _held_anywhere(self, need: Need) -> Tokens:
        """The most that a replica may hold of an input."""
        held = self._fleet.prefixes.held(need.prefix) if need.prefix else {}
        return cached_tokens(max(held.values()), need.prefix_bytes, need.input_tokens) if held else 0

    def door_figures(self, offer: Offer) -> DoorFigures:
        """What a request met, for its timeline."""
        door, pool = offer.door, offer.pool
        free, waiting = self._fleet.lanes(pool)[1], self.waiting_in(pool.name)
        return DoorFigures(pool.name, door.lanes, free, waiting, door.predicted_wait_ms, door.times.prefill_ms)

    def expect(self, execution: Execution) -> None:
        """What an execution that an earlier coordinator admitted is expected to take."""
        self._domain_of(execution).expect(execution)

    def enqueue(self, execution: Execution) -> None:
        """An admitted execution waits in its flow; `start` follows."""
        domain = self._domain_of(execution)
        domain.retries.admitted(execution.admitted_ns)
        self._pools[execution.pool].begins_to_wait(execution.acquire.service_class)
        domain.push(execution)
        self._queued[execution.id] = execution

    def start(self, execution: Execution) -> None:
        """Dispatch what can start; if this one must wait, watch how long."""
        domains = self._pools[execution.pool]
        self._schedule(domains)
        if isinstance(execution.state, Queued):
            self._note_wait(execution)
            self._domain_of(execution).has_to_wait(domains.view.lanes.usable, self._clock.monotonic_ns())
            self.preemption.waits(domains.view, execution)
            self._watch_the_wait(execution)

    def _note_wait(self, execution: Execution) -> None:
        """For its timeline: its position in its flow, and the replicas as they are for it."""
        queue, lost, need, position = self._domain_of(execution).queue, execution.placement, execution.need, None
        if lost is None:
            position = queue.position(execution.id.tenant, execution.id)
            need = need.of_many() if queue.is_one_of_many(execution.id.tenant) else need
        self._timelines.queued(execution, position, self.waiting_in(execution.pool) - 1)
        self._timelines.considered(execution, self._candidates(execution, need, lost.replica.name if lost else None))

    def end_waiting(self, execution: Execution, reason: FinishReason) -> None:
        """End an execution that waits in its queue; it leaves at once, and what waited behind it may start."""
        self._end_waiting(execution, reason)
        self._schedule(self._pools[execution.pool])

    def end_all_waiting(self, executions: Sequence[Execution], reason: FinishReason) -> None:
        """End executions that wait, all of them before anything else may start."""
        for execution in executions:
            self._end_waiting(execution, reason)
        self.schedule()

    def _end_waiting(self, execution: Execution, reason: FinishReason) -> None:
        if reason is FinishReason.QUEUE_WAIT and not execution.placements:
            self._domain_of(execution).expired(execution, self._clock.monotonic_ns())
        if self._queued.pop(execution.id, None) is not None:  # else no gateway has told it again
            self._domain_of(execution).remove(execution, self._clock.monotonic_ns())
        execution.cancel_timer()
        self.preemption.waits_no_more(execution)
        self._settler.end_waiting(execution, reason)

    def _domain(self, pool: str, service_class: ServiceClass) -> Domain:
        domains = self._pools.get(pool)
        if domains is None:
            domains = self._pools[pool] = PoolDomains(self._fleet.pool(pool), self._shares, self._new_domain)
        return domains.of(service_class)

    def _new_domain(self, pool: PoolView) -> Domain:
        return Domain(self._config, self._make_order(self._weight_of), self._lengths, lambda: pool.pace)

    def _domain_of(self, execution: Execution) -> Domain:
        return self._domain(execution.pool, execution.acquire.service_class)

    def _watch_the_wait(self, execution: Execution) -> None:
        now_ns = self._clock.monotonic_ns()
        since_ns = now_ns if execution.placements else execution.admitted_ns
        bound_ns = since_ns + ns_from_ms(self._config.queue_wait_ms)
        due_ns = min(bound_ns, execution.deadline_ns)
        reason = FinishReason.QUEUE_WAIT if bound_ns < execution.deadline_ns else FinishReason.DEADLINE
        delay_s = max(0, due_ns - now_ns) / 1e9
        execution.timer = asyncio.get_running_loop().call_later(delay_s, self.end_waiting, execution, reason)

    # ── what starts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> None:
        """Dispatch as long as something that waits can start."""
        for domains in self._pools.values():
            self._schedule(domains)

    def _schedule(self, domains: PoolDomains) -> None:
        while domains.waiting and domains.view.lanes.free and self.may_grant():
            queues = domains.queues()
            start = self._next_start(domains.view, queues)
            if start is None:
                return
            self._dispatch(domains, start, is_turn=start.queue is queues[0] and not start.passed)

    def _next_start(self, pool: PoolView, queues: Sequence[DomainQueue[ExecutionId]]) -> Start[ExecutionId] | None:
        """Whoever's turn it is; while lines of batches are held back, one of them only where nobody else can start."""
        if not self.preemption.holds_lines_back(pool):
            return next_start(queues, pool.lanes.open.values(), self._fleet.prefixes)
        others = next_start(queues, pool.lanes.open.values(), self._fleet.prefixes, self._is_no_line)
        return others or next_start(queues, self.preemption.unreserved(pool), self._fleet.prefixes)

    def _is_no_line(self, waiting: ExecutionId) -> bool:
        return not self._queued[waiting].acquire.yields

    def _dispatch(self, domains: PoolDomains, start: Start[ExecutionId], *, is_turn: bool) -> None:
        execution = self._queued[start.waiting.key]
        domain, now_ns = self._domain_of(execution), self._clock.monotonic_ns()
        uncached = execution.need.input_tokens - start.site.cached_tokens
        if now_ns + domain.prefill_ns(uncached, now_ns) >= execution.deadline_ns:
            self._end_waiting(execution, FinishReason.DEADLINE)
            return
        if start.waiting.avoid is None:
            domain.waited(execution, now_ns)
        for queue, key in start.passed:
            queue.passed(key)
        cost = domain.serve(start.waiting, execution, now_ns, domains.view.lanes.usable, start.site.cached_tokens)
        domains.served(execution.acquire.service_class, cost)
        del self._queued[execution.id]
        execution.cancel_timer()
        self.preemption.waits_no_more(execution)
        asked, replica = execution.acquire, start.site.replica
        execution.state = advance(execution.state, Dispatch(ms_from_ns(now_ns), replica.name))
        assert isinstance(execution.state, Dispatched)
        attempt = execution.state.attempt
        candidates = self._candidates(execution, start.waiting.need, start.waiting.avoid, replica)
        lane = self._take_lane(execution, start.site, now_ns)
        placement = Placement(replica, lane, attempt, now_ns, start.site.cached_tokens)
        execution.placements.append(placement)
        self.preemption.took_lane(domains.view, execution, placement, is_turn=is_turn)
        self._timelines.dispatched(execution, replica, candidates)
        most = min(self._config.delivery_step_tokens, execution.admit.worst.output_tokens) if asked.stream else 0
        address = self._fleet.address_of(replica.name)
        granted = Granted(ref=asked.ref, attempt=attempt, replica=address, lane=lane, delivered_max=most)
        if self.grants_when_durable:
            self.append_step(execution, most, withheld=granted)
        else:
            self.append_step(execution, most)
            self._sessions.deliver(execution, granted)

    def _take_lane(self, execution: Execution, site: Site, now_ns: Nanos) -> int:
        need, replica = execution.need, site.replica
        if self._fleet.address_of(replica.name).cache_salt:
            self._fleet.prefixes.placed(replica.name, need.prefix, execution.acquire.input_tokens)
        return replica.take_lane(need.kv_tokens, need.input_tokens - site.cached_tokens, now_ns)

    def _candidates(self, execution: Execution, need: Need, avoid: str | None, chosen: Replica | None = None) -> Candidates:
        replicas = self._fleet.pool(execution.pool).replicas.values()
        return candidates_of(replicas, need, self._fleet.prefixes, avoid, chosen)

    def resume(self, execution: Execution, placement: Placement, replica: Replica, lane: int | None) -> None:
        """It runs on this replica since an earlier coordinator dispatched it, on this lane if that is known."""
        need, now_ns = execution.need, self._clock.monotonic_ns()
        kv_tokens = max(need.kv_tokens, need.input_tokens + execution.delivered_max)
        unread = 0 if placement.has_output else need.input_tokens
        placement.replica, placement.lane = replica, replica.retake_lane(lane, kv_tokens, unread, now_ns)
        if placement.lane is not None:
            self._domain_of(execution).resume(execution, placement)
            self.preemption.took_lane(self._pools[execution.pool].view, execution, placement, is_turn=False)

    def append_step(self, execution: Execution, delivered_max: Tokens, withheld: Granted | None = None) -> None:
        """Book output up to delivered_max ahead of its delivery; its gateway hears once it is durable. withheld: told then."""
        placement = execution.placement
        assert placement is not None
        execution.delivered_max = delivered_max
        record = StepRecord(self._journal.next_seq(), execution.id, placement.attempt, placement.replica.name, delivered_max)
        booked = DeliveryBooked(execution.acquire.ref, placement.attempt, delivered_max)
        if withheld is None:
            self._journal.append(record, partial(self._sessions.deliver, execution, booked))
        else:
            placement.is_withheld = True
            self._journal.append(record, partial(self._tell_withheld, execution, placement, withheld, booked))

    def _tell_withheld(self, execution: Execution, placement: Placement, granted: Granted, booked: DeliveryBooked) -> None:
        """Also of what has ended meanwhile: its gateway answers that nothing runs, and its lane is free."""
        placement.is_withheld = False
        self._sessions.deliver(execution, granted)
        self._sessions.deliver(execution, booked)

    # ── what runs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def wants_delivery(self, execution: Execution, delivered_max: Tokens) -> None:
        """Its gateway asks for the next step of delivery, up to two steps ahead of what it has."""
        produced = max(0, delivered_max - 2 * self._config.delivery_step_tokens)
        self._domain_of(execution).produced(execution, produced)
        placement = execution.placement
        if placement is not None and placement.lane is not None:
            placement.replica.room.grew(placement.lane, execution.need.input_tokens + produced)
        self.append_step(execution, delivered_max)

    def showed_output(self, execution: Execution) -> None:
        """The engine has output of its last attempt; said again, it changes nothing."""
        placement = execution.placement
        assert placement is not None
        if placement.has_output:
            return
        now_ns = self._clock.monotonic_ns()
        placement.has_output, placement.output_ns = True, now_ns
        self._domain_of(execution).showed_output(execution, now_ns - placement.lane_taken_ns, now_ns)
        if placement.lane is not None:
            room = placement.replica.room.prefill_tokens
            self._fleet.showed_output(placement.replica, placement.lane)
            if placement.replica.room.prefill_tokens < room:
                self._schedule(self._pools[execution.pool])

    def lane_freed(self, execution: Execution, placement: Placement) -> None:
        """A lane that it took is free again; `schedule` follows."""
        self._domain_of(execution).lane_freed(execution, placement, self._clock.monotonic_ns())
        self.preemption.freed_lane(execution, placement)

    def _ended(self, execution: Execution) -> None:
        domain, placement, now_ns = self._domain_of(execution), execution.placement, self._clock.monotonic_ns()
        domain.ended(execution)
        ratio = domain.pace_of_answer(execution, now_ns)
        if ratio is not None and placement is not None:
            placement.replica.answered_at(ratio, placement.lane_taken_ns, now_ns)

    # ── the one retry ────────────────────────────────────────────────────────────────────────────────────────────────

    def retry(self, execution: Execution, finish: Finish) -> bool:
        """Queue the execution of a failed attempt again, ahead, for another replica; False when it has to end."""
        placement = execution.placement
        assert placement is not None
        if not self._may_retry(execution, finish, placement):
            return False
        self._timelines.lost(execution, finish)
        self._settler.lose(execution, finish)
        self._pools[execution.pool].begins_to_wait(execution.acquire.service_class)
        self._domain_of(execution).push_ahead(execution, placement.replica.name)
        self._queued[execution.id] = execution
        self.start(execution)
        return True

    def _may_retry(self, execution: Execution, finish: Finish, placement: Placement) -> bool:
        """The failure allows it, nobody asked it to stop, another replica can start it in time, and the budget is not spent."""
        delivered = not isinstance(execution.state, Dispatched) or finish.delivered_tokens > 0
        if execution.stop_asked or not is_retryable(finish.reason, placement.attempt, delivered=delivered):
            return False
        now_ns = self._clock.monotonic_ns()
        pool = self._fleet.pool(execution.pool)
        door = self._door(pool, execution.acquire, execution.need, placement.replica.name)
        if door_refusal(door, ms_from_ns(execution.deadline_ns - now_ns)) is not None:
            return False
        return self._domain_of(execution).retries.take(now_ns)
