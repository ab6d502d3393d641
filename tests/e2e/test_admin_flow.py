"""What an administrator sets is in force at once, read back as set, and adds up: tenants, keys, limits, usage, ledger."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.e2e.conftest import engine_process
from tests.e2e.http_client import Account, Json, Reply, admin_of, demo_account, exchange, new_account
from tests.e2e.running_cell import RunningCell, running_cell

LONG = "river"
"""A prompt whose reply has 213 tokens: seven seconds on the slow cell."""

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
BUDGETS = [f"{unit}_{window}" for unit in ("spend_microusd", "tokens") for window in ("per_day", "per_month", "lifetime")]
CODES = {"requests_per_minute": "requests_limited", "tokens_per_minute": "tokens_limited", "concurrency": "concurrency_limited"}
CODES |= dict.fromkeys(BUDGETS, "budget_exhausted")
SCOPES = [
    {"tenant"},
    {"tenant", "application"},
    {"tenant", "application", "key"},
    {"tenant", "alias"},
    {"tenant", "application", "alias"},
    {"tenant", "application", "key", "alias"},
]


def scope_of(account: Account, parts: set[str]) -> dict[str, str]:
    whole = {"tenant": account.tenant, "application": account.application, "key": account.key_id, "alias": "assistant"}
    return {name: value for name, value in whole.items() if name in parts}


def refusal(reply: Reply, status: int, code: str) -> Json:
    assert reply.status == status, reply.body
    assert reply.json["code"] == code, reply.body
    return reply.json


def cost_of(usage: Mapping[str, int]) -> int:
    return -(-(usage["input_tokens"] * 200_000 + usage["output_tokens"] * 600_000) // 1_000_000)


def tokens_of(usage: Mapping[str, int]) -> int:
    return usage["input_tokens"] + usage["output_tokens"]


def noon_zone() -> tuple[ZoneInfo, datetime]:
    """A time zone in which no day or month ends within hours, and the time there."""
    now = datetime.now(UTC)
    offset = now.hour - 12
    zone = ZoneInfo(f"Etc/GMT{offset:+d}")  # named the other way round: east of Greenwich is minus
    return zone, now.astimezone(zone)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("parts", SCOPES, ids=lambda parts: "-".join(sorted(parts)))
def test_a_request_limit_holds_for_its_scope(account: Account, parts: set[str]) -> None:
    """Protects every kind of scope: refused with the caller's own numbers and an exact time, and read back as set."""
    scope = scope_of(account, parts)
    assert account.limit(scope, requests_per_minute=1) == {"scope": scope, "requests_per_minute": 1}
    assert account.generate().status == 200
    reply = account.generate()
    problem = refusal(reply, 429, "requests_limited")
    assert (problem["scope"], problem["limit"], problem["used"], problem["held"]) == (scope, 1, 1, 0)
    assert RFC3339.fullmatch(problem["resets_at"])
    resets = datetime.fromisoformat(problem["resets_at"])
    assert 0 < (resets - datetime.now(UTC)).total_seconds() <= 60
    assert int(reply.headers["retry-after"]) == -(-int(reply.headers["retry-after-ms"]) // 1000)
    assert 50_000 <= int(reply.headers["retry-after-ms"]) <= 60_000
    assert reply.headers.get("x-should-retry") != "false"
    found = account.admin.done("GET", f"/limits?tenant={account.tenant}")["limits"]
    assert found == [{"scope": scope, "requests_per_minute": 1}]


def test_a_limit_of_another_key_application_or_tenant_is_not_ours(account: Account, fast_cell: RunningCell) -> None:
    """Protects that a limit refuses nobody outside its scope."""
    other = new_account(fast_cell)
    path = f"/tenants/{account.tenant}/applications"
    account.admin.done("POST", path, {"name": "second"})
    keys = [account.admin.done("POST", f"{path}/{name}/keys")["secret"] for name in ("app", "second")]
    account.limit(scope_of(account, {"application", "key"}), requests_per_minute=0)
    refusal(account.generate(), 429, "requests_limited")
    body = {"model_alias": "assistant", "input": "x", "max_output_tokens": 1}
    for key in (*keys, other.key):
        assert exchange(fast_cell.api, "POST", "/v1/generations", key=key, body=body).status == 200
    account.limit({"application": "app"}, requests_per_minute=0)
    statuses = [exchange(fast_cell.api, "POST", "/v1/generations", key=key, body=body).status for key in keys]
    assert statuses == [429, 200]


def test_a_token_limit_counts_input_and_the_output_bound(account: Account) -> None:
    """Protects tokens per minute: the worst case is taken, what can never fit is a 400, the unused part comes back."""
    account.limit(tokens_per_minute=300)
    never = refusal(account.generate(max_output_tokens=300), 400, "exceeds_limit_capacity")
    assert never["limit"] == "tokens_per_minute" and never["scope"] == {"tenant": account.tenant}
    assert never["capacity"] == 300 and never["needed"] > 300
    first = account.generate(input="Hi", max_output_tokens=200)
    used = first.json["usage"]["input_tokens"] + first.json["usage"]["output_tokens"]
    reply = account.generate(max_output_tokens=280)
    problem = refusal(reply, 429, "tokens_limited")
    assert problem["limit"] == 300 and used - 30 <= problem["used"] <= used
    assert 0 < int(reply.headers["retry-after-ms"]) <= 60_000


def test_a_budget_is_exhausted_for_good(account: Account) -> None:
    """Protects lifetime spend: the table's price is posted, the refusal tells no time to wait, a raised limit admits."""
    account.limit(spend_microusd_lifetime=100)
    first = account.generate(max_output_tokens=100).json
    assert first["usage"]["cost_microusd"] == cost_of(first["usage"])
    reply = account.generate(max_output_tokens=100)
    problem = refusal(reply, 429, "budget_exhausted")
    assert problem["scope"] == {"tenant": account.tenant} and problem["limit"] == 100
    assert (problem["used"], problem["held"]) == (first["usage"]["cost_microusd"], 0)
    assert "retry-after" not in reply.headers and reply.headers["x-should-retry"] == "false"
    refusal(account.generate(max_output_tokens=1000), 400, "exceeds_limit_capacity")
    account.limit(spend_microusd_lifetime=1_000)
    assert account.generate(max_output_tokens=100).status == 200


@pytest.mark.parametrize("limit", [name for name in BUDGETS if not name.endswith("lifetime")])
def test_a_budget_of_a_day_or_month_says_when_it_resets(fast_cell: RunningCell, limit: str) -> None:
    """Protects budgets to the last unit: refused with window, figures and a true time in the tenant's zone; one more admits."""
    zone, now = noon_zone()
    with new_account(fast_cell, time_zone=zone.key) as account:
        before = account.generate(max_output_tokens=100).json["usage"]
        worst = {**before, "output_tokens": 100}
        counted = cost_of if limit.startswith("spend") else tokens_of
        used, needed = counted(before), counted(worst)
        account.limit(None, **{limit: used + needed - 1})
        reply = account.generate(max_output_tokens=100)
        problem = refusal(reply, 429, "budget_exhausted")
        today = now.date()
        kind, first, after = ("day", today.isoformat(), today + timedelta(days=1))
        if limit.endswith("month"):
            kind, first, after = ("month", today.isoformat()[:7], (today.replace(day=1) + timedelta(days=31)).replace(day=1))
        resets = datetime(after.year, after.month, after.day, tzinfo=zone)
        expected = {"limit_name": limit, "limit": used + needed - 1, "used": used, "held": 0, "window": f"{kind}/{first}"}
        assert expected.items() <= problem.items() and problem["scope"] == {"tenant": account.tenant}
        assert abs(datetime.fromisoformat(problem["resets_at"]) - resets) < timedelta(seconds=1)
        left_s = (resets - datetime.now(UTC)).total_seconds()
        assert 0 <= int(reply.headers["retry-after"]) - left_s < 5 and reply.headers["x-should-retry"] == "false"
        row = account.account(limit)
        assert (row["limit"], row["spent"], row["held"]) == (used + needed - 1, used, 0)
        assert datetime.fromisoformat(row["resets_at"]) == resets
        account.limit(None, **{limit: used + needed})
        assert account.generate(max_output_tokens=100).status == 200


def test_concurrency_is_refused_raised_and_returned(slow_account: Account) -> None:
    """Protects concurrency: a limit raised while streams run admits at once, a lowered one cuts nothing."""
    slow_account.limit(concurrency=1)
    first = slow_account.stream(request_id="one", input=LONG)
    reply = slow_account.generate()
    problem = refusal(reply, 429, "concurrency_limited")
    assert (problem["limit"], problem["used"]) == (1, 1) and int(reply.headers["retry-after"]) >= 1
    slow_account.limit(concurrency=2)
    second = slow_account.stream(request_id="two", input=LONG)
    slow_account.limit(concurrency=1)
    refusal(slow_account.generate(), 429, "concurrency_limited")
    assert slow_account.account("concurrency")["held"] == 2
    for stream, request_id in ((first, "one"), (second, "two")):
        slow_account.cancel(request_id)
        assert stream.finish()["finish_reason"] == "client"
    assert slow_account.generate(max_output_tokens=1).status == 200


def test_a_running_hold_counts_against_the_budget(slow_account: Account) -> None:
    """Protects held + spent ≤ limit: while a stream runs its worst case is held, and comes back when it ends."""
    slow_account.limit(spend_microusd_lifetime=150)
    stream = slow_account.stream(request_id="holding", input=LONG, max_output_tokens=200)
    problem = refusal(slow_account.generate(max_output_tokens=100), 429, "budget_exhausted")
    held = slow_account.account("spend_microusd_lifetime")
    assert (problem["used"], problem["held"]) == (held["spent"], held["held"]) and 120 <= held["held"] <= 150
    slow_account.cancel("holding")
    cost = stream.finish()["usage"]["cost_microusd"]
    after = slow_account.account("spend_microusd_lifetime")
    assert (after["spent"], after["held"], after["limit"], after["resets_at"]) == (cost, 0, 150, None)


@pytest.mark.parametrize(("limit", "code"), CODES.items())
def test_zero_allows_nothing_and_null_removes(account: Account, limit: str, code: str) -> None:
    """Protects 0: refused with that limit's code and no time to wait, until the limit is gone."""
    assert account.limit(None, **{limit: 0})[limit] == 0
    reply = account.generate()
    problem = refusal(reply, 429, code)
    assert (problem["limit_name"], problem["limit"], problem["scope"]) == (limit, 0, {"tenant": account.tenant})
    assert "retry-after" not in reply.headers and "retry-after-ms" not in reply.headers
    assert reply.headers["x-should-retry"] == "false"
    assert account.limit(None, **{limit: None}) == {"scope": {"tenant": account.tenant}}
    assert account.generate().status == 200


def test_limits_merge_and_are_read_back_as_set(account: Account) -> None:
    """Protects that absent fields stay and that the largest amount survives."""
    most = 2**63 - 1
    account.limit(requests_per_minute=60, concurrency=3)
    assert account.limit(spend_microusd_lifetime=most) == {
        "scope": {"tenant": account.tenant},
        "requests_per_minute": 60,
        "concurrency": 3,
        "spend_microusd_lifetime": most,
    }
    rows = account.admin.done("GET", f"/ledger?tenant={account.tenant}")["accounts"]
    assert {row["kind"]: row["limit"] for row in rows} == {
        "requests_per_minute": 60,
        "concurrency": 3,
        "spend_microusd_lifetime": most,
    }


@pytest.mark.parametrize(
    ("limits", "code", "field"),
    [
        ({"requests_per_minute": -1}, "invalid_request", "requests_per_minute"),
        ({"tokens_per_minute": 1.5}, "invalid_request", "tokens_per_minute"),
        ({"concurrency": "5"}, "invalid_request", "concurrency"),
        ({"concurrency": True}, "invalid_request", "concurrency"),
        ({"spend_microusd_lifetime": 2**63}, "invalid_request", "spend_microusd_lifetime"),
        ({"requests_per_minute": float("nan")}, "invalid_request", "requests_per_minute"),
        ({"spend_microusd_per_day": -5}, "invalid_request", "spend_microusd_per_day"),
        ({"requests_per_hour": 5}, "invalid_request", "requests_per_hour"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(account: Account, limits: Json, code: str, field: str) -> None:
    """Protects that nothing is stored that is not enforced."""
    reply = account.admin.ask("PUT", "/limits", {"scope": {"tenant": account.tenant}, **limits})
    assert refusal(reply, 400, code)["field"] in (field, "body")
    assert account.admin.done("GET", f"/limits?tenant={account.tenant}") == {"limits": []}


# ── who may ask ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_tenant_is_served_at_once(fast_cell: RunningCell) -> None:
    """Protects that an administrative answer means in force: the very next request is admitted."""
    account = new_account(fast_cell)
    assert account.generate().status == 200
    second = account.admin.done("POST", f"/tenants/{account.tenant}/applications/app/keys")["secret"]
    assert exchange(fast_cell.api, "GET", "/v1/models", key=second).status == 200
    shown = account.admin.done("GET", f"/tenants/{account.tenant}/applications/app/keys")
    assert account.key not in str(shown) and second not in str(shown)
    assert [key["revoked"] for key in shown["keys"]] == [False, False]


def test_an_application_sees_only_its_aliases(account: Account) -> None:
    """Protects entitlement: an alias one may not use answers like one that never was."""
    path = f"/tenants/{account.tenant}/applications/app"
    account.admin.done("PATCH", path, {"aliases": []})
    denied = refusal(account.generate(), 404, "unknown_alias")
    absent = refusal(account.generate(model_alias="absent"), 404, "unknown_alias")
    assert denied == absent
    account.admin.done("PATCH", path, {"aliases": ["assistant"]})
    assert account.generate().status == 200


def test_a_revoked_key_is_refused_and_its_stream_ends(slow_account: Account) -> None:
    """Protects revocation: at once for new work, cancelled/revoked for running work, nothing for other keys."""
    path = f"/tenants/{slow_account.tenant}/applications/app/keys"
    other = slow_account.admin.done("POST", path)["secret"]
    stream = slow_account.stream(request_id="revoked", input=LONG)
    stream.read(3)
    slow_account.admin.done("DELETE", f"{path}/{slow_account.key_id}")
    refusal(slow_account.generate(), 403, "revoked")
    done = stream.finish()
    assert (done["status"], done["finish_reason"], done["error"]["code"]) == ("cancelled", "revoked", "revoked")
    assert done["usage"]["cost_microusd"] == cost_of(done["usage"]) > 0
    found = exchange(slow_account.cell.api, "GET", "/v1/generations/revoked", key=other)
    assert found.status == 200 and found.json["finish_reason"] == "revoked"


@pytest.mark.parametrize(
    ("method", "what"),
    [("POST", "tenants/{tenant}/applications/app/revoke"), ("POST", "tenants/{tenant}/revoke"), ("DELETE", "tenants/{tenant}")],
)
def test_revoking_above_the_key_does_the_same(slow_account: Account, method: str, what: str) -> None:
    """Protects that an application's and a tenant's end, and its deletion, reach running work, also a whole answer: 403."""
    wire = slow_account.connect()
    body = {"model_alias": "assistant", "input": LONG, "request_id": "whole"}
    stream = slow_account.stream(input=LONG)
    wire.ask("POST", "/v1/generations", key=slow_account.key, body=body)
    stream.read(4)
    slow_account.admin.done(method, f"/{what.format(tenant=slow_account.tenant)}")
    refusal(slow_account.generate(), 403, "revoked")
    ended = stream.finish()
    assert ended["finish_reason"] == "revoked"
    reply = wire.reply()
    assert reply.status == 403 and reply.json.get("error", reply.json)["code"] == "revoked"
    [row] = slow_account.admin.done("GET", f"/usage?tenant={slow_account.tenant}")["rows"]
    assert row["requests"] == 2 and row["cost_microusd"] >= ended["usage"]["cost_microusd"] > 0


def test_a_disabled_tenant_drains_and_comes_back(slow_account: Account) -> None:
    """Protects that disabling refuses new work, lets running work end, and can be taken back."""
    stream = slow_account.stream(input=LONG, max_output_tokens=30)
    slow_account.admin.done("PATCH", f"/tenants/{slow_account.tenant}", {"disabled": True})
    refusal(slow_account.generate(), 403, "forbidden")
    assert stream.finish()["status"] == "completed"
    slow_account.admin.done("PATCH", f"/tenants/{slow_account.tenant}", {"disabled": False})
    assert slow_account.generate(max_output_tokens=1).status == 200


def test_a_weaker_role_may_look_and_not_touch(account: Account, fast_cell: RunningCell) -> None:
    """Protects the management API's own door: 401 without a key or with a tenant's, 403 for a weaker role."""
    viewer = account.admin.done("POST", "/admin-keys", {"actor": "auditor", "role": "viewer"})["secret"]
    url = fast_cell.ready["admin"]
    assert exchange(url, "GET", "/admin/v1/tenants", key=viewer).status == 200
    refusal(exchange(url, "POST", "/admin/v1/tenants", key=viewer, body={"name": "x"}), 403, "forbidden")
    for key in (None, account.key, "weir-x"):
        refusal(exchange(url, "GET", "/admin/v1/tenants", key=key), 401, "unauthenticated")
    assert exchange(fast_cell.api, "GET", "/v1/models", key=viewer).status == 401


# ── what was used ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_usage_and_ledger_add_up_to_what_the_answers_said(slow_account: Account) -> None:
    """Protects the books: sums of usage rows, the ledger's spent, and every answer's usage are the same figures."""
    slow_account.limit(spend_microusd_lifetime=1_000_000)
    answers = [slow_account.generate(max_output_tokens=number).json["usage"] for number in (1, 2, 5)]
    stream = slow_account.stream(request_id="partly", input=LONG)
    stream.read(5)
    slow_account.cancel("partly")
    answers += [stream.finish()["usage"], slow_account.stream(max_output_tokens=4).finish()["usage"]]
    assert all(usage["cost_microusd"] == cost_of(usage) for usage in answers)
    sums: dict[str, Any] = {
        name: sum(usage[name] for usage in answers)
        for name in ("input_tokens", "cached_input_tokens", "output_tokens", "cost_microusd")
    }
    expected = {"requests": 5, **sums, "platform_cost_microusd": 0}
    assert slow_account.usage() == [expected]
    revision = slow_account.cell.ready["aliases"][0]["model_revision"]
    group = {"application": "app", "key": slow_account.key_id, "alias": "assistant", "revision": revision}
    rows = slow_account.usage("application,key,alias,revision,day")
    assert [{name: value for name, value in row.items() if name != "day"} for row in rows] == [{**group, **expected}]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows[0]["day"])
    assert slow_account.account("spend_microusd_lifetime")["spent"] == sums["cost_microusd"]
    assert slow_account.admin.done("GET", f"/ledger?tenant={slow_account.tenant}")["open_holds"] == 0


def test_a_generation_and_the_audit_trail_are_shown_without_text(account: Account) -> None:
    """Protects that administrators see records and acts, never what was said nor a secret."""
    answer = account.generate(request_id="shown", input="a secret question").json
    record = account.admin.done("GET", f"/generations/{account.tenant}/shown")
    assert record["usage"] == answer["usage"] and record["execution"] == 1
    assert "output" not in record and "secret question" not in str(record)
    trail = account.admin.done("GET", "/audit?limit=50")["entries"]
    acts = [entry["action"] for entry in trail if account.tenant in entry["subject"]]
    assert {"tenant.create", "application.create", "key.create"} <= set(acts)
    assert account.key not in str(trail)


def test_replicas_and_pools_show_the_running_cell(slow_cell: RunningCell) -> None:
    """Protects what operators look at: a replica behind a URL is ready, with what was found at it."""
    admin = admin_of(slow_cell)
    (replica,) = admin.done("GET", "/replicas")["replicas"]
    assert replica["state"] == "ready" and replica["concurrency"] == 16
    assert replica["capabilities"]["counts_tokens"] and replica["capabilities"]["continuous_usage"]
    (pool,) = admin.done("GET", "/pools")["pools"]
    assert (pool["replicas"], pool["ready"], pool["queued"], pool["running"]) == (1, 1, 0, 0)


def test_an_external_engine_serves_only_tenants_that_allow_it(tmp_path: Path) -> None:
    """Protects data that must not leave: the alias does not exist until the tenant allows it, which is in force at once."""
    with (
        engine_process("--row", "demo") as url,
        running_cell(tmp_path / "state", engine=(url,), config="[engine]\nexternal = true\n") as cell,
    ):
        account = demo_account(cell)
        refusal(account.generate(max_output_tokens=4), 404, "unknown_alias")
        assert account.ask("GET", "/v1/models").json["data"] == []
        admin_of(cell).done("PATCH", f"/tenants/{account.tenant}", {"external_allowed": True})
        assert account.generate(max_output_tokens=4).status == 200
