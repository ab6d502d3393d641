"""The coordinator's entry for one execution: where it is in its life, what it holds, and what it ended as.

Only the coordinator and its settler change it. It turns itself into the public record that look-ups, conflicts and endings
show.
"""

from asyncio import TimerHandle
from typing import TypeAlias

import msgspec

from weir.core.admission import Admit, Bound
from weir.core.endings import FinishReason, ending
from weir.core.ledger.records import EndRecord, ExecutionId, SettleRecord, Timing
from weir.core.ledger.reservation import Reservation
from weir.core.metering import Usage
from weir.core.registry.evidence import Arm, EvidenceWindow
from weir.core.registry.model import WorkloadClass
from weir.core.request import Admitted, Dispatched, Ended, RequestState, Streaming, is_terminal, public_status
from weir.core.routing.capacity import NOTHING, Need
from weir.core.routing.replica import Replica
from weir.core.scheduling.orders import Cost, Ticket
from weir.messages import Acquire, GenerationRecord, ended_record
from weir.units import Millis, Nanos, Tokens

_Running: TypeAlias = Dispatched | Streaming
_Shown: TypeAlias = Admitted | Ended


class Placement(msgspec.Struct):
    """Where an attempt runs or ran. lane: None once it was given back. lane_taken_ns: when it was taken.

    cached_tokens: of its input, believed to be held there. has_output: its first output came; output_ns: when that was heard,
    None where another coordinator heard it. is_unplaced: it may run, on a replica that is not known yet. is_withheld: its
    gateway hears of it once its dispatch is durable.
    """

    replica: Replica
    lane: int | None
    attempt: int
    lane_taken_ns: Nanos
    cached_tokens: Tokens = 0
    has_output: bool = False
    output_ns: Nanos | None = None
    is_unplaced: bool = False
    is_withheld: bool = False

    @property
    def holds_lane(self) -> bool:
        """Whether its replica may still run it."""
        return self.lane is not None or self.is_unplaced


class Assignment(msgspec.Struct, frozen=True):
    """What an execution is evidence of. window: of the step of a rollout at which it was admitted."""

    window: EvidenceWindow
    arm: Arm


class Execution(msgspec.Struct):
    """One admitted run of a request id. session: name of the gateway session that carries it.

    windows: the budget windows that its hold counts in. placements: of its attempts, the last one last. lost: what the
    attempt that was retried used. end_record and decided_ns: set when the end is decided. given_up: its answer was dropped
    because the store was away. predicted_wait_ms: at the door; is_hastened: because lines of batches make room for it.
    ticket: what its flow was charged, while it runs; cost: what was expected at its first dispatch, nothing cached. need:
    what it takes of a replica. assignment: None where its alias has no canary, and once it has counted.
    """

    id: ExecutionId
    acquire: Acquire
    admit: Admit
    session: str
    pool: str
    arrived_ns: Nanos
    admitted_ns: Nanos
    deadline_ns: Nanos
    state: RequestState
    reservation: Reservation
    workload: WorkloadClass
    windows: tuple[str, ...] = ()
    hold_durable: bool = False
    delivered_max: Tokens = 0
    placements: list[Placement] = []
    lost: Usage | None = None
    timer: TimerHandle | None = None
    stop_asked: FinishReason | None = None
    end_record: EndRecord | None = None
    decided_ns: Nanos = 0
    predicted_wait_ms: Millis = 0
    ticket: Ticket | None = None
    cost: Cost = 0
    need: Need = NOTHING
    is_hastened: bool = False
    assignment: Assignment | None = None
    end_durable: bool = False
    given_up: bool = False
    cancel_queries: list[tuple[str, int]] = []

    @property
    def is_ended(self) -> bool:
        """Whether its terminal status is decided."""
        return is_terminal(self.state)

    @property
    def waits_to_be_shown(self) -> bool:
        """Whether it is a whole answer whose end is decided, and shown once that is durable."""
        return self.end_record is not None and not self.is_ended and not self.given_up

    @property
    def placement(self) -> Placement | None:
        """Where its last attempt runs or ran."""
        return self.placements[-1] if self.placements else None

    def runs(self, attempt: int) -> bool:
        """Whether this attempt is the one under way: what is said of another one is late."""
        return isinstance(self.state, _Running) and self.state.attempt == attempt

    def placement_of(self, attempt: int) -> Placement | None:
        """Where one of its attempts runs or ran."""
        return next((placement for placement in self.placements if placement.attempt == attempt), None)

    @property
    def holds_lane(self) -> bool:
        """Whether an engine may still run something for it, also for an attempt that was lost."""
        return any(placement.holds_lane for placement in self.placements)

    def is_on(self, replica: str) -> bool:
        """Whether this replica may still run something for it."""
        return any(placement.holds_lane and placement.replica.name == replica for placement in self.placements)

    @property
    def waits_for_ledger_since_ns(self) -> Nanos | None:
        """Since when it cannot begin because a record is not durable: its hold, or a dispatch that has to be; None: it can."""
        if not self.hold_durable:
            return self.admitted_ns
        placement = self.placement
        return placement.lane_taken_ns if placement is not None and placement.is_withheld else None

    @property
    def key(self) -> tuple[str, str]:
        """(tenant, request id)."""
        return self.id.tenant, self.id.request_id

    def waited_ms(self, now_ns: Nanos) -> float:
        """Milliseconds since the request was read."""
        return (now_ns - self.arrived_ns) / 1e6

    def cancel_timer(self) -> None:
        """Stop watching the wait in the queue."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def public(self) -> GenerationRecord:
        """What the tenant may see of it now."""
        if self.is_ended and self.end_record is not None:
            return shown_as(self, self.end_record, posted=self.end_durable)
        return _identity(self)

    def bound(self) -> Bound:
        """What a second request with this id meets."""
        settled = self.end_record if self.is_ended and isinstance(self.end_record, SettleRecord) else None
        return Bound(
            execution=self.id.execution,
            body_digest=self.acquire.body_digest,
            status=_identity(self).status,
            delivered_tokens=settled.delivered_tokens if settled else 0,
            tenant_tokens=settled.tenant_input_tokens + settled.tenant_output_tokens if settled else 0,
            cost_microusd=settled.cost_microusd if settled else 0,
        )


def _identity(execution: Execution) -> GenerationRecord:
    state = execution.state
    assert isinstance(state, _Shown)
    return GenerationRecord(
        generation_id=execution.acquire.generation_id,
        request_id=execution.id.request_id,
        execution=execution.id.execution,
        alias=execution.acquire.alias,
        revision=execution.acquire.revision,
        status=public_status(state),
    )


def shown_as(execution: Execution, end: EndRecord, *, posted: bool) -> GenerationRecord:
    """The public record with the ledger's end record in it."""
    return ended_record(_identity(execution), end, posted=posted)


def error_code_of(reason: FinishReason) -> str | None:
    """The code that an ending shows; None for success."""
    error = ending(reason).error
    return error.code if error else None


def queue_timing(execution: Execution, now_ns: Nanos) -> Timing:
    """How long it waited for its first dispatch, if that came, and took in all."""
    dispatched_ns = execution.placements[0].lane_taken_ns if execution.placements else now_ns
    return Timing(queue_ms=execution.waited_ms(dispatched_ns), total_ms=execution.waited_ms(now_ns))
