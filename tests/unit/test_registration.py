"""A registration: what it verifies, what it keeps, what it calls the revision, and what it refuses by field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.artifact_folders import DIGEST, FILES, MODEL, signed, write
from tests.signing_keys import private_key
from tests.unit.registry_desk import STABLE, RegistryDesk

from weir import errors
from weir.control.registration import NewRevision, Registration
from weir.core.registry.arguments import checked_arguments
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import EngineKind, RevisionState
from weir.core.registry.signatures import public_key_of
from weir.ports import KeptArtifact
from weir.storage.artifact_store import ArtifactStore
from weir.storage.artifacts_off_loop import ArtifactsOffLoop

PRICES: dict[str, Any] = {"input_microusd": 1, "cached_input_microusd": 2, "output_microusd": 3}
CASES = '{"id": "one", "input": "Say hello.", "max_output_tokens": 8, "expect": {"contains": "hello"}}\n'


class Counter:
    """A registration desk with a signed folder on it."""

    def __init__(self, folder: Path) -> None:
        self.desk = RegistryDesk()
        self.store = ArtifactStore(folder / "store")
        self.registration = Registration(self.desk.commands, ArtifactsOffLoop(self.store), self.desk.clock)
        self.folder, self.signature = write(folder / "model"), folder / "model.sig"
        self.signature.write_bytes(signed())

    async def open(self) -> None:
        await self.desk.open()
        for number, roles, tenant in ((1, [KeyRole.MODEL], None), (2, [KeyRole.ADAPTER], "acme")):
            await self.desk.key_ring.add("ada", f"key-{number}", public_key_of(private_key(number)), roles, tenant)

    def asked(self, **changes: Any) -> NewRevision:
        asked = NewRevision(
            "small", EngineKind.LLAMACPP, **PRICES, folder=str(self.folder), signature=str(self.signature), context_tokens=2_048
        )
        return replace(asked, **changes)


@pytest.fixture
async def counter(tmp_path: Path) -> Counter:
    counter = Counter(tmp_path)
    await counter.open()
    return counter


async def test_what_is_registered_is_verified_kept_and_serves_nothing(counter: Counter) -> None:
    """Protects approval: a registered revision names its artifact, its evaluation set and who brought it, and waits."""
    revision, _ = await counter.registration.register("ada", counter.asked(evaluation=CASES, arguments={"batch_tokens": 128}))
    assert (revision.artifact, revision.artifact_digest, revision.state) == (MODEL, DIGEST, RevisionState.REGISTERED)
    assert (revision.registered_by, revision.approved_by, revision.arguments) == ("ada", None, (("batch_tokens", 128),))
    assert (revision.max_output_tokens, revision.typical_output_tokens) == (2_048, 512)
    assert revision.evaluation is not None and counter.store.read_file(revision.evaluation) == CASES.encode()
    assert await counter.desk.audited() == [
        ("ada", "key_ring.add", "key-1"),
        ("ada", "key_ring.add", "key-2"),
        ("ada", "revision.register", revision.id),
    ]


async def test_an_id_stands_for_everything_that_never_changes(counter: Counter) -> None:
    """Protects immutability: another window, argument, set or name is another revision; price and people are not."""
    first, _ = await counter.registration.register("ada", counter.asked())
    with pytest.raises(errors.AlreadyExists, match=first.id):
        await counter.registration.register("bob", counter.asked(output_microusd=9))
    others: list[dict[str, Any]] = [
        {"context_tokens": 1_024},
        {"arguments": {"threads": 2}},
        {"evaluation": CASES},
        {"chat": False},
        {"name": "other"},
    ]
    others += [{"max_output_tokens": 9}, {"typical_output_tokens": 9}]
    ids = [(await counter.registration.register("ada", counter.asked(**other)))[0].id for other in others]
    assert len({first.id, *ids}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "Not a name"}, "name"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"max_output_tokens": 4_096}, "max_output_tokens"),
        ({"typical_output_tokens": 0}, "typical_output_tokens"),
        ({"input_microusd": -1}, "input_microusd"),
        ({"batch_percent": 101}, "batch_percent"),
        ({"folder": None}, "folder"),
        ({"folder": "relative"}, "folder"),
        ({"signature": None}, "signature"),
        ({"signature": "/nowhere/at/all"}, "signature"),
        ({"signature": "/dev"}, "signature"),
        ({"artifact": "other.gguf"}, "artifact"),
        ({"artifact": "config.json"}, "artifact"),
        ({"served": "model"}, "served"),
        ({"external": True}, "external"),
        ({"arguments": {"port": 1}}, "arguments.port"),
        ({"arguments": {"batch_tokens": True}}, "arguments.batch_tokens"),
        ({"arguments": {"cache_type_k": "file"}}, "arguments.cache_type_k"),
        ({"arguments": {"cache_type_v": "q8_0"}}, "arguments.cache_type_v"),
        ({"arguments": {"cache_type_v": "q4_0", "flash_attention": False}}, "arguments.cache_type_v"),
        ({"engine": EngineKind.VLLM}, "folder"),
        ({"engine": EngineKind.VLLM, "folder": None}, "folder"),
        ({"engine": EngineKind.VLLM, "artifact": MODEL}, "artifact"),
        ({"engine": EngineKind.VLLM, "arguments": {"trust_remote_code": True}}, "arguments.trust_remote_code"),
        ({"engine": EngineKind.VLLM, "arguments": {"max_num_seqs": 8}}, "arguments.max_num_seqs"),
        ({"engine": EngineKind.VLLM, "arguments": {"gpu_memory_utilization": 1.1}}, "arguments.gpu_memory_utilization"),
        ({"evaluation": "[]"}, None),
        ({"engine": EngineKind.OPENAI}, "served"),
        ({"engine": EngineKind.SIMULATED, "folder": None, "signature": None}, "artifact"),
    ],
)
async def test_a_wrong_field_is_named(counter: Counter, changes: dict[str, Any], field: str | None) -> None:
    """Protects whoever registers: nothing is recorded, and the field is named with what it accepts."""
    with pytest.raises(errors.InvalidRequest) as refused:
        await counter.registration.register("ada", counter.asked(**changes))
    assert field is None or (refused.value.members["field"] == field and refused.value.members["accepted"] is not None)
    assert [revision.id for revision in (await counter.desk.commands.catalog()).revisions] == [STABLE.id]


async def test_what_nobody_vouches_for_is_refused(counter: Counter, tmp_path: Path) -> None:
    """Protects the key ring: another key, a revoked one, one for adapters, an edited file; and nothing is kept."""
    unknown, adapters, edited = (tmp_path / name for name in ("unknown.sig", "adapters.sig", "edited"))
    unknown.write_bytes(signed(number=3))
    adapters.write_bytes(signed(number=2))
    write(edited, {**FILES, MODEL: b"GGUF" + b"other"})
    for changes, kind, reason in (
        ({"signature": str(unknown)}, errors.SignatureRefused, "unknown_key"),
        ({"signature": str(adapters)}, errors.SignatureRefused, "wrong_role"),
        ({"folder": str(edited)}, errors.ArtifactRefused, "changed_file"),
    ):
        with pytest.raises(kind) as refused:
            await counter.registration.register("ada", counter.asked(**changes))
        assert refused.value.members["reason"] == reason
    await counter.desk.key_ring.revoke("ada", "key-1")
    with pytest.raises(errors.SignatureRefused) as refused:
        await counter.registration.register("ada", counter.asked())
    assert refused.value.members["reason"] == "revoked_key"


async def test_trust_is_asked_again_when_the_copy_is_made(counter: Counter) -> None:
    """Protects a revocation during the minutes that a copy takes: nothing is recorded, and the audit says who vouched."""

    class Slow(ArtifactsOffLoop):
        async def keep(self, *given: Any) -> KeptArtifact:
            kept = await super().keep(*given)
            await counter.desk.key_ring.revoke("ada", "key-1")
            return kept

    await counter.registration.register("ada", counter.asked())
    [entry] = [each for each in await counter.desk.store.audit(10) if each.action == "revision.register"]
    assert json.loads(entry.summary)["signing_key"] == "key-1"
    late = Registration(counter.desk.commands, Slow(counter.store), counter.desk.clock)
    with pytest.raises(errors.SignatureRefused) as refused:
        await late.register("ada", counter.asked(name="late"))
    assert refused.value.members["reason"] == "revoked_key"
    assert len((await counter.desk.commands.catalog()).revisions) == 2


async def test_a_signature_may_lie_in_the_folder(counter: Counter) -> None:
    """Protects signers who put it there: it is not part of what it is about."""
    inside = counter.folder / "model.sig"
    inside.write_bytes(counter.signature.read_bytes())
    revision, _ = await counter.registration.register("ada", counter.asked(signature=str(inside)))
    assert revision.artifact_digest == DIGEST


async def test_an_engine_behind_a_url_is_unverified(counter: Counter) -> None:
    """Protects honesty: nothing of it is ours to check, and the record says so."""
    asked = counter.asked(engine=EngineKind.OPENAI, folder=None, signature=None, served="org/model", external=True)
    revision, _ = await counter.registration.register("ada", asked)
    assert (revision.artifact, revision.artifact_digest, revision.external) == ("org/model", None, True)


async def test_an_adapter_belongs_to_a_tenant_and_changes_a_model(counter: Counter, tmp_path: Path) -> None:
    """Protects adapters: signed by a key for that tenant's, with the engine and the window of a verified model that serves."""
    changed, _ = await counter.registration.register("ada", counter.asked())
    signature = tmp_path / "adapter.sig"
    signature.write_bytes(signed(number=2))
    asked = counter.asked(name="tone", signature=str(signature), tenant="acme", adapter_of=changed.id, context_tokens=None)
    with pytest.raises(errors.NotAllowedNow):
        await counter.registration.register("ada", asked)
    await counter.desk.models.approve("bob", changed.id)
    adapter, _ = await counter.registration.register("ada", asked)
    assert (adapter.adapter_of, adapter.tenant, adapter.state) == (changed.id, "acme", RevisionState.REGISTERED)
    assert (adapter.context_tokens, adapter.engine, adapter.approved_by) == (2_048, EngineKind.LLAMACPP, None)
    await counter.desk.models.approve("bob", adapter.id)
    wrong: list[tuple[dict[str, Any], type[errors.WeirError]]] = [
        ({"tenant": None}, errors.InvalidRequest),
        ({"tenant": "globex"}, errors.SignatureRefused),
        ({"tenant": "nobody"}, errors.NotFound),
        ({"adapter_of": "none@1"}, errors.NotFound),
        ({"adapter_of": adapter.id}, errors.NotAllowedNow),
        ({"adapter_of": STABLE.id}, errors.NotAllowedNow),
        ({"arguments": {"threads": 2}}, errors.InvalidRequest),
        ({"context_tokens": 2_048}, errors.InvalidRequest),
        ({"max_output_tokens": 9}, errors.InvalidRequest),
        ({"typical_output_tokens": 9}, errors.InvalidRequest),
        ({"chat": True}, errors.InvalidRequest),
        ({"engine": EngineKind.SIMULATED}, errors.InvalidRequest),
        ({"served": "model"}, errors.InvalidRequest),
        ({"external": True}, errors.InvalidRequest),
    ]
    for changes, kind in wrong:
        with pytest.raises(kind):
            await counter.registration.register("ada", replace(asked, **changes))


