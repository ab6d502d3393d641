"""The native surface: generations, their records, cancel, and the events of a retained stream."""

from weir import errors
from weir.api import generations
from weir.api.generations import ALIAS_CHARS_MAX, MESSAGES_MAX, ROLES
from weir.api.openapi.answers import (
    ADMISSION,
    FOLLOWED,
    KEPT,
    LOOKUP,
    PROBLEM,
    RETAINED,
    Answers,
    answer,
    event,
    events,
    native_endings,
    refusals,
    together,
)
from weir.api.openapi.generation_fields import (
    EVENT_MAX,
    body_of,
    deadline_field,
    header,
    output_bound,
    record_links,
    request_id_field,
    request_id_in_path,
    sampling_fields,
    session_field,
    streamed,
)
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    either,
    flag,
    listed,
    nullable,
    optional,
    ref,
    request_object,
    text,
    words,
)
from weir.api.openapi.shared_parts import ended_fields
from weir.api.openapi.surface_description import SurfaceDescription
from weir.core.endings import FinishReason, Status

_TAG = "Native generations"
_EXAMPLE: Json = {"model_alias": "assistant", "input": "What is a weir?", "max_output_tokens": 16}
_RECORD = {"application/json": {"schema": ref("Generation")}}


def _message() -> Json:
    fields = {
        "role": words("Who says it.", ROLES),
        "content": text("What is said."),
    }
    return request_object("One message of a conversation.", fields, list(fields))


def _request() -> Json:
    conversation = listed("A conversation.", ref("GenerationMessage"), fewest=1, most=MESSAGES_MAX)
    plain = text("One user message for a chat model, a plain prompt for a base model.", shortest=1)
    fields = {
        "request_id": request_id_field(),
        "model_alias": text("The exact name of an alias that the application may use.", shortest=1, longest=ALIAS_CHARS_MAX),
        "input": either("What the model is given.", plain, conversation),
        "max_output_tokens": output_bound(
            "At most the revision's maximum; absent: the alias's default, cut to what the context window leaves."
        ),
        "deadline_ms": deadline_field(),
        "stream": streamed(),
        **sampling_fields(),
        "session": session_field(),
        "retain": optional(flag("Whether the events are kept, to be read again; only of a tenant that keeps streams."), False),
    }
    return request_object("A generation to make.", fields, ["model_alias", "input"])


def _accepted() -> Json:
    fields = {
        "id": text("The generation's id.", shortest=1),
        "request_id": text("The request's id.", shortest=1),
        "model_alias": text("The alias that was asked for."),
        "model_revision": text("The revision that answers."),
    }
    return answer_object("Says that the request is admitted, with its hold durable.", fields, list(fields))


def _done() -> Json:
    fields = {
        "status": words("How it ended.", [status for status in Status if status not in (Status.QUEUED, Status.RUNNING)]),
        "finish_reason": nullable(words("Why it ended.", FinishReason)),
        **ended_fields(),
    }
    return answer_object("The end, with what it cost.", fields, list(fields)[:4])


_OUTPUT = answer_object("A piece of the output.", {"text": text("The texts joined are the output, byte by byte.")}, ["text"])


def _stream() -> Json:
    return events(
        event("Always first, with id 0.", ref("AcceptedEvent"), name="accepted", numbered=True),
        event("Any number of them.", ref("OutputEvent"), name="output", numbered=True),
        event("Always last, exactly one; nothing follows.", ref("DoneEvent"), name="done", numbered=True),
    )


def _create() -> Json:
    made = answer(
        "The generation, completed or cancelled by its id; with `stream`, its events. The same id and body again is answered"
        " with what was retained, if it was.",
        {**_RECORD, "text/event-stream": _stream()},
        headers=("weir-replayed",),
    )
    links = {**record_links(), **_events_link()}
    return {
        "tags": [_TAG],
        "operationId": "createGeneration",
        "summary": "Generate",
        "description": "Admits the request with its tokens and money held, runs it, and answers whole or as a stream.",
        "requestBody": body_of("GenerationRequest", "What to generate.", _EXAMPLE),
        "responses": together({"200": {**made, "links": links}}, _refused(), native_endings()),
    }


def _refused() -> Answers:
    return refusals(PROBLEM, (*ADMISSION, errors.StreamStoreUnavailable))


def _events_link() -> Json:
    """From a generation to its events."""
    followed = {"request_id": "$response.header.x-request-id"}
    described = "Its events, again or for the first time, where it is retained."
    return {"listGenerationEvents": {"operationId": "listGenerationEvents", "parameters": followed, "description": described}}


def _get() -> Json:
    return {
        "tags": [_TAG],
        "operationId": "getGeneration",
        "summary": "Show the record of a request",
        "description": "The latest execution of a request id, while it lasts and once it has ended; its text only where it"
        " completed and its stream is retained.",
        "parameters": [request_id_in_path()],
        "responses": together({"200": answer("The record.", _RECORD)}, refusals(PROBLEM, KEPT)),
    }


def _cancel() -> Json:
    return {
        "tags": [_TAG],
        "operationId": "cancelGeneration",
        "summary": "Cancel a request",
        "description": "Answers once it is terminal; a request that has ended answers its record unchanged.",
        "parameters": [request_id_in_path()],
        "responses": together({"200": answer("The terminal record.", _RECORD)}, refusals(PROBLEM, LOOKUP)),
    }


def _events() -> Json:
    last = {"type": "integer", "minimum": 0, "maximum": EVENT_MAX}
    return {
        "tags": [_TAG],
        "operationId": "listGenerationEvents",
        "summary": "Show a retained stream, or the rest of it",
        "description": "The events behind `Last-Event-ID`, byte by byte as they were sent first, while the generation runs and"
        " after its end. The id of an event that the stream does not have is refused.",
        "parameters": [
            request_id_in_path(),
            header("Last-Event-ID", "The id of the last event that you have; absent: all events.", last),
        ],
        "responses": together(
            {"200": answer("The events, to the last one.", {"text/event-stream": _stream()})}, refusals(PROBLEM, FOLLOWED)
        ),
    }


def _delete_events() -> Json:
    return {
        "tags": [_TAG],
        "operationId": "deleteGenerationEvents",
        "summary": "Delete a retained stream",
        "description": "No event is kept once it answers; the record stays. What runs is refused: cancel it first.",
        "parameters": [request_id_in_path()],
        "responses": together({"200": answer("The record.", _RECORD)}, refusals(PROBLEM, (errors.NotAllowedNow, *RETAINED))),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="Weir's own surface: one JSON body or a stream of numbered events, with usage and cost.",
    page="native.md",
    paths={
        "/v1/generations": {"post": _create()},
        "/v1/generations/{request_id}": {"get": _get()},
        "/v1/generations/{request_id}/cancel": {"post": _cancel()},
        "/v1/generations/{request_id}/events": {"get": _events(), "delete": _delete_events()},
    },
    schemas={
        "GenerationRequest": _request(),
        "GenerationMessage": _message(),
        "AcceptedEvent": _accepted(),
        "OutputEvent": _OUTPUT,
        "DoneEvent": _done(),
    },
    parsed={"GenerationRequest": generations.FIELDS, "GenerationMessage": generations.MESSAGE_FIELDS},
)
