"""What a caller demands of an engine beyond one text: tools, a form of the output, several choices, log probabilities, vectors.

Schemas stay JSON text: the platform passes them on and reads nothing in them. What an engine cannot do is refused by name
(`core/registry/abilities.py`), never dropped silently.
"""

from dataclasses import dataclass
from enum import StrEnum

CHOICES_MAX = 16
TOP_LOGPROBS_MAX = 20
LOGPROBS_MAX = 50_000
"""Of one answer, alternatives included: they are kept and encoded at once, a tenth of a second of everybody's time."""
TEXTS_MAX = 256
DIMENSIONS_MAX = 8_192
"""Of a vector; what models make today has at most half as many."""


class ToolMode(StrEnum):
    """Whether the model may, must not or must call a tool; NAMED: this one."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class FormKind(StrEnum):
    """What the output must be."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. parameters: its JSON schema as JSON text; None takes none."""

    name: str
    description: str | None = None
    parameters: str | None = None
    strict: bool | None = None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes that it adds to the input, without what a template writes around it."""
        return sum(len(text.encode()) for text in (self.name, self.description, self.parameters) if text)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """name: of the tool that must be called, with NAMED only."""

    mode: ToolMode
    name: str | None = None


@dataclass(frozen=True, slots=True)
class OutputForm:
    """A form that the engine enforces as it decodes. schema: JSON text, with JSON_SCHEMA only."""

    kind: FormKind
    name: str = ""
    schema: str | None = None
    strict: bool | None = None
    description: str | None = None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of its texts."""
        return sum(len(text.encode()) for text in (self.name, self.schema, self.description) if text)


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector for each text, 1 … TEXTS_MAX of them. dimensions: of each vector; None: as many as the model makes."""

    texts: tuple[str, ...]
    dimensions: int | None = None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(len(text.encode()) for text in self.texts)


@dataclass(frozen=True, slots=True)
class Demands:
    """choices ≥ 1. top_logprobs: alternatives to each token that are reported with it; None: no log probabilities at all.

    embedding: vectors instead of text, and then nothing else.
    """

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    form: OutputForm | None = None
    choices: int = 1
    top_logprobs: int | None = None
    embedding: Embedding | None = None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes that engines may put into the prompt for them, or that are to be embedded."""
        if self.embedding is not None:
            return self.embedding.bytes
        return sum(tool.bytes for tool in self.tools) + (self.form.bytes if self.form is not None else 0)


NO_DEMANDS = Demands()
