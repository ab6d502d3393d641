"""The native surface as a stranger uses it: answers, streams, cancels, request ids, deadlines and headers."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from tests.e2e.http_client import Account, Json, Reply, Wire, demo_account, new_account, wait_until
from tests.e2e.running_cell import RunningCell, running_cell

LONG = "river"
"""A prompt whose reply has 213 tokens, unless it is bounded: seven seconds on the slow cell."""

IDS = ("x-request-id", "request-id")


def assert_ids(reply: Reply, request_id: str) -> None:
    assert [reply.headers[name] for name in IDS] == [request_id, request_id]


def assert_problem(reply: Reply, status: int, code: str) -> Json:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json
    assert {"type", "title", "status", "code", "detail"} <= set(problem)
    assert problem["status"] == status and problem["code"] == code
    assert all(reply.headers[name] for name in IDS)
    return problem


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_json_answer_has_every_field_of_the_contract(account: Account) -> None:
    """Protects the shape of an answer, its price, and that its record says the same afterwards."""
    reply = account.generate(request_id="first", max_output_tokens=20, seed=7, temperature=0.5, top_p=1, stop=["zzzz"])
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert_ids(reply, "first")
    body = reply.json
    assert set(body) == {
        "id", "request_id", "model_alias", "model_revision", "status", "finish_reason", "output", "usage", "timing"
    }  # fmt: skip
    assert (body["request_id"], body["model_alias"], body["status"]) == ("first", "assistant", "completed")
    assert body["finish_reason"] == "length" and body["output"]
    usage = body["usage"]
    assert usage["output_tokens"] == 20 and usage["basis"] == "engine" and usage["settlement"] == "posted"
    assert usage["cost_microusd"] == -(-(usage["input_tokens"] * 200_000 + 20 * 600_000) // 1_000_000)
    assert all(body["timing"][name] is not None for name in ("queue_ms", "ttft_ms", "tpot_ms", "total_ms"))
    record = account.get("first")
    assert_ids(record, "first")
    assert record.json == {name: value for name, value in body.items() if name != "output"}


def test_a_stream_is_gap_free_and_says_what_the_json_answer_says(account: Account) -> None:
    """Protects event ids 0, 1, 2, …, exactly one `done` at the end, and byte-exact output."""
    fields: dict[str, Any] = {"input": "Über die Wehre 水 🌊", "seed": 11, "max_output_tokens": 120}
    whole = account.generate(**fields).json
    stream = account.stream(request_id="streamed", **fields)
    done = stream.finish()
    assert_ids(stream.head, "streamed")
    assert stream.head.headers["x-accel-buffering"] == "no" and stream.head.headers["cache-control"] == "no-store"
    accepted = stream.events[0].json
    assert set(accepted) == {"id", "request_id", "model_alias", "model_revision"}
    assert accepted["model_revision"] == whole["model_revision"] and accepted["request_id"] == "streamed"
    assert stream.text.encode() == whole["output"].encode()
    assert set(done) == {"status", "finish_reason", "usage", "timing"}
    assert (done["status"], done["finish_reason"]) == (whole["status"], whole["finish_reason"])
    assert done["usage"] == whole["usage"]
    assert account.ended("streamed")["usage"] == done["usage"]


def test_nothing_follows_done_and_the_connection_serves_on(account: Account) -> None:
    """Protects keep-alive: after `done` the body ends, and the same connection takes the next request."""
    stream = account.stream()
    stream.finish()
    stream.wire.ask("GET", "/v1/models", key=account.key)
    assert stream.wire.reply().status == 200


def test_messages_and_a_string_mean_the_same_to_a_chat_model(account: Account) -> None:
    """Protects that a string is one user message."""
    as_text = account.generate(input="Hello", seed=3).json
    as_turns = account.generate(input=[{"role": "user", "content": "Hello"}], seed=3).json
    other = account.generate(input=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], seed=3)
    assert as_text["output"] == as_turns["output"] != other.json["output"]


def test_absent_output_bound_is_the_aliass_default(account: Account) -> None:
    """Protects that the hold, and so the bound, equals the documented default of 256 tokens."""
    account.limit(spend_microusd_lifetime=200)
    body = account.generate(input="Hi", max_output_tokens=256).json
    assert body["status"] == "completed"
    refused = account.generate(input="Hi", max_output_tokens=None)
    needed = assert_problem(refused, 429, "budget_exhausted")
    assert needed["used"] == body["usage"]["cost_microusd"]


# ── look-ups and cancels ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_stream_is_seen_and_cancelled_by_id(slow_account: Account) -> None:
    """Protects cancel by id: it answers once terminal, the stream ends with the same figures, a second one changes nothing."""
    stream = slow_account.stream(request_id="to-cancel", input=LONG, max_output_tokens=213)
    stream.read(3)
    assert slow_account.get("to-cancel").json["status"] == "running"
    answer = slow_account.cancel("to-cancel")
    assert answer.status == 200
    body = answer.json
    done = stream.finish()
    assert (body["status"], body["finish_reason"], body["error"]["code"]) == ("cancelled", "client", "request_cancelled")
    assert "output" not in body
    assert done["usage"]["output_tokens"] == body["usage"]["output_tokens"] >= 2
    assert done["usage"]["output_tokens"] < 213
    assert done["usage"]["cost_microusd"] == body["usage"]["cost_microusd"] > 0
    assert done["error"]["code"] == "request_cancelled"
    again = slow_account.cancel("to-cancel")
    assert again.status == 200 and again.json == slow_account.get("to-cancel").json == slow_account.ended("to-cancel")


def test_a_cancelled_json_request_answers_200_without_output(slow_account: Account) -> None:
    """Protects the table of endings for cancelled/client on the native path."""
    with Wire(slow_account.cell.api) as wire:
        body = {"model_alias": "assistant", "input": LONG, "request_id": "whole"}
        wire.ask("POST", "/v1/generations", key=slow_account.key, body=body)
        wait_until(lambda: slow_account.get("whole").status == 200)
        cancelled = slow_account.cancel("whole").json
        reply = wire.reply()
    assert reply.status == 200 and reply.headers["x-should-retry"] == "false"
    assert reply.json["usage"] == cancelled["usage"] and reply.json["finish_reason"] == "client"
    assert "output" not in reply.json


def test_cancelling_what_is_finished_changes_nothing(account: Account) -> None:
    """Protects that a finished request answers its final state."""
    finished = account.generate(request_id="finished").json
    answer = account.cancel("finished")
    del finished["output"]
    assert answer.status == 200 and answer.json == finished


@pytest.mark.parametrize("action", ["", "/cancel", "/events"])
@pytest.mark.parametrize("request_id", ["never-seen", "foreign", "%00", "a%20b", "x" * 200, "%F0%9F"])
def test_unknown_and_foreign_ids_are_404(account: Account, fast_cell: RunningCell, action: str, request_id: str) -> None:
    """Protects that another tenant's request looks exactly like one that never was."""
    demo_account(fast_cell).generate(request_id="foreign")
    reply = account.ask("POST" if action == "/cancel" else "GET", f"/v1/generations/{request_id}{action}")
    assert_problem(reply, 404, "not_found")


