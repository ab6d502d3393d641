"""Protects the management API's routes of signing keys, aliases and pools over a real socket."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.admin_stand import NEXT, NOON_MS, REVISION, SIMULATED, Stand, standing
from tests.signing_keys import private_key

from weir import errors
from weir.control.key_ring_commands import TIME_MS_MAX
from weir.core.registry.model import EngineKind
from weir.core.registry.signatures import public_key_of
from weir.core.tenancy import Role
from weir.ports import AuditEntry, CatalogChange

PUBLIC = public_key_of(private_key(2))
KEY: dict[str, Any] = {"name": "release", "public_key": PUBLIC, "roles": ["model"]}
POOL: dict[str, Any] = {"name": "more", "revision": "next@1"}


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


# ── signing keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_signing_key_is_trusted_within_its_time_and_revoked_for_good(stand: Stand) -> None:
    """Protects the key ring: what is set is what is shown, times as instants, and a revocation stays."""
    body = KEY | {"roles": ["model", "adapter", "model"], "tenant": "acme", "not_before": "2023-11-15T14:00:00+02:00"}
    added = await stand.good("POST", "/admin/v1/signing-keys", body | {"not_after": "2024-01-01"}, 201)
    assert added == {
        "name": "release",
        "fingerprint": added["fingerprint"],
        "public_key": PUBLIC,
        "roles": ["adapter", "model"],
        "tenant": "acme",
        "not_before": "2023-11-15T12:00:00.000Z",
        "not_after": "2024-01-01T00:00:00.000Z",
        "revoked": False,
    }
    assert await stand.last_entry() == ("owner", "key_ring.add", "release")
    build, release = (await stand.good("GET", "/admin/v1/signing-keys", role=Role.VIEWER))["signing_keys"]
    assert release == added and (build["name"], build["not_after"], build["tenant"]) == ("build", None, None)
    for _ in range(2):
        assert await stand.good("DELETE", "/admin/v1/signing-keys/release") == added | {"revoked": True}
        assert await stand.last_entry() == ("owner", "key_ring.revoke", "release")
    status, problem = await stand.bad("POST", "/admin/v1/signing-keys", KEY | {"name": "again"})
    assert (status, problem["code"]) == (409, "already_exists") and "release" in problem["detail"]


async def test_a_key_is_valid_from_now_and_times_are_in_years_that_can_be_shown(stand: Stand) -> None:
    """Protects the list of keys from a time that could not be written any more."""
    stand.clock.now_ms += 1_000
    added = await stand.good("POST", "/admin/v1/signing-keys", KEY | {"not_after": "9999-12-31T23:59:59Z"}, 201)
    assert (added["not_before"], added["not_after"]) == ("2023-11-15T12:00:01.000Z", "9999-12-31T23:59:59.000Z")
    assert TIME_MS_MAX == 253_402_300_799_000
    for field, text in (
        ("not_before", "0001-01-01T00:00:00+23:59"),
        ("not_before", "1969-12-31"),
        ("not_after", "9999-12-31T23:59:59.5Z"),
        ("not_after", "9999-12-31T23:59:59-23:59"),
        ("not_after", "2023-11-15T12:00:01Z"),
        ("not_before", "soon"),
    ):
        status, problem = await stand.bad("POST", "/admin/v1/signing-keys", KEY | {"name": "other", field: text})
        assert (status, problem["field"]) == (400, field) and problem["accepted"], text


# ── aliases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_alias_means_another_revision_from_now_on(stand: Stand) -> None:
    """Protects publication: in force in the snapshot, the default kept, audited with what it was, and once."""
    for _ in range(2):
        published = await stand.good("PUT", "/admin/v1/aliases/assistant", {"revision": "next@1"}, role=Role.RELEASER)
        assert published == {
            "name": "assistant",
            "tenant": None,
            "revision": "next@1",
            "default_max_output_tokens": 256,
            "canary": None,
        }
    entries = (await stand.good("GET", "/admin/v1/audit?limit=3"))["entries"]
    assert [entry["action"] for entry in entries].count("alias.publish") == 1
    assert entries[0]["summary"] == {"revision": "next@1", "tenant": None, "before": "small-1"}
    assert stand.published[-1].aliases["assistant"].revision == "next@1"
    assert (await stand.good("GET", "/admin/v1/revisions/next@1"))["state"] == "live"
    body = {"revision": "small-1", "default_max_output_tokens": 9, "tenant": "acme"}
    own = await stand.good("PUT", "/admin/v1/aliases/org/assistant:v2", body)
    assert (own["name"], own["tenant"], own["default_max_output_tokens"]) == ("org/assistant:v2", "acme", 9)
    assert await stand.good("GET", "/admin/v1/aliases/org%2Fassistant:v2?tenant=acme") == own
    assert (await stand.bad("GET", "/admin/v1/aliases/org/assistant:v2"))[0] == 404
    listed = (await stand.good("GET", "/admin/v1/aliases"))["aliases"]
    assert [alias["name"] for alias in listed] == ["assistant", "canary", "over", "paused", "proposed", "org/assistant:v2"]


async def test_an_alias_shows_who_else_gets_its_requests(stand: Stand) -> None:
    """Protects whoever looks at an alias: its canary's revision, share and rollout."""
    alias = await stand.good("GET", "/admin/v1/aliases/canary")
    assert alias["canary"] == {"rollout": "canary", "step": 0, "revision": "next@1", "weight": 10}
    status, problem = await stand.bad("PUT", "/admin/v1/aliases/canary", {"revision": "next@1"})
    assert (status, problem["code"], problem["rollout"]) == (409, "not_allowed_now", "canary")


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pool_is_made_changed_and_retired(stand: Stand) -> None:
    """Protects the pool routes: defaults, what is set, what stays, and that a name is never given twice."""
    made = await stand.good("POST", "/admin/v1/pools", POOL, 201, role=Role.OPERATOR)
    assert made == {
        **POOL,
        "replicas": 1,
        "concurrency": 1,
        "urls": [],
        "on_demand": False,
        "idle_stop_ms": 600_000,
        "tenant": None,
        "service_classes": ["interactive", "batch"],
        "input_tokens_max": None,
        "declared": False,
        "retired": False,
    }
    assert await stand.last_entry() == ("operator", "pool.create", "more")
    change = {"replicas": 3, "service_classes": ["batch"], "concurrency": None}
    for _ in range(2):
        changed = await stand.good("PATCH", "/admin/v1/pools/more", change)
        assert changed == made | {"replicas": 3, "service_classes": ["batch"]}
        assert await stand.last_entry() == ("owner", "pool.patch", "more")
    assert stand.published[-1].pools["more"].replicas == 3
    for _ in range(2):
        assert await stand.good("POST", "/admin/v1/pools/more/retire") == changed | {"retired": True}
        assert await stand.last_entry() == ("owner", "pool.retire", "more")
    assert "more" not in stand.published[-1].pools
    assert (await stand.bad("POST", "/admin/v1/pools", POOL))[1]["code"] == "already_exists"
    chosen = {"replicas": 0, "concurrency": 9, "on_demand": True, "idle_stop_ms": 1_000, "tenant": "acme"}
    chosen |= {"service_classes": ["batch"], "input_tokens_max": 1, "urls": []}
    assert (await stand.good("POST", "/admin/v1/pools", POOL | chosen | {"name": "own"}, 201)).items() >= chosen.items()


