"""How large an answer may be that is not streamed, and so waits in the gateway's memory whole."""

from weir.core.output import VECTOR_BYTES_MAX
from weir.gateway.planning import Plan
from weir.units import Bytes

_BYTES_PER_TOKEN = 256
_BYTES = 64 * 1024
"""No vocabulary has longer tokens, and a short answer may come in a few large ones."""


def whole_answer_bytes_max(plan: Plan) -> Bytes:
    """Above this an answer is more than what was asked for can take."""
    demands = plan.request.demands
    if demands.embedding is not None:
        return _BYTES + VECTOR_BYTES_MAX * len(demands.embedding.texts)
    reported = 0 if demands.top_logprobs is None else 1 + demands.top_logprobs
    return _BYTES + _BYTES_PER_TOKEN * (1 + reported) * plan.max_output_tokens * demands.choices
