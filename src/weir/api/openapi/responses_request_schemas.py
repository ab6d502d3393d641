"""The body of a response: items of its input, tools, and the form of its text, object by object as the parser reads them."""

from weir.api.functions import CALL_ID_CHARS_MAX, TOOLS_MAX
from weir.api.generations import MESSAGES_MAX
from weir.api.openai.response_input import ITEM_ID_CHARS_MAX, STATUSES
from weir.api.openai.responses_request import LOGPROBS, SERVICE_TIERS
from weir.api.openapi.generation_fields import output_bound, sampling_fields, streamed
from weir.api.openapi.json_schema import (
    NULL,
    Json,
    either,
    flag,
    listed,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
    words,
)
from weir.api.openapi.openai_parts import BOUND, STREAMS_ONLY, label, metadata_field, model_field, needs
from weir.api.openapi.tool_fields import (
    ANY_TOOL,
    description_field,
    json_schema_field,
    mode_field,
    name_field,
    strict_field,
)
from weir.core.demands import TOP_LOGPROBS_MAX, ToolMode

_FUNCTION = only("The kind; only function.", "function", "string")


def request() -> Json:
    """The body."""
    items = either("An item.", ref("ResponseInputMessage"), ref("ResponseInputCall"), ref("ResponseInputCallOutput"))
    conversation = listed("A conversation.", items, fewest=1, most=MESSAGES_MAX)
    sampling = sampling_fields()
    included = words("Log probabilities of the text's tokens.", (LOGPROBS,))
    fields = {
        "model": model_field(),
        "input": either("What the model is given.", text("Plain text.", shortest=1), conversation),
        "instructions": optional(text("The first system message; absent: none.")),
        "max_output_tokens": output_bound(BOUND),
        "stream": streamed(),
        "stream_options": optional(either("Options of a stream; only with stream.", ref("ResponseStreamOptions"))),
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "tools": optional(listed("Functions that the model may call, each name once.", ref("ResponseTool"), most=TOOLS_MAX)),
        "tool_choice": optional(either("Whether to call one; only with tools.", mode_field(), ref("ResponseToolChoice"))),
        "parallel_tool_calls": optional(flag("Whether it may call several at once; only with tools.")),
        "text": optional(either("What form the text has; absent: any.", ref("ResponseText"))),
        "include": optional(listed("What is told beside the text; absent: nothing.", included)),
        "top_logprobs": optional(whole("How many alternatives to each token; only with that include.", 0, TOP_LOGPROBS_MAX)),
        "user": label("A label for your user, without effect."),
        "safety_identifier": label("A label for your user, without effect."),
        "prompt_cache_key": label("A label, without effect."),
        "metadata": metadata_field(),
        "service_tier": optional(words("A label without effect.", SERVICE_TIERS)),
        "truncation": optional(only("An input that is too long is refused, never cut.", "disabled", "string"), "disabled"),
        "store": optional(flag("Whether its events are kept; only of a tenant that keeps streams. Absent: as `background`.")),
        "background": optional(
            flag("Whether it is answered as it begins and goes on without a reader; it is stored then."), default=False
        ),
    }
    in_background: Json = {"required": ["background"], "properties": {"background": {"const": True}}}
    chosen: Json = {"tool_choice": {"not": {"enum": [None, ToolMode.NONE.value]}}}
    return {
        **request_object("A response to make.", fields, ["model", "input"]),
        "allOf": [
            STREAMS_ONLY,
            needs("parallel_tool_calls", ANY_TOOL),
            needs("top_logprobs", {"include": {"type": "array", "minItems": 1}}),
            {"if": in_background, "then": {"properties": {"store": {"enum": [True, None]}}}},
            {
                "if": {"required": ["tool_choice"], "properties": chosen},
                "then": {"required": ["tools"], "properties": ANY_TOOL},
            },
        ],
    }


def stream_options() -> Json:
    """Options of a stream."""
    padded = only("Whether events are padded; only false.", False, "boolean")
    return request_object("Options of a stream.", {"include_obfuscation": optional(padded, False)})


# ── items of the input ───────────────────────────────────────────────────────────────────────────────────────────────


