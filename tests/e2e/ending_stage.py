"""A running cell in front of an engine, and everything that must agree about how a request ended.

`Stage.check_ended` is the table of endings as an assertion: the answer, GET, the management API, the usage rows, the account
and the open holds tell the same end, and the payer is the table's. Each test calls as a tenant of its own, so sums are its own.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal
from urllib.parse import quote

from tests.e2e.running_cell import RunningCell
from tests.e2e.scripted_engine import Script
from tests.e2e.sse_client import Answer, Call, ask, bearer, calling
from tests.e2e.surfaces import SURFACES, Asked, Shown

SETTLED_S = 10.0
PRICE_INPUT, PRICE_OUTPUT = 200_000, 600_000  # of the demonstration, micro-dollars per million tokens
BUDGET = 10_000_000

Surface = str
"""A name in `SURFACES`."""
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

    @asynccontextmanager
    async def call(
        self, caller: Caller, script: Script | str, request_id: str, *, receive_bytes: int | None = None, **form: Any
    ) -> AsyncIterator[Call]:
        """Send one generation. form: the fields of Asked, and the surface; receive_bytes: the client's receive buffer."""
        surface = SURFACES[form.pop("surface", "native")]
        asked = Asked(script if isinstance(script, str) else script.prompt(), request_id, **form)
        headers, body = bearer(caller.secret, surface.headers(asked)), surface.body(asked)
        async with calling(self.cell.api, surface.path, body=body, headers=headers, receive_bytes=receive_bytes) as call:
            call.surface = surface.name
            yield call

    async def run(self, caller: Caller, script: Script | str, request_id: str, **form: Any) -> Shown:
        """One generation to its end. form: the fields of Asked, and the surface."""
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


@contextmanager
def locked_store(stage: Stage) -> Iterator[None]:
    """Another process has the database's write lock while the block runs: no write of the cell gets through."""
    with closing(sqlite3.connect(stage.cell.state / "weir.sqlite3", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            database.execute("ROLLBACK")


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
    surface = SURFACES[call.surface]
    if await call.head() == 200 and call.headers["content-type"].startswith("text/event-stream"):
        async for _ in call.events():
            pass
        return surface.shown_stream(call.seen)
    answer = await call.answer()
    return surface.shown_whole(answer.status, answer.headers, answer.json)


def check_shown(shown: Shown, reason: str, usage: Mapping[str, Any]) -> None:
    """The answer told this ending, with the table's HTTP status if its headers were not sent."""
    status, native, compatible, code = ENDINGS[reason]
    assert shown.http in (0, native, compatible) and shown.code == code, shown
    if shown.status is not None:
        assert (shown.status, shown.reason) == (status, reason), shown
    if shown.usage is not None:
        told = {**shown.usage, "settlement": "posted"}
        assert told == {name: usage[name] for name in told}, (shown, usage)
    if shown.http == 503:
        assert int(shown.headers["retry-after"]) >= 1
    if shown.http == 504:
        assert shown.headers["x-should-retry"] == "false"
