"""The approved configuration as one immutable, versioned value: the only thing the data plane knows of the registry.

Control builds it, the coordinator and the gateways hold it, nobody changes it. Every question that depends on who asks and on
what is approved (who is this, may they use that alias, what does it resolve to) is answered here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from weir import errors
from weir.core.metering import Price
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, Alias, Canary, Pool, Revision, WorkloadClass, within_reach
from weir.core.registry.split import takes_canary
from weir.core.tenancy import ApiKey, Application, Limits, Principal, Scope, Tenant, digest_of_key
from weir.core.windows import Zones

Key = TypeVar("Key")

_TABLES = ("tenants", "applications", "keys", "aliases", "tenant_aliases", "revisions", "pools", "limits", "prices")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """version: int, rises with every change. Applications are keyed by (tenant, name), keys by the SHA-256 of the secret.

    aliases: the shared ones by name; tenant_aliases: those that belong to one, by (tenant, name). prices: the whole schedule,
    by (revision, version). moving: revisions that a rollout moves from or to, whose replicas stay; only control is told.
    """

    version: int = 0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    applications: Mapping[tuple[str, str], Application] = field(default_factory=dict)
    keys: Mapping[bytes, ApiKey] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    tenant_aliases: Mapping[tuple[str, str], Alias] = field(default_factory=dict)
    revisions: Mapping[str, Revision] = field(default_factory=dict)
    pools: Mapping[str, Pool] = field(default_factory=dict)
    limits: Mapping[Scope, Limits] = field(default_factory=dict)
    prices: Mapping[tuple[str, int], Price] = field(default_factory=dict)
    workload_classes: tuple[WorkloadClass, ...] = DEFAULT_WORKLOAD_CLASSES
    moving: frozenset[str] = frozenset()
    revoked_keys: frozenset[str] = field(init=False)
    pools_of: Mapping[str, tuple[Pool, ...]] = field(init=False, compare=False)  # by revision

    def __post_init__(self) -> None:
        by_revision: dict[str, tuple[Pool, ...]] = {}
        for pool in self.pools.values():
            by_revision[pool.revision] = (*by_revision.get(pool.revision, ()), pool)
        object.__setattr__(self, "pools_of", MappingProxyType(by_revision))
        object.__setattr__(self, "revoked_keys", frozenset(key.id for key in self.keys.values() if key.revoked))
        for name in _TABLES:
            content = getattr(self, name)
            if not isinstance(content, MappingProxyType):  # one of another snapshot's is shared: nobody can change it
                object.__setattr__(self, name, MappingProxyType(dict(content)))

    def authenticate(self, presented: str) -> Principal:
        """The caller behind a key. Raises Unauthenticated, Revoked, or Forbidden for a disabled tenant."""
        digest = digest_of_key(presented)
        key = self.keys.get(digest) if digest else None
        if key is None:
            raise errors.Unauthenticated("The API key is missing or unknown.")
        principal = self.principal_of(key.tenant, key.application, key.id)
        assert principal is not None
        return principal

    def principal_of(self, tenant: str, application: str, key: str) -> Principal | None:
        """The caller whom a credential of this id stands for; None where there is no such application.

        Raises Revoked, or Forbidden for a disabled tenant.
        """
        known = self.applications.get((tenant, application))
        if known is None:
            return None
        principal = Principal(tenant, application, key, known.service_class)
        self.check_standing(principal)
        return principal

    def check_standing(self, principal: Principal) -> None:
        """Raises Revoked or Forbidden when the tenant, the application or the key may not start new work."""
        if self.is_revoked(principal.tenant, principal.application, principal.key):
            raise errors.Revoked("This credential was revoked.")
        if self.tenants[principal.tenant].disabled:
            raise errors.Forbidden("This tenant is disabled.")

    def is_revoked(self, tenant: str, application: str, key: str) -> bool:
        """Whether running work of this identity must be cancelled."""
        return key in self.revoked_keys or self.applications[tenant, application].revoked or self.tenants[tenant].revoked

    def zones(self) -> dict[str, Zones]:
        """The time zones of each tenant's budget windows."""
        return {name: tenant.zones for name, tenant in self.tenants.items()}

    def workload_class(self, name: str) -> WorkloadClass:
        """The row of a class. Raises StopIteration where there is none."""
        return next(row for row in self.workload_classes if row.name == name)

    def price_of(self, revision: str, version: int) -> Price:
        """A version of a revision's price schedule; what a hold pinned is never removed. Raises KeyError."""
        return self.prices[revision, version]

    def resolve(self, principal: Principal, alias_name: str, caller: str | None = None) -> tuple[Alias, Revision]:
        """What an alias means for this caller. Raises UnknownAlias, also for an alias that it may not use.

        caller: its session, else its request id, by which it gets the canary's revision or the stable one; None: the latter.
        """
        alias = self.usable_alias(principal, alias_name)
        canary = alias.canary
        if canary is not None and caller is not None and self._takes_canary(principal, canary, caller):
            return alias, self.revisions[canary.revision]
        if not self.is_entitled(principal, alias.revision):
            raise errors.UnknownAlias("This application has no such model alias.")
        return alias, self.revisions[alias.revision]

    def alias_named(self, tenant: str, name: str) -> Alias | None:
        """What a name stands for within a tenant, whoever of it may use that: its own alias, else a shared one."""
        return self.tenant_aliases.get((tenant, name)) or self.aliases.get(name)

    def usable_alias(self, principal: Principal, name: str) -> Alias:
        """The alias that a caller may use by this name, whatever it leads to. Raises UnknownAlias."""
        alias = self.alias_named(principal.tenant, name)
        if alias is None or not self.applications[principal.tenant, principal.application].may_use(name):
            raise errors.UnknownAlias("This application has no such model alias.")
        return alias

    def is_entitled(self, principal: Principal, revision_id: str) -> bool:
        """Whether new work of this caller may reach a revision: it serves, is nobody else's, and is not out of bounds."""
        revision = self.revisions.get(revision_id)
        if revision is None or not revision.serves or revision.tenant not in (None, principal.tenant):
            return False
        return not revision.external or self.tenants[principal.tenant].external_allowed

    def _takes_canary(self, principal: Principal, canary: Canary, caller: str) -> bool:
        """Whether this caller is of the canary's share; where that has no pool for it, it stays with the stable revision."""
        tenant = self.tenants[principal.tenant]
        if not takes_canary(canary.rollout, canary.weight, tenant.name, caller):
            return False
        reached = within_reach(self.pools_of.get(canary.revision, ()), tenant.name, tenant.leaves_its_pools)
        is_reached = any(principal.service_class in pool.service_classes for pool in reached)
        return is_reached and self.is_entitled(principal, canary.revision)

    def aliases_for(self, principal: Principal) -> list[Alias]:
        """The aliases this caller may use, by name."""
        own = {name: alias for (tenant, name), alias in self.tenant_aliases.items() if tenant == principal.tenant}
        return [alias for name, alias in sorted({**self.aliases, **own}.items()) if self._usable(principal, name)]

    def _usable(self, principal: Principal, alias_name: str) -> bool:
        try:
            self.resolve(principal, alias_name)
        except errors.UnknownAlias:
            return False
        return True

    def serving(self, pools: Collection[str]) -> "Snapshot":
        """The same where only these pools are kept: an alias that none of them serves is not offered, nor such a canary."""
        kept = {name: pool for name, pool in self.pools.items() if name in pools}
        served = {pool.revision for pool in kept.values()}
        return replace(
            self, pools=kept, aliases=_offered(self.aliases, served), tenant_aliases=_offered(self.tenant_aliases, served)
        )


def _offered(aliases: Mapping[Key, Alias], served: Collection[str]) -> dict[Key, Alias]:
    """The aliases that lead to what is served, each without a canary that is not."""
    offered = {}
    for key, alias in aliases.items():
        canary = alias.canary if alias.canary is not None and alias.canary.revision in served else None
        if alias.revision in served or canary is not None:
            offered[key] = alias if canary == alias.canary else replace(alias, canary=canary)
    return offered
