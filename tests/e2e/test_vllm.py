"""vLLM behind the whole product, started from registered artifacts by its own interpreter; with a stand-in for vLLM itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.tiny_llama import tiny_adapter, tiny_llama
from tests.contract.vllm_stand_in import install_stand_in
from tests.e2e.adapter_stage import ACMES, GLOBEX, MODELS, READY_S, AdapterStage, adapter_stage
from tests.e2e.http_client import Json, wait_until
from tests.e2e.processes import children_of, wait_process_gone
from tests.e2e.running_cell import running_cell

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.5, "max_num_batched_tokens": 256}
PROMPT = "The capital of France is Paris, and that of Spain is Madrid. " * 8
GONE_S = 20.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[AdapterStage]:
    config = f"[engine]\nvllm_python = {install_stand_in(tmp_path)!r}\n"
    with running_cell(tmp_path / "state", config=config) as cell:
        yield adapter_stage(cell, tmp_path)


def test_a_model_and_two_tenants_adapters_are_served(stage: AdapterStage) -> None:
    """Protects tenants on vLLM: each is served its own adapter, salted, so that no cache tells what another one sent."""
    model = stage.approved("tiny", tiny_llama(), MODELS, engine="vllm", context_tokens=256, arguments=ARGUMENTS)
    pools = [stage.served("tiny", model)]
    own = {}
    for tenant, number in (("acme", ACMES), ("globex", GLOBEX)):
        fields = {"engine": "vllm", "tenant": tenant, "adapter_of": model}
        own[tenant] = stage.approved("tone", tiny_adapter(number), number, **fields)
        pools.append(stage.served("tone", own[tenant], tenant))
    for tenant, revision in own.items():
        account = stage.account(tenant)
        tone, plain = [account.generate(model_alias=alias, input=PROMPT).json for alias in ("tone", "tiny")]
        assert (tone["model_revision"], plain["model_revision"]) == (revision, model)
        assert (cached(tone), cached(plain)) == (0, 0) and tone["usage"]["basis"] == "engine"
        assert cached(account.generate(model_alias="tiny", input=PROMPT).json) > 0
    replicas = [each for each in stage.admin.done("GET", "/replicas")["replicas"] if each["pool"] in pools]
    assert [(each["state"], each["capabilities"]["cache_salt"]) for each in replicas] == [("ready", True)] * 3
    beside = set(children_of(stage.cell.process.pid))
    servers = [pid for child in beside for pid in children_of(child)]
    assert len(servers) == 3
    assert stage.cell.stop() == 0
    assert all(wait_process_gone(pid, GONE_S) for pid in servers)


def test_what_vllm_cannot_serve_shows_why(stage: AdapterStage) -> None:
    """Protects administrators: what vLLM says of a model that it cannot load is the pool's detail."""
    files = tiny_llama() | {"config.json": b"{}"}
    revision = stage.approved("broken", files, MODELS, engine="vllm", context_tokens=256)
    stage.admin.done("POST", "/pools", {"name": "broken", "revision": revision})
    wait_until(lambda: "no model architectures" in str(stage.pool("broken").get("detail")), READY_S)
    assert stage.pool("broken")["ready"] == 0 and stage.account("acme").generate().status == 200


def cached(generation: Json) -> int:
    """How many tokens of its input were cached."""
    return int(generation["usage"]["cached_input_tokens"])
