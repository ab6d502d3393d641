"""What `--engine` takes, and what a start says of an engine behind a URL that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engine_servers import CONTEXT_TOKENS, ScriptedServer, Wire

from weir import errors
from weir.app.engine_choice import DeclarationParts, check_engine_names, check_further_pools, declare_models
from weir.config import EngineConfig, FurtherPoolConfig, PoolConfig, WeirConfig
from weir.control.declared_models import DeclaredModels
from weir.core.registry.model import Pool
from weir.core.tenancy import ServiceClass
from weir.engines.openai_compatible import OpenAICompatibleEngine

NOWHERE = Path("/nowhere")


def _parts(engine: OpenAICompatibleEngine, announce: Callable[[str], None] = lambda line: None) -> DeclarationParts:
    """A start without packaged models."""

    async def keep(path: Path) -> str:
        raise AssertionError(path)

    return DeclarationParts(NOWHERE, keep, engine, announce)


@pytest.mark.parametrize("engines", [["simulated"], ["llamacpp"], ["http://one:8000"], ["https://one/v1", "http://two/v1/"]])
def test_what_is_taken(engines: list[str]) -> None:
    """Protects the command line: the kinds by name, and any number of base URLs."""
    check_engine_names(engines, EngineConfig())


@pytest.mark.parametrize("engines", [[], ["vllm"], ["simulated", "llamacpp"], ["simulated", "http://one"]])
def test_what_is_not_taken(engines: list[str]) -> None:
    """Protects operators from an engine that was not meant."""
    with pytest.raises(errors.InvalidRequest, match="--engine takes 'simulated'"):
        check_engine_names(engines, EngineConfig())


@pytest.mark.parametrize("rest", ["", "me:zebra@engine", "engine/v1?key=zebra", "engine#zebra", "engine:zebra"])
def test_a_url_with_more_than_a_base_is_refused(rest: str) -> None:
    """Protects secrets: what looks like one is pointed to its file before anything is sent, and is not repeated."""
    with pytest.raises(errors.InvalidRequest, match=r"engine\.api_key_file") as refused:
        check_engine_names(["http://good", f"http://{rest}"], EngineConfig())
    assert "zebra" not in refused.value.detail + repr(refused.value.members)


def test_the_packaged_models_do_not_embed() -> None:
    """Protects operators from a setting without effect: what embeds is a simulated engine, or one behind a URL."""
    with pytest.raises(errors.InvalidRequest, match=r"engine\.embeddings"):
        check_engine_names(["llamacpp"], EngineConfig(embeddings=True))
    for engine in ("simulated", "http://engine"):
        check_engine_names([engine], EngineConfig(embeddings=True))


async def test_what_embeds_is_another_revision() -> None:
    """Protects indexes and ids: a model that is declared to embed says so, and all others keep their ids."""
    engine = OpenAICompatibleEngine()
    text, vectors = [
        (await declare_models(["simulated"], WeirConfig(engine=EngineConfig(embeddings=embeds)), _parts(engine))).revisions[0]
        for embeds in (False, True)
    ]
    assert (text.embeds, text.chat, text.id) == (False, True, "simulated@7ea0e978")
    assert (vectors.embeds, vectors.chat) == (True, False) and vectors.id != text.id


@pytest.mark.parametrize(
    ("key", "config"),
    [("engine.api_key_file", EngineConfig(api_key_file="key")), ("engine.external", EngineConfig(external=True))],
)
def test_settings_of_a_url_need_one(key: str, config: EngineConfig) -> None:
    """Protects operators from a setting without effect: who believes to be external is not."""
    for engine in ("simulated", "llamacpp"):
        with pytest.raises(errors.InvalidRequest, match=key):
            check_engine_names([engine], config)
    check_engine_names(["http://engine"], config)


# ── further pools ────────────────────────────────────────────────────────────────────────────────────────────────────


URLS = FurtherPoolConfig(urls=("http://one",))


@pytest.mark.parametrize(
    ("engine", "name", "pool", "field"),
    [
        ("simulated", "assistant", FurtherPoolConfig(), "pools.assistant"),
        ("simulated", "completion", FurtherPoolConfig(), "pools.completion"),
        ("simulated", "Jobs", FurtherPoolConfig(), "pools.Jobs"),
        ("simulated", "a b", FurtherPoolConfig(), "pools.a b"),
        ("simulated", "jobs", FurtherPoolConfig(tenant="Acme"), "pools.jobs.tenant"),
        ("simulated", "jobs", URLS, "pools.jobs.urls"),
        ("llamacpp", "jobs", URLS, "pools.jobs.urls"),
        ("http://engine", "jobs", FurtherPoolConfig(), "pools.jobs.urls"),
        ("http://engine", "jobs", FurtherPoolConfig(urls=("http://one", "http://me:zebra@two")), "pools.jobs.urls"),
    ],
)
def test_a_further_pool_that_cannot_be_meant_is_refused(engine: str, name: str, pool: FurtherPoolConfig, field: str) -> None:
    """Protects operators from a pool that takes another's place, that nobody can name, or whose engines are not its own."""
    with pytest.raises(errors.InvalidRequest) as refused:
        check_further_pools([engine], {"fine": URLS if engine.startswith("http") else FurtherPoolConfig(), name: pool})
    assert refused.value.members["field"] == field and field in refused.value.detail and refused.value.members["accepted"]
    assert "zebra" not in refused.value.detail + repr(refused.value.members)


