"""An adapter is loaded onto its model, each verified for itself, and changes what its own tenant gets and nothing else."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.approved_stand import POOL, REVISION, Meddler, Stand, children
from tests.contract.artifact_folders import DIGEST, FILES, MODEL, NOW_MS, key_of, manifest_for
from tests.contract.engine_servers import Sink, stop_confirmed
from tests.contract.lora_adapters import lora_adapter

from weir.core.registry.key_ring import KeyRole, SigningKey
from weir.core.registry.model import EngineKind, Revision, RevisionState
from weir.core.request import Sampling
from weir.engines.launcher import LocalLauncher
from weir.engines.llamacpp import LlamaCppEngine
from weir.engines.packaged_models import smollm2_path
from weir.errors import EngineError
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, ReplicaProcess

ADAPTER = "tone.gguf"
ADAPTER_FILES = {ADAPTER: b"GGUF" + bytes(100), "LICENSE": b"ours"}
MODELS = key_of(1, roles=frozenset([KeyRole.MODEL]))
ACMES = key_of(2, roles=frozenset([KeyRole.ADAPTER]), tenant="acme")
GLOBEX = key_of(3, roles=frozenset([KeyRole.ADAPTER]), tenant="globex")
TONE = replace(
    REVISION, id="tone@1", artifact=ADAPTER, artifact_digest=manifest_for(ADAPTER_FILES).digest, tenant="acme", adapter_of="v"
)


@pytest.fixture
async def stand(tmp_path: Path) -> Stand:
    """A model and an adapter of acme's, each signed by the key for it."""
    stand = Stand(tmp_path)
    await stand.keep()
    await stand.keep(ADAPTER_FILES, 2, KeyRole.ADAPTER)
    await stand.trust(MODELS, ACMES)
    await stand.put(REVISION, TONE)
    return stand


# ── what is loaded ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_both_are_handed_over(stand: Stand) -> None:
    """Protects what is loaded: the child gets the model's verified file and the adapter's, and no other."""
    async with stand.files.opened(TONE) as files:
        model, adapter = files.descriptors
        assert (files.model, files.adapters) == (f"/proc/self/fd/{model}", (f"/proc/self/fd/{adapter}",))
        assert os.pread(model, 10_000, 0) == FILES[MODEL] and os.pread(adapter, 10_000, 0) == ADAPTER_FILES[ADAPTER]
        files.check_unchanged()
    async with stand.files.opened(REVISION) as files:
        assert files.adapters == () and len(files.descriptors) == 1


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (replace(TONE, tenant="globex"), "tone@1 cannot be loaded: .*vouches only for"),
        (replace(TONE, adapter_of="w"), "Its model 'w' does not serve it"),
        (replace(TONE, artifact="other.gguf"), r"has no file other\.gguf"),
        (replace(REVISION, artifact_digest=TONE.artifact_digest), "Nothing|not in the key ring|not model"),
    ],
)
async def test_what_does_not_belong_together_is_not_loaded(stand: Stand, adapter: Revision, words: str) -> None:
    """Protects tenants: a signature vouches for its own tenant's adapter, in the role of one, on a model that there is."""
    with pytest.raises(EngineError, match=words):
        await stand.launcher.launch(adapter, POOL)


@pytest.mark.parametrize(
    "model",
    [
        *(replace(REVISION, state=RevisionState(state)) for state in ("registered", "retired", "revoked")),
        replace(REVISION, tenant="globex"),
    ],
)
async def test_a_model_that_does_not_serve_takes_no_adapter(stand: Stand, model: Revision) -> None:
    """Protects approval: an adapter brings no model into service that is not, or is another tenant's."""
    await stand.put(model)
    with pytest.raises(EngineError, match="artifact of tone@1 cannot be loaded: Its model 'v' does not serve it"):
        await stand.launcher.launch(TONE, POOL)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (replace(ACMES, revoked=True), "cannot be loaded: The signing key key-2 was revoked"),
        (replace(ACMES, roles=frozenset([KeyRole.MODEL])), "cannot be loaded: .*roles model, not adapter"),
        (replace(MODELS, revoked=True), "cannot be loaded: Its model v: The signing key key-1 was revoked"),
        (replace(MODELS, roles=frozenset([KeyRole.ADAPTER])), "Its model v: .*roles adapter, not model"),
        (replace(MODELS, not_after_ms=NOW_MS - 1), "Its model v: .*expired"),
    ],
)
async def test_each_needs_a_key_for_itself(stand: Stand, key: SigningKey, words: str) -> None:
    """Protects what is served: model and adapter are each trusted as the key ring is now, and the refusal says which is not."""
    await stand.trust(key)
    with pytest.raises(EngineError, match=words):
        await stand.launcher.launch(TONE, POOL)


@pytest.mark.parametrize(
    ("digest", "file", "words"),
    [
        (TONE.artifact_digest, ADAPTER, r"tone@1 cannot be loaded: The file tone\.gguf is not what was signed"),
        (DIGEST, MODEL, r"tone@1 cannot be loaded: Its model v: The file model\.gguf is not what was signed"),
    ],
)
async def test_tampering_is_told_of_whose_file(stand: Stand, digest: str, file: str, words: str) -> None:
    """Protects what is loaded: each file is what was signed, and the refusal names it and whose it is."""
    (stand.kept(digest) / file).write_bytes(b"GGUF evil")
    with pytest.raises(EngineError, match=words):
        await stand.launcher.launch(TONE, POOL)


# ── a real model ─────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT = "The capital of France is"


