"""Protects what administrative commands promise: validation, one audit entry per change, limits that read back as set,
retries on a version conflict, and snapshots that follow every change.
"""

import asyncio
import json
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir import errors
from weir.control.bootstrap import DEMO_PRICE, bootstrap
from weir.control.commands import Commands
from weir.control.declared_models import DeclaredModels
from weir.control.snapshots import build_snapshot
from weir.core.issuers import Issuer, SignInRule
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import LIMIT_NAMES, Limits, Retention, Role, Scope, ServiceClass, digest_of_key
from weir.ports import Acknowledgement, Catalog, CatalogChange
from weir.storage.memory import MemoryCatalog
from weir.units import INT64_MAX

REVISION = Revision("small-1", EngineKind.SIMULATED, "row", 4_096, 1_024, 200, DEMO_PRICE)
MODELS = DeclaredModels((REVISION,), (Alias("assistant", "small-1", 256),), (Pool("small", "small-1", 1, 4),))


class ManualClock:
    """Stands at a time until it is moved."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class SeededEntropy:
    """Repeatable bytes."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)


class ContestedCatalog(MemoryCatalog):
    """A catalog that another administrator changes just before each of our first `rivals` changes."""

    rivals = 0

    async def apply(self, expected_version: int, change: CatalogChange) -> int:
        if self.rivals:
            self.rivals -= 1
            await super().apply(expected_version, CatalogChange(replace(change.audit, actor="rival")))
        return await super().apply(expected_version, change)


class Desk:
    """Commands on a memory catalog, and every snapshot that they published."""

    def __init__(self, pending: tuple[str, ...] = ()) -> None:
        self.store = ContestedCatalog()
        self.published: list[Snapshot] = []
        self._pending = pending
        self.commands = Commands(self.store, self._publish, ManualClock(), SeededEntropy())

    async def _publish(self, snapshot: Snapshot) -> Acknowledgement:
        self.published.append(snapshot)
        return Acknowledgement(snapshot.version, self._pending)

    async def with_acme(self) -> "Desk":
        await self.commands.create_tenant("ann", "acme")
        await self.commands.create_application("ann", "acme", "assistant")
        await bootstrap(self.commands, MODELS, {})
        return self


async def refused(coroutine: Coroutine[Any, Any, object], kind: type[errors.WeirError]) -> errors.WeirError:
    with pytest.raises(kind) as caught:
        await coroutine
    return caught.value


# ── tenants and applications ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_created_tenant_is_in_the_snapshot_that_was_published_and_in_the_audit_trail() -> None:
    """Protects the way of every change: stored, published, audited, acknowledged."""
    desk = Desk(pending=("gateway-2",))
    tenant, acknowledged = await desk.commands.create_tenant("ann", "acme", "Europe/Berlin", external_allowed=True)
    assert (tenant.name, tenant.time_zone, tenant.external_allowed, tenant.disabled) == ("acme", "Europe/Berlin", True, False)
    assert acknowledged == Acknowledgement(1, ("gateway-2",))
    assert desk.published[-1].tenants["acme"] == tenant
    [entry] = await desk.commands.audit_trail(10)
    assert (entry.actor, entry.action, entry.subject, entry.at_ms) == ("ann", "tenant.create", "acme", 1_700_000_000_000)
    chosen = {"time_zone": "Europe/Berlin", "external_allowed": True, "weight": 1, "leaves_its_pools": False}
    assert json.loads(entry.summary) == chosen | {"retention": None}


@pytest.mark.parametrize("name", ["", "-acme", ".acme", "Acme", "a" * 64, "a b", "acme\n", "ünit", "a/b"])
async def test_names_outside_the_pattern_are_refused_naming_the_field(name: str) -> None:
    """Protects names as path segments, file names and labels."""
    commands = (await Desk().with_acme()).commands
    refusal = await refused(commands.create_tenant("ann", name), errors.InvalidRequest)
    assert refusal.members["field"] == "name" and refusal.members["accepted"]
    await refused(commands.create_application("ann", "acme", name), errors.InvalidRequest)
    refusal = await refused(commands.create_admin_key("ann", name, Role.VIEWER), errors.InvalidRequest)
    assert refusal.members["field"] == "actor"


