"""Protects lines of a batch: each is read and answered as its endpoint does, and what needs a connection is refused by name."""

import json
from typing import Any

import pytest
from tests.contract.admin_stand import ManualClock
from tests.unit.response_stand import KeptClient

from weir import errors
from weir.api.batch_lines import line_answer, read_request
from weir.api.generations import is_request_id
from weir.core.batches.batch_records import BATCH_ID_PREFIX, ENDPOINTS, line_request_id, new_id
from weir.core.endings import FinishReason, Status
from weir.core.output import Delta, Vectors
from weir.messages import GenerationRecord, StandingView

BODIES: dict[str, dict[str, Any]] = {
    "/v1/generations": {"model_alias": "assistant", "input": "x"},
    "/v1/chat/completions": {"model": "assistant", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "assistant", "prompt": "x"},
    "/v1/responses": {"model": "assistant", "input": "x"},
    "/v1/embeddings": {"model": "assistant", "input": "x"},
}
REQUEST_ID = line_request_id(new_id(BATCH_ID_PREFIX, 1_700_049_600_000, b"12345678"), 7)
RECORD = GenerationRecord(
    "gen-1", REQUEST_ID, 0, "assistant", "small@1", Status.COMPLETED, finish_reason=FinishReason.STOP, output_tokens=1
)


def body_of(endpoint: str, **more: Any) -> bytes:
    return json.dumps({**BODIES[endpoint], **more}).encode()


def test_every_endpoint_has_a_body_here() -> None:
    """Protects the tests below from an endpoint that nobody tries."""
    assert set(BODIES) == set(ENDPOINTS)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_line_is_read_by_its_endpoints_own_parser(endpoint: str) -> None:
    """Protects budgets: what a line asks for is what the same body asks for at its endpoint."""
    request = read_request(endpoint, body_of(endpoint))
    assert request.model_alias == "assistant" and request.request_id is None
    assert not request.stream and not request.retain
    with pytest.raises(errors.UnsupportedField) as refused:
        read_request(endpoint, body_of(endpoint, anything=1))
    assert refused.value.members["field"] == "anything"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", ["stream", "store", "background", "retain"])
def test_what_needs_a_connection_is_refused(endpoint: str, name: str) -> None:
    """Protects lines from options that nobody could keep: a stream, a stored stream, work that is answered before its end."""
    with pytest.raises((errors.InvalidRequest, errors.UnsupportedField)) as refused:
        read_request(endpoint, body_of(endpoint, **{name: True}))
    assert refused.value.members["field"] == name
    if name == "stream":
        assert refused.value.code == "invalid_request" and "false" in refused.value.members["accepted"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_request_id_is_the_batchs(endpoint: str) -> None:
    """Protects the ledger, which charges a line once by the id that its batch and its number make."""
    with pytest.raises(errors.UnsupportedField) as refused:
        read_request(endpoint, body_of(endpoint, request_id="mine"))
    assert refused.value.members["field"] == "request_id"
    made = line_answer(endpoint, body_of(endpoint), KeptClient(), ManualClock(), REQUEST_ID)
    assert made.request.request_id == REQUEST_ID and is_request_id(REQUEST_ID)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"7", b'{"model_alias":"a"}', b"[" * 100_000])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_no_body_is_refused_and_nothing_else_happens(endpoint: str, body: bytes) -> None:
    """Protects workers: whatever a line has, reading it ends in a request or an error of ours."""
    with pytest.raises(errors.WeirError):
        read_request(endpoint, body)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("endpoint", "surface", "place"),
    [
        ("/v1/generations", "generations", lambda body: body["output"]),
        ("/v1/chat/completions", "chat.completions", lambda body: body["choices"][0]["message"]["content"]),
        ("/v1/completions", "completions", lambda body: body["choices"][0]["text"]),
        ("/v1/responses", "responses", lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
async def test_an_answer_has_the_shape_of_its_endpoint(endpoint: str, surface: str, place: Any) -> None:
    """Protects readers of result files: a line's answer is the body that the endpoint itself would send, whole."""
    client = KeptClient()
    made = line_answer(endpoint, body_of(endpoint), client, ManualClock(), REQUEST_ID)
    assert made.surface == surface and made.answer.client is client
    await made.answer.end(RECORD, [Delta("hel"), Delta("lo")], StandingView())
    assert client.status == 200 and place(client.json) == "hello" and client.headers["x-request-id"] == REQUEST_ID


async def test_vectors_have_the_encoding_that_the_line_asks_for() -> None:
    """Protects readers of embeddings: the options of a line's body reach its answer."""
    client = KeptClient()
    body = body_of("/v1/embeddings", encoding_format="base64")
    made = line_answer("/v1/embeddings", body, client, ManualClock(), REQUEST_ID)
    assert made.surface == "embeddings"
    await made.answer.end(RECORD, [Vectors("", vectors=(b"\x00\x00\x80\x3f",))], StandingView())
    assert client.json["data"][0]["embedding"] == "AACAPw=="


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_refusal_has_the_shape_of_its_endpoint(endpoint: str) -> None:
    """Protects readers of error files: a line that is refused says so as its endpoint would."""
    client = KeptClient()
    made = line_answer(endpoint, body_of(endpoint), client, ManualClock(), REQUEST_ID)
    await made.answer.refuse(errors.UnknownAlias(), StandingView(), None)
    assert client.status == 404 and client.json.get("error", client.json)["code"] == "unknown_alias"
