"""How an engine is told to run a revision: the runtime arguments that a registration may give, each with what it accepts.

Pure. An explicit list for each engine: an argument that nobody looked at could name a file, a socket or code. What decides
isolation, or how many requests run at once, is the platform's and never an argument.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weir import errors
from weir.core.registry.model import EMBEDDINGS, Argument, EngineKind

_WORD = re.compile(r"[a-z][a-z0-9_-]{0,39}")
Arguments: TypeAlias = tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class _Whole:
    """An integer low … high."""

    low: int
    high: int

    def takes(self, value: Argument) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer {self.low} … {self.high}"


@dataclass(frozen=True, slots=True)
class _Number:
    """A number low … high."""

    low: float
    high: float

    def takes(self, value: Argument) -> bool:
        return isinstance(value, int | float) and type(value) is not bool and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number {self.low} … {self.high}"


@dataclass(frozen=True, slots=True)
class _OneOf:
    """One of these texts."""

    texts: tuple[str, ...]

    def takes(self, value: Argument) -> bool:
        return isinstance(value, str) and value in self.texts

    def __str__(self) -> str:
        return f"one of {', '.join(self.texts)}"


class _Word:
    """A plain name, which can be neither a path nor an option."""

    def takes(self, value: Argument) -> bool:
        return isinstance(value, str) and _WORD.fullmatch(value) is not None

    def __str__(self) -> str:
        return "a name of 1 … 40 of a-z 0-9 _ -, the first a letter"


class _Switch:
    """True or false."""

    def takes(self, value: Argument) -> bool:
        return type(value) is bool

    def __str__(self) -> str:
        return "true or false"


_Accepted: TypeAlias = _Whole | _Number | _OneOf | _Word | _Switch

_CACHE_TYPES = _OneOf(("f16", "q8_0", "q4_0"))
_LLAMACPP: Mapping[str, _Accepted] = {
    "batch_tokens": _Whole(32, 4_096),
    "cache_type_k": _CACHE_TYPES,
    "cache_type_v": _CACHE_TYPES,
    "chat_template": _OneOf(("model", "smollm2-tools")),
    EMBEDDINGS: _Switch(),
    "flash_attention": _Switch(),
    "pooling": _OneOf(("cls", "last", "mean")),
    "threads": _Whole(1, 1_024),
}
_SIMULATED: Mapping[str, _Accepted] = {
    EMBEDDINGS: _Switch(),
    "slowdown": _Number(0.01, 1_000),
}
_VLLM: Mapping[str, _Accepted] = {
    "dtype": _OneOf(("auto", "bfloat16", "float16", "float32")),
    EMBEDDINGS: _Switch(),
    "enable_auto_tool_choice": _Switch(),
    "enable_chunked_prefill": _Switch(),
    "enforce_eager": _Switch(),
    "gpu_memory_utilization": _Number(0.05, 1),
    "kv_cache_dtype": _OneOf(("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")),
    "max_num_batched_tokens": _Whole(64, 1_048_576),
    "quantization": _OneOf(("awq", "awq_marlin", "compressed-tensors", "fp8", "gptq", "gptq_marlin")),
    "reasoning_parser": _Word(),
    "tensor_parallel_size": _Whole(1, 64),
    "tool_call_parser": _Word(),
}
ACCEPTED: Mapping[EngineKind, Mapping[str, _Accepted]] = {
    EngineKind.LLAMACPP: _LLAMACPP,
    EngineKind.SIMULATED: _SIMULATED,
    EngineKind.OPENAI: {EMBEDDINGS: _Switch()},
    EngineKind.VLLM: _VLLM,
}
"""vLLM's are named as its own options are, but for `embeddings`; its parsers are those that it comes with, as one's own file
needs another option. What fits no model, or no GPU, shows as the reason why a replica does not start.
"""


def checked_arguments(engine: EngineKind, given: Mapping[str, Argument]) -> Arguments:
    """The arguments in the order of their names. Raises InvalidRequest for one that is not known, or for its value."""
    accepted = ACCEPTED[engine]
    for name, value in given.items():
        rule = accepted.get(name)
        if rule is None:
            members = {"field": f"arguments.{name}"[:80], "accepted": sorted(accepted)}
            raise errors.InvalidRequest(f"The engine {engine.value} takes no such argument.", members=members)
        if not rule.takes(value):
            members = {"field": f"arguments.{name}", "accepted": str(rule)}
            raise errors.InvalidRequest(f"arguments.{name} must be {rule}.", members=members)
    if given.get("cache_type_v", "f16") != "f16" and not given.get("flash_attention"):
        members = {"field": "arguments.cache_type_v", "accepted": "f16, or with arguments.flash_attention true"}
        raise errors.InvalidRequest("arguments.cache_type_v must be f16 without arguments.flash_attention.", members=members)
    if given.get("enable_auto_tool_choice") and "tool_call_parser" not in given:
        members = {"field": "arguments.enable_auto_tool_choice", "accepted": "true only with arguments.tool_call_parser"}
        raise errors.InvalidRequest("arguments.enable_auto_tool_choice needs arguments.tool_call_parser.", members=members)
    _check_embedding(given)
    return tuple(sorted(given.items()))


def _check_embedding(given: Mapping[str, Argument]) -> None:
    """How a text becomes one vector is of no use elsewhere, and such a text is read in one batch. Raises InvalidRequest."""
    embeds = given.get(EMBEDDINGS) is True
    for name, fits in (("pooling", embeds), ("batch_tokens", not embeds)):
        if name in given and not fits:
            wanted = f"{'with' if name == 'pooling' else 'without'} arguments.{EMBEDDINGS} true"
            members = {"field": f"arguments.{name}", "accepted": f"only {wanted}"}
            raise errors.InvalidRequest(f"arguments.{name} is taken only {wanted}.", members=members)
