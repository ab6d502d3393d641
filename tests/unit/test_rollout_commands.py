"""A rollout as changes of the catalog: whatever happens, its alias, its revisions and its pools say what its state says."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.registry_desk import CALLER, STABLE, T0_MS, RegistryDesk, registered

from weir import errors
from weir.control.rollout_commands import ACTOR
from weir.control.validation import NAME_PATTERN
from weir.core.registry.golden_set import Score
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, RevisionState
from weir.core.registry.rollout import (
    Finish,
    IllegalRolloutTransition,
    Lose,
    Pause,
    Promote,
    RaiseWeight,
    Regain,
    Resume,
    RollBack,
    RollbackReason,
    RolloutEvent,
    Route,
    Verify,
    advance,
    name_of,
    route_of,
    weight_of,
)
from weir.core.registry.rollout_plan import RolloutPlan, Step
from weir.core.registry.rollout_record import Rollout
from weir.core.tenancy import ServiceClass

NEXT = registered("small@2", state=RevisionState.APPROVED)
PLAN = RolloutPlan((Step(10, 1, 0), Step(100, 1, 0)))


@pytest.fixture
async def desk() -> RegistryDesk:
    desk = RegistryDesk()
    await desk.open()
    await desk.put(NEXT)
    return desk


async def moved(desk: RegistryDesk, rollout: Rollout, *events: RolloutEvent) -> Rollout:
    for event in events:
        rollout, _ = await desk.rollouts.act(ACTOR, rollout.id, lambda stored, event=event: event)  # type: ignore[misc]
    return rollout


def alias_of(desk: RegistryDesk) -> Alias:
    return desk.snapshot.aliases["assistant"]


async def test_a_proposal_starts_replicas_and_routes_nobody(desk: RegistryDesk) -> None:
    """Protects the stable revision: the canary gets a pool like the stable one's, and no request."""
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    [made] = rollout.pools
    pool = desk.snapshot.pools[made]
    assert (pool.revision, pool.replicas, pool.concurrency, rollout.former_pools) == (NEXT.id, 2, 4, ("small",))
    assert alias_of(desk) == Alias("assistant", STABLE.id, 600) and name_of(rollout.state) == "proposed"
    assert await desk.audited() == [("ada", "rollout.propose", rollout.id)]


async def test_a_rollout_to_its_end(desk: RegistryDesk) -> None:
    """Protects promotion: weight by weight, the new revision live, the former pool retired only at the end."""
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    rollout = await moved(desk, rollout, Verify(T0_MS, Score(9, 10, ("x",))), RaiseWeight(T0_MS))
    assert rollout.score == Score(9, 10, ("x",))
    assert alias_of(desk).canary == Canary(rollout.id, 0, NEXT.id, 10, PLAN.tolerances)
    rollout = await moved(desk, rollout, RaiseWeight(T0_MS))
    assert alias_of(desk).canary == Canary(rollout.id, 1, NEXT.id, 100, PLAN.tolerances)
    assert desk.snapshot.revisions[NEXT.id].state is RevisionState.APPROVED
    rollout = await moved(desk, rollout, Promote(T0_MS))
    assert alias_of(desk) == Alias("assistant", NEXT.id, 600), "its default is its own, also where the revision gives less"
    assert desk.snapshot.revisions[NEXT.id].state is RevisionState.LIVE and "small" in desk.snapshot.pools
    rollout = await moved(desk, rollout, Finish(T0_MS))
    assert rollout.is_over and list(desk.snapshot.pools) == list(rollout.pools)


async def test_a_rollback_is_one_change(desk: RegistryDesk) -> None:
    """Protects everybody: from any step, and from a promotion, the alias says the stable revision with the same version."""
    courses: list[list[RolloutEvent]] = [[RaiseWeight(T0_MS)], [RaiseWeight(T0_MS), Promote(T0_MS)]]
    for number, events in enumerate(courses):
        rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
        rollout = await moved(desk, rollout, Verify(T0_MS, None), *events)
        version = desk.snapshot.version
        rollout, done = await desk.rollouts.roll_back("bob", rollout.id)
        assert done.version == version + 1 and alias_of(desk) == Alias("assistant", STABLE.id, 600), "as it was before"
        assert set(rollout.pools) <= desk.snapshot.pools.keys(), "what runs there may end"
        rollout = await moved(desk, rollout, Finish(T0_MS))
        assert list(desk.snapshot.pools) == ["small"] and name_of(rollout.state) == "rolled_back"
        assert [entry for entry in await desk.audited() if entry[1] == "rollout.roll_back"][number][0] == "bob"


