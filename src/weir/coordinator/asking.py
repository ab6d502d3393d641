"""A gateway's request for a grant, as admission sees it, the pools that may take it, and a refusal as its gateway does."""

from weir import errors
from weir.coordinator.fleet import Fleet, PoolView
from weir.coordinator.sessions import Session
from weir.core.admission import Asked
from weir.core.metering import InputBasis
from weir.core.registry.model import Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.pools import accepting
from weir.core.tenancy import Principal
from weir.messages import Acquire, GenerationRecord, Rejected, StandingView


def question_of(acquire: Acquire, *, is_quarantined: bool) -> Asked:
    """What admission is asked about it."""
    principal = Principal(acquire.tenant, acquire.application, acquire.key, acquire.service_class)
    return Asked(
        principal=principal,
        alias=acquire.alias,
        revision=acquire.revision,
        body_digest=acquire.body_digest,
        input_tokens=acquire.input_tokens,
        input_bytes=acquire.input_bytes,
        max_output_tokens=acquire.max_output_tokens,
        choices=acquire.choices,
        deadline_ms=acquire.deadline_left_ms,
        is_quarantined=is_quarantined,
    )


def check_asked(asked: Acquire, session: Session, snapshot: Snapshot) -> None:
    """Raises LinkFault for what no gateway of ours asks: none lets it in that is not in the snapshot."""
    is_known = (asked.tenant, asked.application) in snapshot.applications and asked.tenant in snapshot.tenants
    has_class = any(row.name == asked.workload_class for row in snapshot.workload_classes)
    if session.has(asked.ref) or not (is_known and has_class):
        raise errors.LinkFault("A gateway asks for what it cannot ask.")


def takers_of(asked: Acquire, fleet: Fleet, snapshot: Snapshot) -> tuple[list[PoolView], Revision]:
    """The pools that may take it, one or more, and its revision. Raises UnknownAlias, InputTooLong or NoCapacity.

    A pool that the snapshot has no more goes away, and takes nothing new. Where the revision has no other one, it takes what a
    gateway pinned to it before it heard of that.
    """
    revision, tenant = snapshot.revisions.get(asked.revision), snapshot.tenants.get(asked.tenant)
    views = fleet.pools_of(asked.revision)
    if not views or revision is None or tenant is None:
        raise errors.UnknownAlias("No pool serves the revision behind this alias.")
    offered = [view.pool for view in views if view.name in snapshot.pools]
    pools = accepting(
        offered or [view.pool for view in views],
        asked.tenant,
        leaves_its_pools=tenant.leaves_its_pools,
        service_class=asked.service_class,
        input_tokens=asked.input_tokens if asked.input_basis is InputBasis.EXACT else None,
    )
    return [fleet.pool(pool.name) for pool in pools], revision


def rejection_of(
    asked: Acquire, refusal: errors.WeirError, standing: StandingView, generation: GenerationRecord | None
) -> Rejected:
    """What its gateway is told. generation: the bound execution behind a conflict."""
    return Rejected(
        ref=asked.ref,
        code=refusal.code,
        detail=refusal.detail,
        members=dict(refusal.members),
        standing=standing,
        retry_after_ms=refusal.retry_after_ms,
        should_retry=refusal.retry_advice,
        generation=generation,
    )