def test_events_of_a_stream_that_was_not_kept_are_gone(account: Account) -> None:
    """Protects 410 with the terminal record where nothing is retained."""
    account.generate(request_id="gone")
    problem = assert_problem(account.ask("GET", "/v1/generations/gone/events"), 410, "stream_not_retained")
    assert problem["generation"] == account.get("gone").json
    wrong = account.ask("GET", "/v1/generations/gone/events", headers={"last-event-id": "-1"})
    assert assert_problem(wrong, 400, "invalid_request")["field"] == "Last-Event-ID"


def test_a_client_that_leaves_is_cancelled_and_pays_what_was_generated(slow_account: Account) -> None:
    """Protects that a closed connection stops the engine, streamed or not."""
    stream = slow_account.stream(request_id="left", input=LONG)
    stream.read(2)
    stream.wire.close()
    with Wire(slow_account.cell.api) as wire:
        body = {"model_alias": "assistant", "input": LONG, "request_id": "left-whole"}
        wire.ask("POST", "/v1/generations", key=slow_account.key, body=body)
        wait_until(lambda: slow_account.get("left-whole").json.get("status") == "running")
    for request_id in ("left", "left-whole"):
        record = slow_account.ended(request_id)
        assert (record["status"], record["finish_reason"]) == ("cancelled", "disconnect")
        assert record["usage"]["output_tokens"] < 213


