"""What OpenAI's surfaces share in the document: the fields and options of a request, usage, log probabilities, refusals."""

from weir import errors
from weir.api.compatible_fields import LABEL_CHARS_MAX, METADATA_CHARS_MAX, METADATA_MAX, METADATA_NAME_CHARS_MAX
from weir.api.generations import ALIAS_CHARS_MAX
from weir.api.openapi.answers import ADMISSION, CONNECTION, ENDED, OPENAI, PROBLEM, Answers, event, events, last_event, refusals
from weir.api.openapi.generation_fields import record_links
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    flag,
    listed,
    nullable,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
)
from weir.core.demands import CHOICES_MAX
from weir.core.endings import FinishReason, Status, ending

BOUND = "At most the revision's maximum; absent: the alias's default, cut to what the context window leaves."
REASONS = [reason for reason in FinishReason if ending(reason).status is Status.COMPLETED]
"""How a choice can end."""


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_field() -> Json:
    """The alias."""
    return text("The exact name of an alias that the application may use.", shortest=1, longest=ALIAS_CHARS_MAX)


def label(description: str) -> Json:
    """A text that changes nothing in what is generated."""
    return optional(text(description, shortest=1, longest=LABEL_CHARS_MAX))


def metadata_field() -> Json:
    """Labels of the caller's own."""
    schema = {
        "type": "object",
        "description": "Labels of your own, without effect.",
        "maxProperties": METADATA_MAX,
        "propertyNames": {"minLength": 1, "maxLength": METADATA_NAME_CHARS_MAX},
        "additionalProperties": {"type": "string", "maxLength": METADATA_CHARS_MAX},
    }
    return optional(schema)


def choices_field() -> Json:
    """How many choices are made."""
    return optional(whole("How many choices to make, each up to the bound of output; 1 on llama.cpp.", 1, CHOICES_MAX), 1)


def present(*names: str) -> Json:
    """Whether all of these are there, and not null."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def needs(name: str, wanted: Json) -> Json:
    """A field that is allowed beside others alone. wanted: their schemas by their names."""
    return {"if": present(name), "then": {"required": list(wanted), "properties": wanted}}


STREAMS_ONLY = needs("stream_options", {"stream": {"const": True}})


def stream_options() -> Json:
    """Options of a stream."""
    fields = {
        "include_usage": optional(flag("Whether a last chunk tells the usage."), default=False),
        "include_obfuscation": optional(only("Whether chunks are padded; only false.", False, "boolean"), False),
    }
    return optional(request_object("Options of a stream; only with `stream`.", fields))


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def usage() -> Json:
    """OpenAI's usage, with the cost."""
    cached = answer_object(
        "Details of the prompt's tokens.", {"cached_tokens": whole("Cached by the engine.")}, ["cached_tokens"]
    )
    fields = {
        "prompt_tokens": whole("Tokens of the input."),
        "completion_tokens": whole("Tokens of the output."),
        "total_tokens": whole("Both together."),
        "prompt_tokens_details": cached,
        "cost_microusd": whole("What you pay, in millionths of a dollar; 0 where the platform pays."),
    }
    return answer_object("What was used, and what it costs.", fields, list(fields))


def logprobs() -> Json:
    """Log probabilities of the tokens of a choice, as chat shows them."""
    fields = {
        "content": listed("One for each token.", ref("OpenAILogprob")),
        "refusal": {"type": "null", "description": "Always null."},
    }
    return answer_object("Log probabilities, where they were asked for.", fields, list(fields))


def logprob() -> Json:
    """A token's log probability."""
    fields = _token()
    alternatives = listed("The likeliest ones in its place.", answer_object("An alternative.", fields, list(fields)))
    return answer_object("A token and how likely it was.", {**fields, "top_logprobs": alternatives}, [*fields, "top_logprobs"])


def _token() -> dict[str, Json]:
    return {
        "token": text("Its text."),
        "logprob": {"type": "number", "maximum": 0, "description": "The natural logarithm of its probability."},
        "bytes": listed("Its UTF-8 bytes.", {"type": "integer", "minimum": 0, "maximum": 255}),
    }


def head(kind: str) -> dict[str, Json]:
    """What whole answers and chunks begin with."""
    return {
        "id": text("The generation's id.", shortest=1),
        "object": only("What this is.", kind, "string"),
        "created": whole("When, in seconds since 1970."),
        "model": text("The alias that was asked for."),
        "system_fingerprint": text("The revision that answers."),
    }


def whole_body(description: str, kind: str, choice: dict[str, Json]) -> Json:
    """An answer that is not streamed."""
    made = listed("The choices, in order.", answer_object("A choice.", choice, list(choice)), fewest=1, most=CHOICES_MAX)
    fields = {**head(kind), "choices": made, "usage": ref("OpenAIUsage")}
    return answer_object(description, fields, list(fields))


def chunk_body(description: str, kind: str, choice: dict[str, Json]) -> Json:
    """A piece of a stream."""
    made = listed("One, or none in the usage chunk.", answer_object("A piece of a choice.", choice, list(choice)), most=1)
    fields = {**head(kind), "choices": made}
    return answer_object(description, {**fields, "usage": ref("OpenAIUsage")}, list(fields))


def choice_fields(content: dict[str, Json], probabilities: Json, *, is_whole: bool) -> dict[str, Json]:
    """A choice. content: what it says; probabilities: as the surface shows them."""
    reason = {"type": "string", "enum": list(REASONS), "description": "Why it ended; null before its end."}
    return {
        **content,
        "index": whole("Which choice.", 0, CHOICES_MAX - 1),
        "logprobs": nullable({"anyOf": [probabilities], "description": "Where they were asked for."}),
        "finish_reason": reason if is_whole else nullable(reason),
    }


def chunk_stream(component: str) -> Json:
    """The media type object of a stream of chunks."""
    failed = {"type": "object", "required": ["error"], "properties": {"error": ref("OpenAIError")}}
    return events(
        event("Pieces of the output, the finish reason of each choice, and the usage if asked for.", ref(component)),
        event("A failure after the headers.", failed),
        last_event("Always last.", "[DONE]"),
    )


def generation_answers(made: Json, *more: type[errors.WeirError]) -> tuple[Answers, Answers, Answers]:
    """What a path that makes generations answers. made: when all is well, perhaps with links; more: errors of its own."""
    return (
        {"200": {**made, "links": {**record_links(), **made.get("links", {})}}},
        refusals(OPENAI, (*ADMISSION, errors.ConflictingFields, *more, *ENDED)),
        refusals(PROBLEM, CONNECTION),
    )
