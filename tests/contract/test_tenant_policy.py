"""Protects how a tenant's streams are kept, and a tenant's deletion, through the management API over a real socket."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contract.admin_stand import Stand, book_usage, standing

from weir import errors
from weir.core.tenancy import Retention, Role

RANGES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "seconds": ("an integer 1 … 604800", (0, -1, 604_801, True, 1.0, "1", [], None)),
    "bytes": ("an integer 65536 … 1125899906842624", (0, 65_535, 2**50 + 1, 2**64, True, 65_536.0, "65536", {}, None)),
    "resume_grace_seconds": ("an integer 1 … 3600", (0, -1, 3_601, True, 1.5, "60", [])),
}
"""Of each field, what is accepted and what is not."""
LEAST = {"seconds": 1, "bytes": 65_536, "resume_grace_seconds": 1}
MOST = {"seconds": 604_800, "bytes": 2**50, "resume_grace_seconds": 3_600}


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


def kept_of(stand: Stand, tenant: str) -> Retention | None:
    """What gateways are told to keep by."""
    return stand.published[-1].tenants[tenant].keeps


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_retention_is_set_at_creation_replaced_and_ended(stand: Stand) -> None:
    """Protects what a tenant is kept for: shown as set, replaced whole, ended by null alone, and in force each time."""
    created = await stand.good("POST", "/admin/v1/tenants", {"name": "initech", "retention": LEAST}, 201)
    assert created["retention"] == LEAST and kept_of(stand, "initech") == Retention(1, 65_536, 1)
    path = "/admin/v1/tenants/initech"
    for body in ({}, {"weight": 2}, {"disabled": None}):
        assert (await stand.good("PATCH", path, body))["retention"] == LEAST
    assert (await stand.good("PATCH", path, {"retention": MOST}, role=Role.OPERATOR))["retention"] == MOST
    plain = {"seconds": 60, "bytes": 2**20}
    changed = await stand.good("PATCH", path, {"retention": plain | {"resume_grace_seconds": None}})
    assert changed["retention"] == {**plain, "resume_grace_seconds": 60}
    assert changed == await stand.good("GET", path)
    assert changed in (await stand.good("GET", "/admin/v1/tenants"))["tenants"]
    assert (await stand.good("PATCH", path, {"retention": None}))["retention"] is None
    assert kept_of(stand, "initech") is None
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert entry["summary"] == {"retention": [changed["retention"], None]}
    for absent in ({}, {"retention": None}):
        made = await stand.good("POST", "/admin/v1/tenants", {"name": f"t-{len(absent)}", **absent}, 201)
        assert made["retention"] is None


async def test_a_wrong_retention_is_refused_by_the_field_within_it(stand: Stand) -> None:
    """Protects whoever mistypes one: no value is coerced, the range is told, and nothing is stored."""
    version = await stand.version()
    wrong: list[tuple[Any, str, Any]] = [
        (LEAST | {name: value}, f"retention.{name}", accepted)
        for name, (accepted, values) in RANGES.items()
        for value in values
    ]
    wrong += [({"seconds": 1}, "retention.bytes", RANGES["bytes"][0]), ({}, "retention.seconds", RANGES["seconds"][0])]
    wrong += [(LEAST | {"colour": 1}, "retention.colour", list(RANGES)), (LEAST | {"": 1}, "retention.", list(RANGES))]
    anything = "an object with seconds, bytes, resume_grace_seconds, or null"
    wrong += [(value, "retention", anything) for value in (1, True, False, "", "60", [], [LEAST])]
    for method, path, body in (("POST", "tenants", {"name": "x"}), ("PATCH", "tenants/acme", {"weight": 2})):
        for value, field, accepted in wrong:
            status, problem = await stand.bad(method, f"/admin/v1/{path}", body | {"retention": value})
            assert (status, problem["code"], problem["field"]) == (400, "invalid_request", field), (method, value)
            assert problem["accepted"] == accepted
    half = {"content": b'{"retention": {"\\ud800": 1}}', "headers": {"content-type": "application/json"}}
    status, problem = await stand.bad("PATCH", "/admin/v1/tenants/acme", **half)
    assert (status, problem["field"]) == (400, "retention.?")
    assert await stand.version() == version


async def test_the_document_tells_what_a_retention_takes(stand: Stand) -> None:
    """Protects generated clients: the schema has the fields and the ranges that are enforced, and null."""
    schemas = (await stand.good("GET", "/admin/openapi.json"))["components"]["schemas"]
    for body_name in ("NewTenant", "TenantPatch"):
        policy, none = schemas[body_name]["properties"]["retention"]["anyOf"]
        assert none == {"type": "null"} and policy["additionalProperties"] is False
        assert policy["required"] == ["seconds", "bytes"]
        assert {name: field["minimum"] for name, field in policy["properties"].items()} == LEAST
        assert {name: field["maximum"] for name, field in policy["properties"].items()} == MOST


async def test_a_revoked_tenant_keeps_nothing(stand: Stand) -> None:
    """Protects the end of a tenant: what it was kept for does not go on after its revocation."""
    await stand.good("PATCH", "/admin/v1/tenants/acme", {"retention": MOST})
    assert kept_of(stand, "acme") is not None
    await stand.good("POST", "/admin/v1/tenants/acme/revoke")
    assert kept_of(stand, "acme") is None
    assert (await stand.bad("PATCH", "/admin/v1/tenants/acme", {"retention": LEAST}))[1]["code"] == "revoked"


# ── deletion ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_deleted_tenant_is_found_nowhere_but_in_its_records(stand: Stand) -> None:
    """Protects the end of a tenant: it is shown no more and refused as revoked; usage, accounts and its name stay."""
    await book_usage(stand.ledger)
    key = await stand.good("POST", "/admin/v1/tenants/acme/applications/assistant/keys", status=201)
    await stand.good("PATCH", "/admin/v1/tenants/acme", {"retention": LEAST})
    reports = ("usage?tenant=acme&group_by=tenant", "ledger?tenant=acme", "generations/acme/r:1")
    before = [await stand.good("GET", f"/admin/v1/{path}") for path in reports]
    deleted = await stand.good("DELETE", "/admin/v1/tenants/acme")
    assert (deleted["name"], deleted["revoked"], deleted["retention"]) == ("acme", True, None)
    assert await stand.last_entry() == ("owner", "tenant.delete", "acme")
    assert [one["name"] for one in (await stand.good("GET", "/admin/v1/tenants"))["tenants"]] == ["globex"]
    limits = (await stand.good("GET", "/admin/v1/limits"))["limits"]
    assert {entry["scope"]["tenant"] for entry in limits} == {"globex"}
    assert [await stand.good("GET", f"/admin/v1/{path}") for path in reports] == before
    with pytest.raises(errors.Revoked):
        stand.published[-1].authenticate(key["secret"])
    assert (await stand.bad("POST", "/admin/v1/tenants", {"name": "acme"}))[1]["code"] == "already_exists"


GONE: tuple[tuple[str, str, Any], ...] = (
    ("DELETE", "tenants/acme", None),
    ("GET", "tenants/acme", None),
    ("PATCH", "tenants/acme", {"disabled": True}),
    ("POST", "tenants/acme/revoke", None),
    ("GET", "tenants/acme/applications", None),
    ("POST", "tenants/acme/applications", {"name": "x"}),
    ("GET", "tenants/acme/applications/assistant", None),
    ("PATCH", "tenants/acme/applications/assistant", {"aliases": None}),
    ("POST", "tenants/acme/applications/assistant/revoke", None),
    ("GET", "tenants/acme/applications/assistant/keys", None),
    ("POST", "tenants/acme/applications/assistant/keys", None),
    ("GET", "limits?tenant=acme", None),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": 1}),
    ("PUT", "aliases/assistant", {"revision": "small-1", "tenant": "acme"}),
    ("POST", "pools", {"name": "more", "revision": "next@1", "tenant": "acme"}),
)


async def test_nothing_can_be_done_with_a_deleted_tenant(stand: Stand) -> None:
    """Protects the finality of a deletion: every route that names the tenant answers as if it had never been."""
    await stand.good("DELETE", "/admin/v1/tenants/acme")
    version = await stand.version()
    for method, path, body in GONE:
        status, problem = await stand.bad(method, f"/admin/v1/{path}", body)
        assert (status, problem["code"]) == (404, "not_found"), (method, path)
    assert await stand.version() == version


async def test_a_deletion_that_a_gateway_has_not_heard_of_is_pending(stand: Stand) -> None:
    """Protects whoever must know that a tenant is ended everywhere."""
    stand.pending = ("gateway-2",)
    assert (await stand.good("DELETE", "/admin/v1/tenants/acme", status=202))["pending"] == ["gateway-2"]
