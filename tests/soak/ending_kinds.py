"""Each kind of ending by itself: how a round of requests is brought to it, and who pays.

A round begins so many requests and counts those that were told, or booked, the kind's ending; a refusal at the door that the
kind explains is no ending. An answer that differs from the table fails at once. It never waits for a moment that only time
brings, except where the moment of leaving is what varies.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from tests.e2e.ending_stage import ENDINGS, Caller, Payer, Stage, locked_store, read_shown, wait_until
from tests.e2e.running_cell import STOP_S
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import Call
from tests.e2e.surfaces import ACTIVE, Shown
from tests.soak.cell_size import repeat

LANES = 64
RECEIVE_BYTES = 4_096
PLAIN = f"""
[pool]
concurrency = {LANES}
[gateway]
early_headers_ms = 100
[engine]
probe_ms = 100
restart_backoff_ms = 100
[coordinator]
queue_wait_ms = 400
remembered_executions = 100
explained_requests = 100
"""
WAITING = PLAIN.replace("queue_wait_ms = 400", "queue_wait_ms = 4000")
"""The door learns that waiting is in vain here: a long bound leaves it room to let in."""
SMALL_BUFFERS = PLAIN.replace(
    "[gateway]", "[gateway]\nstream_buffer_bytes = 16384\nsocket_buffer_bytes = 4608\nslow_client_grace_ms = 300"
)
IMPATIENT = (
    PLAIN.replace("[engine]", "[engine]\nfirst_output_ms = 700\nidle_ms = 700")
    + "store_wait_ms = 500\ndelivery_step_tokens = 8\n"
)

LONG = Script(tokens=400, gap_ms=10)
CALM = Script(tokens=400, gap_ms=25)
BUSY = Script(tokens=400, gap_ms=200)
FLOOD = Script(tokens=20_000, word=" " + "w" * 2_000)


class Arena:
    """One kind's requests on a cell. reached: how many ended so; attempts: how many were begun."""

    def __init__(self, stage: Stage, engine: ScriptedEngine, kind: "Kind", caller: Caller) -> None:
        self.stage = stage
        self.engine = engine
        self.kind = kind
        self.caller = caller
        self.chance = random.Random(kind.reason)
        self.reached = 0
        self.attempts = 0
        self._numbers = count(1)

    async def reach(self, times: int) -> None:
        """Bring so many more requests to this ending, by at most three attempts for each."""
        goal, attempts_max = self.reached + times, self.attempts + 3 * times
        while self.reached < goal:
            size = min(goal - self.reached, self.kind.round_max)
            self.attempts += size
            assert self.attempts <= attempts_max, (self.reached, self.attempts)
            await self.kind.round(self, size)

    def call(self, script: Script, caller: Caller | None = None, **form: Any) -> AbstractAsyncContextManager[Call]:
        """Begin one generation with an id of its own; what `form` leaves open is drawn."""
        surface, stream = self.chance.choice(ACTIVE), self.chance.random() < 0.5
        drawn = {"request_id": self.new_id(), "surface": surface, "stream": stream}
        return self.stage.call(caller or self.caller, script, **{**drawn, **form})

    def new_id(self) -> str:
        """A request id that was not used before."""
        return f"every-{next(self._numbers)}"

    async def run(self, script: Script, caller: Caller | None = None, **form: Any) -> None:
        """One generation to its end, counted."""
        async with self.call(script, caller, **form) as call:
            self.count(await read_shown(call))

    def count(self, shown: Shown) -> None:
        """Count an answer that told this kind's ending; any other must be a refusal that the kind explains."""
        status, native, compatible, code = ENDINGS[self.kind.reason]
        if shown.http and shown.reason is None:  # a refusal at the door names no reason
            assert shown.code in self.kind.refusals, shown
            return
        assert shown.http in (0, native, compatible) and shown.code == code, shown
        assert (shown.status, shown.reason) in ((status, self.kind.reason), (None, None)), shown
        self.reached += 1

    async def booked(self) -> int:
        """How many requests of the whole cell ended for this reason so far."""
        label = f'finish_reason="{self.kind.reason}"'
        seen = await self.stage.metrics()
        return int(sum(value for name, value in seen.items() if name.startswith("weir_requests_total{") and label in name))

    async def holds(self, requests: int) -> bool:
        """Whether so many run at the engine or wait in the queue."""
        return self.engine.running + (await self.stage.metrics()).get("weir_queue_entries", 0) == requests

    async def wait_running(self, generations: int) -> None:
        """Wait until the engine runs so many."""

        async def is_reached() -> bool:
            return self.engine.running == generations

        await wait_until(is_reached, f"{generations} generations run")

    async def wait_ready(self) -> None:
        """Wait until the replica takes work in full: one that failed is first asked for one thing at a time."""
        other = self.stage.demo_caller()

        async def is_ready() -> bool:
            [replica] = (await self.stage.admin("GET", "replicas"))["replicas"]
            if replica["state"] == "half_open":
                await self.stage.run(other, Script(), self.new_id(), stream=False)
            return bool(replica["state"] == "ready")

        await wait_until(is_ready, "the replica is ready")


