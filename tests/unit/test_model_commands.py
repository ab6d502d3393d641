"""What administrators may do with revisions, aliases, pools and trusted keys, and what they are told when they may not."""

from dataclasses import replace
from typing import Any

import pytest
from tests.signing_keys import private_key
from tests.unit.registry_desk import CALLER, STABLE, T0_MS, RegistryDesk, registered

from weir import errors
from weir.control.model_commands import NewPool
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import Alias, EngineKind, Pool, RevisionState
from weir.core.registry.rollout import Promote, RaiseWeight, Verify
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.registry.signatures import public_key_of
from weir.core.tenancy import ServiceClass

NEXT = replace(registered("small@2"), max_output_tokens=512)


def _public(number: int) -> str:
    return public_key_of(private_key(number))


@pytest.fixture
async def desk() -> RegistryDesk:
    desk = RegistryDesk()
    await desk.open()
    await desk.put(NEXT)
    return desk


async def test_a_revision_from_registration_to_retirement(desk: RegistryDesk) -> None:
    """Protects the order of acts: approved by another one, with a pool, published, and retired once nothing leads to it."""
    with pytest.raises(errors.Forbidden):
        await desk.models.approve("ada", NEXT.id)
    with pytest.raises(errors.NotAllowedNow, match="registered"):
        await desk.models.publish("ada", "assistant", NEXT.id)
    with pytest.raises(errors.NotAllowedNow, match="registered"):
        await desk.models.create_pool("ada", NewPool("next", NEXT.id))
    approved, _ = await desk.models.approve("bob", NEXT.id)
    assert (approved.state, approved.approved_by) == (RevisionState.APPROVED, "bob")
    with pytest.raises(errors.NotAllowedNow, match="no pool"):
        await desk.models.publish("ada", "assistant", NEXT.id)
    await desk.models.create_pool("ada", NewPool("next", NEXT.id, replicas=2, concurrency=3))
    alias, _ = await desk.models.publish("ada", "assistant", NEXT.id)
    assert alias == Alias("assistant", NEXT.id, 512), "the default is cut to what the revision gives"
    assert desk.snapshot.resolve(CALLER, "assistant")[1].state is RevisionState.LIVE
    with pytest.raises(errors.NotAllowedNow) as needed:
        await desk.models.retire("ada", NEXT.id)
    assert needed.value.members["aliases"] == ["assistant"]
    with pytest.raises(errors.NotAllowedNow, match="last"):
        await desk.models.retire_pool("ada", "next")
    retired, _ = await desk.models.retire("ada", STABLE.id)
    assert retired.state is RevisionState.RETIRED
    assert await desk.audited() == [
        ("bob", "revision.approve", NEXT.id),
        ("ada", "pool.create", "next"),
        ("ada", "alias.publish", "assistant"),
        ("ada", "revision.retire", STABLE.id),
    ]


async def test_a_revoked_revision_serves_nobody(desk: RegistryDesk) -> None:
    """Protects revocation: it works in every state, twice, also while an alias leads there, and nothing undoes it."""
    for _ in range(2):
        revoked, _ = await desk.models.revoke("ada", STABLE.id)
        assert revoked.revoked
    with pytest.raises(errors.UnknownAlias):
        desk.snapshot.resolve(CALLER, "assistant")
    with pytest.raises(errors.NotAllowedNow):
        await desk.models.approve("bob", STABLE.id)
    assert await desk.audited() == [("ada", "revision.revoke", STABLE.id)]


async def test_an_adapter_ends_with_what_it_changes(desk: RegistryDesk) -> None:
    """Protects tenants of a revoked model: its adapters go with it, and it is not retired under them."""
    await desk.put(registered("own@1", tenant="acme", adapter_of=NEXT.id, state=RevisionState.APPROVED))
    with pytest.raises(errors.NotAllowedNow) as needed:
        await desk.models.retire("ada", NEXT.id)
    assert needed.value.members["adapters"] == ["own@1"]
    await desk.models.revoke("ada", NEXT.id)
    states = {revision.id: revision.state for revision in (await desk.commands.catalog()).revisions}
    assert states == {NEXT.id: RevisionState.REVOKED, "own@1": RevisionState.REVOKED, STABLE.id: RevisionState.LIVE}


