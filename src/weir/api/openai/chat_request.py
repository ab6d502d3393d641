"""A chat completion's body into a request: every field that OpenAI has is served, or refused by name."""

from collections.abc import Mapping
from typing import Any

from weir import errors
from weir.api.compatible_fields import LABEL_CHARS_MAX, LABELS, check_labels, deadline_of, key_of, model_of, session_of
from weir.api.functions import (
    CALLS_MAX,
    FUNCTION_FIELDS,
    SCHEMA_FIELDS,
    call_id_of,
    call_of,
    checked_choice,
    checked_tools,
    mode_of,
    name_of,
    refuse_without_tools,
    schema_of,
    tool_of,
    tools_list,
)
from weir.api.generations import MESSAGES_MAX, OUTPUT_TOKENS_MAX, SAMPLING_FIELDS, messages_of, sampling_of
from weir.api.openai.chunked import ChunkOptions
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import (
    CHOICES_MAX,
    NO_DEMANDS,
    TOP_LOGPROBS_MAX,
    Demands,
    FormKind,
    OutputForm,
    Tool,
    ToolChoice,
    ToolMode,
)
from weir.core.request import InferenceRequest, Message

ROLE = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_DEMANDING = ("n", "tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs")
_CHOICE_ACCEPTED = 'none, auto, required, or {"type": "function", "function": {"name": …}}'

FIELDS = (
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    *SAMPLING_FIELDS,
    *_DEMANDING,
    *LABELS,
    "store",
)
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
TEXT_PART_FIELDS = ("type", "text")
CALL_FIELDS = ("id", "type", "function")
CALLED_FIELDS = ("name", "arguments")
TOOL_FIELDS = ("type", "function")
FORM_FIELDS = ("type", "json_schema")
STREAM_OPTIONS = ("include_usage", "include_obfuscation")


def parse_chat(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[InferenceRequest, ChunkOptions]:
    """A chat completion's body and Weir's headers. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = model_of(fields)
    refuse_storing(fields)
    check_labels(fields)
    stream = fields.boolean("stream", default=False)
    demands = _demands(fields)
    request = InferenceRequest(
        model_alias=model,
        prompt=messages_of(fields.raw("messages"), "messages", f"a list of 1 to {MESSAGES_MAX} messages", _message),
        max_output_tokens=_max_tokens(fields),
        deadline_ms=deadline_of(headers),
        stream=stream,
        sampling=sampling_of(fields, stop_field="stop"),
        session=session_of(headers),
        request_id=key_of(headers),
        demands=demands,
    )
    options = ChunkOptions(
        include_usage(fields, stream), _bound_name(fields), demands.choices, demands.top_logprobs is not None
    )
    return request, options


def refuse_storing(fields: Fields) -> None:
    """Raises UnsupportedField where the answer is to be kept."""
    if fields.boolean("store", default=False):
        raise errors.UnsupportedField("Answers are not stored.", members={"field": "store", "accepted": "false"})


def _max_tokens(fields: Fields) -> int | None:
    if fields.has("max_tokens") and fields.has("max_completion_tokens"):
        raise errors.ConflictingFields(
            "Give max_completion_tokens or max_tokens, not both.",
            members={"field": "max_tokens", "accepted": "one of max_tokens and max_completion_tokens"},
        )
    return fields.integer(_bound_name(fields), 1, OUTPUT_TOKENS_MAX)


def _bound_name(fields: Fields) -> str:
    """What this request calls the bound of its output."""
    return "max_tokens" if fields.has("max_tokens") else "max_completion_tokens"


def include_usage(fields: Fields, stream: bool) -> bool:
    """Whether a stream ends with its usage. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        refuse_field("stream_options", "an object")
    if not stream:
        raise errors.ConflictingFields(
            "stream_options is for streams.", members={"field": "stream_options", "accepted": "only with stream: true"}
        )
    nested = Fields(options, "stream_options.")
    nested.refuse_unknown(STREAM_OPTIONS)
    refuse_obfuscation(nested, "stream_options.include_obfuscation")
    return nested.boolean("include_usage", default=False)


def refuse_obfuscation(options: Fields, where: str) -> None:
    """Raises UnsupportedField where events are to be padded."""
    if options.boolean("include_obfuscation", default=False):
        raise errors.UnsupportedField("Streams are not obfuscated.", members={"field": where, "accepted": "false"})


# ── demands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _demands(fields: Fields) -> Demands:
    if not any(fields.has(name) for name in _DEMANDING):
        return NO_DEMANDS
    tools = checked_tools([_tool(item, f"tools[{index}]") for index, item in enumerate(tools_list(fields.raw("tools")))])
    choice = checked_choice(_tool_choice(fields.raw("tool_choice")), tools)
    if fields.has("parallel_tool_calls") and not tools:
        refuse_without_tools("parallel_tool_calls")
    return Demands(
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.boolean("parallel_tool_calls", default=True) if fields.has("parallel_tool_calls") else None,
        form=_form(fields.raw("response_format")),
        choices=fields.integer("n", 1, CHOICES_MAX) or 1,
        top_logprobs=_top_logprobs(fields),
    )


def _top_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    if fields.boolean("logprobs", default=False):
        return top or 0
    if top is not None:
        raise errors.ConflictingFields(
            "top_logprobs needs logprobs.", members={"field": "top_logprobs", "accepted": "only with logprobs: true"}
        )
    return None


def _tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict) or item.get("type") != "function":
        refuse_field(where, "an object of type function")
    Fields(item, f"{where}.").refuse_unknown(TOOL_FIELDS)
    function = item.get("function")
    if isinstance(function, dict):
        Fields(function, f"{where}.function.").refuse_unknown(FUNCTION_FIELDS)
    return tool_of(function, f"{where}.function")


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        return mode_of(value, _CHOICE_ACCEPTED)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        refuse_field("tool_choice", _CHOICE_ACCEPTED)
    Fields(value, "tool_choice.").refuse_unknown(TOOL_FIELDS)
    Fields(function, "tool_choice.function.").refuse_unknown(("name",))
    return ToolChoice(ToolMode.NAMED, name_of(function.get("name"), "tool_choice.function.name"))