async def test_a_pool_behind_urls_names_addresses_only(stand: Stand) -> None:
    """Protects credentials from the catalog: an address has nothing but scheme, host, port and path, and is not repeated."""
    served = replace(NEXT, id="served@1", engine=EngineKind.OPENAI)
    entry = AuditEntry(NOON_MS, "test", "put", "", "{}")
    await stand.commands.commit(lambda catalog: (None, CatalogChange(entry, revisions=[served])))
    body = {"name": "served", "revision": "served@1", "urls": ["http://127.0.0.1:8000/v1", "https://[::1]/x"]}
    assert (await stand.good("POST", "/admin/v1/pools", body, 201))["urls"] == body["urls"]
    for url in (
        "127.0.0.1:1",
        "ftp://x",
        "http://",
        "http://me:secret@x",
        "http://x?key=secret",
        "http://x:99999",
        "http://[",
        "",
        "http://secret x",
    ):
        status, problem = await stand.bad("POST", "/admin/v1/pools", body | {"name": "other", "urls": [url]})
        assert (status, problem["field"]) == (400, "urls") and "secret" not in str(problem), url
    for urls in ([], ["http://x"] * 300):
        assert (await stand.bad("POST", "/admin/v1/pools", body | {"name": "other", "urls": urls}))[1]["field"] == "urls"


