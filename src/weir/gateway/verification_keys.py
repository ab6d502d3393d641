"""The keys of an issuer's set (RFC 7517) that can check signatures, and which of them a token means.

A key is used only with the algorithms of its own type and curve, so that no text can be passed off as signed by treating a
public key as a secret. What cannot check a signature of an algorithm that may be allowed is passed over: sets hold keys for
other purposes and of types to come.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from weir import errors

KEYS_MAX = 100
_KEY_ID_CHARACTERS_MAX = 256
_RSA_BITS_MIN, _RSA_BITS_MAX = 2_048, 8_192
_RSA_EXPONENT_CHARACTERS_MAX = 8
_CHARACTERS_MAX = _RSA_BITS_MAX // 6 + 2

_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_BY_CURVE = {
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA", "Ed25519"}),
}
_KINDS: dict[str, tuple[type[RSAKey | ECKey | OKPKey], tuple[str, ...]]] = {
    "RSA": (RSAKey, ("n", "e")),
    "EC": (ECKey, ("crv", "x", "y")),
    "OKP": (OKPKey, ("crv", "x")),
}
_SAME = dict.fromkeys(("EdDSA", "Ed25519"), _BY_CURVE["OKP", "Ed25519"])
_LIBRARY_NAMES = {"EdDSA": "Ed25519"}
"""The older name of the same signature, about which the library warns because it says no curve; our keys do."""

Identity: TypeAlias = tuple[str | None, str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key. algorithms: with which it may be used. identity: the same for the same key in a later set."""

    id: str | None
    algorithms: frozenset[str]
    key: RSAKey | ECKey | OKPKey
    identity: Identity

    def signed(self, algorithm: str, content: bytes, signature: bytes) -> bool:
        """Whether its owner signed the content. algorithm: one of ours."""
        assert algorithm in self.algorithms
        name = _LIBRARY_NAMES.get(algorithm, algorithm)
        method = JWSRegistry(algorithms=[name]).get_alg(name)
        return method.verify(content, signature, self.key)


class KeySet:
    """The keys that an issuer has now."""

    def __init__(self, keys: Sequence[VerificationKey]) -> None:
        self._keys = keys
        self.identities = frozenset(key.identity for key in keys)

    def has(self, key_id: str | None) -> bool:
        """Whether a token that names this key, or none, names one of ours; there may be several of several types."""
        return any(key_id in (None, key.id) for key in self._keys)

    def find(self, key_id: str | None, algorithm: str) -> VerificationKey | None:
        """The one key that a token means. Without a key id: the only one that fits the algorithm."""
        fitting = [key for key in self._keys if key_id in (None, key.id) and algorithm in key.algorithms]
        return fitting[0] if len(fitting) == 1 else None


def key_set_of(members: Sequence[Any]) -> KeySet:
    """The keys among the members of a set. Raises IssuerUnavailable for more of them than an issuer has."""
    if len(members) > KEYS_MAX:
        raise errors.IssuerUnavailable(f"Its key set has more than {KEYS_MAX} keys.")
    found = [key for member in members if (key := _key_of(member)) is not None]
    return KeySet(list({(key.id, key.key.key_type): key for key in reversed(found)}.values()))


def _key_of(member: Any) -> VerificationKey | None:
    if not isinstance(member, dict) or not _is_for_checking(member):
        return None
    algorithms = _algorithms_of(member)
    cls, names = _KINDS.get(str(member.get("kty")), (None, ()))
    values = {name: value for name in names if isinstance(value := member.get(name), str) and len(value) <= _CHARACTERS_MAX}
    if cls is None or not algorithms or len(values) < len(names):
        return None
    try:
        if cls is RSAKey and not _is_of_usual_size(values["n"], values["e"]):
            return None
        key = cls.import_key({"kty": cls.key_type, **values})
    except (JoseError, ValueError):
        return None
    key_id = member.get("kid")
    return VerificationKey(key_id, algorithms, key, (key_id, key.thumbprint(), algorithms))


def _algorithms_of(member: dict[str, Any]) -> frozenset[str]:
    """What its type and curve can do, and of that what it is meant for, if it says so."""
    kind = str(member.get("kty"))
    able = _RSA if kind == "RSA" else _BY_CURVE.get((kind, str(member.get("crv"))), frozenset())
    meant = member.get("alg")
    return able if meant is None else able & _SAME.get(meant, {meant})


def _is_for_checking(member: dict[str, Any]) -> bool:
    """Whether its owner means it for signatures. One whose private part is shown is nobody's."""
    key_id, operations = member.get("kid"), member.get("key_ops", ["verify"])
    if key_id is not None and not (isinstance(key_id, str) and len(key_id) <= _KEY_ID_CHARACTERS_MAX):
        return False
    if "d" in member or member.get("use", "sig") != "sig" or not isinstance(member.get("alg"), str | None):
        return False
    return isinstance(operations, list) and "verify" in operations


def _is_of_usual_size(modulus: str, exponent: str) -> bool:
    """RSA below 2048 bits is forged by who can afford it; far above, or by a large exponent, checking it takes long."""
    bits = int.from_bytes(base64.urlsafe_b64decode(modulus + "==")).bit_length()
    return _RSA_BITS_MIN <= bits <= _RSA_BITS_MAX and len(exponent) <= _RSA_EXPONENT_CHARACTERS_MAX
