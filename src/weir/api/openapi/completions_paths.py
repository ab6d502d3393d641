"""OpenAI's plain completions: a prompt that goes to the model as it is."""

from weir.api.openai import completion_request
from weir.api.openai.completion_request import LOGPROBS_MAX
from weir.api.openapi.answers import answer, together
from weir.api.openapi.generation_fields import body_of, output_bound, sampling_fields, streamed, weir_headers
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    either,
    listed,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
)
from weir.api.openapi.openai_parts import (
    BOUND,
    STREAMS_ONLY,
    choice_fields,
    choices_field,
    chunk_body,
    chunk_stream,
    generation_answers,
    label,
    model_field,
    whole_body,
)
from weir.api.openapi.surface_description import SurfaceDescription
from weir.core.demands import CHOICES_MAX

_TAG = "OpenAI completions"
_EXAMPLE: Json = {"model": "assistant", "prompt": "A weir is", "max_tokens": 16}


def _request() -> Json:
    prompt = text("As it is.", shortest=1)
    fields = {
        "model": model_field(),
        "prompt": either("What the model continues.", prompt, listed("A list of one.", prompt, fewest=1, most=1)),
        "max_tokens": output_bound(BOUND),
        "stream": streamed(),
        "stream_options": ref("OpenAIStreamOptions"),
        **sampling_fields(),
        "n": choices_field(),
        "logprobs": optional(whole("How many alternatives to each token are reported; absent: none.", 0, LOGPROBS_MAX)),
        "best_of": optional(whole("Only the value of n: every choice that is made is answered.", 1, CHOICES_MAX)),
        "echo": optional(only("Whether the prompt is repeated; only false.", False, "boolean"), False),
        "user": label("A label for your user, without effect."),
    }
    return {**request_object("A completion to make.", fields, ["model", "prompt"]), **STREAMS_ONLY}


def _logprobs() -> Json:
    logarithm = {"type": "number", "maximum": 0}
    fields = {
        "tokens": listed("The tokens' texts.", {"type": "string"}),
        "token_logprobs": listed("The natural logarithm of each one's probability.", logarithm),
        "top_logprobs": listed("Alternatives to each, by their text.", {"type": "object", "additionalProperties": logarithm}),
        "text_offset": listed("Where each begins, in characters of the output.", {"type": "integer", "minimum": 0}),
    }
    return answer_object("Log probabilities in columns.", fields, list(fields))


def _create() -> Json:
    made = answer(
        "The completion; with `stream`, its chunks.",
        {"application/json": {"schema": ref("Completion")}, "text/event-stream": chunk_stream("CompletionChunk")},
    )
    return {
        "tags": [_TAG],
        "operationId": "createCompletion",
        "summary": "Complete a text",
        "description": "OpenAI's completion, without a chat template. A field that is not described here is refused by name.",
        "parameters": weir_headers(),
        "requestBody": body_of("CompletionRequest", "What to complete.", _EXAMPLE),
        "responses": together(*generation_answers(made)),
    }


_PIECE = {"text": text("The output, or a piece of it.")}

SURFACE = SurfaceDescription(
    name=_TAG,
    description="OpenAI's completions: a prompt goes to the model as it is.",
    page="openai-completions.md",
    paths={"/v1/completions": {"post": _create()}},
    schemas={
        "CompletionRequest": _request(),
        "Completion": whole_body(
            "A completion.", "text_completion", choice_fields(_PIECE, ref("CompletionLogprobs"), is_whole=True)
        ),
        "CompletionChunk": chunk_body(
            "A piece of a completion.", "text_completion", choice_fields(_PIECE, ref("CompletionLogprobs"), is_whole=False)
        ),
        "CompletionLogprobs": _logprobs(),
    },
    parsed={"CompletionRequest": completion_request.FIELDS},
)
