"""What engines of each kind cannot do, so that a request is refused by its field's name before anything is held for it."""

from weir.core.registry.model import EngineKind
from weir.core.request import InferenceRequest


def lacking(request: InferenceRequest, engine: EngineKind) -> tuple[str, str] | None:
    """The first field, named as OpenAI does, that no engine of this kind serves, and what is accepted in its place."""
    if engine is EngineKind.LLAMACPP and request.demands.choices > 1:
        return "n", "1: this model's engine makes one choice per request"
    if engine is EngineKind.OPENAI and request.sampling.top_k is not None:
        return "top_k", "absent: this model's engine does not take it"
    return None
