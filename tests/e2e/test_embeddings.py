"""Embeddings through a live cell with the official OpenAI client: right vectors, right refusals, and money that adds up."""

import base64
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import isclose, sqrt
from typing import Any

import openai
import pytest
from tests.e2e.conftest import checked_cell, engine_process
from tests.e2e.http_client import Account, Reply, exchange, is_at_rest, new_account, wait_until
from tests.e2e.running_cell import RunningCell, running_cell

from weir.core.metering import upper_bound_of_input
from weir.engines.simulated_embeddings import DIMENSIONS, embedding_of
from weir.units import ceil_div

PATH = "/v1/embeddings"
CONFIG = "[engine]\nembeddings = true\n[gateway]\nbody_bytes_max = 400000\n"
INPUT_MICROUSD = 200_000
MARK = "zqxmark"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """A cell whose only model embeds."""
    state = tmp_path_factory.mktemp("embeddings") / "state"
    with running_cell(state, config=CONFIG) as started, checked_cell(started):
        yield started


@pytest.fixture
def account(cell: RunningCell) -> Iterator[Account]:
    """A tenant of the test's own, on a cell that is at rest afterwards."""
    made = new_account(cell)
    yield made
    made.close()
    wait_until(lambda: is_at_rest(cell))


@pytest.fixture
def client(account: Account) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{account.cell.api}/v1", api_key=account.key, max_retries=0, timeout=20.0) as made:
        yield made


def numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def raw(account: Account, **fields: Any) -> Reply:
    return account.ask("POST", PATH, {"model": "assistant", "input": "a river", **fields})


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_of_the_client_and_floats_are_the_same_numbers(client: openai.OpenAI) -> None:
    """Protects what is stored in an index: base64, which the client asks for by itself, and floats agree to the last bit."""
    texts = ["a river", "tax law", "a river"]
    default = client.embeddings.create(model="assistant", input=texts)
    floats = client.embeddings.create(model="assistant", input=texts, encoding_format="float")
    assert [item.index for item in default.data] == [0, 1, 2] == [item.index for item in floats.data]
    assert [item.embedding for item in default.data] == [item.embedding for item in floats.data]
    assert floats.data[0].embedding == numbers(embedding_of("a river", None)) == floats.data[2].embedding
    assert floats.data[1].embedding != floats.data[0].embedding
    assert default.object == "list" and default.model == "assistant" and default.data[0].object == "embedding"


def test_one_text_and_its_dimensions(client: openai.OpenAI) -> None:
    """Protects `dimensions`: so many numbers, of unit length again."""
    whole = client.embeddings.create(model="assistant", input="a river").data
    short = client.embeddings.create(model="assistant", input="a river", dimensions=8).data
    assert [len(item.embedding) for item in (*whole, *short)] == [DIMENSIONS, 8]
    assert all(isclose(sqrt(sum(each * each for each in item.embedding)), 1, rel_tol=1e-6) for item in (*whole, *short))


def test_base64_is_little_endian_float32(account: Account) -> None:
    """Protects clients that decode by themselves; without a format the numbers are written out, as OpenAI does."""
    [item] = raw(account, encoding_format="base64").json["data"]
    assert base64.b64decode(item["embedding"]) == embedding_of("a river", None)
    assert raw(account).json["data"][0]["embedding"] == numbers(embedding_of("a river", None))


def test_an_answer_names_the_revision(account: Account) -> None:
    """Protects indexes: vectors of two revisions are not to be mixed, so an answer tells its own; and its generation."""
    answer = raw(account)
    body = answer.json
    assert body["system_fingerprint"].startswith("simulated@") and body["id"].startswith("gen-")
    assert answer.headers["x-request-id"] == answer.headers["request-id"]


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_usage_row_is_what_the_answer_says(client: openai.OpenAI, account: Account) -> None:
    """Protects the bill: tokens as measured, no output, and price × tokens in the answer, the row and the window's balance."""
    account.limit(tokens_per_day=100_000, spend_microusd_per_day=1_000_000)
    usage = client.embeddings.create(model="assistant", input=["water " * 100, "stone"]).usage
    cost = ceil_div(usage.prompt_tokens * INPUT_MICROUSD, 1_000_000)
    assert usage.prompt_tokens == usage.total_tokens == 152 and usage.to_dict()["cost_microusd"] == cost
    [row] = account.usage(group_by="alias")
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (1, 152, 0)
    assert (row["cost_microusd"], row["platform_cost_microusd"]) == (cost, 0)
    tokens, money = account.account("tokens_per_day"), account.account("spend_microusd_per_day")
    assert [(entry["held"], entry["spent"]) for entry in (tokens, money)] == [(0, 152), (0, cost)]


