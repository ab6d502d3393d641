"""llama.cpp's own prompt cache crosses tenants; through Weir nobody meets it, by its cached-token counts and by the clock.

The control asks the same process without Weir, which is what a tenant cannot do: there the slot shows whose prompt it holds.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.contract.engine_servers import API_KEY, WAIT_S, Children, UnderTest, llamacpp
from tests.isolation_probe import Probe, Send, secret_prompt

from weir.engines.http_client import HttpClient
from weir.engines.http_exchange import HttpRequest
from weir.ports import EngineCall
from weir.sim.random_source import seeded_random

pytestmark = pytest.mark.model

LANE = 0
PROMPT_WORDS = 120
PROBE_WORDS = 32
ROUNDS = 8  # the fewest that can tell a coin from certainty at one in a hundred


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


@pytest.fixture
async def replica(children: Children) -> AsyncIterator[UnderTest]:
    """Weir's client of a real llama.cpp process."""
    async with llamacpp(children, False) as opened:
        yield opened


@pytest.fixture
async def direct() -> AsyncIterator[HttpClient]:
    """A client that goes around Weir."""
    client = HttpClient()
    yield client
    await client.aclose()


def call(replica: UnderTest, prompt: str, tenant: str) -> EngineCall:
    """One token for a tenant, always in the same slot."""
    return replace(replica.call(prompt, lane=LANE, most=1), cache_salt=f"salt of {tenant}")


async def cached(replica: UnderTest, prompt: str, tenant: str) -> int:
    """The cached tokens of a call through Weir."""
    [end] = (await replica.finish(call(replica, prompt, tenant))).ends
    assert end.usage is not None
    return end.usage.cached_input_tokens


async def cached_around(client: HttpClient, replica: UnderTest, prompt: str, **fields: Any) -> int:
    """The cached tokens of a call that allows llama.cpp its cache, in the same slot. Raises what the client raises."""
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "id_slot": LANE, "cache_prompt": True, **fields}
    body = msgspec.json.encode(asked)
    request = HttpRequest("POST", replica.replica.url, "/v1/completions", body, API_KEY)
    answer = await client.request(request, timeout_ms=WAIT_S * 1_000)
    assert answer.status == 200, answer.body
    return int(msgspec.json.decode(answer.body)["timings"]["cache_n"])


async def test_one_slot_caches_nothing_across_tenants(replica: UnderTest, direct: HttpClient) -> None:
    """Of a prompt that the slot still holds nobody finds a token through Weir, not even its tenant; around Weir it is found."""
    prompt = secret_prompt(seeded_random(1, "llama.cpp"), PROMPT_WORDS)
    assert await cached(replica, prompt, "acme") == 0
    assert await cached(replica, prompt, "globex") == 0
    assert await cached_around(direct, replica, prompt) > 100
    assert await cached(replica, prompt, "globex") == 0


async def test_a_slot_filled_around_weir_is_not_met_either(replica: UnderTest, direct: HttpClient) -> None:
    """llama.cpp takes a salt and ignores it, which is why Weir forbids its cache instead; also for what others put there."""
    prompt = secret_prompt(seeded_random(2, "llama.cpp"), PROMPT_WORDS)
    assert await cached_around(direct, replica, prompt, cache_salt="a") < 100
    assert await cached_around(direct, replica, prompt, cache_salt="b") > 100
    assert await cached(replica, prompt, "acme") == 0


# ── by the clock ─────────────────────────────────────────────────────────────────────────────────────────────────────


def timed(ask: Callable[[str], Awaitable[object]]) -> Send:
    """Sends so; seconds to the first token."""

    async def send(prompt: str) -> float:
        now = asyncio.get_running_loop().time
        begun = now()
        await ask(prompt)
        return now() - begun

    return send


def sender(replica: UnderTest, tenant: str) -> Send:
    """Sends through Weir's client."""
    return timed(lambda prompt: cached(replica, prompt, tenant))


def sender_around(client: HttpClient, replica: UnderTest) -> Send:
    """Sends around Weir."""
    return timed(lambda prompt: cached_around(client, replica, prompt))


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(60, marks=pytest.mark.slow)])
async def test_the_time_to_a_first_token_tells_nothing(replica: UnderTest, direct: HttpClient, rounds: int) -> None:
    """Through Weir the probe is a coin, in the victim's own slot; who goes around Weir finds the victim's prompt there."""
    victim = sender(replica, "acme")
    await Probe(victim, sender_around(direct, replica), PROBE_WORDS).check_finds_out(rounds, seed=11)
    await Probe(victim, sender(replica, "globex"), PROBE_WORDS).check_finds_nothing(rounds, seed=21)
