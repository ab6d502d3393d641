"""What a running cell says of a request: its timeline through the management API and at the terminal, never its text."""

import json
import subprocess
import sys

from tests.e2e.http_client import Account, Json, Reply, exchange, new_account

SECRET = "the parrot is called Wenceslas"


def explanation(account: Account, request_id: str, tenant: str | None = None) -> Reply:
    """The management API's answer, which has no text of the request in it."""
    answer = account.admin.ask("GET", f"/generations/{tenant or account.tenant}/{request_id}/explanation")
    assert b"parrot" not in answer.body
    return answer


def explain(account: Account, *words: str) -> subprocess.CompletedProcess[str]:
    """`weir explain` as an operator runs it."""
    command = [sys.executable, "-m", "weir.cli.main", "explain", *words, "--state", str(account.cell.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def events(timeline: Json, name: str) -> list[Json]:
    """Events with this name."""
    return [event for event in timeline["events"] if event["event"] == name]


def test_a_request_that_ran_is_explained_from_its_arrival_to_its_durable_end(account: Account) -> None:
    """Protects the answer to "what happened to it": holds, replica, output, end and cost, by API and at the terminal."""
    usage = account.generate(request_id="ran", input=SECRET).json["usage"]
    account.ended("ran")
    shown = explanation(account, "ran").json
    [timeline] = shown["timelines"]
    assert (shown["tenant"], shown["request_id"], timeline["execution"]) == (account.tenant, "ran", 1)
    assert timeline["status"] == "completed"
    [admitted], [dispatched], [ended] = (events(timeline, name) for name in ("admitted", "dispatched", "ended"))
    assert admitted["held_microusd"] >= usage["cost_microusd"] and {"tenant": account.tenant} in admitted["scopes"]
    assert dispatched["attempt"] == 1 and dispatched["replica"]
    assert (ended["cost_microusd"], ended["output_tokens"]) == (usage["cost_microusd"], usage["output_tokens"])
    assert events(timeline, "hold_durable") and events(timeline, "end_durable")
    assert [event["at_ms"] for event in timeline["events"]] == sorted(event["at_ms"] for event in timeline["events"])
    table = explain(account, "ran", "--tenant", account.tenant)
    assert (table.returncode, table.stderr) == (0, "")
    for word in (account.tenant, "completed", dispatched["replica"], "end durable"):
        assert word in table.stdout
    assert "parrot" not in table.stdout


def test_a_request_that_was_refused_is_explained_with_its_limit(account: Account) -> None:
    """Protects the answer to "why was it refused": nothing in the ledger, and yet the limit and the caller's figures."""
    account.limit(spend_microusd_per_day=1)
    assert account.generate(request_id="refused", input=SECRET).status == 400
    account.limit(spend_microusd_per_day=0)
    assert account.generate(request_id="refused", input=SECRET).status == 429
    assert account.get("refused").status == 404
    [timeline] = explanation(account, "refused").json["timelines"]
    assert (timeline["status"], timeline["rejections"]) == ("rejected", 2) and "execution" not in timeline
    [refused] = events(timeline, "rejected")
    figures = refused["figures"]
    assert (refused["code"], figures["limit_name"], figures["limit"]) == ("budget_exhausted", "spend_microusd_per_day", 0)
    assert figures["scope"] == {"tenant": account.tenant}
    account.limit(spend_microusd_per_day=None)
    account.generate(request_id="refused", input=SECRET)
    told = json.loads(explain(account, "refused", "--tenant", account.tenant, "--json").stdout)
    assert [timeline["status"] for timeline in told["timelines"]] == ["completed", "rejected"]


def test_an_id_alone_is_enough_unless_two_tenants_used_it(account: Account) -> None:
    """Protects an operator who has only an id, and each tenant from being taken for the other."""
    shared = f"shared-{account.tenant}"
    account.generate(request_id=shared)
    assert explanation(account, shared, "-").json["tenant"] == account.tenant
    assert explain(account, shared).returncode == 0
    with new_account(account.cell) as other:
        assert explanation(other, shared).status == 404
        other.generate(request_id=shared)
        ambiguous = explanation(account, shared, "-")
        assert (ambiguous.status, ambiguous.json["accepted"]) == (400, sorted([account.tenant, other.tenant]))
        assert explanation(other, shared).json["tenant"] == other.tenant
    refused = explain(account, shared)
    assert refused.returncode == 1 and account.tenant in refused.stderr


def test_a_request_that_is_not_remembered_is_refused_with_what_is(account: Account) -> None:
    """Protects an operator from guessing, and the timelines from whoever holds a tenant's key."""
    account.generate()
    refused = explanation(account, "never-sent")
    assert refused.status == 404 and refused.json["kept"] >= 1 and refused.json["since"] in refused.json["detail"]
    told = explain(account, "never-sent", "--tenant", account.tenant)
    assert (told.returncode, told.stdout) == (1, "") and "are kept" in told.stderr
    path = f"/admin/v1/generations/{account.tenant}/never-sent/explanation"
    assert exchange(account.admin.url, "GET", path, key=account.key).status == 401
