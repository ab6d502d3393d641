"""The paths that Anthropic's clients know, in Anthropic's shapes, errors included."""

from collections.abc import Sequence
from urllib.parse import parse_qsl

from weir import errors
from weir.api.anthropic import message_answer
from weir.api.anthropic.message_answer import MessageAnswer
from weir.api.anthropic.message_shapes import message_refusal, model_entry, models_page
from weir.api.anthropic.messages_request import parse_count, parse_message
from weir.api.door import Call, Door, Methods
from weir.api.exchange import HttpExchange
from weir.api.wire import Rendered, json_object, refuse_field
from weir.core.registry.model import Alias

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"
PAGE, PAGE_MAX = 20, 1_000
_PAGING = ("limit", "after_id", "before_id")


class AnthropicSurface:
    """`/v1/messages` and what lies below it, and the models for clients that name a version of Anthropic's API."""

    generating = frozenset({_MESSAGES})

    def __init__(self, door: Door) -> None:
        self._door = door
        self._fixed: dict[str, Methods] = {
            "/v1/messages": {"POST": self._message},
            "/v1/messages/count_tokens": {"POST": self._count},
            "/v1/models": {"GET": self._models},
        }

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")

    def is_meant(self, exchange: HttpExchange) -> bool:
        """Whether a request is for this surface: OpenAI's has the models at the same path."""
        path = exchange.path
        names_models = path == _MODELS or path.startswith(f"{_MODELS}/")
        return self.owns(path) or (names_models and _VERSION in exchange.headers)

    def methods(self, call: Call) -> Methods | None:
        """Fixed paths, and a model's own."""
        path = call.exchange.path
        if path.startswith(f"{_MODELS}/"):
            call.argument = path.removeprefix(f"{_MODELS}/")
            return {"GET": self._model}
        return self._fixed.get(path)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """Anthropic's error shape."""
        return message_refusal(error, now_wall_ms, request_id)

    async def _message(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request = parse_message(document, call.exchange.headers)
        answer = MessageAnswer(call.exchange, self._door.clock, call.request_id)
        await self._door.gateway.generate(principal, request, answer, message_answer.SURFACE)

    async def _count(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        document = json_object(await call.exchange.body())
        request = parse_count(document, call.exchange.headers)
        input_tokens, basis = await self._door.gateway.count_input(principal, request)
        await self._door.send_json(call, {"input_tokens": input_tokens, "basis": basis})

    async def _models(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        aliases = self._door.gateway.inbox.snapshot.aliases_for(principal)
        await self._door.send_json(call, models_page(*_page_of(aliases, call.exchange.query)))

    async def _model(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        alias, _ = self._door.gateway.inbox.snapshot.resolve(principal, call.argument)
        await self._door.send_json(call, model_entry(alias))


def _page_of(aliases: Sequence[Alias], query: bytes) -> tuple[Sequence[Alias], bool]:
    """The page that a query asks for, and whether more follow in its direction. Raises InvalidRequest or UnsupportedField."""
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in asked:
        if name not in _PAGING:
            raise errors.UnsupportedField(
                "This is not supported here.", members={"field": name[:100], "accepted": list(_PAGING)}
            )
    size = asked.get("limit", str(PAGE))
    if not (size.isascii() and size.isdigit() and len(size) <= 4 and 1 <= int(size) <= PAGE_MAX):
        refuse_field("limit", f"a whole number from 1 to {PAGE_MAX}")
    if "after_id" in asked and "before_id" in asked:
        raise errors.ConflictingFields(
            "Give after_id or before_id, not both.", members={"field": "before_id", "accepted": "one of after_id and before_id"}
        )
    count = int(size)
    if "before_id" in asked:
        left = [alias for alias in aliases if alias.name < asked["before_id"]]
        return left[-count:], len(left) > count
    left = [alias for alias in aliases if alias.name > asked.get("after_id", "")]
    return left[:count], len(left) > count