# ── request ids ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_finished_id_is_not_run_again_and_is_not_charged_again(account: Account) -> None:
    """Protects idempotency: the same body answers 409 with the record, another body 422, both for good."""
    first = account.generate(request_id="once", input="Hello")
    again = account.generate(request_id="once", input="Hello")
    assert assert_problem(again, 409, "output_not_retained")["generation"] == account.get("once").json
    assert again.headers["x-should-retry"] == "false" and "retry-after" not in again.headers
    assert_ids(again, "once")
    streamed = account.ask(
        "POST",
        "/v1/generations",
        {"model_alias": "assistant", "input": "Hello", "max_output_tokens": 8, "request_id": "once", "stream": True},
    )
    assert_problem(streamed, 409, "output_not_retained")
    other = account.generate(request_id="once", input="Goodbye")
    assert_problem(other, 422, "request_id_reused")
    assert other.headers["x-should-retry"] == "false"
    assert account.usage() == [{**account.usage()[0], "requests": 1, "cost_microusd": first.json["usage"]["cost_microusd"]}]


def test_a_running_id_is_in_flight(slow_account: Account) -> None:
    """Protects 409 with the running record and a time to come back."""
    stream = slow_account.stream(request_id="busy", input=LONG, max_output_tokens=100)
    reply = slow_account.generate(request_id="busy", input=LONG, max_output_tokens=100)
    problem = assert_problem(reply, 409, "request_in_flight")
    assert problem["generation"]["status"] == "running" and problem["generation"]["request_id"] == "busy"
    assert int(reply.headers["retry-after"]) >= 1 and int(reply.headers["retry-after-ms"]) >= 1
    assert_problem(slow_account.generate(request_id="busy", input="other"), 422, "request_id_reused")
    slow_account.cancel("busy")
    assert stream.finish()["finish_reason"] == "client"


def test_the_same_id_of_two_tenants_is_two_requests(account: Account, fast_cell: RunningCell) -> None:
    """Protects that an id is unique per tenant only."""
    other = new_account(fast_cell)
    assert account.generate(request_id="shared").status == other.generate(request_id="shared", input="Other").status == 200


def test_a_rejection_does_not_bind_its_id(account: Account) -> None:
    """Protects that an id refused at the door is free, and unknown to GET."""
    account.limit(requests_per_minute=0)
    assert_problem(account.generate(request_id="free"), 429, "requests_limited")
    assert_problem(account.get("free"), 404, "not_found")
    account.limit(requests_per_minute=None)
    assert account.generate(request_id="free", input="Another body").status == 200


