"""A small OpenAI-compatible engine for tests, on a free port and a thread of its own; the prompt is the script it follows.

So one engine serves any number of different endings at once. It speaks vLLM's dialect: counts of tokens on every chunk, and
`/tokenize`. It remembers how many generations run and how many were left by their client.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self

import msgspec

WAIT_S = 30.0
MODEL = "scripted"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ECHO = "the engine quotes: "

Finish = Literal[
    "stop",
    "length",
    "tool_calls",
    "content_filter",
    "stall",
    "cut",
    "reset",
    "error",
    "garbage",
    "not_utf8",
    "surrogate",
    "unfinished",
]
GENERATING = (b"/v1/chat/completions", b"/v1/completions")
_BROKEN_TEXTS = {"garbage": b'{"choices": [}', "not_utf8": b"\xff\xc3", "surrogate": b"\\ud83d"}


class Script(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one generation does. usage: [input, output] in place of the truth; counts false: no counts anywhere.

    status other than 200 refuses, quoting the prompt as real engines do. cut ends the answer in the middle of HTTP, unfinished
    ends it properly without a finish reason. hold_at: after so many tokens wait for the engine's `release`, whether or not the
    client is still there. last_usage: the usage object of the last chunk, as it is. choices: what the choice of each chunk says
    in place of the word; there are as many tokens. deltas: sent after the words, each as it is and as one token. arguments: of
    a tool call behind them.

    How it is written: eol ends lines; comments stand between and before them; padding: bytes of a field that nobody knows, in
    each event; packet: so many bytes at a time, 0 for whole events; cut_at: after so many bytes of the answer, head included,
    the connection is closed, with a RST where cut_resets.
    """

    tokens: int = 4
    end: Finish = "stop"
    status: int = 200
    first_ms: int = 0
    gap_ms: int = 0
    word: str = " word"
    usage: tuple[int, int] | None = None
    counts: bool = True
    note: str = ""
    hold_at: int | None = None
    last_usage: dict[str, Any] | None = None
    deltas: list[dict[str, Any]] = []
    choices: tuple[dict[str, Any], ...] = ()
    eol: str = "\n"
    comments: bool = False
    padding: int = 0
    packet: int = 0
    cut_at: int | None = None
    cut_resets: bool = False
    arguments: str = ""

    def prompt(self) -> str:
        """The prompt that asks for this script."""
        return msgspec.json.encode(self).decode()

    @property
    def input_tokens(self) -> int:
        """How the engine counts that prompt."""
        return count_tokens(self.prompt())

    @property
    def text(self) -> str:
        """The whole output."""
        return self.word * self.tokens


def count_tokens(prompt: str) -> int:
    """Input tokens of a prompt, ≥ 1."""
    return 1 + len(prompt.encode()) // 4


class _Left(Exception):
    """The client closed its connection."""


class _Cut(Exception):
    """The script says to close it here."""