@pytest.mark.parametrize("name", ["bootstrap", "bootstrap-approver", "rollout"])
async def test_no_administrator_is_called_as_one_that_is_built_in(name: str) -> None:
    """Protects the audit trail, and what a start approves: who acts there by itself is nobody's key."""
    commands = (await Desk().with_acme()).commands
    refusal = await refused(commands.create_admin_key("ann", name, Role.OWNER), errors.InvalidRequest)
    assert refusal.members["field"] == "actor" and name in refusal.members["accepted"]


@pytest.mark.parametrize(
    "zone", ["", "Mars/Base", "../../etc/passwd", "/etc/localtime", "Europe", "a\0b", "x" * 5_000, "\ud800"]
)
async def test_a_time_zone_must_be_known_at_creation_and_at_change(zone: str) -> None:
    """Protects budget windows from zones that do not exist, and the file system from names that are paths."""
    commands = (await Desk().with_acme()).commands
    for attempt in (commands.create_tenant("ann", "other", zone), commands.patch_tenant("ann", "acme", time_zone=zone)):
        refusal = await refused(attempt, errors.InvalidRequest)
        assert refusal.members["field"] == "time_zone"


@pytest.mark.parametrize("weight", [0, -1, 1_001, INT64_MAX, True, False, 1.0, float("nan"), "1", "", [], {}])
async def test_only_whole_numbers_in_range_are_weights(weight: Any) -> None:
    """Protects the order between tenants from a weight that starves one or divides by nothing."""
    desk = await Desk().with_acme()
    for attempt in (
        desk.commands.create_tenant("ann", "other", weight=weight),
        desk.commands.patch_tenant("ann", "acme", weight=weight),
    ):
        refusal = await refused(attempt, errors.InvalidRequest)
        assert refusal.members == {"field": "weight", "accepted": "an integer 1 … 1000"}
    assert [(tenant.name, tenant.weight) for tenant in (await desk.store.load()).tenants] == [("acme", 1)]


async def test_a_weight_is_set_published_and_audited_before_and_after() -> None:
    """Protects the order between tenants: what is set is what the data plane gets, and the trail tells what it was."""
    desk = await Desk().with_acme()
    made, _ = await desk.commands.create_tenant("ann", "globex", weight=1_000)
    assert made.weight == desk.published[-1].tenants["globex"].weight == 1_000
    assert desk.published[-1].tenants["acme"].weight == 1
    changed, _ = await desk.commands.patch_tenant("ann", "acme", weight=3, disabled=False)
    assert changed == desk.published[-1].tenants["acme"] and changed.weight == 3
    version = desk.published[-1].version
    await desk.commands.patch_tenant("ann", "acme", weight=3)
    await desk.commands.patch_tenant("ann", "acme", time_zone="Asia/Tokyo")
    assert (desk.published[-1].version, desk.published[-1].tenants["acme"].weight) == (version + 1, 3)
    zone, weight, created = (json.loads(entry.summary) for entry in await desk.commands.audit_trail(3))
    assert (zone, weight, created["weight"]) == ({"time_zone": ["UTC", "Asia/Tokyo"]}, {"weight": [1, 3]}, 1_000)


async def test_a_retention_is_set_whole_published_ended_and_audited() -> None:
    """Protects what a tenant is kept for: it is replaced as a whole, other changes leave it, and the trail tells both sides."""
    desk = await Desk().with_acme()
    short, long = {"seconds": 60, "bytes": 2**20, "resume_grace_seconds": 5}, {"seconds": 7 * 86_400, "bytes": 2**50}
    made, _ = await desk.commands.create_tenant("ann", "globex", retention=short)
    assert made.keeps == desk.published[-1].tenants["globex"].keeps == Retention(60, 2**20, 5)
    assert (await desk.commands.patch_tenant("ann", "globex", weight=2))[0].retention == made.retention
    await desk.commands.patch_tenant("ann", "globex", retention=long)
    assert desk.published[-1].tenants["globex"].keeps == Retention(7 * 86_400, 2**50, 60)
    version = desk.published[-1].version
    await desk.commands.patch_tenant("ann", "globex", retention=long)
    assert desk.published[-1].version == version
    ending, _ = await desk.commands.patch_tenant("ann", "globex", retention=None)
    assert ending == desk.published[-1].tenants["globex"] and ending.keeps is None
    ended, replaced, weight, created = (json.loads(entry.summary) for entry in await desk.commands.audit_trail(4))
    whole = {**long, "resume_grace_seconds": 60}
    assert (ended, replaced) == ({"retention": [whole, None]}, {"retention": [short, whole]})
    assert (weight, created["retention"]) == ({"weight": [1, 2]}, short)