def test_ids_stay_bound_over_a_restart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Protects that conflicts, records and the client's budget come from the store after a restart."""
    state = tmp_path_factory.mktemp("restart") / "state"
    with running_cell(state) as cell:
        before = demo_account(cell)
        body = before.generate(request_id="kept", input="Hello").json
        del body["output"]
    with running_cell(state) as cell:
        after = demo_account(cell)
        assert after.get("kept").json == after.cancel("kept").json == body
        again = after.generate(request_id="kept", input="Hello")
        assert assert_problem(again, 409, "output_not_retained")["generation"] == body
        assert again.headers["x-should-retry"] == "false"
        assert_problem(after.generate(request_id="kept", input="Other"), 422, "request_id_reused")
        assert after.account("spend_microusd_lifetime")["spent"] == body["usage"]["cost_microusd"]


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deadline_in_a_stream_ends_it_and_keeps_what_was_delivered(slow_account: Account) -> None:
    """Protects expired/deadline after the headers: the tenant pays the delivered part."""
    stream = slow_account.stream(request_id="late", input=LONG, max_output_tokens=200, deadline_ms=600)
    done = stream.finish()
    assert (done["status"], done["finish_reason"], done["error"]["code"]) == ("expired", "deadline", "deadline_exceeded")
    outputs = sum(event.name == "output" for event in stream.events)
    usage = done["usage"]
    paid = -(-(usage["input_tokens"] * 200_000 + outputs * 600_000) // 1_000_000)
    assert usage["output_tokens"] >= outputs > 0 and usage["cost_microusd"] == paid


def test_a_deadline_before_a_json_answer_is_504(slow_account: Account) -> None:
    """Protects 504 with the generation's body, no output, nothing to pay, and no retry."""
    reply = slow_account.generate(request_id="late-whole", input=LONG, deadline_ms=400, max_output_tokens=40)
    assert reply.status == 504 and reply.headers["content-type"] == "application/json"
    assert reply.headers["x-should-retry"] == "false"
    body = reply.json
    assert (body["status"], body["finish_reason"], body["error"]["code"]) == ("expired", "deadline", "deadline_exceeded")
    assert body["usage"]["cost_microusd"] == 0 and "output" not in body
    assert 390 <= body["timing"]["total_ms"] < 3_000
    rerun = slow_account.generate(request_id="late-whole", input=LONG, deadline_ms=60_000, max_output_tokens=40, stream=None)
    assert rerun.status == 200, "nothing was delivered and nothing paid, so the id may run again"


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_limit_headers(headers: Mapping[str, str], requests: int, tokens: int) -> None:
    for name, limit in (("requests", requests), ("tokens", tokens)):
        assert headers[f"x-ratelimit-limit-{name}"] == str(limit)
        assert 0 <= int(headers[f"x-ratelimit-remaining-{name}"]) <= limit
        assert re.fullmatch(r"(\d+h)?(\d+m)?(\d+(\.\d+)?s)?|\d+(\.\d+)?ms", headers[f"x-ratelimit-reset-{name}"])
    assert headers["ratelimit-policy"] == f'"requests";q={requests};w=60, "tokens";q={tokens};w=60'
    assert re.fullmatch(r'"requests";r=\d+;t=\d+, "tokens";r=\d+;t=\d+', headers["ratelimit"])


def test_every_answer_to_a_known_caller_shows_its_limits(account: Account) -> None:
    """Protects the limit headers on answers, streams, refusals and look-ups alike, and ids on all of them."""
    account.limit(requests_per_minute=600, tokens_per_minute=600_000)
    stream = account.stream(request_id="shown")
    stream.finish()
    replies = [
        account.generate(),
        stream.head,
        account.get("shown"),
        account.get("absent"),
        account.cancel("shown"),
        account.ask("GET", "/v1/models"),
        account.ask("GET", "/v1/models/assistant"),
        account.ask("GET", "/v1/models/absent"),
        account.ask("POST", "/v1/generations", b"{"),
        account.ask("POST", "/v1/generations", {"model_alias": "absent", "input": "x"}),
        account.ask("POST", "/v1/chat/completions", {"model": 1}),
        account.ask("POST", "/v1/generations", headers={"content-length": "9000000", "expect": "100-continue"}),
    ]
    for reply in replies:
        assert_limit_headers(reply.headers, 600, 600_000)
        assert reply.headers["x-request-id"] == reply.headers["request-id"]
    assert int(replies[0].headers["x-ratelimit-remaining-requests"]) < 600


def test_a_clients_own_x_request_id_is_ignored(account: Account) -> None:
    """Protects that ids come from the body or from the platform."""
    body = {"model_alias": "assistant", "input": "x", "max_output_tokens": 1}
    reply = account.ask("POST", "/v1/generations", body, headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == reply.json["request_id"] != "mine"
