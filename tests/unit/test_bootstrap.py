"""Protects the first start and every one after it: what a start declares is registered, approved, and undoes nothing."""

from dataclasses import replace

from tests.unit.test_commands import Desk, SeededEntropy, refused

from weir import errors
from weir.control.bootstrap import DEMO_PRICE, bootstrap, draft_keys, shown_secrets
from weir.control.declared_models import DeclaredModels
from weir.core.metering import Price
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import Alias, EngineKind, Pool, Revision, RevisionState
from weir.core.tenancy import Scope, ServiceClass, digest_of_key
from weir.ports import CatalogChange

REVISION = Revision("small-1", EngineKind.SIMULATED, "row", 4_096, 1_024, 200, DEMO_PRICE)
MODELS = DeclaredModels((REVISION,), (Alias("assistant", "small-1", 256),), (Pool("small", "small-1", 1, 4),))


async def test_an_empty_store_gets_a_demonstration_that_works_with_the_drafted_keys() -> None:
    """Protects the first start: everything that the ready file promises works."""
    desk, drafted = Desk(), draft_keys(SeededEntropy())
    assert await bootstrap(desk.commands, MODELS, drafted)
    snapshot = desk.published[-1]
    secrets = shown_secrets(await desk.store.load(), drafted)
    assert [tenant["name"] for tenant in secrets["tenants"]] == ["acme", "globex"]
    for tenant in secrets["tenants"]:
        assert [entry["name"] for entry in tenant["applications"]] == ["assistant", "batch-jobs"]
        for entry in tenant["applications"]:
            assert entry["key"] is not None
            principal = snapshot.authenticate(entry["key"])
            assert (principal.tenant, principal.application) == (tenant["name"], entry["name"])
            assert (principal.service_class is ServiceClass.BATCH) == (entry["name"] == "batch-jobs")
            alias, revision = snapshot.resolve(principal, "assistant")
            assert revision == replace(REVISION, registered_by="bootstrap", approved_by="bootstrap-approver")
            assert snapshot.pools["small"].revision == alias.revision
        assert not snapshot.limits[Scope(tenant["name"])].is_empty
    [owner] = (await desk.store.load()).admin_keys
    assert secrets["admin_key"] is not None and digest_of_key(secrets["admin_key"]) == owner.secret_sha256
    approved, registered = await desk.commands.audit_trail(10)
    assert [(each.actor, each.action) for each in (registered, approved)] == [
        ("bootstrap", "bootstrap"),
        ("bootstrap-approver", "models.approve"),
    ]
    assert not any(secret in each.summary for secret in drafted.values() for each in (registered, approved))


async def test_a_start_that_broke_off_between_its_two_acts_is_finished_by_the_next() -> None:
    """Protects approval: what was registered and not approved serves nobody, until a start approves it."""
    desk = Desk()
    await bootstrap(desk.commands, DeclaredModels(MODELS.revisions), draft_keys(SeededEntropy()))
    [revision] = (await desk.store.load()).revisions
    half = replace(revision, state=RevisionState.REGISTERED, approved_by=None)
    await desk.commands.commit(
        lambda catalog: (None, CatalogChange(desk.commands.audit_entry("x", "x", "x", {}), revisions=[half]))
    )
    assert not await bootstrap(desk.commands, MODELS, {})
    catalog = await desk.store.load()
    assert (catalog.revisions, [alias.name for alias in catalog.aliases]) == ([revision], ["assistant"])


