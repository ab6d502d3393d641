"""The official OpenAI client against a live cell: what it sends is understood, and what it reads has its own shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tests.e2e.http_client import Account, wait_until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "river"}]
"""The reply has 213 tokens, unless it is bounded."""


@contextmanager
def sdk(account: Account, key: str | None = None, **options: Any) -> Iterator[openai.OpenAI]:
    settings: dict[str, Any] = {"max_retries": 0, "timeout": 20.0, **options}
    with openai.OpenAI(base_url=f"{account.cell.api}/v1", api_key=key or account.key, **settings) as client:
        yield client


@pytest.fixture
def client(account: Account) -> Iterator[openai.OpenAI]:
    with sdk(account) as made:
        yield made


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_and_its_stream_agree(client: openai.OpenAI) -> None:
    """Protects the two shapes of an answer: same text, same finish reason, same usage."""
    whole = client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=40, seed=5)
    stream = client.chat.completions.create(
        model="assistant",
        messages=MESSAGES,
        max_completion_tokens=40,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    )
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"] == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert [chunk.choices for chunk in chunks].index([]) == len(chunks) - 1
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.to_dict() == whole.usage.to_dict()
    assert whole.usage.completion_tokens == 40 and whole.usage.total_tokens == whole.usage.prompt_tokens + 40
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.model for chunk in chunks} == {"assistant"}


def test_without_include_usage_no_chunk_has_usage(client: openai.OpenAI) -> None:
    """Protects clients that index choices[0] of every chunk."""
    chunks = list(client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=3, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_text_parts_and_ignored_fields_are_accepted(client: openai.OpenAI) -> None:
    """Protects that a list of text parts is its text, and that fields which change nothing don't refuse."""
    plain = client.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "ab"}], max_tokens=9)
    parts = client.chat.completions.create(
        model="assistant",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_tokens=9,
        user="someone",
        metadata={"a": "b"},
        store=False,
        n=1,
    )
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_models_are_the_aliases(client: openai.OpenAI, account: Account) -> None:
    """Protects list and retrieve, and that an alias one may not use does not exist."""
    assert [model.id for model in client.models.list()] == ["assistant"]
    assert client.models.retrieve("assistant").owned_by == "weir"
    for name in ("absent", "org/absent", "100%"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve(name)
        assert refused.value.code == "unknown_alias"
    account.admin.done("PATCH", f"/tenants/{account.tenant}/applications/app", {"aliases": []})
    assert list(client.models.list()) == []
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("assistant")


def test_raw_responses_carry_ids_and_limits(client: openai.OpenAI, account: Account) -> None:
    """Protects the headers that the client's users read."""
    account.limit(requests_per_minute=100, tokens_per_minute=100_000)
    raw = client.chat.completions.with_raw_response.create(
        model="assistant", messages=MESSAGES, max_tokens=2, extra_headers={"Idempotency-Key": "raw:1"}
    )
    assert raw.request_id == raw.headers["request-id"] == "raw:1"
    assert raw.headers["x-ratelimit-limit-requests"] == "100" and raw.headers["x-ratelimit-limit-tokens"] == "100000"
    assert raw.headers["x-ratelimit-remaining-requests"] == "99"
    assert raw.parse().usage is not None


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_key_is_an_authentication_error(account: Account) -> None:
    """Protects 401, its code, and the id that support asks for."""
    with sdk(account, key="sk-wrong") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert refused.value.code == "unauthenticated" and refused.value.type == "authentication_error"
    assert refused.value.request_id
    assert refused.value.response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 2_147_483_647}, "invalid_request", "max_tokens"),
        ({"max_completion_tokens": 2_147_483_647}, "invalid_request", "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "conflicting_fields", "max_tokens"),
        ({"temperature": 3}, "invalid_request", "temperature"),
        ({"n": 17}, "invalid_request", "n"),
        ({"top_logprobs": 1}, "conflicting_fields", "top_logprobs"),
        ({"tool_choice": "auto"}, "conflicting_fields", "tool_choice"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"stream_options": {"include_usage": True}}, "conflicting_fields", "stream_options"),
    ],
)
def test_a_bad_request_names_its_parameter(client: openai.OpenAI, fields: dict[str, Any], code: str, param: str) -> None:
    """Protects that `param` is the name this surface knows, so that a caller finds what to change."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "assistant", "messages": MESSAGES, **fields})
    assert refused.value.code == code and refused.value.param == param
    body: Any = refused.value.body
    assert refused.value.type == "invalid_request_error" and body["accepted"]


def test_an_unknown_model_and_an_unknown_path_are_not_found(client: openai.OpenAI) -> None:
    """Protects 404 in the client's shape, also on paths that this platform does not have."""
    with pytest.raises(openai.NotFoundError) as model:
        client.chat.completions.create(model="absent", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError) as path:
        client.moderations.create(model="assistant", input="x")
    assert (model.value.code, path.value.code) == ("unknown_alias", "not_found")


