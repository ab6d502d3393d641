"""The process of one llama.cpp replica: `python -m weir.engines.llamacpp_child`.

It reads one JSON line (`ChildSpec`) from standard input, loads the model, and writes {"url": ...} as one JSON line once it
listens. It exits at the end of its standard input, so that it never outlives its parent, also while it loads, or at SIGTERM,
in both cases at once. It logs errors only: no line with a prompt.
"""

import fcntl
import os
import signal
import sys
import threading
from importlib import resources
from typing import Any, Literal

import msgspec

SPEC_BYTES_MAX = 64 * 1024
_HTTP_THREADS_BESIDE_SLOTS = 8  # counts, probes, confirmations of stops, and kept connections
_ERRORS_ONLY = 1
_TEMPLATES = {"smollm2-tools": "smollm2_tools.jinja"}


class ChildSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve. model: path of a GGUF file; context_tokens: per slot; slot_directory: where slots may be saved, or "".

    read_whole: the file is read before the process listens and never again, so that nobody can change the model afterwards;
    else it is mapped, and shared by the processes that map it. adapters: paths of LoRA adapters in GGUF, all in force for every
    request. batch_tokens: a cancel is noticed between batches, and other slots decode between them. cache_type_k, cache_type_v:
    what the KV cache holds. flash_attention: None where the engine decides. chat_template: the model's own, or the one beside
    this module that writes as SmolLM2's does and tells the model of tools too. embeddings: it makes vectors, and no text.
    pooling: how those of a text's tokens become one; None where the model says it.
    """

    model: str
    alias: str
    slots: int
    context_tokens: int
    threads: int
    api_key: str
    slot_directory: str = ""
    read_whole: bool = False
    adapters: tuple[str, ...] = ()
    batch_tokens: int = 256
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool | None = None
    chat_template: Literal["model", "smollm2-tools"] = "model"
    embeddings: bool = False
    pooling: str | None = None


def serve(spec: ChildSpec) -> Any:
    """Load the model and serve it in threads of its own, for as long as the server returned is kept. Raises RuntimeError."""
    import xllamacpp  # takes a second, and only this process may load it

    params = xllamacpp.CommonParams()
    params.model.path = spec.model
    if spec.read_whole:
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.model_alias = {spec.alias}
    params.n_parallel = spec.slots
    params.n_ctx = spec.context_tokens * spec.slots
    params.n_batch = params.n_ubatch = spec.batch_tokens
    params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{spec.cache_type_k.upper()}"]
    params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{spec.cache_type_v.upper()}"]
    if spec.flash_attention is not None:
        chosen = "ENABLED" if spec.flash_attention else "DISABLED"
        params.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{chosen}"]
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in spec.adapters]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    params.n_threads_http = spec.slots + _HTTP_THREADS_BESIDE_SLOTS
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [spec.api_key]
    params.endpoint_metrics = params.endpoint_slots = True
    params.slot_save_path = spec.slot_directory
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.ui = False
    params.use_jinja = True  # without it tools would be dropped silently
    if spec.chat_template != "model":
        params.chat_template = resources.files("weir.engines").joinpath(_TEMPLATES[spec.chat_template]).read_text("utf-8")
    params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_NONE
    params.verbosity = _ERRORS_ONLY
    if spec.embeddings:
        _embed(params, spec)
    return xllamacpp.Server(params)


def _embed(params: Any, spec: ChildSpec) -> None:
    """Make vectors. What is pooled is what one batch computes, so no text may be cut, neither by the size of a batch nor to be
    as long as the texts beside it, which is how slots with memories of their own are read together: they share one.
    """
    import xllamacpp

    params.embedding = True
    params.n_batch = params.n_ubatch = spec.context_tokens
    params.kv_unified, params.kv_unified_per_slot = True, spec.context_tokens
    if spec.pooling is not None:
        params.pooling_type = xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{spec.pooling.upper()}"]


def _exit_at_end_of_input() -> None:
    while os.read(0, 4_096):
        pass
    os._exit(0)


def _end_with_input() -> None:
    """Let the kernel end this process when its input ends: no thread of Python's runs while native code loads a model."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def main() -> int:
    """Serve until the process is told to exit; 2 for a spec that makes no sense, 1 when the model cannot be served."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    answer = os.dup(1)
    os.dup2(2, 1)  # what native code prints goes with the errors
    try:
        spec = msgspec.json.decode(_first_line(), type=ChildSpec)
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"llama.cpp child: {error}\n")
        return 2
    _end_with_input()
    waiter = threading.Thread(target=_exit_at_end_of_input, daemon=True)  # for an end before now
    waiter.start()
    try:
        server = serve(spec)
    except RuntimeError as error:
        sys.stderr.write(f"llama.cpp child: the model {spec.model} cannot be served: {error}\n")
        return 1
    os.write(answer, msgspec.json.encode({"url": server.listening_address}) + b"\n")
    os.close(answer)
    waiter.join()
    return 0


def _first_line() -> bytes:
    """The first line of standard input, read without a buffer, so that the waiter sees all that follows."""
    line = b""
    while not line.endswith(b"\n") and len(line) < SPEC_BYTES_MAX and (byte := os.read(0, 1)):
        line += byte
    return line


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
