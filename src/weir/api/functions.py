"""Tools, tool choice and output forms, as OpenAI's surfaces write them, into what is demanded of an engine.

Chat nests a function's fields under `function` and a schema's under `json_schema`; responses writes both flat. A reader here
takes the object that has the fields.
"""

import re
from typing import Any

import msgspec

from weir import errors
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.demands import FormKind, OutputForm, Tool, ToolCall, ToolChoice, ToolMode

TOOLS_MAX = 128
CALLS_MAX = 128
DESCRIPTION_CHARS_MAX = 16_384
CALL_ID_CHARS_MAX = 128
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
NAME_PATTERN = "[A-Za-z0-9_-]{1,64}"
_NAME = re.compile(NAME_PATTERN)
_NAME_ACCEPTED = "1 to 64 characters of A-Z a-z 0-9 _ -"


def json_text(value: Any, where: str) -> str:
    """An object as JSON text. Raises InvalidRequest."""
    if not isinstance(value, dict):
        refuse_field(where, "a JSON schema, which is an object")
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        refuse_field(where, "text that is valid Unicode")
    except RecursionError:  # what could just be read may be too deep to be written again
        refuse_field(where, "a JSON schema that is not nested too deeply")


def name_of(value: Any, where: str) -> str:
    """A function's or a schema's name. Raises InvalidRequest."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        refuse_field(where, _NAME_ACCEPTED)
    return value


def tool_of(function: Any, where: str) -> Tool:
    """A tool from the object that has the function's fields. Raises InvalidRequest or UnsupportedField."""
    if not isinstance(function, dict):
        refuse_field(where, "an object with name, and optionally description, parameters and strict")
    fields = Fields(function, f"{where}.")
    parameters = fields.raw("parameters")
    return Tool(
        name_of(function.get("name"), f"{where}.name"),
        description_of(fields, where),
        json_text(parameters, f"{where}.parameters") if parameters is not None else None,
        fields.boolean("strict", default=False) if fields.has("strict") else None,
    )


def description_of(fields: Fields, where: str) -> str | None:
    """A description, which may be empty. Raises InvalidRequest."""
    value = fields.raw("description")
    if value is None or value == "":
        return None
    text = checked_text(value, f"{where}.description")
    if len(text) > DESCRIPTION_CHARS_MAX:
        refuse_field(f"{where}.description", f"up to {DESCRIPTION_CHARS_MAX} characters")
    return text


def checked_tools(tools: list[Tool]) -> tuple[Tool, ...]:
    """The same, each name once. Raises InvalidRequest."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            refuse_field(f"tools[{index}].name", "a name that no tool before it has")
    return tuple(tools)


def tools_list(value: Any) -> list[Any]:
    """The items of `tools`; none where it is absent. Raises InvalidRequest."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > TOOLS_MAX:
        refuse_field("tools", f"a list of up to {TOOLS_MAX} functions")
    return value


def checked_choice(choice: ToolChoice | None, tools: tuple[Tool, ...]) -> ToolChoice | None:
    """The same, if these tools allow it. Raises InvalidRequest or ConflictingFields."""
    if choice is None or (choice.mode is ToolMode.NONE and not tools):
        return None
    if choice.mode is ToolMode.AUTO and tools:
        return None  # the default, which is the same request
    if not tools:
        refuse_without_tools("tool_choice")
    if choice.mode is ToolMode.NAMED and all(tool.name != choice.name for tool in tools):
        refuse_field("tool_choice", "the name of one of the tools")
    return choice


def refuse_without_tools(field: str) -> None:
    """Raises ConflictingFields."""
    raise errors.ConflictingFields(
        f"'{field}' needs tools.", members={"field": field, "accepted": "only with at least one tool"}
    )


def mode_of(value: str, accepted: str) -> ToolChoice:
    """auto, none or required. Raises InvalidRequest."""
    if value not in (ToolMode.AUTO, ToolMode.NONE, ToolMode.REQUIRED):
        refuse_field("tool_choice", accepted)
    return ToolChoice(ToolMode(value))


def schema_of(value: Any, where: str) -> OutputForm:
    """A JSON schema as the output's form, from the object that has its fields. Raises InvalidRequest or UnsupportedField."""
    if not isinstance(value, dict):
        refuse_field(where, "an object with name and schema, and optionally description and strict")
    fields = Fields(value, f"{where}.")
    return OutputForm(
        FormKind.JSON_SCHEMA,
        name_of(value.get("name"), f"{where}.name"),
        json_text(value.get("schema"), f"{where}.schema"),
        fields.boolean("strict", default=False) if fields.has("strict") else None,
        description_of(fields, where),
    )


def call_of(call_id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """A call that the model made before, told again. Raises InvalidRequest."""
    return ToolCall(
        call_id_of(call_id, f"{where}.id"), name_of(name, f"{where}.name"), checked_text(arguments, f"{where}.arguments")
    )


def call_id_of(value: Any, where: str) -> str:
    """The id of a call. Raises InvalidRequest."""
    accepted = f"the id of a call, 1 to {CALL_ID_CHARS_MAX} characters"
    text = checked_text(value, where, accepted)
    if not 1 <= len(text) <= CALL_ID_CHARS_MAX:
        refuse_field(where, accepted)
    return text