async def test_a_deleted_tenant_is_revoked_and_leaves_its_name_behind() -> None:
    """Protects records and running work: its keys stay known and refused, nothing finds it, and nobody is called so again."""
    desk = await Desk().with_acme()
    (_, secret), _ = await desk.commands.create_key("ann", "acme", "assistant")
    caller = desk.published[-1].authenticate(secret)
    await desk.commands.patch_tenant("ann", "acme", retention={"seconds": 60, "bytes": 2**20})
    deleted, _ = await desk.commands.delete_tenant("bob", "acme")
    assert deleted == desk.published[-1].tenants["acme"]
    assert (deleted.revoked, deleted.deleted, deleted.retention) == (True, True, None)
    with pytest.raises(errors.Revoked):
        desk.published[-1].authenticate(secret)
    assert desk.published[-1].is_revoked("acme", "assistant", caller.key)
    [entry] = await desk.commands.audit_trail(1, subject="acme")
    policy = {"seconds": 60, "bytes": 2**20, "resume_grace_seconds": 60}
    assert (entry.actor, entry.action) == ("bob", "tenant.delete")
    assert json.loads(entry.summary) == {"revoked": [False, True], "retention": [policy, None]}
    for attempt in (
        desk.commands.delete_tenant("bob", "acme"),
        desk.commands.revoke_tenant("bob", "acme"),
        desk.commands.patch_tenant("bob", "acme", disabled=False),
        desk.commands.create_application("bob", "acme", "other"),
        desk.commands.create_key("bob", "acme", "assistant"),
        desk.commands.put_limits("bob", Scope("acme"), {"concurrency": 1}),
    ):
        await refused(attempt, errors.NotFound)
    await refused(desk.commands.create_tenant("bob", "acme"), errors.AlreadyExists)


async def test_a_revoked_tenant_can_be_deleted() -> None:
    """Protects the order of things: what was ended first and forgotten later is forgotten all the same."""
    desk = await Desk().with_acme()
    await desk.commands.revoke_tenant("ann", "acme")
    deleted, _ = await desk.commands.delete_tenant("ann", "acme")
    assert deleted.revoked and desk.published[-1].tenants["acme"].deleted
    assert json.loads((await desk.commands.audit_trail(1))[0].summary) == {}


async def test_names_are_never_given_twice_even_after_a_revocation() -> None:
    """Protects records: a name means one tenant or application for ever."""
    commands = (await Desk().with_acme()).commands
    await commands.revoke_application("ann", "acme", "assistant")
    await refused(commands.create_application("ann", "acme", "assistant"), errors.AlreadyExists)
    await commands.revoke_tenant("ann", "acme")
    await refused(commands.create_tenant("ann", "acme"), errors.AlreadyExists)


async def test_a_patch_changes_what_is_given_and_can_be_taken_back() -> None:
    """Protects partial changes: what is not named stays."""
    desk = await Desk().with_acme()
    changed, _ = await desk.commands.patch_tenant("ann", "acme", disabled=True, time_zone="Asia/Tokyo")
    assert (changed.disabled, changed.time_zone, changed.external_allowed) == (True, "Asia/Tokyo", False)
    enabled, _ = await desk.commands.patch_tenant("ann", "acme", disabled=False)
    assert (enabled.disabled, enabled.time_zone) == (False, "Asia/Tokyo")
    assert desk.published[-1].tenants["acme"] == enabled


