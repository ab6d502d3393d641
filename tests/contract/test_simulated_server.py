"""The simulated engine's server answers like vLLM, frees what a client left, and ends with its parent."""

import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI
from tests.contract.engine_servers import Sink

from weir.core.registry.model import EngineKind
from weir.core.request import Sampling
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.errors import Stalled
from weir.messages import ReplicaAddress
from weir.ports import EngineCall

START_BOUND_S = 20
WAIT_BOUND_S = 10
KEY = "local-key"
SLOW_ROW = "llama3.1-70b/a100_sxm/tp4"
LONG_PROMPT = "flow 21"
"""Its reply ends by itself after 238 tokens: about seven seconds on the slow row."""


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    url: str

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def ask(self, method: str, path: str, body: Any = None, key: str | None = KEY) -> tuple[int, Any]:
        """Status and body, decoded where it is JSON. body: bytes as they are, or a value to encode."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connection = HTTPConnection(*self.address, timeout=WAIT_BOUND_S)
        try:
            encoded = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, encoded, headers)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers["content-type"] == "application/json"
            return answer.status, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """A metric's value now."""
        _, text = self.ask("GET", "/metrics")
        found = re.search(rf"^vllm:{name}{{engine=\"0\",model_name=\"tiny\"}} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def wait_metric(self, name: str, value: float) -> None:
        """Ask until the metric has this value; fails past the bound."""
        ends = time.monotonic() + WAIT_BOUND_S
        while self.metric(name) != value:
            assert time.monotonic() < ends, f"{name} never became {value}"


@contextmanager
def _serving(**spec: Any) -> Iterator[_Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "weir.engines.simulated_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"model": "tiny", "context_tokens": 1_000, "api_key": KEY, **spec}).encode() + b"\n")
        process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], START_BOUND_S)
        assert readable, "the server did not start in time"
        yield _Server(process, json.loads(process.stdout.readline())["url"])
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    with _serving(seed=3) as started:
        yield started


@pytest.fixture(scope="module")
def slow_server() -> Iterator[_Server]:
    with _serving(row=SLOW_ROW, concurrency=1) as started:
        yield started


@pytest.fixture(scope="module")
def sdk(server: _Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_BOUND_S) as client:
        yield client


# ── the official SDK ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_by_the_official_sdk(sdk: OpenAI, server: _Server) -> None:
    """A streamed conversation gives the same text as the whole answer, and the usage of both agrees with the counts."""
    whole = sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=12)
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    _, counted = server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "hello"}]})
    assert counted["count"] == len(counted["tokens"]) == whole.usage.prompt_tokens == 9
    chunks = list(
        sdk.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_completions_by_the_official_sdk(sdk: OpenAI) -> None:
    """The same for plain prompts; a seed and a stop string do what they say, and 16 tokens are the default."""
    whole = sdk.completions.create(model="tiny", prompt="hello", seed=5)
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    assert whole.choices[0].text != sdk.completions.create(model="tiny", prompt="hello").choices[0].text
    streamed = sdk.completions.create(model="tiny", prompt="hello", seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    stop = whole.choices[0].text.split(" ")[4]
    stopped = sdk.completions.create(model="tiny", prompt="hello", seed=5, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.choices[0].text.split(stop)[0]


def test_models_by_the_official_sdk(sdk: OpenAI) -> None:
    """The model and its window are listed, as readiness asks for them."""
    [model] = sdk.models.list().data
    assert model.id == "tiny" and model.to_dict()["max_model_len"] == 1_000


def test_refusals_by_the_official_sdk(sdk: OpenAI, server: _Server) -> None:
    """Refusals arrive as the SDK's own classes."""
    with pytest.raises(NotFoundError):
        sdk.completions.create(model="other", prompt="hello")
    with pytest.raises(BadRequestError, match="maximum context length is 1000"):
        sdk.completions.create(model="tiny", prompt="hello", max_tokens=1_000)
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.completions.create(model="tiny", prompt="hello")


# ── shapes on the wire ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", b"\xff"),
        ("/v1/completions", {"prompt": 3}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "x", "n": 0}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
        ("/v1/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": "x" * 8_000, "stream": True}),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}),
        ("/v1/completions", {"prompt": "x", "cache_salt": 5}),
        ("/v1/completions", {"prompt": "x", "cache_salt": "s" * 129}),
        *(("/v1/completions", {"prompt": "x", "cache_salt": f"so{forbidden}lt"}) for forbidden in "@/\\\0"),
        ("/tokenize", {}),
    ],
)
def test_what_is_wrong_is_a_400_in_the_usual_shape(server: _Server, path: str, body: Any) -> None:
    """A body that makes no sense is refused before any header of a stream, and never echoed."""
    status, answer = server.ask("POST", path, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
    assert "xxxx" not in answer["error"]["message"]


def test_keys_guard_only_the_api(server: _Server) -> None:
    """As in vLLM, health and metrics need no key; an unknown path is a 404."""
    assert server.ask("GET", "/v1/models", key=None)[0] == 401
    assert server.ask("GET", "/health", key=None) == (200, "")
    assert server.ask("GET", "/version", key=None)[1]["version"].endswith("simulated")
    assert server.ask("PUT", "/faults", {}, key=None)[0] == 401
    assert server.ask("GET", "/nothing")[0] == 404
    assert server.ask("GET", "/v1/completions")[0] == 404


def test_every_chunk_carries_the_count_when_asked(server: _Server) -> None:
    """Continuous usage makes a cancelled stream's usage a measured one; the finish chunk and the usage chunk agree."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True, "stream_options": options}
    status, text = server.ask("POST", "/v1/completions", body)
    events = text.removesuffix("\n\n").split("\n\n")
    assert status == 200 and events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4, 4]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks[:4]] == [3, 4, 5, 6]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 1, 0]


def test_counters_add_up(server: _Server) -> None:
    """The token counters grow by what was computed."""
    prompts, generated = server.metric("prompt_tokens_total"), server.metric("generation_tokens_total")
    server.ask("POST", "/v1/completions", {"prompt": "x" * 400, "max_tokens": 7})
    assert server.metric("prompt_tokens_total") - prompts == 100
    assert server.metric("generation_tokens_total") - generated == 7
    assert server.metric("kv_cache_usage_perc") == server.metric("num_preemptions_total") == 0
    assert server.metric("prefix_cache_queries_total") == server.metric("prefix_cache_hits_total") == 0


# ── memory and prefix cache ──────────────────────────────────────────────────────────────────────────────────────────


async def test_salts_keep_tenants_apart() -> None:
    """A replica with a prefix cache is taken for one that keeps salts apart, and does: cached tokens only under one's own."""
    with _serving(prefix_cache=True) as server:
        address = ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, server.url, "", 1, api_key=KEY)
        engine = OpenAICompatibleEngine()
        try:
            replica = await engine.probe(address)
            assert replica.cache_salt
            cached = []
            for salt in ("one", "one", "two", "s" * 128, None, None):
                sink = Sink()
                engine.start(EngineCall(replica, 0, "wave" * 400, False, 3, Sampling(), salt), sink)
                usage = (await sink.end()).usage
                assert usage is not None and usage.input_tokens == 400
                cached.append(usage.cached_input_tokens)
        finally:
            await engine.aclose()
        assert cached == [0, 384, 0, 0, 0, 384]
        assert server.metric("prefix_cache_queries_total") == 2_400
        assert server.metric("prefix_cache_hits_total") == 768