async def test_an_alias_of_a_tenant_is_its_own(desk: RegistryDesk) -> None:
    """Protects adapters: a tenant's revision is published to its aliases alone, and runs in its pools alone."""
    await desk.put(registered("own@1", tenant="acme", state=RevisionState.APPROVED))
    with pytest.raises(errors.InvalidRequest) as refused:
        await desk.models.create_pool("ada", NewPool("own", "own@1"))
    assert refused.value.members == {"field": "tenant", "accepted": "acme"}
    await desk.models.create_pool("ada", NewPool("own", "own@1", tenant="acme"))
    for tenant in (None, "globex"):
        with pytest.raises(errors.NotAllowedNow, match="belongs to a tenant"):
            await desk.models.publish("ada", "assistant", "own@1", tenant=tenant)
    alias, _ = await desk.models.publish("ada", "assistant", "own@1", tenant="acme")
    assert alias == Alias("assistant", "own@1", 100, tenant="acme")
    assert desk.snapshot.resolve(CALLER, "assistant")[1].id == "own@1"
    with pytest.raises(errors.NotFound):
        await desk.models.publish("ada", "assistant", STABLE.id, tenant="nobody")


async def test_an_aliass_default_output_is_set_kept_and_bounded(desk: RegistryDesk) -> None:
    """Protects holds: 0 is not the same as nothing said, and no default is above what the revision gives."""
    for given, default in ((9, 9), (None, 9), (1_024, 1_024)):
        alias, _ = await desk.models.publish("ada", "assistant", STABLE.id, given)
        assert alias.default_max_output_tokens == default
    for wrong in (0, -1, 1_025):
        with pytest.raises(errors.InvalidRequest) as refused:
            await desk.models.publish("ada", "assistant", STABLE.id, wrong)
        assert refused.value.members == {"field": "default_max_output_tokens", "accepted": "an integer 1 … 1024"}


async def test_an_alias_is_not_left_without_replicas(desk: RegistryDesk) -> None:
    """Protects callers: neither a pool for others nor one without replicas makes a revision fit for an alias."""
    await desk.models.approve("bob", NEXT.id)
    for pool in (NewPool("theirs", NEXT.id, tenant="acme"), NewPool("empty", NEXT.id, replicas=0)):
        await desk.models.create_pool("ada", pool)
        with pytest.raises(errors.NotAllowedNow, match="no pool with replicas"):
            await desk.models.publish("ada", "assistant", NEXT.id)
    await desk.models.publish("ada", "own", NEXT.id, tenant="acme")
    await desk.models.patch_pool("ada", "empty", replicas=1)
    await desk.models.publish("ada", "assistant", NEXT.id)
    await desk.models.retire_pool("ada", "theirs")
    with pytest.raises(errors.NotAllowedNow, match="last"):
        await desk.models.patch_pool("ada", "empty", replicas=0)


async def test_pools_grow_shrink_and_end(desk: RegistryDesk) -> None:
    """Protects pools: sizes and classes change, a name is never given twice, and what a start declared is left to it."""
    pool, _ = await desk.models.create_pool("ada", NewPool("more", STABLE.id, tenant="acme"))
    patched, _ = await desk.models.patch_pool("ada", "more", replicas=3, service_classes=[ServiceClass.BATCH])
    assert (patched.replicas, patched.concurrency, patched.service_classes) == (3, pool.concurrency, (ServiceClass.BATCH,))
    for _ in range(2):
        assert (await desk.models.retire_pool("ada", "more"))[0].retired
    assert "more" not in desk.snapshot.pools
    with pytest.raises(errors.AlreadyExists):
        await desk.models.create_pool("ada", NewPool("more", STABLE.id))
    await desk.put(pools=(Pool("started", STABLE.id, 1, 1, declared=True),))
    for call in (desk.models.patch_pool("ada", "started", replicas=2), desk.models.retire_pool("ada", "started")):
        with pytest.raises(errors.NotAllowedNow, match="started"):
            await call


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (NewPool("Bad name", STABLE.id), "name"),
        (NewPool("p", STABLE.id, replicas=-1), "replicas"),
        (NewPool("p", STABLE.id, replicas=2_000), "replicas"),
        (NewPool("p", STABLE.id, concurrency=0), "concurrency"),
        (NewPool("p", STABLE.id, urls=("http://127.0.0.1:1",)), "urls"),
        (NewPool("p", "served@1"), "urls"),
        (NewPool("p", "served@1", urls=("http://me:key@127.0.0.1",)), "urls"),
        (NewPool("p", "served@1", urls=("http://[",)), "urls"),
        (NewPool("p", STABLE.id, idle_stop_ms=0), "idle_stop_ms"),
        (NewPool("p", STABLE.id, input_tokens_max=0), "input_tokens_max"),
        (NewPool("p", STABLE.id, service_classes=()), "service_classes"),
        (NewPool("p", STABLE.id, service_classes=(ServiceClass.BATCH, ServiceClass.BATCH)), "service_classes"),
    ],
)
async def test_a_wrong_pool_is_refused_by_field(desk: RegistryDesk, asked: NewPool, field: str) -> None:
    """Protects whoever types it: the field and what it accepts."""
    await desk.put(replace(registered("served@1", state=RevisionState.APPROVED), engine=EngineKind.OPENAI))
    with pytest.raises(errors.InvalidRequest) as refused:
        await desk.models.create_pool("ada", asked)
    assert refused.value.members["field"] == field and refused.value.members["accepted"]


