"""A request's conversation and demands as the fields of OpenAI's API that engines read."""

from typing import Any

import msgspec

from weir.core.demands import NO_DEMANDS, Demands, FormKind, OutputForm, Tool, ToolChoice, ToolMode
from weir.core.request import Message


def messages_of(prompt: str | tuple[Message, ...]) -> list[dict[str, Any]]:
    """A prompt as OpenAI's messages; one string is one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [_message(turn) for turn in prompt]


def _message(turn: Message) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def demanded(demands: Demands, *, chat: bool) -> dict[str, Any]:
    """What is asked for beyond one text; nothing that was not asked for is sent."""
    if demands is NO_DEMANDS:
        return {}
    fields: dict[str, Any] = tool_fields(demands)
    if demands.form is not None:
        fields["response_format"] = _form(demands.form)
    if demands.choices > 1:
        fields["n"] = demands.choices
    if demands.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": demands.top_logprobs} if chat else {"logprobs": demands.top_logprobs}
    return fields


def tool_fields(demands: Demands) -> dict[str, Any]:
    """Tools and how they are to be used: what a count of the input needs too."""
    fields: dict[str, Any] = {}
    if demands.tools:
        fields["tools"] = [_tool(tool) for tool in demands.tools]
    if demands.tool_choice is not None:
        fields["tool_choice"] = _choice(demands.tool_choice)
    if demands.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = demands.parallel_tool_calls
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    parameters = msgspec.Raw(tool.parameters.encode()) if tool.parameters is not None else None
    function = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: ToolChoice) -> Any:
    if choice.mode is ToolMode.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode.value


def _form(form: OutputForm) -> dict[str, Any]:
    if form.kind is FormKind.JSON_OBJECT:
        return {"type": form.kind.value}
    assert form.schema is not None
    schema = {
        "name": form.name,
        "description": form.description,
        "schema": msgspec.Raw(form.schema.encode()),
        "strict": form.strict,
    }
    return {"type": form.kind.value, "json_schema": {name: value for name, value in schema.items() if value is not None}}
