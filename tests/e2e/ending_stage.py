"""A running cell in front of an engine, and everything that must agree about how a request ended.

`Stage.check_ended` is the table of endings as an assertion: the answer, GET, the management API, the usage rows, the account
and the open holds tell the same end, and the payer is the table's. Each test calls as a tenant of its own, so sums are its own.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal
from urllib.parse import quote

from tests.e2e.running_cell import RunningCell
from tests.e2e.scripted_engine import Script
from tests.e2e.sse_client import Answer, Call, Event, ask, bearer, calling

SETTLED_S = 10.0
PRICE_INPUT, PRICE_OUTPUT = 200_000, 600_000  # of the demonstration, micro-dollars per million tokens
BUDGET = 10_000_000

Surface = Literal["native", "chat", "responses", "messages"]
RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
PATHS: dict[Surface, str] = {
    "native": "/v1/generations",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
Payer = Literal["tenant", "platform", "nobody"]
_numbers = count(1)

ENDINGS: Mapping[str, tuple[str, int, int, str | None]] = {
    "stop": ("completed", 200, 200, None),
    "length": ("completed", 200, 200, None),
    "client": ("cancelled", 200, 409, "request_cancelled"),
    "disconnect": ("cancelled", 0, 0, "request_cancelled"),
    "slow_client": ("cancelled", 0, 0, "request_cancelled"),
    "revoked": ("cancelled", 403, 403, "revoked"),
    "queue_wait": ("expired", 503, 503, "queue_wait_exceeded"),
    "deadline": ("expired", 504, 504, "deadline_exceeded"),
    "engine_error": ("failed", 502, 502, "engine_error"),
    "replica_lost": ("failed", 502, 502, "replica_lost"),
    "stalled": ("failed", 502, 502, "stalled"),
    "ledger_unavailable": ("failed", 503, 503, "ledger_unavailable"),
    "coordinator_lost": ("failed", 503, 503, "coordinator_lost"),
    "shutdown": ("failed", 503, 503, "shutdown"),
    "engine_rejected": ("failed", 400, 400, "engine_rejected"),
}
"""finish reason: (status, HTTP on native paths, HTTP on compatible paths, error code); 0 where nobody reads an answer."""


async def wait_until(condition: Callable[[], Awaitable[bool]], what: str, bound_s: float = SETTLED_S) -> None:
    """Ask again until a condition holds, within a bound."""
    deadline = time.monotonic() + bound_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {bound_s} s: {what}"
        await asyncio.sleep(0.02)


def price(input_tokens: int, output_tokens: int) -> int:
    """Micro-dollars of uncached tokens, rounded up."""
    return -(-(input_tokens * PRICE_INPUT + output_tokens * PRICE_OUTPUT) // 1_000_000)


@dataclass(frozen=True)
class Shown:
    """How an ending was told to the caller. http: 0 for a stream whose headers were sent."""

    http: int
    status: str | None
    reason: str | None
    code: str | None
    text: str
    usage: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """How a generation is asked for."""

    stream: bool = True
    surface: Surface = "native"
    deadline_ms: int | None = None
    most: int = 1_000

    def native(self, prompt: str, request_id: str) -> dict[str, Any]:
        """The native body."""
        return {
            "request_id": request_id,
            "model_alias": "assistant",
            "input": prompt,
            "max_output_tokens": self.most,
            "stream": self.stream,
            "deadline_ms": self.deadline_ms,
        }

    def chat(self, prompt: str) -> dict[str, Any]:
        """The body of a chat completion."""
        return {
            "model": "assistant",
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": self.most,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }

    def messages(self, prompt: str) -> dict[str, Any]:
        """The body of Anthropic's messages."""
        return {
            "model": "assistant",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.most,
            "stream": self.stream,
        }

    def responses(self, prompt: str) -> dict[str, Any]:
        """The body of a response."""
        return {"model": "assistant", "input": prompt, "max_output_tokens": self.most, "stream": self.stream}


@dataclass(frozen=True)
class Caller:
    """A tenant with one application and one key."""

    tenant: str
    key_id: str
    secret: str


