"""Which pools are kept, of those that are on record: by what serves, what a start declared, and what aliases name. Pure.

A pool that administrators made is kept until they retire it. One that a start declared is kept only by a start that declares it
so, and only while an alias means its revision or a rollout moves from it: once another one was promoted for good, it has
nothing to do. A revision that is not approved, or not any more, has no pools. While a rollout moves from or to a revision its
pools wait for nobody's request, and do not stop because none comes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from weir.core.registry.model import Pool, Revision
from weir.core.registry.snapshot import Snapshot

Wanted: TypeAlias = tuple[Pool, Revision]
"""A pool that is to be kept, and what it serves."""


def kept_pools(snapshot: Snapshot, declared: Mapping[str, str]) -> list[Wanted]:
    """The pools to keep, in the snapshot's order. declared: by this start, the revision of each by the pool's name."""
    needed = stable_revisions(snapshot) | snapshot.moving
    return [
        (replace(pool, on_demand=pool.on_demand and pool.revision not in snapshot.moving), snapshot.revisions[pool.revision])
        for pool in snapshot.pools.values()
        if snapshot.revisions[pool.revision].serves
        and not pool.retired
        and (not pool.declared or (declared.get(pool.name) == pool.revision and pool.revision in needed))
    ]


def stable_revisions(snapshot: Snapshot) -> set[str]:
    """The revisions that aliases mean, canaries left aside."""
    return {alias.revision for alias in (*snapshot.aliases.values(), *snapshot.tenant_aliases.values())}
