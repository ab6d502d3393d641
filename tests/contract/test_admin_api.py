"""Protects the management API's routes over a real socket: good input, bad input, reports."""

import io
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.contract.admin_stand import CAPABILITIES, PACE, PRICE, Stand, book_usage, standing

from weir import errors
from weir.api.admin_views import generation_view
from weir.api.generations import generation_body
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import Timing
from weir.core.tenancy import LIMIT_NAMES, Role
from weir.messages import GenerationRecord
from weir.ports import UsageQuery, UsageRow


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    async with standing() as made:
        yield made


# ── tenants, applications, keys ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenants_life(stand: Stand) -> None:
    """Protects the tenant routes, from creation to revocation."""
    body = {"name": "initech", "time_zone": "Europe/Berlin", "external_allowed": None, "weight": None, "leaves_its_pools": None}
    created = await stand.good("POST", "/admin/v1/tenants", body, 201)
    shape = {"time_zone": "Europe/Berlin", "disabled": False, "revoked": False, "external_allowed": False, "weight": 1}
    assert created == {"name": "initech", **shape, "leaves_its_pools": False, "retention": None}
    assert await stand.good("GET", "/admin/v1/tenants/initech") == created
    assert [one["name"] for one in (await stand.good("GET", "/admin/v1/tenants"))["tenants"]] == ["acme", "globex", "initech"]
    changed = await stand.good("PATCH", "/admin/v1/tenants/initech", {"disabled": True, "external_allowed": True, "weight": 3})
    assert changed == created | {"disabled": True, "external_allowed": True, "weight": 3}
    assert stand.published[-1].tenants["initech"].disabled
    assert (await stand.good("PATCH", "/admin/v1/tenants/initech", {"disabled": False}))["disabled"] is False
    for _ in range(2):
        assert (await stand.good("POST", "/admin/v1/tenants/initech/revoke"))["revoked"] is True
    assert stand.published[-1].tenants["initech"].revoked
    status, problem = await stand.bad("PATCH", "/admin/v1/tenants/initech", {"disabled": False})
    assert (status, problem["code"]) == (403, "revoked")


async def test_a_tenant_is_told_whether_its_work_may_leave_its_pools(stand: Stand) -> None:
    """Protects dedicated pools: work stays in them until it is said otherwise, at creation or later, and that is in force."""
    created = await stand.good("POST", "/admin/v1/tenants", {"name": "initech", "leaves_its_pools": True}, 201)
    assert created["leaves_its_pools"] is True is stand.published[-1].tenants["initech"].leaves_its_pools
    kept = await stand.good("PATCH", "/admin/v1/tenants/initech", {"leaves_its_pools": False})
    assert kept == created | {"leaves_its_pools": False}
    assert (await stand.good("PATCH", "/admin/v1/tenants/initech", {"weight": 2}))["leaves_its_pools"] is False
    assert stand.published[-1].tenants["initech"].leaves_its_pools is False


async def test_a_tenants_weight_is_refused_with_its_range(stand: Stand) -> None:
    """Protects the order between tenants, and whoever mistypes a weight: no value is coerced, and the range is told."""
    for weight in (1, 1_000):
        created = await stand.good("POST", "/admin/v1/tenants", {"name": f"t-{weight}", "weight": weight}, 201)
        assert created["weight"] == weight == stand.published[-1].tenants[created["name"]].weight
    version = (await stand.store.load()).version
    refused: tuple[Any, ...] = (0, -1, 1_001, 2**64, True, False, 1.0, "1", "", [], {})
    for method, path, body in (("POST", "tenants", {"name": "x"}), ("PATCH", "tenants/acme", {})):
        for wrong in refused:
            status, problem = await stand.bad(method, f"/admin/v1/{path}", body | {"weight": wrong})
            assert (status, problem["code"], problem["field"]) == (400, "invalid_request", "weight"), (method, wrong)
            assert problem["accepted"] == "an integer 1 … 1000" and "from 1 to 1000" in problem["detail"]
    assert (await stand.store.load()).version == version
    schemas = (await stand.good("GET", "/admin/openapi.json"))["components"]["schemas"]
    for body_name in ("NewTenant", "TenantPatch"):
        number, none = schemas[body_name]["properties"]["weight"]["anyOf"]
        assert (number, none) == ({"type": "integer", "minimum": 1, "maximum": 1_000}, {"type": "null"})


