"""What OpenAI's responses answer: the response with its items, and the events of its stream."""

from weir.api.openai.response_input import STATUSES
from weir.api.openapi.answers import event, events
from weir.api.openapi.error_guide import ENDINGS, codes_of
from weir.api.openapi.generation_fields import REQUEST_ID_PATTERN
from weir.api.openapi.json_schema import (
    Json,
    answer_object,
    either,
    flag,
    listed,
    nullable,
    number,
    only,
    ref,
    text,
    whole,
    words,
)
from weir.api.openapi.tool_fields import json_schema_field, mode_field

ID_PATTERN = f"^resp_{REQUEST_ID_PATTERN.removeprefix('^')}"
_STATES = ("completed", "incomplete", "failed", "cancelled", "queued", "in_progress")


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _item(kind: str, description: str, fields: dict[str, Json]) -> Json:
    known = {
        "id": text("The item's id.", shortest=1),
        "type": only("The kind of the item.", kind, "string"),
        "status": words("How far it is; what was cut off is incomplete.", STATUSES),
        **fields,
    }
    return answer_object(description, known, list(known))


def message() -> Json:
    """Text."""
    fields = {
        "role": only("Who says it.", "assistant", "string"),
        "content": listed("Its one part; none before it begins.", ref("ResponseTextPart"), most=1),
    }
    return _item("message", "What the model says.", fields)


def reasoning() -> Json:
    """Reasoning."""
    fields = {
        "summary": listed("Always empty.", {}, most=0),
        "content": listed("Its one part; none before it begins.", ref("ResponseReasoningPart"), most=1),
    }
    return _item("reasoning", "What the model thought, where its engine tells it apart.", fields)


def call() -> Json:
    """A call."""
    fields = {
        "call_id": text("The call's id: answer with it.", shortest=1),
        "name": text("The function's name."),
        "arguments": text("JSON text, as the model wrote it."),
    }
    return _item("function_call", "A call of a function of yours.", fields)


def text_part() -> Json:
    """The part of a message."""
    fields = {
        "type": only("The kind of the part.", "output_text", "string"),
        "text": text("The text, as far as it came."),
        "annotations": listed("Always empty.", {}, most=0),
        "logprobs": listed("Log probabilities, where they were asked for.", ref("OpenAILogprob")),
    }
    return answer_object("The part of a message.", fields, list(fields))


def reasoning_part() -> Json:
    """The part of reasoning."""
    fields = {"type": only("The kind of the part.", "reasoning_text", "string"), "text": text("The text, as far as it came.")}
    return answer_object("The part of reasoning.", fields, list(fields))


def _any_item() -> Json:
    return either("An item.", ref("ResponseMessage"), ref("ResponseReasoning"), ref("ResponseCall"))


# ── the response ─────────────────────────────────────────────────────────────────────────────────────────────────────


def usage() -> Json:
    """The usage of a response, with the cost."""
    input_details = {
        "cached_tokens": whole("Cached by the engine."),
        "cache_write_tokens": whole("Always 0: filling a cache is not charged."),
    }
    output_details = {"reasoning_tokens": whole("Always 0: reasoning is not told apart from the output.")}
    fields = {
        "input_tokens": whole("Tokens of the input."),
        "input_tokens_details": answer_object("Details of the input's tokens.", input_details, list(input_details)),
        "output_tokens": whole("Tokens of the output."),
        "output_tokens_details": answer_object("Details of the output's tokens.", output_details, list(output_details)),
        "total_tokens": whole("Both together."),
        "cost_microusd": whole("What you pay, in millionths of a dollar; 0 where the platform pays."),
    }
    return answer_object("What was used, and what it costs.", fields, list(fields))


def response() -> Json:
    """A response in whatever state."""
    codes = codes_of(tuple(rule.error for rule in ENDINGS if rule.error))
    error = {"code": words("Why it did not complete.", codes), "message": text("One sentence for a person.")}
    cut = {"reason": words("What cut it off.", ("max_output_tokens", "content_filter"))}
    fields = {
        "id": text("`resp_` and the request's id.", pattern=ID_PATTERN),
        "object": only("What this is.", "response", "string"),
        "created_at": whole("When, in seconds since 1970; 0 in a retrieved one."),
        "completed_at": nullable(whole("When it completed; null in a retrieved one.")),
        "status": words("How far it is, or how it ended.", _STATES),
        "error": nullable(answer_object("Why it did not complete.", error, list(error))),
        "incomplete_details": nullable(answer_object("Why it is incomplete.", cut, list(cut))),
        "model": text("The alias that was asked for."),
        "model_revision": text("The revision that answers."),
        "output": listed(
            "Its items, in the order in which they began; none in a retrieved one that is not stored.", _any_item()
        ),
        "usage": nullable({"anyOf": [ref("ResponseUsage")], "description": "Null until it ended."}),
        **_settings(),
    }
    label = text("The label that was sent.")
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), label)
    return answer_object("A response: its state, and what was generated.", {**fields, **labels}, list(fields))


