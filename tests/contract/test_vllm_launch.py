"""Replicas of vLLM start from verified folders, are called by their revisions' names, and leave no process behind.

With a stand-in for vLLM; with WEIR_TEST_VLLM, the path of an interpreter that has it, on vLLM itself too.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.contract.approved_stand import POOL, REVISION, Meddler, Stand, children
from tests.contract.artifact_folders import key_of
from tests.contract.engine_servers import WAIT_S, ScriptedServer, Sink, start_child, wait_process_gone
from tests.contract.tiny_llama import tiny_adapter, tiny_llama
from tests.contract.vllm_stand_in import install_stand_in

from weir.core.registry.key_ring import KeyRole
from weir.core.registry.model import EngineKind, Revision
from weir.core.request import Message, Sampling
from weir.engines.launcher import LocalLauncher
from weir.engines.openai_compatible import OpenAICompatibleEngine
from weir.engines.vllm_arguments import VllmSpec
from weir.errors import EngineError
from weir.messages import ReplicaAddress
from weir.ports import EngineCall, ReplicaProcess

REAL = os.environ.get("WEIR_TEST_VLLM")
START_MS = 900_000 if REAL else 60_000
TINY = replace(
    REVISION,
    id="tiny@1",
    engine=EngineKind.VLLM,
    artifact=".",
    context_tokens=256,
    arguments=(("dtype", "float32"), ("enforce_eager", True), ("max_num_batched_tokens", 256)),
)
PROMPT = "The capital of France is Paris, and that of Spain is Madrid. " * 3


class VllmStand:
    """A tiny model for vLLM, with an adapter of acme's, approved; and what was started."""

    def __init__(self, path: Path, python: str) -> None:
        here = {"VLLM_CPU_KVCACHE_SPACE": "1", "HOME": str(path), "PATH": os.environ["PATH"], "VLLM_SERVER_DEV_MODE": "1"}
        self.stand = Stand(path, vllm_python=python, start_ms=START_MS, environment=here)
        self.engine = OpenAICompatibleEngine(probe_ms=WAIT_S * 1_000)
        self.python = python
        self.started = AsyncExitStack()

    async def open(self) -> None:
        await self.stand.trust(key_of(1))
        self.model = replace(TINY, artifact_digest=await self.stand.keep(tiny_llama()))
        digest = await self.stand.keep(tiny_adapter(2), role=KeyRole.ADAPTER)
        self.adapter = replace(self.model, id="tone@2", artifact_digest=digest, tenant="acme", adapter_of=self.model.id)
        await self.stand.put(self.model, self.adapter)

    async def start(self, revision: Revision) -> ReplicaProcess:
        process = await self.stand.launcher.launch(revision, POOL)
        self.started.push_async_callback(process.stop, 10_000)
        return process

    async def probed(self, revision: Revision, process: ReplicaProcess) -> ReplicaAddress:
        """The replica as the fleet has it."""
        address = ReplicaAddress("r", "p", revision.id, revision.engine, process.url, revision.id, 256, api_key=process.api_key)
        return await self.engine.probe(address)

    async def ask(self, replica: ReplicaAddress, salt: str) -> tuple[str, int]:
        """What it answers to a prompt of several blocks, and how many of its tokens were cached."""
        sink = Sink()
        self.engine.start(EngineCall(replica, 0, PROMPT, False, 12, Sampling(temperature=0.0), salt), sink)
        end = await sink.end()
        assert end.usage is not None and end.usage.output_tokens == 12, end
        return sink.text, end.usage.cached_input_tokens


@pytest.fixture(params=["stand_in", pytest.param("vllm", marks=pytest.mark.skipif(not REAL, reason="needs WEIR_TEST_VLLM"))])
async def vllm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[VllmStand]:
    """Both."""
    stand = VllmStand(tmp_path, str(REAL) if request.param == "vllm" else install_stand_in(tmp_path))
    await stand.open()
    yield stand
    await stand.started.aclose()
    await stand.engine.aclose()


@pytest.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[VllmStand]:
    """The stand-in alone."""
    stand = VllmStand(tmp_path, install_stand_in(tmp_path))
    await stand.open()
    yield stand
    await stand.started.aclose()
    await stand.engine.aclose()