class RealTenants:
    """A stand with SmolLM2 and, for each of two tenants, an adapter of the same name."""

    def __init__(self, path: Path) -> None:
        self.stand = Stand(path)
        self.engine = LlamaCppEngine()
        self._started = AsyncExitStack()

    async def open(self) -> None:
        model = {MODEL: smollm2_path().read_bytes()}
        self.base = replace(REVISION, id="small@1", artifact_digest=await self.stand.keep(model))
        await self.stand.trust(MODELS, ACMES, GLOBEX)
        self.acmes = await self._adapter("acme", 2)
        self.globexs = await self._adapter("globex", 3)
        await self.stand.put(self.base, self.acmes, self.globexs)

    async def _adapter(self, tenant: str, number: int) -> Revision:
        digest = await self.stand.keep({ADAPTER: lora_adapter(number)}, number, KeyRole.ADAPTER)
        return replace(
            self.base, id=f"tone@{number}", artifact=ADAPTER, artifact_digest=digest, tenant=tenant, adapter_of=self.base.id
        )

    async def start(self, revision: Revision) -> ReplicaAddress:
        """A replica of a revision, as the fleet has it."""
        process = await self.stand.launcher.launch(revision, POOL)
        self._started.push_async_callback(process.stop, 10_000)
        address = ReplicaAddress(
            "r", "p", revision.id, EngineKind.LLAMACPP, process.url, revision.id, 512, api_key=process.api_key
        )
        return await self.engine.probe(address)

    async def ask(self, replica: ReplicaAddress) -> str:
        """What it answers, decoding greedily."""
        sink = Sink()
        run = self.engine.start(EngineCall(replica, 0, PROMPT, False, 12, Sampling(temperature=0.0)), sink)
        assert (await sink.end()).fault is None
        await stop_confirmed(run)
        return sink.text

    async def close(self) -> None:
        await self._started.aclose()
        await self.engine.aclose()


@asynccontextmanager
async def real_tenants(path: Path) -> AsyncIterator[RealTenants]:
    tenants = RealTenants(path)
    try:
        await tenants.open()
        yield tenants
    finally:
        await tenants.close()


@pytest.mark.model
async def test_each_tenants_adapter_changes_its_own_answers_only(tmp_path: Path) -> None:
    """Protects tenants: two adapters of one name answer differently, each as alone, and the model beside them as before."""
    async with real_tenants(tmp_path) as tenants:
        base = await tenants.start(tenants.base)
        plain = await tenants.ask(base)
        acmes, globexs = [await tenants.start(each) for each in (tenants.acmes, tenants.globexs)]
        answers = [await tenants.ask(each) for each in (acmes, globexs, base, globexs, acmes, base)]
        assert answers == [answers[0], answers[1], plain, answers[1], answers[0], plain]
        assert "Paris" in plain and len({plain, answers[0], answers[1]}) == 3


@pytest.mark.model
async def test_a_tampered_adapter_stops_itself_and_not_its_model(tmp_path: Path) -> None:
    """Protects what is served: changed before the start or while it loads, an adapter is refused; its model goes on."""
    async with real_tenants(tmp_path) as tenants:
        base = await tenants.start(tenants.base)
        before = await tenants.ask(base)
        assert tenants.acmes.artifact_digest is not None and tenants.globexs.artifact_digest is not None
        changed = tenants.stand.kept(tenants.globexs.artifact_digest) / ADAPTER
        meddler = Meddler(tenants.stand.files, lambda: changed.write_bytes(changed.read_bytes()))
        known = children()
        with pytest.raises(EngineError, match=r"tone@3 cannot be loaded: The file tone\.gguf changed while it was read"):
            await LocalLauncher(threads=2, files=meddler).launch(tenants.globexs, POOL)
        (tenants.stand.kept(tenants.acmes.artifact_digest) / ADAPTER).write_bytes(lora_adapter(3))
        with pytest.raises(EngineError, match=r"tone@2 cannot be loaded: The file tone\.gguf is not what was signed"):
            await tenants.stand.launcher.launch(tenants.acmes, POOL)
        assert children() == known
        assert await tenants.ask(base) == before


@pytest.mark.model
async def test_what_is_no_adapter_is_refused_with_the_engines_words(tmp_path: Path) -> None:
    """Protects administrators: a signed file that is no adapter of this model does not start, and the reason is shown."""
    async with real_tenants(tmp_path) as tenants:
        digest = await tenants.stand.keep({ADAPTER: smollm2_path().read_bytes()[:1_000]}, 2, KeyRole.ADAPTER)
        with pytest.raises(EngineError, match=r"(?s)exited with status 1 before it listened: .*load lora adapter"):
            await tenants.start(replace(tenants.acmes, artifact_digest=digest))


# ── runtime arguments ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.model
async def test_the_arguments_of_a_revision_reach_the_engine() -> None:
    """Protects what was approved: cache types and flash attention are the engine's, which refuses a pair that cannot be."""
    plain = replace(REVISION, artifact=str(smollm2_path()), artifact_digest=None)
    quantised = (("batch_tokens", 64), ("cache_type_k", "q8_0"), ("cache_type_v", "q4_0"))
    launcher = LocalLauncher(threads=2)
    process: ReplicaProcess = await launcher.launch(
        replace(plain, arguments=(*quantised, ("flash_attention", True), ("threads", 1))), POOL
    )
    await process.stop(10_000)
    with pytest.raises(EngineError, match="before it listened"):
        await launcher.launch(replace(plain, arguments=(*quantised, ("flash_attention", False))), POOL)