async def test_a_change_that_changes_nothing_writes_nothing_and_is_acknowledged() -> None:
    """Protects the audit trail and the version from changes that are none."""
    desk = await Desk().with_acme()
    before = await desk.store.load()
    await desk.commands.patch_tenant("ann", "acme", disabled=False)
    await desk.commands.put_limits("ann", Scope("acme"), {})
    await bootstrap(desk.commands, MODELS, {})
    assert (await desk.store.load()).version == before.version == desk.published[-1].version
    assert len(await desk.commands.audit_trail(100)) == before.version


async def test_what_is_revoked_stays_revoked_and_takes_nothing_new() -> None:
    """Protects revocation: it is final, also through what lies below."""
    desk = await Desk().with_acme()
    (key, secret), _ = await desk.commands.create_key("ann", "acme", "assistant")
    await desk.commands.revoke_application("ann", "acme", "assistant")
    with pytest.raises(errors.Revoked):
        desk.published[-1].authenticate(secret)
    await refused(desk.commands.create_key("ann", "acme", "assistant"), errors.Revoked)
    await refused(desk.commands.patch_application("ann", "acme", "assistant", None), errors.Revoked)
    await desk.commands.revoke_tenant("ann", "acme")
    for _ in range(2):
        revoked, _ = await desk.commands.revoke_tenant("ann", "acme")
        assert revoked.revoked
    await refused(desk.commands.patch_tenant("ann", "acme", disabled=False), errors.Revoked)
    await refused(desk.commands.create_application("ann", "acme", "other"), errors.Revoked)
    ended, _ = await desk.commands.revoke_key("ann", "acme", "assistant", key.id)
    assert ended.revoked


async def test_entitlements_are_none_for_every_alias_or_exactly_those_given() -> None:
    """Protects entitlement: an empty list is nothing, no list is everything."""
    desk = await Desk().with_acme()
    made, _ = await desk.commands.create_application("ann", "acme", "narrow", ServiceClass.BATCH, ["assistant", "org/next"])
    assert made.aliases == frozenset({"assistant", "org/next"}) and made.service_class is ServiceClass.BATCH
    nothing, _ = await desk.commands.patch_application("ann", "acme", "narrow", [])
    assert nothing.aliases == frozenset()
    every, _ = await desk.commands.patch_application("ann", "acme", "narrow", None)
    assert every.aliases is None
    refusal = await refused(desk.commands.patch_application("ann", "acme", "narrow", ["a b"]), errors.InvalidRequest)
    assert refusal.members["field"] == "aliases"


async def test_unknown_names_are_not_found() -> None:
    """Protects the answer to a mistyped name."""
    commands = (await Desk().with_acme()).commands
    for attempt in (
        commands.patch_tenant("ann", "nobody", disabled=True),
        commands.revoke_tenant("ann", "nobody"),
        commands.create_application("ann", "nobody", "x"),
        commands.patch_application("ann", "acme", "nothing", None),
        commands.revoke_application("ann", "acme", "nothing"),
        commands.create_key("ann", "acme", "nothing"),
        commands.revoke_key("ann", "acme", "assistant", "000000000000"),
        commands.revoke_admin_key("ann", "000000000000"),
    ):
        await refused(attempt, errors.NotFound)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_works_from_its_acknowledgement_until_its_revocation_and_its_secret_is_kept_nowhere() -> None:
    """Protects credentials: valid when acknowledged, refused when revoked, in clear nowhere."""
    desk = await Desk().with_acme()
    (key, secret), _ = await desk.commands.create_key("ann", "acme", "assistant")
    principal = desk.published[-1].authenticate(secret)
    assert (principal.tenant, principal.application, principal.key) == ("acme", "assistant", key.id)
    assert key.secret_sha256 == digest_of_key(secret)
    await desk.commands.revoke_key("ann", "acme", "assistant", key.id)
    with pytest.raises(errors.Revoked):
        desk.published[-1].authenticate(secret)
    random_part = secret.split("-")[2]
    assert random_part not in repr(await desk.store.load()) + repr(await desk.commands.audit_trail(100))


