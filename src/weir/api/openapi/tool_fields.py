"""Fields of tools and of forms of the output, which several surfaces have."""

from weir.api.functions import DESCRIPTION_CHARS_MAX, NAME_PATTERN
from weir.api.openapi.json_schema import Json, flag, optional, text, words
from weir.core.demands import ToolMode

ANY_TOOL: Json = {"tools": {"type": "array", "minItems": 1}}
"""A body that has tools."""


def mode_field() -> Json:
    """OpenAI's words for whether a tool is called."""
    return words("In a word.", [mode.value for mode in ToolMode if mode is not ToolMode.NAMED])


def name_field(description: str) -> Json:
    """The name of a function or of a schema."""
    return text(description, pattern=f"^{NAME_PATTERN}$")


def description_field() -> Json:
    """What a model is told of a function or of a schema."""
    return optional(text("For the model; absent: none.", longest=DESCRIPTION_CHARS_MAX))


def json_schema_field(description: str) -> Json:
    """A JSON schema, which is passed on."""
    return {"type": "object", "description": description}


def strict_field() -> Json:
    """Whether a schema is enforced."""
    return optional(flag("Whether the engine holds the output to it strictly; absent: as the engine does."))
