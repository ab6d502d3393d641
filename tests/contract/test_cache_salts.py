"""Who gets a cache salt: what says in both places that it is vLLM; and no vLLM goes without one for a moment's failure."""

from dataclasses import dataclass
from typing import Any

import pytest
from tests.contract.engine_servers import ScriptedServer, Sink, Wire

from weir.core.request import Sampling
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.errors import EngineError
from weir.ports import EngineCall


@dataclass
class Claims(ScriptedServer):
    """A server that says whose its model is, and answers /version so."""

    owner: str = "vllm"
    version: tuple[int, Any] = (200, {"version": "0.32.0"})

    async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
        if path == b"/v1/models":
            await wire.answer(200, {"data": [{"id": "m", "owned_by": self.owner}]})
        elif path == b"/version":
            await wire.answer(*self.version)
        else:
            await super()._answer(path, wire, body)


@pytest.mark.parametrize(
    ("owner", "version", "salted"),
    [
        ("vllm", (200, {"version": "0.32.0"}), True),
        ("vllm", (200, {"version": 32}), False),
        ("vllm", (404, {}), False),
        ("llamacpp", (200, {"version": "1"}), False),
        ("somebody", (500, {}), False),
    ],
)
async def test_both_places_must_say_so(owner: str, version: tuple[int, Any], salted: bool) -> None:
    """A promise of salts is believed only of a server that is vLLM by its version and by its model's owner."""
    async with Claims(owner=owner, version=version).running() as server:
        engine = OpenAICompatibleEngine()
        assert (await engine.probe(server.address())).cache_salt is salted
        await engine.aclose()


@pytest.mark.parametrize("status", [500, 503])
async def test_a_vllm_that_fails_for_a_moment_is_not_served_without_salts(status: int) -> None:
    """Protects tenants of a busy vLLM: while its /version fails it is no replica, rather than one with a shared cache."""
    server = Claims(version=(status, {}))
    async with server.running():
        engine = OpenAICompatibleEngine()
        with pytest.raises(EngineError, match=f"/version answers {status}"):
            await engine.probe(server.address())
        server.version = Claims().version
        assert (await engine.probe(server.address())).cache_salt
        await engine.aclose()


@pytest.mark.parametrize(("owner", "forbids"), [("llamacpp", True), ("vllm", False), ("somebody", False)])
async def test_llamacpp_behind_a_url_reuses_no_prompt(owner: str, forbids: bool) -> None:
    """Protects tenants of a server without salts: every call forbids its cache, where there is a field for that."""
    async with Claims(owner=owner).running() as server:
        engine, sink = OpenAICompatibleEngine(), Sink()
        engine.start(EngineCall(await engine.probe(server.address()), 0, "hi", True, 2, Sampling(), "salt"), sink)
        await sink.end()
        assert server.requests[-1][1].get("cache_prompt") == (False if forbids else None)
        await engine.aclose()
