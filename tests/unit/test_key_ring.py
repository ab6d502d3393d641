"""Which key vouches for what: every reason to refuse a signature or a key, each by itself; and signing."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from tests.signing_keys import private_key

from weir.core.registry.key_ring import KeyRole, SigningKey, fingerprint_of
from weir.core.registry.manifest import FileDigest, manifest_of
from weir.core.registry.signatures import PEM_BYTES_MAX, public_key_of, read_public_key, sign, verify
from weir.core.registry.signed_manifest import SignatureFlaw, SignedManifest, read_bundle
from weir.errors import InvalidRequest, SignatureRefused
from weir.private_keys import new_signing_key

PRIVATE, OTHER = private_key(1), private_key(2)
MANIFEST = manifest_of([FileDigest("model.gguf", "ab" * 32)])
SIGNED = read_bundle(sign(MANIFEST, "demo", PRIVATE))
KEY = SigningKey("release", public_key_of(PRIVATE), frozenset(KeyRole), None, 1_000, 2_000)
NOW_MS = 1_500


def check(*keys: SigningKey, signed: SignedManifest = SIGNED, tenant: str | None = "acme", now_ms: int = NOW_MS) -> SigningKey:
    return verify(signed, keys, KeyRole.ADAPTER, tenant, now_ms)


@pytest.mark.parametrize(
    ("keys", "flaw", "words"),
    [
        ([], SignatureFlaw.UNKNOWN_KEY, f"not in the key ring, of fingerprint {KEY.fingerprint}"),
        ([replace(KEY, public_key=public_key_of(OTHER))], SignatureFlaw.UNKNOWN_KEY, "not in the key ring"),
        ([replace(KEY, revoked=True)], SignatureFlaw.REVOKED_KEY, "release was revoked"),
        (
            [replace(KEY, roles=frozenset([KeyRole.MODEL]))],
            SignatureFlaw.WRONG_ROLE,
            "release has the roles model, not adapter",
        ),
        ([replace(KEY, roles=frozenset())], SignatureFlaw.WRONG_ROLE, r"release has the roles \(none\), not adapter"),
        ([replace(KEY, tenant="globex")], SignatureFlaw.OTHER_TENANT, "release vouches only for"),
        ([replace(KEY, not_before_ms=NOW_MS + 1)], SignatureFlaw.NOT_YET_VALID, "release is not valid yet"),
        ([replace(KEY, not_after_ms=NOW_MS - 1)], SignatureFlaw.EXPIRED, "release has expired"),
        ([KEY, replace(KEY, name="again", revoked=True)], SignatureFlaw.REVOKED_KEY, "again was revoked"),
    ],
)
def test_each_reason_not_to_trust_a_key(keys: list[SigningKey], flaw: SignatureFlaw, words: str) -> None:
    """Protects what is loaded: a key that is unknown, or not for this, or not now, is refused with that reason and its name."""
    with pytest.raises(SignatureRefused, match=words) as refused:
        check(*keys)
    assert refused.value.members == {"field": "signature", "reason": flaw}
    assert "globex" not in refused.value.detail


@pytest.mark.parametrize("tenant", ["acme", None])
def test_a_key_for_all_vouches_for_every_tenant(tenant: str | None) -> None:
    """Protects the platform's own keys: they are good for shared artifacts and for those of a tenant."""
    assert check(replace(KEY, name="x", public_key=public_key_of(OTHER)), KEY, tenant=tenant) is KEY


def test_a_tenants_key_vouches_for_that_tenant_alone() -> None:
    """Protects tenants from one another, and shared models from every tenant's key."""
    own = replace(KEY, tenant="acme")
    assert check(own) is own
    for tenant in (None, "globex", "Acme", ""):
        with pytest.raises(SignatureRefused, match="of the tenant it belongs to"):
            check(own, tenant=tenant)


@pytest.mark.parametrize(("now_ms", "good"), [(999, False), (1_000, True), (2_000, True), (2_001, False)])
def test_a_keys_time_has_exact_ends(now_ms: int, good: bool) -> None:
    """Protects the edges: first and last moment belong to it; without an end it stays good."""
    if good:
        check(KEY, now_ms=now_ms)
    else:
        with pytest.raises(SignatureRefused):
            check(KEY, now_ms=now_ms)
    check(replace(KEY, not_before_ms=0, not_after_ms=None), now_ms=now_ms)