BAD_INPUT: tuple[tuple[str, str, Any, str, str | None], ...] = (
    ("POST", "tenants", {"name": "Bad Name"}, "invalid_request", "name"),
    ("POST", "tenants", {"name": 5}, "invalid_request", "name"),
    ("POST", "tenants", {}, "invalid_request", "name"),
    ("POST", "tenants", None, "invalid_request", "body"),
    ("POST", "tenants", [], "invalid_request", "body"),
    ("POST", "tenants", "acme", "invalid_request", "body"),
    ("POST", "tenants", {"name": "x", "colour": 1}, "invalid_request", "colour"),
    ("POST", "tenants", {"name": "x", "time_zone": "Mars/Base"}, "invalid_request", "time_zone"),
    ("POST", "tenants", {"name": "x", "external_allowed": "yes"}, "invalid_request", "external_allowed"),
    ("POST", "tenants", {"name": "x", "leaves_its_pools": 1}, "invalid_request", "leaves_its_pools"),
    ("POST", "tenants", {"name": "acme"}, "already_exists", None),
    ("PATCH", "tenants/acme", {"disabled": 1}, "invalid_request", "disabled"),
    ("PATCH", "tenants/acme", {"name": "x"}, "invalid_request", "name"),
    ("PATCH", "tenants/acme", {"retention": {"seconds": 1, "bytes": 1}}, "invalid_request", "retention.bytes"),
    ("DELETE", "tenants/nobody", None, "not_found", None),
    ("PATCH", "tenants/nobody", {"disabled": True}, "not_found", None),
    ("GET", "tenants/nobody", None, "not_found", None),
    ("POST", "tenants/nobody/revoke", None, "not_found", None),
    ("POST", "tenants/acme/applications", {"name": "x", "service_class": "urgent"}, "invalid_request", "service_class"),
    ("POST", "tenants/acme/applications", {"name": "x", "aliases": "assistant"}, "invalid_request", "aliases"),
    ("POST", "tenants/acme/applications", {"name": "x", "aliases": [1]}, "invalid_request", "aliases.0"),
    ("POST", "tenants/acme/applications", {"name": "x", "aliases": ["a b"]}, "invalid_request", "aliases"),
    ("POST", "tenants/acme/applications", {"name": "assistant"}, "already_exists", None),
    ("POST", "tenants/nobody/applications", {"name": "x"}, "not_found", None),
    ("GET", "tenants/nobody/applications", None, "not_found", None),
    ("GET", "tenants/acme/applications/nothing", None, "not_found", None),
    ("PATCH", "tenants/acme/applications/assistant", {"service_class": "batch"}, "invalid_request", "service_class"),
    ("POST", "tenants/acme/applications/nothing/revoke", None, "not_found", None),
    ("POST", "tenants/acme/applications/nothing/keys", None, "not_found", None),
    ("POST", "tenants/acme/applications/assistant/keys", {"secret": "mine"}, "invalid_request", "secret"),
    ("GET", "tenants/acme/applications/nothing/keys", None, "not_found", None),
    ("DELETE", "tenants/acme/applications/assistant/keys/000000000000", None, "not_found", None),
    ("POST", "admin-keys", {"actor": "ann"}, "invalid_request", "role"),
    ("POST", "admin-keys", {"actor": "ann", "role": "king"}, "invalid_request", "role"),
    ("POST", "admin-keys", {"actor": "A", "role": "viewer"}, "invalid_request", "actor"),
    ("DELETE", "admin-keys/000000000000", None, "not_found", None),
    ("PUT", "limits", {"scope": {"tenant": "nobody"}, "concurrency": 1}, "not_found", None),
    ("PUT", "limits", {"scope": {"tenant": "acme", "alias": "nothing"}, "concurrency": 1}, "not_found", None),
    ("PUT", "limits", {"scope": {"tenant": "acme", "user": "x"}, "concurrency": 1}, "invalid_request", "user"),
    ("PUT", "limits", {"scope": {"tenant": "acme", "service_class": "x"}}, "invalid_request", "scope.service_class"),
    ("PUT", "limits", {"scope": {"tenant": "acme", "service_class": 1}}, "invalid_request", "scope.service_class"),
    ("PUT", "limits", {"scope": {}, "concurrency": 1}, "invalid_request", "scope.tenant"),
    ("PUT", "limits", {"scope": None}, "invalid_request", "scope"),
    ("PUT", "limits", {"concurrency": 1}, "invalid_request", "scope"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": -1}, "invalid_request", "concurrency"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": True}, "invalid_request", "concurrency"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": 1.0}, "invalid_request", "concurrency"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": "1"}, "invalid_request", "concurrency"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "concurrency": 2**63}, "invalid_request", "concurrency"),
    ("PUT", "limits", {"scope": {"tenant": "acme"}, "requests": 1}, "invalid_request", "requests"),
    ("PUT", "revisions/nothing/price", PRICE, "not_found", None),
    ("PUT", "revisions/small-1/price", PRICE | {"output_microusd": -1}, "invalid_request", "output_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"output_microusd": 10**9 + 1}, "invalid_request", "output_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"output_microusd": True}, "invalid_request", "output_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"output_microusd": 1.5}, "invalid_request", "output_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"output_microusd": None}, "invalid_request", "output_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"batch_percent": -1}, "invalid_request", "batch_percent"),
    ("PUT", "revisions/small-1/price", PRICE | {"batch_percent": 101}, "invalid_request", "batch_percent"),
    ("PUT", "revisions/small-1/price", PRICE | {"batch_percent": True}, "invalid_request", "batch_percent"),
    ("PUT", "revisions/small-1/price", PRICE | {"batch_percent": 0.5}, "invalid_request", "batch_percent"),
    ("PUT", "revisions/small-1/price", {"input_microusd": 1}, "invalid_request", "cached_input_microusd"),
    ("PUT", "revisions/small-1/price", PRICE | {"currency": "EUR"}, "invalid_request", "currency"),
    ("GET", "limits?tenant=nobody", None, "not_found", None),
    ("GET", "limits?user=x", None, "invalid_request", "user"),
    ("GET", "limits?service_class=x", None, "invalid_request", "service_class"),
    ("GET", "usage?tenant=nobody", None, "not_found", None),
    ("GET", "usage?group_by=colour", None, "invalid_request", "group_by"),
    ("GET", "usage?group_by=day,day", None, "invalid_request", "group_by"),
    ("GET", "usage?format=xml", None, "invalid_request", "format"),
    ("GET", "usage?since=2023-11-15", None, "invalid_request", "since"),
    ("GET", "usage?from=yesterday", None, "invalid_request", "from"),
    ("GET", "usage?to=2023-11-15T12:00:00", None, "invalid_request", "to"),
    ("GET", "usage?from=2023-11-15&to=2023-11-15", None, "invalid_request", "to"),
    ("GET", "usage?tenant=acme&tenant=globex", None, "invalid_request", "tenant"),
    ("GET", "usage?group_by=day&group_by=", None, "invalid_request", "group_by"),
    ("GET", "limits?alias=a&tenant=acme&alias=a", None, "invalid_request", "alias"),
    ("GET", "ledger", None, "invalid_request", "tenant"),
    ("GET", "ledger?tenant=", None, "invalid_request", "tenant"),
    ("GET", "ledger?tenant=nobody", None, "not_found", None),
    ("GET", "audit?limit=0", None, "invalid_request", "limit"),
    ("GET", "audit?limit=many", None, "invalid_request", "limit"),
    ("GET", "audit?before=never", None, "invalid_request", "before"),
    ("GET", "generations/acme/unknown", None, "not_found", None),
    ("GET", "generations/nobody/r:1", None, "not_found", None),
    ("GET", "generations/globex/r:1", None, "not_found", None),
    ("GET", "nothing", None, "not_found", None),
    ("GET", "tenants/", None, "not_found", None),
    ("DELETE", "limits", None, "method_not_allowed", None),
)