class Stage:
    """The cell under test as tenants and administrators reach it."""

    def __init__(self, cell: RunningCell) -> None:
        self.cell = cell

    # ── management ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the management API, which must succeed."""
        answer = await ask(
            self.cell.ready["admin"], f"/admin/v1/{path}", method=method, key=self.cell.ready["admin_key"], body=body
        )
        assert answer.status in (200, 201), answer.body
        return answer.json

    async def caller(self, tenant: str = "") -> Caller:
        """A new tenant, with a budget so that it has an account."""
        name = tenant or f"team-{next(_numbers)}"
        await self.admin("POST", "tenants", {"name": name})
        await self.admin("POST", f"tenants/{name}/applications", {"name": "app"})
        await self.admin("PUT", "limits", {"scope": {"tenant": name}, "spend_microusd_lifetime": BUDGET, "concurrency": 1_000})
        key = await self.admin("POST", f"tenants/{name}/applications/app/keys")
        return Caller(name, key["id"], key["secret"])

    def demo_caller(self, tenant: str = "acme") -> Caller:
        """The demonstration's tenant."""
        return Caller(tenant, "", self.cell.key(tenant))

    async def revoke(self, caller: Caller) -> None:
        """Revoke the caller's key."""
        await self.admin("DELETE", f"tenants/{caller.tenant}/applications/app/keys/{caller.key_id}")

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels; revision and pool are left out."""
        text = (await ask(self.cell.ready["metrics"], "/metrics")).body.decode()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {re.sub(r',?(?:revision|pool)="[^"]*",?', "", name).replace("{}", ""): float(value) for name, value in samples}

    async def usage(self, tenant: str) -> list[dict[str, Any]]:
        """Usage rows of a tenant by status."""
        rows: list[dict[str, Any]] = (await self.admin("GET", f"usage?tenant={tenant}&group_by=status"))["rows"]
        return rows

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(
        self, caller: Caller, script: Script | str, request_id: str, *, receive_bytes: int | None = None, **form: Any
    ) -> AbstractAsyncContextManager[Call]:
        """Send one generation. form: the fields of Form; receive_bytes: the client's receive buffer."""
        prompt, asked = script if isinstance(script, str) else script.prompt(), Form(**form)
        headers, path, body = bearer(caller.secret), "/v1/generations", asked.native(prompt, request_id)
        if asked.surface != "native":
            path, body = PATHS[asked.surface], getattr(asked, asked.surface)(prompt)
            headers |= {"idempotency-key": request_id}
            headers |= {"weir-deadline-ms": str(asked.deadline_ms)} if asked.deadline_ms else {}
        return calling(self.cell.api, path, body=body, headers=headers, receive_bytes=receive_bytes)

    async def run(self, caller: Caller, script: Script | str, request_id: str, **form: Any) -> Shown:
        """One generation to its end. form: the fields of Form."""
        async with self.call(caller, script, request_id, **form) as call:
            return await read_shown(call)

    async def refused(self, caller: Caller, prompt: str, *, most: int) -> dict[str, Any]:
        """The refusal of a request."""
        async with self.call(caller, prompt, f"refused-{next(_numbers)}", stream=False, most=most) as call:
            answer = await call.answer()
        assert answer.headers["content-type"] == "application/problem+json", answer.body
        problem: dict[str, Any] = answer.json
        return problem

    async def get(self, caller: Caller, request_id: str, action: str = "") -> Answer:
        """The record of a request; action: `/cancel`."""
        path = f"/v1/generations/{quote(request_id)}{action}"
        return await ask(self.cell.api, path, method="POST" if action else "GET", key=caller.secret)

    async def wait_status(self, caller: Caller, request_id: str, *statuses: str) -> dict[str, Any]:
        """The record, once it has one of these statuses."""
        found: dict[str, Any] = {}

        async def reached() -> bool:
            answer = await self.get(caller, request_id)
            if answer.status == 200:
                found.update(answer.json)
            return found.get("status") in statuses

        await wait_until(reached, f"{request_id} {statuses}")
        return found

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def check_ended(self, caller: Caller, request_id: str, reason: str, payer: Payer, shown: Shown | None = None) -> None:
        """GET, the management API, usage, account and holds tell this ending; so did the answer, if there was one."""
        status, _, _, code = ENDINGS[reason]
        await wait_until(lambda: self._is_posted(caller, request_id), f"{request_id} posted")
        record = await self.admin("GET", f"generations/{caller.tenant}/{request_id}")
        assert (record["status"], record["finish_reason"]) == (status, reason), record
        assert record.get("error", {}).get("code") == code
        usage = record["usage"]
        if reason != "revoked":  # the key may not ask any more
            public = (await self.get(caller, request_id)).json
            assert (public["status"], public["finish_reason"], public["usage"]) == (status, reason, usage)
            assert public.get("error", {}).get("code") == code
        if shown is not None:
            check_shown(shown, reason, usage)
        await self._check_paid(caller, status, payer, usage)

    async def _is_posted(self, caller: Caller, request_id: str) -> bool:
        record = await self.admin("GET", f"generations/{caller.tenant}/{request_id}")
        return bool(record["finish_reason"] and record["usage"]["settlement"] == "posted")

    async def _check_paid(self, caller: Caller, status: str, payer: Payer, usage: Mapping[str, Any]) -> None:
        [row] = await self.usage(caller.tenant)
        total = price(usage["input_tokens"], usage["output_tokens"])
        parts = {"tenant": (total, 0), "platform": (0, total), "nobody": (0, 0)}[payer]
        assert (row["status"], row["requests"]) == (status, 1)
        assert (row["cost_microusd"], row["platform_cost_microusd"]) == parts, (row, usage)
        tokens = (usage["input_tokens"], usage["output_tokens"]) if payer == "tenant" else (0, 0)
        assert (row["input_tokens"], row["output_tokens"]) == tokens
        assert usage["cost_microusd"] == row["cost_microusd"]
        ledger = await self.admin("GET", f"ledger?tenant={caller.tenant}")
        assert ledger["open_holds"] == 0
        spent = {account["kind"]: (account["spent"], account["held"]) for account in ledger["accounts"]}
        assert spent["spend_microusd_lifetime"] == (parts[0], 0), ledger

    async def check_quiet(self) -> None:
        """Within a bound nothing is queued, held, running or on its way to the store."""
        zero = ("weir_open_holds", "weir_requests_in_flight", "weir_live_executions", "weir_queue_entries")

        async def is_quiet() -> bool:
            seen = await self.metrics()
            busy = [name for name in (*zero, 'weir_lanes{state="taken"}') if seen.get(name, 0)]
            return not busy

        await wait_until(is_quiet, "the cell is quiet")

    async def check_serves(self, caller: Caller) -> None:
        """The next request works, once a replica is ready again."""

        async def is_ready() -> bool:
            return (await ask(self.cell.api, "/readyz")).status == 200

        await wait_until(is_ready, "a replica is ready")
        shown = await self.run(caller, Script(), f"next-{next(_numbers)}", stream=False)
        assert (shown.http, shown.reason) == (200, "stop"), shown