class ScriptedEngine:
    """Context manager around the server. running, started, left: generations now, ever, and closed early by the client.

    sent: tokens written so far, by the script's note. always: what it does whatever a prompt asks for. asked: the body of the
    last generation. counts_input: whether it has `/tokenize`.
    """

    def __init__(self, *, counts_input: bool = True) -> None:
        self._counts_input = counts_input
        self.running = 0
        self.started = 0
        self.left = 0
        self.sent: dict[str, int] = {}
        self.always: Script | None = None
        self.asked: dict[str, Any] = {}
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-engine", daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._served: set[asyncio.Task[Any]] = set()
        self._released = asyncio.Event()

    @property
    def url(self) -> str:
        """Base URL; stays the same when it stops and listens again."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.vanish()
        self._wait(self._finish_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def listen(self) -> None:
        """Accept connections."""
        self._wait(self._listen())

    def vanish(self) -> None:
        """Refuse connections and reset those that are open."""
        self._wait(self._vanish())

    def hold(self) -> None:
        """Let scripts wait where they say so, from now on."""
        self._loop.call_soon_threadsafe(self._released.clear)

    def release(self) -> None:
        """Let go on what waits, and what would wait."""
        self._loop.call_soon_threadsafe(self._released.set)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _vanish(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _finish_connections(self) -> None:
        if self._served:
            await asyncio.wait(self._served, timeout=WAIT_S)

    # ── one connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.add(task)
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer):  # ends with the connection
                pass
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            self._writers.discard(writer)
            self._served.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0]) if b"content-length: " in head else 0
        body = await reader.readexactly(length)
        path = head.split(b" ")[1]
        if path not in GENERATING:
            known = path != b"/tokenize" or self._counts_input
            await _answer(writer, *(_answer_to(path, body) if known else (404, {})))
            return True
        self.running += 1
        self.started += 1
        try:
            self.asked = asked = msgspec.json.decode(body)
            return await _Generation(reader, writer, asked, self.sent, self.always, self._released).run()
        except _Cut:
            return False
        except (_Left, ConnectionError):
            self.left += 1
            return False
        finally:
            self.running -= 1


class _Generation:
    """One generation on its connection; a client that leaves ends it at its next step."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        sent: dict[str, int],
        always: Script | None,
        released: asyncio.Event,
    ) -> None:
        self._sent = sent
        self._released = released
        self._reader = reader
        self._writer = writer
        self._is_chat = "messages" in body
        self._prompt: str = body["messages"][-1]["content"] if self._is_chat else body["prompt"]
        self._script = always or _script_in(self._prompt)
        self._unwritten = b""
        self._written = 0

    async def run(self) -> bool:
        """Follow the script; whether the connection can be used again."""
        script, writer = self._script, self._writer
        if script.status != 200:
            await self._wait(script.first_ms)
            await _answer(writer, script.status, {"error": {"type": "BadRequestError", "message": ECHO + self._prompt}})
            return True
        self._unwritten = HEAD
        if self._is_chat:
            self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
        await self._wait(script.first_ms)
        for number in range(script.tokens + 1):
            if number:
                said = script.choices[number - 1] if script.choices else self._text(script.word)
                self._chunk([{"index": 0, "finish_reason": None, **said}], number)
                self._sent[script.note] = number
                await self._wait(script.gap_ms)
            if number == script.hold_at:
                await self._flush()
                await asyncio.wait_for(self._released.wait(), WAIT_S)
        for number, delta in enumerate(script.deltas, script.tokens + 1):
            self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], number)
            await self._wait(script.gap_ms)
        if script.arguments and self._is_chat:
            call = {"index": 0, "id": "call-1", "type": "function"}
            delta = {"tool_calls": [{**call, "function": {"name": "look_up", "arguments": script.arguments}}]}
            self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], script.tokens)
        return await self._end()

    async def _end(self) -> bool:
        script, writer = self._script, self._writer
        match script.end:
            case "stall":
                await self._flush()
                await self._wait(60_000)
            case "reset":
                await self._wait(20)  # what was written before arrives first
                writer.transport.abort()
                return False
            case "cut":
                self._unwritten += b"40\r\ndata: {"
                await self._flush()
                return False
            case "garbage" | "not_utf8" | "surrogate":
                self._event(b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}' % _BROKEN_TEXTS[script.end])
            case "error":
                self._event(msgspec.json.encode({"error": {"type": "InternalServerError", "message": ECHO + self._prompt}}))
            case "unfinished":
                self._event(b"[DONE]")
            case "stop" | "length" | "tool_calls" | "content_filter":
                made = script.tokens + len(script.deltas)
                self._chunk([{"index": 0, **self._text(""), "finish_reason": script.end}], made)
                if script.last_usage is not None:
                    self._event(msgspec.json.encode({"id": "x", "choices": [], "usage": script.last_usage}))
                elif script.counts:
                    self._chunk([], made)
                self._event(b"[DONE]")
        self._unwritten += b"0\r\n\r\n"
        await self._flush()
        return True

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}

    def _chunk(self, choices: list[dict[str, Any]], output_tokens: int) -> None:
        chunk: dict[str, Any] = {"id": "x", "choices": choices}
        if self._script.padding:
            chunk["padding"] = "p" * self._script.padding
        if self._script.counts:
            truth = (count_tokens(self._prompt), output_tokens)
            told = truth if self._script.usage is None else self._script.usage
            chunk["usage"] = {
                "prompt_tokens": told[0],
                "completion_tokens": min(told[1], output_tokens) if choices else told[1],
            }
        self._event(msgspec.json.encode(chunk))

    def _event(self, payload: bytes) -> None:
        eol = self._script.eol.encode()
        event = b"data: " + payload + eol + eol
        if self._script.comments:
            event = b": before" + eol + b"event: chunk" + eol + event + b":" + eol + eol + b": \xc3\xbc between" + eol
        self._unwritten += b"%x\r\n%b\r\n" % (len(event), event)

    async def _flush(self) -> None:
        """Write what waits, as the script says. Raises _Cut where it says so."""
        script, pending, self._unwritten = self._script, self._unwritten, b""
        left = len(pending) if script.cut_at is None else script.cut_at - self._written
        self._written += len(pending)
        size = script.packet or len(pending) or 1
        for at in range(0, min(left, len(pending)), size):
            self._writer.write(pending[at : min(at + size, left)])
            await self._writer.drain()
            if script.packet:
                await asyncio.sleep(0)
        if left < len(pending):
            await asyncio.sleep(0.003 if script.cut_resets else 0)  # what was written before arrives first
            if script.cut_resets:
                self._writer.transport.abort()
            raise _Cut

    async def _wait(self, wait_ms: int) -> None:
        """Let time pass. Raises _Left when the client closed its connection."""
        if not wait_ms and (self._script.packet or self._script.cut_at is not None):
            return  # packets and cuts are those of the whole
        await self._flush()
        if not wait_ms:
            return
        try:
            async with asyncio.timeout(wait_ms / 1e3):
                await self._reader.read(1)
        except TimeoutError:
            return
        raise _Left


def _script_in(prompt: str) -> Script:
    """The script that a prompt asks for; of any other prompt, the default."""
    try:
        return msgspec.json.decode(prompt, type=Script)
    except msgspec.MsgspecError:
        return Script()


def _answer_to(path: bytes, body: bytes) -> tuple[int, Any]:
    if path == b"/tokenize":
        asked = msgspec.json.decode(body)
        prompt = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        return 200, {"count": count_tokens(prompt)}
    answers: dict[bytes, Any] = {
        b"/health": {},
        b"/version": {"version": "0.32.0"},
        b"/v1/models": {"data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": 1_000_000}]},
    }
    return (200, answers[path]) if path in answers else (404, {})


async def _answer(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = msgspec.json.encode(content)
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
    await writer.drain()