def test_a_token_limit_holds_the_upper_bound(client: openai.OpenAI, account: Account) -> None:
    """Protects limits: what may be used at most is held before anything runs, and what was used is what stays."""
    texts = ["stone " * 10, "river " * 10]
    bound = upper_bound_of_input(sum(len(text) for text in texts), len(texts)) + 1
    account.limit(tokens_per_day=bound)
    used = client.embeddings.create(model="assistant", input=texts).usage.total_tokens
    assert used < bound
    with pytest.raises(openai.RateLimitError) as refused:
        client.embeddings.create(model="assistant", input=texts)
    body: Any = refused.value.body
    assert refused.value.code == "budget_exhausted" and (body["limit"], body["used"]) == (bound, used)
    one = client.embeddings.create(model="assistant", input="stone")  # counted exactly, so it fits what is left
    assert one.usage.total_tokens == 2


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "invalid_request", "input"),
        ({"input": ""}, "invalid_request", "input"),
        ({"input": ["a", ""]}, "invalid_request", "input[1]"),
        ({"input": ["a"] * 257}, "invalid_request", "input"),
        ({"input": [1, 2, 3]}, "unsupported_field", "input"),
        ({"input": [[1, 2], [3]]}, "unsupported_field", "input"),
        ({"input": {"text": "a"}}, "invalid_request", "input"),
        ({"input": None}, "invalid_request", "input"),
        ({"dimensions": 0}, "invalid_request", "dimensions"),
        ({"dimensions": 8_193}, "invalid_request", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_request", "encoding_format"),
        ({"user": 5}, "invalid_request", "user"),
        ({"stream": True}, "unsupported_field", "stream"),
        ({"truncate": "END"}, "unsupported_field", "truncate"),
        ({"model": None}, "invalid_request", "model"),
    ],
)
def test_a_bad_request_names_its_parameter(account: Account, fields: dict[str, Any], code: str, param: str) -> None:
    """Protects callers: what cannot be served is refused by its name, in OpenAI's shape, and nothing is dropped silently."""
    answer = raw(account, **fields)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, code, param) and error["accepted"]


def test_a_model_that_embeds_makes_no_text(client: openai.OpenAI, account: Account) -> None:
    """Protects applications with the wrong alias: told so at once, on every surface, by the name that the field has there."""
    with pytest.raises(openai.BadRequestError) as chat:
        client.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError) as plain:
        client.completions.create(model="assistant", prompt="hello")
    with pytest.raises(openai.BadRequestError) as response:
        client.responses.create(model="assistant", input="hello")
    native = account.generate(input="hello")
    assert [(each.value.code, each.value.param) for each in (chat, plain, response)] == [("unsupported_field", "model")] * 3
    assert (native.status, native.json["code"], native.json["field"]) == (400, "unsupported_field", "model_alias")


