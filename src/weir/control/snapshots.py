"""Turns the stored catalog into the snapshot that the data plane runs on.

Pure: the same catalog gives the same snapshot. It drops nothing that is revoked, because the data plane must be able to tell
a revoked credential from an unknown one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weir.core.registry.rollout_record import Rollout
from weir.core.registry.snapshot import Snapshot
from weir.core.tenancy import Limits, Scope
from weir.ports import Catalog

_FIRST = Snapshot()


def build_snapshot(catalog: Catalog, before: Snapshot = _FIRST) -> Snapshot:
    """The catalog as one immutable value with the catalog's version. Limits that limit nothing are left out.

    before: the one in force, whose limits are shared where they are the same, so that a change of few is found quickly.
    """
    return Snapshot(
        version=catalog.version,
        tenants={tenant.name: tenant for tenant in catalog.tenants},
        applications={(entry.tenant, entry.name): entry for entry in catalog.applications},
        keys={key.secret_sha256: key for key in catalog.keys},
        aliases={alias.name: alias for alias in catalog.aliases if alias.tenant is None},
        tenant_aliases={(alias.tenant, alias.name): alias for alias in catalog.aliases if alias.tenant is not None},
        revisions={revision.id: revision for revision in catalog.revisions},
        pools={pool.name: pool for pool in catalog.pools if not pool.retired},
        prices={(entry.revision, entry.price.version): entry.price for entry in catalog.prices},
        moving=_moving(catalog.rollouts),
        limits=_shared({scope: limits for scope, limits in catalog.limits if not limits.is_empty}, before.limits),
    )


def snapshot_on_record(catalog: Catalog) -> Snapshot:
    """The same with the pools that were retired: control may still keep replicas on which what was admitted before runs."""
    return replace(build_snapshot(catalog), pools={pool.name: pool for pool in catalog.pools})


def _moving(rollouts: Iterable[Rollout]) -> frozenset[str]:
    """The revisions that rollouts move from or to now."""
    under_way = [rollout for rollout in rollouts if not rollout.is_over]
    return frozenset([rollout.stable for rollout in under_way] + [rollout.canary for rollout in under_way])


def _shared(limits: dict[Scope, Limits], before: Mapping[Scope, Limits]) -> dict[Scope, Limits]:
    """The limits, made of those before where they are equal: the same objects, in the same order."""
    shared = {scope: entry for scope, entry in before.items() if scope in limits}
    for scope, entry in limits.items():
        if shared.get(scope) != entry:
            shared[scope] = entry
    return shared
