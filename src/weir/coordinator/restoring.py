"""Executions as an earlier coordinator left them: built from their records, and from what their gateways tell. Pure.

Nothing here counts or holds: the book, the lanes and the queues are the coordinator's.
"""

import msgspec

from weir.coordinator.execution import Execution, Placement
from weir.coordinator.ledger_entries import sane_usage
from weir.core.admission import Admit
from weir.core.ledger.records import HoldRecord
from weir.core.ledger.reservation import Held
from weir.core.metering import Basis, Price, Usage, Worst
from weir.core.registry.snapshot import Snapshot
from weir.core.request import Dispatched, Queued, Streaming
from weir.core.routing.replica import Replica, ReplicaLimits
from weir.core.tenancy import Scopes, scopes_of
from weir.messages import Acquire, Reattach, Run
from weir.ports import OpenHold
from weir.units import Moment, Nanos, Tokens, ms_from_ns, ns_from_ms


def worst_of(hold: HoldRecord) -> Worst:
    """What a hold set aside."""
    return Worst(hold.input_tokens * hold.choices, hold.max_output_tokens * hold.choices, hold.held_microusd)


def scopes_of_hold(hold: HoldRecord) -> Scopes:
    """Whom a hold counts against."""
    return scopes_of(hold.id.tenant, hold.application, hold.key, hold.alias, hold.service_class)


def price_of_hold(hold: HoldRecord, snapshot: Snapshot) -> Price:
    """What a hold settles by: the version that it pinned, for its service class. Raises KeyError."""
    return snapshot.price_of(hold.revision, hold.price_version).of(hold.service_class)


def restored(found: OpenHold, snapshot: Snapshot, ref: int, now: Moment) -> Execution:
    """An open hold as an execution. ref: of the session that carried it, stands for what its gateway called it.

    One that was never dispatched waits; of another one it is not known whether output was handed out.
    """
    hold = found.hold
    asked = _asked(hold, ref, now)
    admitted_ns = now.monotonic_ns - asked.waited_ns
    execution = Execution(
        id=hold.id,
        acquire=asked,
        admit=_admitted(hold, snapshot),
        session=hold.gateway_session,
        pool=hold.pool,
        arrived_ns=admitted_ns,
        admitted_ns=admitted_ns,
        deadline_ns=now.monotonic_ns + ns_from_ms(asked.deadline_left_ms),
        state=Queued(ms_from_ns(admitted_ns), ms_from_ns(admitted_ns)),
        reservation=Held(worst_of(hold)),
        workload=snapshot.workload_class(hold.workload_class),
        windows=hold.windows,
        hold_durable=True,
        delivered_max=found.delivered_max,
    )
    if found.replica is not None:
        place(execution, Placement(unknown_replica(found.replica, hold.pool), None, found.attempt, now.monotonic_ns))
        execution.lost = _lost(execution, found.lost_delivered_max) if found.attempt > 1 else None
    return execution


def _admitted(hold: HoldRecord, snapshot: Snapshot) -> Admit:
    revision, price = snapshot.revisions[hold.revision], price_of_hold(hold, snapshot)
    return Admit(hold.id.execution, revision, price, scopes_of_hold(hold), worst_of(hold))


def _asked(hold: HoldRecord, ref: int, now: Moment) -> Acquire:
    """The question as far as it was written down: of the input only the tokens."""
    return Acquire(
        ref=ref,
        request_id=hold.id.request_id,
        request_id_given=True,
        generation_id=hold.generation_id,
        body_digest=hold.body_digest,
        tenant=hold.id.tenant,
        application=hold.application,
        key=hold.key,
        service_class=hold.service_class,
        workload_class=hold.workload_class,
        alias=hold.alias,
        revision=hold.revision,
        surface=hold.surface,
        stream=hold.stream,
        input_tokens=hold.input_tokens,
        input_basis=hold.input_basis,
        input_bytes=0,
        max_output_tokens=hold.max_output_tokens,
        choices=hold.choices,
        deadline_left_ms=hold.deadline_at_ms - now.wall_ms,
        waited_ns=ns_from_ms(max(0, now.wall_ms - hold.at_ms)),  # a wall clock that stepped back makes it new
    )


def as_told(stored: Acquire, told: Acquire) -> Acquire:
    """The question with what only its gateway knows; whose it is and what it may cost stays as it was written down."""
    return msgspec.structs.replace(
        stored,
        ref=told.ref,
        request_id_given=told.request_id_given,
        input_bytes=told.input_bytes,
        deadline_left_ms=told.deadline_left_ms,
        waited_ns=max(0, told.waited_ns),
        session_key=told.session_key,
        prefix=told.prefix,
        yields=told.yields,
    )


def unknown_replica(name: str, pool: str) -> Replica:
    """Stands for a replica that no supervisor has named so far: it has no lanes that anybody could be given."""
    return Replica(name, pool, ReplicaLimits(1))


def _lost(execution: Execution, delivered_max: Tokens) -> Usage:
    """What an attempt used that was retried, as far as it was booked."""
    return Usage(execution.admit.worst.input_tokens, 0, delivered_max, Basis.UNCERTAIN)


def place(execution: Execution, placement: Placement, *, is_streaming: bool = False) -> None:
    """It runs its last attempt there. is_streaming: output was handed to its client."""
    state, dispatched_ms = execution.state, ms_from_ns(placement.lane_taken_ns)
    assert isinstance(state, Queued | Dispatched | Streaming)
    execution.placements.append(placement)
    execution.state = Dispatched(state.arrived_ms, state.admitted_ms, dispatched_ms, placement.attempt, placement.replica.name)
    if is_streaming:
        execution.state = Streaming(
            state.arrived_ms, state.admitted_ms, dispatched_ms, placement.attempt, placement.replica.name, dispatched_ms
        )


def wait(execution: Execution) -> None:
    """It was granted nothing that its gateway heard of: whatever was dispatched runs nowhere."""
    state = execution.state
    assert isinstance(state, Queued | Dispatched)
    execution.placements = []
    execution.state = Queued(state.arrived_ms, state.admitted_ms)
    execution.lost, execution.delivered_max = None, 0


def resume(execution: Execution, told: Reattach, attempt: int, delivered_max: Tokens, now_ns: Nanos) -> None:
    """It runs, or ran, as its gateway tells. attempt and delivered_max: of its last durable step, 0 where there is none."""
    assert told.run is not None
    run, pool = told.run, execution.pool
    execution.placements = [] if told.earlier is None else [placement_of(told.earlier, pool, now_ns)]
    place(execution, placement_of(run, pool, now_ns), is_streaming=run.first_output)
    if run.attempt == 1:
        execution.lost = None
    elif told.lost is not None:
        execution.lost, _ = sane_usage(told.lost)
    elif attempt < run.attempt:  # the dispatch of the second was not durable: this is what is known of the first
        execution.lost = _lost(execution, delivered_max)
    execution.delivered_max = delivered_max if attempt == run.attempt else 0


def placement_of(run: Run, pool: str, now_ns: Nanos) -> Placement:
    """Where a gateway says that an attempt runs, on a lane that it does not have yet."""
    replica = unknown_replica(run.replica.name, pool)
    return Placement(replica, None, run.attempt, now_ns - max(0, run.since_ns), has_output=run.has_output)
