"""Every administrative change as one method: validate, change the catalog with its audit entry, publish the new snapshot.

A command answers (result, acknowledgement) once the parts of the cell acknowledged the version, or after the publisher's bound.
Commands run one after another; a change by another process is seen as a version conflict and planned again on what is there.
A change that changes nothing writes nothing and publishes what is in force. What was stored and not published, because its
answer was lost, a refresh publishes. Names are never given twice, also after a revocation, so that records keep their meaning.
This module never sees a request, a token, or a stored secret in clear.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from weir import errors
from weir.control.catalog_changes import changed_catalog
from weir.control.catalog_lookup import (
    limits_of,
    require_admin_key,
    require_application,
    require_key,
    require_revision,
    require_tenant,
    resolve_scope,
)
from weir.control.credentials import new_credential
from weir.control.snapshots import build_snapshot
from weir.control.validation import (
    check_actor,
    check_batch_percent,
    check_name,
    check_prices,
    check_time_zone,
    check_weight,
    checked_aliases,
    checked_limits,
    checked_retention,
)
from weir.core.metering import Price
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import (
    AdminKey,
    ApiKey,
    Application,
    Limits,
    Retention,
    Role,
    Scope,
    ServiceClass,
    Tenant,
)
from weir.core.windows import FormerZone
from weir.ports import (
    Acknowledgement,
    AuditEntry,
    Catalog,
    CatalogChange,
    Clock,
    ControlStore,
    Entropy,
    PublishSnapshot,
)
from weir.units import Millis

T = TypeVar("T")
Plan: TypeAlias = Callable[[Catalog], tuple[T, CatalogChange | None]]
Outcome: TypeAlias = tuple[T, Acknowledgement]

_TERMS = ("time_zone", "external_allowed", "weight", "leaves_its_pools", "retention")
"""What is chosen for a tenant at its creation."""
_ZONES_MAX = 16
_ZONE_KEPT_MS: Millis = 40 * 86_400_000
"""A month's budget window, and a time zone's lag."""
_APPLY_ATTEMPTS_MAX = 5
"""A conflict needs another administrator's change within the milliseconds of ours; five in a row are a fault elsewhere."""


async def _as_it_is(acknowledged: Acknowledgement) -> Acknowledgement:
    return acknowledged


class TenantTerms(TypedDict, total=False):
    """What may be chosen for a tenant; None is the same as absent, except that a retention of None keeps nothing.

    retention: an object with the fields of RETENTION_RANGES, in place of the one before.
    """

    external_allowed: bool | None
    weight: int | None
    leaves_its_pools: bool | None
    retention: Mapping[str, object] | None


class TenantChanges(TenantTerms, total=False):
    """Fields of a tenant to change; absent ones stay."""

    disabled: bool | None
    time_zone: str | None


