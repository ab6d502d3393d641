"""The native surface's paths: generations, their records, cancellation and events."""

from collections.abc import Sequence

import msgspec

from weir import errors
from weir.api import generations
from weir.api.door import Call, Door, Methods
from weir.api.exchange import HttpExchange
from weir.api.generations import (
    NativeAnswer,
    accepted_event,
    done_event,
    generation_body,
    parse_generation,
    render_record,
)
from weir.api.kept_answers import KeptAnswers, off_loop
from weir.api.wire import Headers, Rendered, json_object, problem, refuse_field
from weir.core.tenancy import Principal
from weir.gateway.client import Client
from weir.gateway.kept_reader import EVENT_END
from weir.messages import GenerationRecord, StandingView

_PATH = "/v1/generations"
_OUTPUT = b"\nevent: output\ndata: "


class _Output(msgspec.Struct):
    text: str


class NativeShape:
    """Events of the native surface, for those who keep them."""

    def closing(self, record: GenerationRecord, pieces: Sequence[bytes]) -> bytes:
        """`done`, behind `accepted` where nothing came."""
        if pieces:
            return done_event(sum(piece.count(EVENT_END) for piece in pieces), record)
        return accepted_event(record.generation_id, record.request_id, record.alias, record.revision) + done_event(1, record)

    def whole(self, pieces: Sequence[bytes], record: GenerationRecord, standing: StandingView | None) -> Rendered:
        """The generation's body, with its output if it is complete."""
        return render_record(record, output_in(pieces) if record.error_code is None else None, standing)

    def begun(self, first: bytes, headers: Headers) -> Rendered:
        """Natively nobody is answered before the end."""
        raise AssertionError("a native generation is no background work")


def output_in(pieces: Sequence[bytes]) -> str:
    """The text in a stream's events."""
    events = b"".join(pieces).split(EVENT_END)
    found = (event.partition(_OUTPUT)[2] for event in events)
    return "".join(msgspec.json.decode(data, type=_Output).text for data in found if data)


class NativeSurface:
    """`/v1/generations` and what lies below it, in problem+json."""

    generating = frozenset({_PATH})

    def __init__(self, door: Door) -> None:
        self._door = door
        self._kept = KeptAnswers(door.gateway, generations.SURFACE, NativeShape())

    def owns(self, path: str) -> bool:
        """Its own paths."""
        return path == _PATH or path.startswith(f"{_PATH}/")

    def methods(self, call: Call) -> Methods | None:
        """A generation, or what can be done with one by its request id."""
        path = call.exchange.path
        if path == _PATH:
            return {"POST": self._generate}
        if not self.owns(path):
            return None
        call.argument, _, action = path.removeprefix(f"{_PATH}/").partition("/")
        routes: dict[str, Methods] = {
            "": {"GET": self._lookup},
            "cancel": {"POST": self._cancel},
            "events": {"GET": self._events, "DELETE": self._delete_events},
        }
        return routes.get(action)

    def refusal(self, error: errors.WeirError, now_wall_ms: int, request_id: str) -> Rendered:
        """problem+json."""
        return problem(error, now_wall_ms)

    async def _generate(self, call: Call) -> None:
        principal = self._door.authenticate(call)
        document = json_object(await call.exchange.body())
        call.take_id(document.get("request_id"))
        request = parse_generation(document)
        replay = self._kept.replay(call, stream=request.stream)
        client: Client = call.exchange
        if request.retain:
            self._kept.check(principal, "retain")
            client, request = self._kept.kept(call.exchange, request)
        answer = NativeAnswer(client, self._door.clock, call.request_id)
        await self._door.gateway.generate(principal, request, answer, generations.SURFACE, replay)

    async def _lookup(self, call: Call) -> None:
        record = await self._door.find(call, call.argument)
        assert call.principal is not None
        text = await self._output(call.principal, record)
        await self._door.send_json(call, generation_body(record, text), record.request_id)

    async def _output(self, principal: Principal, record: GenerationRecord) -> str | None:
        """The output of a complete generation whose stream is kept, and can be read now: the record is shown in any case."""
        if record.finish_reason is None or record.error_code is not None:
            return None
        try:
            reader = await self._kept.find(principal, record)
            if reader is None:
                return None
            pieces = await self._kept.pieces(reader, record)
            return await off_loop(lambda: output_in(pieces))
        except (errors.StreamStoreUnavailable, errors.QueueFull):
            return None

    async def _cancel(self, call: Call) -> None:
        record = await self._door.cancel(call, call.argument)
        await self._door.send_json(call, generation_body(record), record.request_id)

    async def _events(self, call: Call) -> None:
        record = await self._door.find(call, call.argument)
        await self._kept.show_events(call, record, _last_event(call.exchange), "Last-Event-ID")

    async def _delete_events(self, call: Call) -> None:
        record = await self._door.find(call, call.argument)
        await self._kept.delete(call, record)
        await self._door.send_json(call, generation_body(record), record.request_id)


def _last_event(exchange: HttpExchange) -> int:
    """The event that a client saw last, -1 where it saw none. Raises InvalidRequest."""
    given = exchange.headers.get(b"last-event-id")
    if given is None:
        return -1
    if not given.isdigit() or len(given) > 18:
        refuse_field("Last-Event-ID", "the id of an event: a whole number from 0")
    return int(given)