@pytest.mark.parametrize(("path", "fields"), [("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})])
def test_a_model_that_embeds_makes_no_message(account: Account, path: str, fields: dict[str, Any]) -> None:
    """Protects Anthropic's clients: also a count is refused, for no message follows it; the field has its name there."""
    asked = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], **fields}
    refused = account.ask("POST", path, asked, {"anthropic-version": "2023-06-01"})
    error = refused.json["error"]
    assert (refused.status, error["code"], error["field"]) == (400, "unsupported_field", "model")
    assert error["accepted"] == "an alias of a model that makes text"


def test_an_unknown_alias_and_a_body_that_is_too_large(client: openai.OpenAI) -> None:
    """Protects the shape of what never reaches the pipeline."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="absent", input="a")
    with pytest.raises(openai.APIStatusError) as large:
        client.embeddings.create(model="assistant", input="a" * 400_001)
    assert (unknown.value.code, large.value.code, large.value.status_code) == ("unknown_alias", "request_too_large", 413)


def test_a_text_that_is_longer_than_the_window(client: openai.OpenAI) -> None:
    """Protects engines and callers: one text is counted and refused here, one among several by the engine; both are 400."""
    fits, too_long = "word " * 26_000, "word " * 27_000
    with pytest.raises(openai.BadRequestError) as counted:
        client.embeddings.create(model="assistant", input=too_long)
    with pytest.raises(openai.BadRequestError) as asked:
        client.embeddings.create(model="assistant", input=["a", too_long])
    assert (counted.value.code, asked.value.code) == ("input_too_long", "engine_rejected")
    assert client.embeddings.create(model="assistant", input=fits).usage.prompt_tokens == 32_500
    assert client.embeddings.create(model="assistant", input=[fits, fits]).usage.prompt_tokens == 65_000


# ── the same pipeline ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_runs_once(client: openai.OpenAI, account: Account) -> None:
    """Protects retries: the same key and body do not run again, and another body under it is refused."""
    headers = {"Idempotency-Key": "once"}
    first = client.embeddings.with_raw_response.create(model="assistant", input="a river", extra_headers=headers)
    assert first.request_id == "once"
    with pytest.raises(openai.ConflictError) as again:
        client.embeddings.create(model="assistant", input="a river", extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError) as other:
        client.embeddings.create(model="assistant", input="a lake", extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError) as smaller:
        client.embeddings.create(model="assistant", input="a river", dimensions=8, extra_headers=headers)
    codes = [again.value.code, other.value.code, smaller.value.code]
    assert codes == ["output_not_retained", "request_id_reused", "request_id_reused"]
    record = account.get("once").json
    assert (record["status"], record["finish_reason"], record["usage"]["output_tokens"]) == ("completed", "stop", 0)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningCell, str]]:
    """A cell on an engine behind a URL, and that URL: the engine does what it is ordered to. No mark is in what it leaves."""
    state = tmp_path_factory.mktemp("slow") / "state"
    with engine_process("--embeddings") as url, running_cell(state, engine=(url,), config=CONFIG) as started:
        yield started, url
    for path in [*state.rglob("*"), started.log]:
        assert not path.is_file() or MARK.encode() not in path.read_bytes(), path


@contextmanager
def slowed(url: str) -> Iterator[None]:
    """The engine takes seconds for a text meanwhile."""
    assert exchange(url, "PUT", "/faults", body={"slowdown": 3_000}).status == 200
    yield
    assert exchange(url, "PUT", "/faults", body={}).status == 200


def test_who_leaves_and_who_is_late_pay_nothing(slow: tuple[RunningCell, str]) -> None:
    """Protects waiting callers: a client that leaves frees the engine, a deadline that passes is 504; neither got a vector."""
    cell, url = slow
    with new_account(cell) as account:
        with slowed(url):
            wire = account.connect()
            body = {"model": "assistant", "input": [f"{MARK} water"] * 3, "user": MARK}
            wire.ask("POST", PATH, key=account.key, body=body, headers={"idempotency-key": "left"})
            wait_until(lambda: account.get("left").json.get("status") == "running")
            wire.close()
            wait_until(lambda: account.get("left").json.get("status") == "cancelled")
            late = account.ask("POST", PATH, body, {"weir-deadline-ms": "1500", "idempotency-key": "late"})
            assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: is_at_rest(cell))
        assert [row["cost_microusd"] for row in account.usage("status")] == [0, 0]
        assert raw(account).status == 200


def test_who_cancels_by_id_is_told(slow: tuple[RunningCell, str]) -> None:
    """Protects clients: what somebody else of the tenant cancelled is 409 here, as on every compatible path."""
    cell, url = slow
    with new_account(cell) as account, slowed(url):
        wire = account.connect()
        body = {"model": "assistant", "input": f"{MARK} water"}
        wire.ask("POST", PATH, key=account.key, body=body, headers={"idempotency-key": "it"})
        wait_until(lambda: account.get("it").json.get("status") == "running")
        assert account.cancel("it").json["status"] == "cancelled"
        answer = wire.reply()
        assert (answer.status, answer.json["error"]["code"]) == (409, "request_cancelled")
    wait_until(lambda: is_at_rest(cell))


def test_what_an_engine_refuses_names_no_text(slow: tuple[RunningCell, str]) -> None:
    """Protects privacy: an engine behind a URL that refuses a text is told without it."""
    cell, _ = slow
    with new_account(cell) as account:
        answer = raw(account, input=["a", f"{MARK} word " * 7_000])
        assert (answer.status, answer.json["error"]["code"]) == (400, "engine_rejected")
        assert MARK.encode() not in answer.body
    wait_until(lambda: is_at_rest(cell))