async def test_bad_input_is_a_problem_that_names_the_field(stand: Stand) -> None:
    """Protects every route from bad input: code, status, field, what is accepted, and nothing changed."""
    version = (await stand.store.load()).version
    for method, path, body, code, field in BAD_INPUT:
        status, problem = await stand.bad(method, f"/admin/v1/{path}", body)
        assert (problem["code"], problem.get("field")) == (code, field), (method, path, body)
        assert status == errors.ERROR_BY_CODE[code].http_status
        assert ("accepted" in problem) is (code == "invalid_request")
    assert (await stand.store.load()).version == version


async def test_an_applications_life(stand: Stand) -> None:
    """Protects the application routes, and that no aliases means every one."""
    path = "/admin/v1/tenants/acme/applications"
    body = {"name": "reports", "service_class": "batch", "aliases": ["assistant"]}
    created = await stand.good("POST", path, body, 201)
    assert created == {"tenant": "acme", **body, "revoked": False}
    assert await stand.good("GET", f"{path}/reports") == created
    every = await stand.good("PATCH", f"{path}/reports", {"aliases": None})
    assert every == {name: value for name, value in created.items() if name != "aliases"}
    assert await stand.good("PATCH", f"{path}/reports", {}) == every
    assert (await stand.good("PATCH", f"{path}/reports", {"aliases": []}))["aliases"] == []
    names = [entry["name"] for entry in (await stand.good("GET", path))["applications"]]
    assert names == ["assistant", "batch-jobs", "reports"]
    assert (await stand.good("POST", path, {"name": "plain"}, 201))["service_class"] == "interactive"
    assert (await stand.good("POST", f"{path}/reports/revoke"))["revoked"] is True
    assert stand.published[-1].applications["acme", "reports"].revoked


