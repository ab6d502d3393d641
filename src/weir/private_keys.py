"""Makes private signing keys: beside `clock`, the only place that draws randomness.

Whoever calls keeps the key; it must never be sent, logged or shown in an error.
"""

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def new_signing_key() -> str:
    """A fresh private key, ECDSA on P-256, as PEM text that is not encrypted."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