def test_memory_is_shown_as_it_fills() -> None:
    """The share of KV blocks in use is that of what runs; a request that does not fit beside it waits, and shows."""
    with _serving(row=SLOW_ROW, kv_tokens=1_008) as server:
        prompt = "flow 30" + "x" * 1_993  # 500 tokens, 32 of 63 blocks; its reply has 252
        with _post(server, stream=True, prompt=prompt) as first, _post(server, stream=True, prompt=prompt):
            assert first.recv(4_096).startswith(b"HTTP/1.1 200")
            server.wait_metric("num_requests_waiting", 1)
            assert 32 / 63 <= server.metric("kv_cache_usage_perc") <= 48 / 63
        server.wait_metric("num_requests_running", 0)
        assert server.metric("kv_cache_usage_perc") == 0


# ── faults on order ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_marked_prompt_kills_the_process() -> None:
    """The crash that was ordered is a real one: the stream is cut and the process is gone, with a status of its own."""
    with _serving(faults={"crash_marker": "poison"}) as server:
        assert server.ask("POST", "/v1/completions", {"prompt": "harmless"})[0] == 200
        with _post(server, stream=True, prompt="poison") as client:
            assert server.process.wait(timeout=WAIT_BOUND_S) == 70
            assert not _is_completed(client)


def test_faults_are_ordered_and_taken_back_while_it_runs() -> None:
    """A stall in mid-stream and slow steps begin and end by the control route; what makes no sense changes nothing."""
    with _serving() as server:
        assert server.ask("PUT", "/faults", {"stall_marker": "sleepy", "stall_after_tokens": 3}) == (200, {})
        for wrong in ({"slowdown": 0}, {"stall_after_tokens": 0}, {"refuse_ms": -1}, {"crash": True}, b"["):
            assert server.ask("PUT", "/faults", wrong)[0] == 400
        with _post(server, stream=True, prompt="sleepy") as client:
            server.wait_metric("generation_tokens_total", 3)
            assert server.ask("GET", "/health")[0] == 200
            assert server.metric("num_requests_running") == 1 and server.metric("generation_tokens_total") == 3
            assert server.ask("PUT", "/faults", {"slowdown": 5.0}) == (200, {})
            server.wait_metric("num_requests_running", 0)
            assert server.ask("PUT", "/faults", {}) == (200, {})
            assert _is_completed(client)


