"""What a vLLM process is told: its command line and its environment, from what a replica is to serve.

Pure. It decides which options Weir needs, by their names in vLLM 0.32. Remote code stays off, weights are read as safetensors
only, and nothing is fetched by name. The key is never on the command line, which everybody on the machine may read.
"""

from collections.abc import Mapping

import msgspec

from weir import errors
from weir.core.registry.model import EMBEDDINGS, Argument

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
HOST = "127.0.0.1"
ADAPTER_CONFIG = "adapter_config.json"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of an adapter."""
_EMBEDDING = ("--runner", "pooling", "--no-enable-prefix-caching")
"""A text to embed is new nearly always, and versions of its API that know no salts would share what is cached."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # what was verified is all that is loaded
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "0",  # its routes ask for no key
}


class VllmAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter. name: what it is called by; folder: in PEFT's layout; rank: the largest of its modules'."""

    name: str
    folder: str
    rank: int


class VllmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve. python: the interpreter that has vLLM; served: what the model is called by; sequences: run at once.

    environment: all that the process finds there beside what is set here. arguments: as the revision was registered with.
    """

    python: str
    folder: str
    served: str
    context_tokens: int
    sequences: int
    api_key: str
    environment: dict[str, str]
    arguments: tuple[tuple[str, Argument], ...] = ()
    adapter: VllmAdapter | None = None

    @property
    def model(self) -> str:
        """What requests name."""
        return self.adapter.name if self.adapter is not None else self.served


def command_line(spec: VllmSpec, port: int) -> list[str]:
    """The command that serves it on a port of this machine."""
    command = [spec.python, "-m", SERVER_MODULE, "--host", HOST, "--port", str(port)]
    command += ["--model", spec.folder, "--served-model-name", spec.served, "--load-format", "safetensors"]
    command += ["--max-model-len", str(spec.context_tokens), "--max-num-seqs", str(spec.sequences)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    for name, value in spec.arguments:
        if name != EMBEDDINGS:
            command += _option(name.replace("_", "-"), value)
        elif value:
            command += _EMBEDDING
    if spec.adapter is not None:
        rank = next((rank for rank in _RANKS if rank >= spec.adapter.rank), spec.adapter.rank)
        module = msgspec.json.encode({"name": spec.adapter.name, "path": spec.adapter.folder}).decode()
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank), "--lora-modules", module]
    return command


def _option(name: str, value: Argument) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def environment(spec: VllmSpec) -> Mapping[str, str]:
    """Everything that the process finds in its environment."""
    return {**spec.environment, **_ENVIRONMENT, "VLLM_API_KEY": spec.api_key}


class _AdapterConfig(msgspec.Struct):
    r: int
    rank_pattern: dict[str, int] = {}


def rank_of(adapter_config: bytes) -> int:
    """The largest rank that an adapter's configuration names. Raises EngineError where it names none."""
    try:
        config = msgspec.json.decode(adapter_config, type=_AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise errors.EngineError(f"The adapter's {ADAPTER_CONFIG} names no rank, `r`.") from None
    return max(config.r, *config.rank_pattern.values(), 1)