Round = Callable[[Arena, int], Awaitable[None]]


@dataclass(frozen=True)
class Kind:
    """How one ending is reached. round_max: the most at once; refusals: what the door may say to some of a round."""

    reason: str
    payer: Payer
    round: Round
    config: str = PLAIN
    round_max: int = 1_000
    refusals: tuple[str, ...] = ()


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def steadily(script: Script, **form: Any) -> Round:
    """One after another on some connections at once."""

    async def run_round(arena: Arena, size: int) -> None:
        await repeat(size, lambda _: arena.run(script, **form))

    return run_round


def together(script: Script) -> Round:
    """All at once, for they end at once: each makes the replica suspect, which refuses others until it is tried again."""

    async def run_round(arena: Arena, size: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(size):
                tasks.create_task(arena.run(script))
        await arena.wait_ready()

    return run_round


async def cancelled(arena: Arena, size: int) -> None:
    """Cancelled by id while it runs, which is before or after its first output."""

    async def cancel(_: int) -> None:
        stage, caller, request_id = arena.stage, arena.caller, arena.new_id()
        async with arena.call(LONG, request_id=request_id) as call:
            await stage.wait_status(caller, request_id, "running")
            answer = await stage.get(caller, request_id, "/cancel")
            assert (answer.status, answer.json["finish_reason"]) == (200, "client"), answer.body
            arena.count(await read_shown(call))

    await repeat(size, cancel)


async def disconnected(arena: Arena, size: int) -> None:
    """Clients that leave at random moments; one that leaves before admission is no ending."""

    async def leave(_: int) -> None:
        async with arena.call(LONG):
            await asyncio.sleep(arena.chance.uniform(0, 0.3))  # the moment of leaving, which is what varies

    before = await arena.booked()
    await repeat(size, leave)
    await arena.stage.check_quiet()
    arena.reached += await arena.booked() - before


async def not_reading(arena: Arena, size: int) -> None:
    """Clients that read no more than the headers; each is cut off."""
    begun, over = asyncio.Barrier(size + 1), asyncio.Event()

    async def be_slow() -> None:
        async with arena.call(FLOOD, stream=True, receive_bytes=RECEIVE_BYTES, most=30_000) as call:
            assert await call.head() == 200
            await begun.wait()
            await over.wait()
            with pytest.raises((ConnectionError, EOFError)):
                raise AssertionError(await read_shown(call))

    before = await arena.booked()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(size):
            tasks.create_task(be_slow())
        await begun.wait()
        await arena.wait_running(0)
        over.set()
    await arena.stage.check_quiet()
    arena.reached += await arena.booked() - before


async def revoked(arena: Arena, size: int) -> None:
    """A key of the round's own, revoked while all of its requests generate."""
    tenant = arena.caller.tenant
    key = await arena.stage.admin("POST", f"tenants/{tenant}/applications/app/keys")
    caller = Caller(tenant, key["id"], key["secret"])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(size):
            tasks.create_task(arena.run(CALM, caller))
        await arena.wait_running(size)
        await arena.stage.revoke(caller)


def queued(deadline_ms: int | None) -> Round:
    """All at once while every lane is taken, until what bounds their waiting ends them."""

    async def run_round(arena: Arena, size: int) -> None:
        async with full_lanes(arena), asyncio.TaskGroup() as tasks:
            for _ in range(size):
                tasks.create_task(arena.run(Script(), deadline_ms=deadline_ms))

    return run_round


@asynccontextmanager
async def full_lanes(arena: Arena) -> AsyncIterator[None]:
    """Every lane is taken while the block runs. Quick answers before it keep the predicted wait short, so the door lets in."""
    other, stage = arena.stage.demo_caller(), arena.stage
    for _ in range(48):
        await stage.run(other, Script(), f"quick-{arena.chance.getrandbits(64)}", stream=False)
    async with AsyncExitStack() as blockers:
        for _ in range(LANES):
            await blockers.enter_async_context(stage.call(other, BUSY, f"blocker-{arena.chance.getrandbits(64)}"))
        await arena.wait_running(LANES)
        yield
    await stage.check_quiet()


async def not_booked(arena: Arena, size: int) -> None:
    """Streams that run past what is booked ahead while the store cannot be written; then every record lands."""

    async def read(call: Call) -> None:
        arena.count(await read_shown(call))

    async with AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(arena.call(CALM, stream=True)) for _ in range(size)]
        for call in calls:
            await call.output_begun()
        with locked_store(arena.stage):
            async with asyncio.TaskGroup() as tasks:
                for call in calls:
                    tasks.create_task(read(call))
    await arena.stage.check_quiet()


