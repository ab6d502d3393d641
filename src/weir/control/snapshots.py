"""Turns the stored catalog into the snapshot that the data plane runs on.

Pure: the same catalog gives the same snapshot. It drops nothing that is revoked, because the data plane must be able to tell
a revoked credential from an unknown one.
"""

from weir.core.registry.snapshot import Snapshot
from weir.ports import Catalog


def build_snapshot(catalog: Catalog) -> Snapshot:
    """The catalog as one immutable value with the catalog's version. Limits that limit nothing are left out."""
    return Snapshot(
        version=catalog.version,
        tenants={tenant.name: tenant for tenant in catalog.tenants},
        applications={(entry.tenant, entry.name): entry for entry in catalog.applications},
        keys={key.secret_sha256: key for key in catalog.keys},
        aliases={alias.name: alias for alias in catalog.aliases},
        revisions={revision.id: revision for revision in catalog.revisions},
        pools={pool.name: pool for pool in catalog.pools},
        prices={(entry.revision, entry.price.version): entry.price for entry in catalog.prices},
        limits={scope: limits for scope, limits in catalog.limits if not limits.is_empty},
    )
