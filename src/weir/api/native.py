"""The native surface's paths: generations, their records, cancellation and events."""

from weir import errors
from weir.api import generations
from weir.api.door import Call, Door, Methods
from weir.api.generations import NativeAnswer, generation_body, parse_generation
from weir.api.wire import Rendered, json_object, problem, refuse_field

_PATH = "/v1/generations"


class NativeSurface:
    """`/v1/generations` and what lies below it, in problem+json."""

    generating = frozenset({_PATH})

    def __init__(self, door: Door) -> None:
        self._door = door

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
            "events": {"GET": self._events},
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
        answer = NativeAnswer(call.exchange, self._door.clock, call.request_id)
        await self._door.gateway.generate(principal, request, answer, generations.SURFACE)

    async def _lookup(self, call: Call) -> None:
        record = await self._door.find(call, call.argument)
        await self._door.send_json(call, generation_body(record), record.request_id)

    async def _cancel(self, call: Call) -> None:
        record = await self._door.cancel(call, call.argument)
        await self._door.send_json(call, generation_body(record), record.request_id)

    async def _events(self, call: Call) -> None:
        record = await self._door.find(call, call.argument)
        if not call.exchange.headers.get(b"last-event-id", b"0").isdigit():
            refuse_field("Last-Event-ID", "the id of an event: a whole number from 0")
        refusal = errors.StreamNotRetained("The events of this request were not kept.")
        rendered = problem(refusal, self._door.clock.wall_ms(), {"generation": generation_body(record)})
        assert call.principal is not None
        await self._door.send(call, rendered, await self._door.standing(call.principal), record.request_id)