async def test_a_pool_that_an_alias_needs_or_a_start_declared_stays(stand: Stand) -> None:
    """Protects what serves from its pool's end, and a start's own pools from being changed under it."""
    assert (await stand.good("POST", "/admin/v1/pools/spare/retire"))["retired"] is True
    status, problem = await stand.bad("POST", "/admin/v1/pools/next/retire")
    assert (status, problem["code"], problem["aliases"]) == (409, "not_allowed_now", ["canary", "paused"])
    declared = replace((await stand.store.load()).pools[0], name="started", declared=True)
    entry = AuditEntry(NOON_MS, "test", "put", "", "{}")
    await stand.commands.commit(lambda catalog: (None, CatalogChange(entry, pools=[declared])))
    for method, path in (("PATCH", "started"), ("POST", "started/retire")):
        status, problem = await stand.bad(method, f"/admin/v1/pools/{path}", {"replicas": 2} if method == "PATCH" else None)
        assert (status, problem["code"]) == (409, "not_allowed_now")


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD_INPUT: tuple[tuple[str, str, Any, str, str | None], ...] = (
    ("GET", "revisions/nothing@1", None, "not_found", None),
    ("POST", "revisions/nothing@1/approve", None, "not_found", None),
    ("POST", "revisions/nothing@1/retire", None, "not_found", None),
    ("POST", "revisions/nothing@1/revoke", None, "not_found", None),
    ("POST", "revisions/%00%ff/revoke", None, "not_found", None),
    ("DELETE", "revisions/next@1", None, "method_not_allowed", None),
    ("POST", "signing-keys", None, "invalid_request", "body"),
    ("POST", "signing-keys", {}, "invalid_request", "name"),
    ("POST", "signing-keys", KEY | {"name": "Bad Name"}, "invalid_request", "name"),
    ("POST", "signing-keys", KEY | {"public_key": "no key"}, "invalid_request", "public_key"),
    ("POST", "signing-keys", KEY | {"public_key": private_key(2)}, "invalid_request", "public_key"),
    ("POST", "signing-keys", KEY | {"public_key": None}, "invalid_request", "public_key"),
    ("POST", "signing-keys", KEY | {"roles": []}, "invalid_request", "roles"),
    ("POST", "signing-keys", KEY | {"roles": "model"}, "invalid_request", "roles"),
    ("POST", "signing-keys", KEY | {"roles": ["king"]}, "invalid_request", "roles.0"),
    ("POST", "signing-keys", KEY | {"tenant": "nobody"}, "not_found", None),
    ("POST", "signing-keys", KEY | {"key": "x"}, "invalid_request", "key"),
    ("POST", "signing-keys", KEY | {"name": "build"}, "already_exists", None),
    ("DELETE", "signing-keys/nothing", None, "not_found", None),
    ("GET", "aliases/nothing", None, "not_found", None),
    ("GET", "aliases/assistant?tenant=acme", None, "not_found", None),
    ("GET", "aliases/assistant?user=acme", None, "invalid_request", "user"),
    ("PUT", "aliases/assistant", {}, "invalid_request", "revision"),
    ("PUT", "aliases/assistant", {"revision": "nothing@1"}, "not_found", None),
    ("PUT", "aliases/assistant", {"revision": "fresh@1"}, "not_allowed_now", None),
    ("PUT", "aliases/assistant", {"revision": "next@1", "tenant": "nobody"}, "not_found", None),
    ("PUT", "aliases/assistant", {"revision": "next@1", "weight": 1}, "invalid_request", "weight"),
    ("PUT", "aliases/a%20b", {"revision": "next@1"}, "invalid_request", "name"),
    *(
        (
            "PUT",
            "aliases/assistant",
            {"revision": "next@1", "default_max_output_tokens": wrong},
            "invalid_request",
            "default_max_output_tokens",
        )
        for wrong in (0, -1, 1_025, 2**64, 1.5, "9", True)
    ),
    ("POST", "pools", {"name": "more"}, "invalid_request", "revision"),
    ("POST", "pools", POOL | {"revision": "nothing@1"}, "not_found", None),
    ("POST", "pools", POOL | {"revision": "fresh@1"}, "not_allowed_now", None),
    ("POST", "pools", POOL | {"tenant": "nobody"}, "not_found", None),
    ("POST", "pools", POOL | {"name": "Bad Name"}, "invalid_request", "name"),
    ("POST", "pools", POOL | {"declared": True}, "invalid_request", "declared"),
    ("POST", "pools", POOL | {"urls": ["http://x"]}, "invalid_request", "urls"),
    ("POST", "pools", POOL | {"urls": "http://x"}, "invalid_request", "urls"),
    ("POST", "pools", POOL | {"on_demand": 1}, "invalid_request", "on_demand"),
    ("POST", "pools", POOL | {"service_classes": []}, "invalid_request", "service_classes"),
    ("POST", "pools", POOL | {"service_classes": ["batch", "batch"]}, "invalid_request", "service_classes"),
    ("POST", "pools", POOL | {"service_classes": ["urgent"]}, "invalid_request", "service_classes.0"),
    *(
        ("POST", "pools", POOL | {name: wrong}, "invalid_request", name)
        for name, values in {
            "replicas": (-1, 1_025, 2**64, True, "1", 1.5),
            "concurrency": (0, 65_537, 2**64),
            "idle_stop_ms": (0, 999, 86_400_001, 2**64),
            "input_tokens_max": (0, 100_000_001, 2**64),
        }.items()
        for wrong in values
    ),
    ("PATCH", "pools/nothing", {"replicas": 1}, "not_found", None),
    ("PATCH", "pools/next", {"replicas": -1}, "invalid_request", "replicas"),
    ("PATCH", "pools/next", {"service_classes": []}, "invalid_request", "service_classes"),
    ("PATCH", "pools/next", {"urls": []}, "invalid_request", "urls"),
    ("POST", "pools/nothing/retire", None, "not_found", None),
)


