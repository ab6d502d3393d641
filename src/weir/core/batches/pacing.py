"""What becomes of a line that was refused or that failed: it waits, its batch pauses, or it is given up as it is.

A refusal that waiting cures never becomes a line's error; the batch's own end bounds the wait. What would fail the same way
again is given up at once, and what may be the engine's or the line's fault after a few executions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from weir import errors
from weir.core.endings import FinishReason, Status, ending
from weir.units import Millis, Tokens

EXECUTIONS_MAX: Final = 3
"""Of a line whose failures may be its own."""
FIRST_WAIT_MS: Millis = 200
LONGEST_WAIT_MS: Millis = 10_000
"""Where no refusal says for how long: short against a batch's hours, long against a request's work."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again so much later. ms ≥ 1."""

    ms: Millis


@dataclass(frozen=True, slots=True)
class Pause:
    """The whole batch waits. reason: the refusal's code; resumes_ms: wall time, None where no clock says."""

    reason: str
    resumes_ms: Millis | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """What was said last is the line's error."""


After: TypeAlias = Wait | Pause | GiveUp

_GIVES_UP = frozenset(
    error.code
    for error in (
        errors.InvalidRequest,
        errors.UnsupportedField,
        errors.ConflictingFields,
        errors.InputTooLong,
        errors.DeadlineInfeasible,
        errors.ExceedsLimitCapacity,
        errors.RequestTooLarge,
        errors.Unauthenticated,
        errors.Forbidden,
        errors.Revoked,
        errors.UnknownAlias,
        errors.NotFound,
        errors.MethodNotAllowed,
        errors.OutputNotRetained,
        errors.AlreadyExists,
        errors.NotAllowedNow,
        errors.StreamNotRetained,
        errors.ArtifactRefused,
        errors.RequestIdReused,
        errors.SignatureRefused,
        errors.Quarantined,
        errors.EngineRejected,
        errors.RequestCancelled,
    )
)
_OWN_FAULT_PERHAPS = frozenset(error.code for error in (errors.EngineError, errors.Stalled, errors.DeadlineExceeded))

_ENDS_GIVEN_UP = frozenset({FinishReason.ENGINE_REJECTED, FinishReason.QUARANTINED, FinishReason.CLIENT, FinishReason.REVOKED})
_ENDS_TRIED_AGAIN = frozenset(
    {FinishReason.ENGINE_ERROR, FinishReason.STALLED, FinishReason.DEADLINE, FinishReason.SLOW_CLIENT}
)


def after_refusal(code: str, retry_after_ms: Millis | None, members: Mapping[str, Any], refusals: int) -> After:
    """What follows a refusal. code: of `errors`; members: its fields as shown; refusals ≥ 1: of this line in a row.

    A budget pauses the batch until it resets. Whatever has a Retry-After waits for that, and so does everything else that is
    not known to fail again.
    """
    if code == errors.BudgetExhausted.code:
        return Pause(code, _wall_ms(members.get("resets_at")))
    if retry_after_ms is not None:
        return Wait(max(1, retry_after_ms))
    if code in _GIVES_UP or (code in _OWN_FAULT_PERHAPS and refusals >= EXECUTIONS_MAX):
        return GiveUp()
    return _growing(refusals)


def after_failure(reason: FinishReason, executions: int) -> After:
    """What follows an execution that was admitted and did not complete. executions ≥ 1: of this line, and not in vain.

    A worker that left (`disconnect`) is no fault of the line's, nor is one that made room (`preempted`), nor a replica that was
    lost: where the line is to blame its quarantine says so.
    """
    assert ending(reason).status is not Status.COMPLETED
    if reason in _ENDS_GIVEN_UP or (reason in _ENDS_TRIED_AGAIN and executions >= EXECUTIONS_MAX):
        return GiveUp()
    return _growing(executions)


def was_in_vain(reason: FinishReason, output_tokens: Tokens) -> bool:
    """Whether an execution says nothing of the line: its time was over in a queue, or it made room for somebody else."""
    return reason is FinishReason.PREEMPTED or (reason is FinishReason.DEADLINE and not output_tokens)


def _growing(times: int) -> Wait:
    """Twice as long each time, up to a bound."""
    doublings = min(max(0, times - 1), LONGEST_WAIT_MS.bit_length())
    return Wait(min(FIRST_WAIT_MS << doublings, LONGEST_WAIT_MS))


def _wall_ms(shown: object) -> Millis | None:
    """A time as refusals show it, RFC 3339, rounded up to a millisecond; None for anything else."""
    try:
        moment = datetime.fromisoformat(shown) if isinstance(shown, str) else None
    except ValueError:
        return None
    if moment is None or moment.tzinfo is None:
        return None
    return -((_EPOCH - moment) // timedelta(milliseconds=1))