async def test_a_keys_life_shows_its_secret_once(stand: Stand) -> None:
    """Protects the key routes: the secret is in one answer only."""
    path = "/admin/v1/tenants/acme/applications/assistant/keys"
    created = await stand.good("POST", path, status=201)
    secret = created.pop("secret")
    assert stand.published[-1].authenticate(secret).key == created["id"]
    assert created == {"id": created["id"], "tenant": "acme", "application": "assistant", "revoked": False}
    assert created in (await stand.good("GET", path))["keys"]
    assert await stand.good("DELETE", f"{path}/{created['id']}") == created | {"revoked": True}
    with pytest.raises(errors.Revoked):
        stand.published[-1].authenticate(secret)
    other = "/admin/v1/tenants/globex/applications/assistant/keys"
    assert (await stand.bad("DELETE", f"{other}/{created['id']}"))[0] == 404


async def test_admin_keys_are_made_used_and_revoked(stand: Stand) -> None:
    """Protects administrators' credentials and the actor of the audit trail."""
    created = await stand.good("POST", "/admin/v1/admin-keys", {"actor": "zoe", "role": "operator"}, 201)
    stand.keys[Role.OPERATOR] = created.pop("secret")
    await stand.good("POST", "/admin/v1/tenants", {"name": "initech"}, 201, role=Role.OPERATOR)
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert (entry["actor"], entry["action"], entry["subject"]) == ("zoe", "tenant.create", "initech")
    assert created in (await stand.good("GET", "/admin/v1/admin-keys"))["admin_keys"]
    assert (await stand.good("DELETE", f"/admin/v1/admin-keys/{created['id']}"))["revoked"] is True
    status, problem = await stand.bad("GET", "/admin/v1/tenants", role=Role.OPERATOR)
    assert (status, problem["code"]) == (403, "revoked")
    owner = next(key for key in (await stand.good("GET", "/admin/v1/admin-keys"))["admin_keys"] if key["role"] == "owner")
    assert (await stand.bad("DELETE", f"/admin/v1/admin-keys/{owner['id']}"))[1]["code"] == "forbidden"


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_limits_merge_and_read_back_as_set(stand: Stand) -> None:
    """Protects the contract of PUT and GET limits."""
    scope = {"tenant": "acme", "application": "assistant", "alias": "assistant"}
    await stand.good("PUT", "/admin/v1/limits", {"scope": scope, "concurrency": 0, "tokens_per_minute": 2**63 - 1})
    entry = await stand.good("PUT", "/admin/v1/limits", {"scope": scope, "concurrency": None, "requests_per_minute": 7})
    assert entry == {"scope": scope, "tokens_per_minute": 2**63 - 1, "requests_per_minute": 7}
    query = {"tenant": "acme", "application": "assistant"}
    assert await stand.good("GET", "/admin/v1/limits", params=query | {"key": ""}) == {"limits": [entry]}
    both = (await stand.good("GET", "/admin/v1/limits?tenant=acme"))["limits"]
    assert [found["scope"] for found in both] == [{"tenant": "acme"}, scope]
    removed = dict.fromkeys(LIMIT_NAMES)
    assert await stand.good("PUT", "/admin/v1/limits", {"scope": scope, **removed}) == {"scope": scope}
    assert await stand.good("GET", "/admin/v1/limits", params=query) == {"limits": []}