async def test_the_key_of_a_start_is_trusted_once() -> None:
    """Protects the key ring: a start's own key is in it as long as it has artifacts, and stays revoked once it was."""
    desk, key = Desk(), SigningKey("development-1", "PEM", frozenset({KeyRole.MODEL}), None, 0)
    await bootstrap(desk.commands, MODELS, draft_keys(SeededEntropy()), key)
    assert (await desk.store.load()).signing_keys == []
    signed = DeclaredModels((replace(REVISION, id="signed@1", artifact_digest="sha256:0"),))
    for _ in range(2):
        await bootstrap(desk.commands, signed, {}, key)
        assert (await desk.store.load()).signing_keys == [key]
    await desk.commands.commit(
        lambda catalog: (
            None,
            CatalogChange(desk.commands.audit_entry("x", "x", "x", {}), signing_keys=[replace(key, revoked=True)]),
        )
    )
    await bootstrap(desk.commands, signed, {}, key)
    assert (await desk.store.load()).signing_keys == [replace(key, revoked=True)]


async def test_a_second_start_changes_only_the_models_it_declares() -> None:
    """Protects an administrator's work from a restart."""
    desk, drafted = Desk(), draft_keys(SeededEntropy())
    await bootstrap(desk.commands, MODELS, drafted)
    await desk.commands.put_limits("ann", Scope("acme"), {"concurrency": 3})
    before = await desk.store.load()
    assert not await bootstrap(desk.commands, MODELS, draft_keys(SeededEntropy(2)))
    assert await desk.store.load() == before
    other = replace(REVISION, id="other-1", engine=EngineKind.OPENAI)
    declared = DeclaredModels((other,), (Alias("assistant", "other-1", 64),), (Pool("other", "other-1", 1, 8),))
    assert not await bootstrap(desk.commands, declared, {})
    after = await desk.store.load()
    assert (after.tenants, after.keys, after.limits, after.admin_keys) == (
        before.tenants,
        before.keys,
        before.limits,
        before.admin_keys,
    )
    assert [alias.revision for alias in after.aliases] == ["other-1"]
    assert {revision.id for revision in after.revisions} == {"small-1", "other-1"}


async def test_declaring_again_undoes_neither_a_revocation_nor_a_newer_price() -> None:
    """Protects revocations and prices from a restart."""
    desk = Desk()
    await bootstrap(desk.commands, DeclaredModels((REVISION,)), draft_keys(SeededEntropy()))
    [first] = (await desk.store.load()).revisions
    newer = replace(first, state=RevisionState.REVOKED, price=Price(2, 1, 1, 1))
    entry = desk.commands.audit_entry("ann", "revision.revoke", first.id, {})
    await desk.commands.commit(lambda catalog: (None, CatalogChange(entry, revisions=[newer])))
    await bootstrap(desk.commands, DeclaredModels((replace(REVISION, typical_output_tokens=9),)), draft_keys(SeededEntropy()))
    [stored] = (await desk.store.load()).revisions
    assert stored == replace(newer, typical_output_tokens=9)


async def test_models_that_name_an_unknown_revision_are_refused() -> None:
    """Protects aliases from pointing nowhere."""
    declared = DeclaredModels(aliases=(Alias("assistant", "nothing", 1),))
    await refused(bootstrap(Desk().commands, declared, {}), errors.InvalidRequest)


async def test_a_revoked_or_lost_bootstrap_key_shows_as_none() -> None:
    """Protects the ready file from showing a key that is not valid."""
    desk, drafted = Desk(), draft_keys(SeededEntropy())
    await bootstrap(desk.commands, MODELS, drafted)
    acme_key = next(key for key in (await desk.store.load()).keys if (key.tenant, key.application) == ("acme", "assistant"))
    await desk.commands.revoke_key("ann", "acme", "assistant", acme_key.id)
    await desk.commands.revoke_tenant("ann", "globex")
    shown = shown_secrets(await desk.store.load(), {name: key for name, key in drafted.items() if name != "admin"})
    keys = {(tenant["name"], entry["name"]): entry["key"] for tenant in shown["tenants"] for entry in tenant["applications"]}
    assert shown["admin_key"] is None
    assert keys == {
        ("acme", "assistant"): None,
        ("acme", "batch-jobs"): drafted["acme/batch-jobs"],
        ("globex", "assistant"): None,
        ("globex", "batch-jobs"): None,
    }
