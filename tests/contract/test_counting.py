"""Counting input at an engine is few at a time and never late."""

import asyncio
from typing import Any

from tests.contract.engine_servers import ScriptedServer, Wire

from weir.engines.http_client import HttpClient
from weir.engines.openai_compatible import COUNT_MS, ControlCalls, OpenAICompatibleEngine


async def test_counts_are_few_at_a_time() -> None:
    """At most four counts run at once on a replica; those that cannot be answered in time are None."""
    control, address = ControlCalls(HttpClient()), ScriptedServer(url="http://127.0.0.1:1").address()
    together, most, running = asyncio.Barrier(4), 0, 0

    async def ask() -> int:
        nonlocal most, running
        running += 1
        most = max(most, running)
        try:
            await together.wait()
            return 3
        finally:
            running -= 1

    answers = asyncio.gather(*(control.count(address, ask) for _ in range(43)))
    assert sorted(await answers, key=str) == [3] * 40 + [None] * 3
    assert most == 4 and running == 0


async def test_a_count_that_takes_too_long_is_none() -> None:
    """Protects the first token: an upper bound stands in for a count that a busy server does not give in time."""

    class _Slow(ScriptedServer):
        async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
            await asyncio.sleep(2 * COUNT_MS / 1_000)
            await wire.answer(200, {"count": 3})

    async with _Slow().running() as server:
        engine = OpenAICompatibleEngine()
        assert await engine.count_input(server.address(), "b", False) is None
        await engine.aclose()
