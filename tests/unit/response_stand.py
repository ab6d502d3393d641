"""A client that keeps what it is sent, and answers of responses on it: what a test of the surface's shapes alone needs."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.api.openai.responses import ResponseAnswer
from weir.api.openai.responses_request import parse_response
from weir.clock import SystemClock
from weir.core.endings import FinishReason, ending
from weir.core.output import Delta
from weir.gateway.client import Accepted, ClientWatcher
from weir.messages import GenerationRecord, StandingView

STANDING = StandingView()
BODY: Mapping[str, Any] = {"model": "assistant", "input": "x"}
ACCEPTED = Accepted("gen-0a1b", "r1", "assistant", "small@1", STANDING, 5)


@dataclass
class KeptClient:
    """A client that takes everything at once. writes: in how many pieces the body came; ended: how often it was finished."""

    written: int = 0
    read_ns: int = 0
    is_lost: bool = False
    unsent: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    ended: int = 0

    def watch(self, watcher: ClientWatcher | None) -> None:
        """Nothing ever happens to it."""

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert not self.status
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}

    def write(self, body: bytes, events: int = 1) -> None:
        assert self.status and not self.ended and body
        assert body.startswith(b":") or events == body.count(b"\n\n")
        self.writes.append(body)

    async def finish(self, body: bytes = b"") -> None:
        self.writes += [body] if body else []
        self.ended += 1

    def abort(self) -> None:
        raise AssertionError("nobody gives this client up")

    @property
    def json(self) -> Any:
        """The whole body."""
        return json.loads(b"".join(self.writes))

    @property
    def events(self) -> list[dict[str, Any]]:
        """The stream's events, each of which must be named as its type says; comments are left out."""
        events = []
        for block in b"".join(self.writes).decode().split("\n\n")[:-1]:
            if block.startswith(":"):
                continue
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


def record_of(reason: FinishReason, output_tokens: int = 3) -> GenerationRecord:
    """A generation that ended so: 5 tokens in, of which 2 were cached."""
    rule = ending(reason)
    return GenerationRecord(
        generation_id=ACCEPTED.generation_id,
        request_id=ACCEPTED.request_id,
        execution=1,
        alias=ACCEPTED.alias,
        revision=ACCEPTED.revision,
        status=rule.status,
        finish_reason=reason,
        input_tokens=5,
        cached_input_tokens=2,
        output_tokens=output_tokens,
        cost_microusd=4,
        posted=True,
        error_code=rule.error.code if rule.error else None,
        error_detail="What happened." if rule.error else None,
    )


def answer_on(client: KeptClient, **fields: Any) -> ResponseAnswer:
    """The answer to a body with these fields."""
    request, options = parse_response({**BODY, **fields}, {})
    return ResponseAnswer(client, SystemClock(), ACCEPTED.request_id, request, options)


def streamed(writes: Sequence[Sequence[Delta]], reason: FinishReason = FinishReason.STOP, **fields: Any) -> KeptClient:
    """A stream to its end, its pieces in so many writes, as the pipeline walks it."""
    client, record = KeptClient(), record_of(reason)
    answer = answer_on(client, stream=True, **fields)

    async def walk() -> None:
        await answer.open(ACCEPTED)
        for pieces in writes:
            answer.output(pieces)
        if record.error_code is None:
            answer.finish_reason(record)
        await answer.end(record, [], STANDING)

    asyncio.run(walk())
    return client


def whole(pieces: Sequence[Delta], reason: FinishReason = FinishReason.STOP, **fields: Any) -> KeptClient:
    """A whole answer."""
    client = KeptClient()
    asyncio.run(answer_on(client, **fields).end(record_of(reason), pieces, STANDING))
    return client
