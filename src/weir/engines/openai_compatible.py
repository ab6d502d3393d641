"""Any OpenAI-compatible server behind a URL: vLLM, a hosted API, the simulated server.

It decides which fields such a server is sent and what it can do; what its stream means is `openai_stream`'s. /v1/models shows
that it is such a server and takes our key. Without /health, /tokenize, /version or /metrics it merely has no capabilities. A
probe never generates anything: it runs often, and a hosted API costs money.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from weir import errors
from weir.core.demands import NO_DEMANDS, Demands
from weir.core.registry.model import EngineKind
from weir.core.request import Message
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import UNREADABLE, HttpRequest, HttpResponse
from weir.engines.openai_embeddings import EmbeddingRun, embedding_request
from weir.engines.openai_fields import messages_of, tool_fields
from weir.engines.openai_stream import FIRST_OUTPUT_MS, IDLE_MS, StreamedRun, generation_request, reader_of
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, EngineRun, EngineSink
from weir.units import Millis, Tokens

COUNT_MS = 250
COUNTS_AT_ONCE = 4
PROBE_MS = 2_000
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_KV_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="(\d{1,12})"')
_BLOCK_TOKENS = re.compile(rb'(?:^|,)block_size="(\d{1,6})"')


class ControlCalls:
    """Small calls beside the streams: probes within probe_ms each, counts within COUNT_MS and COUNTS_AT_ONCE per replica."""

    def __init__(self, client: HttpClient, probe_ms: Millis = PROBE_MS) -> None:
        self._client = client
        self._probe_ms = probe_ms
        self._gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def call(self, replica: ReplicaAddress, method: str, path: str, body: Any = None) -> HttpResponse:
        """One call. Raises ReplicaLost, Stalled or EngineError."""
        encoded = b"" if body is None else msgspec.json.encode(body)
        request = HttpRequest(method, replica.url, path, encoded, replica.api_key)
        return await self._client.request(request, timeout_ms=self._probe_ms)

    async def check_health(self, replica: ReplicaAddress) -> None:
        """Raises EngineFault unless the replica is healthy; a server without /health passes."""
        status = (await self.call(replica, "GET", "/health")).status
        if status >= 500 and status != 501:
            raise errors.EngineError(f"The replica is not ready: /health answers {status}.")

    async def count(self, replica: ReplicaAddress, ask: Callable[[], Awaitable[Tokens | None]]) -> Tokens | None:
        """What `ask` answers, None when it fails or takes too long, its wait for a turn included."""
        gate = self._gates.get(replica.url)
        if gate is None:
            gate = self._gates[replica.url] = asyncio.Semaphore(COUNTS_AT_ONCE)
        try:
            async with asyncio.timeout(COUNT_MS / 1_000), gate:
                return await ask()
        except (TimeoutError, errors.EngineFault):
            return None


def json_object(response: HttpResponse) -> dict[str, Any]:
    """A successful answer's JSON object; empty when it is anything else."""
    try:
        content = msgspec.json.decode(response.body) if response.status == 200 else None
    except UNREADABLE:
        content = None
    return content if isinstance(content, dict) else {}


def whole_number(value: Any) -> int | None:
    """A JSON integer ≥ 1, else None."""
    return value if type(value) is int and value >= 1 else None


