"""The paths of OpenAI's responses: create, retrieve, cancel."""

from urllib.parse import parse_qsl

from weir import errors
from weir.api.door import Call, Door, Methods
from weir.api.openai import responses
from weir.api.openai.response_shapes import ID_PREFIX, UNKNOWN_SETTINGS, response_object
from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import parse_response
from weir.api.wire import Rendered, openai_error
from weir.messages import GenerationRecord

_PATH = "/v1/responses"
_CREATED_UNKNOWN = 0


class ResponsesSurface:
    """`/v1/responses` and what lies below it, in OpenAI's shapes, errors included."""

    generating = frozenset({_PATH})

    def __init__(self, door: Door) -> None:
        self._door = door

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _PATH or path.startswith(f"{_PATH}/")

    def methods(self, call: Call) -> Methods | None:
        """A response, or what can be done with one by its id."""
        path = call.exchange.path
        if path == _PATH:
            return {"POST": self._create}
        call.argument, _, action = path.removeprefix(f"{_PATH}/").partition("/")
        routes: dict[str, Methods] = {"": {"GET": self._retrieve}, "cancel": {"POST": self._cancel}}
        return routes.get(action)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """OpenAI's error shape."""
        return openai_error(error, now_wall_ms)

    async def _create(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request, options = parse_response(document, call.exchange.headers)
        answer = ResponseAnswer(call.exchange, self._door.clock, call.request_id, request, options)
        await self._door.gateway.generate(principal, request, answer, responses.SURFACE)

    async def _retrieve(self, call: Call) -> None:
        record = await self._door.find(call, _request_id(call.argument))
        _refuse_following(call.exchange.query)
        await self._send(call, record)

    async def _cancel(self, call: Call) -> None:
        await self._send(call, await self._door.cancel(call, _request_id(call.argument)))

    async def _send(self, call: Call, record: GenerationRecord) -> None:
        """A response as its record has it: without its text, its settings and its times, which are not kept."""
        body = response_object(record, UNKNOWN_SETTINGS, _CREATED_UNKNOWN, None, [])
        await self._door.send_json(call, body, record.request_id)


def _request_id(given: str) -> str:
    """The request id in a response's id; of anything else what no request has as its id."""
    return given.removeprefix(ID_PREFIX) if given.startswith(ID_PREFIX) else ""


def _refuse_following(query: bytes) -> None:
    """Raises UnsupportedField for every parameter but `stream=false`: no stream is kept that one could follow again."""
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if (name, value) != ("stream", "false"):
            shown = name.removesuffix("[]")[:100]
            raise errors.UnsupportedField(
                "Streams and what was generated are not kept: only the state of a response can be retrieved.",
                members={"field": shown, "accepted": "absent"},
            )
