"""`weir model keygen` and `weir model sign`: a new signing key, and a folder's signature. Local: no cell is asked.

The signature is in the OpenSSF Model Signing format, so the `model_signing` tool checks it too. What a registration would
refuse is refused here already. A private key is written readable by its owner only, and nothing of it is ever printed.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from weir.cli.one_sentence import one_sentence
from weir.cli.tables import print_json

_KEY_BYTES_MAX = 16 * 1024
_PRIVATE_MODE, _PUBLIC_MODE = 0o600, 0o644


def keygen(
    key: Annotated[Path, typer.Argument(help="Where to write the private key; the public one beside it, as KEY.pub.")],
) -> None:
    """Make a key pair to sign models with (ECDSA on P-256); `weir key-ring add` trusts its public part."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from weir.core.registry.key_ring import fingerprint_of
    from weir.core.registry.signatures import public_key_of

    made = ec.generate_private_key(ec.SECP256R1())
    private = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public, public_path = public_key_of(private.decode()), key.with_name(f"{key.name}.pub")
    with one_sentence():
        _write_new(public_path, public.encode(), _PUBLIC_MODE)
        try:
            _write_new(key, private, _PRIVATE_MODE)
        except OSError:
            public_path.unlink()
            raise
    print_json({"key": str(key), "public_key": str(public_path), "fingerprint": fingerprint_of(public)})


def sign(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to sign as a whole.")],
    key: Annotated[Path, typer.Option(help="The private key, a PEM file.")],
    signature: Annotated[Path, typer.Option(help="Where to write the signature.")],
) -> None:
    """Sign every file of a model's folder by name and content; `weir model register` takes both."""
    from weir.core.registry import signatures
    from weir.storage.folder_manifest import manifest_of_folder

    with one_sentence():
        folder, signature = folder.absolute(), signature.absolute()
        inside = signature.relative_to(folder).as_posix() if signature.is_relative_to(folder) else None
        with key.open("rb") as file:
            private = file.read(_KEY_BYTES_MAX + 1).decode(errors="replace")
        signatures.public_key_of(private)  # a wrong key is found before the whole folder is read
        manifest = manifest_of_folder(folder, inside)
        signature.write_bytes(signatures.sign(manifest, folder.name, private))
    print_json({"signature": str(signature), "artifact_digest": manifest.digest, "files": len(manifest.files)})


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Nothing is overwritten: a lost key cannot be made again. Raises FileExistsError."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