def _form(value: Any) -> OutputForm | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", *FormKind):
        refuse_field("response_format", "an object of type text, json_object or json_schema")
    if kind != FormKind.JSON_SCHEMA:
        Fields(value, "response_format.").refuse_unknown(("type",))
        return OutputForm(FormKind.JSON_OBJECT) if kind == FormKind.JSON_OBJECT else None
    Fields(value, "response_format.").refuse_unknown(FORM_FIELDS)
    schema = value.get("json_schema")
    if isinstance(schema, dict):
        Fields(schema, "response_format.json_schema.").refuse_unknown(SCHEMA_FIELDS)
    return schema_of(schema, "response_format.json_schema")


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        refuse_field(where, "an object with role and content")
    fields = Fields(item, f"{where}.")
    fields.refuse_unknown(MESSAGE_FIELDS)
    given = item.get("role")
    role = ROLE.get(given) if isinstance(given, str) else None
    if role is None:
        refuse_field(f"{where}.role", ", ".join(ROLE))
    if fields.has("reasoning_content"):  # it comes back with its turn; models are not told again what they thought
        checked_text(item["reasoning_content"], f"{where}.reasoning_content")
    if fields.has("refusal"):
        raise errors.UnsupportedField("Refusals are not told again.", members={"field": f"{where}.refusal", "accepted": "null"})
    calls = _calls(fields, role, where)
    content = item.get("content")
    return Message(
        role,
        "" if content is None and calls else _content(content, f"{where}.content"),
        calls,
        _answered_call(fields, role, where),
        fields.string("name", longest=LABEL_CHARS_MAX),
    )


def _calls(fields: Fields, role: str, where: str) -> tuple[Any, ...]:
    value = fields.raw("tool_calls")
    if value is None:
        return ()
    if role != "assistant" or not isinstance(value, list) or not 1 <= len(value) <= CALLS_MAX:
        refuse_field(f"{where}.tool_calls", f"a list of 1 to {CALLS_MAX} calls, of an assistant's message")
    return tuple(_call(item, f"{where}.tool_calls[{index}]") for index, item in enumerate(value))


def _call(item: Any, where: str) -> Any:
    function = item.get("function") if isinstance(item, dict) and item.get("type") == "function" else None
    if not isinstance(function, dict):
        refuse_field(where, "an object of type function, with id and function")
    Fields(item, f"{where}.").refuse_unknown(CALL_FIELDS)
    Fields(function, f"{where}.function.").refuse_unknown(CALLED_FIELDS)
    return call_of(item.get("id"), function.get("name"), function.get("arguments"), where)


def _answered_call(fields: Fields, role: str, where: str) -> str | None:
    if role == "tool":
        return call_id_of(fields.raw("tool_call_id"), f"{where}.tool_call_id")
    if fields.has("tool_call_id"):
        refuse_field(f"{where}.tool_call_id", "absent, but in a message of role tool")
    return None


def _content(value: Any, where: str) -> str:
    """A string, or text parts joined."""
    if not isinstance(value, list):
        return checked_text(value, where, "a string, or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            refuse_field(f"{where}[{index}]", "a part of type text")
        Fields(part, f"{where}[{index}].").refuse_unknown(TEXT_PART_FIELDS)
        texts.append(checked_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)
