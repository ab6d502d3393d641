"""Request fields and parameters that several surfaces have: sampling, Weir's headers, a request id in a path."""

from weir.api.generations import (
    OUTPUT_TOKENS_MAX,
    PENALTY_MAX,
    REQUEST_ID_CHARS_MAX,
    SEED_MAX,
    SESSION_CHARS_MAX,
    STOP_CHARS_MAX,
    STOPS_MAX,
    TEMPERATURE_MAX,
)
from weir.api.openapi.json_schema import Json, either, flag, listed, number, optional, text, whole
from weir.core.request import DEADLINE_MS_MAX

REQUEST_ID_PATTERN = f"^[A-Za-z0-9_.:-]{{1,{REQUEST_ID_CHARS_MAX}}}$"
EVENT_MAX = 10**18 - 1
"""The highest number that an event is asked for by: eighteen digits."""
_HEADER_TEXT = rf"^[!-~](?:[\t -~]{{0,{SESSION_CHARS_MAX - 2}}}[!-~])?$"
_DEADLINE = "From the request's arrival to its last token, in milliseconds; absent: the workload class's default."
_SESSION = "A name for a conversation, whose requests keep to one side of a canary; absent: each request stands alone."
_REQUEST_ID = "The idempotency key, unique per tenant; absent: one is generated."


def sampling_fields() -> dict[str, Json]:
    """Sampling with OpenAI's names and ranges."""
    stop_text = text("One of them.", shortest=1, longest=STOP_CHARS_MAX)
    return {
        "temperature": optional(number("How freely tokens are drawn; absent: the engine's default.", 0, TEMPERATURE_MAX)),
        "top_p": optional(number("The part of the probability that is drawn from; absent: the engine's default.", 0, 1)),
        "seed": optional(whole("The same seed and request tend to give the same output; absent: none.", 0, SEED_MAX)),
        "stop": optional(
            either("Texts that end the output before they appear.", stop_text, listed("Several.", stop_text, most=STOPS_MAX))
        ),
        "presence_penalty": optional(
            number("Lowers the odds of tokens that appeared; absent: the engine's default.", -PENALTY_MAX, PENALTY_MAX)
        ),
        "frequency_penalty": optional(
            number("Lowers the odds of tokens by how often they appeared; absent: the engine's.", -PENALTY_MAX, PENALTY_MAX)
        ),
    }


def output_bound(description: str) -> Json:
    """The most output tokens that a request asks for."""
    return optional(whole(description, 1, OUTPUT_TOKENS_MAX))


def streamed() -> Json:
    """Whether the answer is a stream."""
    return optional(flag("Whether the answer comes as server-sent events, as it is made."), default=False)


def deadline_field() -> Json:
    """The deadline in a native body."""
    return optional(whole(_DEADLINE, 1, DEADLINE_MS_MAX))


def session_field() -> Json:
    """The session in a native body."""
    return optional(text(_SESSION, shortest=1, longest=SESSION_CHARS_MAX))


def request_id_field() -> Json:
    """The request id in a native body."""
    return optional(text(_REQUEST_ID, pattern=REQUEST_ID_PATTERN))


def request_id_in_path() -> Json:
    """`{request_id}`."""
    schema = {"type": "string", "pattern": REQUEST_ID_PATTERN}
    return {
        "name": "request_id",
        "in": "path",
        "required": True,
        "description": "The id of a request of yours; its latest execution is meant.",
        "schema": schema,
    }


def record_links() -> Json:
    """From any answer of a generation to its record and its cancel, by the id in the headers."""
    request_id = {"request_id": "$response.header.x-request-id"}
    followed = (("getGeneration", "Its record."), ("cancelGeneration", "Cancel it, while it lasts."))
    return {
        operation: {"operationId": operation, "parameters": request_id, "description": description}
        for operation, description in followed
    }


def header(name: str, description: str, schema: Json) -> Json:
    """An optional header of a request."""
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def weir_headers() -> list[Json]:
    """Weir's own options on compatible paths: the rules of the native fields."""
    deadline = {"type": "integer", "minimum": 1, "maximum": DEADLINE_MS_MAX}
    return [
        header("Idempotency-Key", _REQUEST_ID, {"type": "string", "pattern": REQUEST_ID_PATTERN}),
        header("weir-deadline-ms", _DEADLINE, deadline),
        session_header(),
    ]


def session_header() -> Json:
    """The session on compatible paths."""
    return header("weir-session", _SESSION, {"type": "string", "pattern": _HEADER_TEXT})


def body_of(component: str, description: str, example: Json) -> Json:
    """A JSON body that is needed."""
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {
        "required": True,
        "description": description,
        "content": {"application/json": {"schema": schema, "example": example}},
    }
