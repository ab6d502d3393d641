"""The approved configuration: who a key belongs to, what an alias means for them, and that nobody can change it."""

from dataclasses import replace

import pytest

from weir import errors
from weir.core.metering import Price
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision, RevisionState
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import ApiKey, Application, Principal, ServiceClass, Tenant, digest_of_key, format_key

SECRET = format_key("0123456789ab", bytes(range(32)))
DIGEST = digest_of_key(SECRET)
assert DIGEST is not None
PRICE = Price(1, 200_000, 50_000, 600_000)
LOCAL = Revision("local@1", EngineKind.SIMULATED, "demo", 8_192, 2_048, 256, PRICE)
HOSTED = replace(LOCAL, id="hosted@1", external=True)
CALLER = Principal("acme", "web", "0123456789ab", ServiceClass.BATCH)

SNAPSHOT = Snapshot(
    version=3,
    tenants={"acme": Tenant("acme")},
    applications={("acme", "web"): Application("acme", "web", ServiceClass.BATCH)},
    keys={DIGEST: ApiKey("0123456789ab", "acme", "web", DIGEST)},
    aliases={"hosted": Alias("hosted", "hosted@1", 64), "assistant": Alias("assistant", "local@1", 64)},
    revisions={"local@1": LOCAL, "hosted@1": HOSTED},
    pools={"one": Pool("one", "hosted@1", 1, 4), "two": Pool("two", "local@1", 1, 4)},
)


def with_tenant(**changes: bool) -> Snapshot:
    return rebuilt(tenants={"acme": replace(SNAPSHOT.tenants["acme"], **changes)})  # type: ignore[arg-type]


def with_application(**changes: object) -> Snapshot:
    application = SNAPSHOT.applications["acme", "web"]
    return rebuilt(applications={("acme", "web"): replace(application, **changes)})  # type: ignore[arg-type]


def rebuilt(**changes: object) -> Snapshot:
    return replace(SNAPSHOT, **changes)  # type: ignore[arg-type]


def test_a_key_names_its_caller() -> None:
    """Protects identity: tenant, application and service class come from the credential."""
    assert SNAPSHOT.authenticate(SECRET) == CALLER


@pytest.mark.parametrize("presented", ["", "weir-x", SECRET[:-1], SECRET.upper(), format_key("0123456789ab", bytes(32))])
def test_an_unknown_key_is_refused(presented: str) -> None:
    """Protects the door: malformed, mistyped and never issued keys get the same answer."""
    with pytest.raises(errors.Unauthenticated, match="missing or unknown"):
        SNAPSHOT.authenticate(presented)


@pytest.mark.parametrize(
    "snapshot",
    [
        with_tenant(revoked=True),
        with_tenant(revoked=True, disabled=True),
        with_application(revoked=True),
        rebuilt(keys={DIGEST: replace(SNAPSHOT.keys[DIGEST], revoked=True)}),
    ],
    ids=["tenant", "tenant, also disabled", "application", "key"],
)
def test_revoked_identities_are_refused_and_their_work_is_cancelled(snapshot: Snapshot) -> None:
    """Protects revocation at each level: no new work, and running work must end."""
    with pytest.raises(errors.Revoked):
        snapshot.authenticate(SECRET)
    with pytest.raises(errors.Revoked):
        snapshot.check_standing(CALLER)
    assert snapshot.is_revoked("acme", "web", "0123456789ab")


def test_a_disabled_tenant_is_refused_and_its_work_drains() -> None:
    """Protects the difference: disabled forbids new work and does not cancel what runs."""
    snapshot = with_tenant(disabled=True)
    with pytest.raises(errors.Forbidden):
        snapshot.authenticate(SECRET)
    assert not snapshot.is_revoked("acme", "web", "0123456789ab")


def test_an_alias_resolves_to_its_revision() -> None:
    """Protects resolution: the alias and the immutable revision behind it."""
    assert SNAPSHOT.resolve(CALLER, "assistant") == (SNAPSHOT.aliases["assistant"], LOCAL)