async def shut_down(arena: Arena, size: int) -> None:
    """SIGTERM while some run and all others wait; the process is gone afterwards."""
    process = arena.stage.cell.process
    async with asyncio.TaskGroup() as tasks:
        for _ in range(size):
            tasks.create_task(arena.run(BUSY))
        await wait_until(lambda: arena.holds(size), f"{size} run or wait")
        process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, STOP_S)


SHUTDOWN = Kind("shutdown", "platform", shut_down)
KINDS: dict[str, Kind] = {
    "stop": Kind("stop", "tenant", steadily(Script())),
    "length": Kind("length", "tenant", steadily(Script(end="length"))),
    "engine_error": Kind("engine_error", "platform", steadily(Script(end="error", gap_ms=5))),
    "engine_rejected": Kind("engine_rejected", "nobody", steadily(Script(status=400))),
    "replica_lost": Kind("replica_lost", "platform", together(Script(end="reset", gap_ms=100)), PLAIN, LANES, ("no_capacity",)),
    "stalled": Kind("stalled", "platform", together(Script(end="stall")), IMPATIENT, LANES, ("no_capacity",)),
    "client": Kind("client", "tenant", cancelled),
    "disconnect": Kind("disconnect", "tenant", disconnected),
    "slow_client": Kind("slow_client", "tenant", not_reading, SMALL_BUFFERS, 32),
    "revoked": Kind("revoked", "tenant", revoked, round_max=LANES),
    "queue_wait": Kind("queue_wait", "nobody", queued(None), WAITING, 50, ("queue_wait_exceeded",)),
    "deadline_queued": Kind(
        "deadline",
        "nobody",
        queued(250),
        WAITING,
        40,
        ("deadline_infeasible", "deadline_unmeetable_now", "queue_wait_exceeded"),
    ),
    "deadline": Kind(
        "deadline", "tenant", steadily(LONG, deadline_ms=150), refusals=("deadline_infeasible", "deadline_unmeetable_now")
    ),
    "ledger_unavailable": Kind("ledger_unavailable", "platform", not_booked, IMPATIENT, LANES),
}
