"""A response's body into a request: every field that OpenAI has is served, or refused by name."""

from collections.abc import Mapping
from typing import Any

import msgspec

from weir import errors
from weir.api.compatible_fields import LABELS, check_labels, deadline_of, key_of, model_of, session_of
from weir.api.functions import (
    FUNCTION_FIELDS,
    SCHEMA_FIELDS,
    checked_choice,
    checked_tools,
    mode_of,
    name_of,
    refuse_without_tools,
    schema_of,
    tool_of,
    tools_list,
)
from weir.api.generations import OUTPUT_TOKENS_MAX
from weir.api.openai.chat_request import refuse_obfuscation
from weir.api.openai.response_input import prompt_of
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import (
    NO_DEMANDS,
    TOP_LOGPROBS_MAX,
    Demands,
    FormKind,
    OutputForm,
    Tool,
    ToolChoice,
    ToolMode,
)
from weir.core.request import InferenceRequest, Sampling

LOGPROBS = "message.output_text.logprobs"
_DEMANDING = ("tools", "tool_choice", "parallel_tool_calls", "text", "include", "top_logprobs")
_KEEPING = ("store", "background")
_CHOICE_ACCEPTED = 'none, auto, required, or {"type": "function", "name": …}'
_FORM_ACCEPTED = "an object of type text, json_object or json_schema"

TOOL_FIELDS = ("type", *FUNCTION_FIELDS)
CHOICE_FIELDS = ("type", "name")
TEXT_FIELDS = ("format",)
FORM_FIELDS = ("type", *SCHEMA_FIELDS)
STREAM_OPTIONS = ("include_obfuscation",)
SERVICE_TIERS = ("auto", "default")
FIELDS = (
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    *_DEMANDING,
    *LABELS,
    "service_tier",
    "truncation",
    *_KEEPING,
)


class ResponseOptions(msgspec.Struct, frozen=True):
    """What only this surface needs: what the answer repeats of the request beside the request itself.

    store: the stream is kept. background: it is, and goes on to its end without a reader.
    """

    instructions: str | None = None
    labels: dict[str, Any] = {}
    store: bool = False
    background: bool = False

    @property
    def kept_by(self) -> str | None:
        """The field that asks for the stream to be kept; None where none does."""
        return "background" if self.background else "store" if self.store else None


def parse_response(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[InferenceRequest, ResponseOptions]:
    """A response's body and Weir's headers. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = model_of(fields)
    background, store = _keeping(fields)
    _check_fixed(fields, "service_tier", SERVICE_TIERS)
    _check_fixed(fields, "truncation", ("disabled",))
    check_labels(fields)
    stream = fields.boolean("stream", default=False)
    _check_stream_options(fields, stream)
    instructions = checked_text(fields.raw("instructions"), "instructions") if fields.has("instructions") else None
    request = InferenceRequest(
        model_alias=model,
        prompt=prompt_of(fields.raw("input"), instructions),
        max_output_tokens=fields.integer("max_output_tokens", 1, OUTPUT_TOKENS_MAX),
        deadline_ms=deadline_of(headers),
        stream=stream,
        sampling=Sampling(temperature=fields.number("temperature", 0, 2), top_p=fields.number("top_p", 0, 1)),
        session=session_of(headers),
        request_id=key_of(headers),
        demands=_demands(fields),
    )
    labels = {name: fields.raw(name) for name in LABELS if fields.has(name)}
    return request, ResponseOptions(instructions, labels, store, background)


def _keeping(fields: Fields) -> tuple[bool, bool]:
    """Whether it runs in the background, and whether its stream is kept. What runs there can only be read later."""
    background = fields.boolean("background", default=False)
    store = fields.boolean("store", default=background)
    if background and not store:
        raise errors.ConflictingFields(
            "What runs in the background is read from what is stored.",
            members={"field": "store", "accepted": "true with background: true"},
        )
    return background, store


def _check_fixed(fields: Fields, name: str, accepted: tuple[str, ...]) -> None:
    """A field of which only what happens anyway is accepted."""
    if fields.has(name) and fields.raw(name) not in accepted:
        shown = " or ".join(accepted)
        raise errors.UnsupportedField(f"'{name}' can only be {shown}.", members={"field": name, "accepted": shown})


def _check_stream_options(fields: Fields, stream: bool) -> None:
    options = fields.raw("stream_options")
    if options is None:
        return
    if not isinstance(options, dict):
        refuse_field("stream_options", "an object")
    if not stream:
        raise errors.ConflictingFields(
            "stream_options is for streams.", members={"field": "stream_options", "accepted": "only with stream: true"}
        )
    nested = Fields(options, "stream_options.")
    nested.refuse_unknown(STREAM_OPTIONS)
    refuse_obfuscation(nested, "stream_options.include_obfuscation")


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
        form=_form(fields.raw("text")),
        top_logprobs=_top_logprobs(fields),
    )


def _top_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    included = fields.raw("include")
    if included is not None and not isinstance(included, list):
        refuse_field("include", f'["{LOGPROBS}"]')
    for name in included or ():
        if name != LOGPROBS:
            raise errors.UnsupportedField("Nothing else can be included.", members={"field": "include", "accepted": [LOGPROBS]})
    if included:
        return top or 0
    if top is not None:
        raise errors.ConflictingFields(
            f"top_logprobs needs {LOGPROBS} in include.",
            members={"field": "top_logprobs", "accepted": f'only with include: ["{LOGPROBS}"]'},
        )
    return None


def _tool(item: Any, where: str) -> Tool:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        refuse_field(where, "an object of type function")
    if kind != "function":
        raise errors.UnsupportedField(
            "Only functions, which you run yourself, are served as tools.",
            members={"field": f"{where}.type", "accepted": "function"},
        )
    Fields(item, f"{where}.").refuse_unknown(TOOL_FIELDS)
    return tool_of(item, where)


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        return mode_of(value, _CHOICE_ACCEPTED)
    if not isinstance(value, dict) or value.get("type") != "function":
        refuse_field("tool_choice", _CHOICE_ACCEPTED)
    Fields(value, "tool_choice.").refuse_unknown(CHOICE_FIELDS)
    return ToolChoice(ToolMode.NAMED, name_of(value.get("name"), "tool_choice.name"))


def _form(text: Any) -> OutputForm | None:
    if text is None:
        return None
    if not isinstance(text, dict):
        refuse_field("text", "an object with format")
    Fields(text, "text.").refuse_unknown(TEXT_FIELDS)
    value = text.get("format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", *FormKind):
        refuse_field("text.format", _FORM_ACCEPTED)
    fields = Fields(value, "text.format.")
    if kind == FormKind.JSON_SCHEMA:
        fields.refuse_unknown(FORM_FIELDS)
        return schema_of(value, "text.format")
    fields.refuse_unknown(("type",))
    return OutputForm(FormKind.JSON_OBJECT) if kind == FormKind.JSON_OBJECT else None