async def test_bad_input_is_a_problem_that_names_the_field(stand: Stand) -> None:
    """Protects every route from bad input: code, status, field, what is accepted, and nothing changed."""
    version = await stand.version()
    for method, path, body, code, field in BAD_INPUT:
        status, problem = await stand.bad(method, f"/admin/v1/{path}", body)
        assert (problem["code"], problem.get("field")) == (code, field), (method, path, body, problem)
        assert status == errors.ERROR_BY_CODE[code].http_status
        assert "accepted" in problem or code != "invalid_request"
    assert await stand.version() == version


async def test_text_that_is_no_text_is_refused(stand: Stand) -> None:
    """Protects stores and answers from halves of characters, which JSON can write and nobody else."""
    for method, path, body, field in (
        ("POST", "signing-keys", KEY | {"public_key": "\ud800"}, "public_key"),
        ("PUT", "aliases/assistant", {"revision": "\udfff"}, "revision"),
        ("POST", "pools", POOL | {"urls": ["http://\ud800"]}, "urls"),
        ("POST", "pools", POOL | {"tenant": "\0"}, "tenant"),
        ("POST", "rollouts", {"alias": "\ud800", "revision": "next@1"}, "alias"),
        ("POST", "rollouts/canary/roll-back", {"detail": "\ud800"}, "detail"),
        ("POST", "revisions", SIMULATED | {"evaluation": "\ud800"}, "evaluation"),
        ("POST", "revisions", SIMULATED | {"engine": "openai", "artifact": None, "served": "a\0"}, "served"),
        ("POST", "revisions", SIMULATED | {"arguments": {"\ud800": 1}}, "arguments.?"),
        ("PUT", "limits", {"scope": {"tenant": "acme"}, "\ud800": 1}, "body"),
        ("POST", "tenants", {"name": "x", "a\udfffb": 1}, "a?b"),
    ):
        content, sent = json.dumps(body).encode(), {"content-type": "application/json"}
        status, problem = await stand.bad(method, f"/admin/v1/{path}", content=content, headers=sent)
        assert (status, problem["code"], problem["field"]) == (400, "invalid_request", field)


async def test_what_a_part_has_not_acknowledged_is_said(stand: Stand) -> None:
    """Protects administrators: each change is stored, and names the parts that are behind."""
    stand.pending = ("gateway-2",)
    for method, path, body in (
        ("POST", "revisions/fresh@1/approve", None),
        ("PUT", "aliases/assistant", {"revision": "next@1"}),
        ("POST", "pools", POOL),
        ("POST", "signing-keys", KEY),
        ("DELETE", "signing-keys/build", None),
    ):
        assert (await stand.good(method, f"/admin/v1/{path}", body, 202))["pending"] == ["gateway-2"]
    assert REVISION.id in stand.published[-1].revisions