class Commands:
    """The administrative commands of a cell. `actor` is the name that the audit trail shows.

    Every command raises LedgerUnavailable when the store does not answer, and AlreadyExists when others keep changing the
    catalog under it.
    """

    def __init__(self, store: ControlStore, publish: PublishSnapshot, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._publish = publish
        self._clock = clock
        self._entropy = entropy
        self._turn = asyncio.Lock()
        self.confirm: Callable[[Acknowledgement], Awaitable[Acknowledgement]] = _as_it_is
        """Waits, within a bound, until the parts of the cell work by what was published."""
        self._catalog: Catalog | None = None  # as it was read last, with our changes since
        self.published = Snapshot()
        """The last that was published; the parts of the cell have it, or are getting it."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def catalog(self) -> Catalog:
        """Everything approved, in one consistent read."""
        return await self._current()

    async def audit_trail(self, limit: int, before_ms: Millis | None = None, subject: str | None = None) -> list[AuditEntry]:
        """The newest audit entries, newest first; only those before a time, and of a subject, where these are given."""
        return await self._store.audit(limit, before_ms, subject)

    # ── tenants ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_tenant(
        self, actor: str, name: str, time_zone: str = "UTC", **wanted: Unpack[TenantTerms]
    ) -> Outcome[Tenant]:
        """A new tenant. Raises InvalidRequest for the name, the time zone or a term, AlreadyExists, also after a deletion."""
        check_name("name", name)
        tenant = Tenant(name, **_checked_terms({"time_zone": time_zone, **wanted}))
        chosen = {term: _told(getattr(tenant, term)) for term in _TERMS}
        entry = self.audit_entry(actor, "tenant.create", name, chosen)

        def plan(catalog: Catalog) -> tuple[Tenant, CatalogChange]:
            if any(known.name == name for known in catalog.tenants):
                raise errors.AlreadyExists(f"There is a tenant {name!r} already.")
            return tenant, CatalogChange(entry, tenants=(tenant,))

        return await self.commit(plan)

    async def patch_tenant(self, actor: str, name: str, **wanted: Unpack[TenantChanges]) -> Outcome[Tenant]:
        """Change what is given; None stays, but ends a retention. A time zone takes effect at the tenant's next budget windows.

        The audit trail shows each changed field as [before, after].
        Raises InvalidRequest for a term, the time zone, or too many of them within a month, NotFound, Revoked.
        """
        changes = _checked_terms(wanted)

        def plan(catalog: Catalog) -> tuple[Tenant, CatalogChange | None]:
            tenant = _unrevoked_tenant(catalog, name)
            changed = replace(tenant, **changes, former_time_zones=self._former_zones(tenant, changes.get("time_zone")))
            entry = self.audit_entry(actor, "tenant.patch", name, _changed(tenant, changes))
            return changed, None if changed == tenant else CatalogChange(entry, tenants=(changed,))

        return await self.commit(plan)

    def _former_zones(self, tenant: Tenant, time_zone: str | None) -> tuple[FormerZone, ...]:
        """The tenant's former time zones once it has this one: those that a present budget window may still follow."""
        if time_zone in (None, tenant.time_zone):
            return tenant.former_time_zones
        now_ms = self._clock.wall_ms()
        recent = [former for former in tenant.former_time_zones if former.until_ms > now_ms - _ZONE_KEPT_MS]
        if len(recent) >= _ZONES_MAX:
            members = {"field": "time_zone", "accepted": f"{_ZONES_MAX} changes within {_ZONE_KEPT_MS // 86_400_000} days"}
            raise errors.InvalidRequest("time_zone was changed too often.", members=members)
        return (*recent, FormerZone(tenant.time_zone, now_ms))

    async def revoke_tenant(self, actor: str, name: str) -> Outcome[Tenant]:
        """End a tenant for good: its running work is cancelled. Idempotent. Raises NotFound."""
        entry = self.audit_entry(actor, "tenant.revoke", name, {})

        def plan(catalog: Catalog) -> tuple[Tenant, CatalogChange | None]:
            tenant = require_tenant(catalog, name)
            revoked = replace(tenant, revoked=True)
            return revoked, None if tenant.revoked else CatalogChange(entry, tenants=(revoked,))

        return await self.commit(plan)

    async def delete_tenant(self, actor: str, name: str) -> Outcome[Tenant]:
        """End a tenant for good and show it no more. Raises NotFound, also once it is deleted.

        Its row stays: its keys are refused as revoked, running work is cancelled and settled in its time zone, records keep
        their name, and nobody gets it again.
        """

        def plan(catalog: Catalog) -> tuple[Tenant, CatalogChange]:
            tenant = require_tenant(catalog, name)
            ended = _changed(tenant, {"revoked": True, "retention": None})
            deleted = replace(tenant, revoked=True, retention=None, deleted=True)
            return deleted, CatalogChange(self.audit_entry(actor, "tenant.delete", name, ended), tenants=(deleted,))

        return await self.commit(plan)

    # ── applications ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_application(
        self,
        actor: str,
        tenant: str,
        name: str,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        aliases: Sequence[str] | None = None,
    ) -> Outcome[Application]:
        """A new application. aliases: those it may use, also ones to come; None for every one.

        Raises InvalidRequest for a name, NotFound or Revoked for the tenant, AlreadyExists.
        """
        check_name("name", name)
        application = Application(tenant, name, service_class, checked_aliases(aliases))
        summary = {"service_class": service_class.value, "aliases": _sorted_or_none(application.aliases)}
        entry = self.audit_entry(actor, "application.create", f"{tenant}/{name}", summary)

        def plan(catalog: Catalog) -> tuple[Application, CatalogChange]:
            _unrevoked_tenant(catalog, tenant)
            if any((known.tenant, known.name) == (tenant, name) for known in catalog.applications):
                raise errors.AlreadyExists(f"Tenant {tenant!r} has an application {name!r} already.")
            return application, CatalogChange(entry, applications=(application,))

        return await self.commit(plan)

    async def patch_application(
        self, actor: str, tenant: str, name: str, aliases: Sequence[str] | None
    ) -> Outcome[Application]:
        """Set the aliases that an application may use; None for every one. Raises InvalidRequest, NotFound, Revoked."""
        allowed = checked_aliases(aliases)
        entry = self.audit_entry(actor, "application.patch", f"{tenant}/{name}", {"aliases": _sorted_or_none(allowed)})

        def plan(catalog: Catalog) -> tuple[Application, CatalogChange | None]:
            application = _unrevoked_application(catalog, tenant, name)
            changed = replace(application, aliases=allowed)
            return changed, None if changed == application else CatalogChange(entry, applications=(changed,))

        return await self.commit(plan)

    async def revoke_application(self, actor: str, tenant: str, name: str) -> Outcome[Application]:
        """End an application for good: its running work is cancelled. Idempotent. Raises NotFound."""
        entry = self.audit_entry(actor, "application.revoke", f"{tenant}/{name}", {})

        def plan(catalog: Catalog) -> tuple[Application, CatalogChange | None]:
            application = require_application(catalog, tenant, name)
            revoked = replace(application, revoked=True)
            return revoked, None if application.revoked else CatalogChange(entry, applications=(revoked,))

        return await self.commit(plan)

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_key(self, actor: str, tenant: str, application: str) -> Outcome[tuple[ApiKey, str]]:
        """A new API key and its secret, which is shown this once. Raises NotFound, Revoked."""

        def plan(catalog: Catalog) -> tuple[tuple[ApiKey, str], CatalogChange]:
            _unrevoked_application(catalog, tenant, application)
            fresh = new_credential(self._entropy, {key.id for key in catalog.keys})
            key = ApiKey(fresh.id, tenant, application, fresh.secret_sha256)
            entry = self.audit_entry(actor, "key.create", f"{tenant}/{application}/{key.id}", {})
            return (key, fresh.secret), CatalogChange(entry, keys=(key,))

        return await self.commit(plan)

    async def revoke_key(self, actor: str, tenant: str, application: str, key_id: str) -> Outcome[ApiKey]:
        """End a key for good: its running work is cancelled. Idempotent. Raises NotFound."""
        entry = self.audit_entry(actor, "key.revoke", f"{tenant}/{application}/{key_id}", {})

        def plan(catalog: Catalog) -> tuple[ApiKey, CatalogChange | None]:
            key = require_key(catalog, tenant, application, key_id)
            revoked = replace(key, revoked=True)
            return revoked, None if key.revoked else CatalogChange(entry, keys=(revoked,))

        return await self.commit(plan)

    async def create_admin_key(self, actor: str, name: str, role: Role) -> Outcome[tuple[AdminKey, str]]:
        """A new admin key for the actor `name`, and its secret, shown this once. Raises InvalidRequest for the name."""
        check_actor(name)

        def plan(catalog: Catalog) -> tuple[tuple[AdminKey, str], CatalogChange]:
            fresh = new_credential(self._entropy, {key.id for key in catalog.admin_keys})
            key = AdminKey(fresh.id, name, role, fresh.secret_sha256)
            entry = self.audit_entry(actor, "admin_key.create", key.id, {"actor": name, "role": role.value})
            return (key, fresh.secret), CatalogChange(entry, admin_keys=(key,))

        return await self.commit(plan)

    async def revoke_admin_key(self, actor: str, key_id: str) -> Outcome[AdminKey]:
        """End an admin key. Idempotent. Raises NotFound, and Forbidden for the last owner's key."""
        entry = self.audit_entry(actor, "admin_key.revoke", key_id, {})

        def plan(catalog: Catalog) -> tuple[AdminKey, CatalogChange | None]:
            key = require_admin_key(catalog, key_id)
            owners = [known.id for known in catalog.admin_keys if known.role is Role.OWNER and not known.revoked]
            if owners == [key_id]:
                raise errors.Forbidden("The last owner's key cannot be revoked: nobody could administer the cell.")
            revoked = replace(key, revoked=True)
            return revoked, None if key.revoked else CatalogChange(entry, admin_keys=(revoked,))

        return await self.commit(plan)

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put_limits(self, actor: str, scope: Scope, changes: Mapping[str, object]) -> Outcome[tuple[Scope, Limits]]:
        """Merge into a scope's limits: absent names stay, None removes, an int 0 … 2**63 − 1 sets. Answers the entry.

        The audit trail shows each changed limit as [before, after].
        Raises InvalidRequest for an unknown name or a value, NotFound.
        """
        accepted = checked_limits(changes)

        def plan(catalog: Catalog) -> tuple[tuple[Scope, Limits], CatalogChange | None]:
            resolved = resolve_scope(catalog, scope)
            before = limits_of(catalog, resolved)
            after = replace(before, **accepted)
            subject = "/".join(f"{part}={name}" for part, name in resolved.public().items())
            changed = _changed(before, accepted)
            entry = self.audit_entry(actor, "limits.put", subject, changed)
            return (resolved, after), CatalogChange(entry, limits=((resolved, after),)) if changed else None

        return await self.commit(plan)

    # ── prices ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def set_price(
        self,
        actor: str,
        revision: str,
        *,
        input_microusd: int,
        cached_input_microusd: int,
        output_microusd: int,
        batch_percent: int | None = None,
    ) -> Outcome[Price]:
        """A new version of a revision's price schedule, micro-dollars per million tokens; holds taken before keep theirs.

        batch_percent: what part of it batch requests pay; None: the part that they pay now.
        Raises InvalidRequest for an amount or a part, NotFound, Revoked.
        """
        amounts = {
            "input_microusd": input_microusd,
            "cached_input_microusd": cached_input_microusd,
            "output_microusd": output_microusd,
        }
        check_prices(amounts)
        if batch_percent is not None:
            check_batch_percent(batch_percent)

        def plan(catalog: Catalog) -> tuple[Price, CatalogChange | None]:
            known = require_revision(catalog, revision)
            if known.revoked:
                raise errors.Revoked(f"Revision {revision!r} was revoked.")
            percent = known.price.batch_percent if batch_percent is None else batch_percent
            price = Price(known.price.version + 1, **amounts, batch_percent=percent)
            if replace(price, version=known.price.version) == known.price:
                return known.price, None
            entry = self.audit_entry(actor, "price.set", revision, asdict(price))
            return price, CatalogChange(entry, revisions=(replace(known, price=price),))

        return await self.commit(plan)

    # ── the way of every change ──────────────────────────────────────────────────────────────────────────────────────

    async def commit(self, plan: Plan[T]) -> Outcome[T]:
        """Load, plan, apply at the version that was read, publish. plan: pure, may be asked again; None changes nothing."""
        async with self._turn:
            for _ in range(_APPLY_ATTEMPTS_MAX):
                catalog = await self._current()
                result, change = plan(catalog)
                if change is not None:
                    changed = await self._applied(catalog, change)
                    if changed is None:
                        continue
                    catalog = changed
                in_force = await self._put_in_force(catalog)
                break
            else:
                detail = "Others are changing the catalog; send the request again."
                raise errors.AlreadyExists(detail, should_retry=True)
        return result, await self.confirm(in_force)  # not in our turn: others need not wait for a gateway that is behind

    async def refresh(self) -> bool:
        """Publish what is stored if that is newer than what was published last; whether it was."""
        async with self._turn:
            if await self._store.version() <= self.published.version:
                return False
            await self._put_in_force(await self._current())
            return True

    async def _put_in_force(self, catalog: Catalog) -> Acknowledgement:
        """In our turn, so that versions rise. A large catalog is made into a snapshot off the loop."""
        snapshot = await asyncio.to_thread(build_snapshot, catalog, self.published)
        acknowledged = await self._publish(snapshot)
        self.published = snapshot
        return acknowledged

    async def _current(self) -> Catalog:
        """The catalog as the store has it: read again only if its version is another than the one that is known."""
        if self._catalog is None or self._catalog.version != await self._store.version():
            self._catalog = await self._store.load()
        return self._catalog

    async def _applied(self, catalog: Catalog, change: CatalogChange) -> Catalog | None:
        """The catalog with the change that the store has now; None where others changed it meanwhile."""
        try:
            version = await self._store.apply(catalog.version, change)
        except errors.AlreadyExists:  # the port's word for a version conflict
            return None
        self._catalog = await asyncio.to_thread(changed_catalog, catalog, change, version)
        return self._catalog

    def audit_entry(self, actor: str, action: str, subject: str, summary: Mapping[str, object]) -> AuditEntry:
        """An entry of the audit trail at this moment. summary: JSON values without secrets."""
        return AuditEntry(self._clock.wall_ms(), actor, action, subject, json.dumps(summary, sort_keys=True))