async def test_a_second_rollout_of_an_alias_waits_for_the_first(desk: RegistryDesk) -> None:
    """Protects the split: one at a time for each alias, another alias is free, and its revisions' pools are not taken away."""
    await desk.put(registered("small@3", state=RevisionState.APPROVED), aliases=(Alias("other", STABLE.id, 9),))
    first, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    with pytest.raises(errors.NotAllowedNow, match=first.id):
        await desk.rollouts.propose("ada", "assistant", "small@3", PLAN)
    second, _ = await desk.rollouts.propose("ada", "other", NEXT.id, PLAN)
    assert second.pools == (), "the canary has a pool already"
    await moved(desk, first, RollBack(T0_MS, RollbackReason.ERRORS, "bad"), Finish(T0_MS))
    assert set(first.pools) <= desk.snapshot.pools.keys(), "the other one's canary runs there"
    await desk.rollouts.propose("ada", "assistant", "small@3", PLAN)


async def test_what_cannot_be_rolled_out_is_refused(desk: RegistryDesk) -> None:
    """Protects whoever proposes: with the reason, and without a trace."""
    await desk.put(registered("small@3"), registered("theirs@1", state=RevisionState.APPROVED, tenant="globex"))
    await desk.put(registered("served@1", state=RevisionState.APPROVED))
    for revision, kind in (
        (STABLE.id, errors.InvalidRequest),
        ("small@3", errors.NotAllowedNow),
        ("theirs@1", errors.NotAllowedNow),
        ("none@1", errors.NotFound),
    ):
        with pytest.raises(kind):
            await desk.rollouts.propose("ada", "assistant", revision, PLAN)
    with pytest.raises(errors.NotFound):
        await desk.rollouts.propose("ada", "nobody", NEXT.id, PLAN)
    with pytest.raises(errors.InvalidRequest):
        await desk.rollouts.propose("ada", "assistant", NEXT.id, RolloutPlan((Step(5, 1, 0),)))
    for act in (desk.rollouts.pause, desk.rollouts.resume, desk.rollouts.promote, desk.rollouts.roll_back):
        with pytest.raises(errors.NotFound):
            await act("ada", "ro-none")
    assert await desk.audited() == [] and list(desk.snapshot.pools) == ["small"]


async def test_an_administrator_pauses_and_promotes(desk: RegistryDesk) -> None:
    """Protects people's say: each act where the state allows it, refused with the state elsewhere."""
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    with pytest.raises(errors.NotAllowedNow) as refused:
        await desk.rollouts.promote("ada", rollout.id)
    assert refused.value.members == {"state": "proposed"}
    await desk.rollouts.pause("ada", rollout.id)
    await desk.rollouts.resume("ada", rollout.id)
    await moved(desk, rollout, Verify(T0_MS, None), RaiseWeight(T0_MS))
    await desk.rollouts.pause("ada", rollout.id)
    assert alias_of(desk).canary is not None
    await desk.rollouts.resume("ada", rollout.id)
    promoted, _ = await desk.rollouts.promote("ada", rollout.id)
    assert name_of(promoted.state) == "promoting"


async def test_an_engine_behind_a_url_needs_a_pool_of_its_own(desk: RegistryDesk) -> None:
    """Protects a canary that the platform cannot start: it is proposed once somebody said where it runs."""
    await desk.put(replace(NEXT, id="served@1", engine=EngineKind.OPENAI))
    with pytest.raises(errors.NotAllowedNow, match="no pool"):
        await desk.rollouts.propose("ada", "assistant", "served@1", PLAN)
    await desk.put(pools=(Pool("served", "served@1", 1, 4, ("http://127.0.0.1:1",)),))
    rollout, _ = await desk.rollouts.propose("ada", "assistant", "served@1", PLAN)
    assert rollout.pools == ()


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"context_tokens": 4_095}, "a window of 4096 tokens"),
        ({"max_output_tokens": 1_023}, "1024 output tokens"),
        ({"external": True}, "tenants whose work stays inside"),
    ],
)
async def test_what_takes_less_is_not_rolled_out(desk: RegistryDesk, changes: dict[str, Any], missing: str) -> None:
    """Protects callers from refusals at the door, which are in no evidence: publishing at once is somebody's own decision."""
    await desk.put(replace(NEXT, id="less@1", **changes))
    with pytest.raises(errors.NotAllowedNow) as refused:
        await desk.rollouts.propose("ada", "assistant", "less@1", PLAN)
    assert refused.value.members["missing"] == [missing]


async def test_embeddings_are_not_rolled_out(desk: RegistryDesk) -> None:
    """Protects indexes: callers are not split between models whose vectors cannot be compared."""
    await desk.put(replace(NEXT, id="vectors@1", arguments=(("embeddings", True),)))
    with pytest.raises(errors.NotAllowedNow, match="cannot be compared"):
        await desk.rollouts.propose("ada", "assistant", "vectors@1", PLAN)


async def test_conversations_are_not_rolled_out_to_a_base_model(desk: RegistryDesk) -> None:
    """Protects callers: what a revision refuses at the door is in no evidence, so nothing would stop this one."""
    await desk.put(replace(NEXT, id="base@1", chat=False))
    with pytest.raises(errors.NotAllowedNow, match="conversations"):
        await desk.rollouts.propose("ada", "assistant", "base@1", PLAN)


