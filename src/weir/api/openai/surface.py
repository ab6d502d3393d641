"""The paths that OpenAI's clients know, in OpenAI's shapes, errors included."""

from weir import errors
from weir.api.door import Call, Door, Methods
from weir.api.openai import chat, completions, embeddings
from weir.api.openai.chat import ChatAnswer
from weir.api.openai.chat_request import parse_chat
from weir.api.openai.completion_request import parse_completion
from weir.api.openai.completions import CompletionAnswer
from weir.api.openai.embeddings import EmbeddingsAnswer, parse_embeddings
from weir.api.openai.shapes import model_object, models_object
from weir.api.wire import Rendered, openai_error

_MODEL = "/v1/models/"


class OpenAISurface:
    """Everything below `/v1/` that no other surface owns, so that OpenAI's SDKs read a code everywhere."""

    generating = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})

    def __init__(self, door: Door) -> None:
        self._door = door
        self._fixed: dict[str, Methods] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._complete},
            "/v1/embeddings": {"POST": self._embed},
            "/v1/models": {"GET": self._models},
        }

    def owns(self, path: str) -> bool:
        """All that is left below `/v1/`."""
        return path.startswith("/v1/")

    def methods(self, call: Call) -> Methods | None:
        """Fixed paths, and a model's own."""
        path = call.exchange.path
        if path.startswith(_MODEL):
            call.argument = path.removeprefix(_MODEL)
            return {"GET": self._model}
        return self._fixed.get(path)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """OpenAI's error shape."""
        return openai_error(error, now_wall_ms)

    async def _chat(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request, options = parse_chat(document, call.exchange.headers)
        answer = ChatAnswer(call.exchange, self._door.clock, call.request_id, options)
        await self._door.gateway.generate(principal, request, answer, chat.SURFACE)

    async def _complete(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request, options = parse_completion(document, call.exchange.headers)
        answer = CompletionAnswer(call.exchange, self._door.clock, call.request_id, options)
        await self._door.gateway.generate(principal, request, answer, completions.SURFACE)

    async def _embed(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request, encoding = parse_embeddings(document, call.exchange.headers)
        answer = EmbeddingsAnswer(call.exchange, self._door.clock, call.request_id, encoding)
        await self._door.gateway.generate(principal, request, answer, embeddings.SURFACE)

    async def _models(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        aliases = self._door.gateway.inbox.snapshot.aliases_for(principal)
        await self._door.send_json(call, models_object(aliases))

    async def _model(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        alias, _ = self._door.gateway.inbox.snapshot.resolve(principal, call.argument)
        await self._door.send_json(call, model_object(alias))
