"""The clients of engines: one per engine kind, shared by all replicas of that kind."""

from weir.config import EngineConfig
from weir.core.registry.model import EngineKind
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.ports import Engine


class EngineClients:
    """One client per engine kind."""

    def __init__(self, config: EngineConfig) -> None:
        self._llamacpp = LlamaCppEngine(first_output_ms=config.first_output_ms, idle_ms=config.idle_ms)
        self._openai = OpenAICompatibleEngine(first_output_ms=config.first_output_ms, idle_ms=config.idle_ms)

    def of(self, kind: EngineKind) -> Engine:
        """The client that speaks to this kind of engine."""
        return self._llamacpp if kind is EngineKind.LLAMACPP else self._openai

    async def aclose(self) -> None:
        """Close every connection."""
        await self._llamacpp.aclose()
        await self._openai.aclose()
