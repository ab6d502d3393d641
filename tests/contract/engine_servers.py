"""Servers for the Engine contract: a scripted one in this process, and real engine processes; and the list of implementations.

To put another implementation under the contract, write a function like `scripted` and add it to IMPLEMENTATIONS.
"""

import asyncio
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from os import pidfd_open
from typing import Any, Literal

import msgspec
import pytest

from weir.core.registry.model import EngineKind
from weir.core.request import Message, Sampling
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.llamacpp_child import ChildSpec
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.engines.packaged_models import smollm2_path
from weir.engines.simulated_api import ServerSpec
from weir.messages import ReplicaAddress
from weir.ports import Delta, Engine, EngineCall, EngineEnd, EngineRun
from weir.units import Tokens

WAIT_S = 60
SLOTS = 2
CONTEXT_TOKENS = 1_024
SIMULATED_KV_TOKENS = 4_096
API_KEY = "secret-of-the-replica"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"[DONE]"
METRICS = (
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="500",num_gpu_blocks_override="None"} 1.0\n'
)


class Sink:
    """Keeps what an engine says. batches: the deltas of each call. on_first: called from within the first call."""

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self.batches: list[list[Delta]] = []
        self.ends: list[EngineEnd] = []
        self.first, self.ended = asyncio.Event(), asyncio.Event()
        self._on_first = on_first

    @property
    def deltas(self) -> list[Delta]:
        return [delta for batch in self.batches for delta in batch]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def calls(self) -> int:
        return len(self.batches) + len(self.ends)

    def on_deltas(self, deltas: Sequence[Delta]) -> None:
        assert deltas and not self.ends
        self.batches.append(list(deltas))
        self.first.set()
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    def on_end(self, end: EngineEnd) -> None:
        assert (end.reason is None) is not (end.fault is None)
        self.ends.append(end)
        self.ended.set()

    async def end(self) -> EngineEnd:
        """The end, once it came."""
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        [end] = self.ends
        return end

    async def begun(self) -> None:
        """Returns with the first output."""
        async with asyncio.timeout(WAIT_S):
            await self.first.wait()


@dataclass
class UnderTest:
    """An implementation and one replica of it, probed. running: whether the replica runs anything in a lane. kill: lose it.

    kv_tokens: what the replica has room for. own_process: a killed replica refuses connections. confirms: `stopped` means that
    nothing runs, not merely that the connection is gone, after which the engine stops by itself at its next step.
    """

    engine: Engine
    replica: ReplicaAddress
    running: Callable[[int], Awaitable[bool]]
    kill: Callable[[], None]
    kv_tokens: Tokens
    own_process: bool = True
    confirms: bool = False

    def call(
        self, prompt: str | tuple[Message, ...] = "1, 2, 3,", *, lane: int = 0, chat: bool = False, most: int = 40
    ) -> EngineCall:
        """A call that decodes greedily."""
        return EngineCall(self.replica, lane, prompt, chat, most, Sampling(temperature=0.0))

    async def check_idle(self, lane: int) -> None:
        """Nothing runs in a lane: now where a stop is confirmed, else within the bound."""
        if self.confirms:
            assert not await self.running(lane)
        for _ in range(WAIT_S * 100):
            if not await self.running(lane):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the replica did not become idle")

    async def finish(self, call: EngineCall) -> Sink:
        """A whole run."""
        sink = Sink()
        run = self.engine.start(call, sink)
        await sink.end()
        await run.stopped()
        return sink


async def stop_confirmed(run: EngineRun) -> None:
    """Waits for a run's confirmation, bounded."""
    async with asyncio.timeout(WAIT_S):
        await run.stopped()


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Child:
    """An engine process that speaks the children's protocol."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        """Kill it and reap it."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(WAIT_S)


