"""Which kinds of files an artifact may have: data that no engine can take for code.

Pure. An explicit list of what is accepted, not of what is dangerous: what nobody thought of is refused. Known carriers of code
(pickles, Python, native libraries, scripts) are refused with that reason, everything else as unknown. A suffix is a claim, so
the beginning of what an engine loads is checked too, and a JSON file must not name code for a loader to fetch and run.
"""

from collections.abc import Mapping, Sequence

import msgspec

from weir.core.registry.manifest import ArtifactFlaw, artifact_refused, shown
from weir.units import Bytes

ACCEPTED_SUFFIXES = (".gguf", ".safetensors", ".json", ".jsonl", ".txt", ".md", ".model", ".jinja")
"""Weights, their configuration, vocabularies (.model: SentencePiece), chat templates and texts. A template sees nothing but its
conversation; YAML is not accepted because its loaders can construct any object.
"""
ACCEPTED_NAMES = ("LICENSE", "NOTICE", "README")

JSON_BYTES_MAX: Bytes = 64 * 1024 * 1024
"""The largest tokenizers take half of this."""
_HEAD_BYTES: Bytes = 16
_GGUF_MAGIC = b"GGUF"
_TENSORS_HEADER_BYTES_MAX: Bytes = 100_000_000
"""The safetensors format's own bound."""
_LENGTH_BYTES = 8

_PICKLE = "a pickle, or a format around one, which runs code when it is loaded"
_PYTHON = "Python code"
_NATIVE = "a program or library"
_SCRIPT = "a script"
_LAYERS = "a format whose layers may be code"
_RUNS_CODE: Mapping[str, str] = {
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".nemo"), _PICKLE),
    **dict.fromkeys((".py", ".pyc", ".pyw", ".pyi", ".pyx", ".ipynb", ".whl", ".egg"), _PYTHON),
    **dict.fromkeys((".so", ".dll", ".dylib", ".pyd", ".exe", ".a", ".o", ".jar", ".class", ".wasm", ".elf"), _NATIVE),
    **dict.fromkeys((".sh", ".bash", ".bat", ".cmd", ".ps1", ".js", ".mjs", ".rb", ".pl", ".lua", ".php"), _SCRIPT),
    **dict.fromkeys((".h5", ".hdf5", ".keras", ".pb", ".onnx"), _LAYERS),
}
_CODE_HOOKS = ("auto_map", "auto_mapping", "custom_pipelines")
"""Keys by which Transformers and PEFT find Python code of a model's own, at the top of its JSON files."""


def check_allowed(paths: Sequence[str]) -> None:
    """Raises ArtifactRefused for the first file of a kind that may run code, or that is not accepted."""
    for path in paths:
        suffix = _suffix(path)
        if suffix in ACCEPTED_SUFFIXES or path.rpartition("/")[2] in ACCEPTED_NAMES:
            continue
        if suffix in _RUNS_CODE:
            detail = f"The file {shown(path)} is refused: {suffix} is {_RUNS_CODE[suffix]}."
            raise artifact_refused(ArtifactFlaw.RUNS_CODE, detail, path)
        accepted = ", ".join((*ACCEPTED_SUFFIXES, *ACCEPTED_NAMES))
        detail = f"The file {shown(path)} is of no accepted kind; accepted are {accepted}."
        raise artifact_refused(ArtifactFlaw.UNKNOWN_KIND, detail, path)


def bytes_to_check(path: str) -> Bytes:
    """How many of a file's first bytes `check_content` looks at; a file may have fewer."""
    return JSON_BYTES_MAX + 1 if _suffix(path) == ".json" else _HEAD_BYTES


def check_content(path: str, size_bytes: Bytes, head: bytes) -> None:
    """Raises ArtifactRefused unless an accepted file begins as its kind must, or if it is JSON that names code to run.

    head: the first `bytes_to_check` bytes of size_bytes.
    """
    match _suffix(path):
        case ".gguf" if not head.startswith(_GGUF_MAGIC):
            raise _malformed(path, "it does not begin with GGUF")
        case ".safetensors":
            length = int.from_bytes(head[:_LENGTH_BYTES], "little")
            whole = _LENGTH_BYTES + length
            if length > _TENSORS_HEADER_BYTES_MAX or whole > size_bytes or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
                raise _malformed(path, "it does not begin with a safetensors header")
        case ".json":
            _check_json(path, head)


def _check_json(path: str, content: bytes) -> None:
    if len(content) > JSON_BYTES_MAX:
        raise _malformed(path, f"a JSON file may have {JSON_BYTES_MAX} bytes")
    try:
        top = msgspec.json.decode(content.decode(), type=dict[str, msgspec.Raw] | list[msgspec.Raw] | str | float | bool | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _malformed(path, "it is not JSON") from None
    hooks = [key for key in _CODE_HOOKS if bytes(top.get(key, b"null")) != b"null"] if isinstance(top, dict) else []
    if hooks:
        detail = f"The file {shown(path)} is refused: its `{hooks[0]}` names code for a loader to run."
        raise artifact_refused(ArtifactFlaw.RUNS_CODE, detail, path)


def _malformed(path: str, why: str) -> Exception:
    return artifact_refused(ArtifactFlaw.MALFORMED_FILE, f"The file {shown(path)} is refused: {why}.", path)


def _suffix(path: str) -> str:
    stem, _, suffix = path.rpartition("/")[2].rpartition(".")
    return f".{suffix.lower()}" if stem else ""