async def test_further_pools_serve_what_the_first_one_serves() -> None:
    """Protects the declaration: one revision and one alias, each pool as configured, the first one's lanes if none are set."""
    engine = OpenAICompatibleEngine()
    jobs = FurtherPoolConfig(2, 8, "acme", (ServiceClass.BATCH,), 900)
    config = WeirConfig(
        pool=PoolConfig(service_classes=(ServiceClass.INTERACTIVE,), input_tokens_max=50),
        pools={"jobs": jobs, "plain": FurtherPoolConfig()},
    )
    check_further_pools(["simulated"], config.pools)
    models = await declare_models(["simulated"], config, _parts(engine))
    [revision], [alias] = models.revisions, models.aliases
    assert alias.revision == revision.id
    assert models.pools == (
        Pool("assistant", revision.id, 1, 64, service_classes=(ServiceClass.INTERACTIVE,), input_tokens_max=50, declared=True),
        Pool(
            "jobs", revision.id, 2, 8, tenant="acme", service_classes=(ServiceClass.BATCH,), input_tokens_max=900, declared=True
        ),
        Pool("plain", revision.id, 1, 64, declared=True),
    )


async def test_a_further_pool_has_engines_of_its_own() -> None:
    """Protects pools behind URLs: each has its own addresses, whose key is the one that is configured for all."""
    async with ScriptedServer().running() as server:
        engine, further = OpenAICompatibleEngine(), FurtherPoolConfig(urls=("http://127.0.0.1:9",), concurrency=3)
        config = WeirConfig(pools={"jobs": further})
        check_further_pools([server.url], config.pools)
        try:
            models = await declare_models([server.url], config, _parts(engine))
        finally:
            await engine.aclose()
    assert [(pool.name, pool.urls, pool.concurrency) for pool in models.pools] == [
        ("assistant", (server.url,), 16),
        ("jobs", ("http://127.0.0.1:9",), 3),
    ]


# ── behind a URL ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def declared(server: ScriptedServer, *, start_ms: int = 60_000) -> tuple[DeclaredModels, list[str]]:
    """What a start with this server's URL declares, and what it says meanwhile."""
    engine, said = OpenAICompatibleEngine(), list[str]()
    config = EngineConfig(start_ms=start_ms)
    try:
        return await declare_models([server.url], WeirConfig(engine=config), _parts(engine, said.append)), said
    finally:
        await engine.aclose()


class Scripted(ScriptedServer):
    """Answers /v1/models with the given statuses, then as an engine."""

    statuses: tuple[int, ...] = ()
    asked = 0

    async def _answer(self, path: bytes, wire: Wire, body: dict[str, Any]) -> None:
        if path == b"/v1/models":
            self.asked += 1
            if self.asked <= len(self.statuses):
                await wire.answer(self.statuses[self.asked - 1], {})
                return
        await super()._answer(path, wire, body)


async def test_the_first_listed_model_is_served() -> None:
    """Protects the declaration: the server's model and window, once it answers, and the wait is explained meanwhile."""
    async with Scripted().running() as server:
        assert isinstance(server, Scripted)
        server.statuses = (503, 503)
        models, said = await declared(server)
    [revision], [alias], [pool] = models.revisions, models.aliases, models.pools
    assert (revision.artifact, revision.context_tokens, alias.name) == ("m", CONTEXT_TOKENS, "assistant")
    assert pool.urls == (server.url,)
    assert [line for line in said if "503" in line] == [
        f"waiting for {server.url}: The engine lists no models: /v1/models answers 503."
    ]


async def test_a_refused_key_ends_the_start_at_once() -> None:
    """Protects the first five minutes: no waiting for what cannot change, and the key's setting is named."""
    async with Scripted().running() as server:
        assert isinstance(server, Scripted)
        server.statuses = (401,) * 9
        with pytest.raises(errors.EngineError, match=r"refuses the key \(engine\.api_key_file\)"):
            await declared(server)
        assert server.asked == 1


async def test_what_is_no_engine_is_given_up_with_the_reason() -> None:
    """Protects operators from a URL that speaks HTTP and nothing else."""
    async with Scripted().running() as server:
        assert isinstance(server, Scripted)
        server.statuses = (404,) * 9
        with pytest.raises(errors.EngineError, match="did not answer within 300 ms: The engine lists no models"):
            await declared(server, start_ms=300)
