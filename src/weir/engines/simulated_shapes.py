"""What the simulated engine's answers look like: vLLM's JSON and events for chat and for plain completions.

Pure text from what is given: it knows nothing of batches or connections. `simulated_api` decides what is answered, and when.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weir.core.endings import FinishReason
from weir.core.output import Reply, ShapedDelta, TokenLogprob, ToolCallPart, replies
from weir.engines.simulated import ReplicaLoad
from weir.engines.simulated_blocks import BLOCK_TOKENS
from weir.ports import Delta, EngineEnd, EngineUsage
from weir.units import Tokens


class Refusal(Exception):
    """An answer in OpenAI's error shape instead of the one asked for."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class StreamOptions(msgspec.Struct):
    """What a stream is to carry beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Shape:
    """How one generation is written. head: its serial number, model and time in seconds. options: None where not streamed."""

    def __init__(
        self,
        head: tuple[int, str, int],
        chat: bool,
        input_tokens: Tokens,
        options: StreamOptions | None,
        *,
        choices: int = 1,
    ) -> None:
        serial, model, created_s = head
        streamed, options = options is not None, options or StreamOptions()
        self.chat = chat
        self.streamed = streamed
        self.input_tokens = input_tokens
        self._include_usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        self._made = [0] * choices
        self._offsets = [0] * choices
        kind = "chat.completion" if chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{serial}",
            "object": f"{kind}.chunk" if chat and streamed else kind,
            "created": created_s,
            "model": model,
        }

    def opening(self) -> bytes:
        """What comes before the first token: chat's role chunk, of each choice."""
        if not self.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join([self._event([_choice(index, delta=role)], 0) for index in range(len(self._made))])

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """One event per token; what a chunk counts is its own choice's, as in vLLM."""
        return b"".join(
            [
                self._shaped(delta)
                if isinstance(delta, ShapedDelta)
                else self._event([self._piece(delta.text, None)], delta.tokens or 0)
                for delta in deltas
            ]
        )

    def _shaped(self, delta: ShapedDelta) -> bytes:
        index = delta.choice
        self._made[index] += 1
        logprobs = self._logprobs(delta.logprobs, index) if delta.logprobs else None
        if self.chat:
            events = self._event([_choice(index, logprobs=logprobs, delta=_chat_delta(delta))], self._made[index])
        else:
            events = self._event([_choice(index, logprobs=logprobs, text=delta.text)], self._made[index])
        if delta.finish is not None:
            events += self._event([self._last(index, delta.finish)], self._made[index])
        return events

    def _last(self, index: int, reason: FinishReason) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return _choice(index, reason=reason.value, **content)

    def _logprobs(self, entries: Sequence[TokenLogprob], index: int) -> dict[str, Any]:
        """Entries for chat, columns for completions."""
        if self.chat:
            return {"content": [{**_entry(entry), "top_logprobs": [_entry(other) for other in entry.top]} for entry in entries]}
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry.token)
        return {
            "text_offset": offsets,
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{other.token: other.logprob for other in (entry, *entry.top)} for entry in entries],
        }

    def closing(self, end: EngineEnd) -> bytes:
        """The finish chunk of an only choice, the usage chunk if asked for, and the end mark; or the error event."""
        if end.usage is None or end.reason is None:
            return _event({"error": fault_of(end).body["error"]}) + b"data: [DONE]\n\n"
        text = self._event([self._last(0, end.reason)], end.usage.output_tokens) if len(self._made) == 1 else b""
        if self._include_usage:
            text += _event({**self._head, "choices": [], "usage": _usage(end.usage)})
        return text + b"data: [DONE]\n\n"

    def whole(self, pieces: Sequence[Delta], end: EngineEnd) -> bytes:
        """The answer that is not streamed. Raises Refusal when the run failed."""
        if end.usage is None or end.reason is None:
            raise fault_of(end)
        made = replies(pieces, len(self._made), self._head["id"])
        choices = [self._whole_choice(index, reply, reply.finish or end.reason) for index, reply in enumerate(made)]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": _usage(end.usage)})

    def _whole_choice(self, index: int, reply: Reply, reason: FinishReason) -> dict[str, Any]:
        logprobs = self._logprobs(reply.logprobs, index) if reply.logprobs else None
        if not self.chat:
            return _choice(index, reason=reason.value, logprobs=logprobs, text=reply.text)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text if reply.text or not reply.tool_calls else None}
        if reply.reasoning:
            message["reasoning"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        return _choice(index, reason=reason.value, logprobs=logprobs, message=message)

    def _piece(self, text: str, reason: str | None) -> dict[str, Any]:
        return _choice(0, reason=reason, delta={"content": text}) if self.chat else _choice(0, reason=reason, text=text)

    def _event(self, choices: list[dict[str, Any]], output_tokens: Tokens) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._continuous:
            chunk["usage"] = {
                "prompt_tokens": self.input_tokens,
                "total_tokens": self.input_tokens + output_tokens,
                "completion_tokens": output_tokens,
            }
        return _event(chunk)


def _choice(index: int, *, reason: str | None = None, logprobs: Any = None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}


def _chat_delta(delta: ShapedDelta) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if delta.text or not (delta.reasoning or delta.tool_calls):
        content["content"] = delta.text
    if delta.reasoning:
        content["reasoning"] = delta.reasoning
    if delta.tool_calls:
        content["tool_calls"] = [_call_part(part) for part in delta.tool_calls]
    return content


def _call_part(part: ToolCallPart) -> dict[str, Any]:
    """A piece of a call as vLLM streams it: id and name come first and once."""
    function = {"name": part.name, "arguments": part.arguments} if part.name else {"arguments": part.arguments}
    return {"index": part.index, **({"id": part.id, "type": "function"} if part.id else {}), "function": function}


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.token_bytes}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(usage: EngineUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
    }


def fault_of(end: EngineEnd) -> Refusal:
    """The answer of a run that failed."""
    return Refusal(500, "InternalServerError", end.fault.detail if end.fault else "the engine failed")


def exposition(model: str, load: ReplicaLoad) -> str:
    """A replica's figures as vLLM's metrics."""
    rows = (
        ("num_requests_running", "gauge", load.running),
        ("num_requests_waiting", "gauge", load.waiting),
        ("kv_cache_usage_perc", "gauge", load.kv_usage),
        ("prompt_tokens_total", "counter", load.prompt_tokens),
        ("generation_tokens_total", "counter", load.generation_tokens),
        ("num_preemptions_total", "counter", load.preemptions),
        ("prefix_cache_queries_total", "counter", load.prefix_queries),
        ("prefix_cache_hits_total", "counter", load.prefix_hits),
    )
    labels = f'{{engine="0",model_name={msgspec.json.encode(model).decode()}}}'
    figures = "".join(f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {float(value)}\n" for name, kind, value in rows)
    blocks = f'block_size="{BLOCK_TOKENS}",engine="0",num_gpu_blocks="{load.kv_tokens // BLOCK_TOKENS}"'
    return f"{figures}# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{blocks}}} 1.0\n"