async def test_vllm_loads_a_whole_folder(counter: Counter, tmp_path: Path) -> None:
    """Protects approval: a model and its adapter for vLLM are the signed folder itself, which has what vLLM looks for there."""

    def signed_folder(name: str, number: int, **files: bytes) -> dict[str, Any]:
        content = {path.replace("__", "."): data for path, data in files.items()}
        (tmp_path / f"{name}.sig").write_bytes(signed(content, number))
        return {"folder": str(write(tmp_path / name, content)), "signature": str(tmp_path / f"{name}.sig")}

    weights, arguments = (2).to_bytes(8, "little") + b"{}", {"dtype": "bfloat16", "enforce_eager": True}
    files = signed_folder("whole", 1, config__json=b"{}", model__safetensors=weights)
    asked = counter.asked(engine=EngineKind.VLLM, arguments=arguments, **files)
    model, _ = await counter.registration.register("ada", asked)
    assert (model.engine, model.artifact, model.arguments) == (EngineKind.VLLM, ".", tuple(arguments.items()))
    await counter.desk.models.approve("bob", model.id)
    adapter = replace(asked, tenant="acme", adapter_of=model.id, arguments={}, context_tokens=None)
    with pytest.raises(errors.InvalidRequest, match=r"vLLM needs adapter_config\.json and adapter_model\.safetensors"):
        await counter.registration.register("ada", replace(adapter, **signed_folder("bare", 2, config__json=b"{}")))
    files = signed_folder("tone", 2, adapter_config__json=b'{"r": 8}', adapter_model__safetensors=weights)
    revision, _ = await counter.registration.register("ada", replace(adapter, **files))
    assert (revision.artifact, revision.adapter_of, revision.arguments) == (".", model.id, model.arguments)


