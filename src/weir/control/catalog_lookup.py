"""Questions about a loaded catalog: does this name exist, what does this scope mean, which limits match.

Pure reading, shared by the commands and the management API. A name that does not exist is NotFound, and says which. A tenant
that was deleted does not exist any more, nor does what it owned, except for those who ask what is on record.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from weir import errors
from weir.core.issuers import digest_of_rule_key, is_rule_key, may_be_rule_of
from weir.core.registry.key_ring import SigningKey
from weir.core.registry.model import Alias, Pool, Revision
from weir.core.registry.rollout_record import Rollout
from weir.core.tenancy import AdminKey, ApiKey, Application, Limits, Scope, Tenant
from weir.ports import Catalog

T = TypeVar("T")


def require_tenant(catalog: Catalog, name: str) -> Tenant:
    """The tenant of that name. Raises NotFound, also for one that was deleted."""
    matching = (tenant for tenant in catalog.tenants if tenant.name == name and not tenant.deleted)
    return _found(matching, f"There is no tenant {name!r}.")


def require_tenant_on_record(catalog: Catalog, name: str) -> Tenant:
    """The tenant of that name, also one that was deleted: its usage and its accounts stay. Raises NotFound."""
    return _found((tenant for tenant in catalog.tenants if tenant.name == name), f"There is no tenant {name!r}.")


def tenants_of(catalog: Catalog) -> list[Tenant]:
    """The tenants by name, also disabled and revoked ones, but none that was deleted."""
    return sorted((tenant for tenant in catalog.tenants if not tenant.deleted), key=lambda tenant: tenant.name)


def require_application(catalog: Catalog, tenant: str, name: str) -> Application:
    """A tenant's application. Raises NotFound for either."""
    require_tenant(catalog, tenant)
    matching = (entry for entry in catalog.applications if (entry.tenant, entry.name) == (tenant, name))
    return _found(matching, f"Tenant {tenant!r} has no application {name!r}.")


def require_key(catalog: Catalog, tenant: str, application: str, key_id: str) -> ApiKey:
    """An application's key. Raises NotFound for any of the three.

    The id of a sign-in rule is no row here until it is revoked: which rules there are is configuration of the gateways.
    """
    require_application(catalog, tenant, application)
    wanted = (tenant, application, key_id)
    matching = [key for key in catalog.keys if (key.tenant, key.application, key.id) == wanted]
    if not matching and may_be_rule_of(tenant, application, key_id):
        return ApiKey(key_id, tenant, application, digest_of_rule_key(key_id))
    return _found(matching, f"Application {application!r} of tenant {tenant!r} has no key {key_id!r}.")


def require_admin_key(catalog: Catalog, key_id: str) -> AdminKey:
    """The admin key of that id. Raises NotFound."""
    return _found((key for key in catalog.admin_keys if key.id == key_id), f"There is no admin key {key_id!r}.")


def require_revision(catalog: Catalog, revision_id: str) -> Revision:
    """The revision of this id. Raises NotFound."""
    return _found((entry for entry in catalog.revisions if entry.id == revision_id), f"There is no revision {revision_id!r}.")


def require_alias(catalog: Catalog, tenant: str | None, name: str) -> Alias:
    """The alias of this name that belongs to a tenant, None for a shared one. Raises NotFound."""
    owner = "" if tenant is None else f" of tenant {tenant!r}"
    matching = (alias for alias in catalog.aliases if (alias.tenant, alias.name) == (tenant, name))
    return _found(matching, f"There is no alias {name!r}{owner}.")


def require_pool(catalog: Catalog, name: str) -> Pool:
    """The pool of this name. Raises NotFound."""
    return _found((pool for pool in catalog.pools if pool.name == name), f"There is no pool {name!r}.")


def require_signing_key(catalog: Catalog, name: str) -> SigningKey:
    """The trusted key of this name. Raises NotFound."""
    return _found((key for key in catalog.signing_keys if key.name == name), f"There is no signing key {name!r}.")


def require_rollout(catalog: Catalog, rollout_id: str) -> Rollout:
    """The rollout of this id. Raises NotFound."""
    return _found((each for each in catalog.rollouts if each.id == rollout_id), f"There is no rollout {rollout_id!r}.")


def applications_of(catalog: Catalog, tenant: str) -> list[Application]:
    """A tenant's applications by name. Raises NotFound."""
    require_tenant(catalog, tenant)
    return sorted((entry for entry in catalog.applications if entry.tenant == tenant), key=lambda entry: entry.name)


def keys_of(catalog: Catalog, tenant: str, application: str) -> list[ApiKey]:
    """An application's keys by id. Raises NotFound."""
    require_application(catalog, tenant, application)
    owned = (key for key in catalog.keys if (key.tenant, key.application) == (tenant, application))
    return sorted(owned, key=lambda key: key.id)


def resolve_scope(catalog: Catalog, scope: Scope) -> Scope:
    """The scope as admission looks it up: a key's scope names its application too. Raises NotFound for a missing part."""
    require_tenant(catalog, scope.tenant)
    application = scope.application
    if scope.key is not None and is_rule_key(scope.key):
        if application is None:
            members = {"field": "application", "accepted": "the application of the key's rule"}
            raise errors.InvalidRequest("application must be named with the key of a sign-in rule.", members=members)
        require_key(catalog, scope.tenant, application, scope.key)
    elif scope.key is not None:
        owned = (key for key in catalog.keys if key.tenant == scope.tenant and key.id == scope.key)
        key = _found(owned, f"Tenant {scope.tenant!r} has no key {scope.key!r}.")
        application = application or key.application
        require_key(catalog, scope.tenant, application, key.id)
    elif application is not None:
        require_application(catalog, scope.tenant, application)
    if scope.alias is not None and not _names_alias(catalog, scope.tenant, scope.alias):
        raise errors.NotFound(f"There is no alias {scope.alias!r}.")
    return replace(scope, application=application)


def _names_alias(catalog: Catalog, tenant: str, name: str) -> bool:
    """Whether the name is a shared alias, or the tenant's own."""
    return any(alias.name == name and alias.tenant in (None, tenant) for alias in catalog.aliases)


def limits_of(catalog: Catalog, scope: Scope) -> Limits:
    """The limits set for exactly this scope; empty if there are none."""
    return next((limits for entry, limits in catalog.limits if entry == scope), Limits())


def limits_matching(catalog: Catalog, parts: dict[str, str]) -> list[tuple[Scope, Limits]]:
    """Entries whose scope has these parts (tenant, application, key, alias, service_class), widest first within a tenant.

    None of a tenant that was deleted.
    """
    deleted = {tenant.name for tenant in catalog.tenants if tenant.deleted}
    entries = (entry for entry in catalog.limits if entry[0].tenant not in deleted)
    matching = [(scope, limits) for scope, limits in entries if parts.items() <= scope.public().items()]
    return sorted(matching, key=lambda entry: entry[0].order)


def _found(matching: Iterable[T], otherwise: str) -> T:
    for found in matching:
        return found
    raise errors.NotFound(otherwise)
