"""The bodies that the simulated engine's HTTP face takes, as vLLM reads them, and what each one asks of the engine."""

from typing import Annotated, Any, Literal

import msgspec

from weir.core.demands import (
    CHOICES_MAX,
    NO_DEMANDS,
    TOP_LOGPROBS_MAX,
    Demands,
    FormKind,
    OutputForm,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from weir.core.request import Message
from weir.engines.simulated_shapes import Refusal, StreamOptions

SALT_LENGTH_MAX = 128
SALT_FORBIDDEN = frozenset("@/\\\0")
_Top = Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)]


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str = ""


class _Turn(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        return Message(self.role, self.content or "", calls, self.tool_call_id, self.name)


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function

    def tool(self) -> Tool:
        function = self.function
        parameters = msgspec.json.encode(function.parameters).decode() if function.parameters is not None else None
        return Tool(function.name, function.description, parameters)


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    function: _NamedFunction


class _Schema(msgspec.Struct):
    schema: dict[str, Any]
    name: str = ""


class _Form(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class Body(msgspec.Struct):
    """The fields that matter here, of all POST endpoints; others are ignored, as vLLM does."""

    model: str | None = None
    prompt: str | None = None
    messages: list[_Turn] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] | None = None
    cache_salt: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Form | None = None
    logprobs: bool | _Top | None = None
    top_logprobs: _Top | None = None

    def text(self) -> str | tuple[Message, ...]:
        """Prompt or conversation. Raises Refusal when there is none."""
        if self.messages:
            return tuple(turn.message() for turn in self.messages)
        if self.prompt is None:
            raise Refusal(400, "BadRequestError", "a prompt or messages are required")
        return self.prompt

    def salt(self) -> str | None:
        """The cache salt; none where it is absent. Raises Refusal for those that vLLM refuses."""
        salt = self.cache_salt
        if salt is not None and (not 0 < len(salt) <= SALT_LENGTH_MAX or SALT_FORBIDDEN.intersection(salt)):
            message = f"cache_salt must be 1 to {SALT_LENGTH_MAX} characters without @, /, \\ and NUL"
            raise Refusal(400, "BadRequestError", message, "cache_salt")
        return salt

    def demands(self) -> Demands:
        """What is asked for beyond one text. Raises Refusal for what makes no sense together."""
        tools = tuple(item.tool() for item in self.tools or ())
        demands = Demands(tools, self._choice(tools), self.parallel_tool_calls, self._form(), self.n or 1, self._top_logprobs())
        return NO_DEMANDS if demands == NO_DEMANDS else demands

    def _choice(self, tools: tuple[Tool, ...]) -> ToolChoice | None:
        match self.tool_choice:
            case None:
                return None
            case _NamedTool(function):
                if all(tool.name != function.name for tool in tools):
                    raise Refusal(400, "BadRequestError", "tool_choice names none of the tools", "tool_choice")
                return ToolChoice(ToolMode.NAMED, function.name)
            case mode:
                if mode != "none" and not tools:
                    raise Refusal(400, "BadRequestError", "tool_choice needs tools", "tool_choice")
                return ToolChoice(ToolMode(mode))

    def _form(self) -> OutputForm | None:
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return OutputForm(FormKind.JSON_OBJECT)
        if form.json_schema is None:
            raise Refusal(400, "BadRequestError", "json_schema is required", "response_format")
        return OutputForm(FormKind.JSON_SCHEMA, form.json_schema.name, msgspec.json.encode(form.json_schema.schema).decode())

    def _top_logprobs(self) -> int | None:
        if type(self.logprobs) is int:
            return self.logprobs
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise Refusal(400, "BadRequestError", "top_logprobs needs logprobs", "top_logprobs")
        return None