def _settings() -> dict[str, Json]:
    """What it repeats of its request."""
    unserved: Json = {"type": "null", "description": "Always null."}
    text_options = {"format": either("The form of the text.", *_forms())}
    return {
        "instructions": nullable(text("The first system message.")),
        "max_output_tokens": nullable(whole("The bound of the output.", 1)),
        "temperature": nullable(number("How freely tokens are drawn.", 0)),
        "top_p": nullable(number("The part of the probability that is drawn from.", 0, 1)),
        "tools": listed("What the model may call.", _tool()),
        "tool_choice": either("Whether one is called.", mode_field(), _chosen()),
        "parallel_tool_calls": flag("Whether several may be called at once."),
        "text": answer_object("Options of the text.", text_options, list(text_options)),
        "top_logprobs": whole("Alternatives to each token."),
        "metadata": {"type": "object", "description": "Your labels.", "additionalProperties": {"type": "string"}},
        "background": flag("Whether it is made in the background."),
        "max_tool_calls": unserved,
        "previous_response_id": unserved,
        "reasoning": unserved,
        "service_tier": only("Always default.", "default", "string"),
        "store": flag("Whether its events are kept."),
        "truncation": only("Always disabled.", "disabled", "string"),
    }


def deleted() -> Json:
    """What is said of a response whose events were deleted."""
    fields = {
        "id": text("The response's id.", pattern=ID_PATTERN),
        "object": only("What this is of.", "response", "string"),
        "deleted": only("Nothing of it is stored.", True, "boolean"),
    }
    return answer_object("A response that is not stored any more.", fields, list(fields))


def _tool() -> Json:
    fields = {
        "type": only("The kind.", "function", "string"),
        "name": text("Its name."),
        "description": nullable(text("What the model is told of it.")),
        "parameters": nullable(json_schema_field("The schema of its arguments.")),
        "strict": nullable(flag("Whether that is enforced.")),
    }
    return answer_object("A function of yours.", fields, list(fields))


def _chosen() -> Json:
    fields = {"type": only("The kind.", "function", "string"), "name": text("Its name.")}
    return answer_object("The one that is called.", fields, list(fields))


def _forms() -> list[Json]:
    schema = {
        "type": only("The kind.", "json_schema", "string"),
        "name": text("The schema's name."),
        "description": nullable(text("What the model is told of it.")),
        "schema": json_schema_field("The schema."),
        "strict": nullable(flag("Whether it is enforced strictly.")),
    }
    plain = {"type": words("The kind.", ("text", "json_object"))}
    return [answer_object("No schema.", plain, list(plain)), answer_object("A schema.", schema, list(schema))]


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _event(name: str, description: str, fields: dict[str, Json]) -> Json:
    numbered = {
        "type": only("The event's name.", name, "string"),
        "sequence_number": whole("0, 1, 2, … without a gap."),
        **fields,
    }
    return event(description, answer_object(description, numbered, list(numbered)), name=name)


def stream() -> Json:
    """The media type object of the events."""
    whole_response = {"response": ref("Response")}
    index = {"output_index": whole("Which item.")}
    call_place = {"item_id": text("The item's id.", shortest=1), **index}
    place = {**call_place, "content_index": whole("Which part: the first.", 0, 0)}
    item = {**index, "item": _any_item()}
    part = {**place, "part": either("The part.", ref("ResponseTextPart"), ref("ResponseReasoningPart"))}
    delta = {"delta": text("What is new.")}
    told = {"text": text("All of it.")}
    logprobs = {"logprobs": listed("Log probabilities, where they were asked for.", ref("OpenAILogprob"))}
    called = {"name": text("The function's name."), "arguments": text("All of its arguments.")}
    return events(
        _event("response.created", "First: the request was admitted, and its hold is durable.", whole_response),
        _event("response.in_progress", "Right after it.", whole_response),
        _event("response.output_item.added", "An item begins.", item),
        _event("response.output_item.done", "An item is whole.", item),
        _event("response.content_part.added", "The part of a message or of reasoning begins.", part),
        _event("response.content_part.done", "It is whole.", part),
        _event("response.output_text.delta", "A piece of text.", {**place, **delta, **logprobs}),
        _event("response.output_text.done", "The text of a part.", {**place, **told, **logprobs}),
        _event("response.reasoning_text.delta", "A piece of reasoning.", {**place, **delta}),
        _event("response.reasoning_text.done", "The reasoning of a part.", {**place, **told}),
        _event("response.function_call_arguments.delta", "A piece of a call's arguments.", {**call_place, **delta}),
        _event("response.function_call_arguments.done", "A whole call.", {**call_place, **called}),
        _event("response.completed", "Last: it completed.", whole_response),
        _event("response.incomplete", "Last: it was cut off at a bound or by a filter.", whole_response),
        _event("response.failed", "Last: it failed, expired or was cancelled.", whole_response),
    )
