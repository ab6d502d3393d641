"""Embeddings at the door: what a body means, and that no number changes between an engine and a client."""

import base64
import struct
from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_openai_answers import RECORD, Recorder

from weir import errors
from weir.api.openai.embeddings import EmbeddingsAnswer, parse_embeddings
from weir.clock import SystemClock
from weir.core.demands import DIMENSIONS_MAX, TEXTS_MAX, Demands, Embedding
from weir.core.endings import FinishReason, Status
from weir.core.output import VECTOR_BYTES_MAX, Delta, Vectors, numbers_of, vector_of, vectors_of
from weir.core.request import InferenceRequest
from weir.engines.simulated_embeddings import DIMENSIONS, embedding_of
from weir.messages import GenerationRecord, StandingView

NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50)


def _parse(fields: Mapping[str, Any], headers: Mapping[bytes, bytes] | None = None) -> tuple[InferenceRequest, str]:
    return parse_embeddings({"model": "assistant", "input": "a river", **fields}, headers or {})


def test_a_body_and_its_headers() -> None:
    """Protects the request that the pipeline gets: texts, dimensions, and Weir's own options from the headers."""
    headers = {b"idempotency-key": b"once", b"weir-deadline-ms": b"500", b"weir-session": b"s"}
    request, encoding = _parse({"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64", "user": "u"}, headers)
    assert request.demands == Demands(embedding=Embedding(("a", "b"), 8)) and encoding == "base64"
    assert (request.request_id, request.deadline_ms, request.session) == ("once", 500, "s")
    assert (request.prompt, request.is_plain, request.stream, request.max_output_tokens) == ("", True, False, None)


@pytest.mark.parametrize(("value", "texts"), [("a", ("a",)), (["a"], ("a",)), (["é"] * TEXTS_MAX, ("é",) * TEXTS_MAX)])
def test_one_text_or_a_list(value: Any, texts: tuple[str, ...]) -> None:
    """Protects both forms of `input`; null is the same as absent elsewhere."""
    request, encoding = _parse({"input": value, "dimensions": None, "encoding_format": None, "user": None})
    assert request.demands.embedding == Embedding(texts) and encoding == "float"
    assert request.prompt_bytes == sum(len(text.encode()) for text in texts) and request.turns == len(texts)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": ["\ud800"]}, "input[0]"),
        ({"input": "\ud800"}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"] * (TEXTS_MAX + 1)}, "input"),
        ({"dimensions": DIMENSIONS_MAX + 1}, "dimensions"),
        ({"dimensions": 8.0}, "dimensions"),
        ({"encoding_format": ["float"]}, "encoding_format"),
    ],
)
def test_what_is_no_text_is_refused_where_it_is(fields: Mapping[str, Any], field: str) -> None:
    """Protects callers with a list of hundreds: the one that is wrong is named, and not repeated."""
    with pytest.raises(errors.InvalidRequest) as refused:
        _parse(fields)
    assert refused.value.members["field"] == field


@pytest.mark.parametrize("value", [[1, 2], [[1, 2]], [True]])
def test_tokens_are_not_taken_for_text(value: Any) -> None:
    """Protects callers that send tokens: another tokenizer's numbers would be embedded as nonsense."""
    with pytest.raises(errors.UnsupportedField, match="Tokens are not embedded"):
        _parse({"input": value})


async def _shown(encoding: str, *vectors: bytes) -> Any:
    client = Recorder()
    answer = EmbeddingsAnswer(client, SystemClock(), "req-1", encoding)
    await answer.end(RECORD, [Delta(""), Vectors("", vectors=vectors)], StandingView())
    assert client.status == 200
    return msgspec.json.decode(client.body)


@given(st.lists(NUMBERS, min_size=1, max_size=4))
async def test_both_formats_are_the_same_float32(vectors: list[list[float]]) -> None:
    """Protects indexes: what an engine made is what a client reads, to the last bit, in either format and in order."""
    packed = [vector_of(vector) for vector in vectors]
    floats, coded = await _shown("float", *packed), await _shown("base64", *packed)
    assert [item["embedding"] for item in floats["data"]] == vectors
    assert [base64.b64decode(item["embedding"]) for item in coded["data"]] == packed
    assert [item["index"] for item in floats["data"]] == list(range(len(vectors)))
    assert [list(struct.unpack(f"<{len(each) // 4}f", each)) for each in packed] == vectors


async def test_usage_is_input_alone() -> None:
    """Protects the bill: prompt and total are one figure, and what the tenant pays stands beside it."""
    body = await _shown("float", vector_of([1.0]))
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "cost_microusd": 0}
    assert (body["id"], body["object"], body["model"], body["system_fingerprint"]) == ("gen-1", "list", "assistant", "rev-1")


async def test_an_ending_that_is_a_failure_shows_no_vector() -> None:
    """Protects callers: the table's status, OpenAI's error, and nothing of what was made."""
    client = Recorder()
    record = GenerationRecord(
        "gen-1", "req-1", 1, "assistant", "rev-1", Status.FAILED, FinishReason.ENGINE_ERROR, error_code="engine_error"
    )
    await EmbeddingsAnswer(client, SystemClock(), "req-1", "float").end(record, [], StandingView())
    assert client.status == 502 and set(msgspec.json.decode(client.body)) == {"error"}


@pytest.mark.parametrize("dimensions", [None, 1, 3, 65, DIMENSIONS_MAX])
def test_simulated_vectors_have_unit_length(dimensions: int | None) -> None:
    """Protects tests that compare vectors: a text determines its own, of the size asked for."""
    vector = embedding_of("a river", dimensions)
    numbers = numbers_of(vector)
    assert len(numbers) == (dimensions or DIMENSIONS) and len(vector) <= VECTOR_BYTES_MAX
    assert isclose(sqrt(sum(number * number for number in numbers)), 1, rel_tol=1e-5)
    assert vector == embedding_of("a river", dimensions)
    assert dimensions == 1 or vector != embedding_of("a lake", dimensions)


def test_vectors_occupy_what_they_hold() -> None:
    """Protects memory: the bound of a whole answer sees vectors, which have no text."""
    piece = Vectors("", vectors=(b"abcd", b"efghijkl"))
    assert piece.extra_bytes == 12 and vectors_of([Delta("a"), piece]) == (b"abcd", b"efghijkl")
