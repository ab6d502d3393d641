"""What is served under which name: revisions approved, retired and revoked, aliases published, pools made and retired.

An alias is only ever published to a revision that serves and has a pool, and never while a rollout moves it. A pool's revision
never changes. Each change is one transaction with its audit entry. Registration is `registration.py`'s, rollouts are
`rollout_commands.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from weir import errors
from weir.control.catalog_lookup import require_pool, require_revision, require_tenant
from weir.control.commands import Commands, Outcome
from weir.control.validation import check_alias, check_name, check_number, check_url
from weir.core.registry.approval import Act, after, check_approver
from weir.core.registry.model import Alias, EngineKind, Pool, Revision
from weir.core.tenancy import ServiceClass
from weir.ports import Catalog, CatalogChange
from weir.units import Millis, Tokens

REPLICAS_MAX = 1_024
CONCURRENCY_MAX = 65_536
URLS_MAX = 256
INPUT_TOKENS_MAX: Tokens = 100_000_000
IDLE_STOP_MS_MIN, IDLE_STOP_MS_MAX = 1_000, 86_400_000


@dataclass(frozen=True, slots=True)
class NewPool:
    """A pool as it is asked for; see `Pool`."""

    name: str
    revision: str
    replicas: int = 1
    concurrency: int = 1
    urls: tuple[str, ...] = ()
    on_demand: bool = False
    idle_stop_ms: Millis = 600_000
    tenant: str | None = None
    service_classes: tuple[ServiceClass, ...] = tuple(ServiceClass)
    input_tokens_max: Tokens | None = None


class PoolChanges(TypedDict, total=False):
    """Fields of a pool to change; None and absent ones stay."""

    replicas: int | None
    concurrency: int | None
    service_classes: Sequence[ServiceClass] | None


class ModelCommands:
    """The changes of what a cell serves. `actor` is the name that the audit trail shows."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    # ── revisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def approve(self, actor: str, revision: str) -> Outcome[Revision]:
        """Let a registered revision serve. Raises NotFound, Forbidden for its registrant, NotAllowedNow.

        The latter also for an adapter whose model serves no more.
        """

        def approved(catalog: Catalog, known: Revision) -> Revision:
            check_approver(known, actor)
            if known.adapter_of is not None and not (model := require_revision(catalog, known.adapter_of)).serves:
                detail = f"Its model {model.id!r} is {model.state.value}."
                raise errors.NotAllowedNow(detail, members={"state": model.state.value})
            return replace(known, state=after(known, Act.APPROVE), approved_by=actor)

        return await self._change_revision(actor, "revision.approve", revision, approved)

    async def retire(self, actor: str, revision: str) -> Outcome[Revision]:
        """End a revision's service: its pools drain. Raises NotFound, NotAllowedNow where something still needs it."""

        def retired(catalog: Catalog, known: Revision) -> Revision:
            state = after(known, Act.RETIRE)
            names = sorted({alias.name for alias in catalog.aliases if revision in targets_of(alias)})
            moving = rollouts_of(catalog, revision)
            adapters = [each.id for each in catalog.revisions if each.adapter_of == revision and each.serves]
            if needed := names + moving + adapters:
                detail = f"Revision {revision!r} is still needed by {', '.join(needed)}."
                raise errors.NotAllowedNow(detail, members={"aliases": names, "rollouts": moving, "adapters": adapters})
            return replace(known, state=state)

        return await self._change_revision(actor, "revision.retire", revision, retired)

    async def revoke(self, actor: str, revision: str) -> Outcome[Revision]:
        """End a revision and its adapters for good: their running work is cancelled, their replicas stop.

        Idempotent. Raises NotFound.
        """

        def plan(catalog: Catalog) -> tuple[Revision, CatalogChange | None]:
            known = require_revision(catalog, revision)
            ended = [known, *(each for each in catalog.revisions if each.adapter_of == revision)]
            revoked = [replace(each, state=after(each, Act.REVOKE)) for each in ended]
            adapters = [each.id for each in revoked[1:]]
            entry = self._commands.audit_entry(actor, "revision.revoke", revision, {"adapters": adapters} if adapters else {})
            return revoked[0], None if revoked == ended else CatalogChange(entry, revisions=revoked)

        return await self._commands.commit(plan)

    async def _change_revision(self, actor: str, action: str, revision: str, change: Any) -> Outcome[Revision]:
        entry = self._commands.audit_entry(actor, action, revision, {})

        def plan(catalog: Catalog) -> tuple[Revision, CatalogChange | None]:
            known = require_revision(catalog, revision)
            changed = change(catalog, known)
            return changed, None if changed == known else CatalogChange(entry, revisions=(changed,))

        return await self._commands.commit(plan)

    # ── aliases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish(
        self, actor: str, name: str, revision: str, default_max_output_tokens: Tokens | None = None, tenant: str | None = None
    ) -> Outcome[Alias]:
        """Let an alias mean a revision from now on; requests in flight keep theirs. tenant: whose the name is; None: all.

        default_max_output_tokens: None keeps the alias's, or takes the revision's typical output.
        Raises InvalidRequest for the name or the number, NotFound, NotAllowedNow for a revision that does not serve, belongs to
        another tenant or has no pool, or an alias that a rollout moves.
        """
        check_alias("name", name)

        def plan(catalog: Catalog) -> tuple[Alias, CatalogChange | None]:
            if tenant is not None:
                require_tenant(catalog, tenant)
            known = require_revision(catalog, revision)
            check_publishable(catalog, known, tenant)
            before = next((alias for alias in catalog.aliases if (alias.tenant, alias.name) == (tenant, name)), None)
            if rollout := running_rollout(catalog, tenant, name):
                raise errors.NotAllowedNow(f"Rollout {rollout} moves this alias.", members={"rollout": rollout})
            default = before.default_max_output_tokens if before else known.typical_output_tokens
            if default_max_output_tokens is not None:
                check_number("default_max_output_tokens", default_max_output_tokens, 1, known.max_output_tokens)
                default = default_max_output_tokens
            changed = Alias(name, revision, min(default, known.max_output_tokens), tenant=tenant)
            summary = {"revision": revision, "tenant": tenant, "before": before.revision if before else None}
            entry = self._commands.audit_entry(actor, "alias.publish", name, summary)
            live = replace(known, state=after(known, Act.PUBLISH))
            is_same = changed == before and live == known
            return changed, None if is_same else CatalogChange(entry, aliases=(changed,), revisions=(live,))

        return await self._commands.commit(plan)

    # ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_pool(self, actor: str, asked: NewPool) -> Outcome[Pool]:
        """Start replicas of a revision that serves. Raises InvalidRequest, NotFound, AlreadyExists, NotAllowedNow."""
        check_name("name", asked.name)
        _check_asked(asked)
        pool = Pool(**{name: getattr(asked, name) for name in NewPool.__dataclass_fields__})
        summary = {"revision": asked.revision, "replicas": asked.replicas, "tenant": asked.tenant}
        entry = self._commands.audit_entry(actor, "pool.create", asked.name, summary)

        def plan(catalog: Catalog) -> tuple[Pool, CatalogChange]:
            if any(known.name == pool.name for known in catalog.pools):
                raise errors.AlreadyExists(f"There is a pool {pool.name!r} already; names are not given twice.")
            if pool.tenant is not None:
                require_tenant(catalog, pool.tenant)
            revision = require_revision(catalog, pool.revision)
            _check_place(pool, revision)
            return pool, CatalogChange(entry, pools=(pool,))

        return await self._commands.commit(plan)

    async def patch_pool(self, actor: str, name: str, **wanted: Unpack[PoolChanges]) -> Outcome[Pool]:
        """Change what is given; None stays.

        Raises InvalidRequest, NotFound, NotAllowedNow for a pool that a start declared, or to leave an alias without replicas.
        """
        changes: dict[str, Any] = {field: value for field, value in wanted.items() if value is not None}
        if "service_classes" in changes:
            changes["service_classes"] = tuple(changes["service_classes"])
            _check_service_classes(changes["service_classes"])

        def plan(catalog: Catalog) -> tuple[Pool, CatalogChange | None]:
            pool = _administered(require_pool(catalog, name))
            changed = replace(pool, **changes)
            _check_sizes(changed.replicas, changed.concurrency)
            if not _has_replicas(changed) and not pool.retired:
                _check_needed(catalog, pool)
            entry = self._commands.audit_entry(actor, "pool.patch", name, changes)
            return changed, None if changed == pool else CatalogChange(entry, pools=(changed,))

        return await self._commands.commit(plan)

    async def retire_pool(self, actor: str, name: str) -> Outcome[Pool]:
        """Drain and stop a pool's replicas. Idempotent.

        Raises NotFound, NotAllowedNow for the last pool of what an alias means or a rollout moves.
        """
        entry = self._commands.audit_entry(actor, "pool.retire", name, {})

        def plan(catalog: Catalog) -> tuple[Pool, CatalogChange | None]:
            pool = _administered(require_pool(catalog, name))
            if not pool.retired:
                _check_needed(catalog, pool)
            retired = replace(pool, retired=True)
            return retired, None if pool.retired else CatalogChange(entry, pools=(retired,))

        return await self._commands.commit(plan)


