"""The approved configuration as one immutable, versioned value: the only thing the data plane knows of the registry.

Control builds it, the coordinator and the gateways hold it, nobody changes it. Every question that depends on who asks and on
what is approved (who is this, may they use that alias, what does it resolve to) is answered here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from weir import errors
from weir.core.metering import Price
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, Alias, Pool, Revision, WorkloadClass
from weir.core.tenancy import ApiKey, Application, Limits, Principal, Scope, Tenant, digest_of_key
from weir.core.windows import Zones


@dataclass(frozen=True, slots=True)
class Snapshot:
    """version: int, rises with every change. Applications are keyed by (tenant, name), keys by the SHA-256 of the secret.

    prices: the whole schedule, by (revision, version).
    """

    version: int = 0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    applications: Mapping[tuple[str, str], Application] = field(default_factory=dict)
    keys: Mapping[bytes, ApiKey] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    revisions: Mapping[str, Revision] = field(default_factory=dict)
    pools: Mapping[str, Pool] = field(default_factory=dict)
    limits: Mapping[Scope, Limits] = field(default_factory=dict)
    prices: Mapping[tuple[str, int], Price] = field(default_factory=dict)
    workload_classes: tuple[WorkloadClass, ...] = DEFAULT_WORKLOAD_CLASSES
    revoked_keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "revoked_keys", frozenset(key.id for key in self.keys.values() if key.revoked))
        for name in ("tenants", "applications", "keys", "aliases", "revisions", "pools", "limits", "prices"):
            content = getattr(self, name)
            if not isinstance(content, MappingProxyType):  # one of another snapshot's is shared: nobody can change it
                object.__setattr__(self, name, MappingProxyType(dict(content)))

    def authenticate(self, presented: str) -> Principal:
        """The caller behind a key. Raises Unauthenticated, Revoked, or Forbidden for a disabled tenant."""
        digest = digest_of_key(presented)
        key = self.keys.get(digest) if digest else None
        if key is None:
            raise errors.Unauthenticated("The API key is missing or unknown.")
        application = self.applications[key.tenant, key.application]
        principal = Principal(key.tenant, key.application, key.id, application.service_class)
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

    def resolve(self, principal: Principal, alias_name: str) -> tuple[Alias, Revision]:
        """What an alias means for this caller. Raises UnknownAlias, also for an alias that it may not use."""
        alias = self.aliases.get(alias_name)
        application = self.applications[principal.tenant, principal.application]
        if alias is None or not application.may_use(alias_name):
            raise errors.UnknownAlias("This application has no such model alias.")
        revision = self.revisions[alias.revision]
        if revision.revoked or (revision.external and not self.tenants[principal.tenant].external_allowed):
            raise errors.UnknownAlias("This application has no such model alias.")
        return alias, revision

    def aliases_for(self, principal: Principal) -> list[Alias]:
        """The aliases this caller may use, by name."""
        return [alias for name, alias in sorted(self.aliases.items()) if self._usable(principal, name)]

    def _usable(self, principal: Principal, alias_name: str) -> bool:
        try:
            self.resolve(principal, alias_name)
        except errors.UnknownAlias:
            return False
        return True

    def serving(self, pools: Collection[str]) -> "Snapshot":
        """The same where only these pools are kept: an alias that none of them serves is not offered."""
        kept = {name: pool for name, pool in self.pools.items() if name in pools}
        served = {pool.revision for pool in kept.values()}
        offered = {name: alias for name, alias in self.aliases.items() if alias.revision in served}
        return replace(self, pools=kept, aliases=offered)