@pytest.mark.parametrize(
    ("pool", "is_enough"),
    [
        (Pool("next", NEXT.id, 1, 4), True),
        (Pool("next", NEXT.id, 1, 4, tenant="globex"), False),
        (Pool("next", NEXT.id, 1, 4, service_classes=(ServiceClass.BATCH,)), False),
        (Pool("next", NEXT.id, 1, 4, input_tokens_max=100), False),
        (Pool("next", NEXT.id, 1, 4, retired=True), True),
    ],
)
async def test_a_canarys_own_pools_serve_all_whom_the_stable_ones_serve(
    desk: RegistryDesk, pool: Pool, is_enough: bool
) -> None:
    """Protects callers that stay with the stable revision while both serve: the promotion would leave them nothing."""
    await desk.put(pools=(pool,))
    if is_enough:
        await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
        return
    with pytest.raises(errors.NotAllowedNow) as refused:
        await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    assert refused.value.members in ({"pool": "small"}, {}) and "pool" in refused.value.detail


@pytest.mark.parametrize("leaves_its_pools", [False, True])
async def test_a_dedicated_tenant_stays_in_pools_of_its_own(desk: RegistryDesk, leaves_its_pools: bool) -> None:
    """Protects isolation: no rollout moves a tenant from replicas of its own to shared ones, unless its policy says so."""
    await desk.commands.patch_tenant("test", "acme", leaves_its_pools=leaves_its_pools)
    await desk.put(pools=(Pool("acme", STABLE.id, 1, 4, tenant="acme"), Pool("next", NEXT.id, 1, 4)))
    if leaves_its_pools:
        await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
        return
    with pytest.raises(errors.NotAllowedNow) as refused:
        await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    assert refused.value.members == {"pool": "acme"}
    await desk.put(aliases=(Alias("brief", STABLE.id, 9, tenant="globex"),), pools=(Pool("own", NEXT.id, 1, 4, tenant="acme"),))
    await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    await desk.rollouts.propose("ada", "brief", NEXT.id, PLAN, "globex")


async def test_pools_made_for_a_canary_have_names_of_their_own(desk: RegistryDesk) -> None:
    """Protects a proposal where the stable revision's pools have long names that end differently."""
    names = [f"{'a' * 62}{number}" for number in range(3)]
    await desk.put(pools=tuple(Pool(name, STABLE.id, 1, 1) for name in names))
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    assert len(set(rollout.pools)) == 4 and set(rollout.pools) <= desk.snapshot.pools.keys()
    assert all(re.fullmatch(NAME_PATTERN, name) for name in rollout.pools)


async def test_a_tenants_canary_gets_no_pool_for_others(desk: RegistryDesk) -> None:
    """Protects machines: of the stable revision's pools those of other tenants never serve a revision that one tenant owns."""
    await desk.put(
        replace(NEXT, id="own@1", tenant="acme"),
        pools=(Pool("theirs", STABLE.id, 8, 4, tenant="globex"), Pool("acme", STABLE.id, 1, 4, tenant="acme")),
        aliases=(Alias("brief", STABLE.id, 9, tenant="acme"),),
    )
    rollout, _ = await desk.rollouts.propose("ada", "brief", "own@1", PLAN, "acme")
    made = [desk.snapshot.pools[name] for name in rollout.pools]
    assert sorted((pool.tenant, pool.replicas) for pool in made) == [("acme", 1), ("acme", 2)]


@pytest.mark.parametrize("seed", range(20))
async def test_the_alias_always_says_what_the_state_says(seed: int) -> None:
    """Protects the one transaction: after any events the catalog routes as the machine demands, refused ones between."""
    drawn, desk = random.Random(seed), RegistryDesk()
    await desk.open()
    await desk.put(NEXT)
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, PLAN)
    for _ in range(30):
        events: list[RolloutEvent] = [Verify(T0_MS, None), RaiseWeight(T0_MS), Promote(T0_MS), Finish(T0_MS)]
        events += [Pause(T0_MS), Resume(T0_MS), Lose(T0_MS), Regain(), RollBack(T0_MS, RollbackReason.ERRORS, "bad")]
        event = drawn.choices(events, [5, 5, 2, 3, 1, 2, 1, 1, 0.5])[0]
        try:
            state = advance(rollout.state, event)
            weight_of(PLAN, state)
        except (IllegalRolloutTransition, IndexError):
            continue
        rollout = await moved(desk, rollout, event)
        assert rollout.state == state
        alias, route = alias_of(desk), route_of(state)
        assert alias.revision == (NEXT.id if route is Route.NEW else STABLE.id)
        assert (alias.canary is not None) is (route is Route.SPLIT)
        if alias.canary is not None:
            assert alias.canary.weight == weight_of(PLAN, state)
        assert desk.snapshot.resolve(CALLER, "assistant")[1].serves
