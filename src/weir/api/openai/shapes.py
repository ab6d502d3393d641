"""What OpenAI's surfaces share: fields that change nothing, usage, errors of a generation, models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weir.api.generations import ALIAS_CHARS_MAX, ending_retry_headers, error_of_record, generation_body
from weir.api.weir_headers import deadline_of as deadline_of
from weir.api.weir_headers import key_of as key_of
from weir.api.weir_headers import session_of as session_of
from weir.api.wire import (
    Fields,
    Headers,
    Rendered,
    checked_text,
    id_headers,
    limit_headers,
    openai_error,
    openai_error_body,
    refuse_field,
)
from weir.core.endings import ending
from weir.core.output import TokenLogprob
from weir.core.registry.model import Alias
from weir.errors import WeirError
from weir.messages import GenerationRecord, StandingView
from weir.units import Millis

LABEL_CHARS_MAX = 256
METADATA_MAX, METADATA_NAME_CHARS_MAX, METADATA_CHARS_MAX = 16, 64, 512
_METADATA_ACCEPTED = "an object of up to 16 names of 1 to 64 characters with strings of up to 512 characters"
LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""Fields that change nothing in what is generated and are accepted; identity comes from the key."""


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_labels(fields: Fields) -> None:
    """Raises InvalidRequest for a label that OpenAI would refuse too."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.string(name, longest=LABEL_CHARS_MAX)
    metadata = fields.raw("metadata")
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > METADATA_MAX:
        refuse_field("metadata", _METADATA_ACCEPTED)
    for name, value in metadata.items():
        checked_text(name, "metadata", _METADATA_ACCEPTED)
        text = checked_text(value, "metadata", _METADATA_ACCEPTED)
        if not 1 <= len(name) <= METADATA_NAME_CHARS_MAX or len(text) > METADATA_CHARS_MAX:
            refuse_field("metadata", _METADATA_ACCEPTED)


def model_of(fields: Fields) -> str:
    """The alias that a body names as its model. Raises InvalidRequest."""
    model = fields.string("model", longest=ALIAS_CHARS_MAX)
    if model is None:
        refuse_field("model", "the name of a model alias")
    return model


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
