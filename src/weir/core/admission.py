"""The one admission step: every check in order, the first failure is the answer, nothing is taken until all pass.

    entitlement and revision → idempotency → quarantine → limits → queue bounds → capacity and feasibility

(Authentication, input and context were checked by the gateway, which alone sees the prompt.) The decision is a value; the
coordinator takes buckets, concurrency, hold and queue place in the same synchronous step.
"""

from bisect import bisect_left
from typing import TypeAlias

import msgspec

from weir import errors
from weir.core.endings import Status
from weir.core.ledger.book import Book
from weir.core.metering import Price, Worst, worst_case
from weir.core.registry.model import Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Principal, Scopes, scopes_of
from weir.units import Bytes, Millis, Moment, Tokens

EVIDENCE_HALF_LIFE_MS: Millis = 10_000
"""Of what was measured of replicas, towards what is assumed without it."""
_FADES_IN_HALF_LIVES = 10
"""A thousandth is left."""
_ROUNDED_MS: Millis = 2
"""Both parts of a time are rounded down."""


class Asked(msgspec.Struct, frozen=True, gc=False):
    """What a gateway asks a grant for. input_tokens and max_output_tokens are per choice; deadline_ms: time left.

    is_quarantined: this body crashed two replicas lately.
    """

    principal: Principal
    alias: str
    revision: str
    body_digest: bytes
    input_tokens: Tokens
    input_bytes: Bytes
    max_output_tokens: Tokens
    choices: int
    deadline_ms: Millis
    is_quarantined: bool = False


class Bound(msgspec.Struct, frozen=True, gc=False):
    """The latest execution under this request id. tenant_tokens and cost_microusd: what its tenant was charged."""

    execution: int
    body_digest: bytes
    status: Status
    delivered_tokens: Tokens
    tenant_tokens: Tokens
    cost_microusd: int
    forgotten: bool = False  # it ended so long ago that its id is free again

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.status in (Status.QUEUED, Status.RUNNING)

    @property
    def may_run_again(self) -> bool:
        """It ended, did not complete, delivered nothing and cost the tenant nothing."""
        was_used = self.delivered_tokens or self.tenant_tokens or self.cost_microusd
        return not self.is_running and self.status is not Status.COMPLETED and not was_used


class Times(msgspec.Struct, frozen=True, gc=False):
    """How long it takes from its start, 0 while unknown. prefill_ms: to its first output; decode_ms: from there to its end.

    Both as replicas are now, and for an answer of the expected length. idle_ms: both together on an idle replica;
    idle_prefill_ms: to the first output there; least_ms: the best that this may be.
    """

    prefill_ms: Millis = 0
    decode_ms: Millis = 0
    idle_ms: Millis = 0
    least_ms: Millis = 0
    idle_prefill_ms: Millis = 0

    def total_ms(self, deadline_ms: Millis) -> Millis:
        """From its start to what its deadline has to cover.

        Where an answer of the expected length would be late on an idle replica too, only its beginning counts: it may be short,
        and no wait would cure it.
        """
        return self.prefill_ms + (self.decode_ms if self.idle_ms < deadline_ms else 0)

    def settled_ms(self, deadline_ms: Millis) -> Millis:
        """The same on an idle replica."""
        return self.idle_ms if self.idle_ms < deadline_ms else self.idle_prefill_ms

    def faded_ms(self, deadline_ms: Millis, later_ms: Millis) -> float:
        """The same, at most, so much later if nothing is observed until then: towards what it is on an idle replica."""
        excess_ms = self.total_ms(deadline_ms) - self.settled_ms(deadline_ms)
        kept: float = 0.5 ** (later_ms / EVIDENCE_HALF_LIFE_MS)
        return self.settled_ms(deadline_ms) + excess_ms * kept + (_ROUNDED_MS if excess_ms > 0 else 0)


class Door(msgspec.Struct, frozen=True, gc=False):
    """The scheduling domain as a newcomer meets it. lanes: of ready replicas; queue_refusal: the queue's own answer.

    no_capacity_retry_ms: when a replica is expected, used while lanes is 0. times: what its deadline is compared with.
    """

    lanes: int
    queue_refusal: errors.WeirError | None
    predicted_wait_ms: Millis
    wait_ms_max: Millis
    times: Times
    no_capacity_retry_ms: Millis


class Admit(msgspec.Struct, frozen=True, gc=False):
    """Take all of this now. execution: 1, or one above the bound one that may run again.

    price: of its service class, by the version that its hold pins; all that it ever costs is by this one.
    """

    execution: int
    revision: Revision
    price: Price
    scopes: Scopes
    worst: Worst