async def test_an_alias_that_a_rollout_moves_is_left_to_it(desk: RegistryDesk) -> None:
    """Protects a rollout: nothing else moves its alias or takes its revisions away meanwhile."""
    await desk.models.approve("bob", NEXT.id)
    await desk.put(replace(NEXT, max_output_tokens=1_024, state=RevisionState.APPROVED))
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, RolloutPlan())
    with pytest.raises(errors.NotAllowedNow, match=rollout.id):
        await desk.models.publish("ada", "assistant", STABLE.id)
    for revision in (STABLE.id, NEXT.id):
        with pytest.raises(errors.NotAllowedNow, match=rollout.id):
            await desk.models.retire("ada", revision)


async def test_keys_are_trusted_and_revoked(desk: RegistryDesk) -> None:
    """Protects the key ring: a key stands once, with roles and a validity, and a revoked one never comes back."""
    key, _ = await desk.key_ring.add("ada", "build", _public(1), [KeyRole.MODEL])
    assert (key.not_before_ms, key.not_after_ms, key.revoked) == (T0_MS, None, False)
    wrong: list[tuple[type[errors.WeirError], dict[str, Any]]] = [
        (errors.AlreadyExists, {"name": "build", "public_key": _public(2)}),
        (errors.AlreadyExists, {"name": "again", "public_key": _public(1)}),
        (errors.InvalidRequest, {"name": "none", "public_key": _public(2), "roles": []}),
        (errors.InvalidRequest, {"name": "past", "public_key": _public(2), "validity": (5, 5)}),
        (errors.InvalidRequest, {"name": "early", "public_key": _public(2), "validity": (-1, None)}),
        (errors.InvalidRequest, {"name": "late", "public_key": _public(2), "validity": (None, 10**15)}),
        (errors.InvalidRequest, {"name": "text", "public_key": "not a key"}),
        (errors.NotFound, {"name": "their", "public_key": _public(2), "tenant": "nobody"}),
    ]
    for kind, asked in wrong:
        with pytest.raises(kind):
            await desk.key_ring.add("ada", **{"roles": [KeyRole.MODEL], **asked})
    for _ in range(2):
        assert (await desk.key_ring.revoke("ada", "build"))[0].revoked
    with pytest.raises(errors.NotFound):
        await desk.key_ring.revoke("ada", "other")
    assert await desk.audited() == [("ada", "key_ring.add", "build"), ("ada", "key_ring.revoke", "build")]


async def test_a_pool_that_a_rollout_needs_stays(desk: RegistryDesk) -> None:
    """Protects the way back: the last pool of either revision cannot be taken away while a rollout may lead there."""
    await desk.models.approve("bob", NEXT.id)
    await desk.put(replace(NEXT, max_output_tokens=1_024, state=RevisionState.APPROVED))
    rollout, _ = await desk.rollouts.propose("ada", "assistant", NEXT.id, RolloutPlan())
    with pytest.raises(errors.NotAllowedNow, match=rollout.id):
        await desk.models.retire_pool("ada", rollout.pools[0])
    for event in (Verify(T0_MS, None), RaiseWeight(T0_MS), Promote(T0_MS)):
        await desk.rollouts.act("ada", rollout.id, lambda stored, event=event: event)  # type: ignore[misc]
    with pytest.raises(errors.NotAllowedNow, match=rollout.id) as refused:
        await desk.models.retire_pool("ada", "small")
    assert refused.value.members == {"aliases": [], "rollouts": [rollout.id]}


@pytest.mark.parametrize("end", ["retire", "revoke"])
async def test_no_adapter_is_approved_whose_model_ended(desk: RegistryDesk, end: str) -> None:
    """Protects whoever publishes it: what can never be loaded is not approved, also if it was registered meanwhile."""
    await desk.models.approve("bob", NEXT.id)
    await getattr(desk.models, end)("ada", NEXT.id)
    await desk.put(registered("tone@1", adapter_of=NEXT.id, tenant="acme"))
    with pytest.raises(errors.NotAllowedNow, match=NEXT.id):
        await desk.models.approve("bob", "tone@1")
