"""Callers that keep their streams, on a cell with two gateways: how a stream is asked for, cut and read again, on each surface.

Everything is compared as bytes: what a client got, comments left out, is the stream, and what another one gets is a part of it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.ending_stage import Caller, Stage
from tests.e2e.scripted_engine import Script
from tests.e2e.sse_client import Answer, Call, ask, bearer, calling

RETENTION = {"seconds": 600, "bytes": 50_000_000, "resume_grace_seconds": 60}
EVENT_END = b"\n\n"
READ_S = 20.0


@dataclass(frozen=True)
class KeptSurface:
    """How one surface asks for a stream that is kept, and for the rest of it. first: the number of its first event."""

    name: str
    path: str

    def body(self, script: Script, request_id: str, *, stream: bool = True, **fields: Any) -> dict[str, Any]:
        """A generation that is kept."""
        raise NotImplementedError

    def headers(self, request_id: str) -> dict[str, str]:
        """Of that body."""
        return {}

    def rest(self, request_id: str, after: int | str | None) -> tuple[str, dict[str, str]]:
        """Path and headers of what gives the events behind one."""
        raise NotImplementedError

    def shown(self, request_id: str) -> str:
        """The path of its record."""
        raise NotImplementedError

    def kept(self, request_id: str) -> str:
        """The path whose DELETE deletes what is kept."""
        raise NotImplementedError


class NativeKept(KeptSurface):
    """`retain`, and `Last-Event-ID`."""

    def body(self, script: Script, request_id: str, *, stream: bool = True, **fields: Any) -> dict[str, Any]:
        body = {"request_id": request_id, "model_alias": "assistant", "input": script.prompt(), "stream": stream}
        return {**body, "max_output_tokens": 4_000, "retain": True, **fields}

    def rest(self, request_id: str, after: int | str | None) -> tuple[str, dict[str, str]]:
        return f"/v1/generations/{request_id}/events", {} if after is None else {"last-event-id": str(after)}

    def shown(self, request_id: str) -> str:
        return f"/v1/generations/{request_id}"

    def kept(self, request_id: str) -> str:
        return f"/v1/generations/{request_id}/events"


class ResponsesKept(KeptSurface):
    """`store` or `background`, and `starting_after`."""

    def body(self, script: Script, request_id: str, *, stream: bool = True, **fields: Any) -> dict[str, Any]:
        body = {"model": "assistant", "input": script.prompt(), "stream": stream, "max_output_tokens": 4_000}
        return {**body, "store": True, **fields}

    def headers(self, request_id: str) -> dict[str, str]:
        return {"idempotency-key": request_id}

    def rest(self, request_id: str, after: int | str | None) -> tuple[str, dict[str, str]]:
        path = f"/v1/responses/resp_{request_id}?stream=true"
        return path if after is None else f"{path}&starting_after={after}", {}

    def shown(self, request_id: str) -> str:
        return f"/v1/responses/resp_{request_id}"

    def kept(self, request_id: str) -> str:
        return f"/v1/responses/resp_{request_id}"


KEPT: Mapping[str, KeptSurface] = {
    "native": NativeKept("native", "/v1/generations"),
    "responses": ResponsesKept("responses", "/v1/responses"),
}


async def keeper(stage: Stage, **retention: int) -> Caller:
    """A new tenant that keeps its streams."""
    caller = await stage.caller()
    await stage.admin("PATCH", f"tenants/{caller.tenant}", {"retention": {**RETENTION, **retention}})
    return caller


@asynccontextmanager
async def streaming(url: str, caller: Caller, surface: KeptSurface, script: Script, request_id: str) -> AsyncIterator[Call]:
    """A stream that is kept, as far as its caller reads it."""
    body, headers = surface.body(script, request_id), bearer(caller.secret, surface.headers(request_id))
    async with calling(url, surface.path, body=body, headers=headers) as call:
        yield call


@asynccontextmanager
async def following(url: str, caller: Caller, surface: KeptSurface, request_id: str, after: int | None) -> AsyncIterator[Call]:
    """The rest of a stream."""
    path, headers = surface.rest(request_id, after)
    async with calling(url, path, method="GET", headers=bearer(caller.secret, headers)) as call:
        yield call


class Reader:
    """The events of an answer as bytes, comments left out."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._pieces = call.pieces()
        self._begun = b""
        self._whole: list[bytes] = []

    async def take(self, most: int | None = None) -> list[bytes]:
        """The next so many events; without a number all that are left, to the end of the answer."""
        assert await self.call.head() == 200, await self.call.answer()
        async with asyncio.timeout(READ_S):
            while most is None or len(self._whole) < most:
                piece = await anext(self._pieces, None)
                if piece is None:
                    assert most is None and not self._begun, "the stream ended before"
                    break
                *whole, self._begun = (self._begun + piece).split(EVENT_END)
                self._whole += [event + EVENT_END for event in whole if not event.startswith(b":")]
        taken, self._whole = self._whole[:most], self._whole[len(self._whole) if most is None else most :]
        return taken


async def rest_of(url: str, caller: Caller, surface: KeptSurface, request_id: str, after: int | None) -> list[bytes]:
    """All events behind one, to the end."""
    async with following(url, caller, surface, request_id, after) as call:
        return await Reader(call).take()


async def again(url: str, caller: Caller, surface: KeptSurface, script: Script, request_id: str, *, stream: bool) -> Answer:
    """The same request once more."""
    body, headers = surface.body(script, request_id, stream=stream), bearer(caller.secret, surface.headers(request_id))
    async with calling(url, surface.path, body=body, headers=headers) as call:
        return await call.answer()


async def record_of(url: str, caller: Caller, request_id: str) -> Any:
    """The native record."""
    answer = await ask(url, f"/v1/generations/{request_id}", key=caller.secret)
    assert answer.status == 200, answer.body
    return answer.json