# ── how an answer is read ────────────────────────────────────────────────────────────────────────────────────────────


def stream_body(request_id: str, script: Script) -> dict[str, Any]:
    """What `streaming` asks for."""
    return {
        "request_id": request_id,
        "model_alias": "assistant",
        "input": script.prompt(),
        "max_output_tokens": script.tokens + 100,
        "stream": True,
    }


@asynccontextmanager
async def streaming(url: str, caller: Caller, request_id: str, script: Script) -> AsyncIterator[Call]:
    """A stream through one gateway that has shown output."""
    headers = {"authorization": f"Bearer {caller.secret}"}
    async with calling(url, "/v1/generations", body=stream_body(request_id, script), headers=headers) as call:
        assert await call.head() == 200
        async for event in call.events():
            if event.name == "output":
                break
        yield call


async def read_shown(call: Call) -> Shown:
    """Read an answer of any surface to its end."""
    if await call.head() == 200 and call.headers["content-type"].startswith("text/event-stream"):
        async for _ in call.events():
            pass
        first = call.seen[0].name
        readers = {"accepted": _native_stream, "response.created": _response_stream, "message_start": messages_stream}
        return readers.get(first, _chat_stream)(call.seen)
    answer = await call.answer()
    body = answer.json
    if body.get("object") == "response":
        return _response_shown(answer.status, body, "".join(_response_text(body)))
    if "error" in body and "message" in body["error"]:
        code = body["error"]["code"]
        record = body["error"].get("generation", {})
        return Shown(answer.status, record.get("status"), record.get("finish_reason"), code, "", None, answer.headers)
    if "choices" in body:
        choice = body["choices"][0]
        text = choice["message"]["content"]
        return Shown(answer.status, "completed", choice["finish_reason"], None, text, None, answer.headers)
    if body.get("type") == "message":
        text = "".join(block["text"] for block in body["content"])
        return Shown(answer.status, "completed", MESSAGE_REASONS[body["stop_reason"]], None, text, None, answer.headers)
    code = body["code"] if "code" in body else body.get("error", {}).get("code")
    text = body.get("output", "")
    return Shown(answer.status, body["status"], body.get("finish_reason"), code, text, body.get("usage"), answer.headers)


