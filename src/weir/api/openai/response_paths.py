"""The paths of OpenAI's responses: create, retrieve, follow, cancel, delete."""

from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from weir import errors
from weir.api.door import Call, Door, Methods
from weir.api.kept_answers import KeptAnswers, off_loop
from weir.api.openai import responses
from weir.api.openai.response_shapes import ID_PREFIX
from weir.api.openai.response_streams import ResponsesShape, response_in, retrieved
from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import parse_response
from weir.api.wire import Rendered, openai_error, refuse_field
from weir.gateway.client import Client
from weir.messages import GenerationRecord

_PATH = "/v1/responses"
_NUMBER_DIGITS_MAX = 18
_ASKED_ONCE = ("stream", "starting_after")


class ResponsesSurface:
    """`/v1/responses` and what lies below it, in OpenAI's shapes, errors included."""

    generating = frozenset({_PATH})

    def __init__(self, door: Door) -> None:
        self._door = door
        self._kept = KeptAnswers(door.gateway, responses.SURFACE, ResponsesShape(door.clock))

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _PATH or path.startswith(f"{_PATH}/")

    def methods(self, call: Call) -> Methods | None:
        """A response, or what can be done with one by its id."""
        path = call.exchange.path
        if path == _PATH:
            return {"POST": self._create}
        call.argument, _, action = path.removeprefix(f"{_PATH}/").partition("/")
        routes: dict[str, Methods] = {
            "": {"GET": self._retrieve, "DELETE": self._delete},
            "cancel": {"POST": self._cancel},
        }
        return routes.get(action)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """OpenAI's error shape."""
        return openai_error(error, now_wall_ms)

    async def _create(self, call: Call) -> None:
        principal, document = await self._door.keyed_document(call)
        request, options = parse_response(document, call.exchange.headers)
        replay = self._kept.replay(call, stream=request.stream)
        client: Client = call.exchange
        if options.kept_by is not None:
            self._kept.check(principal, options.kept_by)
            client, request = self._kept.kept(call.exchange, request, is_background=options.background)
        answer = ResponseAnswer(client, self._door.clock, call.request_id, request, options)
        await self._door.gateway.generate(principal, request, answer, responses.SURFACE, replay)

    async def _retrieve(self, call: Call) -> None:
        record = await self._door.find(call, _request_id(call.argument))
        stream, after = _following(call.exchange.query)
        if stream:
            await self._kept.show_events(call, record, after, "starting_after")
        else:
            await self._send(call, record)

    async def _cancel(self, call: Call) -> None:
        await self._send(call, await self._door.cancel(call, _request_id(call.argument)))

    async def _delete(self, call: Call) -> None:
        record = await self._door.find(call, _request_id(call.argument))
        await self._kept.delete(call, record)
        body = {"id": call.argument, "object": "response", "deleted": True}
        await self._door.send_json(call, body, record.request_id)

    async def _send(self, call: Call, record: GenerationRecord) -> None:
        """A response as it is kept; where it is not, as its record has it: without text, settings and times."""
        body = retrieved(record, b"")
        with suppress(errors.StreamStoreUnavailable, errors.QueueFull):  # the state is shown in any case
            body = await self._kept_response(call, record) or body
        await self._door.send_json(call, body, record.request_id)

    async def _kept_response(self, call: Call, record: GenerationRecord) -> dict[str, Any] | None:
        assert call.principal is not None
        reader = await self._kept.find(call.principal, record)
        if reader is not None and record.finish_reason is not None:
            pieces = await self._kept.pieces(reader, record)
            return await off_loop(lambda: response_in(pieces[-1], last=True))
        begun = await reader.more() if reader is not None else ()
        return retrieved(record, begun[0]) if begun else None


def _request_id(given: str) -> str:
    """The request id in a response's id; of anything else what no request has as its id."""
    return given.removeprefix(ID_PREFIX) if given.startswith(ID_PREFIX) else ""


def _following(query: bytes) -> tuple[bool, int]:
    """Whether the stream is asked for, and behind which event, -1 for all. Raises InvalidRequest, UnsupportedField."""
    stream, after = False, None
    asked = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    names = [name for name, _ in asked]
    for name, value in asked:
        if name in _ASKED_ONCE and names.count(name) > 1:
            refuse_field(name, "one value")
        if name == "stream" and value in ("true", "false"):
            stream = value == "true"
        elif name == "stream":
            refuse_field("stream", "true or false")
        elif name == "starting_after":
            if not (value.isascii() and value.isdigit() and len(value) <= _NUMBER_DIGITS_MAX):
                refuse_field("starting_after", "the number of an event: a whole number from 0")
            after = int(value)
        elif (name, value) != ("include_obfuscation", "false"):
            shown = name.removesuffix("[]")[:100]
            raise errors.UnsupportedField("Nothing else can be asked for.", members={"field": shown, "accepted": "absent"})
    if after is not None and not stream:
        raise errors.ConflictingFields(
            "starting_after is for streams.", members={"field": "starting_after", "accepted": "only with stream=true"}
        )
    return stream, -1 if after is None else after
