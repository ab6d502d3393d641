"""What an earlier coordinator left open goes on: its holds are kept until their gateways tell of them, or are given up.

Each open hold becomes an execution again, in the session that carried it, which nobody has for now: its limits, budgets and
buckets are held, and its id is bound. A gateway that tells of it takes it into its new session, and it goes on from what the
gateway knows; what its gateway does not tell is lost at once, and what no gateway tells when the lease is over, or before, once
its deadline is over for longer than gateways keep a report. Until every gateway that carried something was heard and some
replica is known, or a second passed, nothing is admitted and nothing is dispatched, so that what runs gets its lanes back, and
what waits its place.

It decides nothing about an end, a retry or a place: it hands over to whoever does.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog

from weir import errors
from weir.config import LinkConfig
from weir.coordinator.dispatcher import Dispatcher
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.execution_table import ExecutionTable
from weir.coordinator.explain import WatchedSessions
from weir.coordinator.fleet import Fleet
from weir.coordinator.restoring import as_told, restored, resume, wait
from weir.coordinator.sessions import NOBODY, Session
from weir.coordinator.strays import Strays
from weir.core.registry.snapshot import Snapshot
from weir.core.request import ATTEMPTS_MAX
from weir.core.routing.replica import Replica
from weir.core.routing.retry import is_retryable
from weir.core.tenancy import Scopes
from weir.messages import (
    Acquire,
    DeliveryBooked,
    EndBooked,
    Ended,
    Finish,
    NotHeld,
    Reattach,
    Reattached,
    ReattachedAll,
    Register,
    ReplicaAddress,
    Run,
    StandingView,
    Stopped,
    StopRequest,
    gateway_of,
    later,
)
from weir.ports import Clock, OpenHold
from weir.units import Moment, Tokens, ceil_ms_from_ns, ns_from_ms

RECOVERING_S = 1.0
"""How long gateways that carried something, and replicas, are waited for before anything else is decided."""
_LOOK_S = 0.25
"""How often it is looked whose deadline is over for so long that nobody tells of it any more."""

_log = structlog.get_logger("weir.coordinator")


class TakeFinish(Protocol):
    """Takes a gateway's report. is_ended: the former coordinator ended it so."""

    def __call__(self, session: Session, finish: Finish, *, is_ended: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class TakeoverParts:
    """What it hands over to. lose: ends a session and its executions; end_lost: some of them; start: runs a task.

    is_busy: told that there are live ones. link: how long a hold waits for its gateway, and gateways for a coordinator.
    """

    clock: Clock
    fleet: Fleet
    executions: ExecutionTable
    sessions: WatchedSessions
    dispatcher: Dispatcher
    standing: Callable[[Scopes], StandingView]
    finish: "TakeFinish"
    lose: Callable[[str], None]
    end_lost: Callable[[Session, Sequence[Execution]], None]
    is_busy: Callable[[], None]
    start: Callable[[Coroutine[Any, Any, None]], bool]
    link: LinkConfig


class _Kept(NamedTuple):
    """An execution that no gateway has told of. attempt and delivered_max: of its last durable step."""

    execution: Execution
    attempt: int
    delivered_max: Tokens


class _Unplaced(NamedTuple):
    """What runs on a replica that is not known here yet. lane and url: as its gateway tells them."""

    execution: Execution
    placement: Placement
    lane: int | None = None
    url: str | None = None


class Takeover:
    """One coordinator's. is_recovering: nothing is admitted, and nothing dispatched."""

    def __init__(self, parts: TakeoverParts) -> None:
        self._parts = parts
        self._kept: dict[str, _Kept] = {}  # by generation id
        self._former: dict[str, set[str]] = {}  # names of sessions that nobody has, by gateway
        self._unplaced: dict[int, _Unplaced] = {}  # by the identity of the placement
        self._strays = Strays(parts.clock, parts.fleet)
        self._in_doubt: list[_Unplaced] = []
        self._failures: dict[tuple[str, int], Callable[[], None]] = {}  # to be tried again, by session and ref
        self._deferred: deque[Callable[[], None]] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self.is_recovering = False
        parts.fleet.on_known = self._replica_is_known

    # ── beginning and end ────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, found: Sequence[OpenHold], snapshot: Snapshot) -> None:
        """Keep open holds, whose amounts the book has. Before anything is asked."""
        self.is_recovering = True
        if found:
            self._parts.is_busy()
        parts, now = self._parts, Moment(self._parts.clock.monotonic_ns(), self._parts.clock.wall_ms())
        for number, each in enumerate(found, 1):
            execution = restored(each, snapshot, -number, now)
            parts.fleet.add_pool(snapshot.pools[execution.pool])
            parts.dispatcher.expect(execution)
            parts.executions.add(execution)
            session = parts.sessions.find(execution.session) or parts.sessions.open(execution.session, NOBODY)
            session.by_ref[execution.acquire.ref] = execution
            self._former.setdefault(gateway_of(session.name), set()).add(session.name)
            self._kept[execution.acquire.generation_id] = _Kept(execution, each.attempt, each.delivered_max)
            if execution.placement is not None:
                self._has_to_be_placed(_Unplaced(execution, execution.placement))
        self._parts.dispatcher.grants_when_durable = bool(self._former)

    def begin(self) -> None:
        """Wait for gateways and replicas from now on."""
        loop = asyncio.get_running_loop()
        if self.is_recovering:
            self._timers.append(loop.call_later(RECOVERING_S, self._has_recovered))
        if self._former:
            _log.info("takes_over", requests=len(self._kept), gateways=len(self._former))
            self._timers.append(loop.call_later(self._parts.link.lease_ms / 1e3, self._give_up))
        self.look_around()

    def look_around(self) -> None:
        """It is active once nobody is waited for: no gateway, and no first replica. What is in doubt takes no work."""
        if self._in_doubt:
            self._condemn_what_is_in_doubt()
        self._strays.condemn_what_is_in_doubt()
        if self.is_recovering and not self._former and self._parts.fleet.ready_addresses():
            self._become_active()

    def close(self) -> None:
        """Wait for nobody any more."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def defer(self, session: Session, asked: Acquire, decide: Callable[[Session, Acquire], None]) -> None:
        """Decide about this once it is not recovering any more, unless its client leaves before."""
        session.asking.add(asked.ref)
        since_ns = self._parts.clock.monotonic_ns()

        def decide_now() -> None:
            if session.is_open and asked.ref in session.asking:
                session.asking.discard(asked.ref)
                decide(session, later(asked, ceil_ms_from_ns(self._parts.clock.monotonic_ns() - since_ns)))

        self._deferred.append(decide_now)

    def _has_recovered(self) -> None:
        """Every gateway that lives had its second."""
        self._end_overdue()
        if self.is_recovering:
            self._become_active()

    def _become_active(self) -> None:
        if not self._former:
            self.close()
        self.is_recovering = False
        for each in list(self._unplaced.values()):  # of gateways that were not heard: whichever lane is left
            self._try_to_place(each)
        failures, self._failures = self._failures, {}
        for take in failures.values():
            take()
        self._parts.dispatcher.schedule()
        while self._deferred:
            self._deferred.popleft()()

    def _give_up(self) -> None:
        """The lease is over: what no gateway told is lost."""
        for gateway in list(self._former):
            self._lose_former(gateway)

    def _end_overdue(self) -> None:
        """Lose what no gateway can tell any more: it ended it at its deadline, and kept its report for as long as it waits."""
        until_ns = self._parts.clock.monotonic_ns() - ns_from_ms(self._parts.link.silence_ms)
        overdue = [kept.execution for kept in self._kept.values() if kept.execution.deadline_ns <= until_ns]
        for execution in overdue:
            del self._kept[execution.acquire.generation_id]
        for execution in overdue:
            if execution.end_record is None:
                session = self._parts.sessions.find(execution.session)
                assert session is not None
                self._parts.end_lost(session, [execution])
        if overdue:
            _log.info("former_requests_overdue", lost=len(overdue))
            carrying = {kept.execution.session for kept in self._kept.values()}
            for gateway, names in list(self._former.items()):
                if not names & carrying:
                    self._lose_former(gateway)
        if self._former:
            self._timers.append(asyncio.get_running_loop().call_later(_LOOK_S, self._end_overdue))

    def _lose_former(self, gateway: str) -> None:
        """Nobody carries what is left of a gateway's earlier sessions."""
        names = self._former.pop(gateway, set())
        self._parts.dispatcher.grants_when_durable = bool(self._former)
        for name in names:
            session = self._parts.sessions.find(name)
            assert session is not None
            _log.info(
                "former_session_over", session=name, lost=sum(each.end_record is None for each in session.by_ref.values())
            )
            for execution in session.by_ref.values():
                self._kept.pop(execution.acquire.generation_id, None)
            self._parts.lose(name)
        if not self._former:
            self._kept.clear()
            self.look_around()

    # ── gateways ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def registered(self, register: Register) -> None:
        """A gateway is here: one that tells nothing again has ended what it carried."""
        if not register.reattaches:
            self._lose_former(register.gateway)
            self._lose_former(gateway_of(register.former))

    def on_reattached_all(self, session: Session, message: ReattachedAll) -> None:
        """What this gateway did not tell it does not carry."""
        session.may_tell = False
        self._lose_former(gateway_of(session.name))

    def on_reattach(self, session: Session, told: Reattach) -> None:
        """A gateway carries this request. Raises LinkFault for what no gateway of ours tells."""
        if not session.may_tell or session.has(told.acquire.ref) or not _is_possible(told):
            raise errors.LinkFault("A gateway tells what it cannot tell.")
        kept = self._kept.get(told.acquire.generation_id)
        if kept is not None and kept.execution.acquire.body_digest == told.acquire.body_digest:
            del self._kept[told.acquire.generation_id]
            self._take_over(session, told, kept)
            return
        self._strays.run(session, told)
        if not self._parts.start(self._answer_from_store(session, told.acquire)):
            session.inbox.deliver(NotHeld(told.acquire.ref, is_known=False))

    def _take_over(self, session: Session, told: Reattach, kept: _Kept) -> None:
        execution = kept.execution
        asked = as_told(execution.acquire, told.acquire)
        former = self._parts.sessions.find(execution.session)
        if former is not None:
            former.by_ref.pop(execution.acquire.ref, None)
        execution.acquire, execution.session = asked, session.name
        if not execution.end_durable:
            session.by_ref[asked.ref] = execution
        if execution.end_record is not None:
            self._strays.run(session, told)
            self._tell_end(session, execution)
            return
        now_ns = self._parts.clock.monotonic_ns()
        execution.arrived_ns = now_ns - asked.waited_ns
        execution.admitted_ns = max(execution.admitted_ns, execution.arrived_ns)  # that is by a wall clock
        execution.deadline_ns = now_ns + ns_from_ms(asked.deadline_left_ms)
        standing = self._parts.standing(execution.admit.scopes)
        session.inbox.deliver(Reattached(asked.ref, execution.id.execution, standing))
        self._leave_place(execution)
        if told.run is not None:
            self._resume(session, told, told.run, kept)
        elif told.finish is None:
            self._wait_again(execution)
        if told.finish is not None:
            self._take_finish(session, told, told.finish)
        elif execution.stop_asked is not None:
            session.inbox.deliver(StopRequest(asked.ref, execution.stop_asked))

    def _take_finish(self, session: Session, told: Reattach, finish: Finish) -> None:
        """What was reported; whether a failure is tried again is asked once replicas are known."""
        may_retry = is_retryable(finish.reason, finish.attempt, delivered=finish.delivered_tokens > 0) and not told.is_ended
        take = partial(self._parts.finish, session, finish, is_ended=told.is_ended)
        if self.is_recovering and may_retry:
            self._failures[session.name, finish.ref] = take
        else:
            take()

    def on_finish(self, session: Session, finish: Finish) -> None:
        """A gateway's report; a failure that it told of the same request comes first."""
        if self._failures and (take := self._failures.pop((session.name, finish.ref), None)) is not None:
            take()
        self._parts.finish(session, finish, is_ended=False)

    def _tell_end(self, session: Session, execution: Execution) -> None:
        """It ended while nobody carried it."""
        ref = execution.acquire.ref
        told = EndBooked if execution.end_durable else Ended
        session.inbox.deliver(told(ref, execution.public()))

    def _wait_again(self, execution: Execution) -> None:
        """It waits, in its place, whatever was dispatched unheard."""
        wait(execution)
        self._parts.dispatcher.enqueue(execution)
        if execution.stop_asked is not None:
            self._parts.dispatcher.end_waiting(execution, execution.stop_asked)
        else:
            self._parts.dispatcher.start(execution)

    def _resume(self, session: Session, told: Reattach, run: Run, kept: _Kept) -> None:
        """It runs where its gateway says."""
        execution, dispatcher = kept.execution, self._parts.dispatcher
        resume(execution, told, kept.attempt, kept.delivered_max, self._parts.clock.monotonic_ns())
        self._place(execution, told)
        if told.finish is not None:
            return  # nothing more of it is to be booked ahead
        is_booked = kept.attempt == run.attempt
        if is_booked:
            session.inbox.deliver(DeliveryBooked(execution.acquire.ref, run.attempt, kept.delivered_max))
        wanted = max(0, min(run.delivered_max, execution.admit.worst.output_tokens))
        if not is_booked or wanted > kept.delivered_max:
            dispatcher.append_step(execution, wanted)

    async def _answer_from_store(self, session: Session, asked: Acquire) -> None:
        """It has ended, or was never durable."""
        try:
            stored = await self._parts.executions.find_stored(asked.tenant, asked.request_id)
        except errors.LedgerUnavailable:
            session.inbox.deliver(NotHeld(asked.ref, is_known=False))
            return
        if stored is None or stored.record.generation_id != asked.generation_id:
            session.inbox.deliver(NotHeld(asked.ref))
        elif stored.open:  # it is held, and was given up here
            session.inbox.deliver(NotHeld(asked.ref, is_known=False))
        else:
            session.inbox.deliver(EndBooked(asked.ref, stored.record))

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stray_stopped(self, session: str, stopped: Stopped) -> None:
        """Nothing runs any more of what this coordinator never admitted, or has ended."""
        if self._strays.stopped(session, stopped):
            self._parts.dispatcher.schedule()

    def lost(self, session: str) -> None:
        """Whatever ran for a session runs no more."""
        if self._strays.lost(session):
            self._parts.dispatcher.schedule()

    def stopped(self, placement: Placement, *, confirmed: bool = True) -> None:
        """Nothing of this attempt runs any more; a replica that is not known yet and did not confirm that is in doubt."""
        placement.is_unplaced = False
        found = self._unplaced.pop(id(placement), None)
        if found is not None and not confirmed:
            self._in_doubt.append(found)

    def _condemn_what_is_in_doubt(self) -> None:
        fleet = self._parts.fleet
        for found in list(self._in_doubt):
            replica = fleet.find(found.execution.pool, found.placement.replica.name, found.url)
            if replica is not None:
                self._in_doubt.remove(found)
                fleet.condemn(replica.pool, replica.name)

    def _place(self, execution: Execution, told: Reattach) -> None:
        """What its gateway says to run gets its lanes."""
        for run in (told.earlier, told.run):
            placement = execution.placement_of(run.attempt) if run is not None else None
            if run is None or placement is None:
                continue
            if run.is_stopped:  # its name is told to nobody but a second attempt, which avoids it
                found = self._parts.fleet.find(execution.pool, run.replica.name, run.replica.url)
                placement.replica = found or placement.replica
            else:
                self._has_to_be_placed(_Unplaced(execution, placement, run.lane, run.replica.url))

    def _has_to_be_placed(self, found: _Unplaced) -> None:
        found.placement.is_unplaced = True
        self._unplaced[id(found.placement)] = found
        self._try_to_place(found)

    def _leave_place(self, execution: Execution) -> None:
        """What was supposed of where it runs is not so."""
        placement = execution.placement
        if placement is None:
            return
        self.stopped(placement)
        lane, placement.lane = placement.lane, None
        if lane is not None:
            placement.replica.free_lane(lane)
            self._parts.dispatcher.lane_freed(execution, placement)

    def _replica_is_known(self, replica: Replica, address: ReplicaAddress) -> None:
        """A supervisor named it: what runs there takes its lanes before anything else can."""
        self._strays.look_for_replicas()
        for each in list(self._unplaced.values()):
            is_there = each.placement.replica.name == address.name if each.url is None else each.url == address.url
            if is_there:
                self._try_to_place(each)

    def _try_to_place(self, found: _Unplaced) -> None:
        """Lanes that gateways name come first: until they were heard, those of others are left open."""
        execution, placement = found.execution, found.placement
        if found.lane is None and self.is_recovering:
            return
        replica = self._parts.fleet.find(execution.pool, placement.replica.name, found.url)
        if replica is not None:
            self.stopped(placement)
            self._parts.dispatcher.resume(execution, placement, replica, found.lane)


def _is_possible(told: Reattach) -> bool:
    """Whether there can be such attempts."""
    run, earlier, finish = told.run, told.earlier, told.finish
    if run is None:
        return earlier is None and (finish is None or finish.attempt == 0)
    is_second = earlier is not None and (earlier.attempt, run.attempt) == (1, ATTEMPTS_MAX)
    return (earlier is None or is_second) and (finish is None or finish.attempt in (0, run.attempt))
