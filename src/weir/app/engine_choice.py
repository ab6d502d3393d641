"""What `--engine` means: which revisions, aliases and pools a start declares.

`llamacpp`: the packaged models, as artifacts that this cell signs itself: SmolLM2 behind alias `assistant` and, on demand,
Gemma behind `completion`. `simulated`: one simulated model. A URL: the first model that an OpenAI-compatible server lists, once
it answers with our key. A revision's id carries a digest of everything that makes it what it is, so another artifact or window
is another revision. Further pools serve what `assistant` means.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from weir import errors
from weir.config import EngineConfig, FurtherPoolConfig, PoolConfig, WeirConfig, read_api_key
from weir.control.bootstrap import DEMO_PRICE
from weir.control.declared_models import DeclaredModels
from weir.control.validation import NAME_PATTERN
from weir.core.registry.arguments import Arguments
from weir.core.registry.model import EMBEDDINGS, Alias, EngineKind, Pool, Revision
from weir.engines.http_exchange import parse_origin
from weir.engines.packaged_models import gemma_path, smollm2_path
from weir.messages import ReplicaAddress
from weir.ports import Engine
from weir.units import Millis, Tokens

SIMULATED = "simulated"
LLAMACPP = "llamacpp"
_ASSISTANT = "assistant"
_COMPLETION = "completion"
_UNSTATED_CONTEXT_TOKENS = 8_192
"""Window of a served model when neither its server nor the configuration says one."""

_PROBE_RETRY_S = 0.5
_ON_DEMAND_IDLE_MS = 600_000


@dataclass(frozen=True, slots=True)
class _Artifact:
    """A model before it has a revision id. Its window and concurrency are used where the pool's configuration is silent.

    digest: of what makes it what it is; artifact_digest: of the signed artifact, if it is one.
    """

    name: str
    engine: EngineKind
    artifact: str
    digest: str
    context_tokens: Tokens
    concurrency: int
    chat: bool = True
    artifact_digest: str | None = None
    arguments: Arguments = ()


def check_engine_names(engines: list[str], config: EngineConfig) -> None:
    """Refuse what `--engine` does not take, and settings of a URL without one. Raises InvalidRequest, without the URL."""
    urls = [name for name in engines if name.startswith(("http://", "https://"))]
    if engines not in ([SIMULATED], [LLAMACPP]) and (not urls or urls != engines):
        raise errors.InvalidRequest(
            "--engine takes 'simulated', 'llamacpp', or one or more http:// or https:// URLs.",
            members={"field": "--engine", "accepted": "simulated, llamacpp, URL [URL ...]"},
        )
    for url in urls:
        _check_url("--engine", url)
    of_urls = {"engine.api_key_file": config.api_key_file is not None, "engine.external": config.external}
    for key, is_set in of_urls.items():
        if is_set and not urls:
            raise _refused(key, "is set, but no --engine is a URL", "only with --engine URL")
    if config.embeddings and engines == [LLAMACPP]:
        raise _refused("engine.embeddings", "is set, but the packaged models make text", "only with --engine URL or simulated")


def check_further_pools(engines: list[str], pools: Mapping[str, FurtherPoolConfig]) -> None:
    """Refuse a name that is taken or none, and addresses of engines unless `--engine` is a URL too. Raises InvalidRequest."""
    behind_urls = engines not in ([SIMULATED], [LLAMACPP])
    for name, pool in pools.items():
        key = f"pools.{name}"
        if name in (_ASSISTANT, _COMPLETION):
            raise _refused(key, "has the name of an alias's own pool", f"a name other than {_ASSISTANT} and {_COMPLETION}")
        for named, text in ((key, name), (f"{key}.tenant", pool.tenant)):
            if text is not None and not re.fullmatch(NAME_PATTERN, text):
                raise _refused(named, "is not a valid name", NAME_PATTERN)
        if bool(pool.urls) is not behind_urls:
            problem = "is set, but no --engine is a URL" if pool.urls else "is missing, but --engine is a URL"
            raise _refused(f"{key}.urls", problem, "with --engine URL, and only then, the URLs of this pool's own engines")
        for url in pool.urls:
            _check_url(f"{key}.urls", url)


def _check_url(key: str, url: str) -> None:
    try:
        parse_origin(url)
    except errors.EngineError as fault:
        raise errors.InvalidRequest(
            f"{key} takes a URL of scheme, host, port and path alone; a key belongs in the file of engine.api_key_file.",
            members={"field": key, "accepted": "http[s]://HOST[:PORT][/PATH]"},
        ) from fault


def _refused(key: str, problem: str, accepted: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"Configuration key '{key}' {problem}; accepted: {accepted}.", members={"field": key, "accepted": accepted}
    )


@dataclass(frozen=True, slots=True)
class DeclarationParts:
    """What a declaration needs. models_directory: where the packaged models are assembled; keep: makes an artifact of such a
    file, and answers its digest; client_of_url: asks engines behind URLs.
    """

    models_directory: Path
    keep: Callable[[Path], Awaitable[str]]
    client_of_url: Engine
    announce: Callable[[str], None]


async def declare_models(engines: list[str], config: WeirConfig, parts: DeclarationParts) -> DeclaredModels:
    """The models behind `--engine`.

    Raises EngineError when an engine at a URL refuses our key or is not ready in time, ArtifactRefused for a damaged model.
    """
    pool, further = config.pool, config.pools
    if engines == [SIMULATED]:
        chat, arguments = _making(config.engine)
        simulated = _Artifact("simulated", EngineKind.SIMULATED, "demo", "demo", 32_768, 64, chat, arguments=arguments)
        return _declared([_named(simulated, _ASSISTANT, pool)], further)
    if engines == [LLAMACPP]:
        parts.announce("reading SmolLM2-135M-Instruct")
        entries = [_named(await _smollm2(parts), _ASSISTANT, pool)]
        if pool.second_model:
            parts.announce("reading Gemma 3 270M (starts with its first request)")
            second = await _gemma(parts)
            alone = PoolConfig(default_max_output_tokens=pool.default_max_output_tokens, threads=pool.threads)
            entries.append(_named(second, _COMPLETION, alone, on_demand=True))
        return _declared(entries, further)
    window = pool.context_tokens or _UNSTATED_CONTEXT_TOKENS
    artifact = await _behind_url(engines, config.engine, parts.client_of_url, window, parts.announce)
    served = replace(pool, context_tokens=artifact.context_tokens)
    entry = _named(artifact, _ASSISTANT, served, urls=tuple(engines), external=config.engine.external)
    return _declared([entry], further)


Entry = tuple[Revision, Alias, Pool]


def _declared(entries: list[Entry], further: Mapping[str, FurtherPoolConfig]) -> DeclaredModels:
    """The entries, and further pools of the first one's revision."""
    revisions, aliases, pools = zip(*entries, strict=True)
    return DeclaredModels(revisions, aliases, (*pools, *(_beside(pools[0], name, pool) for name, pool in further.items())))