Decision: TypeAlias = Admit | errors.WeirError


def decide(asked: Asked, snapshot: Snapshot, bound: Bound | None, book: Book, door: Door, now: Moment) -> Decision:
    """Admit, or the first refusal. Changes nothing."""
    try:
        snapshot.check_standing(asked.principal)
        snapshot.usable_alias(asked.principal, asked.alias)
    except errors.WeirError as not_entitled:
        return not_entitled
    revision = snapshot.revisions.get(asked.revision)
    if revision is None or not snapshot.is_entitled(asked.principal, revision.id):
        return errors.UnknownAlias("The revision behind this alias is not live any more.")
    if bound is not None and (refusal := idempotency_refusal(asked.body_digest, bound)) is not None:
        return refusal
    if asked.is_quarantined:
        return errors.Quarantined("Two replicas were lost while they ran this request; it is refused for a while.")
    principal = asked.principal
    scopes = scopes_of(principal.tenant, principal.application, principal.key, asked.alias, principal.service_class)
    price = revision.price.of(principal.service_class)
    worst = worst_case(price, asked.input_tokens, asked.max_output_tokens, asked.choices)
    refused = book.check(scopes, worst, now) or door_refusal(door, asked.deadline_ms)
    return refused or Admit(bound.execution + 1 if bound else 1, revision, price, scopes, worst)


def idempotency_refusal(body_digest: bytes, bound: Bound) -> errors.WeirError | None:
    """What a bound request id answers, or None if the id may run again."""
    if bound.forgotten:
        return None
    if bound.body_digest != body_digest:
        return errors.RequestIdReused("This request id was used with another body.")
    if bound.is_running:
        return errors.RequestInFlight("A request with this id is running.", retry_after_ms=1_000)
    if bound.may_run_again:
        return None
    return errors.OutputNotRetained("A request with this id has ended and its output was not kept.")


def door_refusal(door: Door, deadline_ms: Millis) -> errors.WeirError | None:
    """What no wait would cure, then queue bounds, capacity, and the predicted wait against its bound and the deadline."""
    times, left_ms = door.times, max(0, deadline_ms)
    if times.least_ms >= deadline_ms and times.least_ms:
        return errors.DeadlineInfeasible(
            f"An idle replica would begin to answer in {times.least_ms} ms at best, and the request must end in {left_ms} ms.",
            members={
                "field": "deadline_ms",
                "accepted": f"above {times.least_ms}",
                "predicted_ms": times.least_ms,
                "deadline_ms": left_ms,
            },
        )
    if door.queue_refusal is not None:
        return door.queue_refusal
    if door.lanes == 0:
        return errors.NoCapacity("No replica of this model is ready.", retry_after_ms=door.no_capacity_retry_ms)
    wait_ms = door.predicted_wait_ms
    if wait_ms > door.wait_ms_max:
        return errors.QueueWaitExceeded(
            f"The predicted wait of {wait_ms} ms is above the bound of {door.wait_ms_max} ms.",
            retry_after_ms=wait_ms - door.wait_ms_max,
        )
    predicted_ms = wait_ms + times.total_ms(deadline_ms)
    if predicted_ms >= deadline_ms:
        return errors.DeadlineUnmeetableNow(
            f"The request is predicted to take {predicted_ms} ms and must end in {left_ms} ms.",
            members={"predicted_ms": predicted_ms, "deadline_ms": left_ms},
            retry_after_ms=_in_time_again_ms(wait_ms, times, deadline_ms),
        )
    return None


def _in_time_again_ms(wait_ms: Millis, times: Times, deadline_ms: Millis) -> Millis:
    """When a request that would be late now is predicted to be in time, at least 1.

    If nobody else comes the wait passes, and evidence of slow replicas fades. Where it would be late on an idle replica too it
    is by how much it is late: the best case says that it may be in time.
    """

    def is_in_time(later_ms: Millis) -> bool:
        return max(0, wait_ms - later_ms) + times.faded_ms(deadline_ms, later_ms) < deadline_ms

    if times.settled_ms(deadline_ms) >= deadline_ms:
        return wait_ms + times.total_ms(deadline_ms) - deadline_ms + 1
    return 1 + bisect_left(range(1, wait_ms + _FADES_IN_HALF_LIVES * EVIDENCE_HALF_LIFE_MS), True, key=is_in_time)
