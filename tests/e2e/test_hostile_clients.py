"""Odd and hostile clients on every surface: whatever their packets look like, one whole answer, or one refusal that says why.

Who leaves is in `test_disconnects.py`, who does not read in `test_slow_client.py`, and what no surface is asked for (garbage,
endless headers) in `test_bad_input.py`. Requests here are written byte by byte, and answers read with their framing checked.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest
from tests.e2e.ending_stage import Caller, Stage, read_shown, wait_until
from tests.e2e.scripted_engine import Script, ScriptedEngine
from tests.e2e.sse_client import WAIT_S, Call, bearer, connected, request_bytes
from tests.e2e.surfaces import ACTIVE, ANSWERS, SURFACES, Asked, Shown
from tests.event_streams import events_of

BODY_BYTES_MAX = 20_000
CONFIG = f"""
[pool]
concurrency = 4
[engine]
probe_ms = 20
restart_backoff_ms = 1
[gateway]
body_bytes_max = {BODY_BYTES_MAX}
body_wait_ms = 5000
early_headers_ms = 300
keep_alive_ms = 50
"""
QUICK = Script(tokens=5, word=" 𝄞é\n")
SLOW = Script(tokens=400, gap_ms=25)
SILENT = Script(first_ms=20_000)
_numbers = count(1)


# ── what is sent and read ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Request:
    """One generation of a surface as bytes. id: its request id."""

    surface: str
    id: str
    raw: bytes

    @property
    def head(self) -> bytes:
        """All before the body."""
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        """The body."""
        return self.raw.partition(b"\r\n\r\n")[2]

    def framed(self, line: str, body: bytes) -> bytes:
        """The same with this header line instead of its length, and this body."""
        length = f"content-length: {len(self.body)}".encode()
        assert self.head.count(length) == 1
        return self.head.replace(length, line.encode()) + b"\r\n\r\n" + body


def request_of(caller: Caller, surface: str, script: Script = QUICK, *, close: bool = True, **asked: Any) -> Request:
    """A generation. close: the connection ends with its answer."""
    described = SURFACES[surface]
    form = Asked(script.prompt(), f"it-{next(_numbers)}", **asked)
    headers = bearer(caller.secret, described.headers(form)) | ({"connection": "close"} if close else {})
    return Request(surface, form.request_id, request_bytes("POST", described.path, described.body(form), headers))


async def converse(stage: Stage, packets: Iterable[bytes], *, read_bytes: int = 65_536) -> bytes:
    """Send these packets on one connection, and read until it closes, so many bytes at a time."""
    received = b""
    async with connected(stage.cell.api, receive_bytes=None if read_bytes > 1 else 2_048) as call:
        async with asyncio.timeout(2 * WAIT_S):
            for packet in packets:
                call.writer.write(packet)
                await call.writer.drain()
                await asyncio.sleep(0)
            while piece := await call.reader.read(read_bytes):  # bounded by the time
                received += piece
    return received


def shown_in(surface: str, raw: bytes) -> Shown:
    """The one answer in these bytes, and nothing behind it."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(headers) == len(lines), "no header comes twice"
    body = rest if "transfer-encoding" not in headers else unchunked(rest)
    assert "content-length" not in headers or len(body) == int(headers["content-length"])
    status, described = int(first.split(" ")[1]), SURFACES[surface]
    if headers["content-type"].startswith("text/event-stream"):
        return described.shown_stream(events_of(body))
    return described.shown_whole(status, headers, msgspec.json.decode(body))


def unchunked(content: bytes) -> bytes:
    """A chunked body, which must be whole and the last thing that there is."""
    body = b""
    while True:  # bounded by the content
        size, _, content = content.partition(b"\r\n")
        length = int(size, 16)
        body, end, content = body + content[:length], content[length : length + 2], content[length + 2 :]
        assert end == b"\r\n"
        if length == 0:
            assert content == b""
            return body