async def test_key_ids_are_unique_even_when_randomness_repeats_itself() -> None:
    """Protects the identity of keys against a bad source of randomness."""

    class Repeating(SeededEntropy):
        def token(self, size: int) -> bytes:
            return bytes(size)

    desk = await Desk().with_acme()
    commands = Commands(desk.store, desk._publish, ManualClock(), Repeating())
    await commands.create_key("ann", "acme", "assistant")
    await refused(commands.create_key("ann", "acme", "assistant"), errors.InternalError)


async def test_the_last_owner_cannot_lock_everybody_out() -> None:
    """Protects the cell from having no administrator."""
    commands = Desk().commands
    (first, _), _ = await commands.create_admin_key("ann", "ann", Role.OWNER)
    await commands.create_admin_key("ann", "bob", Role.VIEWER)
    await refused(commands.revoke_admin_key("ann", first.id), errors.Forbidden)
    (second, _), _ = await commands.create_admin_key("ann", "eve", Role.OWNER)
    await commands.revoke_admin_key("ann", first.id)
    await refused(commands.revoke_admin_key("ann", second.id), errors.Forbidden)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

amounts = st.none() | st.integers(0, INT64_MAX)
merges = st.lists(st.dictionaries(st.sampled_from(LIMIT_NAMES), amounts), max_size=6)


@given(merges)
@settings(max_examples=50, deadline=None)
def test_limits_read_back_exactly_as_merged(changes: list[dict[str, int | None]]) -> None:
    """Protects limits: whatever is merged reads back as set and is what the data plane gets."""

    async def merge_all() -> None:
        desk = await Desk().with_acme()
        expected: dict[str, int | None] = {}
        for change in changes:
            expected |= change
            (scope, answered), _ = await desk.commands.put_limits("ann", Scope("acme"), change)
            assert scope == Scope("acme") and answered == Limits(**expected)
            assert desk.published[-1].limits.get(scope, Limits()) == answered
            assert dict((await desk.store.load()).limits).get(scope, Limits()) == answered

    asyncio.run(merge_all())


@pytest.mark.parametrize("value", [-1, INT64_MAX + 1, True, False, 1.0, float("nan"), float("inf"), "1", "", [], {}])
async def test_only_whole_numbers_in_range_are_limits(value: object) -> None:
    """Protects limits from values that are no amounts."""
    desk = await Desk().with_acme()
    for name in LIMIT_NAMES:
        refusal = await refused(desk.commands.put_limits("ann", Scope("acme"), {name: value}), errors.InvalidRequest)
        assert refusal.members["field"] == name
    assert not (await desk.store.load()).limits


async def test_an_unknown_limit_is_refused() -> None:
    """Protects tenants from a limit that is accepted and not enforced."""
    commands = (await Desk().with_acme()).commands
    refusal = await refused(commands.put_limits("ann", Scope("acme"), {"requests_per_hour": 1}), errors.InvalidRequest)
    assert refusal.members["field"] == "requests_per_hour" and refusal.members["accepted"] == list(LIMIT_NAMES)


async def test_a_limit_attaches_only_to_what_exists_and_a_key_names_its_application() -> None:
    """Protects tenants from a limit on a scope that admission never looks up."""
    commands = (await Desk().with_acme()).commands
    await commands.create_application("ann", "acme", "other")
    (key, _), _ = await commands.create_key("ann", "acme", "assistant")
    for missing in (
        Scope("nobody"),
        Scope("acme", "nothing"),
        Scope("acme", "assistant", "000000000000"),
        Scope("acme", "other", key.id),
        Scope("acme", alias="nothing"),
    ):
        await refused(commands.put_limits("ann", missing, {"concurrency": 1}), errors.NotFound)
    (scope, _), _ = await commands.put_limits("ann", Scope("acme", key=key.id, alias="assistant"), {"concurrency": 1})
    assert scope == Scope("acme", "assistant", key.id, "assistant")


