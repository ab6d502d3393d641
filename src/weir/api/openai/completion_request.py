"""A plain completion's body into a request: the prompt goes to the model as it is, without a chat template."""

from collections.abc import Mapping
from typing import Any

from weir import errors
from weir.api.compatible_fields import LABEL_CHARS_MAX, deadline_of, key_of, model_of, session_of
from weir.api.generations import OUTPUT_TOKENS_MAX, SAMPLING_FIELDS, sampling_of
from weir.api.openai.chat_request import include_usage
from weir.api.openai.chunked import ChunkOptions
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import CHOICES_MAX, NO_DEMANDS, Demands
from weir.core.request import InferenceRequest

LOGPROBS_MAX = 5
FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "stream",
    "stream_options",
    *SAMPLING_FIELDS,
    "n",
    "logprobs",
    "best_of",
    "echo",
    "user",
)


def parse_completion(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[InferenceRequest, ChunkOptions]:
    """A completion's body and Weir's headers. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = model_of(fields)
    fields.string("user", longest=LABEL_CHARS_MAX)
    choices = fields.integer("n", 1, CHOICES_MAX) or 1
    _refuse_unsupported_values(fields, choices)
    top = fields.integer("logprobs", 0, LOGPROBS_MAX)
    stream = fields.boolean("stream", default=False)
    request = InferenceRequest(
        model_alias=model,
        prompt=_prompt(fields.raw("prompt")),
        max_output_tokens=fields.integer("max_tokens", 1, OUTPUT_TOKENS_MAX),
        deadline_ms=deadline_of(headers),
        stream=stream,
        sampling=sampling_of(fields, stop_field="stop"),
        session=session_of(headers),
        request_id=key_of(headers),
        demands=NO_DEMANDS if choices == 1 and top is None else Demands(choices=choices, top_logprobs=top),
        is_plain=True,
    )
    return request, ChunkOptions(include_usage(fields, stream), choices=choices, has_logprobs=top is not None)


def _refuse_unsupported_values(fields: Fields, choices: int) -> None:
    if fields.boolean("echo", default=False):
        raise errors.UnsupportedField("The prompt is not repeated.", members={"field": "echo", "accepted": "false"})
    best_of = fields.integer("best_of", 1, CHOICES_MAX)
    if best_of is not None and best_of != choices:
        raise errors.UnsupportedField(
            "Every choice that is made is answered.", members={"field": "best_of", "accepted": f"{choices}, as n"}
        )


def _prompt(value: Any) -> str:
    accepted = "a non-empty string, or a list of one"
    prompt = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(prompt, str) or not prompt:
        refuse_field("prompt", accepted)
    return checked_text(prompt, "prompt", accepted)
