"""Tenants' prefix caches stay apart through a whole cell: by what engines were sent, by cached tokens, and by the clock."""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import engine_process
from tests.e2e.ending_stage import Caller, Stage, Surface
from tests.e2e.engine_tap import EngineTap
from tests.e2e.running_cell import running_cell
from tests.e2e.sse_client import bearer, calling
from tests.e2e.surfaces import ACTIVE
from tests.isolation_probe import Probe, Send, secret_prompt

from weir.engines.simulated_bodies import SALT_FORBIDDEN, SALT_LENGTH_MAX
from weir.engines.simulated_text import count_prompt_tokens
from weir.sim.random_source import seeded_random

ROW = "llama3.1-8b/a100_sxm/tp1"
"""A prompt of 1,250 tokens takes about 80 ms, its last one alone about 13 ms."""

WORDS = 1_600  # of four letters and a blank: 2,000 tokens
PROBE_WORDS = 1_000
ROUNDS = 24
MARK = "zqx"
FIELDS_SENT = {"model", "messages", "max_tokens", "stream", "stream_options", "temperature", "cache_salt"}
_numbers = count(1)


@pytest.fixture(scope="module")
def tap() -> Iterator[EngineTap]:
    """What the simulated engine, with its prefix cache on, is asked."""
    with engine_process("--prefix-cache", "--row", ROW) as url, EngineTap(url) as started:
        yield started


