"""What stands in for `vllm.entrypoints.openai.api_server`: takes the options that Weir gives it, and serves a simulated engine.

It is copied into a package of that name. As vLLM does, it reads the folder that it is given, has its key from the environment,
and starts a process of its own for the engine, which heeds no signal here, as one that hangs in a driver.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from weir.engines.simulated_api import ServerSpec
from weir.engines.simulated_server import serve

ENGINE_CORE = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def parsed() -> argparse.Namespace:
    """The options; any other ends the process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("host", "model", "served-model-name", "load-format"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-num-seqs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("enable-prompt-tokens-details", "disable-uvicorn-access-log"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    for name in ("enable-chunked-prefill", "enforce-eager", "enable-lora"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    for name in ("dtype", "quantization", "kv-cache-dtype", "lora-modules"):
        parser.add_argument(f"--{name}")
    for name in ("max-loras", "max-lora-rank", "max-num-batched-tokens", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    return parser.parse_args()


def main() -> None:
    """Load what there is to load, and serve."""
    options = parsed()
    served = options.served_model_name
    folder = Path(options.model)
    if "architectures" not in json.loads((folder / "config.json").read_bytes()) or not list(folder.glob("*.safetensors")):
        sys.exit("ValueError: no model architectures are specified")
    if options.enable_lora:
        module = json.loads(options.lora_modules)
        served = module["name"]
        if json.loads(Path(module["path"], "adapter_config.json").read_bytes())["r"] > options.max_lora_rank:
            sys.exit("ValueError: LoRA rank is greater than max_lora_rank")
    subprocess.Popen([sys.executable, "-c", ENGINE_CORE])
    spec = ServerSpec(
        served,
        options.max_model_len,
        options.max_num_seqs,
        host=options.host,
        port=options.port,
        api_key=os.environ["VLLM_API_KEY"],
        prefix_cache=True,
    )
    asyncio.run(serve(spec, until_input_ends=False))


if __name__ == "__main__":
    main()
