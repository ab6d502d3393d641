"""Private signing keys that are the same in every run, each by its number."""

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def private_key(number: int) -> str:
    """An ECDSA key on P-256 as PEM. number: 1 or more."""
    key = ec.derive_private_key(number, ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
