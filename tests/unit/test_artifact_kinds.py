"""Which files may be part of an artifact: data of listed kinds that begins as its kind must; nothing that could run."""

import struct

import msgspec
import pytest

from weir.core.registry.artifact_kinds import JSON_BYTES_MAX, bytes_to_check, check_allowed, check_content
from weir.core.registry.manifest import ArtifactFlaw
from weir.errors import ArtifactRefused

GGUF = b"GGUF\x03\0\0\0" + bytes(16)
TENSORS = struct.pack("<Q", 2) + b"{}"


def check(path: str, content: bytes) -> None:
    """What the store does for one file."""
    check_allowed([path])
    check_content(path, len(content), content[: bytes_to_check(path)])


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("pytorch_model.bin", "pickle"),
        ("a/model.PT", "pickle"),
        ("x.pkl", "pickle"),
        ("x.joblib", "pickle"),
        ("x.npy", "pickle"),
        ("modeling_custom.py", "Python"),
        ("x.pyc", "Python"),
        ("libx.so", "library"),
        ("x.dll", "library"),
        ("x.dylib", "library"),
        ("x.exe", "program"),
        ("x.jar", "program"),
        ("x.wasm", "program"),
        ("run.sh", "script"),
        ("x.keras", "layers may be code"),
        ("json.tar.pkl", "pickle"),
    ],
)
def test_what_can_run_code_is_refused_by_name_and_reason(path: str, why: str) -> None:
    """Protects the machine: carriers of code are refused, and whoever registers learns which file and why."""
    with pytest.raises(ArtifactRefused, match=why) as refused:
        check_allowed(["README.md", path])
    assert refused.value.members == {"field": "artifact", "reason": ArtifactFlaw.RUNS_CODE, "file": path}


@pytest.mark.parametrize(
    "path", ["a", "Makefile", ".json", ".git/config", ".gitignore", "x.yaml", "libx.so.1", "x.", "a.json/b", "x.zip"]
)
def test_what_nobody_thought_of_is_refused(path: str) -> None:
    """Protects the machine: what is not listed is refused, and the refusal says what would be accepted."""
    with pytest.raises(ArtifactRefused, match=r"accepted are \.gguf, \.safetensors") as refused:
        check_allowed([path])
    assert refused.value.members["reason"] == ArtifactFlaw.UNKNOWN_KIND


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("model.gguf", GGUF),
        ("MODEL.GGUF", GGUF),
        ("model.safetensors", TENSORS + b"rest"),
        ("config.json", b'{"architectures": ["X"], "auto_map": null}'),
        ("tokenizer.json", b'{"model": {"vocab": {"auto_map": 1, "\\ud83d\\ude00": 2}}}'),
        ("list.json", b'["auto_map"]'),
        ("text.json", b'"auto_map"'),
        ("golden.jsonl", b"{}\n{}\n"),
        ("tokenizer.model", b"\x0a\x0e"),
        ("merges.txt", b""),
        ("chat_template.jinja", b"{{ messages }}"),
        ("docs/README.md", b"# Words"),
        ("LICENSE", b"words"),
        ("docs/NOTICE", b"words"),
    ],
)
def test_data_of_the_listed_kinds_is_accepted(path: str, content: bytes) -> None:
    """Protects ordinary artifacts."""
    check(path, content)


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("model.gguf", b"\x80\x04\x95", "begin with GGUF"),
        ("model.gguf", b"", "begin with GGUF"),
        ("model.gguf", b"GGU", "begin with GGUF"),
        ("x.safetensors", b"", "safetensors header"),
        ("x.safetensors", struct.pack("<Q", 3) + b"{}", "safetensors header"),
        ("x.safetensors", struct.pack("<Q", 2) + b"\x80\x04", "safetensors header"),
        ("x.safetensors", struct.pack("<Q", 2**63) + b"{}", "safetensors header"),
        ("x.safetensors", struct.pack("<Q", 0) + b"{}"[:0], "safetensors header"),
        ("config.json", b"", "not JSON"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"a": [1,]}', "not JSON"),
        ("config.json", b'{"a": "\xff"}', "not JSON"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("config.json", b'"' + b" " * JSON_BYTES_MAX, f"may have {JSON_BYTES_MAX} bytes"),
    ],
)
def test_a_suffix_is_a_claim_that_is_checked(path: str, content: bytes, why: str) -> None:
    """Protects engines: a file that does not begin as its kind must is refused with the reason."""
    with pytest.raises(ArtifactRefused, match=why) as refused:
        check(path, content)
    assert refused.value.members == {"field": "artifact", "reason": ArtifactFlaw.MALFORMED_FILE, "file": path}


@pytest.mark.parametrize("hook", ["auto_map", "auto_mapping", "custom_pipelines"])
@pytest.mark.parametrize("path", ["config.json", "tokenizer_config.json", "any.JSON"])
def test_code_that_a_configuration_names_is_refused(path: str, hook: str) -> None:
    """Protects the machine from a model's own Python: the hook is refused by its name, however it is spelt."""
    escaped = f'{{"\\u{ord(hook[0]):04x}{hook[1:]}": {{"a": "b--c.D"}}}}'.encode()
    for content in (msgspec.json.encode({"x": 1, hook: {"AutoModel": "modeling.X"}}), escaped):
        with pytest.raises(ArtifactRefused, match=f"`{hook}` names code") as refused:
            check(path, content)
        assert refused.value.members["reason"] == ArtifactFlaw.RUNS_CODE