RULE_KEY = Issuer("https://id.example", ("weir",), ()).rule_key(SignInRule({"sub": "robot"}, "acme", "assistant"))
"""The id of a sign-in rule, of which control knows nothing before it is revoked."""
OTHERS_KEY = Issuer("https://id.example", ("weir",), ()).rule_key(SignInRule({"sub": "robot"}, "globex", "assistant"))


async def test_a_sign_in_rule_is_limited_as_a_key_within_its_application() -> None:
    """Protects limits by key for callers with tokens: the scope is what admission looks up, so the application is needed."""
    desk = await Desk().with_acme()
    scope = Scope("acme", "assistant", RULE_KEY)
    assert await desk.commands.put_limits("ann", scope, {"concurrency": 1})
    assert desk.published[-1].limits[scope].concurrency == 1
    refusal = await refused(
        desk.commands.put_limits("ann", Scope("acme", key=RULE_KEY), {"concurrency": 1}), errors.InvalidRequest
    )
    assert refusal.members["field"] == "application"
    for wrong in (
        Scope("acme", "nothing", RULE_KEY),
        Scope("acme", "assistant", "oidc-0123"),
        Scope("acme", "assistant", OTHERS_KEY),
    ):
        await refused(desk.commands.put_limits("ann", wrong, {"concurrency": 1}), errors.NotFound)


async def test_a_sign_in_rule_is_revoked_as_a_key() -> None:
    """Protects against a service account that leaks: its rule's callers are refused, running work included, and for good."""
    desk = await Desk().with_acme()
    await refused(desk.commands.revoke_key("ann", "acme", "nothing", RULE_KEY), errors.NotFound)
    await refused(desk.commands.revoke_key("ann", "acme", "assistant", OTHERS_KEY), errors.NotFound)
    caller = desk.published[-1].principal_of("acme", "assistant", RULE_KEY)
    assert caller is not None
    for _ in range(2):
        ended, _ = await desk.commands.revoke_key("ann", "acme", "assistant", RULE_KEY)
        assert ended.revoked and ended.id == RULE_KEY
    snapshot = desk.published[-1]
    assert snapshot.is_revoked("acme", "assistant", RULE_KEY)
    with pytest.raises(errors.Revoked):
        snapshot.check_standing(caller)
    with pytest.raises(errors.Unauthenticated):
        snapshot.authenticate(RULE_KEY)
    assert [entry.subject for entry in await desk.commands.audit_trail(1)] == [f"acme/assistant/{RULE_KEY}"]


# ── conflicts and publishing ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_version_conflict_is_planned_again_on_what_is_there() -> None:
    """Protects changes by several administrators: none is lost."""
    desk = await Desk().with_acme()
    desk.store.rivals = 3
    _, acknowledged = await desk.commands.create_tenant("ann", "globex")
    catalog = await desk.store.load()
    assert [tenant.name for tenant in catalog.tenants] == ["acme", "globex"]
    assert acknowledged.version == catalog.version == desk.published[-1].version


async def test_endless_conflicts_end_in_an_error_that_advises_a_retry() -> None:
    """Protects the bound of retries."""
    desk = await Desk().with_acme()
    desk.store.rivals = 1_000
    refusal = await refused(desk.commands.create_tenant("ann", "globex"), errors.AlreadyExists)
    assert refusal.retry_advice is True
    assert [tenant.name for tenant in (await desk.store.load()).tenants] == ["acme"]


async def test_commands_given_at_once_all_take_effect_in_rising_versions() -> None:
    """Protects the order of versions under concurrency."""
    desk = Desk()
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(desk.commands.create_tenant("ann", f"tenant-{number}"))
    assert len((await desk.store.load()).tenants) == 20
    assert [snapshot.version for snapshot in desk.published] == list(range(1, 21))


def test_a_snapshot_keeps_what_is_revoked_and_drops_empty_limits() -> None:
    """Protects what the data plane sees of the catalog."""
    catalog = Catalog(7, limits=[(Scope("acme"), Limits()), (Scope("globex"), Limits(concurrency=0))])
    snapshot = build_snapshot(catalog)
    assert snapshot.version == 7 and dict(snapshot.limits) == {Scope("globex"): Limits(concurrency=0)}
