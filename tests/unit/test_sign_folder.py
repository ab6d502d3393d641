"""Protects keys and signatures: what a person signs is what a registration takes, and no key is ever lost or shown."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.artifact_folders import DIGEST, FILES, key_of, manifest_for, write
from tests.signing_keys import private_key
from typer.testing import CliRunner, Result

from weir.cli.main import command_line
from weir.core.registry.key_ring import KeyRole
from weir.core.registry.signatures import public_key_of, verify
from weir.core.registry.signed_manifest import read_bundle

KEY = private_key(1)


def run(*words: str) -> Result:
    return CliRunner().invoke(command_line(["model"]), ["model", *words])


def sign(place: Path, **paths: Path) -> Result:
    """Sign place/model with the numbered key 1; paths replace the usual ones."""
    (place / "key").write_text(KEY)
    chosen = {"folder": place / "model", "key": place / "key", "signature": place / "model.sig"} | paths
    return run("sign", str(chosen["folder"]), "--key", str(chosen["key"]), "--signature", str(chosen["signature"]))


def test_a_new_key_is_its_owners_alone_and_signs(tmp_path: Path) -> None:
    """Protects private keys: only their owner reads them, nothing of them is printed, and the public part is theirs."""
    made = run("keygen", str(tmp_path / "release"))
    assert made.exit_code == 0, made.output
    private, public = (tmp_path / "release").read_text(), (tmp_path / "release.pub").read_text()
    assert stat.S_IMODE((tmp_path / "release").stat().st_mode) == 0o600
    assert public_key_of(private) == public and "PRIVATE" not in public
    assert not any(line in made.output for line in private.splitlines() if line)
    write(tmp_path / "model")
    assert sign(tmp_path, key=tmp_path / "release").exit_code == 0


@pytest.mark.parametrize("there", ["release", "release.pub"])
def test_no_file_is_overwritten_by_a_new_key(tmp_path: Path, there: str) -> None:
    """Protects keys that are there: a lost one cannot be made again, and no half of a pair is left."""
    (tmp_path / there).write_text("mine")
    refused = run("keygen", str(tmp_path / "release"))
    assert refused.exit_code == 1 and "File exists" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == [there] and (tmp_path / there).read_text() == "mine"


def test_what_is_signed_is_what_a_registration_verifies(tmp_path: Path) -> None:
    """Protects interoperation: the signature is over exactly the folder's files, also where it lies among them itself."""
    folder = write(tmp_path / "model")
    for signature in (tmp_path / "model.sig", folder / "model.sig"):
        for _ in range(2):
            done = sign(tmp_path, signature=signature)
            assert done.exit_code == 0 and DIGEST in done.output, done.output
            signed = read_bundle(signature.read_bytes())
            assert signed.manifest == manifest_for(FILES)
            assert verify(signed, [key_of(1)], KeyRole.MODEL, None, 1_000).name == "key-1"
        signature.unlink()


def test_what_a_registration_would_refuse_is_not_signed(tmp_path: Path) -> None:
    """Protects signers from vouching in vain: kinds that run code, contents that are no weights, links, no folder at all."""
    for name, content, said in (
        ("evil.py", b"import os", "Python code"),
        ("other.gguf", b"not weights", "other.gguf"),
        ("archive.zip", b"PK", "no accepted kind"),
    ):
        path = write(tmp_path / "model") / name
        path.write_bytes(content)
        refused = sign(tmp_path)
        assert refused.exit_code == 1 and said in refused.output and not (tmp_path / "model.sig").exists()
        path.unlink()
    (tmp_path / "model" / "link.json").symlink_to("config.json")
    assert "symbolic link" in sign(tmp_path).output
    assert "cannot be read" in sign(tmp_path, folder=tmp_path / "absent").output


@pytest.mark.parametrize("key", ["not a key", public_key_of(KEY)])
def test_a_key_that_cannot_sign_is_refused_before_anything_is_read(tmp_path: Path, key: str) -> None:
    """Protects whoever mixes up files, in one sentence that has nothing of the key."""
    (tmp_path / "other").write_text(key)
    refused = sign(tmp_path, key=tmp_path / "other", folder=tmp_path / "absent")
    assert refused.exit_code == 1 and "not a private key" in refused.output and key.splitlines()[0] not in refused.output
    absent = sign(tmp_path, key=tmp_path / "absent")
    assert absent.exit_code == 1 and "No such file" in absent.output and absent.output.count("\n") == 1


def test_failures_go_to_standard_error(tmp_path: Path) -> None:
    """Protects scripts that read the answer: a failure leaves standard output empty."""
    words = ["model", "keygen", str(tmp_path / "absent" / "key")]
    shown = subprocess.run([sys.executable, "-m", "weir.cli.main", *words], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (1, "") and shown.stderr.startswith("error: ")
