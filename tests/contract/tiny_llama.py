"""A random model of a few hundred kilobytes and adapters of it, as folders that vLLM loads; written here byte by byte."""

import json
import random
import struct
from collections.abc import Mapping

WIDTH, INNER, LAYERS, RANK, WORDS = 64, 128, 2, 4, 257
_END = WORDS - 1
_STRENGTH = 0.4


def tiny_llama() -> dict[str, bytes]:
    """The files of a model whose tokens are bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": WORDS,
        "eos_token_id": _END,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        within = f"model.layers.{layer}"
        shapes |= {f"{within}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{within}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{within}.mlp.down_proj.weight": (WIDTH, INNER)}
        shapes |= {f"{within}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps(_tokenizer()).encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config).encode(),
        "model.safetensors": _safetensors(shapes, 1),
    }


def tiny_adapter(seed: int) -> dict[str, bytes]:
    """The files of an adapter of its query matrices, in PEFT's layout."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        for name in "qv":
            within = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            shapes |= {f"{within}.lora_A.weight": (RANK, WIDTH), f"{within}.lora_B.weight": (WIDTH, RANK)}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": _safetensors(shapes, seed)}


def _safetensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> bytes:
    """Random matrices, and norms that change nothing."""
    chance, header, content = random.Random(seed), {}, b""
    for name, shape in shapes.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [chance.uniform(-_STRENGTH, _STRENGTH) if len(shape) > 1 else 1.0 for _ in range(size)]
        data = struct.pack(f"<{size}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + content


def _tokenizer() -> dict[str, object]:
    """Each byte is a token, under the character that byte-level tokenizers show it by."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": _END, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "added_tokens": [end | {"normalized": False, "special": True}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary | {"<end>": _END}, "merges": []},
    }
