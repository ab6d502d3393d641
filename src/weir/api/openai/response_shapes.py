"""The object that OpenAI calls a response, made of a generation's record and of what was asked for."""

from typing import Any

import msgspec

from weir.api.generations import error_of_record
from weir.api.openai.responses_request import ResponseOptions
from weir.core.demands import FormKind, OutputForm, Tool, ToolChoice, ToolMode
from weir.core.endings import FinishReason, Status
from weir.core.request import InferenceRequest
from weir.messages import GenerationRecord

ID_PREFIX = "resp_"
_STATUS = {
    Status.QUEUED: "queued",
    Status.RUNNING: "in_progress",
    Status.COMPLETED: "completed",
    Status.CANCELLED: "cancelled",
    Status.EXPIRED: "failed",
    Status.FAILED: "failed",
}
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


def response_id(request_id: str) -> str:
    """A response is named by its request, so that it is found again by it."""
    return ID_PREFIX + request_id


def status_of(record: GenerationRecord) -> str:
    """How OpenAI calls the state that a generation is in."""
    return "incomplete" if record.finish_reason in _INCOMPLETE else _STATUS[record.status]


def response_object(
    record: GenerationRecord, settings: dict[str, Any], created: int, completed: int | None, output: list[dict[str, Any]]
) -> dict[str, Any]:
    """A response in whatever state its record shows. created, completed: seconds."""
    error = error_of_record(record) if record.error_code is not None else None
    reason = _INCOMPLETE.get(record.finish_reason) if record.finish_reason is not None else None
    status = status_of(record)
    return {
        "id": response_id(record.request_id),
        "object": "response",
        "created_at": created,
        "completed_at": completed if status == "completed" else None,
        "status": status,
        "error": {"code": error.code, "message": error.detail} if error is not None else None,
        "incomplete_details": {"reason": reason} if reason is not None else None,
        "model": record.alias,
        "model_revision": record.revision,
        "output": output,
        "usage": response_usage(record) if record.finish_reason is not None else None,
        **settings,
    }


def response_usage(record: GenerationRecord) -> dict[str, Any]:
    """A response's usage, with what the tenant pays beside it. Nothing is charged for what a cache takes in."""
    return {
        "input_tokens": record.input_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_input_tokens, "cache_write_tokens": 0},
        "output_tokens": record.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.input_tokens + record.output_tokens,
        "cost_microusd": record.cost_microusd,
    }


# ── what was asked for ───────────────────────────────────────────────────────────────────────────────────────────────


UNKNOWN_SETTINGS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "temperature": None,
    "top_p": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
    "metadata": {},
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""What is shown where the request is not known any more, and of what was not asked for."""


def settings_of(request: InferenceRequest, options: ResponseOptions) -> dict[str, Any]:
    """What a response repeats of its request; null where the engine's default was left."""
    demands = request.demands
    parallel = demands.parallel_tool_calls
    return {
        **UNKNOWN_SETTINGS,
        "instructions": options.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "tools": [_tool(tool) for tool in demands.tools],
        "tool_choice": _choice(demands.tool_choice),
        "parallel_tool_calls": True if parallel is None else parallel,
        "text": {"format": _form(demands.form)},
        "top_logprobs": demands.top_logprobs or 0,
        "background": options.background,
        "store": options.store,
        **options.labels,
    }


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": msgspec.Raw(tool.parameters.encode()) if tool.parameters is not None else None,
        "strict": tool.strict,
    }


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return "auto"
    return {"type": "function", "name": choice.name} if choice.mode is ToolMode.NAMED else choice.mode.value


def _form(form: OutputForm | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    if form.kind is FormKind.JSON_OBJECT:
        return {"type": "json_object"}
    assert form.schema is not None
    schema = msgspec.Raw(form.schema.encode())
    return {"type": "json_schema", "name": form.name, "description": form.description, "schema": schema, "strict": form.strict}