def test_a_model_that_makes_text_does_not_embed(client: openai.OpenAI) -> None:
    """Protects indexes: the wrong alias is refused by its name instead of giving vectors that mean nothing."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="assistant", input="x")
    assert (refused.value.code, refused.value.param) == ("unsupported_field", "model")


def test_a_limit_is_a_rate_limit_error_with_a_time_to_wait(client: openai.OpenAI, account: Account) -> None:
    """Protects 429: its code, its numbers and Retry-After."""
    account.limit(requests_per_minute=1)
    client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=1)
    body: Any = refused.value.body
    assert refused.value.code == "requests_limited" and refused.value.type == "rate_limit_error"
    assert (body["limit"], body["used"], body["scope"]) == (1, 1, {"tenant": account.tenant})
    assert 50 <= int(refused.value.response.headers["retry-after"]) <= 60


def test_retries_stop_where_waiting_cannot_help(account: Account) -> None:
    """Protects that an exhausted budget is asked for once, not three times."""
    account.limit(spend_microusd_lifetime=0)
    asked: list[str | None] = []
    hook = {"request": [lambda request: asked.append(request.headers.get("x-stainless-retry-count"))]}
    with (
        httpx2.Client(event_hooks=hook) as http_client,
        sdk(account, max_retries=2, http_client=http_client) as client,
        pytest.raises(openai.RateLimitError) as refused,
    ):
        client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=1)
    assert refused.value.code == "budget_exhausted" and asked == ["0"]


# ── idempotency, time-outs, cancels ──────────────────────────────────────────────────────────────────────────────────


def test_an_idempotency_key_is_never_charged_twice(client: openai.OpenAI, account: Account) -> None:
    """Protects 409 for the same body and 422 for another, and that both cost nothing."""
    headers = {"Idempotency-Key": "only-once"}
    first = client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=5, extra_headers=headers)
    with pytest.raises(openai.ConflictError) as again:
        client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=5, extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError) as other:
        client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=6, extra_headers=headers)
    assert (again.value.code, other.value.code) == ("output_not_retained", "request_id_reused")
    body: Any = again.value.body
    assert body["generation"]["request_id"] == "only-once" and body["generation"]["status"] == "completed"
    assert again.value.response.headers["x-should-retry"] == other.value.response.headers["x-should-retry"] == "false"
    usage: Any = first.usage
    assert [(row["requests"], row["cost_microusd"]) for row in account.usage()] == [(1, usage.cost_microusd)]


def test_a_clients_own_retries_run_a_keyed_request_once(slow_account: Account) -> None:
    """Protects money when a client loses patience: its retry meets the first run, and one run is charged."""
    with sdk(slow_account, max_retries=1, timeout=0.5) as client, pytest.raises(openai.APIStatusError) as ended:
        client.chat.completions.create(
            model="assistant", messages=MESSAGES, max_tokens=200, extra_headers={"Idempotency-Key": "impatient"}
        )
    assert isinstance(ended.value, openai.ConflictError)
    record = slow_account.ended("impatient")
    assert (record["status"], record["finish_reason"]) == ("cancelled", "disconnect")
    assert [(row["requests"], row["cost_microusd"]) for row in slow_account.usage()] == [(1, record["usage"]["cost_microusd"])]


def test_closing_a_stream_cancels_it(slow_account: Account) -> None:
    """Protects that leaving a stream early stops the engine and is charged for what was generated."""
    with sdk(slow_account) as client:
        stream = client.chat.completions.create(
            model="assistant", messages=MESSAGES, stream=True, extra_headers={"Idempotency-Key": "closed"}
        )
        for _ in range(4):
            next(stream)
        stream.close()
    record = slow_account.ended("closed")
    assert (record["status"], record["finish_reason"]) == ("cancelled", "disconnect")
    assert 2 <= record["usage"]["output_tokens"] < 213 and record["usage"]["cost_microusd"] > 0


def test_a_request_cancelled_by_id_is_a_conflict_here(slow_account: Account) -> None:
    """Protects cancelled/client on a compatible path: 409 for a whole answer, an error event in a stream."""
    with sdk(slow_account) as client:
        stream = client.chat.completions.create(
            model="assistant", messages=MESSAGES, stream=True, extra_headers={"Idempotency-Key": "by-id"}
        )
        next(stream)
        assert slow_account.cancel("by-id").json["finish_reason"] == "client"
        with pytest.raises(openai.APIError) as ended:
            list(stream)
    assert ended.value.code == "request_cancelled"
    wire = slow_account.connect()
    body = {"model": "assistant", "messages": MESSAGES}
    wire.ask("POST", "/v1/chat/completions", key=slow_account.key, body=body, headers={"idempotency-key": "by-id-2"})
    wait_until(lambda: slow_account.get("by-id-2").status == 200)
    slow_account.cancel("by-id-2")
    reply = wire.reply()
    assert reply.status == 409 and reply.headers["x-should-retry"] == "false"
    assert reply.json["error"]["code"] == "request_cancelled"


def test_weirs_own_headers_follow_the_native_rules(slow_account: Account) -> None:
    """Protects deadlines and sessions on a compatible path, and refusals that name the header."""
    with sdk(slow_account) as client:
        with pytest.raises(openai.APIStatusError) as late:
            client.chat.completions.create(model="assistant", messages=MESSAGES, extra_headers={"weir-deadline-ms": "300"})
        assert late.value.status_code == 504 and late.value.code == "deadline_exceeded"
        for header, value in (
            ("weir-deadline-ms", "0"),
            ("weir-deadline-ms", "1e3"),
            ("weir-deadline-ms", "9" * 5000),
            ("weir-session", "s" * 129),
            ("Idempotency-Key", "a b"),
            ("Idempotency-Key", ""),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="assistant", messages=MESSAGES, extra_headers={header: value})
            assert refused.value.param == header


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plain_completion_and_its_stream_agree(client: openai.OpenAI, account: Account) -> None:
    """Protects completions: same text, end and usage streamed and whole, a row of its own surface, and no chat template."""
    whole = client.completions.create(model="assistant", prompt="river", max_tokens=20, seed=5)
    stream = client.completions.create(
        model="assistant", prompt=["river"], max_tokens=20, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert whole.object == chunks[0].object == "text_completion" and len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert whole.usage is not None and chunks[-1].usage is not None and chunks[-1].choices == []
    assert chunks[-1].usage.to_dict() == whole.usage.to_dict()
    chat = client.chat.completions.create(model="assistant", messages=MESSAGES, max_tokens=20)
    assert chat.usage is not None and chat.usage.prompt_tokens > whole.usage.prompt_tokens
    assert sum(row["requests"] for row in account.usage()) == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": ["a", "b"]}, "invalid_request", "prompt"),
        ({"prompt": [1, 2]}, "invalid_request", "prompt"),
        ({"logprobs": 6}, "invalid_request", "logprobs"),
        ({"echo": True}, "unsupported_field", "echo"),
        ({"best_of": 2}, "unsupported_field", "best_of"),
        ({"suffix": "x"}, "unsupported_field", "suffix"),
        ({"max_tokens": 2_147_483_647}, "invalid_request", "max_tokens"),
    ],
)
def test_a_bad_completion_names_its_parameter(client: openai.OpenAI, fields: dict[str, Any], code: str, param: str) -> None:
    """Protects that nothing is dropped silently on this surface either."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "assistant", "prompt": "river", **fields})
    assert (refused.value.code, refused.value.param) == (code, param)
