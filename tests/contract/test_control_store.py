"""The contract of ControlStore, on every store: every field comes back, versions fence, the audit is in order."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.contract.stores import KINDS, T0_MS, AnyCatalog, Cell

from weir import errors
from weir.control.catalog_changes import changed_catalog
from weir.core.metering import Price
from weir.core.registry.evidence import Tally
from weir.core.registry.golden_set import Score
from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision, RevisionPrice, RevisionState
from weir.core.registry.rollout import OnCanary, Paused, Verified
from weir.core.registry.rollout_plan import RolloutPlan, Step, Tolerances
from weir.core.registry.rollout_record import Rollout
from weir.core.tenancy import (
    RETENTION_BYTES_MAX,
    RETENTION_SECONDS_MAX,
    AdminKey,
    ApiKey,
    Application,
    Limits,
    Retention,
    Role,
    Scope,
    ServiceClass,
    Tenant,
)
from weir.core.windows import FormerZone
from weir.ports import AuditEntry, Catalog, CatalogChange
from weir.units import INT64_MAX

AUDIT = AuditEntry(T0_MS, "ada", "tenant.create", "acme", '{"time_zone": "Europe/Berlin"}')
FULL = CatalogChange(
    AUDIT,
    tenants=[
        Tenant(
            *("acme", "Europe/Berlin", True, True, True, (FormerZone("UTC", T0_MS), FormerZone("Asia/Tokyo", T0_MS + 1))),
            weight=7,
            leaves_its_pools=True,
            retention=Retention(RETENTION_SECONDS_MAX, RETENTION_BYTES_MAX, 1),
            deleted=True,
        ),
        Tenant("globex"),
    ],
    applications=[
        Application("acme", "all"),
        Application("acme", "none", aliases=frozenset()),
        Application("acme", "some", ServiceClass.BATCH, frozenset({"b", "a"}), revoked=True),
    ],
    keys=[ApiKey("0a", "acme", "all", b"\x00\xff" * 16, revoked=True), ApiKey("0b", "acme", "some", b"2" * 32)],
    admin_keys=[AdminKey("0c", "ada", Role.APPROVER, b"3" * 32, revoked=True)],
    aliases=[
        Alias("assistant", "rev-1", 256, Canary("ro-1", 2, "rev-2", 10, Tolerances(2, 6, 26, 27, 51))),
        Alias("assistant", "rev-2", 8, tenant="acme"),
    ],
    revisions=[
        Revision("rev-1", EngineKind.LLAMACPP, "/models/a b.gguf", 2_048, 1_024, 128, Price(3, 200_000, 50_000, INT64_MAX, 50)),
        Revision(
            "rev-2",
            EngineKind.OPENAI,
            "served",
            8,
            4,
            2,
            Price(1, 0, 0, 0, 0),
            chat=False,
            external=True,
            state=RevisionState.REVOKED,
            artifact_digest="sha256:00",
            arguments=(("batch_tokens", 256), ("flash_attention", True), ("rate", 0.5), ("type", "q8_0")),
            evaluation="sha256:01",
            tenant="acme",
            adapter_of="rev-1",
            registered_by="ada",
            approved_by="bob",
        ),
    ],
    pools=[
        Pool("pool-1", "rev-1", 2, 4),
        Pool("pool-2", "rev-2", 0, 1, ("http://127.0.0.1:1",), on_demand=True, idle_stop_ms=5),
        Pool("pool-3", "rev-1", 1, 8, tenant="acme", service_classes=(ServiceClass.BATCH,), input_tokens_max=INT64_MAX),
        Pool("pool-4", "rev-1", 1, 8, service_classes=(ServiceClass.BATCH, ServiceClass.INTERACTIVE), input_tokens_max=1),
        Pool("pool-5", "rev-1", 1, 8, declared=True),
        Pool("pool-6", "rev-1", 1, 8, retired=True),
    ],
    signing_keys=[
        SigningKey("build", "PEM", frozenset(KeyRole), None, T0_MS),
        SigningKey("old", "PEM 2", frozenset({KeyRole.ADAPTER}), "acme", 0, INT64_MAX, revoked=True),
    ],
    rollouts=[
        Rollout("ro-1", "assistant", "rev-1", "rev-2", RolloutPlan(), OnCanary(1, T0_MS, Tally(9, 2, 1), 5), "ada", T0_MS),
        Rollout(
            "ro-2",
            "assistant",
            "rev-2",
            "rev-1",
            RolloutPlan((Step(1, 2, 3), Step(100, 4, 5)), false_alarm_rate=0.125),
            Paused(Verified(T0_MS, Score(1, 2, ("a",))), T0_MS),
            "ada",
            T0_MS,
            "acme",
            Score(1, 2, ("a",)),
            ("pool-1",),
            ("pool-2", "pool-3"),
        ),
    ],
    limits=[
        (Scope("acme"), Limits(1, 2, 0, INT64_MAX, 3, 4, 5, 6, 7)),
        (Scope("acme", alias="assistant"), Limits(concurrency=3)),
        (Scope("acme", "all"), Limits(tokens_per_minute=5)),
        (Scope("acme", "all", "0a", "assistant"), Limits(spend_microusd_lifetime=0)),
        (Scope("globex", service_class=ServiceClass.BATCH), Limits(concurrency=4)),
        (Scope("globex", service_class=ServiceClass.INTERACTIVE), Limits(concurrency=5)),
        (Scope("globex", "jobs", "0b", "assistant"), Limits(tokens_per_day=6)),
        (Scope("globex", "jobs", "0b", "assistant", ServiceClass.BATCH), Limits(tokens_per_day=7, concurrency=0)),
    ],
)


@pytest.fixture(params=KINDS)
def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Cell:
    return Cell(request.param, tmp_path)


@pytest.fixture
async def catalog(cell: Cell) -> AsyncIterator[AnyCatalog]:
    async with cell.catalog() as opened:
        yield opened


def content(catalog: Catalog | CatalogChange) -> dict[str, list[object]]:
    return {field.name: list(getattr(catalog, field.name)) for field in fields(CatalogChange) if field.name != "audit"}


async def test_every_field_comes_back_after_a_restart(cell: Cell) -> None:
    """Protects: what is set is what is read, each field of each kind, ordered by key."""
    async with cell.catalog() as before:
        assert await before.load() == Catalog(version=0, prices=[], **{name: [] for name in content(FULL)})
        assert await before.apply(0, FULL) == 1
    async with cell.catalog() as after:
        loaded = await after.load()
        assert loaded.version == 1
        assert content(loaded) == content(FULL)
        assert loaded.prices == [RevisionPrice(revision.id, revision.price) for revision in FULL.revisions]
        assert await after.audit(10) == [AUDIT]


async def test_a_change_replaces_by_key_and_touches_nothing_else(catalog: AnyCatalog) -> None:
    """Protects: rows are replaced whole by their key; an entry without limits removes its row."""
    await catalog.apply(0, FULL)
    tenant = Tenant("acme", "UTC")
    scope = Scope("acme")
    change = CatalogChange(
        AUDIT,
        tenants=[tenant],
        keys=[replace(FULL.keys[1], revoked=True)],
        limits=[(scope, Limits(concurrency=9)), (Scope("acme", "all"), Limits())],
    )
    assert await catalog.apply(1, change) == 2
    loaded = await catalog.load()
    assert loaded.tenants == [tenant, Tenant("globex")]
    assert [key.revoked for key in loaded.keys] == [True, True]
    assert loaded.limits == [(scope, Limits(concurrency=9)), *FULL.limits[1:2], *FULL.limits[3:]]
    assert (loaded.applications, loaded.revisions) == (list(FULL.applications), list(FULL.revisions))


async def test_what_a_change_makes_of_a_catalog_is_known_without_reading(catalog: AnyCatalog) -> None:
    """Protects what is in force: changes are not read back, so each must be known to give exactly what the store then has."""
    scope, dearer = Scope("acme"), Price(9, 1, 1, 1)
    changes = [
        FULL,
        CatalogChange(AUDIT),
        CatalogChange(AUDIT, tenants=[Tenant("acme", "UTC"), Tenant("aaa"), Tenant("zzz")]),
        CatalogChange(AUDIT, tenants=[Tenant("aaa", retention=Retention(1, 2**16)), Tenant("zzz", revoked=True, deleted=True)]),
        CatalogChange(AUDIT, keys=[replace(FULL.keys[1], revoked=True), ApiKey("0aa", "acme", "all", b"7" * 32)]),
        CatalogChange(AUDIT, limits=[(scope, Limits(concurrency=9)), (Scope("acme", "all"), Limits())]),
        CatalogChange(AUDIT, limits=[(Scope("acme", "all"), Limits(concurrency=1)), (Scope("aaa", alias="x"), Limits(1))]),
        CatalogChange(AUDIT, limits=[(Scope("nobody"), Limits()), (Scope("acme", "all"), Limits())]),
        CatalogChange(
            AUDIT,
            limits=[
                (Scope("globex", service_class=ServiceClass.BATCH), Limits()),
                (Scope("acme", service_class=ServiceClass.BATCH), Limits(concurrency=1)),
                (Scope("acme", alias="assistant", service_class=ServiceClass.BATCH), Limits(concurrency=2)),
            ],
        ),
        CatalogChange(AUDIT, revisions=[replace(FULL.revisions[0], price=dearer)], aliases=[Alias("assistant", "rev-2", 1)]),
        CatalogChange(AUDIT, revisions=[replace(FULL.revisions[0], price=dearer, state=RevisionState.REVOKED)]),
        CatalogChange(AUDIT, applications=[Application("aaa", "app")], pools=[replace(FULL.pools[0], replicas=5)]),
    ]
    known = await catalog.load()
    for change in changes:
        known = changed_catalog(known, change, await catalog.apply(known.version, change))
        stored = await catalog.load()
        assert known.version == stored.version and list(known.prices) == list(stored.prices)
        assert content(known) == content(stored)


async def test_a_change_on_another_version_is_refused_whole(catalog: AnyCatalog) -> None:
    """Protects: two administrators cannot overwrite each other unseen: one wins, the other leaves no trace."""
    await catalog.apply(0, FULL)
    for stale in (0, 2):
        with pytest.raises(errors.AlreadyExists):
            await catalog.apply(stale, CatalogChange(replace(AUDIT, actor="eve"), tenants=[Tenant("evil")]))
    loaded = await catalog.load()
    assert (loaded.version, content(loaded)) == (1, content(FULL))
    assert await catalog.audit(10) == [AUDIT]


async def test_the_version_is_that_of_the_last_change(cell: Cell) -> None:
    """Protects whoever asks only whether something changed, also from another process."""
    async with cell.catalog() as catalog, cell.catalog() as other:
        assert [await catalog.version(), await other.version()] == [0, 0]
        for version in (1, 2):
            await catalog.apply(version - 1, CatalogChange(AUDIT))
            assert [await catalog.version(), await other.version(), (await other.load()).version] == [version] * 3
        with pytest.raises(errors.AlreadyExists):
            await other.apply(1, CatalogChange(AUDIT))
        assert await other.version() == 2


async def test_prices_are_kept_by_version_and_never_changed(catalog: AnyCatalog) -> None:
    """Protects: a hold's price can be found as long as it may be asked for; another price needs another version."""
    await catalog.apply(0, FULL)
    first, *_ = FULL.revisions
    dearer = replace(first, price=replace(first.price, version=4, output_microusd=7, batch_percent=99))
    assert await catalog.apply(1, CatalogChange(AUDIT, revisions=[dearer])) == 2
    for other in (replace(dearer.price, input_microusd=8), replace(dearer.price, batch_percent=98)):
        with pytest.raises(AssertionError):
            await catalog.apply(2, CatalogChange(AUDIT, revisions=[replace(dearer, price=other)]))
    loaded = await catalog.load()
    assert loaded.revisions[0] == dearer
    assert [entry.price for entry in loaded.prices if entry.revision == first.id] == [first.price, dearer.price]