def _beside(first: Pool, name: str, pool: FurtherPoolConfig) -> Pool:
    return Pool(
        name=name,
        revision=first.revision,
        replicas=pool.replicas,
        concurrency=pool.concurrency or first.concurrency,
        urls=pool.urls,
        tenant=pool.tenant,
        service_classes=pool.service_classes,
        input_tokens_max=pool.input_tokens_max,
        declared=True,
    )


def _named(
    artifact: _Artifact,
    alias: str,
    pool: PoolConfig,
    *,
    urls: tuple[str, ...] = (),
    on_demand: bool = False,
    external: bool = False,
) -> Entry:
    context = pool.context_tokens or artifact.context_tokens
    most = min(pool.max_output_tokens or context, context)
    identity: tuple[object, ...] = (artifact.engine, artifact.digest, context, most, artifact.chat, external)
    if artifact.arguments:
        identity = (*identity, artifact.arguments)
    digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:8]
    revision = Revision(
        id=f"{artifact.name}@{digest}",
        engine=artifact.engine,
        artifact=artifact.artifact,
        context_tokens=context,
        max_output_tokens=most,
        typical_output_tokens=min(pool.typical_output_tokens, most),
        price=DEMO_PRICE,
        chat=artifact.chat,
        external=external,
        artifact_digest=artifact.artifact_digest,
        arguments=artifact.arguments,
    )
    kept = Pool(
        name=alias,
        revision=revision.id,
        replicas=pool.replicas,
        concurrency=pool.concurrency or artifact.concurrency,
        urls=urls,
        on_demand=on_demand,
        idle_stop_ms=_ON_DEMAND_IDLE_MS,
        service_classes=pool.service_classes,
        input_tokens_max=pool.input_tokens_max,
        declared=True,
    )
    return revision, Alias(alias, revision.id, min(pool.default_max_output_tokens, most)), kept


