"""What revisions and engines of each kind cannot do, so that what asks for it is refused by name before any hold.

llama.cpp turns a JSON schema into a grammar in the one thread that all its slots decode in. Schemas whose grammar takes minutes
to build would stop every tenant's work on the replica, and no cancel ends it; so their size and shape are bounded here.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from weir.core.demands import Demands
from weir.core.registry.model import EngineKind, Revision
from weir.core.request import InferenceRequest
from weir.units import Bytes

GRAMMAR_SCHEMA_BYTES_MAX: Bytes = 32 * 1024
GRAMMAR_BRANCHES_MAX = 256
"""Values and alternatives in all schemas of a request: a thousand take seconds, five thousand two minutes."""

GRAMMAR_OPTIONAL_MAX = 100
"""Properties that may be left out, in all schemas of a request: each later one may follow each, so the cost is their square."""

_BRANCHING = ("enum", "anyOf", "oneOf", "allOf", "type")
_GRAMMAR_ACCEPTED = (
    f"schemas without pattern, of up to {GRAMMAR_SCHEMA_BYTES_MAX // 1024} KiB, {GRAMMAR_BRANCHES_MAX} alternatives and "
    f"{GRAMMAR_OPTIONAL_MAX} optional properties in all"
)
_OBJECT_ARGUMENTS = "tool calls whose arguments are a JSON object"


def makes_something_else(request: InferenceRequest, revision: Revision) -> str | None:
    """What the revision makes, where that is not what is asked for; None where it is."""
    if revision.embeds is (request.demands.embedding is not None):
        return None
    return "embeddings" if revision.embeds else "text"


def lacking(request: InferenceRequest, engine: EngineKind) -> tuple[str, str] | None:
    """The first field, named as OpenAI does, that no engine of this kind serves, and what is accepted in its place."""
    if engine is EngineKind.LLAMACPP:
        return _llamacpp_lacks(request)
    if engine is EngineKind.OPENAI and request.sampling.top_k is not None:
        return "top_k", "absent: this model's engine does not take it"
    if engine is EngineKind.VLLM and not _tells_objects(request):
        return "messages", _OBJECT_ARGUMENTS
    return None


def _llamacpp_lacks(request: InferenceRequest) -> tuple[str, str] | None:
    demands = request.demands
    if demands.choices > 1:
        return "n", "1: this model's engine makes one choice per request"
    if demands.tools and demands.top_logprobs is not None:
        return "logprobs", "false: this model's engine reports none beside tools"
    if demands.embedding is not None and demands.embedding.dimensions is not None:
        return "dimensions", "absent: this model's engine makes vectors of one size"
    if not _tells_objects(request):
        return "messages", _OBJECT_ARGUMENTS
    if not _is_quick_grammar(demands):
        return "tools" if demands.tools else "response_format", _GRAMMAR_ACCEPTED
    return None


def _tells_objects(request: InferenceRequest) -> bool:
    """Whether each call that is told again has arguments that a chat template can write: a JSON object."""
    turns = () if isinstance(request.prompt, str) else request.prompt
    return all(isinstance(_decoded(call.arguments), dict) for turn in turns for call in turn.tool_calls)


def _is_quick_grammar(demands: Demands) -> bool:
    """Whether the grammar of all schemas is built in a moment."""
    texts = [tool.parameters for tool in demands.tools if tool.parameters is not None]
    if demands.form is not None and demands.form.schema is not None:
        texts.append(demands.form.schema)
    if sum(len(text.encode()) for text in texts) > GRAMMAR_SCHEMA_BYTES_MAX:
        return False
    nodes = [node for text in texts for node in _objects_in(_decoded(text))]
    is_small = sum(map(_branches_in, nodes)) <= GRAMMAR_BRANCHES_MAX and sum(map(_optional_in, nodes)) <= GRAMMAR_OPTIONAL_MAX
    return is_small and not any(isinstance(node.get("pattern"), str) for node in nodes)


def _branches_in(node: dict[str, Any]) -> int:
    """How many values and alternatives it lists."""
    return sum(len(node[name]) for name in _BRANCHING if isinstance(node.get(name), list))


def _optional_in(node: dict[str, Any]) -> int:
    """How many properties of an object may be left out."""
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return 0
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - needed)


def _objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    left = [value]
    while left:  # bounded by the text that it was decoded from
        item = left.pop()
        if isinstance(item, dict):
            yield item
            left += item.values()
        elif isinstance(item, list):
            left += item


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
