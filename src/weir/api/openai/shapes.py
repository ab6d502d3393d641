"""What OpenAI's surfaces share of their answers: usage, errors of a generation, models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weir.api.generations import ending_retry_headers, error_of_record, generation_body
from weir.api.wire import (
    Headers,
    Rendered,
    id_headers,
    limit_headers,
    openai_error,
    openai_error_body,
)
from weir.core.endings import ending
from weir.core.output import TokenLogprob
from weir.core.registry.model import Alias
from weir.errors import WeirError
from weir.messages import GenerationRecord, StandingView
from weir.units import Millis


def usage_object(record: GenerationRecord) -> dict[str, Any]:
    """OpenAI's usage, with what the tenant pays beside it."""
    return {
        "prompt_tokens": record.input_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.input_tokens + record.output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_input_tokens},
        "cost_microusd": record.cost_microusd,
    }


def logprob_entry(entry: TokenLogprob) -> dict[str, Any]:
    """A token's log probability with its alternatives, as chat and responses show it."""
    return {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    known = entry.token_bytes
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(known if known is not None else entry.token.encode())}


def error_event(record: GenerationRecord, now_wall_ms: Millis) -> bytes:
    """A failure after the headers: the event that the official SDK raises as an error."""
    body = {"error": openai_error_body(error_of_record(record), now_wall_ms)}
    return b"data: %b\n\n" % msgspec.json.encode(body)


def whole_answer(record: GenerationRecord, body: Mapping[str, Any], standing: StandingView, now_wall_ms: Millis) -> Rendered:
    """An ended generation as a plain answer, with its headers: this body, or the error that it ended as."""
    assert record.finish_reason is not None
    headers: Headers = [*id_headers(record.request_id), *limit_headers(standing), *ending_retry_headers(record)]
    if record.error_code is None:
        return Rendered(200, b"application/json", msgspec.json.encode(body), headers)
    extra = {"generation": generation_body(record)}
    rendered = openai_error(error_of_record(record), now_wall_ms, extra=extra)
    return Rendered(ending(record.finish_reason).compatible_http_status, b"application/json", rendered.body, headers)


def refusal(
    error: WeirError, now_wall_ms: Millis, names: Mapping[str, str], generation: GenerationRecord | None = None
) -> Rendered:
    """A refusal in OpenAI's error shape. names: our fields' names → what the surface calls them."""
    extra: dict[str, Any] = {"generation": generation_body(generation)} if generation else {}
    if (field := error.members.get("field")) is not None:
        name = {"model_alias": "model", **names}.get(field, field)
        extra |= {"field": name, "param": name}
    return openai_error(error, now_wall_ms, extra=extra)


def model_object(alias: Alias) -> dict[str, Any]:
    """An alias as OpenAI's model."""
    return {"id": alias.name, "object": "model", "created": 0, "owned_by": "weir", "root": alias.revision}


def models_object(aliases: Sequence[Alias]) -> dict[str, Any]:
    """OpenAI's list of models."""
    return {"object": "list", "data": [model_object(alias) for alias in aliases]}
