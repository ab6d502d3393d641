"""What an engine's network does to its stream never shows: on every surface the same text, one terminal event, one settlement.

The stream towards us is cut at every byte, comes in packets of one byte, with every line end, with comments, in giant events,
and with many events in a packet. The streams towards clients are read by a strict parser (`tests/event_streams.py`).
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest
from tests.e2e.ending_stage import Caller, Stage, price, wait_until
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import WAIT_S
from tests.e2e.surfaces import ANSWERS, Shown
from tests.soak.cell_size import FULL

CONFIG = """
[pool]
concurrency = 4
[engine]
probe_ms = 5
restart_backoff_ms = 1
[gateway]
early_headers_ms = 500
[coordinator]
retries_min = 0
retry_percent = 0
group_ms = 1
"""
"""A replica that lost a request is asked again at once; there is no other one to retry on, so none is tried."""

_numbers = count(1)
HOSTILE = '\r\n\r\ndata: [DONE]\r\n\n\u2028\u2029\x85\x00\x1b"\\u000a é 𝄞👩‍👩‍👧 \ufeff event: done'
"""A text that looks like the framing around it, with every kind of line end and characters of 1 to 4 bytes."""


# ── one stream, written in many ways ─────────────────────────────────────────────────────────────────────────────────


FRAMINGS = {
    "one byte per packet": Script(packet=1),
    "seven bytes per packet": Script(packet=7, word=HOSTILE),
    "CRLF": Script(eol="\r\n"),
    "CR": Script(eol="\r"),
    "CRLF, one byte per packet": Script(eol="\r\n", packet=1, tokens=2),
    "comments": Script(comments=True),
    "comments, CRLF, one byte per packet": Script(comments=True, eol="\r\n", packet=1, tokens=2),
    "several events per packet": Script(tokens=200, packet=10_000_000),
    "giant events": Script(padding=1_000_000, tokens=2),
    "giant text": Script(word="\u00e9\n" * 200_000, tokens=1),
    "hostile text": Script(word=HOSTILE, tokens=3),
    "hostile text, one byte per packet": Script(word=HOSTILE, tokens=2, packet=1),
    "no output": Script(tokens=0),
    "empty texts": Script(word="", tokens=3),
}


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
@pytest.mark.parametrize("name", FRAMINGS)
async def test_any_framing_is_the_same_answer(stage: Stage, name: str, surface: str, stream: bool) -> None:
    """Protects output: however an engine's bytes come, each surface shows its text, byte for byte, and settles once."""
    script, caller = FRAMINGS[name], await stage.caller()
    await trusted(stage)
    shown = await stage.run(caller, script, "it", surface=surface, stream=stream, most=100_000)
    assert (shown.text, shown.reason) == (script.text, "stop"), shown
    await stage.check_ended(caller, "it", "stop", "tenant", shown)


BROKEN = {
    "event above the bound": Script(padding=1_100_000),
    "bytes that are no UTF-8": Script(end="not_utf8"),
    "half of a surrogate pair": Script(end="surrogate"),
    "half of an event": Script(end="cut"),
}


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_read_is_one_failure(stage: Stage, name: str, surface: str, stream: bool) -> None:
    """Protects clients from half an answer that looks whole: a failure in the surface's own shape, at the platform's cost."""
    script, caller = BROKEN[name], await stage.caller()
    await trusted(stage)
    shown = await stage.run(caller, script, "it", surface=surface, stream=stream)
    reason = "replica_lost" if script.end == "cut" else "engine_error"
    assert shown.code == reason and script.text.startswith(shown.text)
    await stage.check_ended(caller, "it", reason, "platform", shown)


# ── cut at every byte ────────────────────────────────────────────────────────────────────────────────────────────────

SHORT = Script(tokens=2, word=" 🌊", usage=(10, 2))
COST = price(10, 2)


@dataclass(frozen=True)
class Course:
    """The bytes of SHORT as the engine writes them. whole_at: from there on everything is known, usage included."""

    size: int
    whole_at: int


