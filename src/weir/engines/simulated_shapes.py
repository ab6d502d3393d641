"""What the simulated engine's answers look like: vLLM's JSON and events for chat and for plain completions.

Pure text from what is given: it knows nothing of batches or connections. `simulated_api` decides what is answered, and when.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

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

    def __init__(self, head: tuple[int, str, int], chat: bool, input_tokens: Tokens, options: StreamOptions | None) -> None:
        serial, model, created_s = head
        streamed, options = options is not None, options or StreamOptions()
        self.chat = chat
        self.streamed = streamed
        self.input_tokens = input_tokens
        self._include_usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{serial}",
            "object": f"{kind}.chunk" if chat and streamed else kind,
            "created": created_s,
            "model": model,
        }

    def opening(self) -> bytes:
        """What comes before the first token: chat's role chunk."""
        return self._event([self._choice(delta={"role": "assistant", "content": ""})], 0) if self.chat else b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """One event per token."""
        return b"".join(self._event([self._piece(delta.text, None)], delta.tokens or 0) for delta in deltas)

    def closing(self, end: EngineEnd) -> bytes:
        """The finish chunk, the usage chunk if asked for, and the end mark; or the error event."""
        if end.usage is None or end.reason is None:
            return _event({"error": _fault(end).body["error"]}) + b"data: [DONE]\n\n"
        reason = end.reason.value
        last = self._choice(delta={}, reason=reason) if self.chat else self._piece("", reason)
        text = self._event([last], end.usage.output_tokens)
        if self._include_usage:
            text += _event({**self._head, "choices": [], "usage": _usage(end.usage)})
        return text + b"data: [DONE]\n\n"

    def whole(self, text: str, end: EngineEnd) -> bytes:
        """The answer that is not streamed. Raises Refusal when the run failed."""
        if end.usage is None or end.reason is None:
            raise _fault(end)
        if self.chat:
            choice = self._choice(message={"role": "assistant", "content": text}, reason=end.reason.value)
        else:
            choice = self._choice(text=text, reason=end.reason.value)
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": _usage(end.usage)})

    def _piece(self, text: str, reason: str | None) -> dict[str, Any]:
        return self._choice(delta={"content": text}, reason=reason) if self.chat else self._choice(text=text, reason=reason)

    def _choice(self, *, reason: str | None = None, **content: Any) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def _event(self, choices: list[dict[str, Any]], output_tokens: Tokens) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._continuous:
            chunk["usage"] = {
                "prompt_tokens": self.input_tokens,
                "total_tokens": self.input_tokens + output_tokens,
                "completion_tokens": output_tokens,
            }
        return _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(usage: EngineUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
    }


def _fault(end: EngineEnd) -> Refusal:
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