@pytest.mark.parametrize(
    ("snapshot", "alias"),
    [
        (SNAPSHOT, "missing"),
        (with_application(aliases=frozenset({"hosted"})), "assistant"),
        (with_application(aliases=frozenset()), "assistant"),
        (rebuilt(revisions={"local@1": replace(LOCAL, state=RevisionState.REVOKED), "hosted@1": HOSTED}), "assistant"),
        (SNAPSHOT, "hosted"),
    ],
    ids=["unknown", "not entitled", "entitled to none", "revoked revision", "external not allowed"],
)
def test_what_may_not_be_used_looks_unknown(snapshot: Snapshot, alias: str) -> None:
    """Protects other tenants' names and the ban on external pools: the same answer for every reason."""
    with pytest.raises(errors.UnknownAlias, match=r"^This application has no such model alias\.$"):
        snapshot.resolve(CALLER, alias)
    assert alias not in [usable.name for usable in snapshot.aliases_for(CALLER)]


def test_external_revisions_serve_tenants_that_allow_it() -> None:
    """Protects consent: only an explicit permission opens hosted revisions; aliases are listed by name."""
    snapshot = with_tenant(external_allowed=True)
    assert snapshot.resolve(CALLER, "hosted")[1] is HOSTED
    assert [alias.name for alias in snapshot.aliases_for(CALLER)] == ["assistant", "hosted"]


def test_only_what_a_kept_pool_serves_is_offered() -> None:
    """Protects callers from aliases of an earlier start: unknown, not unavailable; what was approved stays on record."""
    snapshot = replace(with_tenant(external_allowed=True), version=9).serving({"two", "unheard of"})
    assert [alias.name for alias in snapshot.aliases_for(CALLER)] == ["assistant"] and list(snapshot.pools) == ["two"]
    with pytest.raises(errors.UnknownAlias):
        snapshot.resolve(CALLER, "hosted")
    assert snapshot.version == 9 and snapshot.revisions == SNAPSHOT.revisions and snapshot.keys == SNAPSHOT.keys


