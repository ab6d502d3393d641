"""Our signatures and those of the published model_signing tool are the same: both sides accept, or both refuse."""

import subprocess
from pathlib import Path

import pytest
from tests.contract.artifact_folders import FILES, MODEL, Trust, key_of, manifest_for, signed, write
from tests.signing_keys import private_key

from weir.core.registry.signatures import public_key_of
from weir.errors import ArtifactRefused, SignatureRefused
from weir.storage.artifact_store import ArtifactStore

TOOL = Path(__file__).parents[2] / ".venv/signing-tool/bin/model_signing"
WAIT_S = 120
CONTENTS = FILES | {"a.txt": b"", "a/b.txt": b"1", "docs/ü x.txt": b"2", ".hidden.txt": b"3"}


class Desk:
    """A folder, keys as files, and both sides' way to sign and to verify."""

    def __init__(self, path: Path) -> None:
        assert TOOL.exists(), f"{TOOL} is missing: run make signing-tool"
        self.folder = write(path / "folder", CONTENTS)
        self.signature = path / "model.sig"
        self.store = ArtifactStore(path / "artifacts")
        self._keys = path

    def key(self, number: int, kind: str) -> Path:
        path = self._keys / f"{number}.{kind}.pem"
        private = private_key(number)
        path.write_text(private if kind == "private" else public_key_of(private), encoding="ascii")
        return path

    def run_tool(self, *arguments: str | Path) -> str:
        """What the tool says, after "0 " or another exit status."""
        command = [TOOL, *arguments, "--signature", self.signature]
        done = subprocess.run(
            command, cwd=self._keys, capture_output=True, text=True, timeout=WAIT_S, check=False, env={"HOME": str(self._keys)}
        )
        return f"{done.returncode} {done.stdout}{done.stderr}"

    def tool_signs(self, number: int = 1) -> None:
        said = self.run_tool("sign", "key", self.folder, "--private_key", self.key(number, "private"))
        assert said.startswith("0 "), said

    def tool_verifies(self, number: int = 1) -> str:
        return self.run_tool("verify", "key", self.folder, "--public_key", self.key(number, "public"))

    def weir_signs(self, number: int = 1) -> None:
        self.signature.write_bytes(signed(CONTENTS, number))

    def weir_keeps(self, number: int = 1) -> str:
        """The digest of what was kept."""
        return self.store.keep(self.folder, self.signature.read_bytes(), Trust([key_of(number)]).of()).manifest.digest


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_what_the_tool_signs_is_accepted_here(desk: Desk) -> None:
    """Protects whoever signs with the tool: the folder is kept under the digest that we give it ourselves."""
    desk.tool_signs()
    assert desk.weir_keeps() == manifest_for(CONTENTS).digest
    with pytest.raises(SignatureRefused, match="not in the key ring"):
        desk.weir_keeps(2)
    (desk.folder / MODEL).write_bytes(b"GGUF edited")
    with pytest.raises(ArtifactRefused, match=r"model\.gguf is not what was signed"):
        desk.weir_keeps()


def test_what_is_signed_here_the_tool_accepts(desk: Desk) -> None:
    """Protects whoever checks with the tool: our signature is one to it, another key's is not, and an edited file shows."""
    desk.weir_signs()
    assert desk.tool_verifies().startswith("0 ")
    said = desk.tool_verifies(2)
    assert not said.startswith("0 ") and "Key mismatch" in said
    (desk.folder / MODEL).write_bytes(b"GGUF edited")
    said = desk.tool_verifies()
    assert not said.startswith("0 ") and f"Hash mismatch for '{MODEL}'" in said


@pytest.mark.parametrize("signer", ["tool", "weir"])
def test_an_edited_signature_is_refused_by_both(desk: Desk, signer: str) -> None:
    """Protects both ways: a statement with one letter changed is what neither side accepts."""
    if signer == "tool":
        desk.tool_signs()
    else:
        desk.weir_signs()
    whole = desk.signature.read_bytes()
    start = whole.index(b'"payload":"') + 200
    desk.signature.write_bytes(whole[:start] + (b"A" if whole[start : start + 1] != b"A" else b"B") + whole[start + 1 :])
    assert not desk.tool_verifies().startswith("0 ")
    with pytest.raises((SignatureRefused, ArtifactRefused)):
        desk.weir_keeps()


def test_what_the_tool_passes_over_is_refused_here(desk: Desk) -> None:
    """Protects what is served: a file of Git that the tool neither signs nor sees is one too many for us."""
    (desk.folder / ".gitattributes").write_bytes(b"x")
    desk.tool_signs()
    assert desk.tool_verifies().startswith("0 ")
    with pytest.raises(ArtifactRefused, match="gitattributes"):
        desk.weir_keeps()