def _changed(before: Tenant | Limits, changes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The changes that are any, each as [before, after]."""
    return {name: [_told(was), _told(now)] for name, now in changes.items() if (was := getattr(before, name)) != now}


def _told(value: Any) -> Any:
    """A field as JSON shows it."""
    return asdict(value) if isinstance(value, Retention) else value


def _checked_terms(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tenant that are given, as it has them. Raises InvalidRequest."""
    terms = {field: value for field, value in wanted.items() if value is not None}
    if "time_zone" in terms:
        check_time_zone(terms["time_zone"])
    if "weight" in terms:
        check_weight(terms["weight"])
    if "retention" in wanted:
        terms["retention"] = checked_retention(wanted["retention"])
    return terms


def _unrevoked_tenant(catalog: Catalog, name: str) -> Tenant:
    tenant = require_tenant(catalog, name)
    if tenant.revoked:
        raise errors.Revoked(f"Tenant {name!r} was revoked.")
    return tenant


def _unrevoked_application(catalog: Catalog, tenant: str, name: str) -> Application:
    application = require_application(catalog, tenant, name)
    _unrevoked_tenant(catalog, tenant)
    if application.revoked:
        raise errors.Revoked(f"Application {name!r} of tenant {tenant!r} was revoked.")
    return application


def _sorted_or_none(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)