class OpenAICompatibleEngine:
    """Client of OpenAI-compatible servers. first_output_ms, idle_ms: as `StreamedRun` says."""

    def __init__(
        self,
        *,
        first_output_ms: Millis = FIRST_OUTPUT_MS,
        idle_ms: Millis = IDLE_MS,
        connect_ms: Millis = 2_000,
        probe_ms: Millis = PROBE_MS,
    ) -> None:
        self._client = HttpClient(connect_ms=connect_ms)
        self._control = ControlCalls(self._client, probe_ms)
        self._first_output_ms = first_output_ms
        self._idle_ms = idle_ms

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a streamed generation, or embeddings. The aborted connection is the confirmation of a cancel."""
        extra: dict[str, Any] = {}
        if call.replica.cache_salt and call.cache_salt:
            extra["cache_salt"] = call.cache_salt
        if (embedding := call.demands.embedding) is not None:
            vectors = EmbeddingRun(sink, embedding, self._first_output_ms)
            return vectors.begin(self._client, embedding_request(call, embedding, extra))
        if call.replica.continuous_usage:
            extra["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if call.replica.cache_forbidden:
            extra["cache_prompt"] = False
        run = StreamedRun(sink, self._first_output_ms, self._idle_ms, reader_of(call))
        return run.begin(self._client, generation_request(call, extra))

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """Exact input tokens by vLLM's /tokenize, with the chat template where chat; None when it cannot say in time."""
        return await self._control.count(replica, lambda: self._tokenize(replica, prompt, chat, demands))

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """Health, model and capabilities. Raises EngineFault, also where no model or not the approved one is served.

        A fault whose retry_advice is False stays until somebody changes the configuration: the server refuses our key.
        vLLM is recognised by /version and by whom it names as its models' owner. Either is enough to ask for usage on every
        chunk, which is harmless elsewhere. A salted prefix cache takes both: believed wrongly, tenants would share a cache; so
        would they if a vLLM that fails for a moment were taken for something else, or what was started as vLLM showed neither.
        llama.cpp's server has no salts, and a field that forbids its cache. An address that has kv_tokens keeps them.
        """
        await self._control.check_health(replica)
        card = _card_for(replica, _cards_in(await self._control.call(replica, "GET", "/v1/models")))
        found = msgspec.structs.replace(
            replica,
            model=card["id"],
            context_tokens=whole_number(card.get("max_model_len")) or replica.context_tokens,
        )
        owned_by_vllm = card.get("owned_by") == "vllm"
        answer = await self._control.call(found, "GET", "/version")
        if owned_by_vllm and answer.status >= 500:
            raise errors.EngineError(f"The replica is not ready: /version answers {answer.status}.")
        has_version = isinstance(json_object(answer).get("version"), str)
        if replica.engine is EngineKind.VLLM and not (has_version and owned_by_vllm):
            raise errors.EngineError("The replica does not show that it is vLLM, whose prefix cache keeps salts apart.")
        return msgspec.structs.replace(
            found,
            counts_tokens=await self._tokenize(found, "a", chat=False) is not None,
            continuous_usage=has_version or owned_by_vllm,
            cache_salt=has_version and owned_by_vllm,
            cache_forbidden=card.get("owned_by") == "llamacpp",
            kv_tokens=replica.kv_tokens or await self._kv_tokens(found),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _tokenize(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """The count that /tokenize gives. Raises EngineFault when it does not answer."""
        text = {"messages": messages_of(prompt), **tool_fields(demands)} if chat else {"prompt": prompt}
        answer = await self._control.call(replica, "POST", "/tokenize", {"model": replica.model, **text})
        return whole_number(json_object(answer).get("count"))

    async def _kv_tokens(self, replica: ReplicaAddress) -> Tokens | None:
        """What vLLM's metrics say of its KV blocks; None where they say nothing, or do not arrive."""
        try:
            answer = await self._control.call(replica, "GET", "/metrics")
        except errors.EngineFault:
            return None
        return _kv_tokens_in(answer.body) if answer.status == 200 else None


def _kv_tokens_in(metrics: bytes) -> Tokens | None:
    """The KV blocks of all engines of one server, in tokens; None unless each says how many it has."""
    tokens = 0
    for labels in _CACHE_CONFIG.findall(metrics):
        blocks, size = _KV_BLOCKS.search(labels), _BLOCK_TOKENS.search(labels)
        if blocks is None or size is None:
            return None
        tokens += int(blocks[1]) * int(size[1])
    return tokens or None


def _cards_in(answer: HttpResponse) -> list[dict[str, Any]]:
    """The models that /v1/models lists, at least one, each with an id. Raises EngineError."""
    if answer.status in (401, 403):
        raise errors.EngineError("The engine refuses the key (engine.api_key_file).", should_retry=False)
    if answer.status != 200:
        raise errors.EngineError(f"The engine lists no models: /v1/models answers {answer.status}.")
    listed = json_object(answer).get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    named = [card for card in cards if isinstance(card.get("id"), str) and card["id"]]
    if not named:
        raise errors.EngineError("The engine lists no models: /v1/models names none.")
    return named


def _card_for(replica: ReplicaAddress, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """The listed model that a replica is to serve: the one it names, else the first. Raises EngineError."""
    named = next((card for card in cards if card["id"] == replica.model), None)
    if named is None and replica.model and replica.engine in (EngineKind.OPENAI, EngineKind.VLLM):
        raise errors.EngineError("The replica does not serve the approved model.")
    return named or cards[0]