async def test_limits_of_a_class_are_an_entry_of_their_own(stand: Stand) -> None:
    """Protects the contract of `service_class`: in the body, in the query and in what is shown, and absent where not set."""
    [wide] = (await stand.good("GET", "/admin/v1/limits?tenant=acme"))["limits"]
    for name, amount in (("batch", 2), ("interactive", 3)):
        scope = {"tenant": "acme", "alias": "assistant", "service_class": name}
        entry = await stand.good("PUT", "/admin/v1/limits", {"scope": scope, "concurrency": amount})
        assert entry == {"scope": scope, "concurrency": amount}
        query = {"tenant": "acme", "service_class": name}
        assert await stand.good("GET", "/admin/v1/limits", params=query) == {"limits": [entry]}
    await stand.good("PUT", "/admin/v1/limits", {"scope": scope, "concurrency": None})
    shown = (await stand.good("GET", "/admin/v1/limits", params={"tenant": "acme", "service_class": ""}))["limits"]
    assert [(each["scope"].get("service_class"), each.get("concurrency")) for each in shown] == [
        (None, wide.get("concurrency")),
        ("batch", 2),
    ]
    [entry] = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert entry["subject"] == "tenant=acme/alias=assistant/service_class=interactive"


async def test_a_key_alone_names_its_application_in_the_entry(stand: Stand) -> None:
    """Protects a key's limit: it is stored where admission looks."""
    path = "/admin/v1/tenants/acme/applications/assistant/keys"
    [key] = (await stand.good("GET", path))["keys"]
    entry = await stand.good("PUT", "/admin/v1/limits", {"scope": {"tenant": "acme", "key": key["id"]}, "concurrency": 2})
    assert entry["scope"] == {"tenant": "acme", "application": "assistant", "key": key["id"]}


async def test_a_change_that_a_part_has_not_acknowledged_answers_202_with_the_whole_result(stand: Stand) -> None:
    """Protects a caller from losing a secret when a part of the cell is slow."""
    stand.pending = ("gateway-2",)
    path = "/admin/v1/tenants/acme/applications/assistant/keys"
    created = await stand.good("POST", path, status=202)
    assert created["pending"] == ["gateway-2"] and created["secret"]
    entry = await stand.good("PUT", "/admin/v1/limits", {"scope": {"tenant": "acme"}, "concurrency": 2}, 202)
    assert entry["pending"] == ["gateway-2"] and entry["concurrency"] == 2
    assert "pending" not in (await stand.good("GET", "/admin/v1/limits?tenant=acme"))["limits"][0]


