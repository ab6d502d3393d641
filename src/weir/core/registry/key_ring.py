"""Whose signature an artifact may be loaded on: the keys that are trusted, each for what it was added for.

Pure, and without the arithmetic, which is in `signatures`. The format has no trusted time of signing, so a key must be good
when it is asked: what is checked again as it is loaded needs one that is good then. A key vouches for models or adapters, of
all tenants or of one.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from weir.core.registry.signed_manifest import SignatureFlaw, signature_refused
from weir.units import Millis


class KeyRole(StrEnum):
    """What a key may vouch for."""

    MODEL = "model"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A trusted key. public_key: PEM as `read_public_key` gives it; a ring has each only once.

    tenant: whose artifacts it vouches for; None: any tenant's and shared ones. not_before_ms, not_after_ms: its first and last
    moment, by the wall clock; None: no end.
    """

    name: str
    public_key: str
    roles: frozenset[KeyRole]
    tenant: str | None
    not_before_ms: Millis
    not_after_ms: Millis | None = None
    revoked: bool = False

    @property
    def fingerprint(self) -> str:
        """What a signature calls its key by."""
        return fingerprint_of(self.public_key)


def fingerprint_of(public_key: str) -> str:
    """The format's hint of a key: the hex SHA-256 of its PEM as `read_public_key` gives it."""
    return hashlib.sha256(public_key.encode()).hexdigest()


def check_trust(key: SigningKey, role: KeyRole, tenant: str | None, now_ms: Millis) -> None:
    """Raises SignatureRefused, with the reason, unless a key vouches now for a tenant's artifact in a role.

    tenant: whose the artifact is; None: shared.
    """
    if key.revoked:
        raise signature_refused(SignatureFlaw.REVOKED_KEY, f"The signing key {key.name} was revoked.")
    if role not in key.roles:
        detail = f"The signing key {key.name} has the roles {', '.join(sorted(key.roles)) or '(none)'}, not {role.value}."
        raise signature_refused(SignatureFlaw.WRONG_ROLE, detail)
    if key.tenant is not None and key.tenant != tenant:
        detail = f"The signing key {key.name} vouches only for artifacts of the tenant it belongs to."
        raise signature_refused(SignatureFlaw.OTHER_TENANT, detail)
    if now_ms < key.not_before_ms:
        raise signature_refused(SignatureFlaw.NOT_YET_VALID, f"The signing key {key.name} is not valid yet.")
    if key.not_after_ms is not None and now_ms > key.not_after_ms:
        raise signature_refused(SignatureFlaw.EXPIRED, f"The signing key {key.name} has expired.")
