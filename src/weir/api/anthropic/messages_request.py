"""A body of Anthropic's Messages API into a request: every field that Anthropic has is served, or refused by name."""

from collections.abc import Mapping
from typing import Any

from weir import errors
from weir.api.anthropic.content_blocks import conversation_of, refuse_cache_control
from weir.api.compatible_fields import LABEL_CHARS_MAX, deadline_of, key_of, model_of, session_of
from weir.api.functions import checked_choice, checked_tools, description_of, json_text, name_of, tools_list
from weir.api.generations import OUTPUT_TOKENS_MAX
from weir.api.wire import Fields, refuse_field
from weir.core.demands import NO_DEMANDS, Demands, FormKind, OutputForm, Tool, ToolChoice, ToolMode
from weir.core.request import InferenceRequest, Sampling

INPUT_FIELDS = ("model", "messages", "system", "tools", "tool_choice", "output_config", "thinking", "cache_control")
"""What counts as input, and so what a count takes."""
FIELDS = (
    *INPUT_FIELDS,
    "max_tokens",
    "stream",
    "stop_sequences",
    "temperature",
    "top_p",
    "top_k",
    "metadata",
    "service_tier",
)
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control")
CHOICE_FIELDS = ("type", "name", "disable_parallel_tool_use")
CONFIG_FIELDS = ("format",)
FORM_FIELDS = ("type", "schema")
THINKING_FIELDS = ("type",)
METADATA_FIELDS = ("user_id",)
SERVICE_TIERS = ("auto", "standard_only")
STOPS_MAX, STOP_CHARS_MAX, TOP_K_MAX = 4, 1_000, 2**31 - 1
_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
_DEMANDING = ("tools", "tool_choice", "output_config")
_FORM_NAME = "output"
"""Engines want a schema to have a name, and Anthropic's has none."""


def parse_message(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> InferenceRequest:
    """A message's body and Weir's headers. Raises InvalidRequest, UnsupportedField or ConflictingFields."""
    fields = Fields(document)
    fields.refuse_unknown(FIELDS)
    model = model_of(fields)
    most = fields.integer("max_tokens", 1, OUTPUT_TOKENS_MAX)
    if most is None:
        refuse_field("max_tokens", f"a whole number from 1 to {OUTPUT_TOKENS_MAX}")
    _check_labels(fields)
    _check_thinking(fields.raw("thinking"))
    return InferenceRequest(
        model_alias=model,
        prompt=conversation_of(fields.raw("system"), fields.raw("messages")),
        max_output_tokens=most,
        deadline_ms=deadline_of(headers),
        stream=fields.boolean("stream", default=False),
        sampling=_sampling(fields),
        session=session_of(headers),
        request_id=key_of(headers),
        demands=_demands(fields),
    )


def parse_count(document: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> InferenceRequest:
    """The body of a question about a message's input tokens. Raises as `parse_message`."""
    fields = Fields(document)
    fields.refuse_unknown(INPUT_FIELDS)
    model = model_of(fields)
    refuse_cache_control(fields)
    _check_thinking(fields.raw("thinking"))
    return InferenceRequest(
        model_alias=model,
        prompt=conversation_of(fields.raw("system"), fields.raw("messages")),
        session=session_of(headers),
        demands=_demands(fields),
    )


def _sampling(fields: Fields) -> Sampling:
    stops = fields.raw("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        refuse_field("stop_sequences", f"up to {STOPS_MAX} strings of 1 to {STOP_CHARS_MAX} characters")
    return Sampling(
        temperature=fields.number("temperature", 0, 1),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", 0, TOP_K_MAX),
        stop=fields.strings("stop_sequences", most=STOPS_MAX, longest=STOP_CHARS_MAX),
    )


# ── fields that change nothing ───────────────────────────────────────────────────────────────────────────────────────


def _check_labels(fields: Fields) -> None:
    """Raises InvalidRequest or UnsupportedField for a label that Anthropic would refuse too."""
    refuse_cache_control(fields)
    if fields.raw("service_tier") not in (None, *SERVICE_TIERS):
        refuse_field("service_tier", " or ".join(SERVICE_TIERS))
    metadata = fields.raw("metadata")
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        refuse_field("metadata", "an object with user_id")
    nested = Fields(metadata, "metadata.")
    nested.refuse_unknown(METADATA_FIELDS)
    nested.string("user_id", longest=LABEL_CHARS_MAX)


def _check_thinking(value: Any) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        refuse_field("thinking", "an object of type disabled")
    if kind != "disabled":
        raise errors.UnsupportedField(
            "Thinking cannot be asked for.", members={"field": "thinking.type", "accepted": "disabled"}
        )
    Fields(value, "thinking.").refuse_unknown(THINKING_FIELDS)


# ── demands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _demands(fields: Fields) -> Demands:
    if not any(fields.has(name) for name in _DEMANDING):
        return NO_DEMANDS
    tools = checked_tools([_tool(item, f"tools[{index}]") for index, item in enumerate(tools_list(fields.raw("tools")))])
    choice, parallel = _tool_choice(fields.raw("tool_choice"))
    return Demands(
        tools=tools,
        tool_choice=checked_choice(choice, tools),
        parallel_tool_calls=parallel,
        form=_form(fields.raw("output_config")),
    )


def _tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict):
        refuse_field(where, "an object with name and input_schema, and optionally description and strict")
    if item.get("type") not in (None, "custom"):
        raise errors.UnsupportedField(
            "Tools that a server runs are not supported here.",
            members={"field": f"{where}.type", "accepted": "custom, or absent"},
        )
    fields = Fields(item, f"{where}.")
    fields.refuse_unknown(TOOL_FIELDS)
    refuse_cache_control(fields, f"{where}.")
    return Tool(
        name_of(item.get("name"), f"{where}.name"),
        description_of(fields, where),
        json_text(item.get("input_schema"), f"{where}.input_schema"),
        fields.boolean("strict", default=False) if fields.has("strict") else None,
    )


def _tool_choice(value: Any) -> tuple[ToolChoice | None, bool | None]:
    """The choice, and whether several calls at once are allowed where it says so."""
    if value is None:
        return None, None
    kind = value.get("type") if isinstance(value, dict) else None
    mode = _MODES.get(kind) if isinstance(kind, str) else None
    if mode is None:
        refuse_field("tool_choice", f"an object of type {', '.join(_MODES)}")
    fields = Fields(value, "tool_choice.")
    others = {ToolMode.NAMED: (), ToolMode.NONE: ("name", "disable_parallel_tool_use")}.get(mode, ("name",))
    fields.refuse_unknown(name for name in CHOICE_FIELDS if name not in others)
    name = name_of(fields.raw("name"), "tool_choice.name") if mode is ToolMode.NAMED else None
    one_only = fields.boolean("disable_parallel_tool_use", default=False)
    return ToolChoice(mode, name), not one_only if fields.has("disable_parallel_tool_use") else None


def _form(value: Any) -> OutputForm | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse_field("output_config", "an object with format")
    Fields(value, "output_config.").refuse_unknown(CONFIG_FIELDS)
    form = value.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        refuse_field("output_config.format", "an object of type json_schema, with schema")
    Fields(form, "output_config.format.").refuse_unknown(FORM_FIELDS)
    schema = json_text(form.get("schema"), "output_config.format.schema")
    return OutputForm(FormKind.JSON_SCHEMA, _FORM_NAME, schema, strict=True)