async def test_every_limit_is_set_and_read_back_as_set(stand: Stand) -> None:
    """Protects all nine limits: each is stored beside the others, in the order of the contract, up to the largest amount."""
    amounts = {name: 2**63 - 1 - number for number, name in enumerate(LIMIT_NAMES)}
    for name, amount in amounts.items():
        await stand.good("PUT", "/admin/v1/limits", {"scope": {"tenant": "globex"}, name: amount})
    [entry] = (await stand.good("GET", "/admin/v1/limits?tenant=globex"))["limits"]
    assert entry == {"scope": {"tenant": "globex"}, **amounts}
    [published] = [limits for scope, limits in stand.published[-1].limits.items() if scope.tenant == "globex"]
    assert {name: getattr(published, name) for name in LIMIT_NAMES} == amounts


async def test_the_audit_trail_shows_each_limit_before_and_after(stand: Stand) -> None:
    """Protects whoever asks who changed a limit: only what changed, from what, to what; no change is no entry."""
    scope = {"scope": {"tenant": "acme", "application": "assistant"}}
    for change in ({"concurrency": 2, "tokens_per_day": 0}, {"concurrency": 3, "tokens_per_day": 0}, {"concurrency": None}, {}):
        await stand.good("PUT", "/admin/v1/limits", scope | change)
    entries = (await stand.good("GET", "/admin/v1/audit?limit=4"))["entries"]
    assert [entry["summary"] for entry in entries[:3]] == [
        {"concurrency": [3, None]},
        {"concurrency": [2, 3]},
        {"concurrency": [None, 2], "tokens_per_day": [None, 0]},
    ]
    assert {entry["subject"] for entry in entries[:3]} == {"tenant=acme/application=assistant"}
    assert entries[3]["action"] != "limits.put"


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_usage_sums_by_group_within_the_half_open_range(stand: Stand) -> None:
    """Protects the usage report: sums, columns, range."""
    await book_usage(stand.ledger)
    sums = {
        "requests": 1,
        "input_tokens": 100,
        "cached_input_tokens": 40,
        "output_tokens": 50,
        "cost_microusd": 44,
        "platform_cost_microusd": 0,
    }
    query = {"tenant": "acme", "group_by": "application,key,alias,revision,day"}
    group = {"application": "assistant", "key": "k", "alias": "assistant", "revision": "small-1", "day": "2023-11-15"}
    assert await stand.good("GET", "/admin/v1/usage", params=query) == {"rows": [group | sums]}
    assert (await stand.good("GET", "/admin/v1/usage"))["rows"] == [sums]
    for range_of_time, number in (
        ({"from": "2023-11-15", "to": "2023-11-16"}, 1),
        ({"from": "2023-11-16"}, 0),
        ({"to": "2023-11-15"}, 0),
        ({"from": "2023-11-15T13:00:00+01:00"}, 1),
        ({"to": "2023-11-15T12:00:00Z"}, 0),
        ({"to": "2023-11-15t12:00:00.001z"}, 1),
    ):
        answer = await stand.good("GET", "/admin/v1/usage", params={"group_by": "tenant"} | range_of_time)
        assert len(answer["rows"]) == number, range_of_time
    assert (await stand.good("GET", "/admin/v1/usage?tenant=globex&group_by=tenant"))["rows"] == []


GROUPS = "tenant,application,key,alias,revision,day,status,workload_class"
CSV = f"""{GROUPS},requests,input_tokens,cached_input_tokens,output_tokens,cost_microusd,platform_cost_microusd
acme,assistant,k,assistant,small-1,2023-11-15,completed,short,1,100,40,50,44,0
"""


