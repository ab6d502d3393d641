"""What of a start's models is new: an alias or a pool that administrators made is not taken from them."""

from dataclasses import replace

import pytest

from weir import errors
from weir.control.declared_models import ACTOR, DeclaredModels, changed_models
from weir.core.metering import Price
from weir.core.registry.model import Alias, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.rollout import Live, Promoting, Proposed, RolloutState
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.registry.rollout_record import Rollout
from weir.ports import Catalog

DECLARED = Revision("start-2", EngineKind.SIMULATED, "demo", 512, 128, 64, Price(1, 1, 1, 1))
EARLIER = replace(DECLARED, id="start-1")
BY_START = replace(DECLARED, id="start-0", registered_by=ACTOR)
PROMOTED = replace(DECLARED, id="better", registered_by="ann", approved_by="bob")
REVISIONS = (EARLIER, BY_START, PROMOTED)
MODELS = DeclaredModels((DECLARED,), (Alias("assistant", "start-2", 64),), (Pool("assistant", "start-2", 1, 4, declared=True),))


@pytest.mark.parametrize(
    ("is_kept", "stored"),
    [
        (True, Alias("assistant", "better", 64)),
        (False, Alias("assistant", "start-1", 64)),
        (False, Alias("assistant", "start-0", 64)),
        (False, Alias("assistant", "better", 64, tenant="acme")),
        (False, Alias("completion", "better", 64)),
    ],
    ids=["promoted", "an earlier start", "registered by a start", "a tenant's own", "another alias"],
)
def test_a_start_takes_no_alias_from_administrators(is_kept: bool, stored: Alias) -> None:
    """Protects what was promoted, and a rollout: a start declares as before and changes neither; its revision is known."""
    changed = changed_models(Catalog(1, aliases=(stored,), revisions=REVISIONS), MODELS)
    assert changed.aliases == (() if is_kept else MODELS.aliases)
    waiting = replace(DECLARED, state=RevisionState.REGISTERED, registered_by=ACTOR)
    assert (changed.revisions, changed.pools) == ((waiting,), MODELS.pools)


@pytest.mark.parametrize(("state", "is_kept"), [(Proposed(1), True), (Promoting(1), True), (Live(1), False)])
def test_a_start_takes_no_alias_from_a_rollout(state: RolloutState, is_kept: bool) -> None:
    """Protects a rollout from a restart with another engine: what it moves from stays what the alias means meanwhile."""
    rollout = Rollout("ro-1", "assistant", "start-1", "better", RolloutPlan(), state, "ann", 1)
    alias = Alias("assistant", "start-1", 64)
    changed = changed_models(Catalog(1, aliases=(alias,), revisions=REVISIONS, rollouts=(rollout,)), MODELS)
    assert changed.aliases == (() if is_kept else MODELS.aliases)


def test_a_start_takes_no_pool_from_administrators() -> None:
    """Protects a pool that they made from a configuration that gives its name to another one: the start says so."""
    made = replace(MODELS.pools[0], revision="better", declared=False)
    with pytest.raises(errors.InvalidRequest) as refused:
        changed_models(Catalog(1, revisions=REVISIONS, pools=(made,)), MODELS)
    assert refused.value.members["field"] == "pools.assistant"
    again = replace(made, declared=True)
    assert changed_models(Catalog(1, revisions=REVISIONS, pools=(again,)), MODELS).pools == MODELS.pools
