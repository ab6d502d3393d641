"""Who may ask, and how much: tenants, applications, API keys, administrators, scopes and limits.

Tenant → application → API key. Identity is stamped from the credential and never accepted from a request. A key is 256 random
bits with a public id and a checksum; only its SHA-256 is kept. The checksum refuses a mistyped key without a look-up.
"""

import binascii
import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

import msgspec

from weir.core.windows import FormerZone, Zones
from weir.units import Bytes

KEY_SECRET_BYTES = 32
KEY_ID_BYTES = 6
TENANT_WEIGHT_MAX = 1_000
RETENTION_SECONDS_MAX = 7 * 86_400
RETENTION_BYTES_MIN: Bytes = 64 * 1024
RETENTION_BYTES_MAX: Bytes = 2**50
RESUME_GRACE_SECONDS = 60
RESUME_GRACE_SECONDS_MAX = 3_600
_KEY_PREFIX = "weir"
_KEY_LENGTH = len(_KEY_PREFIX) + 1 + 2 * KEY_ID_BYTES + 1 + 2 * KEY_SECRET_BYTES + 8


class ServiceClass(StrEnum):
    """Set by surface and application, never by the client."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Role(StrEnum):
    """Administrative roles, weakest first; each may do what those before it may, except that approving is its own right."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    RELEASER = "releaser"
    APPROVER = "approver"
    OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Retention:
    """How a tenant's streams are kept. seconds: 1 … RETENTION_SECONDS_MAX, after a stream's end.

    bytes: of all of them, as stored, RETENTION_BYTES_MIN … RETENTION_BYTES_MAX. resume_grace_seconds: 1 …
    RESUME_GRACE_SECONDS_MAX, for which a stream that nobody reads goes on.
    """

    seconds: int
    bytes: Bytes
    resume_grace_seconds: int = RESUME_GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Tenant:
    """An organisation that owns applications. time_zone: IANA name, used for budget windows; the former ones: those of late.

    weight: 1 … TENANT_WEIGHT_MAX; of a busy pool, tenants get service in proportion to theirs. It reserves nothing.
    leaves_its_pools: whether its work may also go to shared pools where it has dedicated ones. retention: as it was set; what
    counts is `keeps`. deleted: shown to nobody any more, and revoked; only its records and its name remain.
    """

    name: str
    time_zone: str = "UTC"
    disabled: bool = False
    revoked: bool = False
    external_allowed: bool = False
    former_time_zones: tuple[FormerZone, ...] = ()
    weight: int = 1
    leaves_its_pools: bool = False
    retention: Retention | None = None
    deleted: bool = False

    @property
    def keeps(self) -> Retention | None:
        """How its streams are kept; None keeps nothing, whatever was set before it was revoked."""
        return None if self.revoked else self.retention

    @property
    def zones(self) -> Zones:
        """What its budget windows follow."""
        return Zones(self.time_zone, self.former_time_zones)


@dataclass(frozen=True, slots=True)
class Application:
    """A tenant's program. aliases: the model aliases it may use, None for every one."""

    tenant: str
    name: str
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    aliases: frozenset[str] | None = None
    revoked: bool = False

    def may_use(self, alias: str) -> bool:
        """Whether this application is entitled to the alias."""
        return self.aliases is None or alias in self.aliases


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential of an application. secret_sha256: digest of the whole key as presented."""

    id: str
    tenant: str
    application: str
    secret_sha256: bytes
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class AdminKey:
    """A credential of an administrator. actor: the name that the audit trail shows."""

    id: str
    actor: str
    role: Role
    secret_sha256: bytes
    revoked: bool = False


class Principal(msgspec.Struct, frozen=True, gc=False):
    """An authenticated caller."""

    tenant: str
    application: str
    key: str
    service_class: ServiceClass


def format_key(key_id: str, secret: bytes) -> str:
    """The key as shown once. key_id: 12 hex digits; secret: 32 random bytes."""
    assert len(key_id) == 2 * KEY_ID_BYTES and len(secret) == KEY_SECRET_BYTES
    body = f"{_KEY_PREFIX}-{key_id}-{secret.hex()}"
    return f"{body}{binascii.crc32(body.encode()):08x}"


def digest_of_key(presented: str) -> bytes | None:
    """SHA-256 of a well-formed key; None if its form or checksum is wrong, so that it cannot be one of ours."""
    if len(presented) != _KEY_LENGTH or not presented.isascii():
        return None
    encoded = presented.encode()
    if f"{binascii.crc32(encoded[:-8]):08x}".encode() != encoded[-8:]:
        return None
    return hashlib.sha256(encoded).digest()


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Scope:
    """What a limit attaches to: a tenant, one of its applications, or one key of that, each also narrowed.

    alias: to one alias. service_class: to requests of one class, which is `batch` for lines of a batch, whoever sent it.
    """

    tenant: str
    application: str | None = None
    key: str | None = None
    alias: str | None = None
    service_class: ServiceClass | None = None

    @property
    def order(self) -> tuple[str, str, str, str, str]:
        """Where a catalog lists its limits."""
        return self.tenant, self.application or "", self.key or "", self.alias or "", self.service_class or ""

    def public(self) -> dict[str, str]:
        """The scope as refusals and the management API show it: only the fields that are set."""
        return {f.name: str(value) for f in fields(self) if (value := getattr(self, f.name)) is not None}


Scopes: TypeAlias = tuple[Scope, ...]


@lru_cache(maxsize=16_384)
def scopes_of(tenant: str, application: str, key: str, alias: str, service_class: ServiceClass) -> Scopes:
    """Every scope whose limits apply to a request, widest first: those of every class, then those of its own."""
    owners = ((None, None), (application, None), (application, key))
    return tuple(
        Scope(tenant, of_application, of_key, of_alias, of_class)
        for of_class in (None, service_class)
        for of_alias in (None, alias)
        for of_application, of_key in owners
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one scope. None: unlimited; 0: nothing allowed. Units are in the names (tokens, micro-dollars)."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    spend_microusd_per_day: int | None = None
    spend_microusd_per_month: int | None = None
    spend_microusd_lifetime: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    tokens_lifetime: int | None = None

    @property
    def is_empty(self) -> bool:
        """True when nothing is limited, so that the entry can be dropped."""
        return self == UNLIMITED


UNLIMITED = Limits()
LIMIT_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Limits))