async def _smollm2(parts: DeclarationParts) -> _Artifact:
    path = smollm2_path()
    digest = await parts.keep(path)
    name = "smollm2-135m-instruct-q4_1"
    template = (("chat_template", "smollm2-tools"),)  # its own tells it of no tools
    return _Artifact(name, EngineKind.LLAMACPP, path.name, digest, 2_048, 2, artifact_digest=digest, arguments=template)


async def _gemma(parts: DeclarationParts) -> _Artifact:
    path = await asyncio.to_thread(gemma_path, parts.models_directory)
    digest = await parts.keep(path)
    return _Artifact("gemma-3-270m-q4_k_m", EngineKind.LLAMACPP, path.name, digest, 2_048, 2, False, digest)


async def _behind_url(
    urls: list[str], config: EngineConfig, client: Engine, window: Tokens, announce: Callable[[str], None]
) -> _Artifact:
    """The model that the first URL serves; its window as the server says, else `window`. Raises EngineError."""
    announce(f"asking {len(urls)} engine(s) behind a URL what they serve")
    probe = ReplicaAddress("probe", "probe", "probe", EngineKind.OPENAI, urls[0], "", window, api_key=read_api_key(config))
    found = await _probe_until_answered(probe, client, config.start_ms, announce)
    name = re.sub(r"[^a-z0-9._-]+", "-", found.model.lower()).strip("-") or "model"
    chat, arguments = _making(config)
    return _Artifact(
        name[:64], EngineKind.OPENAI, found.model, found.model, found.context_tokens, 16, chat, arguments=arguments
    )


def _making(config: EngineConfig) -> tuple[bool, Arguments]:
    """Whether the model takes conversations, and the arguments by which it makes what it does."""
    return not config.embeddings, ((EMBEDDINGS, True),) if config.embeddings else ()


async def _probe_until_answered(
    probe: ReplicaAddress, client: Engine, bound_ms: Millis, announce: Callable[[str], None]
) -> ReplicaAddress:
    """Its answer, asked for again and again. Raises EngineError: the last fault after the bound, or one that stays."""
    reason = "nothing came."
    with suppress(TimeoutError):
        async with asyncio.timeout(bound_ms / 1e3):
            while True:
                try:
                    return await client.probe(probe)
                except errors.EngineFault as fault:
                    if fault.retry_advice is False:
                        raise errors.EngineError(f"The engine at {probe.url} cannot be used: {fault.detail}") from fault
                    if fault.detail != reason:
                        reason = fault.detail
                        announce(f"waiting for {probe.url}: {reason}")
                await asyncio.sleep(_PROBE_RETRY_S)
    raise errors.EngineError(f"The engine at {probe.url} did not answer within {bound_ms} ms: {reason}")