def group_of(leader: int) -> set[int]:
    """The processes of a group that still run."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()]
    return {int(pid) for pid, group, state in rows if int(group) == leader and not state.startswith("Z")}


def of_process(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


# ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_model_is_served_from_its_folder(vllm: VllmStand) -> None:
    """Protects what is loaded and who may call: the kept folder, by the revision's name, with what isolation takes."""
    before = children()
    process = await vllm.start(vllm.model)
    [leader] = children() - before
    replica = await vllm.probed(vllm.model, process)
    assert (replica.model, replica.context_tokens) == ("tiny@1", 256)
    assert replica.cache_salt and replica.continuous_usage and replica.counts_tokens and replica.kv_tokens is not None
    text, cached = await vllm.ask(replica, "acme")
    assert cached == 0
    assert (await vllm.ask(replica, "acme"))[1] > 0
    assert await vllm.ask(replica, "globex") == (text, 0)
    assert await vllm.engine.count_input(replica, (Message("user", "hello"),), chat=True)
    with pytest.raises(EngineError, match="refuses the key"):
        await vllm.engine.probe(msgspec.structs.replace(replica, api_key="another"))
    commands = [of_process(pid, "cmdline") for pid in group_of(leader)]
    assert len(commands) > 2 and not any((process.api_key or "none").encode() in command for command in commands)
    [served] = [command for command in commands if b"--served-model-name" in command]
    assert str(vllm.stand.kept(vllm.model.artifact_digest or "")).encode() in served
    await process.stop(30_000)
    assert group_of(leader) == set()


async def test_an_adapter_is_called_by_its_own_name(vllm: VllmStand) -> None:
    """Protects tenants: a replica of an adapter answers as that adapter, whose folder was verified as its model's was."""
    replica = await vllm.probed(vllm.adapter, await vllm.start(vllm.adapter))
    assert (replica.model, replica.context_tokens) == ("tone@2", 256)
    answer, _ = await vllm.ask(replica, "acme")
    assert answer
    if vllm.python == REAL:
        model = await vllm.probed(vllm.model, await vllm.start(vllm.model))
        assert (await vllm.ask(model, "acme"))[0] != answer


async def test_what_its_process_finds_in_the_environment(stand_in: VllmStand) -> None:
    """Protects isolation: what the operator set arrives, but for what would open a way around the key or load by name."""
    before = children()
    process = await stand_in.start(stand_in.model)
    [leader] = children() - before
    [server] = [pid for pid in group_of(leader) if b"--served-model-name" in of_process(pid, "cmdline")]
    found = of_process(server, "environ").decode().split("\0")
    assert f"VLLM_API_KEY={process.api_key}" in found and "VLLM_CPU_KVCACHE_SPACE=1" in found
    assert {"VLLM_SERVER_DEV_MODE=0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=0", "HF_HUB_OFFLINE=1"} <= set(found)


# ── what is not served ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("whose", ["model", "adapter"])
@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (lambda kept: (kept / "evil.json").write_bytes(b"{}"), r"The file evil\.json changed while it was read"),
        (lambda kept: os.utime(next(kept.glob("*.safetensors"))), r"model\.safetensors changed while it was read"),
        (lambda kept: (kept.rename(f"{kept}x"), Path(f"{kept}x").rename(kept)), "folder was moved, or changed"),
    ],
)
async def test_a_folder_touched_while_it_loads_is_not_served(
    stand_in: VllmStand, whose: str, meddle: Callable[[Path], object], words: str
) -> None:
    """Protects what is loaded: the folder is compared once the replica listens, and its processes are gone again."""
    digest = (stand_in.model if whose == "model" else stand_in.adapter).artifact_digest
    meddler = Meddler(stand_in.stand.files, lambda: meddle(stand_in.stand.kept(digest or "")))
    known = children()
    launcher = LocalLauncher(**stand_in.stand.options | {"files": meddler})
    with pytest.raises(EngineError, match=f"artifact of tone@2 cannot be loaded: .*{words}"):
        await launcher.launch(stand_in.adapter, POOL)
    assert children() == known