@pytest.mark.parametrize(
    ("asked", "accept"),
    [
        ({"format": "csv"}, "application/json"),
        ({}, "text/csv"),
        ({}, "text/html, Text/CSV;q=0.9, */*"),
        ({"format": ""}, "text/csv"),
        ({}, "application/json;q=0.5, text/csv; charset=utf-8; q=0.8, application/vnd.apache.parquet;q=0"),
    ],
)
async def test_usage_as_csv(stand: Stand, asked: dict[str, str], accept: str) -> None:
    """Protects spreadsheets and invoices: stable columns, whole micro-dollars, by name or by media type."""
    await book_usage(stand.ledger)
    answer = await stand.call("GET", "/admin/v1/usage", params={"group_by": GROUPS, **asked}, headers={"accept": accept})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == "attachment; filename=usage.csv"
    assert answer.text == CSV


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/json, text/csv",
        "text/html",
        "text/csv;q=0",
        "text/csv;q=0.000, application/vnd.apache.parquet; Q=0",
        "text/csv;q=0.1, application/json;q=0.9",
        "text/csv;q=nan, application/vnd.apache.parquet;q=2",
    ],
)
async def test_usage_is_json_unless_a_file_is_wanted(stand: Stand, accept: str) -> None:
    """Protects clients that accept anything."""
    assert await stand.good("GET", "/admin/v1/usage", headers={"accept": accept}) == {"rows": []}


