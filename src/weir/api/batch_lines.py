"""Lines of a batch: read and answered by the parser and the answer of the endpoint that they are for, as a request of its own.

What belongs to a connection is refused by its name: a stream, what is kept for later readers, an id of the caller's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from weir import errors
from weir.api import generations
from weir.api.generations import NativeAnswer, parse_generation
from weir.api.openai import chat, completions, embeddings, responses
from weir.api.openai.chat import ChatAnswer
from weir.api.openai.chat_request import parse_chat
from weir.api.openai.completion_request import parse_completion
from weir.api.openai.completions import CompletionAnswer
from weir.api.openai.embeddings import EmbeddingsAnswer, parse_embeddings
from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import parse_response
from weir.api.wire import json_object, refuse_field
from weir.core.batches.batch_records import ENDPOINTS
from weir.core.request import InferenceRequest
from weir.gateway.client import Answer, Client
from weir.ports import Clock

_NO_HEADERS: Mapping[bytes, bytes] = {}
_OF_A_CONNECTION = ("retain", "store", "background")

MakeAnswer = Callable[[Client, Clock, str, InferenceRequest], Answer]
"""Client, clock, request id and request → the answer that shows it."""


class LineAnswer(NamedTuple):
    """A line as the pipeline takes it. surface: the name of the endpoint's."""

    request: InferenceRequest
    answer: Answer
    surface: str


class _Read(NamedTuple):
    request: InferenceRequest
    make: MakeAnswer
    surface: str


def read_request(endpoint: str, body: bytes) -> InferenceRequest:
    """A line's body as a request. endpoint: one of ENDPOINTS. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    return _read(endpoint, body).request


def line_answer(endpoint: str, body: bytes, client: Client, clock: Clock, request_id: str) -> LineAnswer:
    """A line's request under this id, and the answer that shows it whole to this client. Raises what `read_request` raises."""
    read = _read(endpoint, body)
    request = replace(read.request, request_id=request_id)
    return LineAnswer(request, read.make(client, clock, request_id, request), read.surface)


def _read(endpoint: str, body: bytes) -> _Read:
    assert endpoint in ENDPOINTS
    document = json_object(body)
    _refuse_what_has_no_connection(document)
    return _READERS[endpoint](document)


def _refuse_what_has_no_connection(document: Mapping[str, Any]) -> None:
    if document.get("stream") not in (None, False):
        refuse_field("stream", "false: a line of a batch is answered whole")
    for name in _OF_A_CONNECTION:
        if document.get(name) not in (None, False):
            raise errors.UnsupportedField(f"'{name}' is not for lines.", members={"field": name, "accepted": "false"})
    if document.get("request_id") is not None:
        raise errors.UnsupportedField(
            "A line's request id is its batch's and its own number.", members={"field": "request_id", "accepted": "absent"}
        )


# ── the endpoints ────────────────────────────────────────────────────────────────────────────────────────────────────


def _native(document: Mapping[str, Any]) -> _Read:
    def make(client: Client, clock: Clock, request_id: str, request: InferenceRequest) -> Answer:
        return NativeAnswer(client, clock, request_id)

    return _Read(parse_generation(document), make, generations.SURFACE)


def _chat(document: Mapping[str, Any]) -> _Read:
    parsed, options = parse_chat(document, _NO_HEADERS)

    def make(client: Client, clock: Clock, request_id: str, request: InferenceRequest) -> Answer:
        return ChatAnswer(client, clock, request_id, options)

    return _Read(parsed, make, chat.SURFACE)


def _completion(document: Mapping[str, Any]) -> _Read:
    parsed, options = parse_completion(document, _NO_HEADERS)

    def make(client: Client, clock: Clock, request_id: str, request: InferenceRequest) -> Answer:
        return CompletionAnswer(client, clock, request_id, options)

    return _Read(parsed, make, completions.SURFACE)


def _response(document: Mapping[str, Any]) -> _Read:
    parsed, options = parse_response(document, _NO_HEADERS)

    def make(client: Client, clock: Clock, request_id: str, request: InferenceRequest) -> Answer:
        return ResponseAnswer(client, clock, request_id, request, options)

    return _Read(parsed, make, responses.SURFACE)


def _embeddings(document: Mapping[str, Any]) -> _Read:
    parsed, encoding = parse_embeddings(document, _NO_HEADERS)

    def make(client: Client, clock: Clock, request_id: str, request: InferenceRequest) -> Answer:
        return EmbeddingsAnswer(client, clock, request_id, encoding)

    return _Read(parsed, make, embeddings.SURFACE)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], _Read]] = {
    "/v1/generations": _native,
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
}
