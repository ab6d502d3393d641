"""llama.cpp's HTTP server as an engine: one process per replica, one slot per lane.

It decides which of llama.cpp's fields are sent and when a slot counts as free. Its own prompt cache is never used, because it
would cross tenants. A closed connection stops a decode at its next token; a prompt that is being read stops between batches,
but only after the server got no result of any slot for a second, or else at its first token. So nobody asks too often.
"""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import msgspec

from weir import errors
from weir.core.demands import NO_DEMANDS, Demands, ToolChoice, ToolMode
from weir.core.request import Message
from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import UNREADABLE
from weir.engines.llamacpp_embeddings import refused_texts, wait_texts_done
from weir.engines.openai_compatible import PROBE_MS, ControlCalls, json_object, whole_number
from weir.engines.openai_embeddings import EmbeddingRun, embedding_request
from weir.engines.openai_fields import messages_of, tool_fields
from weir.engines.openai_stream import FIRST_OUTPUT_MS, IDLE_MS, RefusedRun, StreamedRun, generation_request, reader_of
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, EngineRun, EngineSink
from weir.units import Millis, Tokens

STOP_MS = 10_000  # without any progress of the slot
STOP_PERIODS_MAX = 30  # of those, however much progress is seen: a long prompt that is read beside busy slots
_DECODING_POLLS_MS = (15,)
_ARRIVAL_MS = 250  # a request may reach its slot a moment after its connection was closed
_READING_POLLS_MS = (1_100, 50)  # an answer of /slots starts the server's second anew, and may come just before the stop
_LOST_MAX = 3
_IDLE_CONNECTIONS_MAX = 3  # each holds a thread of the server until it closes


