"""How an execution's beginning and end become ledger records: what is held, who pays, what it shows. Pure.

The table of endings decides the payer; this module applies it to what a gateway reported, to a settlement that could not be
written in time, and to what recovery finds after a crash.
"""

import msgspec

from weir.coordinator.execution import Execution, error_code_of
from weir.core.endings import FinishReason, ending
from weir.core.ledger.book import Taken
from weir.core.ledger.records import BucketTake, EndRecord, HoldRecord, ReleaseRecord, SettleRecord, Timing
from weir.core.metering import Basis, Charge, Price, Usage, Worst, charge
from weir.messages import AttemptUsage, Finish
from weir.ports import OpenHold
from weir.units import Millis, Tokens

DETAIL_CHARS_MAX = 500


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """An end with its amounts: what was used, what was delivered, what is charged."""

    reason: FinishReason
    usage: Usage
    delivered_tokens: Tokens
    charge: Charge


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """A record's number and wall-clock time."""

    seq: int
    at_ms: Millis


def hold_record(execution: Execution, stamp: Stamp, taken: Taken) -> HoldRecord:
    """The beginning of an execution: everything that was taken for it."""
    asked, admit = execution.acquire, execution.admit
    return HoldRecord(
        seq=stamp.seq,
        at_ms=stamp.at_ms,
        id=execution.id,
        generation_id=asked.generation_id,
        body_digest=asked.body_digest,
        application=asked.application,
        key=asked.key,
        alias=asked.alias,
        revision=asked.revision,
        pool=execution.pool,
        service_class=asked.service_class,
        workload_class=asked.workload_class,
        surface=asked.surface,
        stream=asked.stream,
        input_tokens=asked.input_tokens,
        input_basis=asked.input_basis,
        max_output_tokens=asked.max_output_tokens,
        choices=asked.choices,
        price_version=admit.price.version,
        held_microusd=admit.worst.cost_microusd,
        windows=taken.windows,
        takes=taken.takes,
        deadline_at_ms=stamp.at_ms + asked.deadline_left_ms,
        gateway_session=execution.session,
    )


_TOKENS_MAX: Tokens = 2**31 - 1
"""More than any window holds: what an engine reports above it is no measurement, and sums must fit the store's integers."""


def outcome_of(finish: Finish, worst: Worst, price: Price) -> Outcome:
    """Who pays what for an end that the gateway reported. price: of the request's service class."""
    usage, absurd = sane_usage(finish.usage)
    delivered = min(max(0, finish.delivered_tokens), worst.output_tokens)
    due = charge(ending(finish.reason), usage, delivered, worst, price)
    return Outcome(finish.reason, usage, delivered, msgspec.structs.replace(due, clamped=True) if absurd else due)


def sane_usage(reported: AttemptUsage | None) -> tuple[Usage, bool]:
    """Usage as reported, with what cannot be (negative, absurdly large, more cached than input) clamped; whether any was."""
    if reported is None:
        return Usage(0, 0, 0, Basis.ESTIMATED), False
    input_tokens = min(max(0, reported.input_tokens), _TOKENS_MAX)
    cached = min(max(0, reported.cached_input_tokens), input_tokens)
    output_tokens = min(max(0, reported.output_tokens), _TOKENS_MAX)
    given = (reported.input_tokens, reported.cached_input_tokens, reported.output_tokens)
    return Usage(input_tokens, cached, output_tokens, reported.basis), given != (input_tokens, cached, output_tokens)


def settle_record(
    execution: Execution, outcome: Outcome, stamp: Stamp, returns: tuple[BucketTake, ...], timing: Timing, detail: str | None
) -> SettleRecord:
    """The end of an execution that was dispatched."""
    placement = execution.placement
    assert placement is not None
    return SettleRecord(
        seq=stamp.seq,
        at_ms=stamp.at_ms,
        id=execution.id,
        attempt=placement.attempt,
        replica=placement.replica.name,
        status=ending(outcome.reason).status,
        finish_reason=outcome.reason,
        basis=outcome.usage.basis,
        input_tokens=outcome.usage.input_tokens,
        cached_input_tokens=outcome.usage.cached_input_tokens,
        output_tokens=outcome.usage.output_tokens,
        delivered_tokens=outcome.delivered_tokens,
        tenant_input_tokens=outcome.charge.tenant_input_tokens,
        tenant_cached_input_tokens=outcome.charge.tenant_cached_input_tokens,
        tenant_output_tokens=outcome.charge.tenant_output_tokens,
        cost_microusd=outcome.charge.cost_microusd,
        platform_microusd=outcome.charge.platform_microusd,
        returns=returns,
        timing=timing,
        error_code=error_code_of(outcome.reason),
        error_detail=detail[:DETAIL_CHARS_MAX] if detail else None,
    )


def release_record(
    execution: Execution, reason: FinishReason, stamp: Stamp, returns: tuple[BucketTake, ...], timing: Timing
) -> ReleaseRecord:
    """The end of an execution that was never dispatched."""
    return ReleaseRecord(
        seq=stamp.seq,
        at_ms=stamp.at_ms,
        id=execution.id,
        status=ending(reason).status,
        finish_reason=reason,
        returns=returns,
        timing=timing,
        error_code=error_code_of(reason),
    )


def finish_of_lost(execution: Execution) -> Finish:
    """How an execution that runs ends as its gateway is lost: as after a crash, input and all that was booked, unpaid."""
    placement = execution.placement
    assert placement is not None
    used = AttemptUsage(execution.admit.worst.input_tokens, 0, execution.delivered_max, Basis.UNCERTAIN)
    ref, reason = execution.acquire.ref, FinishReason.COORDINATOR_LOST
    return Finish(ref, placement.attempt, reason, execution.delivered_max, used)


def recovery_record(found: OpenHold, price: Price, stamp: Stamp) -> EndRecord:
    """How a hold without settlement ends after a crash: released if never dispatched, else the platform's, uncertain.

    price: of the version that it pinned, and of its service class.
    """
    reason = FinishReason.COORDINATOR_LOST
    rule = ending(reason)
    hold = found.hold
    if found.replica is None:
        return ReleaseRecord(stamp.seq, stamp.at_ms, hold.id, rule.status, reason, (), Timing(), error_code_of(reason))
    input_tokens = hold.input_tokens * hold.choices
    platform_microusd = price.cost(input_tokens, 0, found.delivered_max)
    if found.attempt > 1:  # what the attempt used that was retried, as far as it was booked
        platform_microusd += price.cost(input_tokens, 0, found.lost_delivered_max)
    return SettleRecord(
        seq=stamp.seq,
        at_ms=stamp.at_ms,
        id=hold.id,
        attempt=found.attempt,
        replica=found.replica,
        status=rule.status,
        finish_reason=reason,
        basis=Basis.UNCERTAIN,
        input_tokens=input_tokens,
        cached_input_tokens=0,
        output_tokens=found.delivered_max,
        delivered_tokens=found.delivered_max,
        tenant_input_tokens=0,
        tenant_cached_input_tokens=0,
        tenant_output_tokens=0,
        cost_microusd=0,
        platform_microusd=platform_microusd,
        returns=(),
        timing=Timing(),
        error_code=error_code_of(reason),
    )