def _echoed() -> dict[str, Json]:
    """What items of an earlier answer have too."""
    return {
        "id": optional(text("The item's id, without effect.", shortest=1, longest=ITEM_ID_CHARS_MAX)),
        "status": optional(words("How far it was, without effect.", STATUSES)),
    }


def _call_id() -> Json:
    return text("The call's id.", shortest=1, longest=CALL_ID_CHARS_MAX)


def message() -> Json:
    """A message; an assistant's alone has parts of output."""
    parts = listed("Text in parts, which are joined.", either("A part.", ref("ResponseInputText"), ref("ResponseOutputText")))
    fields = {
        "type": optional(only("The kind of the item.", "message", "string"), "message"),
        **_echoed(),
        "role": words("Who says it; `developer` is taken as `system`.", ("user", "assistant", "system", "developer")),
        "content": either("What is said; only an assistant's has parts of output.", text("Plain text."), parts),
    }
    others = {"properties": {"type": {"const": "input_text"}}}
    whose = [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"role": {"enum": ["user", "system", "developer"]}, "content": {"items": others}}},
    ]
    return {**request_object("A message of the conversation.", fields, ["role", "content"]), "anyOf": whose}


def input_text() -> Json:
    """A part of what is given."""
    fields = {"type": only("The kind of the part.", "input_text", "string"), "text": text("The part's text.")}
    return request_object("A part of a message.", fields, list(fields))


def output_text() -> Json:
    """A part of an earlier answer."""
    fields = {
        "type": only("The kind of the part.", "output_text", "string"),
        "text": text("The part's text."),
        "annotations": optional(listed("Only an empty list: annotations are not told again.", {}, most=0)),
        "logprobs": optional(listed("Log probabilities, without effect.", {})),
    }
    return request_object("A part of what the model said before.", fields, ["type", "text"])


def call() -> Json:
    """A call that the model made before."""
    fields = {
        "type": only("The kind of the item.", "function_call", "string"),
        **_echoed(),
        "call_id": _call_id(),
        "name": name_field("The function's name."),
        "arguments": text("JSON text, as the model wrote it."),
    }
    described = "A call that the model made before; up to 128 in one turn."
    return request_object(described, fields, ["type", "call_id", "name", "arguments"])


def call_output() -> Json:
    """What a call returned."""
    parts = listed("Text in parts, which are joined.", ref("ResponseInputText"))
    fields = {
        "type": only("The kind of the item.", "function_call_output", "string"),
        **_echoed(),
        "call_id": _call_id(),
        "output": either("What it returned.", text("Plain text."), parts),
    }
    return request_object("What a call returned.", fields, ["type", "call_id", "output"])


# ── demands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tool() -> Json:
    """A function that may be called."""
    fields = {
        "type": _FUNCTION,
        "name": name_field("Its name."),
        "description": description_field(),
        "parameters": optional(json_schema_field("A JSON schema of its arguments; absent: it takes none.")),
        "strict": strict_field(),
    }
    return request_object("A function of yours, which you run.", fields, ["type", "name"])


def tool_choice() -> Json:
    """The one tool that must be called."""
    fields = {"type": _FUNCTION, "name": name_field("The name of one of the tools.")}
    return request_object("The tool that must be called.", fields, list(fields))


def text_options() -> Json:
    """Options of the text."""
    form = optional(either("What the text follows; absent: nothing.", ref("ResponseForm")))
    return request_object("Options of the text.", {"format": form})


def form() -> Json:
    """The form of the text; a schema's fields stand in it."""
    fields = {
        "type": words("The kind of form.", ("text", "json_object", "json_schema")),
        "name": optional(name_field("A name for the schema, of a json_schema alone.")),
        "description": description_field(),
        "schema": optional(json_schema_field("The JSON schema, which the engine enforces as it decodes.")),
        "strict": strict_field(),
    }
    by_schema = {
        "required": ["name", "schema"],
        "properties": {"type": {"const": "json_schema"}, "name": {"type": "string"}, "schema": {"type": "object"}},
    }
    unset = dict.fromkeys(("name", "description", "schema", "strict"), NULL)
    plain = {"properties": {"type": {"enum": ["text", "json_object"]}, **unset}}
    return {**request_object("What form the text has.", fields, ["type"]), "anyOf": [plain, by_schema]}
