"""Models that are registered together, and what of them is new.

Pure. Declaring a revision again never brings a revoked one back, and never replaces a price that was set. Declaring an alias
again never takes it from a revision that administrators registered and promoted, nor from a rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weir import errors
from weir.control.validation import BOOTSTRAP, BOOTSTRAP_APPROVER
from weir.core.registry.approval import Act, after
from weir.core.registry.model import Alias, Pool, Revision
from weir.core.registry.model import RevisionState as S
from weir.ports import Catalog

ACTOR = BOOTSTRAP
"""Who registers what a start declares."""
APPROVER = BOOTSTRAP_APPROVER
"""Who approves that: the other built-in actor, so that a start's models pass the same way as everybody's."""


@dataclass(frozen=True, slots=True)
class DeclaredModels:
    """Revisions, aliases and pools that somebody registers together."""

    revisions: Sequence[Revision] = ()
    aliases: Sequence[Alias] = ()
    pools: Sequence[Pool] = ()

    @property
    def is_empty(self) -> bool:
        """True when nothing is declared."""
        return not (self.revisions or self.aliases or self.pools)


def changed_models(catalog: Catalog, models: DeclaredModels) -> DeclaredModels:
    """What of the declared models differs from the catalog. A revocation, prices, and what administrators promoted stay.

    Raises InvalidRequest where an alias or a pool names a revision that is neither declared nor known, or a pool is another's.
    """
    known = {revision.id: revision for revision in catalog.revisions}
    revisions = [_registered(revision, known.get(revision.id)) for revision in models.revisions]
    _check_named(models, known.keys() | {revision.id for revision in revisions})
    _check_pools(models, catalog)
    return DeclaredModels(
        tuple(entry for entry in revisions if entry != known.get(entry.id)),
        tuple(alias for alias in models.aliases if alias not in catalog.aliases and not _is_taken(alias, catalog, known)),
        tuple(pool for pool in models.pools if pool not in catalog.pools),
    )


def _is_taken(declared: Alias, catalog: Catalog, known: Mapping[str, Revision]) -> bool:
    """Whether administrators made more of the alias than a start did: a rollout runs, or they registered what it means."""
    if any((each.tenant, each.alias) == (declared.tenant, declared.name) and not each.is_over for each in catalog.rollouts):
        return True
    for stored in catalog.aliases:
        if (stored.tenant, stored.name) == (declared.tenant, declared.name):
            return known[stored.revision].registered_by not in (None, ACTOR)
    return False


def _check_named(models: DeclaredModels, ids: set[str]) -> None:
    named = [(alias.name, alias.revision) for alias in models.aliases] + [(pool.name, pool.revision) for pool in models.pools]
    for name, revision in named:
        if revision not in ids:
            members = {"field": "revision", "accepted": sorted(ids)}
            raise errors.InvalidRequest(f"{name!r} names a revision that is not registered.", members=members)


def _check_pools(models: DeclaredModels, catalog: Catalog) -> None:
    made = {pool.name for pool in catalog.pools if not pool.declared}
    for pool in models.pools:
        if pool.declared and pool.name in made:
            members = {"field": f"pools.{pool.name}", "accepted": "a name that no administrator gave to a pool"}
            raise errors.InvalidRequest(f"There is a pool {pool.name!r} that an administrator made.", members=members)


def approved_models(catalog: Catalog, models: DeclaredModels) -> list[Revision]:
    """The declared revisions that a start registered and that wait for approval, approved and live."""
    waiting = {each.id: each for each in catalog.revisions if each.registered_by == ACTOR and each.state is S.REGISTERED}
    named = (waiting[each.id] for each in models.revisions if each.id in waiting)
    return [
        replace(each, state=after(replace(each, state=after(each, Act.APPROVE)), Act.PUBLISH), approved_by=APPROVER)
        for each in named
    ]


def _registered(declared: Revision, stored: Revision | None) -> Revision:
    """What is on record, with what a start may change of it; what is not goes on record, and waits for approval."""
    if stored is None:
        return replace(declared, state=S.REGISTERED, registered_by=ACTOR)
    price = stored.price if stored.price.version >= declared.price.version else declared.price
    approval = {name: getattr(stored, name) for name in ("state", "registered_by", "approved_by")}
    return replace(declared, price=price, **approval)


def summary_of_models(models: DeclaredModels) -> dict[str, object]:
    """What an audit entry says of registered models: names only."""
    return {
        "revisions": [revision.id for revision in models.revisions],
        "aliases": {alias.name: alias.revision for alias in models.aliases},
        "pools": [pool.name for pool in models.pools],
    }