def _native_stream(events: list[Event]) -> Shown:
    assert [event.id for event in events] == [str(number) for number in range(len(events))]
    assert [event.name for event in events] == ["accepted", *["output"] * (len(events) - 2), "done"]
    done = events[-1].json
    text = "".join(event.json["text"] for event in events[1:-1])
    return Shown(0, done["status"], done["finish_reason"], done.get("error", {}).get("code"), text, done["usage"])


def _response_stream(events: list[Event]) -> Shown:
    assert [event.json["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event.json["type"] == event.name for event in events)
    terminal = [event.name for event in events if event.name in RESPONSE_ENDS]
    assert terminal == [events[-1].name], terminal
    text = "".join(event.json["delta"] for event in events if event.name == "response.output_text.delta")
    response = events[-1].json["response"]
    assert "".join(_response_text(response)) == text
    return _response_shown(0, response, text)


def _response_shown(http: int, response: dict[str, Any], text: str) -> Shown:
    """The finish reason is told as far as a response has it: a stop is merely completed."""
    code, incomplete = (response["error"] or {}).get("code"), response["incomplete_details"]
    ended = {"incomplete": "completed"}.get(response["status"], response["status"])
    if code is not None:
        return Shown(http, None, None, code, text)
    reason = {"max_output_tokens": "length"}.get(incomplete["reason"], incomplete["reason"]) if incomplete else "stop"
    assert response["usage"]["cost_microusd"] == price(response["usage"]["input_tokens"], response["usage"]["output_tokens"])
    return Shown(http, ended, reason, None, text)


def _response_text(response: dict[str, Any]) -> Iterator[str]:
    return (part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def _chat_stream(events: list[Event]) -> Shown:
    assert events[-1].data == "[DONE]"
    chunks = [event.json for event in events[:-1]]
    if "error" in chunks[-1]:
        return Shown(0, None, None, chunks[-1]["error"]["code"], _chat_text(chunks[:-1]))
    reason = next(chunk["choices"][0]["finish_reason"] for chunk in reversed(chunks) if chunk["choices"])
    assert chunks[-1]["usage"]["total_tokens"] > 0 and chunks[-1]["choices"] == []
    return Shown(0, "completed", reason, None, _chat_text(chunks[:-1]))


MESSAGE_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}


def messages_stream(events: list[Event]) -> Shown:
    """A stream of messages, whose shape is checked: blocks follow each other, and exactly one event ends it, the last."""
    seen = [event for event in events if event.name != "ping"]
    assert all(event.json["type"] == event.name for event in seen)
    assert [event.name for event in seen].count("message_start") == 1
    assert [index for index, event in enumerate(seen) if event.name in ("message_stop", "error")] == [len(seen) - 1]
    blocks = [event for event in seen if event.name.startswith("content_block_")]
    open_block = _block_left_open(blocks)
    deltas = [event.json["delta"] for event in blocks if event.name == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    if seen[-1].name == "error":
        return Shown(0, None, None, seen[-1].json["error"]["code"], text)
    assert open_block is None and [event.name for event in seen[len(blocks) + 1 :]] == ["message_delta", "message_stop"]
    told = seen[-2].json
    assert told["usage"]["output_tokens"] >= 0
    return Shown(0, "completed", MESSAGE_REASONS[told["delta"]["stop_reason"]], None, text)


def _block_left_open(blocks: list[Event]) -> int | None:
    """The block that a stream ended within; blocks must follow each other, numbered from 0."""
    open_block, begun = None, 0
    for event in blocks:
        index = event.json["index"]
        if event.name == "content_block_start":
            assert open_block is None and index == begun
            open_block, begun = index, begun + 1
        assert index == open_block
        if event.name == "content_block_stop":
            open_block = None
    return open_block


def _chat_text(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def check_shown(shown: Shown, reason: str, usage: Mapping[str, Any]) -> None:
    """The answer told this ending, with the table's HTTP status if its headers were not sent."""
    status, native, compatible, code = ENDINGS[reason]
    assert shown.http in (0, native, compatible) and shown.code == code, shown
    if shown.status is not None:
        assert (shown.status, shown.reason) == (status, reason), shown
    if shown.usage is not None:
        assert {**shown.usage, "settlement": "posted"} == usage
    if shown.http == 503:
        assert int(shown.headers["retry-after"]) >= 1
    if shown.http == 504:
        assert shown.headers["x-should-retry"] == "false"
