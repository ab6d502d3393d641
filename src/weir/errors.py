"""The whole error tree. Each class fixes its code, HTTP status, whether an SDK should retry, and whose fault it is.

    WeirError
    ├── CallerFault                      the request is wrong; the same request fails again
    │   ├── InvalidRequest               400 invalid_request        field, accepted
    │   ├── UnsupportedField             400 unsupported_field      field
    │   ├── ConflictingFields            400 conflicting_fields     field
    │   ├── InputTooLong                 400 input_too_long         input_tokens, limit
    │   ├── DeadlineInfeasible           400 deadline_infeasible    field, accepted, deadline_ms
    │   ├── ExceedsLimitCapacity         400 exceeds_limit_capacity limit, scope, needed, capacity
    │   ├── RequestTooLarge              413 request_too_large      limit_bytes
    │   ├── Unauthenticated              401 unauthenticated        reason
    │   ├── Forbidden                    403 forbidden
    │   ├── Revoked                      403 revoked
    │   ├── UnknownAlias                 404 unknown_alias
    │   ├── NotFound                     404 not_found
    │   ├── MethodNotAllowed             405 method_not_allowed     allowed
    │   ├── RequestInFlight              409 request_in_flight      generation
    │   ├── OutputNotRetained            409 output_not_retained    generation
    │   ├── AlreadyExists                409 already_exists
    │   ├── NotAllowedNow                409 not_allowed_now        state, accepted
    │   ├── StreamNotRetained            410 stream_not_retained    generation
    │   ├── ArtifactRefused              422 artifact_refused       field, reason, file
    │   ├── RequestIdReused              422 request_id_reused
    │   ├── SignatureRefused             422 signature_refused      field, reason
    │   └── Quarantined                  422 quarantined
    ├── Rejected                         admission said no; waiting may help (retry_after_ms)
    │   ├── RequestsLimited              429 requests_limited       scope, limit, used, held, reset
    │   ├── TokensLimited                429 tokens_limited
    │   ├── ConcurrencyLimited           429 concurrency_limited
    │   ├── BudgetExhausted              429 budget_exhausted
    │   ├── QueueFull                    503 queue_full
    │   ├── QueueWaitExceeded            503 queue_wait_exceeded
    │   ├── DeadlineUnmeetableNow        503 deadline_unmeetable_now
    │   ├── NoCapacity                   503 no_capacity
    │   ├── SnapshotExpired              503 snapshot_expired
    │   ├── IssuerUnavailable            503 issuer_unavailable
    │   └── Draining                     503 draining
    ├── EngineFault                      a replica failed us
    │   ├── EngineError                  502 engine_error
    │   ├── ReplicaLost                  502 replica_lost
    │   ├── Stalled                      502 stalled
    │   └── EngineRejected               400 engine_rejected        the engine refused what we let through
    ├── Expired
    │   └── DeadlineExceeded             504 deadline_exceeded
    ├── Cancelled
    │   └── RequestCancelled             409 request_cancelled
    ├── PlatformFault                    a part of Weir itself failed
    │   ├── CoordinatorLost              503 coordinator_lost
    │   ├── LinkFault                    (answers no request) a link between parts broke, or was refused
    │   ├── Preempted                    503 preempted              a batch's line made room for somebody who waits
    │   ├── Shutdown                     503 shutdown
    │   └── InternalError                500 internal_error
    └── StoreFault
        ├── ArtifactsUnavailable         503 artifacts_unavailable
        ├── BatchDamaged                 (answers no request) what is stored of a batch cannot be read, and no wait cures that
        ├── FileStoreUnavailable         503 file_store_unavailable
        ├── LedgerUnavailable            503 ledger_unavailable
        ├── StreamStoreUnavailable       503 stream_store_unavailable
        ├── StaleEpoch                   (answers no request) a newer coordinator writes
        ├── StateLocked                  (answers no request) another process owns the state directory
        └── StateUnreadable              (answers no request) the state directory is from another version or damaged

Errors are values as well as exceptions: the core returns them inside its decisions, shells raise them, `api/wire.py` is the
only place that turns one into HTTP. Messages never contain prompt or output text, keys, or another tenant's numbers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class WeirError(Exception):
    """Base of every error of ours.

    detail: one sentence for the person who gets it. members: the code's own fields (JSON values). retry_after_ms: int ≥ 0
    where waiting helps, else None.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    title: ClassVar[str] = "Something in the platform failed"
    should_retry: ClassVar[bool | None] = None  # None: leave it to the status code
    waits_exactly: ClassVar[bool] = False  # whether retry_after_ms is no estimate

    def __init__(
        self,
        detail: str = "",
        *,
        members: Mapping[str, Any] | None = None,
        retry_after_ms: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.members: Mapping[str, Any] = members or {}
        self.retry_after_ms = retry_after_ms
        self.retry_advice = self.should_retry if should_retry is None else should_retry


class CallerFault(WeirError):
    """The request is wrong; sent again unchanged it fails again."""


class InvalidRequest(CallerFault):
    code, http_status, title = "invalid_request", 400, "The request is not valid"


class UnsupportedField(CallerFault):
    code, http_status, title = "unsupported_field", 400, "This field is not supported"


class ConflictingFields(CallerFault):
    code, http_status, title = "conflicting_fields", 400, "These fields exclude each other"


class InputTooLong(CallerFault):
    code, http_status, title = "input_too_long", 400, "Input and output do not fit the context window"


class DeadlineInfeasible(CallerFault):
    code, http_status, title = "deadline_infeasible", 400, "No idle replica could meet this deadline"


class ExceedsLimitCapacity(CallerFault):
    code, http_status, title = "exceeds_limit_capacity", 400, "This request can never fit the limit"


class RequestTooLarge(CallerFault):
    code, http_status, title = "request_too_large", 413, "The body is too large"


class Unauthenticated(CallerFault):
    """reason (a `TokenFlaw`): of a token."""

    code, http_status, title = "unauthenticated", 401, "A valid credential is needed"


class Forbidden(CallerFault):
    code, http_status, title = "forbidden", 403, "This credential may not do that"


class Revoked(CallerFault):
    code, http_status, title = "revoked", 403, "This credential was revoked"


class UnknownAlias(CallerFault):
    code, http_status, title = "unknown_alias", 404, "No such model alias for this application"


class NotFound(CallerFault):
    code, http_status, title = "not_found", 404, "Not found"


class MethodNotAllowed(CallerFault):
    code, http_status, title = "method_not_allowed", 405, "This path does not take that method"


class RequestInFlight(CallerFault):
    code, http_status, title = "request_in_flight", 409, "This request id is running"


class OutputNotRetained(CallerFault):
    code, http_status, title = (
        "output_not_retained",
        409,
        "This request id has ended and its output was not kept",
    )
    should_retry = False


class AlreadyExists(CallerFault):
    code, http_status, title = "already_exists", 409, "This name is taken"
    should_retry = False


class NotAllowedNow(CallerFault):
    code, http_status, title = "not_allowed_now", 409, "What this is about is in another state"
    should_retry = False


class StreamNotRetained(CallerFault):
    code, http_status, title = "stream_not_retained", 410, "The events of this request were not kept"


class ArtifactRefused(CallerFault):
    """Its members: field, reason (an `ArtifactFlaw`) and, where it is one file's, file."""

    code, http_status, title = "artifact_refused", 422, "This artifact is not what may be served"


class RequestIdReused(CallerFault):
    code, http_status, title = "request_id_reused", 422, "This request id belongs to another body"
    should_retry = False


class SignatureRefused(CallerFault):
    """Its members: field and reason (a `SignatureFlaw`)."""

    code, http_status, title = "signature_refused", 422, "This signature is not one to rely on"


class Quarantined(CallerFault):
    code, http_status, title = "quarantined", 422, "This request crashed replicas and is refused for a while"
    should_retry = False


class Rejected(WeirError):
    """Admission said no before anything was taken."""


class RequestsLimited(Rejected):
    code, http_status, title = "requests_limited", 429, "Too many requests per minute"
    waits_exactly = True


class TokensLimited(Rejected):
    code, http_status, title = "tokens_limited", 429, "Too many tokens per minute"
    waits_exactly = True


class ConcurrencyLimited(Rejected):
    code, http_status, title = "concurrency_limited", 429, "Too many requests in flight"


class BudgetExhausted(Rejected):
    code, http_status, title = "budget_exhausted", 429, "The budget is exhausted"
    should_retry = False
    waits_exactly = True


class QueueFull(Rejected):
    code, http_status, title = "queue_full", 503, "The queue is full"


class QueueWaitExceeded(Rejected):
    code, http_status, title = "queue_wait_exceeded", 503, "The bound of waiting was reached"


class DeadlineUnmeetableNow(Rejected):
    code, http_status, title = "deadline_unmeetable_now", 503, "The deadline cannot be met now"


class NoCapacity(Rejected):
    code, http_status, title = "no_capacity", 503, "No replica is ready"


class SnapshotExpired(Rejected):
    code, http_status, title = "snapshot_expired", 503, "The approved configuration is too old to admit on"


class IssuerUnavailable(Rejected):
    code, http_status, title = "issuer_unavailable", 503, "The keys of the token's issuer cannot be had now"


class Draining(Rejected):
    code, http_status, title = "draining", 503, "This part is draining"


class EngineFault(WeirError):
    """A replica failed; the tenant pays nothing."""


class EngineError(EngineFault):
    code, http_status, title = "engine_error", 502, "The engine failed"


class ReplicaLost(EngineFault):
    """reached: False where the engine was never given the request, so that nothing of it can have run."""

    code, http_status, title = "replica_lost", 502, "The replica was lost"

    def __init__(self, detail: str = "", *, reached: bool = True, **rest: Any) -> None:
        super().__init__(detail, **rest)
        self.reached = reached


class Stalled(EngineFault):
    code, http_status, title = "stalled", 502, "The engine went silent"


class EngineRejected(EngineFault):
    code, http_status, title = "engine_rejected", 400, "The engine refused this request"


class Expired(WeirError):
    """Time ran out."""


class DeadlineExceeded(Expired):
    code, http_status, title = "deadline_exceeded", 504, "The deadline passed"
    should_retry = False


class Cancelled(WeirError):
    """Somebody who may asked us to stop."""


class RequestCancelled(Cancelled):
    code, http_status, title = "request_cancelled", 409, "The request was cancelled"
    should_retry = False


class PlatformFault(WeirError):
    """A part of Weir itself failed."""


class CoordinatorLost(PlatformFault):
    code, http_status, title = "coordinator_lost", 503, "The coordinator was lost"


class LinkFault(PlatformFault):
    """is_final: the other side will say the same again."""

    code, http_status, title = "link_fault", 500, "The link to the coordinator failed"

    def __init__(self, detail: str = "", *, is_final: bool = False, **rest: Any) -> None:
        super().__init__(detail, **rest)
        self.is_final = is_final


class Preempted(PlatformFault):
    code, http_status, title = "preempted", 503, "The request gave up its place to one that somebody waits for"


class Shutdown(PlatformFault):
    code, http_status, title = "shutdown", 503, "The platform is shutting down"


class InternalError(PlatformFault):
    code, http_status, title = "internal_error", 500, "Something in the platform failed"


class StoreFault(WeirError):
    """The store could not do what was asked."""


class ArtifactsUnavailable(StoreFault):
    code, http_status, title = "artifacts_unavailable", 503, "The artifacts cannot be kept or read now"


class FileStoreUnavailable(StoreFault):
    """Waiting a second helps."""

    code, http_status, title = "file_store_unavailable", 503, "Files cannot be kept or read now"

    def __init__(self, detail: str = "", *, retry_after_ms: int | None = 1_000, **rest: Any) -> None:
        super().__init__(detail, retry_after_ms=retry_after_ms, **rest)


class BatchDamaged(StoreFault):
    """The store was there, and what it has of a batch is gone or is not what was written. A batch may end with this code."""

    code, http_status, title = "batch_damaged", 500, "What is stored of a batch cannot be read"


class LedgerUnavailable(StoreFault):
    """not_written: the store is sure that the write took no effect; else its outcome is unknown. Waiting a second helps."""

    code, http_status, title = "ledger_unavailable", 503, "The ledger cannot be written now"

    def __init__(self, detail: str = "", *, not_written: bool = False, retry_after_ms: int | None = 1_000, **rest: Any) -> None:
        super().__init__(detail, retry_after_ms=retry_after_ms, **rest)
        self.not_written = not_written


class StaleEpoch(StoreFault):
    code, http_status, title = "stale_epoch", 500, "A newer coordinator writes to this store"


class StateLocked(StoreFault):
    code, http_status, title = "state_locked", 500, "Another process owns this state directory"


class StreamStoreUnavailable(StoreFault):
    """Waiting a second helps."""

    code, http_status, title = "stream_store_unavailable", 503, "Retained streams cannot be kept or read now"

    def __init__(self, detail: str = "", *, retry_after_ms: int | None = 1_000, **rest: Any) -> None:
        super().__init__(detail, retry_after_ms=retry_after_ms, **rest)


class StateUnreadable(StoreFault):
    code, http_status, title = "state_unreadable", 500, "This state directory cannot be read"


def _leaves(root: type[WeirError]) -> list[type[WeirError]]:
    """Every class below `root` that nothing is derived from."""
    below = root.__subclasses__()
    return [leaf for child in below for leaf in _leaves(child)] if below else [root]


ERROR_BY_CODE: Mapping[str, type[WeirError]] = {leaf.code: leaf for leaf in _leaves(WeirError)}
"""Every leaf of the tree by its code: the closed set of metric labels and documentation rows."""