# ── what may be served ───────────────────────────────────────────────────────────────────────────────────────────────


def pools_of(catalog: Catalog, revision: str) -> list[Pool]:
    """The pools of a revision that are not retired."""
    return [pool for pool in catalog.pools if pool.revision == revision and not pool.retired]


def running_rollout(catalog: Catalog, tenant: str | None, alias: str) -> str | None:
    """The id of the rollout that moves an alias now."""
    moving = (each.id for each in catalog.rollouts if (each.tenant, each.alias) == (tenant, alias) and not each.is_over)
    return next(moving, None)


def rollouts_of(catalog: Catalog, revision: str) -> list[str]:
    """The ids of the rollouts that move from or to a revision now."""
    return [each.id for each in catalog.rollouts if not each.is_over and revision in (each.stable, each.canary)]


def check_publishable(catalog: Catalog, revision: Revision, tenant: str | None) -> None:
    """Raises NotAllowedNow unless an alias of this tenant, None for a shared one, may mean the revision."""
    if not revision.serves:
        detail = f"Revision {revision.id!r} is {revision.state.value}; approve it first, if that is still possible."
        raise errors.NotAllowedNow(detail, members={"state": revision.state.value, "accepted": ["approved", "live"]})
    if revision.tenant not in (None, tenant):
        raise errors.NotAllowedNow(f"Revision {revision.id!r} belongs to a tenant, and so must its alias.", members={})
    if not any(_has_replicas(pool) and pool.tenant in (None, tenant) for pool in pools_of(catalog, revision.id)):
        detail = f"Revision {revision.id!r} has no pool with replicas for this alias; create one first."
        raise errors.NotAllowedNow(detail, members={})


