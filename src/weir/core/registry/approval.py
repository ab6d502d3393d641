"""A revision's life: who may make it which, and what that means for replicas and new work.

    registered ──approve──▶ approved ──publish──▶ live ──retire──▶ RETIRED
        └── retire ──▶ RETIRED      └── retire ──▶ RETIRED      any but RETIRED's own end ──revoke──▶ REVOKED

Only what is approved or live gets replicas and new work. What is retired drains; work of what is revoked is cancelled. An alias
makes a revision live, and a canary's share does not: it is approved until it is promoted. Approval is an act of its own by
another person than the one who registered it. Pure.
"""

from enum import StrEnum

from weir import errors
from weir.core.registry.model import Revision, RevisionState

S = RevisionState


class Act(StrEnum):
    """What is done with a revision."""

    APPROVE = "approve"
    PUBLISH = "publish"
    RETIRE = "retire"
    REVOKE = "revoke"


_NEXT: dict[tuple[RevisionState, Act], RevisionState] = {
    (S.REGISTERED, Act.APPROVE): S.APPROVED,
    (S.APPROVED, Act.PUBLISH): S.LIVE,
    (S.LIVE, Act.PUBLISH): S.LIVE,
    (S.REGISTERED, Act.RETIRE): S.RETIRED,
    (S.APPROVED, Act.RETIRE): S.RETIRED,
    (S.LIVE, Act.RETIRE): S.RETIRED,
    **{(state, Act.REVOKE): S.REVOKED for state in RevisionState},
}
"""Every other pair is refused. Revoking a retired revision still says that what it made is not to be trusted."""


def after(revision: Revision, act: Act) -> RevisionState:
    """The state that an act leads to. Raises NotAllowedNow."""
    state = _NEXT.get((revision.state, act))
    if state is None:
        allowed = sorted(before.value for before, done in _NEXT if done is act)
        raise errors.NotAllowedNow(
            f"Revision {revision.id!r} is {revision.state.value}; {act.value} takes one that is {', '.join(allowed)}.",
            members={"state": revision.state.value, "accepted": allowed},
        )
    return state


def check_approver(revision: Revision, actor: str) -> None:
    """Raises Forbidden for whoever registered it."""
    if revision.registered_by == actor:
        raise errors.Forbidden("A revision is approved by another administrator than the one who registered it.")
