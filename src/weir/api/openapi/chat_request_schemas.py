"""The body of a chat completion: messages, tools, and forms of the output, object by object as the parser reads them."""

from weir.api.compatible_fields import LABEL_CHARS_MAX
from weir.api.functions import CALL_ID_CHARS_MAX, CALLS_MAX, TOOLS_MAX
from weir.api.generations import MESSAGES_MAX
from weir.api.openai.chat_request import ROLE
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
from weir.api.openapi.openai_parts import BOUND, STREAMS_ONLY, choices_field, label, metadata_field, model_field, needs, present
from weir.api.openapi.tool_fields import ANY_TOOL, description_field, json_schema_field, mode_field, name_field, strict_field
from weir.core.demands import TOP_LOGPROBS_MAX, ToolMode

_FUNCTION = only("The kind; only function.", "function", "string")


def request() -> Json:
    """The body."""
    fields = {
        "model": model_field(),
        "messages": listed("The conversation.", ref("ChatMessage"), fewest=1, most=MESSAGES_MAX),
        "max_tokens": output_bound(f"The older name of max_completion_tokens; not both. {BOUND}"),
        "max_completion_tokens": output_bound(BOUND),
        "stream": streamed(),
        "stream_options": ref("OpenAIStreamOptions"),
        **sampling_fields(),
        "n": choices_field(),
        "tools": optional(listed("Functions that the model may call, each name once.", ref("ChatTool"), most=TOOLS_MAX)),
        "tool_choice": optional(either("Whether to call one; only with tools.", mode_field(), ref("ChatToolChoice"))),
        "parallel_tool_calls": optional(flag("Whether it may call several at once; only with tools.")),
        "response_format": optional(either("What form the output has; absent: text.", ref("ChatForm"))),
        "logprobs": optional(flag("Whether log probabilities are reported."), default=False),
        "top_logprobs": optional(whole("How many alternatives to each token; only with logprobs.", 0, TOP_LOGPROBS_MAX)),
        "user": label("A label for your user, without effect."),
        "safety_identifier": label("A label for your user, without effect."),
        "prompt_cache_key": label("A label, without effect."),
        "metadata": metadata_field(),
        "store": optional(only("Whether the completion is stored; only false.", False, "boolean"), False),
    }
    return {
        **request_object("A chat completion to make.", fields, ["model", "messages"]),
        "not": present("max_tokens", "max_completion_tokens"),
        "allOf": [
            STREAMS_ONLY,
            needs("parallel_tool_calls", ANY_TOOL),
            needs("top_logprobs", {"logprobs": {"const": True}}),
            {
                "if": {
                    "required": ["tool_choice"],
                    "properties": {"tool_choice": {"not": {"enum": [None, ToolMode.NONE.value]}}},
                },
                "then": {"required": ["tools"], "properties": ANY_TOOL},
            },
        ],
    }


def message() -> Json:
    """A message; which fields it has depends on whose it is."""
    parts = listed("Text in parts, which are joined.", ref("ChatTextPart"))
    calls = listed("Calls that it made, of an assistant alone.", ref("ChatToolCall"), fewest=1, most=CALLS_MAX)
    fields = {
        "role": words("Who says it; `developer` is taken as `system`.", ROLE),
        "content": optional(either("What is said; absent beside tool calls alone.", text("Plain text."), parts)),
        "name": optional(text("A name for who says it.", shortest=1, longest=LABEL_CHARS_MAX)),
        "tool_calls": optional(calls),
        "tool_call_id": optional(
            text("Which call a tool's message answers, of a tool alone.", shortest=1, longest=CALL_ID_CHARS_MAX)
        ),
        "refusal": {**NULL, "default": None, "description": "Only null: refusals are not told again."},
        "reasoning_content": optional(text("What a model told of its reasoning, told again: without effect.")),
    }
    said = {"content": {"type": ["string", "array"]}}
    plain = {"role": {"enum": [role for role in ROLE if role not in ("assistant", "tool")]}}
    spoken = {"required": ["content"], "properties": said}
    called = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array"}}}
    whose: list[Json] = [
        {"required": ["content"], "properties": {**plain, **said, "tool_calls": NULL, "tool_call_id": NULL}},
        {"properties": {"role": {"const": "assistant"}, "tool_call_id": NULL}, "anyOf": [spoken, called]},
        {
            "required": ["content", "tool_call_id"],
            "properties": {"role": {"const": "tool"}, **said, "tool_calls": NULL, "tool_call_id": {"type": "string"}},
        },
    ]
    return {**request_object("One message of the conversation.", fields, ["role"]), "anyOf": whose}


def text_part() -> Json:
    """A part of a message."""
    fields = {"type": only("The kind of the part.", "text", "string"), "text": text("The part's text.")}
    return request_object("A part of a message.", fields, list(fields))


def tool_call() -> Json:
    """A call that the model made before."""
    fields = {
        "id": text("The call's id.", shortest=1, longest=CALL_ID_CHARS_MAX),
        "type": _FUNCTION,
        "function": ref("ChatCalledFunction"),
    }
    return request_object("A call that the model made before.", fields, list(fields))


def called_function() -> Json:
    """What was called."""
    fields = {"name": name_field("The function's name."), "arguments": text("JSON text, as the model wrote it.")}
    return request_object("What was called, and with what.", fields, list(fields))


def tool() -> Json:
    """A function that may be called."""
    fields = {"type": _FUNCTION, "function": ref("ChatFunction")}
    return request_object("A tool that the model may use.", fields, list(fields))


def function() -> Json:
    """A tool's function."""
    fields = {
        "name": name_field("Its name."),
        "description": description_field(),
        "parameters": optional(json_schema_field("A JSON schema of its arguments; absent: it takes none.")),
        "strict": strict_field(),
    }
    return request_object("A function of yours, which you run.", fields, ["name"])


def tool_choice() -> Json:
    """The one tool that must be called."""
    fields = {"type": _FUNCTION, "function": ref("ChatChosenFunction")}
    return request_object("The tool that must be called.", fields, list(fields))


def chosen_function() -> Json:
    """Its name."""
    return request_object("Which one.", {"name": name_field("The name of one of the tools.")}, ["name"])


def form() -> Json:
    """The form of the output."""
    fields = {
        "type": words("The kind of form.", ("text", "json_object", "json_schema")),
        "json_schema": optional(either("The schema, of a json_schema alone.", ref("ChatFormSchema"))),
    }
    by_schema = {
        "required": ["json_schema"],
        "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object"}},
    }
    plain = {"properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": NULL}}
    return {**request_object("What form the output has.", fields, ["type"]), "anyOf": [plain, by_schema]}


def form_schema() -> Json:
    """A named JSON schema."""
    fields = {
        "name": name_field("A name for it."),
        "description": description_field(),
        "schema": json_schema_field("The JSON schema, which the engine enforces as it decodes."),
        "strict": strict_field(),
    }
    return request_object("A schema that the output follows.", fields, ["name", "schema"])
