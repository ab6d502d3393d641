"""How a request can end: one table for status, HTTP, retry, payer and availability.

This is the table "Endings" of the API reference as data. Nothing else decides who pays for an ending or which HTTP status it
shows; a test compares this table with the documentation row by row.
"""

from dataclasses import dataclass
from enum import StrEnum

from weir import errors


class Status(StrEnum):
    """Terminal statuses of an admitted request, and the two that it has before."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a request ended; a closed set, used as a metric label."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CLIENT = "client"
    DISCONNECT = "disconnect"
    SLOW_CLIENT = "slow_client"
    REVOKED = "revoked"
    QUEUE_WAIT = "queue_wait"
    DEADLINE = "deadline"
    ENGINE_ERROR = "engine_error"
    REPLICA_LOST = "replica_lost"
    STALLED = "stalled"
    NO_CAPACITY = "no_capacity"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    COORDINATOR_LOST = "coordinator_lost"
    SHUTDOWN = "shutdown"
    PREEMPTED = "preempted"
    QUARANTINED = "quarantined"
    ENGINE_REJECTED = "engine_rejected"


class Payer(StrEnum):
    """Who pays for what was used by an ended request."""

    TENANT_GENERATED = "tenant, what was generated"
    TENANT_DELIVERED = "tenant, what was delivered"
    PLATFORM = "platform"
    NOBODY = "nobody"


class Availability(StrEnum):
    """How an ending counts in availability = good ÷ (good + bad)."""

    GOOD = "good"
    BAD = "bad"
    NOT_COUNTED = "not_counted"


@dataclass(frozen=True, slots=True)
class EndingRule:
    """One row of the table. error: the class whose code and HTTP status show it when no header was sent; None for success."""

    status: Status
    reason: FinishReason
    error: type[errors.WeirError] | None
    payer: Payer
    availability: Availability
    retry_if_nothing_generated: bool = False
    native_http_status: int | None = None

    @property
    def http_status(self) -> int:
        """HTTP status on native paths if the headers were not sent."""
        if self.native_http_status is not None:
            return self.native_http_status
        return self.error.http_status if self.error else 200

    @property
    def compatible_http_status(self) -> int:
        """HTTP status on OpenAI- and Anthropic-compatible paths if the headers were not sent."""
        return self.error.http_status if self.error else 200


def _completed(reason: FinishReason) -> EndingRule:
    return EndingRule(Status.COMPLETED, reason, None, Payer.TENANT_GENERATED, Availability.GOOD)


def _failed(reason: FinishReason, error: type[errors.WeirError]) -> EndingRule:
    return EndingRule(Status.FAILED, reason, error, Payer.PLATFORM, Availability.BAD, retry_if_nothing_generated=True)


def _cancelled(reason: FinishReason, error: type[errors.WeirError], *, native_http_status: int | None = None) -> EndingRule:
    return EndingRule(
        Status.CANCELLED,
        reason,
        error,
        Payer.TENANT_GENERATED,
        Availability.NOT_COUNTED,
        native_http_status=native_http_status,
    )


_ROWS = (
    _completed(FinishReason.STOP),
    _completed(FinishReason.LENGTH),
    _completed(FinishReason.TOOL_CALLS),
    _completed(FinishReason.CONTENT_FILTER),
    _cancelled(FinishReason.CLIENT, errors.RequestCancelled, native_http_status=200),
    _cancelled(FinishReason.DISCONNECT, errors.RequestCancelled),
    _cancelled(FinishReason.SLOW_CLIENT, errors.RequestCancelled),
    _cancelled(FinishReason.REVOKED, errors.Revoked),
    EndingRule(
        Status.EXPIRED,
        FinishReason.QUEUE_WAIT,
        errors.QueueWaitExceeded,
        Payer.NOBODY,
        Availability.BAD,
        True,
    ),
    # Before dispatch nothing was delivered, so the delivered part that the tenant pays is nothing: one row serves both phases.
    EndingRule(
        Status.EXPIRED,
        FinishReason.DEADLINE,
        errors.DeadlineExceeded,
        Payer.TENANT_DELIVERED,
        Availability.BAD,
    ),
    _failed(FinishReason.ENGINE_ERROR, errors.EngineError),
    _failed(FinishReason.REPLICA_LOST, errors.ReplicaLost),
    _failed(FinishReason.STALLED, errors.Stalled),
    _failed(FinishReason.NO_CAPACITY, errors.NoCapacity),
    _failed(FinishReason.LEDGER_UNAVAILABLE, errors.LedgerUnavailable),
    _failed(FinishReason.COORDINATOR_LOST, errors.CoordinatorLost),
    _failed(FinishReason.SHUTDOWN, errors.Shutdown),
    # Only what agreed to it ends so, and runs again by itself.
    EndingRule(Status.FAILED, FinishReason.PREEMPTED, errors.Preempted, Payer.PLATFORM, Availability.NOT_COUNTED, True),
    EndingRule(Status.FAILED, FinishReason.QUARANTINED, errors.Quarantined, Payer.PLATFORM, Availability.BAD),
    EndingRule(
        Status.FAILED,
        FinishReason.ENGINE_REJECTED,
        errors.EngineRejected,
        Payer.NOBODY,
        Availability.NOT_COUNTED,
    ),
)

ENDING_BY_REASON: dict[FinishReason, EndingRule] = {row.reason: row for row in _ROWS}
"""A finish reason names its row, and its status: no reason belongs to two statuses."""


def ending(reason: FinishReason) -> EndingRule:
    """The row for a finish reason."""
    return ENDING_BY_REASON[reason]