@pytest.mark.parametrize("engine", EngineKind)
def test_every_engine_may_embed(engine: EngineKind) -> None:
    """Protects the one way to say it: a switch of the same name for engines of every kind."""
    assert checked_arguments(engine, {"embeddings": True}) == (("embeddings", True),)
    with pytest.raises(errors.InvalidRequest, match="true or false"):
        checked_arguments(engine, {"embeddings": "yes"})


@pytest.mark.parametrize(
    "given", [{"pooling": "mean"}, {"embeddings": False, "pooling": "cls"}, {"embeddings": True, "batch_tokens": 64}]
)
def test_arguments_that_do_not_fit_embedding(given: dict[str, Any]) -> None:
    """Protects whoever registers from an argument without effect."""
    with pytest.raises(errors.InvalidRequest, match=r"is taken only with(out)? arguments\.embeddings true"):
        checked_arguments(EngineKind.LLAMACPP, given)
    assert checked_arguments(EngineKind.LLAMACPP, {"pooling": "mean", "embeddings": True})


async def test_a_model_that_embeds_is_not_asked_questions(counter: Counter) -> None:
    """Protects rollouts from an evaluation that nothing could pass."""
    simulated: dict[str, Any] = {"engine": EngineKind.SIMULATED, "folder": None, "signature": None, "artifact": "demo"}
    asked = counter.asked(**simulated, arguments={"embeddings": True}, evaluation=None)
    revision, _ = await counter.registration.register("ada", asked)
    assert revision.embeds
    with pytest.raises(errors.InvalidRequest, match="makes embeddings"):
        await counter.registration.register("ada", replace(asked, evaluation=CASES))


def test_arguments_have_one_order() -> None:
    """Protects ids: the same arguments in another order are the same revision."""
    given = {"threads": 2, "batch_tokens": 64}
    assert checked_arguments(EngineKind.LLAMACPP, given) == (("batch_tokens", 64), ("threads", 2))
    with pytest.raises(errors.InvalidRequest, match="integer 32"):
        checked_arguments(EngineKind.LLAMACPP, {"batch_tokens": 5})
    with pytest.raises(errors.InvalidRequest, match="true or false"):
        checked_arguments(EngineKind.LLAMACPP, {"flash_attention": 1})
    with pytest.raises(errors.InvalidRequest, match="a number"):
        checked_arguments(EngineKind.SIMULATED, {"slowdown": 0})
    quantised: dict[str, Any] = {"cache_type_v": "q8_0", "flash_attention": True}
    assert checked_arguments(EngineKind.LLAMACPP, quantised) == tuple(quantised.items())
