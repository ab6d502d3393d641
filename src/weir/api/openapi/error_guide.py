"""What the error tree does not say of itself: each code's meaning, what to do about it, when to come again, and its members.

The document's descriptions and the page of errors are made from this, the tree (`weir.errors`) and the table of endings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from weir import errors
from weir.core.endings import ENDING_BY_REASON, EndingRule, FinishReason
from weir.errors import WeirError


class Wait(StrEnum):
    """What `Retry-After` says, where there is one."""

    NONE = "–"
    EXACT = "exact"
    ESTIMATE = "estimate"


@dataclass(frozen=True)
class Advice:
    """For whoever gets a code. members: of the refusal; an ending has its generation's record instead."""

    meaning: str
    remedy: str
    wait: Wait = Wait.NONE
    members: tuple[str, ...] = ()


_FIELD = ("field", "accepted")
_LIMIT = ("scope", "limit_name", "limit", "used", "held")
_SEND_AGAIN = "Send it again after `Retry-After`."

GUIDE: Mapping[type[WeirError], Advice] = {
    errors.InvalidRequest: Advice(
        "The body, a field or a header is not what is accepted, or this is no HTTP.",
        "Correct what `field` names, in a file at the `line`.",
        members=(*_FIELD, "line"),
    ),
    errors.UnsupportedField: Advice(
        "A field, or this value of it, is not supported here.", "Leave it out; `accepted` says what is known.", members=_FIELD
    ),
    errors.ConflictingFields: Advice("Two fields exclude each other.", "Send one of them.", members=_FIELD),
    errors.InputTooLong: Advice(
        "Input and output do not fit the context window, or no pool takes an input as long.",
        "Shorten the input or ask for less output.",
        members=("input_tokens", "limit"),
    ),
    errors.DeadlineInfeasible: Advice(
        "Not even an idle replica would begin to answer by the deadline.",
        "Give it longer: `accepted` says from when on.",
        members=(*_FIELD, "predicted_ms", "deadline_ms"),
    ),
    errors.ExceedsLimitCapacity: Advice(
        "The request needs more of a limit than the limit allows in all.",
        "Ask for less, or have the limit raised.",
        members=("limit", "scope", "needed", "capacity"),
    ),
    errors.EngineRejected: Advice(
        "The engine refused a request that Weir let through; nobody pays.", "Change the request; tell your operator."
    ),
    errors.Unauthenticated: Advice(
        "The key or token is missing, malformed, unknown or over.",
        "Send a valid one; of a token `reason` says what is wrong.",
        members=("reason",),
    ),
    errors.Forbidden: Advice("The tenant is disabled, or the credential may not do that.", "Ask your operator."),
    errors.Revoked: Advice("The key, its application or its tenant was revoked, before or while it ran.", "Get another key."),
    errors.UnknownAlias: Advice(
        "No model has this alias for this application.", "Use a name of `GET /v1/models`, in exactly that spelling."
    ),
    errors.NotFound: Advice(
        "There is nothing at this path, or no such thing of yours.",
        "Check path and id; an id that was only ever rejected has no record.",
        members=("kept", "since"),
    ),
    errors.MethodNotAllowed: Advice(
        "The path does not take this method.", "Use one of `allowed`, also in the header `Allow`.", members=("allowed",)
    ),
    errors.RequestInFlight: Advice(
        "A request with this id and body is running.",
        "Wait for it: its record shows how it goes, and a retained stream can be followed.",
        Wait.ESTIMATE,
        ("generation",),
    ),
    errors.OutputNotRetained: Advice(
        "A request with this id and body has ended, and its output was not kept, or not for so long.",
        "Read its record; use a new id to generate again, and to pay again.",
        members=("generation",),
    ),
    errors.RequestCancelled: Advice("The request was cancelled by its id.", "Nothing: somebody of yours asked for it."),
    errors.AlreadyExists: Advice(
        "The name is taken, or the same exists already.", "Choose another name, or use what is there."
    ),
    errors.NotAllowedNow: Advice(
        "What this is about is in another state, or in use.",
        "Look at it, and do first what `detail` names.",
        members=("state", "accepted", "aliases", "rollouts", "rollout", "adapters", "pool", "missing", "limit", "used"),
    ),
    errors.StreamNotRetained: Advice(
        "The events of this request were not kept, or not for so long, or were deleted.",
        "Read the record; it has everything but the output.",
        members=("generation",),
    ),
    errors.RequestTooLarge: Advice(
        "The body or the headers are above their bound.", "Send less: at most `limit_bytes`.", members=("limit_bytes",)
    ),
    errors.ArtifactRefused: Advice(
        "An artifact is not what may be served.", "Correct the folder as `reason` says.", members=("field", "reason", "file")
    ),
    errors.RequestIdReused: Advice("This request id belongs to another body.", "Use a new id for a new body."),
    errors.SignatureRefused: Advice(
        "A signature is not one to rely on.", "Sign again with a trusted key.", members=("field", "reason")
    ),
    errors.Quarantined: Advice(
        "Two replicas were lost while they ran this body; for ten minutes it is refused.", "Send another body, or none."
    ),
    errors.RequestsLimited: Advice(
        "The requests per minute of a scope are used up.", _SEND_AGAIN, Wait.EXACT, (*_LIMIT, "resets_at")
    ),
    errors.TokensLimited: Advice(
        "The tokens per minute of a scope are used up.", _SEND_AGAIN, Wait.EXACT, (*_LIMIT, "resets_at")
    ),
    errors.ConcurrencyLimited: Advice(
        "As many requests of a scope are in flight as may be.",
        "Send it again when one of them has ended.",
        Wait.ESTIMATE,
        _LIMIT,
    ),
    errors.BudgetExhausted: Advice(
        "A budget does not cover the request's worst case.",
        "Wait for `resets_at`, or have the budget raised.",
        Wait.EXACT,
        (*_LIMIT, "window", "resets_at"),
    ),
    errors.InternalError: Advice(
        "Something in Weir failed: a bug.", "Send it again with the same request id; tell your operator if it stays."
    ),
    errors.EngineError: Advice("The engine failed; nobody of yours pays.", "Send it again if it is marked so."),
    errors.ReplicaLost: Advice("The engine's process was lost; nobody of yours pays.", "Send it again if it is marked so."),
    errors.Stalled: Advice("The engine went silent; nobody of yours pays.", "Send it again if it is marked so."),
    errors.QueueFull: Advice(
        "As many requests wait as may, too many bodies or files arrive, too many readers follow retained streams, or those of"
        " the tenant that run take all of its bytes.",
        _SEND_AGAIN,
        Wait.ESTIMATE,
    ),
    errors.QueueWaitExceeded: Advice(
        "The wait is predicted to be too long, or was; the request cost nothing.", _SEND_AGAIN, Wait.ESTIMATE
    ),
    errors.DeadlineUnmeetableNow: Advice(
        "An idle replica would meet the deadline, but none is idle.",
        "Send it again after `Retry-After`, or give it longer.",
        Wait.ESTIMATE,
        ("predicted_ms", "deadline_ms"),
    ),
    errors.NoCapacity: Advice(
        "No replica of the model is ready, or none takes this service class.", _SEND_AGAIN, Wait.ESTIMATE, ("service_class",)
    ),
    errors.StreamStoreUnavailable: Advice(
        "Where streams are kept cannot be reached or written now, or what it has cannot be opened.",
        "Send it again after `Retry-After`; if it stays, tell your operator, or do without `retain`.",
        Wait.ESTIMATE,
    ),
    errors.FileStoreUnavailable: Advice(
        "Where files and batches are kept cannot be reached or written now; the outcome of a write may be unknown.",
        "Send it again after `Retry-After`, a batch with its `Idempotency-Key`; without one look at the list of batches first.",
        Wait.ESTIMATE,
    ),
    errors.ArtifactsUnavailable: Advice("Artifacts cannot be kept or read now.", "Send it again later; look at the disk."),
    errors.LedgerUnavailable: Advice(
        "The ledger cannot be written or read now; the outcome of a write may be unknown.",
        "Send it again after `Retry-After`, with the same request id.",
        Wait.ESTIMATE,
    ),
    errors.IssuerUnavailable: Advice(
        "The keys of a token's issuer cannot be had, so that nothing is known of the token.", _SEND_AGAIN, Wait.ESTIMATE
    ),
    errors.SnapshotExpired: Advice("The approved configuration could not be checked for too long.", _SEND_AGAIN, Wait.ESTIMATE),
    errors.Draining: Advice(
        "This process is about to stop and takes nothing new.", "Send it again, to another one.", Wait.ESTIMATE
    ),
    errors.CoordinatorLost: Advice(
        "No coordinator can be reached, or the one that ran the request was lost.", _SEND_AGAIN, Wait.ESTIMATE
    ),
    errors.Preempted: Advice(
        "A line of a batch gave up its place to a request that somebody waits for; its batch runs it again.",
        "Nothing: no result file shows it.",
    ),
    errors.Shutdown: Advice("The platform is shutting down.", "Send it again, to another one.", Wait.ESTIMATE),
    errors.DeadlineExceeded: Advice("The deadline passed; you pay what was delivered.", "Give it longer, or ask for less."),
    errors.BatchDamaged: Advice(
        "What the file store has of a batch is gone or damaged.",
        "Restore it while the batch has time; later, or once it is cancelled, the batch fails with this code.",
    ),
    errors.LinkFault: Advice("A link between parts broke, or was refused.", "Look at the log of both ends."),
    errors.StaleEpoch: Advice("A newer coordinator writes to this store.", "Nothing: it is how an older one learns to stop."),
    errors.StateLocked: Advice("Another process owns the state directory.", "Stop that one first."),
    errors.StateUnreadable: Advice(
        "The state directory is from another version, or damaged.", "Start the version that wrote it, or restore a backup."
    ),
}
"""One row for each leaf of the tree; a test holds it to be complete."""

INTERNAL = (errors.BatchDamaged, errors.LinkFault, errors.StaleEpoch, errors.StateLocked, errors.StateUnreadable)
"""No request is answered with them."""

MANAGEMENT_ONLY = (
    errors.AlreadyExists,
    errors.ArtifactRefused,
    errors.SignatureRefused,
    errors.ArtifactsUnavailable,
)
"""The tenant API never answers them."""

ENDINGS_ONLY = (
    errors.EngineRejected,
    errors.EngineError,
    errors.ReplicaLost,
    errors.Stalled,
    errors.DeadlineExceeded,
    errors.RequestCancelled,
    errors.Preempted,
)
"""Nothing is refused with these: an admitted request ends so."""

UNANSWERED = frozenset({FinishReason.DISCONNECT, FinishReason.SLOW_CLIENT})
"""Endings whose client is gone."""

ENDINGS: tuple[EndingRule, ...] = tuple(
    rule for reason, rule in ENDING_BY_REASON.items() if rule.error is not None and reason not in UNANSWERED
)
"""Endings that a client sees as an error."""


def codes_of(tree: tuple[type[WeirError], ...]) -> list[str]:
    """Their codes, in this order, each once."""
    return list(dict.fromkeys(error.code for error in tree))
