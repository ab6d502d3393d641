"""The first start: a demonstration catalog on an empty store, and the models that this start declares on any store.

The keys are drafted before anything is stored, so that their owner can write them to a private file first; a crash in between
leaves an empty store and a draft that the next start uses. On a store that has tenants or administrators nothing but
the declared revisions, aliases and pools is touched, and of those nothing that administrators made or promoted. What is
declared is registered by the actor `bootstrap` and approved by `bootstrap-approver`, on record as two acts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from weir.control.commands import Commands
from weir.control.credentials import Credential, credential_of, new_credential
from weir.control.declared_models import (
    ACTOR,
    APPROVER,
    DeclaredModels,
    approved_models,
    changed_models,
    summary_of_models,
)
from weir.core.metering import Price
from weir.core.registry.key_ring import SigningKey
from weir.core.tenancy import AdminKey, ApiKey, Application, Limits, Role, Scope, ServiceClass, Tenant
from weir.ports import AuditEntry, Catalog, CatalogChange, Entropy

ADMIN = "admin"
DEMO_PRICE = Price(1, input_microusd=200_000, cached_input_microusd=50_000, output_microusd=600_000)
DEMO_TENANTS = ("acme", "globex")
DEMO_APPLICATIONS = {"assistant": ServiceClass.INTERACTIVE, "batch-jobs": ServiceClass.BATCH}
DEMO_LIMITS = Limits(
    requests_per_minute=60_000,
    tokens_per_minute=100_000_000,
    concurrency=2_000,
    spend_microusd_lifetime=10_000_000_000,
)
"""Far above what one machine serves, so that a first try never meets one, yet set, so that there is something to look at."""


class ApplicationSecret(TypedDict):
    """An application's key in clear; None once it was revoked."""

    name: str
    key: str | None


class TenantSecrets(TypedDict):
    """A tenant's applications with their keys."""

    name: str
    applications: list[ApplicationSecret]


class BootstrapSecrets(TypedDict):
    """The demonstration's secrets in the form that the ready file shows."""

    admin_key: str | None
    tenants: list[TenantSecrets]


def draft_keys(entropy: Entropy) -> dict[str, str]:
    """Fresh keys for the demonstration catalog, by name: `admin`, and `tenant/application`. Nothing is stored."""
    names = [ADMIN, *(f"{tenant}/{application}" for tenant in DEMO_TENANTS for application in DEMO_APPLICATIONS)]
    drafted: list[Credential] = []
    for _ in names:
        drafted.append(new_credential(entropy, [credential.id for credential in drafted]))
    return {name: credential.secret for name, credential in zip(names, drafted, strict=True)}


async def bootstrap(
    commands: Commands, models: DeclaredModels, drafted: Mapping[str, str], signing_key: SigningKey | None = None
) -> bool:
    """Make the demonstration catalog with the drafted keys if the store is empty; register and approve the models in any case.

    signing_key: what signed the models' artifacts, trusted if they have any. Returns whether the catalog was made now.
    Idempotent. Raises InvalidRequest for models that name an unknown revision.
    """

    def register(catalog: Catalog) -> tuple[bool, CatalogChange | None]:
        revisions = changed_models(catalog, models).revisions
        keys = _missing_keys(catalog, models, signing_key)
        summary = {"revisions": [revision.id for revision in revisions], "signing_keys": [key.name for key in keys]}
        if not catalog.tenants and not catalog.admin_keys:
            entry = commands.audit_entry(ACTOR, "bootstrap", "demo", summary)
            return True, replace(demo_change(entry, drafted), revisions=revisions, signing_keys=keys)
        entry = commands.audit_entry(ACTOR, "models.register", "models", summary)
        return False, CatalogChange(entry, revisions=revisions, signing_keys=keys) if revisions or keys else None

    def approve(catalog: Catalog) -> tuple[None, CatalogChange | None]:
        changed, approved = changed_models(catalog, models), approved_models(catalog, models)
        if not approved and changed.is_empty:
            return None, None
        entry = commands.audit_entry(
            APPROVER, "models.approve", "models", summary_of_models(replace(changed, revisions=approved))
        )
        return None, CatalogChange(entry, revisions=approved, aliases=changed.aliases, pools=changed.pools)

    made, _ = await commands.commit(register)
    await commands.commit(approve)
    return made


def _missing_keys(catalog: Catalog, models: DeclaredModels, key: SigningKey | None) -> list[SigningKey]:
    """The key of a start's own artifacts, unless the key ring has it or there are none."""
    is_needed = any(revision.artifact_digest is not None for revision in models.revisions)
    known = {each.public_key for each in catalog.signing_keys}
    return [key] if key is not None and is_needed and key.public_key not in known else []


def demo_change(entry: AuditEntry, drafted: Mapping[str, str]) -> CatalogChange:
    """The demonstration catalog as one change: tenants, applications, keys, limits and the owner's admin key."""
    applications = [Application(tenant, *demo) for tenant in DEMO_TENANTS for demo in DEMO_APPLICATIONS.items()]
    keys: list[ApiKey] = []
    for application in applications:
        credential = credential_of(drafted[f"{application.tenant}/{application.name}"])
        keys.append(ApiKey(credential.id, application.tenant, application.name, credential.secret_sha256))
    owner = credential_of(drafted[ADMIN])
    return CatalogChange(
        entry,
        tenants=[Tenant(name) for name in DEMO_TENANTS],
        applications=applications,
        keys=keys,
        admin_keys=[AdminKey(owner.id, "owner", Role.OWNER, owner.secret_sha256)],
        limits=[(Scope(name), DEMO_LIMITS) for name in DEMO_TENANTS],
    )


def shown_secrets(catalog: Catalog, kept: Mapping[str, str]) -> BootstrapSecrets:
    """The kept keys as the ready file shows them: one that is revoked, lost or unknown to the catalog is None."""
    tenants = {tenant.name for tenant in catalog.tenants if not tenant.revoked}
    applications = {
        (entry.tenant, entry.name) for entry in catalog.applications if entry.tenant in tenants and not entry.revoked
    }
    live = {key.secret_sha256 for key in catalog.admin_keys if not key.revoked}
    live |= {key.secret_sha256 for key in catalog.keys if not key.revoked and (key.tenant, key.application) in applications}

    def shown(name: str) -> str | None:
        secret = kept.get(name)
        return secret if secret is not None and credential_of(secret).secret_sha256 in live else None

    return {
        "admin_key": shown(ADMIN),
        "tenants": [
            {
                "name": tenant,
                "applications": [{"name": name, "key": shown(f"{tenant}/{name}")} for name in DEMO_APPLICATIONS],
            }
            for tenant in DEMO_TENANTS
        ],
    }