@pytest.fixture(scope="module")
def stage(tap: EngineTap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_cell(tmp_path_factory.mktemp("isolation") / "state", engine=(tap.url,)) as cell:
        yield Stage(cell)
        assert "Traceback" not in cell.tail()


def new_prompt() -> str:
    """A prompt of about 2,000 tokens that nobody sent before."""
    return secret_prompt(seeded_random(next(_numbers), "isolation"), WORDS)


async def cached(stage: Stage, caller: Caller, prompt: str, surface: Surface = "native") -> int:
    """The cached input tokens of one more request with this prompt, as its record says."""
    request_id = f"it-{next(_numbers)}"
    await stage.run(caller, prompt, request_id, surface=surface, most=1)
    usage = (await stage.get(caller, request_id)).json["usage"]
    assert usage["basis"] == "engine" and usage["cached_input_tokens"] <= usage["input_tokens"]
    return int(usage["cached_input_tokens"])


@pytest.mark.parametrize("surface", ["native", "chat"])
async def test_a_tenant_meets_its_own_prompts_and_no_others(stage: Stage, surface: Surface) -> None:
    """Nothing that one tenant sent is cached for another, on either surface; what it sent itself is, the second time."""
    owner, other, prompt = await stage.caller(), await stage.caller(), new_prompt()
    assert await cached(stage, owner, prompt, surface) == 0
    assert await cached(stage, other, prompt, surface) == 0
    most = count_prompt_tokens(prompt, chat=False)
    assert most >= 2_000
    for caller in (owner, other):
        assert await cached(stage, caller, prompt, surface) > most - 50


async def test_revisions_and_cells_share_nothing_and_a_restart_forgets_nothing(
    stage: Stage, tap: EngineTap, tmp_path: Path
) -> None:
    """The same tenant's prompt is cached per cell and per revision, and still is after a restart of Weir."""
    prompt = new_prompt()
    seen = [await cached(stage, stage.demo_caller(), prompt) > 0]
    for config in ("", "[pool]\nmax_output_tokens = 64\n", ""):
        with running_cell(tmp_path / "state", engine=(tap.url,), config=config) as cell:
            again = Stage(cell)
            seen.append(await cached(again, again.demo_caller(), prompt) > 0)
    assert seen == [False, False, False, True]


async def test_a_salt_goes_with_every_call_and_tells_nothing(stage: Stage, tap: EngineTap) -> None:
    """Each call has the salt of its tenant, in the form that vLLM takes, without a word of who it is."""
    callers = [await stage.caller() for _ in range(3)]
    salts: list[set[str]] = []
    for caller in callers:
        before = len(tap.generations)
        for surface in ACTIVE:
            await cached(stage, caller, new_prompt(), surface)
        salts.append({asked.fields["cache_salt"] for asked in tap.generations[before:]})
    assert [len(own) for own in salts] == [1, 1, 1] and len(set.union(*salts)) == 3
    for caller, [salt] in zip(callers, salts, strict=True):
        assert 32 <= len(salt) <= SALT_LENGTH_MAX and not SALT_FORBIDDEN.intersection(salt)
        assert caller.tenant not in salt and bytes(caller.tenant, "ascii").hex() not in salt


REFUSED: Mapping[str, tuple[Surface, dict[str, Any]]] = {
    "cache_salt": ("native", {"cache_salt": MARK}),
    "sampling": ("native", {"sampling": {"cache_salt": MARK}}),
    "priority": ("native", {"priority": 1}),
    "input[0].cache_salt": ("native", {"input": [{"role": "user", "content": "a", "cache_salt": MARK}]}),
    "cache_prompt": ("chat", {"cache_prompt": True}),
    "id_slot": ("chat", {"id_slot": 0}),
    "extra_body": ("chat", {"extra_body": {"cache_salt": MARK}}),
    "stream_options.cache_salt": ("chat", {"stream": True, "stream_options": {"cache_salt": MARK}}),
    "kv_transfer_params": ("chat", {"kv_transfer_params": {"do_remote_prefill": True}}),
}


@pytest.mark.parametrize(("field", "asked"), [*REFUSED.items(), ("cache_salt", ("chat", {"cache_salt": MARK}))])
async def test_a_clients_own_salt_is_refused_by_name(
    stage: Stage, tap: EngineTap, field: str, asked: tuple[Surface, dict[str, Any]]
) -> None:
    """What would choose a cache, a slot or a priority is refused with its name, and no engine sees the request."""
    surface, fields = asked
    path, body = "/v1/generations", {"model_alias": "assistant", "input": "Say something.", **fields}
    if surface == "chat":
        path = "/v1/chat/completions"
        body = {"model": "assistant", "messages": [{"role": "user", "content": "Say something."}], **fields}
    before = len(tap.generations)
    headers = bearer((await stage.caller()).secret)
    async with calling(stage.cell.api, path, body=body, headers=headers) as call:
        answer = await call.answer()
    problem = answer.json["error"] if surface == "chat" else answer.json
    assert (answer.status, problem["code"], problem["field"]) == (400, "unsupported_field", field)
    assert len(tap.generations) == before


async def test_nothing_of_a_client_but_its_prompt_reaches_an_engine(stage: Stage, tap: EngineTap) -> None:
    """Headers that engines obey, labels and ids stay outside: an engine gets Weir's own four headers and its own fields."""
    caller, before = await stage.caller(), len(tap.asked)
    names = [
        "x-request-id",
        "x-vllm-priority",
        "x-cache-salt",
        "cache-salt",
        "cache_salt",
        "x-session-id",
        "traceparent",
        "cookie",
    ]
    names += ["user-agent", "openai-organization", "weir-session", "idempotency-key", "x-forwarded-for"]
    body = {
        "model": "assistant",
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 2,
        "temperature": 0.5,
        "user": MARK,
        "metadata": {"cache_salt": MARK, MARK: "1"},
    }
    headers = bearer(caller.secret, {name: f"{MARK}-{number}" for number, name in enumerate(names)})
    async with calling(stage.cell.api, "/v1/chat/completions", body=body, headers=headers) as call:
        assert (await call.answer()).status == 200
    asked = tap.asked[before:]
    [generation] = [one for one in asked if one.path.endswith("/completions")]
    assert set(generation.fields) == FIELDS_SENT
    for one in asked:
        assert set(one.headers) == {"host", "accept", "content-type", "content-length"}
        assert MARK.encode() not in one.raw and caller.secret.encode() not in one.raw
        assert caller.tenant.encode() not in one.raw


# ── by the clock ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sender(stage: Stage, caller: Caller) -> Send:
    """Streams one token through the gateway; seconds to it."""

    async def send(prompt: str) -> float:
        now = asyncio.get_running_loop().time
        begun = now()
        async with stage.call(caller, prompt, f"probe-{next(_numbers)}", most=1) as call:
            await call.output_begun()
            took = now() - begun
            async for _ in call.events():
                pass
        return took

    return send


async def test_the_time_to_a_first_token_tells_nothing_of_another_tenant(stage: Stage) -> None:
    """Who guesses another tenant's prompt by timing is right as often as a coin; of its own tenant it nearly always is."""
    victim, attacker = sender(stage, await stage.caller()), sender(stage, await stage.caller())
    await Probe(attacker, attacker, PROBE_WORDS).check_finds_out(ROUNDS, seed=11)
    await Probe(victim, attacker, PROBE_WORDS).check_finds_nothing(ROUNDS, seed=21)


@pytest.mark.model
async def test_a_real_models_slot_serves_tenants_in_turn_and_caches_for_none(tmp_path: Path) -> None:
    """On llama.cpp with one slot, which still holds the last tenant's prompt, nobody meets anything: not even its owner."""
    config = "[pool]\nconcurrency = 1\nsecond_model = false\n"
    with running_cell(tmp_path / "state", engine=("llamacpp",), config=config) as cell:
        stage = Stage(cell)
        owner, other = await stage.caller(), await stage.caller()
        prompt = secret_prompt(seeded_random(1, "slot"), 60)
        assert [await cached(stage, caller, prompt) for caller in (owner, other, owner)] == [0, 0, 0]