def targets_of(alias: Alias) -> set[str]:
    """The revisions that an alias leads to."""
    return {alias.revision} if alias.canary is None else {alias.revision, alias.canary.revision}


def _has_replicas(pool: Pool) -> bool:
    return bool(pool.urls) or pool.replicas > 0


def _check_needed(catalog: Catalog, pool: Pool) -> None:
    """Raises NotAllowedNow for the last pool with replicas of what an alias means or a rollout moves."""
    others = [each for each in pools_of(catalog, pool.revision) if each.name != pool.name and _has_replicas(each)]
    names = sorted({alias.name for alias in catalog.aliases if pool.revision in targets_of(alias)})
    moving = rollouts_of(catalog, pool.revision)
    if (names or moving) and not others and _has_replicas(pool):
        detail = f"Pool {pool.name!r} is the last one that serves {', '.join(names + moving)}."
        raise errors.NotAllowedNow(detail, members={"aliases": names, "rollouts": moving})


def _check_place(pool: Pool, revision: Revision) -> None:
    """Raises NotAllowedNow or InvalidRequest unless this pool can run the revision."""
    if not revision.serves:
        detail = f"Revision {revision.id!r} is {revision.state.value}; only an approved one gets replicas."
        raise errors.NotAllowedNow(detail, members={"state": revision.state.value, "accepted": ["approved", "live"]})
    if revision.tenant is not None and pool.tenant != revision.tenant:
        members = {"field": "tenant", "accepted": revision.tenant}
        raise errors.InvalidRequest("A tenant's own revision runs in pools of that tenant.", members=members)
    if bool(pool.urls) is not (revision.engine is EngineKind.OPENAI) or len(pool.urls) > URLS_MAX:
        accepted = f"1 … {URLS_MAX} URLs for an engine that runs already, none for one that the platform starts"
        raise errors.InvalidRequest("urls does not fit the revision's engine.", members={"field": "urls", "accepted": accepted})


def _administered(pool: Pool) -> Pool:
    if pool.declared:
        detail = f"Pool {pool.name!r} belongs to the way the cell was started; change that."
        raise errors.NotAllowedNow(detail, members={})
    return pool


def _check_asked(asked: NewPool) -> None:
    """Raises InvalidRequest unless everything that does not depend on the catalog is right."""
    _check_sizes(asked.replicas, asked.concurrency)
    _check_service_classes(asked.service_classes)
    check_number("idle_stop_ms", asked.idle_stop_ms, IDLE_STOP_MS_MIN, IDLE_STOP_MS_MAX)
    if asked.input_tokens_max is not None:
        check_number("input_tokens_max", asked.input_tokens_max, 1, INPUT_TOKENS_MAX)
    for url in asked.urls[: URLS_MAX + 1]:  # how many there may be is said with the engine
        check_url("urls", url)


def _check_service_classes(named: Sequence[ServiceClass]) -> None:
    if not named or len(set(named)) != len(named):
        members = {"field": "service_classes", "accepted": f"one or more of {', '.join(ServiceClass)}, each once"}
        raise errors.InvalidRequest("service_classes names no class, or one twice.", members=members)


def _check_sizes(replicas: int, concurrency: int) -> None:
    check_number("replicas", replicas, 0, REPLICAS_MAX)
    check_number("concurrency", concurrency, 1, CONCURRENCY_MAX)