def test_a_signature_of_another_key_under_this_ones_name_does_not_match() -> None:
    """Protects from a hint that lies, also where the key it names is revoked: what does not match is said first."""
    lie = replace(read_bundle(sign(MANIFEST, "demo", OTHER)), key_hint=KEY.fingerprint)
    for key in (KEY, replace(KEY, revoked=True)):
        with pytest.raises(SignatureRefused, match="not what release signed") as refused:
            check(key, signed=lie)
        assert refused.value.members["reason"] == SignatureFlaw.MISMATCH


@pytest.mark.parametrize("signature", [b"", b"\x30", SIGNED.signature[:-1], SIGNED.signature + b"\0"], ids=len)
def test_a_signature_that_is_none_does_not_match(signature: bytes) -> None:
    """Protects from anything that is not exactly one signature."""
    with pytest.raises(SignatureRefused, match="does not match"):
        check(KEY, signed=replace(SIGNED, signature=signature))


def test_signing_draws_nothing() -> None:
    """Protects repeatability: the same manifest, name and key give the same file."""
    assert sign(MANIFEST, "demo", PRIVATE) == sign(MANIFEST, "demo", PRIVATE) != sign(MANIFEST, "demo", OTHER)


def test_a_new_key_signs() -> None:
    """Protects whoever makes one: a new key is one to sign with, and no two are the same."""
    new = [new_signing_key() for _ in range(3)]
    signed = read_bundle(sign(MANIFEST, "demo", new[0]))
    check(replace(KEY, public_key=public_key_of(new[0])), signed=signed)
    assert len(set(new)) == 3


def pem_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> tuple[str, str]:
    """A private key and its public one as PEM."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private.decode(), key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


OF_OTHER_KINDS = [
    pem_of(ec.generate_private_key(ec.SECP384R1())),
    pem_of(ed25519.Ed25519PrivateKey.generate()),
    pem_of(rsa.generate_private_key(65_537, 2_048)),
]
GARBAGE = ["", "key", KEY.public_key[:-40], "x" * (PEM_BYTES_MAX + 1), KEY.public_key + "\udcff", KEY.fingerprint]


def unnamed(value: str) -> str:
    """A name of a test without what is made anew in each process."""
    return value if len(value) < 40 and value.isprintable() else "pem"


@pytest.mark.parametrize(
    ("pem", "words"),
    [(public, "of another kind") for _, public in OF_OTHER_KINDS]
    + [(private, "private key: it stays") for private in (PRIVATE, PRIVATE + KEY.public_key, OF_OTHER_KINDS[0][0])]
    + [(garbage, "not a public key in PEM form") for garbage in GARBAGE],
    ids=unnamed,
)
def test_what_is_no_public_key_on_p256_is_refused(pem: str, words: str) -> None:
    """Protects the ring: each wrong thing that people paste is refused by its name, and never shown."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        read_public_key(pem)
    assert refused.value.members == {"field": "public_key", "accepted": "an ECDSA public key on P-256 as PEM text"}
    assert len(refused.value.detail) < 100


def encrypted() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")).decode()


@pytest.mark.parametrize(
    ("pem", "words"),
    [(private, "of another kind") for private, _ in OF_OTHER_KINDS]
    + [(encrypted(), "is encrypted")]
    + [(garbage, "not a private key in PEM form") for garbage in (*GARBAGE, KEY.public_key, PRIVATE[:-60])],
    ids=unnamed,
)
def test_what_is_no_private_key_on_p256_is_refused(pem: str, words: str) -> None:
    """Protects the signer: each wrong thing is refused by its name, without anything of a key."""
    for attempt in (lambda: sign(MANIFEST, "demo", pem), lambda: public_key_of(pem)):
        with pytest.raises(InvalidRequest, match=words) as refused:
            attempt()
        assert refused.value.members["field"] == "private_key"
        assert len(refused.value.detail) < 100 and refused.value.__cause__ is None


def test_a_key_has_one_form() -> None:
    """Protects fingerprints: however its PEM is laid out, a key is kept in one form; private ones may be in an older one."""
    public = KEY.public_key
    body = "".join(public.splitlines()[1:-1])
    relaid = f"words before\r\n-----BEGIN PUBLIC KEY-----\r\n{body[:64]}\r\n{body[64:]}\r\n-----END PUBLIC KEY-----\r\n\r\n"
    assert read_public_key(relaid) == read_public_key(public) == public
    assert fingerprint_of(public) == KEY.fingerprint == SIGNED.key_hint
    key = ec.generate_private_key(ec.SECP256R1())
    traditional = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()
    assert public_key_of(traditional) == pem_of(key)[1]
