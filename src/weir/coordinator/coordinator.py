"""The one brain of a cell: it admits, books, queues, dispatches and settles, and owns everything that is counted.

Every decision is one synchronous step on the event loop: the core decides, this class takes what was decided, appends the
record and tells the gateway. It never waits inside a decision, never sees prompt or output text, and never retries a write
itself. Who waits and what starts is its dispatcher's, how an end is posted its settler's.

    acquire ──▶ decide ─ rejected
                  └ take · hold record · queue ──▶ schedule ──▶ step record · granted ──▶ progress ──▶ finish ──▶ settle record
                                           ▲          ▲                                                   │    stopped ─┐ (lane)
                                           └──────────┼────────────────────── retry ──────────────────────┘             │
                                                      └─────────────────────────────────────────────────────────────────┘
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weir import errors
from weir.config import CoordinatorConfig, LinkConfig
from weir.coordinator.asking import check_asked, question_of, rejection_of, takers_of
from weir.coordinator.blame import Blame, fingerprint_of
from weir.coordinator.canaries import Canaries
from weir.coordinator.dispatcher import Dispatcher, Offer, Turns
from weir.coordinator.domain import MakeOrder
from weir.coordinator.execution import Execution
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.explain import Timelines, WatchedSessions
from weir.coordinator.fleet import Fleet
from weir.coordinator.journal import Journal
from weir.coordinator.ledger_entries import Stamp, finish_of_lost, hold_record
from weir.coordinator.queries import Queries
from weir.coordinator.readiness import Readiness
from weir.coordinator.rejections import RejectionCounter
from weir.coordinator.sessions import LocalLink, Session
from weir.coordinator.settler import Settler
from weir.coordinator.store_watch import StoreWatch
from weir.coordinator.takeover import Takeover, TakeoverParts
from weir.core.admission import Admit, Bound, decide, idempotency_refusal
from weir.core.endings import FinishReason
from weir.core.ledger import reservation
from weir.core.ledger.book import Book, Taken
from weir.core.ledger.records import ExecutionId
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Admit as AdmitEvent
from weir.core.request import Dispatched, FirstOutput, Queued, Received, advance
from weir.core.tenancy import scopes_of
from weir.messages import (
    Acquire,
    Admitted,
    AskStanding,
    CancelById,
    Draining,
    Finish,
    FleetView,
    GenerationRecord,
    HoldBooked,
    Lookup,
    Progress,
    Reattach,
    ReattachedAll,
    Register,
    SnapshotFresh,
    Stopped,
    StopRequest,
    Up,
    later,
)
from weir.ports import Clock, GatewayInbox, OpenHold
from weir.telemetry import Telemetry
from weir.units import Millis, Moment, ceil_ms_from_ns, ms_from_ns, ns_from_ms

_CONFIRMS_S = 5.0
"""How long engines have to confirm that they stopped."""


@dataclass(frozen=True, slots=True)
class CoordinatorParts:
    """What a coordinator works with. order: between tenants; None for the product's, which is fair.

    leads: whether it may grant now; another one may lead where it may not. is_lease_away: whether it may not because the store
    cannot be asked for the lease. kept: what an earlier one left open, which the book holds, None where no gateway can outlive
    a coordinator; link: how long that waits for its gateway.
    """

    clock: Clock
    config: CoordinatorConfig
    fleet: Fleet
    book: Book
    journal: Journal
    executions: ExecutionTable
    rejections: RejectionCounter
    telemetry: Telemetry
    order: MakeOrder | None = None
    leads: Callable[[], bool] = lambda: True
    is_lease_away: Callable[[], bool] = lambda: False
    kept: Sequence[OpenHold] | None = None
    link: LinkConfig = field(default_factory=LinkConfig)


class Coordinator:
    """Owner of the book, the queues and the executions of a cell. timelines: of the latest requests; canaries: evidence."""

    def __init__(self, parts: CoordinatorParts, snapshot: Snapshot) -> None:
        self._clock = parts.clock
        self._config = parts.config
        self._fleet = parts.fleet
        self._book = parts.book
        self._journal = parts.journal
        self._executions = parts.executions
        self._rejections = parts.rejections
        self._telemetry = parts.telemetry
        self._snapshot = snapshot
        self._queries = Queries(parts.clock, parts.book, parts.executions, self._ask_to_stop, self._start)
        self.timelines = Timelines(parts.clock, parts.config.explained_requests)
        self._sessions = WatchedSessions(self.timelines)
        self._settler = Settler(parts.clock, parts.book, parts.journal, parts.executions, self._sessions, parts.telemetry)
        self.canaries = Canaries(parts.executions, snapshot)
        self._settler.on_concluded = self.canaries.concluded
        self._blame = Blame(parts.clock, parts.fleet)
        turns = Turns(lambda tenant: self._snapshot.tenants[tenant].weight, parts.order)
        self._dispatcher = Dispatcher(parts.clock, parts.config, parts.fleet, parts.journal, self._settler, turns)
        self._dispatcher.preemption.stop = self._ask_to_stop
        self._takeover = self._compose_takeover(parts)
        self._dispatcher.may_grant = lambda: parts.leads() and not self._takeover.is_recovering
        wait_ns = ns_from_ms(parts.config.store_wait_ms)
        self._store_watch = StoreWatch(parts.clock, wait_ns, parts.journal, parts.executions, self._settler, self._ask_to_stop)
        self._readiness = Readiness(parts.clock, self._store_watch, parts.leads, parts.is_lease_away)
        self._tasks: asyncio.TaskGroup | None = None
        self._receivers: dict[type, Callable[[Session, Any], None]] = {
            Acquire: self._on_acquire,
            Progress: self._on_progress,
            Finish: self._takeover.on_finish,
            Stopped: self._on_stopped,
            Reattach: self._takeover.on_reattach,
            ReattachedAll: self._takeover.on_reattached_all,
            CancelById: self._queries.on_cancel_by_id,
            Lookup: self._queries.on_lookup,
            AskStanding: self._queries.on_ask_standing,
        }
        self._fleet.on_change = self._fleet_changed
        self._fleet.carries = parts.executions.carries
        if parts.kept is not None:
            self._takeover.restore(parts.kept, snapshot)
            self._stop_what_is_revoked()

    def _compose_takeover(self, parts: CoordinatorParts) -> Takeover:
        found = TakeoverParts(
            clock=parts.clock,
            fleet=parts.fleet,
            executions=parts.executions,
            sessions=self._sessions,
            dispatcher=self._dispatcher,
            standing=self._queries.standing,
            finish=self._on_finish,
            lose=self.lose,
            end_lost=self._end_lost,
            is_busy=self._settler.idle.clear,
            start=self._start,
            link=parts.link,
        )
        return Takeover(found)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Write the journal and tick until `close`. A failure ends every task of the coordinator."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._takeover.begin()
                loops = [tasks.create_task(self._store_watch.run()), tasks.create_task(self._rejections.run())]
                await self._journal.run()
                for task in loops:
                    task.cancel()
        finally:
            self._readiness.is_closed = True  # also after a failure: nothing is started any more, and nothing admitted
            self._takeover.close()
        await self._rejections.flush()

    def close(self) -> None:
        """Let `run` return once the journal is empty."""
        self._readiness.is_closed = True
        self._journal.close()

    async def drain(self, grace_ms: int) -> None:
        """Refuse new work, let what is admitted finish within the grace, then end the rest as `shutdown`."""
        self._readiness.is_draining = True
        self._sessions.tell_all(Draining())
        if await self._settler.is_idle_within(grace_ms / 1e3):
            return
        for execution in self._executions.live:
            self._ask_to_stop(execution, FinishReason.SHUTDOWN)
        # If an engine does not confirm, or the store is away, recovery resolves what is left.
        await self._settler.is_idle_within(self._config.store_wait_ms / 1e3 + _CONFIRMS_S)

    def queued_in(self, pool: str) -> int:
        """Admitted requests that wait in a pool's domain."""
        return self._dispatcher.waiting_in(pool)

    @property
    def snapshot(self) -> Snapshot:
        """The approved configuration in force."""
        return self._snapshot

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, register: Register, inbox: GatewayInbox) -> LocalLink:
        """Open a session for a gateway; it gets the snapshot and the fleet at once."""
        self._takeover.registered(register)
        session = self._sessions.open(register.session, inbox)
        session.may_tell = register.reattaches
        inbox.deliver(self._snapshot)
        if (fresh_ms := self.fresh_ms) is not None:
            inbox.deliver(SnapshotFresh(fresh_ms))
        inbox.deliver(FleetView(self._fleet.ready_addresses()))
        if self._readiness.is_draining:
            inbox.deliver(Draining())
        return LocalLink(self.receive, session)

    def lose(self, session: str) -> None:
        """A gateway is gone, and what it carried is lost."""
        lost = self._sessions.close(session)
        lost.asking.clear()
        self._end_lost(lost, list(lost.by_ref.values()))
        self._takeover.lost(session)

    def _end_lost(self, lost: Session, carried: Sequence[Execution]) -> None:
        """End executions by the rule for what nobody can account for: engines run nothing of them."""
        # First what waits: no lane that comes free below is for it.
        waiting = [execution for execution in carried if isinstance(execution.state, Queued)]
        self._dispatcher.end_all_waiting(waiting, FinishReason.COORDINATOR_LOST)
        for execution in carried:
            if execution.end_record is None:
                self._on_finish(lost, finish_of_lost(execution))
            elif execution.waits_to_be_shown:
                self._settler.give_up_completion(execution, FinishReason.COORDINATOR_LOST)
            for placement in execution.placements:
                self._on_stopped(lost, Stopped(execution.acquire.ref, placement.attempt))

    def receive(self, session: Session, message: Up) -> None:
        """One message of a session; of one that is over it is not heard. Raises LinkFault for what no gateway of ours says."""
        if session.is_open:
            self._receivers[type(message)](session, message)

    def publish(self, snapshot: Snapshot) -> None:
        """Put a newer approved configuration in force, here and in every session; work of what is revoked is cancelled."""
        self._snapshot = snapshot
        self.canaries.publish(snapshot)
        self._book.configure(snapshot.limits, snapshot.zones(), self._clock.monotonic_ns())
        self._stop_what_is_revoked()
        self._sessions.tell_all(snapshot)

    def _stop_what_is_revoked(self) -> None:
        for execution in self._executions.live:
            asked = execution.acquire
            revision = self._snapshot.revisions.get(asked.revision)
            if self._snapshot.is_revoked(asked.tenant, asked.application, asked.key) or (revision and revision.revoked):
                self._ask_to_stop(execution, FinishReason.REVOKED)

    def renew(self, valid_ms: Millis) -> None:
        """The snapshot was checked against the store: it may be worked by for so long; never renewed, for ever."""
        self._readiness.renew(valid_ms)
        self._sessions.tell_all(SnapshotFresh(valid_ms))

    @property
    def fresh_ms(self) -> Millis | None:
        """For how long the snapshot may still be worked by, ≥ 0; None: no bound was told."""
        return self._readiness.fresh_ms

    def leads_again(self) -> None:
        """It may grant again: what waited meanwhile starts."""
        self._dispatcher.schedule()

    def _fleet_changed(self) -> None:
        self._sessions.tell_all(FleetView(self._fleet.ready_addresses()))
        self._takeover.look_around()
        self._dispatcher.schedule()

    # ── admission ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_acquire(self, session: Session, asked: Acquire) -> None:
        check_asked(asked, session, self._snapshot)
        if self._takeover.is_recovering:
            self._takeover.defer(session, asked, self._on_acquire)
            return
        if (refusal := self._readiness.refusal()) is not None:
            self._reject(session, asked, refusal)
            return
        known = self._executions.get(asked.tenant, asked.request_id)
        if known is not None or not asked.request_id_given:
            self._admit(session, asked, self._executions.bound_of(known, self._clock.wall_ms()) if known else None)
            return
        session.asking.add(asked.ref)  # the id may be bound by an execution that only the store remembers
        self._start(self._admit_after_lookup(session, asked))

    async def _admit_after_lookup(self, session: Session, asked: Acquire) -> None:
        bound: Bound | None = None
        began_ns = self._clock.monotonic_ns()
        try:
            stored = await self._executions.find_stored(asked.tenant, asked.request_id)
        except errors.LedgerUnavailable as fault:
            if asked.ref in session.asking:
                self._reject(session, asked, fault)
            return
        if asked.ref not in session.asking:
            return  # the client left meanwhile
        if stored is not None:
            bound = self._executions.bound_of_stored(stored, self._clock.wall_ms())
        if known := self._executions.get(asked.tenant, asked.request_id):
            bound = self._executions.bound_of(known, self._clock.wall_ms())
        asked = later(asked, ceil_ms_from_ns(self._clock.monotonic_ns() - began_ns))
        self._admit(session, asked, bound, stored.record if stored else None)

    def _admit(self, session: Session, asked: Acquire, bound: Bound | None, stored: GenerationRecord | None = None) -> None:
        session.asking.discard(asked.ref)
        if (refusal := self._readiness.refusal()) is not None:  # again: a look-up takes a while
            self._reject(session, asked, refusal)
            return
        try:
            offer = self._offer(asked)
        except errors.WeirError as unserved:
            answered = idempotency_refusal(asked.body_digest, bound) if bound is not None else None
            self._reject(session, asked, answered or unserved, stored)
            return
        question = question_of(asked, is_quarantined=self._blame.is_quarantined(asked))
        decision = decide(question, self._snapshot, bound, self._book, offer.door, self._now())
        if isinstance(decision, Admit):
            self._take(session, asked, decision, offer)
            return
        if isinstance(decision, errors.NoCapacity):
            self._fleet.demand(offer.pool)
        self._reject(session, asked, decision, stored, offer)

    def _offer(self, asked: Acquire) -> Offer:
        """The best of the pools that may take a request. Raises UnknownAlias, InputTooLong or NoCapacity."""
        pools, revision = takers_of(asked, self._fleet, self._snapshot)
        return self._dispatcher.offer(pools, asked, revision, self._snapshot.workload_class(asked.workload_class))

    def _take(self, session: Session, asked: Acquire, admit: Admit, offer: Offer) -> None:
        now_ns = self._clock.monotonic_ns()
        execution = Execution(
            id=ExecutionId(asked.tenant, asked.request_id, admit.execution),
            acquire=asked,
            admit=admit,
            session=session.name,
            pool=offer.pool.name,
            arrived_ns=now_ns - asked.waited_ns,
            admitted_ns=now_ns,
            deadline_ns=now_ns + ns_from_ms(asked.deadline_left_ms),
            state=advance(Received(ms_from_ns(now_ns - asked.waited_ns)), AdmitEvent(ms_from_ns(now_ns))),
            reservation=reservation.Held(admit.worst),
            workload=self._snapshot.workload_class(asked.workload_class),
            predicted_wait_ms=offer.door.predicted_wait_ms,
            need=offer.need,
            is_hastened=offer.is_hastened,
            assignment=self.canaries.assignment_of(asked),
        )
        taken = self._append_hold(execution)
        self.timelines.admitted(execution, taken, self._dispatcher.door_figures(offer))
        self._executions.add(execution)
        self._settler.idle.clear()
        session.by_ref[asked.ref] = execution
        self._dispatcher.enqueue(execution)
        session.inbox.deliver(Admitted(asked.ref, admit.execution, self._queries.standing(admit.scopes)))
        self._dispatcher.start(execution)

    def _append_hold(self, execution: Execution) -> Taken:
        now = self._now()
        taken = self._book.take(execution.id, execution.admit.scopes, execution.admit.worst, now)
        execution.windows = taken.windows
        stamp = Stamp(self._journal.next_seq(), now.wall_ms)
        self._journal.append(hold_record(execution, stamp, taken), partial(self._hold_is_durable, execution))
        return taken

    def _hold_is_durable(self, execution: Execution) -> None:
        execution.hold_durable = True
        self.timelines.hold_is_durable(execution)
        self._sessions.deliver(execution, HoldBooked(execution.acquire.ref))

    def _reject(
        self,
        session: Session,
        asked: Acquire,
        refusal: errors.WeirError,
        stored: GenerationRecord | None = None,
        offer: Offer | None = None,
    ) -> None:
        session.asking.discard(asked.ref)
        self.timelines.rejected(asked, refusal, self._dispatcher.door_figures(offer) if offer is not None else None)
        self._telemetry.rejected(refusal.code)
        self._rejections.count(asked.tenant, refusal.code)
        generation = None
        if isinstance(refusal, errors.RequestInFlight | errors.OutputNotRetained):
            known = self._executions.get(asked.tenant, asked.request_id)
            generation = known.public() if known else stored
        scopes = scopes_of(asked.tenant, asked.application, asked.key, asked.alias, asked.service_class)
        standing = self._queries.standing(scopes)
        session.inbox.deliver(rejection_of(asked, refusal, standing, generation))

    # ── progress and ends ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_progress(self, session: Session, progress: Progress) -> None:
        execution = session.by_ref.get(progress.ref)
        if execution is None or execution.end_record is not None or not execution.runs(progress.attempt):
            return
        if progress.first_output or progress.has_output:
            self._dispatcher.showed_output(execution)
        if progress.first_output and isinstance(execution.state, Dispatched):
            execution.state = advance(execution.state, FirstOutput(ms_from_ns(self._clock.monotonic_ns())))
            self.timelines.first_output(execution)
        if progress.delivered_max is not None:
            wanted = min(progress.delivered_max, execution.admit.worst.output_tokens)
            if wanted > execution.delivered_max:
                self._dispatcher.wants_delivery(execution, wanted)
                self.timelines.stepped(execution)

    def _on_finish(self, session: Session, finish: Finish, *, is_ended: bool = False) -> None:
        """is_ended: a former coordinator ended it so, and its client may have been told."""
        session.asking.discard(finish.ref)
        execution = session.by_ref.get(finish.ref)
        if execution is None:
            return  # it left before a decision
        if execution.end_record is not None or not (finish.attempt == 0 or execution.runs(finish.attempt)):
            self._telemetry.late.inc()
            return
        self.timelines.finished(execution, finish)
        if isinstance(execution.state, Queued):
            self._dispatcher.end_waiting(execution, finish.reason)
        elif is_ended:
            self._settler.settle(execution, finish)
        else:
            finish = self._blame.judge(execution, finish)
            if not self._dispatcher.retry(execution, finish):
                self._settler.settle(execution, finish)
            if finish.reason is FinishReason.QUARANTINED:
                self._end_waiting_copies(execution)

    def _end_waiting_copies(self, quarantined: Execution) -> None:
        """What waits with the same body would meet a third replica."""
        fingerprint = fingerprint_of(quarantined.acquire)
        for execution in self._executions.live:
            if isinstance(execution.state, Queued) and fingerprint_of(execution.acquire) == fingerprint:
                self._dispatcher.end_waiting(execution, FinishReason.QUARANTINED)

    def _on_stopped(self, session: Session, stopped: Stopped) -> None:
        execution = session.by_ref.get(stopped.ref)
        placement = execution.placement_of(stopped.attempt) if execution else None
        if execution is None or placement is None:
            self._takeover.stray_stopped(session.name, stopped)
            return
        self._takeover.stopped(placement, confirmed=stopped.confirmed)
        if placement.lane is None:
            self._settler.forget_if_quiet(execution)
            return
        revision = execution.acquire.revision
        lane, placement.lane = placement.lane, None
        self.timelines.stopped(execution, stopped)
        if stopped.stop_ms is not None:
            self._telemetry.stop_time.labels(revision).observe(stopped.stop_ms / 1e3)
        if stopped.confirmed:
            placement.replica.free_lane(lane)
        else:  # the lane stays taken until the replica is confirmed gone
            self._telemetry.unconfirmed.labels(revision).inc()
            self._fleet.condemn(execution.pool, placement.replica.name)
        self._dispatcher.lane_freed(execution, placement)
        self._settler.forget_if_quiet(execution)
        self._dispatcher.schedule()

    def _ask_to_stop(self, execution: Execution, reason: FinishReason) -> None:
        """End an execution for a reason of ours: at once while it waits, through its gateway while it runs."""
        if execution.end_record is not None or execution.stop_asked is not None:
            return
        if isinstance(execution.state, Queued):
            self._dispatcher.end_waiting(execution, reason)
            return
        execution.stop_asked = reason
        self.timelines.stop_asked(execution, reason)
        self._sessions.deliver(execution, StopRequest(execution.acquire.ref, reason))

    # ── small ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> Moment:
        return Moment(self._clock.monotonic_ns(), self._clock.wall_ms())

    def _start(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run a task of the coordinator's; False once it is closed."""
        if self._readiness.is_closed or self._tasks is None:
            work.close()
            return False
        self._tasks.create_task(work)
        return True
