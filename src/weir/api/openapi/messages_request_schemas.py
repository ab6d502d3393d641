"""The bodies of Anthropic's messages: turns, content blocks, tools, object by object as the parser reads them."""

from weir.api.anthropic.content_blocks import BLOCKS, CACHE_TIMES, ROLES
from weir.api.anthropic.messages_request import INPUT_FIELDS, SERVICE_TIERS, STOP_CHARS_MAX, STOPS_MAX, TOP_K_MAX
from weir.api.functions import CALL_ID_CHARS_MAX, TOOLS_MAX
from weir.api.generations import MESSAGES_MAX, OUTPUT_TOKENS_MAX
from weir.api.openapi.generation_fields import streamed
from weir.api.openapi.json_schema import (
    NULL,
    Json,
    either,
    flag,
    listed,
    number,
    only,
    optional,
    ref,
    request_object,
    text,
    whole,
    words,
)
from weir.api.openapi.openai_parts import label, model_field
from weir.api.openapi.tool_fields import ANY_TOOL, description_field, json_schema_field, name_field, strict_field

_NO_TOOL: Json = {"required": ["type"], "properties": {"type": {"const": "none"}}}
_TOOLS_BESIDE_A_CHOICE: Json = {
    "if": {"required": ["tool_choice"], "properties": {"tool_choice": {"not": {"anyOf": [NULL, _NO_TOOL]}}}},
    "then": {"required": ["tools"], "properties": ANY_TOOL},
}


def _input_fields() -> dict[str, Json]:
    """What counts as input."""
    system = either("Comes before all turns; absent: nothing.", text("Plain text."), _text_blocks())
    turns = "The conversation. The last turn is not the assistant's; each result of a tool counts as one."
    return {
        "model": model_field(),
        "messages": listed(turns, ref("MessageTurn"), fewest=1, most=MESSAGES_MAX),
        "system": optional(system),
        "tools": optional(listed("Functions that the model may call, each name once.", ref("MessageTool"), most=TOOLS_MAX)),
        "tool_choice": optional(either("Whether to call one; only with tools.", ref("MessageToolChoice"))),
        "output_config": optional(either("What form the output has; absent: text.", ref("MessageOutputConfig"))),
        "thinking": optional(either("Thinking cannot be asked for.", ref("MessageThinking"))),
        "cache_control": _cache_control(),
    }


def request() -> Json:
    """The body of a message."""
    stop = text("One of them.", shortest=1, longest=STOP_CHARS_MAX)
    fields = {
        **_input_fields(),
        "max_tokens": whole("The most output tokens; at most the revision's maximum.", 1, OUTPUT_TOKENS_MAX),
        "stream": streamed(),
        "stop_sequences": optional(listed("Texts that end the output before they appear.", stop, most=STOPS_MAX)),
        "temperature": optional(number("How freely tokens are drawn; absent: the engine's default.", 0, 1)),
        "top_p": optional(number("The part of the probability that is drawn from; absent: the engine's default.", 0, 1)),
        "top_k": optional(whole("How many of the likeliest tokens are drawn from; absent: the engine's.", 0, TOP_K_MAX)),
        "metadata": optional(either("Labels without effect.", ref("MessageMetadata"))),
        "service_tier": optional(words("A label without effect.", SERVICE_TIERS)),
    }
    described = request_object("A message to make.", fields, ["model", "messages", "max_tokens"])
    return {**described, "allOf": [_TOOLS_BESIDE_A_CHOICE]}


def count_request() -> Json:
    """The body of a count."""
    fields = {name: field for name, field in _input_fields().items() if name in INPUT_FIELDS}
    return {**request_object("What to count.", fields, ["model", "messages"]), "allOf": [_TOOLS_BESIDE_A_CHOICE]}


def _cache_control() -> Json:
    return optional(either("A mark without effect: prefixes are cached without one.", ref("MessageCacheControl")))