class LlamaCppEngine:
    """Client of llama.cpp servers. stop_ms: bound of a stop's confirmation without progress; others: as `StreamedRun` says."""

    def __init__(
        self,
        *,
        first_output_ms: Millis = FIRST_OUTPUT_MS,
        idle_ms: Millis = IDLE_MS,
        stop_ms: Millis = STOP_MS,
        probe_ms: Millis = PROBE_MS,
    ) -> None:
        self._client = HttpClient(idle_per_origin_max=_IDLE_CONNECTIONS_MAX, idle_ms=4_000)  # it closes them after 5 s
        self._control = ControlCalls(self._client, probe_ms)
        self._first_output_ms = first_output_ms
        self._idle_ms = idle_ms
        self._stop_ms = stop_ms

    def start(self, call: EngineCall, sink: EngineSink) -> EngineRun:
        """Begin a streamed generation in the slot that is the call's lane, or embeddings in any slots."""
        if (embedding := call.demands.embedding) is not None:
            done = partial(wait_texts_done, partial(self.slots, call.replica), len(embedding.texts), self._first_output_ms)
            vectors = EmbeddingRun(sink, embedding, self._first_output_ms, lambda _: done(), refused_texts)
            return vectors.begin(self._client, embedding_request(call, embedding, {}))
        if call.demands.tools and not call.replica.takes_tools:
            return RefusedRun(sink, errors.EngineRejected("The model's chat template takes no tools."))
        extra = {"cache_prompt": False, "id_slot": call.lane, "timings_per_token": True, "n": 1}
        confirm = partial(self._wait_slot_idle, call.replica, call.lane)
        chunks = reader_of(call, call.demands.top_logprobs)
        run = StreamedRun(sink, self._first_output_ms, self._idle_ms, chunks, confirm)
        return run.begin(self._client, generation_request(replace(call, demands=_fitted(call.demands)), extra))

    async def count_input(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """Exact input tokens as the completion endpoints count them; None when the replica cannot say in time."""
        return await self._control.count(replica, partial(self._count, replica, prompt, chat, _fitted(demands)))

    async def probe(self, replica: ReplicaAddress) -> ReplicaAddress:
        """Health, model name, slots and the context window of each. Raises EngineFault, also while the model loads."""
        await self._control.check_health(replica)
        answer = await self._control.call(replica, "GET", "/props")
        if answer.status != 200:
            raise errors.EngineError(f"The replica is not ready: /props answers {answer.status}.")
        props = json_object(answer)
        settings = props.get("default_generation_settings")
        window = whole_number(settings.get("n_ctx")) if isinstance(settings, dict) else None
        slots = whole_number(props.get("total_slots"))
        return msgspec.structs.replace(
            replica,
            model=str(props.get("model_alias") or replica.model),
            context_tokens=window or replica.context_tokens,
            counts_tokens=await self._count(replica, "a", chat=True) is not None,
            continuous_usage=True,
            cache_salt=False,
            kv_tokens=slots * window if slots and window else None,
            takes_tools=_takes_tools(props.get("chat_template_caps")),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _count(
        self, replica: ReplicaAddress, prompt: str | tuple[Message, ...], chat: bool, demands: Demands = NO_DEMANDS
    ) -> Tokens | None:
        """The server's count. Raises EngineFault when it does not answer."""
        if chat:
            body: dict[str, Any] = {"messages": messages_of(prompt), **tool_fields(demands)}
            answer = await self._control.call(replica, "POST", "/v1/chat/completions/input_tokens", body)
            return whole_number(json_object(answer).get("input_tokens"))
        body = {"content": prompt, "add_special": True, "parse_special": True}
        tokens = json_object(await self._control.call(replica, "POST", "/tokenize", body)).get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def _wait_slot_idle(self, replica: ReplicaAddress, lane: int, had_output: bool) -> None:
        """Ask /slots until the slot runs nothing. Raises ReplicaLost after stop_ms without progress of the slot."""
        now, stop_s = asyncio.get_running_loop().time, self._stop_ms / 1_000
        waits_ms = chain((0,), cycle(_DECODING_POLLS_MS)) if had_output else chain((_ARRIVAL_MS,), cycle(_READING_POLLS_MS))
        last_at, give_up_at = now() + STOP_PERIODS_MAX * stop_s, now() + stop_s
        progress, lost = None, 0
        while lost < _LOST_MAX and now() < min(give_up_at, last_at):
            await asyncio.sleep(next(waits_ms) / 1_000)
            try:
                slot = await self._slot(replica, lane)
            except errors.ReplicaLost:
                lost += 1
                continue
            if slot is not None and slot.get("is_processing") is False:
                return
            seen = slot and (slot.get("id_task"), slot.get("n_prompt_tokens_processed"), slot.get("next_token"))
            if seen is not None and seen != progress:
                progress, give_up_at = seen, now() + stop_s
        raise errors.ReplicaLost("The engine did not confirm that it stopped.")

    async def _slot(self, replica: ReplicaAddress, lane: int) -> dict[str, Any] | None:
        """A slot as /slots shows it, None when it does not answer sensibly. Raises ReplicaLost."""
        return next((slot for slot in await self.slots(replica) or () if slot.get("id") == lane), None)

    async def slots(self, replica: ReplicaAddress) -> list[dict[str, Any]] | None:
        """All slots as /slots shows them, None when it does not answer sensibly. Raises ReplicaLost."""
        try:
            answer = await self._control.call(replica, "GET", "/slots")
            return msgspec.json.decode(answer.body, type=list[dict[str, Any]]) if answer.status == 200 else None
        except (errors.Stalled, errors.EngineError, *UNREADABLE):
            return None


def _takes_tools(capabilities: Any) -> bool:
    """Whether the chat template writes tools, and calls of them; a template that says nothing of it is believed to."""
    found = capabilities if isinstance(capabilities, dict) else {}
    return found.get("supports_tools") is not False and found.get("supports_tool_calls") is not False


def _fitted(demands: Demands) -> Demands:
    """The same in words that this server knows.

    It takes no tool's name as a choice, but must call the only one there is. It reports no log probability at all where no
    alternative is asked for, so it is asked for one that is then left out.
    """
    if demands.top_logprobs == 0:
        demands = replace(demands, top_logprobs=1)
    choice = demands.tool_choice
    if choice is None or choice.mode is not ToolMode.NAMED:
        return demands
    named = tuple(tool for tool in demands.tools if tool.name == choice.name)
    return replace(demands, tools=named, tool_choice=ToolChoice(ToolMode.REQUIRED))