def start_child(module: str, spec: msgspec.Struct) -> Child:
    """Start `python -m module`, hand over its spec, and wait until it listens."""
    process = subprocess.Popen(
        ["/usr/bin/env", "GOMP_SPINCOUNT=2000", sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
    answer = process.stdout.readline() if ready else b"{}"
    return Child(process, msgspec.json.decode(answer)["url"])


def wait_process_gone(pid: int) -> bool:
    """Whether a process, of whatever parent, ends within the bound."""
    try:
        descriptor = pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([descriptor], [], [], WAIT_S)[0])


class Children:
    """Engine processes shared by the tests of a module: one of each kind, started when first needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shared: dict[str, Child] = {}

    def shared(self, module: str, spec: msgspec.Struct) -> Child:
        """The module's process."""
        if module not in self._shared:
            self._shared[module] = self.fresh(module, spec)
        return self._shared[module]

    def fresh(self, module: str, spec: msgspec.Struct) -> Child:
        """A process of one's own."""
        child = start_child(module, spec)
        self._stack.callback(child.kill)
        return child

    def close(self) -> None:
        """Kill all."""
        self._stack.close()


# ── a scripted server ────────────────────────────────────────────────────────────────────────────────────────────────


class Wire:
    """What a script writes with: one response on one connection. split: bytes per write, 0 for all at once."""

    def __init__(self, writer: asyncio.StreamWriter, split: int = 0, line_end: bytes = b"\n") -> None:
        self._writer = writer
        self._split = split
        self._line_end = line_end

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        step = self._split or len(data) or 1
        for at in range(0, len(data), step):
            self._writer.write(data[at : at + step])
            await self._writer.drain()
            await asyncio.sleep(0)

    def framed(self, *payloads: bytes) -> bytes:
        """Events, each as one HTTP chunk."""
        events = (b"data: " + payload + 2 * self._line_end for payload in payloads)
        return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)

    async def events(self, *payloads: bytes | dict[str, Any]) -> None:
        """Events in one write."""
        await self.raw(self.framed(*(p if isinstance(p, bytes) else msgspec.json.encode(p) for p in payloads)))

    async def end(self) -> None:
        """The response ends cleanly."""
        await self.raw(b"0\r\n\r\n")

    async def answer(self, status: int, content: Any) -> None:
        """A whole answer, of JSON where it is not bytes already."""
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        await self.raw(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    def cut(self) -> None:
        """The connection is reset."""
        self._writer.transport.abort()

    @property
    def is_cut(self) -> bool:
        return self._writer.transport.is_closing()


Script = Callable[[Wire, dict[str, Any]], Awaitable[None]]


def text_chunk(text: str | None, finish: str | None = None, *, chat: bool = False, **extra: Any) -> dict[str, Any]:
    """A chunk as OpenAI shapes it."""
    content: dict[str, Any] = ({"delta": {"content": text} if text is not None else {}}) if chat else {"text": text or ""}
    return {"id": "x", "choices": [{"index": 0, **content, "finish_reason": finish}], **extra}


def usage_of(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """A usage member."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def words_of(body: dict[str, Any]) -> int:
    """How the scripted server counts input: the words of the prompt or of all messages."""
    turns = body.get("messages") or [{"content": body.get("prompt", "")}]
    return sum(len((turn["content"] or "").split()) for turn in turns)


async def speak(wire: Wire, body: dict[str, Any]) -> None:
    """A well-behaved reply at the pace of an engine, with counts on its chunks where they are asked for."""
    chat = "messages" in body
    if words_of(body) > CONTEXT_TOKENS:
        await wire.answer(400, {"error": {"type": "BadRequestError", "message": "too long: " + str(body)}})
        return
    continuous = body["stream_options"].get("continuous_usage_stats", False)
    await wire.raw(HEAD)
    if chat:
        await wire.events({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    count = body["max_tokens"]
    await asyncio.sleep(0.0005 * words_of(body))
    for n in range(1, count + 1):
        await asyncio.sleep(0.005)
        await wire.events(text_chunk(f" {n}", chat=chat, **(usage_of(words_of(body), n) if continuous else {})))
    await wire.events(text_chunk(None, "length", chat=chat), {"choices": [], **usage_of(words_of(body), count, 0)}, DONE)
    await wire.end()


@dataclass
class ScriptedServer:
    """An HTTP server whose generations follow a script; remembers requests as (head, body)."""

    script: Script = speak
    dialect: str = "vllm"  # or "bare": completions and a list of models, nothing else
    split: int = 0
    line_end: bytes = b"\n"
    metrics: bytes = METRICS
    url: str = ""
    requests: list[tuple[bytes, dict[str, Any]]] = field(default_factory=list)
    generating: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                content = msgspec.json.decode(body) if body else {}
                self.requests.append((head, content))
                await self._answer(head.split(b" ")[1], Wire(writer, self.split, self.line_end), content)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
        if path.endswith((b"/completions", b"/embeddings")):
            self.generating += 1
            try:
                await self.script(wire, body)
            finally:
                self.generating -= 1
        elif self.dialect == "bare" and path.endswith(b"/v1/models"):
            await wire.answer(200, {"data": [{"id": "m"}]})
        elif self.dialect == "vllm":
            card = {"id": "m", "owned_by": "vllm", "max_model_len": CONTEXT_TOKENS}
            answers = {
                b"/health": {},
                b"/version": {"version": "0.32.0"},
                b"/v1/models": {"data": [card]},
                b"/tokenize": {"count": words_of(body)},
                b"/metrics": self.metrics,
            }
            await wire.answer(200 if path in answers else 404, answers.get(path, {}))
        else:
            await wire.answer(404, {})

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedServer"]:
        """Listen while the context lasts."""
        server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.kill()
            await asyncio.gather(*self._tasks)

    def kill(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def address(self, **fields: Any) -> ReplicaAddress:
        """This server as a replica, not probed."""
        return ReplicaAddress("r", "p", "v", EngineKind.OPENAI, self.url, **{"model": "", "context_tokens": 1, **fields})


# ── implementations ──────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def scripted(children: Children, fresh: bool) -> AsyncIterator[UnderTest]:
    """OpenAICompatibleEngine against the scripted server."""
    async with ScriptedServer().running() as server:
        engine = OpenAICompatibleEngine()

        async def running(lane: int) -> bool:
            return server.generating > 0

        try:
            yield UnderTest(engine, await engine.probe(server.address()), running, server.kill, 8_000, own_process=False)
        finally:
            await engine.aclose()


@asynccontextmanager
async def simulated_server(children: Children, fresh: bool) -> AsyncIterator[UnderTest]:
    """OpenAICompatibleEngine against a simulated engine's process."""
    spec = ServerSpec("m", CONTEXT_TOKENS, SLOTS, kv_tokens=SIMULATED_KV_TOKENS, api_key=API_KEY)
    child = (children.fresh if fresh else children.shared)("weir.engines.simulated_server", spec)
    address = ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, child.url, "", 1, api_key=API_KEY)
    engine, control = OpenAICompatibleEngine(), HttpClient()

    async def running(lane: int) -> bool:
        answer = await control.request(HttpRequest("GET", child.url, "/metrics"), timeout_ms=WAIT_S * 1_000)
        [line] = [line for line in answer.body.splitlines() if line.startswith(b"vllm:num_requests_running{")]
        return float(line.split()[-1]) > 0

    try:
        yield UnderTest(engine, await engine.probe(address), running, child.kill, SIMULATED_KV_TOKENS)
    finally:
        await engine.aclose()
        await control.aclose()


@asynccontextmanager
async def llamacpp(
    children: Children, fresh: bool, *, chat_template: Literal["model", "smollm2-tools"] = "model"
) -> AsyncIterator[UnderTest]:
    """LlamaCppEngine against a real llama.cpp process. chat_template: of one that is fresh, or the first of its module."""
    spec = ChildSpec(str(smollm2_path()), "m", SLOTS, CONTEXT_TOKENS, 2, API_KEY, chat_template=chat_template)
    child = (children.fresh if fresh else children.shared)("weir.engines.llamacpp_child", spec)
    address = ReplicaAddress("r", "p", "v", EngineKind.LLAMACPP, child.url, "", 1, api_key=API_KEY)
    engine, control = LlamaCppEngine(), HttpClient()

    async def running(lane: int) -> bool:
        request = HttpRequest("GET", child.url, "/slots", api_key=API_KEY)
        answer = await control.request(request, timeout_ms=WAIT_S * 1_000)
        return bool(msgspec.json.decode(answer.body)[lane]["is_processing"])

    try:
        yield UnderTest(engine, await engine.probe(address), running, child.kill, SLOTS * CONTEXT_TOKENS, confirms=True)
    finally:
        await engine.aclose()
        await control.aclose()


Implementation = Callable[[Children, bool], AbstractAsyncContextManager[UnderTest]]

IMPLEMENTATIONS = [
    pytest.param(scripted, id="scripted"),
    pytest.param(simulated_server, id="simulated_server"),
    pytest.param(llamacpp, id="llamacpp", marks=pytest.mark.model),
]
"""Each opens one replica: (children, fresh) → its context. fresh: a process of the test's own, to be killed."""