async def test_of_concurrent_changes_one_wins(catalog: AnyCatalog) -> None:
    """Protects: of changes made on the same version at once exactly one is applied."""
    changes = [CatalogChange(AUDIT, tenants=[Tenant(f"t{i}")]) for i in range(5)]
    answers = await asyncio.gather(*(catalog.apply(0, change) for change in changes), return_exceptions=True)
    assert sorted(type(answer).__name__ for answer in answers) == ["AlreadyExists"] * 4 + ["int"]
    assert len((await catalog.load()).tenants) == 1


async def test_the_audit_trail_is_newest_first(catalog: AnyCatalog) -> None:
    """Protects: audit pages are newest first, also within one millisecond, and go on before a time."""
    entries = [AuditEntry(T0_MS + i // 2, "ada", f"act{i}", "acme", "{}") for i in range(6)]
    for version, entry in enumerate(entries):
        await catalog.apply(version, CatalogChange(entry))
    assert await catalog.audit(3) == [entries[5], entries[4], entries[3]]
    assert await catalog.audit(10, before_ms=T0_MS + 2) == [entries[3], entries[2], entries[1], entries[0]]
    assert await catalog.audit(10, before_ms=T0_MS) == []


async def test_the_audit_trail_of_a_subject_is_its_own(catalog: AnyCatalog) -> None:
    """Protects whoever asks what happened to one thing: its entries alone, newest first, however many others lie between."""
    entries = [AuditEntry(T0_MS + i, "ada", f"act{i}", f"thing{i % 3}", "{}") for i in range(9)]
    for version, entry in enumerate(entries):
        await catalog.apply(version, CatalogChange(entry))
    assert await catalog.audit(2, subject="thing1") == [entries[7], entries[4]]
    assert await catalog.audit(9, before_ms=T0_MS + 7, subject="thing1") == [entries[4], entries[1]]
    assert await catalog.audit(9, subject="thing") == []


async def test_a_lock_makes_the_catalog_unavailable_only_while_it_lasts(tmp_path: Path) -> None:
    """Protects: a foreign lock refuses changes with our own error, loads go on, and nothing needs a restart."""
    cell = Cell("sqlite", tmp_path, lock_wait_ms=50)
    async with cell.catalog() as catalog:
        with closing(sqlite3.connect(cell.path, isolation_level=None)) as foreign:
            foreign.execute("BEGIN IMMEDIATE")
            with pytest.raises(errors.LedgerUnavailable):
                await catalog.apply(0, FULL)
            assert (await catalog.load()).version == await catalog.version() == 0
            foreign.execute("ROLLBACK")
        assert await catalog.apply(0, FULL) == 1
    for closed in (catalog.load, catalog.version):
        with pytest.raises(errors.LedgerUnavailable):
            await closed()
