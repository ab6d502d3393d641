"""Makes new credentials: a public id, the text that is shown once, and the digest that is kept.

The only place besides the bootstrap where a secret exists in clear; it never stores or logs one.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from weir import errors
from weir.core.tenancy import KEY_ID_BYTES, KEY_SECRET_BYTES, digest_of_key, format_key
from weir.ports import Entropy

_DRAWS_MAX = 8
"""Two of a million keys share a 48-bit id with odds of one in 562; a few draws always find a free one."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential at its birth. secret: the whole key as its holder presents it."""

    id: str
    secret: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


def new_credential(entropy: Entropy, taken_ids: Collection[str]) -> Credential:
    """A fresh credential whose id is not taken. Raises InternalError if the entropy repeats itself."""
    for _ in range(_DRAWS_MAX):
        key_id = entropy.token(KEY_ID_BYTES).hex()
        if key_id not in taken_ids:
            return credential_of(format_key(key_id, entropy.token(KEY_SECRET_BYTES)))
    raise errors.InternalError("No free key id was found.")


def credential_of(secret: str) -> Credential:
    """A well-formed key's id and digest."""
    digest = digest_of_key(secret)
    assert digest is not None
    return Credential(secret.split("-")[1], secret, digest)