def test_a_snapshot_cannot_be_changed() -> None:
    """Protects the data plane: neither its mappings nor the dictionaries it was built from let anybody in."""
    tenants = {"acme": Tenant("acme")}
    snapshot = Snapshot(tenants=tenants)
    tenants["intruder"] = Tenant("intruder")
    assert list(snapshot.tenants) == ["acme"]
    for mapping in (snapshot.tenants, snapshot.applications, snapshot.keys, snapshot.aliases, snapshot.limits):
        with pytest.raises(TypeError):
            mapping["x"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        snapshot.version = 9  # type: ignore[misc]


CANARY = replace(LOCAL, id="local@2", state=RevisionState.APPROVED)
TRIED = rebuilt(
    aliases={"assistant": Alias("assistant", "local@1", 64, Canary("ro-1", 0, "local@2", 100))},
    revisions={"local@1": LOCAL, "local@2": CANARY},
    pools={"one": Pool("one", "local@1", 1, 4), "two": Pool("two", "local@2", 1, 4)},
)


def test_a_canary_takes_its_share_of_callers() -> None:
    """Protects the split: whoever says who it is may get the canary, and who does not gets the stable revision."""
    assert TRIED.resolve(CALLER, "assistant", "session")[1] is CANARY
    assert TRIED.resolve(CALLER, "assistant")[1] is LOCAL
    none = replace(TRIED, aliases={"assistant": Alias("assistant", "local@1", 64, Canary("ro-1", 0, "local@2", 0))})
    assert none.resolve(CALLER, "assistant", "session")[1] is LOCAL


@pytest.mark.parametrize(
    "changes",
    [
        {"revisions": {"local@1": LOCAL, "local@2": replace(CANARY, state=RevisionState.REGISTERED)}},
        {"revisions": {"local@1": LOCAL, "local@2": replace(CANARY, state=RevisionState.REVOKED)}},
        {"revisions": {"local@1": LOCAL, "local@2": replace(CANARY, tenant="globex")}},
        {"revisions": {"local@1": LOCAL, "local@2": replace(CANARY, external=True)}},
        {"revisions": {"local@1": LOCAL}},
        {"pools": {"one": Pool("one", "local@1", 1, 4)}},
        {"pools": {"two": Pool("two", "local@2", 1, 4, tenant="globex")}},
        {"pools": {"two": Pool("two", "local@2", 1, 4, service_classes=(ServiceClass.INTERACTIVE,))}},
    ],
)
def test_who_may_not_have_the_canary_stays_with_the_stable_revision(changes: dict[str, object]) -> None:
    """Protects entitlements: they are checked on the revision too, and a canary never takes anybody's service away."""
    assert replace(TRIED, **changes).resolve(CALLER, "assistant", "session")[1] is LOCAL  # type: ignore[arg-type]


def test_a_tenants_own_name_goes_before_a_shared_one() -> None:
    """Protects adapters: the same name in two tenants means to each its own, and to others the shared one or nothing."""
    own = replace(LOCAL, id="own@1", tenant="acme")
    named = {("acme", "assistant"): Alias("assistant", "own@1", 64, tenant="acme")}
    snapshot = rebuilt(tenant_aliases=named, revisions={"local@1": LOCAL, "hosted@1": HOSTED, "own@1": own})
    assert snapshot.resolve(CALLER, "assistant")[1] is own
    foreign = {("globex", "theirs"): Alias("theirs", "theirs@1", 64, tenant="globex")}
    others = rebuilt(tenant_aliases=foreign, revisions={"theirs@1": replace(LOCAL, id="theirs@1", tenant="globex")})
    with pytest.raises(errors.UnknownAlias):
        others.resolve(CALLER, "theirs")
    assert [alias.name for alias in others.aliases_for(CALLER)] == []
    assert [alias.tenant for alias in snapshot.aliases_for(CALLER)] == ["acme"]


def test_what_a_name_stands_for_does_not_depend_on_who_of_a_tenant_asks() -> None:
    """Protects whoever counts by aliases: the same rule as that by which callers get one, without what they may use."""
    own = Alias("assistant", "own@1", 64, tenant="acme")
    snapshot = rebuilt(tenant_aliases={("acme", "assistant"): own})
    assert snapshot.alias_named("acme", "assistant") is own
    assert snapshot.alias_named("globex", "assistant") is snapshot.aliases["assistant"]
    assert snapshot.alias_named("acme", "missing") is None


@pytest.mark.parametrize("state", [RevisionState.REGISTERED, RevisionState.RETIRED, RevisionState.REVOKED])
def test_only_an_approved_revision_serves(state: RevisionState) -> None:
    """Protects approval: an alias that names another one is not usable."""
    with pytest.raises(errors.UnknownAlias):
        rebuilt(revisions={"local@1": replace(LOCAL, state=state), "hosted@1": HOSTED}).resolve(CALLER, "assistant")


def test_a_canary_serves_its_share_when_the_stable_revision_is_revoked() -> None:
    """Protects callers of the canary: what they are pinned to is what has to serve."""
    revoked = replace(TRIED, revisions={"local@1": replace(LOCAL, state=RevisionState.REVOKED), "local@2": CANARY})
    assert revoked.resolve(CALLER, "assistant", "session")[1] is CANARY
    with pytest.raises(errors.UnknownAlias):
        revoked.resolve(CALLER, "assistant")


def test_what_is_served_keeps_canaries_that_are() -> None:
    """Protects a cell that serves some pools: neither an alias nor a canary without one of them is offered."""
    assert TRIED.serving({"one", "two"}).aliases == TRIED.aliases
    assert TRIED.serving({"one"}).aliases["assistant"].canary is None
    assert TRIED.serving({"two"}).aliases == TRIED.aliases, "a canary serves its share also without the stable revision"
    assert TRIED.serving({"other"}).aliases == {}
