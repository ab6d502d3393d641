"""OpenAI's chat completions as Weir serves them: the fields that are passed on, and OpenAI's shapes with Weir's codes."""

from weir.api import functions
from weir.api.openai import chat_request
from weir.api.openapi import chat_request_schemas as asked
from weir.api.openapi.answers import answer, together
from weir.api.openapi.generation_fields import body_of, weir_headers
from weir.api.openapi.json_schema import Json, answer_object, listed, nullable, only, ref, text, whole
from weir.api.openapi.openai_parts import (
    choice_fields,
    chunk_body,
    chunk_stream,
    generation_answers,
    logprob,
    logprobs,
    stream_options,
    usage,
    whole_body,
)
from weir.api.openapi.surface_description import SurfaceDescription

_TAG = "OpenAI chat completions"
_EXAMPLE: Json = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "What is a weir?"}],
    "max_completion_tokens": 16,
}


def _message() -> Json:
    calls = {
        "id": text("The call's id: answer with it.", shortest=1),
        "type": only("The kind.", "function", "string"),
        "function": answer_object(
            "What to call.", {"name": text("Its name."), "arguments": text("JSON text.")}, ["name", "arguments"]
        ),
    }
    fields = {
        "role": only("Who says it.", "assistant", "string"),
        "content": nullable(text("The output; null where there are tool calls alone.")),
        "refusal": {"type": "null", "description": "Always null."},
    }
    more = {
        "reasoning_content": text("What the model thought before, where it tells."),
        "tool_calls": listed("Calls of your tools.", answer_object("A call.", calls, list(calls)), fewest=1),
    }
    return answer_object("What the model said.", {**fields, **more}, list(fields))


def _delta() -> Json:
    begun = {
        "index": whole("Which call."),
        "id": text("In a call's first piece: its id.", shortest=1),
        "type": only("In a call's first piece.", "function", "string"),
        "function": answer_object(
            "A piece of it.", {"name": text("In its first piece."), "arguments": text("A piece of JSON text.")}, ["arguments"]
        ),
    }
    fields = {
        "role": only("In the first chunk.", "assistant", "string"),
        "content": text("A piece of the output."),
        "reasoning_content": text("A piece of what the model thought."),
        "tool_calls": listed("Pieces of calls.", answer_object("A piece of a call.", begun, ["index", "function"])),
    }
    return answer_object("What is new.", fields)


def _create() -> Json:
    made = answer(
        "The completion; with `stream`, its chunks, the role first.",
        {"application/json": {"schema": ref("ChatCompletion")}, "text/event-stream": chunk_stream("ChatCompletionChunk")},
    )
    return {
        "tags": [_TAG],
        "operationId": "createChatCompletion",
        "summary": "Complete a chat",
        "description": "OpenAI's chat completion. A field that is not described here is refused by name.",
        "parameters": weir_headers(),
        "requestBody": body_of("ChatCompletionRequest", "What to complete.", _EXAMPLE),
        "responses": together(*generation_answers(made)),
    }


SURFACE = SurfaceDescription(
    name=_TAG,
    description="OpenAI's chat completions, for its SDKs and for tools that speak its API.",
    page="openai-chat.md",
    paths={"/v1/chat/completions": {"post": _create()}},
    schemas={
        "ChatCompletionRequest": asked.request(),
        "ChatMessage": asked.message(),
        "ChatTextPart": asked.text_part(),
        "ChatToolCall": asked.tool_call(),
        "ChatCalledFunction": asked.called_function(),
        "ChatTool": asked.tool(),
        "ChatFunction": asked.function(),
        "ChatToolChoice": asked.tool_choice(),
        "ChatChosenFunction": asked.chosen_function(),
        "ChatForm": asked.form(),
        "ChatFormSchema": asked.form_schema(),
        "OpenAIStreamOptions": stream_options(),
        "ChatCompletion": whole_body(
            "A chat completion.",
            "chat.completion",
            choice_fields({"message": _message()}, ref("ChatLogprobs"), is_whole=True),
        ),
        "ChatCompletionChunk": chunk_body(
            "A piece of a chat completion.",
            "chat.completion.chunk",
            choice_fields({"delta": _delta()}, ref("ChatLogprobs"), is_whole=False),
        ),
        "ChatLogprobs": logprobs(),
        "OpenAILogprob": logprob(),
        "OpenAIUsage": usage(),
    },
    parsed={
        "ChatCompletionRequest": chat_request.FIELDS,
        "ChatMessage": chat_request.MESSAGE_FIELDS,
        "ChatTextPart": chat_request.TEXT_PART_FIELDS,
        "ChatToolCall": chat_request.CALL_FIELDS,
        "ChatCalledFunction": chat_request.CALLED_FIELDS,
        "ChatTool": chat_request.TOOL_FIELDS,
        "ChatFunction": functions.FUNCTION_FIELDS,
        "ChatToolChoice": chat_request.TOOL_FIELDS,
        "ChatChosenFunction": ("name",),
        "ChatForm": chat_request.FORM_FIELDS,
        "ChatFormSchema": functions.SCHEMA_FIELDS,
        "OpenAIStreamOptions": chat_request.STREAM_OPTIONS,
    },
)
