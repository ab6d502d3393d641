"""The arithmetic of signatures: which key signed a manifest, and signing one.

Pure. ECDSA on P-256, with keys in the PEM form of OpenSSL and the `model_signing` tool. Signing draws no randomness (RFC 6979).
Nothing of a private key ever shows in an error. Whether the key that signed may be relied on is `key_ring`'s to say.
"""

from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from weir import errors
from weir.core.registry.key_ring import KeyRole, SigningKey, check_trust, fingerprint_of
from weir.core.registry.manifest import Manifest
from weir.core.registry.signed_manifest import (
    SignatureFlaw,
    SignedManifest,
    signature_refused,
    signed_bytes,
    statement_of,
    write_bundle,
)
from weir.units import Bytes, Millis

PEM_BYTES_MAX: Bytes = 16 * 1024
_PRIVATE = "PRIVATE KEY-----"

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256: private keys are the numbers below it but 0 (FIPS 186-5, SP 800-186)."""


def verify(signed: SignedManifest, keys: Iterable[SigningKey], role: KeyRole, tenant: str | None, now_ms: Millis) -> SigningKey:
    """The key that vouches now for a tenant's artifact in a role. Raises SignatureRefused with the reason.

    tenant: whose the artifact is; None: shared. Whether the signature matches is asked first: else it says nothing of its key.
    """
    named = [key for key in keys if key.fingerprint == signed.key_hint]
    if not named:
        detail = f"The artifact is signed with a key that is not in the key ring, of fingerprint {signed.key_hint}."
        raise signature_refused(SignatureFlaw.UNKNOWN_KEY, detail)
    try:
        _loaded(named[0].public_key).verify(signed.signature, signed.signed_bytes, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        detail = f"The signature does not match: what it is over, or the signature, is not what {named[0].name} signed."
        raise signature_refused(SignatureFlaw.MISMATCH, detail) from None
    for key in named:
        check_trust(key, role, tenant, now_ms)
    return named[0]


def read_public_key(pem: str) -> str:
    """A public key in its one PEM form. Raises InvalidRequest, with what is wrong, unless it is an ECDSA key on P-256."""
    if _PRIVATE in pem:
        raise _refused_key("public_key", "This is a private key: it stays with whoever signs. Give its public key.")
    try:
        key = load_pem_public_key(_bounded(pem))
    except (ValueError, UnsupportedAlgorithm):
        raise _refused_key("public_key", "This is not a public key in PEM form.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _refused_key("public_key", "This public key is of another kind.")
    return _pem_of(key)


def public_key_of(private_key: str) -> str:
    """The public key of a private one, in its one PEM form. Raises InvalidRequest, never with anything of the key."""
    return _pem_of(_loaded_private(private_key).public_key())


def private_key_from(secret: bytes) -> str:
    """The private key, PEM, that a secret of 32 random bytes stands for: always the same one."""
    number = int.from_bytes(secret, "big") % (_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def sign(manifest: Manifest, name: str, private_key: str) -> bytes:
    """A signature file's content for a manifest. name: what to call the artifact, for people. private_key: PEM, not encrypted.

    Raises InvalidRequest for another key.
    """
    key = _loaded_private(private_key)
    payload = statement_of(manifest, name)
    signature = key.sign(signed_bytes(payload), ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    return write_bundle(payload, signature, fingerprint_of(_pem_of(key.public_key())))


def _loaded_private(pem: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(_bounded(pem), password=None)
    except TypeError:
        raise _refused_key("private_key", "This private key is encrypted.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise _refused_key("private_key", "This is not a private key in PEM form.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _refused_key("private_key", "This private key is of another kind.")
    return key


def _loaded(public_key: str) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(public_key.encode())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def _pem_of(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _bounded(pem: str) -> bytes:
    """Raises ValueError for more than a key can be."""
    if len(pem) > PEM_BYTES_MAX:
        raise ValueError
    return pem.encode()


def _refused_key(field: str, detail: str) -> errors.InvalidRequest:
    kind = field.replace("_", " ")
    return errors.InvalidRequest(detail, members={"field": field, "accepted": f"an ECDSA {kind} on P-256 as PEM text"})