async def test_a_failed_start_says_why(stand_in: VllmStand) -> None:
    """Protects administrators: what vLLM complained of, or that there is none, is the start's error."""
    empty = replace(stand_in.model, artifact_digest=await stand_in.stand.keep(tiny_llama() | {"config.json": b"{}"}))
    with pytest.raises(EngineError, match=r"(?s)exited with status 1 before it listened: .*no model architectures"):
        await stand_in.start(empty)
    launcher = LocalLauncher(**stand_in.stand.options | {"vllm_python": "/nowhere/python"})
    with pytest.raises(EngineError, match=r"/nowhere/python cannot be started: No such file"):
        await launcher.launch(stand_in.model, POOL)
    with pytest.raises(EngineError, match="No module named"):
        await LocalLauncher(**stand_in.stand.options | {"vllm_python": None}).launch(stand_in.model, POOL)
    bare = replace(
        stand_in.adapter, artifact_digest=await stand_in.stand.keep({"adapter_config.json": b"{}"}, role=KeyRole.ADAPTER)
    )
    with pytest.raises(EngineError, match=r"adapter_config\.json names no rank"):
        await stand_in.start(bare)
    none = replace(stand_in.adapter, artifact_digest=await stand_in.stand.keep({"README": b""}, role=KeyRole.ADAPTER))
    with pytest.raises(EngineError, match=r"adapter_config\.json cannot be read: No such file"):
        await stand_in.start(none)


@pytest.mark.parametrize(
    ("dialect", "model", "words"),
    [("vllm", "other", "does not serve the approved model"), ("bare", "m", "does not show that it is vLLM")],
)
async def test_what_is_not_the_approved_vllm_is_not_served(dialect: str, model: str, words: str) -> None:
    """Protects isolation: a server that does not show whose cache keeps salts apart gets no work, nor one of another name."""
    async with ScriptedServer(dialect=dialect).running() as server:
        engine = OpenAICompatibleEngine()
        with pytest.raises(EngineError, match=words):
            await engine.probe(msgspec.structs.replace(server.address(model=model), engine=EngineKind.VLLM))
        await engine.aclose()


def test_a_spec_that_makes_no_sense() -> None:
    """Protects the protocol: what is no spec starts nothing."""
    child = subprocess.run([sys.executable, "-m", "weir.engines.vllm_child"], input=b"{}\n", capture_output=True, check=False)
    assert child.returncode == 2 and not child.stdout and b"vLLM child" in child.stderr


# ── its processes ────────────────────────────────────────────────────────────────────────────────────────────────────


def spec_for(tmp_path: Path) -> VllmSpec:
    """The tiny model, as a child is told of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in tiny_llama().items():
        (folder / name).write_bytes(content)
    return VllmSpec(install_stand_in(tmp_path), str(folder), "tiny@1", 256, 2, "key", {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize("way", ["end of input", "SIGTERM"])
def test_vllm_ends_with_the_process_beside_it(tmp_path: Path, way: str) -> None:
    """Protects GPUs: however its parent ends, vLLM ends, and what vLLM started, which may heed no signal."""
    child = start_child("weir.engines.vllm_child", spec_for(tmp_path))
    group = group_of(child.process.pid)
    assert len(group) > 2 and child.process.stdin is not None
    if way == "SIGTERM":
        child.process.send_signal(signal.SIGTERM)
    child.process.stdin.close()
    assert all(wait_process_gone(pid) for pid in group - {child.process.pid})
    child.process.wait(WAIT_S)
    child.kill()


@pytest.mark.parametrize("victim", ["weir.engines.vllm_child", "--served-model-name"])
async def test_what_is_left_of_a_replica_is_ended(stand_in: VllmStand, victim: str) -> None:
    """Protects GPUs: when the process beside vLLM is killed, or vLLM is, the exit is seen and nothing is left."""
    before = children()
    process = await stand_in.start(stand_in.model)
    [leader] = children() - before
    group = group_of(leader)
    [killed] = [pid for pid in group if victim.encode() in of_process(pid, "cmdline")]
    os.kill(killed, signal.SIGKILL)
    assert await process.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert all(wait_process_gone(pid) for pid in group)
