"""OpenAI's responses as Weir serves them: create, retrieve, follow, cancel, delete; OpenAI's shapes with Weir's codes."""

from weir import errors
from weir.api.openai import response_input, responses_request
from weir.api.openapi import responses_answer_schemas as answered
from weir.api.openapi import responses_request_schemas as asked
from weir.api.openapi.answers import (
    CONNECTION,
    FOLLOWED,
    KEPT,
    OPENAI,
    PROBLEM,
    RETAINED,
    Answers,
    Errors,
    answer,
    refusals,
    together,
)
from weir.api.openapi.generation_fields import EVENT_MAX, body_of, weir_headers
from weir.api.openapi.json_schema import Json, ref
from weir.api.openapi.openai_parts import generation_answers
from weir.api.openapi.surface_description import SurfaceDescription

_TAG = "OpenAI responses"
_EXAMPLE: Json = {"model": "assistant", "input": "What is a weir?", "max_output_tokens": 16}
_STATE = {"application/json": {"schema": ref("Response")}}


def _links() -> Json:
    """From a response to its state and its cancel, by the id in the headers: a stream's body has many events."""
    response_id = {"response_id": "resp_{$response.header.x-request-id}"}
    followed = (("getResponse", "Its state."), ("cancelResponse", "Cancel it, while it lasts."))
    return {
        operation: {"operationId": operation, "parameters": response_id, "description": description}
        for operation, description in followed
    }


def _create() -> Json:
    content = {**_STATE, "text/event-stream": answered.stream()}
    described = (
        "The response; with `stream`, its events; with `background` and without `stream`, the response as it begins. The same"
        " key and body again is answered with what was stored, if it was."
    )
    made = {**answer(described, content, headers=("weir-replayed",)), "links": _links()}
    return {
        "tags": [_TAG],
        "operationId": "createResponse",
        "summary": "Make a response",
        "description": "OpenAI's response; stored only where that is asked for. A field that is not described here is refused"
        " by name.",
        "parameters": weir_headers(),
        "requestBody": body_of("ResponseRequest", "What to answer.", _EXAMPLE),
        "responses": together(*generation_answers(made, errors.StreamStoreUnavailable)),
    }


def _id_in_path() -> Json:
    return {
        "name": "response_id",
        "in": "path",
        "required": True,
        "description": "The id of a response; its latest execution is meant.",
        "schema": {"type": "string", "pattern": answered.ID_PATTERN},
    }


def _query(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _refused(tree: Errors) -> Answers:
    return together(refusals(OPENAI, tree), refusals(PROBLEM, CONNECTION))


def _get() -> Json:
    unpadded = {"type": "boolean", "enum": [False], "default": False}
    after = {"type": "integer", "minimum": 0, "maximum": EVENT_MAX}
    content = {**_STATE, "text/event-stream": answered.stream()}
    return {
        "tags": [_TAG],
        "operationId": "getResponse",
        "summary": "Show a response, or follow it",
        "description": "The latest execution, while it lasts and once it has ended: as it was answered where it is stored, else"
        " its state without text. With `stream`, its stored events, byte by byte as they were sent first. Any other query is"
        " refused by name.",
        "parameters": [
            _id_in_path(),
            _query("stream", "Whether to show its events; only of a stored one.", {"type": "boolean", "default": False}),
            _query("starting_after", "The number of the last event that you have; only with `stream=true`.", after),
            _query("include_obfuscation", "Whether events are padded; only false.", unpadded),
        ],
        "responses": together(
            {"200": answer("The response; with `stream`, its events, to the last one.", content)},
            _refused((errors.UnsupportedField, errors.ConflictingFields, *FOLLOWED)),
        ),
    }


def _delete() -> Json:
    content = {"application/json": {"schema": ref("ResponseDeleted")}}
    return {
        "tags": [_TAG],
        "operationId": "deleteResponse",
        "summary": "Delete what is stored of a response",
        "description": "Nothing of its events is kept once it answers; its state stays. What runs is refused: cancel it first.",
        "parameters": [_id_in_path()],
        "responses": together({"200": answer("It is deleted.", content)}, _refused((errors.NotAllowedNow, *RETAINED))),
    }


def _cancel() -> Json:
    return {
        "tags": [_TAG],
        "operationId": "cancelResponse",
        "summary": "Cancel a response",
        "description": "Answers once it is terminal; one that has ended answers its state unchanged.",
        "parameters": [_id_in_path()],
        "responses": together({"200": answer("Its terminal state.", _STATE)}, _refused(KEPT)),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="OpenAI's responses, for its SDKs and for agents that speak it.",
    page="openai-responses.md",
    paths={
        "/v1/responses": {"post": _create()},
        "/v1/responses/{response_id}": {"get": _get(), "delete": _delete()},
        "/v1/responses/{response_id}/cancel": {"post": _cancel()},
    },
    schemas={
        "ResponseRequest": asked.request(),
        "ResponseStreamOptions": asked.stream_options(),
        "ResponseInputMessage": asked.message(),
        "ResponseInputText": asked.input_text(),
        "ResponseOutputText": asked.output_text(),
        "ResponseInputCall": asked.call(),
        "ResponseInputCallOutput": asked.call_output(),
        "ResponseTool": asked.tool(),
        "ResponseToolChoice": asked.tool_choice(),
        "ResponseText": asked.text_options(),
        "ResponseForm": asked.form(),
        "Response": answered.response(),
        "ResponseDeleted": answered.deleted(),
        "ResponseMessage": answered.message(),
        "ResponseReasoning": answered.reasoning(),
        "ResponseCall": answered.call(),
        "ResponseTextPart": answered.text_part(),
        "ResponseReasoningPart": answered.reasoning_part(),
        "ResponseUsage": answered.usage(),
    },
    parsed={
        "ResponseRequest": responses_request.FIELDS,
        "ResponseStreamOptions": responses_request.STREAM_OPTIONS,
        "ResponseInputMessage": response_input.MESSAGE_FIELDS,
        "ResponseInputText": response_input.PART_FIELDS["input_text"],
        "ResponseOutputText": response_input.PART_FIELDS["output_text"],
        "ResponseInputCall": response_input.CALL_FIELDS,
        "ResponseInputCallOutput": response_input.CALL_OUTPUT_FIELDS,
        "ResponseTool": responses_request.TOOL_FIELDS,
        "ResponseToolChoice": responses_request.CHOICE_FIELDS,
        "ResponseText": responses_request.TEXT_FIELDS,
        "ResponseForm": responses_request.FORM_FIELDS,
    },
)