async def course_of(engine: ScriptedEngine, surface: str) -> Course:
    """Asked of the engine itself, so that it is what goes over the wire: only completions are asked for without a chat."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": SHORT.prompt()}]}
    is_chat = surface != "completions"
    path, asked = ("/v1/chat/completions", chat) if is_chat else ("/v1/completions", {"prompt": SHORT.prompt()})
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    body = msgspec.json.encode(asked)
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
    raw = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), WAIT_S)
    writer.close()
    await writer.wait_closed()
    return Course(len(raw), raw.index(b"\n\n", raw.index(b'"finish_reason":"stop"')) + 2)


async def trusted(stage: Stage) -> None:
    """Wait until the replica is trusted in full again, which generations that end well make it."""

    async def is_trusted() -> bool:
        await stage.run(stage.demo_caller(), Script(), f"mend-{next(_numbers)}", stream=False)
        [replica] = (await stage.admin("GET", "replicas"))["replicas"]
        return bool(replica["state"] == "ready")

    await wait_until(is_trusted, "the replica is trusted", 60.0)


async def run_admitted(stage: Stage, caller: Caller, script: Script, request_id: str, **form: Any) -> Shown:
    """One generation, asked for until a replica is ready: what is refused before that leaves nothing."""
    async with asyncio.timeout(WAIT_S):
        while True:  # bounded by the time
            shown = await stage.run(caller, script, request_id, **form)
            if shown.code != "no_capacity":
                return shown
            await asyncio.sleep(0.003)


def check_cut(shown: Shown, script: Script, course: Course, stream: bool) -> str:
    """A cut that nobody can miss, told as the table says; its reason."""
    assert script.cut_at is not None
    may_be_whole = script.cut_at >= course.whole_at
    reason = "stop" if shown.code is None else "replica_lost"
    assert shown.code in (None, "replica_lost"), shown
    assert reason == "replica_lost" or may_be_whole
    if may_be_whole and not script.cut_resets:  # a RST may destroy what was not read yet
        assert reason == "stop", shown
    if reason == "stop":
        assert shown.text == SHORT.text and shown.http in (0, 200)
    else:
        assert SHORT.text.startswith(shown.text) and (stream or not shown.text)
        assert shown.http in ((0, 502) if stream else (502,))
    return reason


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=FULL)], ids=["shared", "each"])
@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_a_stream_that_is_cut_at_any_byte_is_told(
    stage: Stage, engine: ScriptedEngine, surface: str, stream: bool, full: bool
) -> None:
    """Protects clients from a bare cut and tenants from its cost: each cut is one failure in the surface's shape, settled once.

    shared: every byte is cut on one of the surfaces, in turn; each: on each of them.
    """
    course, caller = await course_of(engine, surface), await stage.caller()
    await trusted(stage)
    turn, turns = (0, 1) if full else (ANSWERS.index((surface, stream)), len(ANSWERS))
    reasons: Counter[str] = Counter()
    for cut_at in range(turn, course.size, turns):
        script = msgspec.structs.replace(SHORT, cut_at=cut_at, cut_resets=cut_at // turns % 2 == 1)
        shown = await run_admitted(stage, caller, script, f"cut-{cut_at}", surface=surface, stream=stream)
        reasons[check_cut(shown, script, course, stream)] += 1
        # One that ends well shows that the replica is sound, else its breaker opens.
        shown = await run_admitted(stage, caller, SHORT, f"next-{cut_at}", surface=surface, stream=stream)
        assert (shown.text, shown.reason) == (SHORT.text, "stop")
        reasons["stop"] += 1
    await stage.check_quiet()
    rows = {row["status"]: row for row in await stage.usage(caller.tenant)}
    assert {status: row["requests"] for status, row in rows.items()} == {
        "completed": reasons["stop"],
        "failed": reasons["replica_lost"],
    }
    assert rows["completed"]["cost_microusd"] == COST * reasons["stop"] and rows["failed"]["cost_microusd"] == 0
    ledger = await stage.admin("GET", f"ledger?tenant={caller.tenant}")
    [spent] = [(row["spent"], row["held"]) for row in ledger["accounts"] if row["kind"] == "spend_microusd_lifetime"]
    assert spent == (COST * reasons["stop"], 0) and ledger["open_holds"] == 0