class WatchedRows(list[UsageRow]):
    """Rows that remember who read them."""

    def __init__(self, rows: Sequence[UsageRow]) -> None:
        super().__init__(rows)
        self.readers: set[int] = set()

    def __iter__(self) -> Iterator[UsageRow]:
        self.readers.add(threading.get_ident())
        return super().__iter__()


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
async def test_a_report_is_written_off_the_loop(stand: Stand, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Protects everybody's tokens from a large report: no form of it is made on the event loop."""
    rows = WatchedRows([UsageRow({"tenant": f"tenant-{number}"}, 1, 2, 3, 4, 5, 6) for number in range(1_000)])

    async def usage(query: UsageQuery) -> list[UsageRow]:
        return rows

    monkeypatch.setattr(stand.ledger, "usage", usage)
    answer = await stand.call("GET", f"/admin/v1/usage?group_by=tenant&format={form}")
    assert answer.status_code == 200 and b"tenant-999" in answer.content
    assert rows.readers and threading.get_ident() not in rows.readers


async def test_a_report_of_too_many_groups_is_refused_with_what_to_do(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the cell's memory, and tells whoever asked how to ask."""
    await book_usage(stand.ledger)
    usage = stand.ledger.usage
    monkeypatch.setattr(stand.ledger, "usage", lambda query: usage(replace(query, groups_max=0)))
    status, problem = await stand.bad("GET", "/admin/v1/usage?group_by=day")
    assert (status, problem["code"], problem["field"]) == (400, "invalid_request", "group_by")
    assert "narrow" in problem["detail"]


async def test_an_empty_report_is_a_file_with_its_columns(stand: Stand) -> None:
    """Protects scripts from a file without a header."""
    answer = await stand.call("GET", "/admin/v1/usage?format=csv&group_by=day")
    assert answer.text.count("\n") == 1 and answer.text.startswith("day,requests,")


async def test_usage_as_parquet(stand: Stand) -> None:
    """Protects whoever loads usage into a warehouse: the columns of the CSV, sums as 64-bit integers."""
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    await book_usage(stand.ledger)
    answer = await stand.call("GET", f"/admin/v1/usage?format=parquet&group_by={GROUPS}")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    table = parquet.read_table(io.BytesIO(answer.content))
    header, line = CSV.splitlines()
    assert table.column_names == header.split(",")
    assert [str(value) for value in table.to_pylist()[0].values()] == line.split(",") and table.num_rows == 1
    assert [str(kind) for kind in table.schema.types] == ["string"] * 8 + ["int64"] * 6


async def test_parquet_without_its_extra_says_which_one(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects an operator from guessing what is missing."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, problem = await stand.bad("GET", "/admin/v1/usage?format=parquet")
    assert (status, problem["code"], problem["field"]) == (400, "unsupported_field", "format")
    assert "weir[parquet]" in problem["detail"] and problem["accepted"] == ["json", "csv"]


async def test_the_cell_is_shown_as_it_stands(stand: Stand) -> None:
    """Protects the reports that come from the running cell."""
    ledger = await stand.good("GET", "/admin/v1/ledger?tenant=acme")
    flying = {"scope": {"tenant": "acme"}, "kind": "concurrency", "limit": 5, "held": 2, "spent": 0, "resets_at": None}
    budget = {"scope": {"tenant": "acme"}, "kind": "tokens_per_day", "limit": 99, "held": 7, "spent": 9}
    assert ledger == {"accounts": [flying, budget | {"resets_at": "2023-11-16T00:00:00.000Z"}], "open_holds": 2}
    [replica] = (await stand.good("GET", "/admin/v1/replicas"))["replicas"]
    lanes_and_room = ("concurrency", "allowed", "running", "kv_tokens", "kv_tokens_reserved", "prefill_tokens")
    assert replica["state"] == "ready" and [replica[name] for name in lanes_and_room] == [4, 3, 1, 8_192, 900, 700]
    assert (replica["capabilities"], replica["pace"]) == (CAPABILITIES, PACE)
    [pool] = (await stand.good("GET", "/admin/v1/pools"))["pools"]
    assert (pool["name"], pool["replicas"], pool["ready"]) == ("small", 1, 1)
    assert (pool["tenant"], pool["service_classes"], pool["input_tokens_max"]) == ("acme", ["batch"], None)
    record = await stand.good("GET", "/admin/v1/generations/acme/r:1")
    assert (record["id"], record["status"], record["finish_reason"]) == ("gen-1", "failed", "engine_error")
    assert record["usage"]["output_tokens"] == 3 and record["usage"]["settlement"] == "posted"
    assert record["timing"] == {"queue_ms": 1.5, "ttft_ms": 20.0, "tpot_ms": None, "total_ms": 30.0}
    assert record["error"] == {"code": "engine_error", "detail": "It failed."}


@pytest.mark.parametrize("finish_reason", [None, FinishReason.DISCONNECT])
def test_a_generation_looks_as_it_does_to_its_tenant(finish_reason: FinishReason | None) -> None:
    """Protects support: administrators and tenants read the same record, running or ended, rounded alike."""
    status = Status.RUNNING if finish_reason is None else Status.CANCELLED
    record = GenerationRecord("gen-1", "r:1", 2, "assistant", "small-1", status, finish_reason, timing=Timing(1.23456))
    if finish_reason is not None:
        record = msgspec.structs.replace(record, error_code="request_cancelled")
    shown = generation_view(record).model_dump(mode="json", exclude_defaults=True)
    assert shown == {**msgspec.json.decode(msgspec.json.encode(generation_body(record))), "execution": 2}


async def test_the_audit_trail_pages_backwards_in_time(stand: Stand) -> None:
    """Protects the audit trail: order, form and continuation."""
    for number in range(3):
        stand.clock.now_ms += 1_000
        await stand.good("POST", "/admin/v1/tenants", {"name": f"tenant-{number}"}, 201)
    newest = (await stand.good("GET", "/admin/v1/audit?limit=1"))["entries"]
    assert (newest[0]["subject"], newest[0]["at"]) == ("tenant-2", "2023-11-15T12:00:03.000Z")
    chosen = {"external_allowed": False, "leaves_its_pools": False, "time_zone": "UTC", "weight": 1}
    assert newest[0]["summary"] == chosen | {"retention": None}
    earlier = (await stand.good("GET", "/admin/v1/audit", params={"limit": 1, "before": newest[0]["at"]}))["entries"]
    assert earlier[0]["subject"] == "tenant-1"
