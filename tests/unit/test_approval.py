"""A revision's life: every act in every state is allowed or refused on purpose."""

import pytest

from weir import errors
from weir.core.metering import Price
from weir.core.registry.approval import Act, after, check_approver
from weir.core.registry.model import EngineKind, Revision, RevisionState

S = RevisionState
ALLOWED = {
    (S.REGISTERED, Act.APPROVE): S.APPROVED,
    (S.REGISTERED, Act.RETIRE): S.RETIRED,
    (S.REGISTERED, Act.REVOKE): S.REVOKED,
    (S.APPROVED, Act.PUBLISH): S.LIVE,
    (S.APPROVED, Act.RETIRE): S.RETIRED,
    (S.APPROVED, Act.REVOKE): S.REVOKED,
    (S.LIVE, Act.PUBLISH): S.LIVE,
    (S.LIVE, Act.RETIRE): S.RETIRED,
    (S.LIVE, Act.REVOKE): S.REVOKED,
    (S.RETIRED, Act.REVOKE): S.REVOKED,
    (S.REVOKED, Act.REVOKE): S.REVOKED,
}


def revision(state: RevisionState) -> Revision:
    return Revision("rev@1", EngineKind.LLAMACPP, "a.gguf", 8, 4, 2, Price(1, 0, 0, 0), state=state, registered_by="ada")


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("state", RevisionState)
def test_every_act_in_every_state(state: RevisionState, act: Act) -> None:
    """Protects approval: nothing goes live unapproved, and nothing comes back once it is retired or revoked."""
    if (wanted := ALLOWED.get((state, act))) is not None:
        assert after(revision(state), act) is wanted
        return
    with pytest.raises(errors.NotAllowedNow, match=state.value) as refused:
        after(revision(state), act)
    assert refused.value.members["state"] == state.value


def test_only_what_is_approved_or_live_serves() -> None:
    """Protects replicas and new work from everything else."""
    assert {state for state in RevisionState if revision(state).serves} == {S.APPROVED, S.LIVE}
    assert {state for state in RevisionState if revision(state).revoked} == {S.REVOKED}


def test_the_registrant_does_not_approve() -> None:
    """Protects the second pair of eyes."""
    with pytest.raises(errors.Forbidden):
        check_approver(revision(S.REGISTERED), "ada")
    check_approver(revision(S.REGISTERED), "bob")