def check_whole(shown: Shown) -> None:
    """The answer of QUICK."""
    assert (shown.text, shown.reason, shown.code) == (QUICK.text, "stop", None), shown


def one_by_one(content: bytes) -> list[bytes]:
    """Every byte in a packet of its own."""
    return [content[at : at + 1] for at in range(len(content))]


def chunked(content: bytes, size: int) -> bytes:
    """A chunked body in chunks of so many bytes, with an extension and a trailer."""
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return b"".join(b"%x;odd=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nx-trailer: 1\r\n\r\n"


# ── packets and framing ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_requests_and_answers_in_packets_of_one_byte(stage: Stage, surface: str, stream: bool) -> None:
    """Protects slow but honest clients: written and read a byte at a time, an answer is whole and settled once."""
    caller = await stage.caller()
    asked = request_of(caller, surface, stream=stream)
    check_whole(shown_in(surface, await converse(stage, one_by_one(asked.raw), read_bytes=1)))
    await stage.check_ended(caller, asked.id, "stop", "tenant")


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_a_body_in_chunks_is_read(stage: Stage, surface: str, stream: bool) -> None:
    """Protects clients that stream their body: chunks of any size, with extensions and trailers, in packets of one byte."""
    caller = await stage.caller()
    for size in (1, 7, 10_000):
        asked = request_of(caller, surface, stream=stream)
        raw = asked.framed("transfer-encoding: chunked", chunked(asked.body, size))
        packets = one_by_one(raw) if size == 7 else [raw]
        check_whole(shown_in(surface, await converse(stage, packets)))


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_http_1_0_is_answered_without_chunks(stage: Stage, surface: str, stream: bool) -> None:
    """Protects proxies that speak HTTP/1.0: the end of the connection ends the body, and its events are whole."""
    caller = await stage.caller()
    raw = await converse(stage, [request_of(caller, surface, stream=stream).raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1)])
    assert b"transfer-encoding" not in raw.partition(b"\r\n\r\n")[0].lower()
    check_whole(shown_in(surface, raw))


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_a_body_is_asked_for_and_refused_before_it_is_sent(stage: Stage, surface: str, stream: bool) -> None:
    """Protects `Expect: 100-continue`: welcome bodies are asked for, one too large is refused in the surface's shape."""
    caller = await stage.caller()
    asked = request_of(caller, surface, stream=stream)
    async with connected(stage.cell.api) as call, asyncio.timeout(WAIT_S):
        call.writer.write(asked.head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert (await call.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        call.writer.write(asked.body)
        check_whole(shown_in(surface, await call.reader.read(-1)))
    async with connected(stage.cell.api) as call, asyncio.timeout(WAIT_S):
        call.writer.write(asked.framed(f"content-length: {BODY_BYTES_MAX + 1}\r\nexpect: 100-continue", b""))
        refused = shown_in(surface, await call.reader.read(-1))
    assert (refused.http, refused.code) == (413, "request_too_large")


@pytest.mark.parametrize("surface", ACTIVE)
async def test_a_body_above_the_bound_is_refused_in_the_surfaces_shape(stage: Stage, surface: str) -> None:
    """Protects memory: declared, or in chunks that grow beyond the bound, it is refused, and leaves nothing."""
    caller, filler = await stage.caller(), b" " * BODY_BYTES_MAX
    asked = request_of(caller, surface)
    size = len(asked.body) + len(filler)
    for raw in (
        asked.framed(f"content-length: {size}", asked.body + filler),
        asked.framed("transfer-encoding: chunked", chunked(asked.body + filler, 999)),
    ):
        refused = shown_in(surface, await converse(stage, [raw]))
        assert (refused.http, refused.code) == (413, "request_too_large")
    assert await stage.usage(caller.tenant) == []


@pytest.mark.parametrize("surface", ACTIVE)
async def test_a_flood_of_headers_is_refused(stage: Stage, surface: str) -> None:
    """Protects memory: many headers, or a huge one, are one refusal, and the connection is closed."""
    caller = await stage.caller()
    asked = request_of(caller, surface)
    floods = [b"".join(b"\r\nx-%d: y" % number for number in range(10_000)), b"\r\nx-huge: " + b"y" * 100_000]
    for flood in floods:
        raw = await converse(stage, [asked.head, flood, b"\r\n\r\n", asked.body])
        refused = shown_in("native", raw)  # of what is no request yet, the surface is not known
        assert (refused.http, refused.code) == (413, "request_too_large")


# ── one connection, many requests ────────────────────────────────────────────────────────────────────────────────────


async def next_on(call: Call, asked: Request) -> Call:
    """Send a request on a connection whose former answer was read; its own answer is to be read."""
    call.writer.write(asked.raw)
    await call.writer.drain()
    return Call(call.reader, call.writer, asked.surface)


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_a_second_request_in_the_same_packet_is_answered_behind_the_first(
    stage: Stage, surface: str, stream: bool
) -> None:
    """Protects pipelining: two whole answers in order, of whatever surfaces, streamed or not."""
    caller = await stage.caller()
    for other, streamed in ANSWERS:
        first = request_of(caller, surface, stream=stream, close=False)
        second = request_of(caller, other, stream=streamed, close=False)
        async with connected(stage.cell.api) as call:
            call.writer.write(first.raw + second.raw)
            for asked in (first, second):
                answer = Call(call.reader, call.writer, asked.surface)
                check_whole(await read_shown(answer))
                assert answer.headers[SURFACES[asked.surface].id_header] == asked.id


ENDINGS: dict[str, tuple[Script, str | None]] = {
    "completed": (QUICK, None),
    "failed by the engine": (Script(status=500), "engine_error"),
    "failed in the middle": (Script(end="error", gap_ms=20), "engine_error"),
    "cut in the middle": (Script(end="cut", gap_ms=20), "replica_lost"),
    "refused by the engine": (Script(status=400), "engine_rejected"),
    "expired": (SILENT, "deadline_exceeded"),
    "cancelled": (SLOW, "request_cancelled"),
    "unknown alias": (QUICK, "unknown_alias"),
    "wrong body": (QUICK, "invalid_request"),
    "wrong key": (QUICK, "unauthenticated"),
}


@pytest.mark.parametrize(("surface", "stream"), ANSWERS)
async def test_a_connection_serves_on_after_every_ending(stage: Stage, surface: str, stream: bool) -> None:
    """Protects kept-alive connections: each ending is framed whole, so the next answer is the next request's."""
    caller = await stage.caller()
    async with connected(stage.cell.api) as link:
        for name, (script, code) in ENDINGS.items():
            await wait_serving(stage)
            deadline_ms = 200 if name == "expired" else None
            asked = request_of(caller, surface, script, stream=stream, close=False, deadline_ms=deadline_ms)
            answer = await next_on(link, broken(asked, name))
            if name == "cancelled":
                await stage.wait_status(caller, asked.id, "running")
                await stage.get(caller, asked.id, "/cancel")
            shown = await read_shown(answer)
            native = surface == "native" and name == "cancelled"
            assert shown.code == code or (native and shown.status == "cancelled"), (name, shown)
            assert answer.headers["x-request-id"] == answer.headers["request-id"] != ""
            await wait_serving(stage)
            after = await next_on(link, request_of(caller, surface, stream=not stream, close=False))
            check_whole(await read_shown(after))
    await stage.check_quiet()


def broken(asked: Request, name: str) -> Request:
    """The request with what is wrong in it, of the same length."""
    raw = asked.raw
    match name:
        case "unknown alias":
            raw = raw.replace(b'"assistant"', b'"assistent"')
        case "wrong body":
            raw = raw[:-1] + b"]"
        case "wrong key":
            raw = raw.replace(b"authorization: Bearer ", b"authorization: Broken ")
    return Request(asked.surface, asked.id, raw)


async def wait_serving(stage: Stage) -> None:
    """Wait until a generation ends well: a replica that failed is ready again."""

    async def is_serving() -> bool:
        shown = await stage.run(stage.demo_caller(), Script(), f"serves-{next(_numbers)}", stream=False)
        return shown.reason == "stop"

    await wait_until(is_serving, "a replica serves")


# ── a wait before the first token ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("surface", ACTIVE)
async def test_a_silent_stream_shows_that_it_lives(stage: Stage, surface: str) -> None:
    """Protects streams from idle time-outs on their way: accepted at once, comments before the first token and between two."""
    caller, script = await stage.caller(), Script(tokens=2, first_ms=900, gap_ms=900)
    async with stage.call(caller, script, "it", surface=surface) as call:
        seen: list[int] = []
        async for event in call.events():
            if SURFACES[surface].text_in(event):
                seen.append(call.parsed.comments)
    pings = [event for event in call.seen if event.name == "ping"]
    assert len(seen) == 2 and ((seen[0] >= 2 and seen[1] >= seen[0] + 2) or len(pings) >= 4), (seen, call.seen)
    assert SURFACES[surface].opening(call.seen)
    await stage.check_ended(caller, "it", "stop", "tenant", SURFACES[surface].shown_stream(call.seen))


@pytest.mark.parametrize("surface", ["native", "messages"])
async def test_a_model_that_reasons_shows_that_it_lives(stage: Stage, surface: str) -> None:
    """Protects streams from idle time-outs where reasoning is not shown, and the time to a first token that somebody saw."""
    thought = tuple({"delta": {"reasoning_content": "hm"}} for _ in range(4))
    caller, script = await stage.caller(), Script(tokens=5, gap_ms=300, choices=(*thought, {"delta": {"content": "so"}}))
    async with stage.call(caller, script, "it", surface=surface) as call:
        async for _ in call.events():
            pass
    pings = sum(event.name == "ping" for event in call.seen) + call.parsed.comments
    shown = SURFACES[surface].shown_stream(call.seen)
    assert pings >= 3 and shown.text == "so"
    await stage.check_ended(caller, "it", "stop", "tenant", shown)
    assert (await stage.get(caller, "it")).json["timing"]["ttft_ms"] > 1_000


@asynccontextmanager
async def leaving_upload(stage: Stage, caller: Caller, surface: str) -> AsyncIterator[Call]:
    """A connection on which half of a request was sent."""
    asked = request_of(caller, surface)
    async with connected(stage.cell.api) as call:
        call.writer.write(asked.raw[: -len(asked.body) // 2])
        await call.writer.drain()
        yield call


@pytest.mark.parametrize("how", [Call.leave, Call.half_close, Call.reset])
@pytest.mark.parametrize("surface", ACTIVE)
async def test_leaving_while_the_request_is_sent(stage: Stage, engine: ScriptedEngine, surface: str, how: Any) -> None:
    """Protects the cell from half of a request: nothing is admitted, however its client leaves, and the next one is served."""
    caller, started = await stage.caller(), engine.started
    async with leaving_upload(stage, caller, surface) as call:
        how(call)
    await stage.check_quiet()
    assert await stage.usage(caller.tenant) == [] and engine.started == started
    await wait_serving(stage)


async def test_other_surfaces_go_on_beside_one_that_floods(stage: Stage) -> None:
    """Protects every surface from the others' clients: floods on one delay and change no answer on another."""
    caller, flood = await stage.caller(), Script(tokens=3_000, word=" " + "w" * 200)
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(stage.run(caller, flood, f"flood-{name}", surface=name, most=5_000)) for name in ACTIVE[:2]]
        for number, (name, stream) in enumerate(ANSWERS):
            shown = await stage.run(caller, QUICK, f"beside-{number}", surface=name, stream=stream)
            check_whole(shown)
    assert [run.result().text for run in runs] == [flood.text] * len(runs)
