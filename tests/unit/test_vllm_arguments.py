"""What vLLM is told: everything that a replica needs, nothing that could run code, and no secret where others read it."""

from typing import Any

import msgspec
import pytest

from weir.core.registry.arguments import ACCEPTED, checked_arguments
from weir.core.registry.model import Argument, EngineKind
from weir.engines.vllm_arguments import VllmAdapter, VllmSpec, command_line, environment, rank_of
from weir.errors import EngineError, InvalidRequest

SPEC = VllmSpec(
    "/opt/vllm/bin/python", "/state/artifacts/ab", "small@1", 8_192, 64, "secret", {"PATH": "/bin", "HOME": "/root"}
)
ADAPTER = VllmAdapter("tone@2", "/state/a, b=c", 12)


def test_the_whole_command() -> None:
    """Protects replicas: interpreter, address, folder, name, window and lanes are the replica's; usage shows cached tokens."""
    shown = (
        "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port 8000 --model /state/artifacts/ab"
        " --served-model-name small@1 --load-format safetensors --max-model-len 8192 --max-num-seqs 64"
        " --enable-prompt-tokens-details --disable-uvicorn-access-log"
    )
    assert command_line(SPEC, 8_000) == shown.split(" ")


def test_tools_and_reasoning_are_options() -> None:
    """Protects tools: how vLLM reads calls and reasoning is approved with the revision and told by its own options' names."""
    given: dict[str, Argument] = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    command = command_line(msgspec.structs.replace(SPEC, arguments=checked_arguments(EngineKind.VLLM, given)), 1)
    assert command[-5:] == ["--enable-auto-tool-choice", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]


@pytest.mark.parametrize("name", ["", "/tmp/parser.py", "../x", "a b", "--trust-remote-code", "Hermes", "x" * 41, 5, True])
def test_a_parser_is_a_plain_name(name: Any) -> None:
    """Protects the machine: neither a file nor another option can be given as a parser, and choosing alone needs one."""
    for argument in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidRequest, match=f"arguments.{argument} must be a name"):
            checked_arguments(EngineKind.VLLM, {argument: name})
    with pytest.raises(InvalidRequest, match=r"needs arguments\.tool_call_parser"):
        checked_arguments(EngineKind.VLLM, {"enable_auto_tool_choice": True})
    assert checked_arguments(EngineKind.VLLM, {"enable_auto_tool_choice": False})


def test_arguments_are_options_of_their_names() -> None:
    """Protects what was approved: switches become a flag or its opposite, everything else a flag with its value."""
    given = (("dtype", "bfloat16"), ("enable_chunked_prefill", False), ("enforce_eager", True), ("gpu_memory_utilization", 0.5))
    command = command_line(msgspec.structs.replace(SPEC, arguments=given), 1)
    shown = "--dtype bfloat16 --no-enable-chunked-prefill --enforce-eager --gpu-memory-utilization 0.5"
    assert command[-6:] == shown.split(" ")
    assert not [name for name in ACCEPTED[EngineKind.VLLM] if "trust" in name or "code" in name]


def test_a_model_that_embeds() -> None:
    """Protects tenants and embeddings: the pooling runner, and no cache that a version without salts would share."""
    given = (("dtype", "float16"), ("embeddings", True))
    command = command_line(msgspec.structs.replace(SPEC, arguments=given), 1)
    assert command[-5:] == ["--dtype", "float16", "--runner", "pooling", "--no-enable-prefix-caching"]
    assert command_line(msgspec.structs.replace(SPEC, arguments=(("embeddings", False),)), 1) == command_line(SPEC, 1)


@pytest.mark.parametrize(("rank", "most"), [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (512, "512"), (513, "513")])
def test_an_adapter_is_loaded_at_the_start(rank: int, most: str) -> None:
    """Protects tenants: one adapter, by the name it is called by, from its folder, with a rank that vLLM takes."""
    spec = msgspec.structs.replace(SPEC, adapter=msgspec.structs.replace(ADAPTER, rank=rank))
    *_, enable, _, loras, _, shown, _, module = command_line(spec, 1)
    assert (enable, loras, shown) == ("--enable-lora", "1", most)
    assert msgspec.json.decode(module) == {"name": "tone@2", "path": "/state/a, b=c"}
    assert (spec.model, SPEC.model) == ("tone@2", "small@1")


def test_the_key_is_in_the_environment_only() -> None:
    """Protects replicas from others on the machine; and what the operator set does not open another way in."""
    spec = msgspec.structs.replace(
        SPEC, environment={**SPEC.environment, "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "theirs"}
    )
    assert not any("secret" in word for word in command_line(spec, 1))
    found = environment(spec)
    assert (found["VLLM_API_KEY"], found["VLLM_SERVER_DEV_MODE"], found["HOME"]) == ("secret", "0", "/root")


@pytest.mark.parametrize(
    ("config", "rank"),
    [(b'{"r": 8, "lora_alpha": 1}', 8), (b'{"r": 8, "rank_pattern": {"q": 32, "v": 4}}', 32), (b'{"r": 0}', 1)],
)
def test_the_rank_of_an_adapter(config: bytes, rank: int) -> None:
    """Protects adapters: the largest rank of any module counts."""
    assert rank_of(config) == rank


@pytest.mark.parametrize("config", [b"", b"{}", b'{"r": "8"}', b'{"r": 8', b"\xff"])
def test_a_configuration_without_a_rank(config: bytes) -> None:
    """Protects administrators: what is no adapter's configuration is refused as that."""
    with pytest.raises(EngineError, match=r"adapter_config\.json names no rank"):
        rank_of(config)