def cache_control() -> Json:
    """A mark for caches."""
    fields = {
        "type": only("The kind of cache.", "ephemeral", "string"),
        "ttl": optional(words("For how long; absent: five minutes.", CACHE_TIMES)),
    }
    return request_object("Where a prefix ends that is to be cached; it changes nothing.", fields, ["type"])


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def turn() -> Json:
    """A turn; which blocks it has depends on whose it is."""
    blocks = either("A block.", ref("MessageTextBlock"), ref("MessageToolResult"), ref("MessageToolUse"))
    fields = {
        "role": words("Whose turn it is.", ROLES),
        "content": either("What is said; a user's results of tools come before text.", text("Plain text."),
                          listed("In blocks.", blocks)),
    }  # fmt: skip
    whose = [
        {"properties": {"role": {"const": role}, "content": {"items": {"properties": {"type": {"enum": list(kinds)}}}}}}
        for role, kinds in BLOCKS.items()
    ]
    return {**request_object("One turn of the conversation.", fields, list(fields)), "anyOf": whose}


def _text_blocks() -> Json:
    return listed("Blocks of text, which are joined.", ref("MessageTextBlock"))


def text_block() -> Json:
    """A block of text."""
    fields = {
        "type": only("The kind of the block.", "text", "string"),
        "text": text("Its text."),
        "cache_control": _cache_control(),
    }
    return request_object("A block of text.", fields, ["type", "text"])


def tool_result() -> Json:
    """What a tool returned."""
    fields = {
        "type": only("The kind of the block.", "tool_result", "string"),
        "tool_use_id": text("The id of the call.", shortest=1, longest=CALL_ID_CHARS_MAX),
        "content": optional(either("What it returned; absent: nothing.", text("Plain text."), _text_blocks())),
        "is_error": optional(flag("Whether it failed."), default=False),
        "cache_control": _cache_control(),
    }
    return request_object("What a tool returned, in a user's turn.", fields, ["type", "tool_use_id"])


def tool_use() -> Json:
    """A call that the model made before."""
    fields = {
        "type": only("The kind of the block.", "tool_use", "string"),
        "id": text("The call's id.", shortest=1, longest=CALL_ID_CHARS_MAX),
        "name": name_field("The tool's name."),
        "input": {"type": "object", "description": "Its arguments."},
        "cache_control": _cache_control(),
    }
    described = "A call that the model made before, in an assistant's turn; up to 128 in one."
    return request_object(described, fields, ["type", "id", "name", "input"])


# ── demands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tool() -> Json:
    """A function that may be called."""
    fields = {
        "type": optional(only("The kind; only custom.", "custom", "string"), "custom"),
        "name": name_field("Its name."),
        "description": description_field(),
        "input_schema": json_schema_field("A JSON schema of its arguments."),
        "strict": strict_field(),
        "cache_control": _cache_control(),
    }
    return request_object("A function of yours, which you run.", fields, ["name", "input_schema"])


def tool_choice() -> Json:
    """Whether a tool is called."""
    fields = {
        "type": words("Any of them or none, at least one, this one, or none.", ("auto", "any", "tool", "none")),
        "name": optional(name_field("Which one, of type tool alone.")),
        "disable_parallel_tool_use": optional(flag("Whether at most one is called, except with type none.")),
    }
    named: Json = {"required": ["name"], "properties": {"type": {"const": "tool"}, "name": {"type": "string"}}}
    free: Json = {"properties": {"type": {"enum": ["auto", "any"]}, "name": NULL}}
    none: Json = {"properties": {"type": {"const": "none"}, "name": NULL, "disable_parallel_tool_use": NULL}}
    return {**request_object("Whether to call a tool.", fields, ["type"]), "anyOf": [free, named, none]}


def output_config() -> Json:
    """The form of the output."""
    form = optional(either("What the output follows; absent: nothing.", ref("MessageForm")))
    return request_object("What form the output has.", {"format": form})


def form() -> Json:
    """A JSON schema of the output."""
    fields = {
        "type": only("The kind of form.", "json_schema", "string"),
        "schema": json_schema_field("The JSON schema, which the engine enforces as it decodes."),
    }
    return request_object("A schema that the output follows.", fields, list(fields))


def thinking() -> Json:
    """No thinking."""
    return request_object("Only that there is none.", {"type": only("Only disabled.", "disabled", "string")}, ["type"])


def metadata() -> Json:
    """A label."""
    return request_object("Labels without effect.", {"user_id": label("A label for your user, without effect.")})
