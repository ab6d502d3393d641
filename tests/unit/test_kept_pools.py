"""Which pools are kept: by what serves, by what a start declared, and by what aliases name."""

from dataclasses import replace

import pytest

from weir.control.kept_pools import kept_pools, stable_revisions
from weir.control.snapshots import build_snapshot, snapshot_on_record
from weir.core.metering import Price
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.snapshot import Snapshot
from weir.ports import Catalog

REVISION = Revision("v1", EngineKind.SIMULATED, "demo", 512, 128, 64, Price(1, 1, 1, 1))
OTHER = replace(REVISION, id="v2", state=RevisionState.APPROVED)
MADE = Pool("made", "v1", 1, 4)
DECLARED = Pool("start", "v1", 1, 4, declared=True)
BY_START = {"start": "v1"}


def snapshot(*pools: Pool, state: RevisionState = RevisionState.LIVE, aliases: tuple[Alias, ...] = ()) -> Snapshot:
    """What is on record, with the first revision in this state."""
    return Snapshot(
        aliases={alias.name: alias for alias in aliases if alias.tenant is None},
        tenant_aliases={(alias.tenant, alias.name): alias for alias in aliases if alias.tenant is not None},
        revisions={"v1": replace(REVISION, state=state), "v2": OTHER},
        pools={pool.name: pool for pool in pools},
    )


def names(found: Snapshot, declared: dict[str, str] | None = None) -> list[str]:
    """Of the pools that are kept."""
    return [pool.name for pool, revision in kept_pools(found, declared or {}) if pool.revision == revision.id]


@pytest.mark.parametrize("state", RevisionState)
def test_a_revision_that_does_not_serve_has_no_pools(state: RevisionState) -> None:
    """Protects from running what nobody approved, or approves no longer."""
    serves = state in (RevisionState.APPROVED, RevisionState.LIVE)
    assert names(snapshot(MADE, state=state)) == ["made"] * serves


def test_a_pool_of_administrators_is_kept_until_it_is_retired() -> None:
    """Protects what they made: no alias needs to name it, and no start to declare it."""
    assert names(snapshot(MADE, Pool("second", "v2", 1, 1))) == ["made", "second"]
    assert names(snapshot(replace(MADE, retired=True))) == []


@pytest.mark.parametrize(
    "alias",
    [
        Alias("assistant", "v1", 64),
        Alias("assistant", "v1", 64, tenant="acme"),
    ],
    ids=["shared", "of a tenant"],
)
def test_a_declared_pool_is_kept_while_an_alias_names_its_revision(alias: Alias) -> None:
    """Protects what a start declared from being stopped under an alias, and machines from what nobody asks for."""
    assert names(snapshot(DECLARED, aliases=(alias,)), BY_START) == ["start"]
    assert names(snapshot(DECLARED, aliases=(Alias("assistant", "v2", 64),)), BY_START) == []
    assert names(snapshot(DECLARED, MADE), BY_START) == ["made"]
    moving = replace(snapshot(DECLARED, aliases=(Alias("assistant", "v2", 64),)), moving=frozenset({"v1"}))
    assert names(moving, BY_START) == ["start"], "a rollout that has promoted another one may still go back"


@pytest.mark.parametrize("declared", [{}, {"other": "v1"}, {"start": "v2"}], ids=["none", "another", "another revision"])
def test_what_another_start_declared_is_not_kept(declared: dict[str, str]) -> None:
    """Protects a cell from pools of an earlier start, and from what one beside it made of a pool of its own."""
    assert names(snapshot(DECLARED, aliases=(Alias("assistant", "v1", 64),)), declared) == []


def test_what_a_rollout_moves_is_not_on_demand() -> None:
    """Protects a rollout on little traffic: neither a canary nor the way back stops because nobody asked for a while."""
    lazy = replace(MADE, on_demand=True)
    assert [pool for pool, _ in kept_pools(snapshot(lazy), {})] == [lazy]
    moving = replace(snapshot(lazy, replace(lazy, name="tried", revision="v2")), moving=frozenset({"v1", "v2"}))
    assert [(pool.name, pool.on_demand) for pool, _ in kept_pools(moving, {})] == [("made", False), ("tried", False)]


def test_what_a_start_waits_for_is_what_aliases_mean() -> None:
    """Protects a restart from a canary that does not start: nobody waits for it."""
    shared = Alias("assistant", "v1", 64, canary=Canary("ro-1", 1, "v2", 5))
    assert stable_revisions(snapshot(aliases=(shared, Alias("own", "v3", 64, tenant="acme")))) == {"v1", "v3"}


def test_a_coordinator_knows_pools_that_were_retired() -> None:
    """Protects what was admitted before: control may still keep their replicas, though nobody is offered them."""
    catalog = Catalog(7, revisions=(REVISION,), pools=(MADE, Pool("old", "v1", 1, 1, retired=True)))
    assert set(build_snapshot(catalog).pools) == {"made"} and set(snapshot_on_record(catalog).pools) == {"made", "old"}