@pytest.mark.parametrize(
    ("faults", "first_output_ms", "idle_ms"), [({"stalled": True}, 300, 60_000), ({"stall_marker": "sleepy"}, 60_000, 300)]
)
async def test_a_stall_is_noticed_before_the_first_token_and_after_it(faults: Any, first_output_ms: int, idle_ms: int) -> None:
    """A replica that computes nothing more is a stalled one to its client, with the bound of where it stalled."""
    with _serving(faults=faults) as server:
        address = ReplicaAddress("r", "p", "v", EngineKind.SIMULATED, server.url, "tiny", 1_000, api_key=KEY)
        engine, sink = OpenAICompatibleEngine(first_output_ms=first_output_ms, idle_ms=idle_ms), Sink()
        engine.start(EngineCall(address, 0, "sleepy", True, 9, Sampling()), sink)
        assert type((await sink.end()).fault) is Stalled and bool(sink.deltas) is ("stall_marker" in faults)
        await engine.aclose()


def test_connections_are_refused_for_a_while() -> None:
    """New connections are refused and idle ones closed at once, a running stream goes on, and the same port serves again."""
    with _serving(row=SLOW_ROW) as server, _post(server, stream=True) as running:
        server.wait_metric("num_requests_running", 1)
        assert server.ask("PUT", "/faults", {"refuse_ms": 1_000}) == (200, {})
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/health")
        while True:  # bounded by the time that it may take
            assert time.monotonic() - began < WAIT_BOUND_S
            try:
                server.wait_metric("num_requests_running", 1)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        assert time.monotonic() - began > 0.9
        assert running.recv(4_096).startswith(b"HTTP/1.1 200")


def test_a_slow_start_listens_late() -> None:
    """Until it is loaded nothing listens and no address is announced; it ends with its parent also then."""
    began = time.monotonic()
    with _serving(start_ms=1_500) as server:
        assert time.monotonic() - began > 1.5
        assert server.ask("GET", "/health")[0] == 200
    command = [sys.executable, "-m", "weir.engines.simulated_server"]
    done = subprocess.run(command, input=b'{"start_ms": 60000}\n', capture_output=True, timeout=START_BOUND_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


# ── clients that leave ───────────────────────────────────────────────────────────────────────────────────────────────


def _is_completed(client: socket.socket) -> bool:
    """Whether a stream comes to its own end, rather than being cut."""
    text = b""
    try:
        while b"data: [DONE]" not in text and (piece := client.recv(65_536)):
            text += piece
    except ConnectionResetError:
        return False
    return b"data: [DONE]" in text


def _post(server: _Server, *, stream: bool, prompt: str = LONG_PROMPT) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": 500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    client = socket.create_connection(server.address, timeout=WAIT_BOUND_S)
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(slow_server: _Server, stream: bool) -> None:
    """A disconnect stops the generation long before its natural end, streamed or not."""
    before = slow_server.metric("generation_tokens_total")
    with _post(slow_server, stream=stream):
        slow_server.wait_metric("num_requests_running", 1)
    slow_server.wait_metric("num_requests_running", 0)
    assert slow_server.metric("generation_tokens_total") - before < 100


def test_headers_come_at_once_and_a_waiting_client_may_leave(slow_server: _Server) -> None:
    """A stream that waits for its turn has its headers already; when its client leaves, the place is free and others go on."""
    before = slow_server.metric("generation_tokens_total")
    with _post(slow_server, stream=True) as first:
        slow_server.wait_metric("num_requests_running", 1)
        with _post(slow_server, stream=True) as second:
            assert second.recv(4_096).startswith(b"HTTP/1.1 200")
            slow_server.wait_metric("num_requests_waiting", 1)
        slow_server.wait_metric("num_requests_waiting", 0)
        assert slow_server.metric("num_requests_running") == 1
        assert slow_server.metric("generation_tokens_total") - before < 100  # the first has long to go
        assert first.recv(4_096).startswith(b"HTTP/1.1 200")
    slow_server.wait_metric("num_requests_running", 0)


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_exits_with_its_parent_or_when_told_to() -> None:
    """The end of its input or SIGTERM ends it promptly, also while a generation runs."""
    with _serving(row=SLOW_ROW) as orphaned, _post(orphaned, stream=True):
        orphaned.wait_metric("num_requests_running", 1)
        assert orphaned.process.stdin is not None
        orphaned.process.stdin.close()
        assert orphaned.process.wait(timeout=WAIT_BOUND_S) == 0
    with _serving() as told:
        told.process.send_signal(signal.SIGTERM)
        assert told.process.wait(timeout=WAIT_BOUND_S) == 0


def test_a_spec_that_makes_no_sense_is_refused() -> None:
    """A misspelt field or row, or a window beyond its memory, ends the start with a reason instead of another server."""
    small = b'{"context_tokens": 1000, "kv_tokens": 1007}\n'
    for spec in (b'{"rows": "demo"}\n', b'{"row": "nothing"}\n', b'{"faults": {"slowdown": -1}}\n', small, b"\n", b""):
        command = [sys.executable, "-m", "weir.engines.simulated_server"]
        done = subprocess.run(command, input=spec, capture_output=True, timeout=START_BOUND_S, check=False)
        assert (done.returncode, done.stdout) == (2, b"") and b"simulated server:" in done.stderr
