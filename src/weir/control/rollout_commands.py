"""Rollouts as changes of the catalog: proposed, moved by one event at a time, and with each event what the alias says.

What a rollout's state means for its alias, its revisions and its pools is one function, and all of it is one transaction: there
is never a weight without its step, nor a step without its weight. Who decides which event is not here: an administrator, or
`rollout_loop.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from weir import errors
from weir.control.catalog_lookup import require_alias, require_revision, require_rollout
from weir.control.commands import Commands, Outcome
from weir.control.model_commands import check_publishable, pools_of, running_rollout, targets_of
from weir.control.validation import ROLLOUT, check_detail
from weir.core.registry.approval import Act, after
from weir.core.registry.model import Alias, Canary, EngineKind, Pool, Revision, within_reach
from weir.core.registry.rollout import (
    Finish,
    IllegalRolloutTransition,
    Live,
    Lose,
    Pause,
    Promote,
    Proposed,
    RaiseWeight,
    Regain,
    Resume,
    RollBack,
    RollbackReason,
    RolledBack,
    RolloutEvent,
    Route,
    Verify,
    advance,
    name_of,
    route_of,
    weight_of,
)
from weir.core.registry.rollout_plan import RolloutPlan, check_plan
from weir.core.registry.rollout_record import Rollout
from weir.ports import AuditEntry, Catalog, CatalogChange, Clock, Entropy

ACTOR = ROLLOUT
"""Who acts in the audit trail where the loop decided."""
ROLLOUTS_MAX = 64
"""That run at once: each is looked at every few seconds, and keeps two revisions warm."""
_ID_PREFIX = "ro-"
_ID_BYTES = 8
_SUFFIX_CHARACTERS = 8
_POOL_NAME_CHARACTERS = 63

Choose: TypeAlias = Callable[[Rollout], RolloutEvent | None]
"""The event for a rollout as it is stored; None: nothing to do."""


class RolloutCommands:
    """The rollouts of a cell."""

    def __init__(self, commands: Commands, clock: Clock, entropy: Entropy) -> None:
        self._commands = commands
        self._clock = clock
        self._entropy = entropy

    async def propose(
        self, actor: str, alias_name: str, revision: str, plan: RolloutPlan, tenant: str | None = None
    ) -> Outcome[Rollout]:
        """Begin to move an alias to another revision: its replicas start, and nothing else changes yet.

        A canary without pools gets one like each of the stable revision's. Raises InvalidRequest for the plan or the revision
        that the alias means, NotFound, NotAllowedNow for an alias that a rollout moves or a revision that cannot serve all whom
        the stable one serves.
        """
        check_plan(plan)
        rollout_id = f"{_ID_PREFIX}{self._entropy.token(_ID_BYTES).hex()}"

        def decide(catalog: Catalog) -> tuple[Rollout, CatalogChange]:
            alias, canary = require_alias(catalog, tenant, alias_name), require_revision(catalog, revision)
            _check_free(catalog, alias)
            if alias.revision == revision:
                raise errors.InvalidRequest("The alias means this revision already.", members={"field": "revision"})
            _check_takes_as_much(require_revision(catalog, alias.revision), canary)
            own, stable = pools_of(catalog, revision), pools_of(catalog, alias.revision)
            made = [] if own else _pools_like(stable, canary, rollout_id)
            check_publishable(replace(catalog, pools=(*catalog.pools, *made)), canary, tenant)
            _check_reach(catalog, tenant, stable, own or made)
            rollout = Rollout(
                id=rollout_id,
                alias=alias_name,
                tenant=tenant,
                stable=alias.revision,
                canary=revision,
                plan=plan,
                state=Proposed(self._clock.wall_ms()),
                proposed_by=actor,
                proposed_at_ms=self._clock.wall_ms(),
                pools=tuple(pool.name for pool in made),
                former_pools=tuple(pool.name for pool in stable),
            )
            summary = {"alias": alias_name, "tenant": tenant, "from": alias.revision, "to": revision}
            entry = self._commands.audit_entry(actor, "rollout.propose", rollout_id, summary)
            return rollout, CatalogChange(entry, rollouts=(rollout,), pools=made)

        return await self._commands.commit(decide)

    async def pause(self, actor: str, rollout_id: str) -> Outcome[Rollout]:
        """Hold it where it is; a breach still rolls it back. Raises NotFound, NotAllowedNow."""
        return await self.act(actor, rollout_id, lambda rollout: Pause(self._clock.wall_ms()))

    async def resume(self, actor: str, rollout_id: str) -> Outcome[Rollout]:
        """Let a paused one go on. Raises NotFound, NotAllowedNow."""
        return await self.act(actor, rollout_id, lambda rollout: Resume(self._clock.wall_ms()))

    async def promote(self, actor: str, rollout_id: str) -> Outcome[Rollout]:
        """Skip what is left of its steps. Raises NotFound, NotAllowedNow before its first step."""
        return await self.act(actor, rollout_id, lambda rollout: Promote(self._clock.wall_ms()))

    async def roll_back(
        self, actor: str, rollout_id: str, detail: str = "An administrator rolled it back."
    ) -> Outcome[Rollout]:
        """Send everybody to the stable revision, at once. detail: why, one line for people.

        Raises InvalidRequest for the detail, NotFound, NotAllowedNow once it is over.
        """
        check_detail("detail", detail)
        return await self.act(
            actor, rollout_id, lambda rollout: RollBack(self._clock.wall_ms(), RollbackReason.OPERATOR, detail)
        )

    async def act(self, actor: str, rollout_id: str, choose: Choose) -> Outcome[Rollout]:
        """Move a rollout by the event that is chosen for it as it is stored. Raises NotFound, NotAllowedNow."""

        def decide(catalog: Catalog) -> tuple[Rollout, CatalogChange | None]:
            rollout = require_rollout(catalog, rollout_id)
            event = choose(rollout)
            if event is None:
                return rollout, None
            try:
                moved = _moved(rollout, event)
            except IllegalRolloutTransition as illegal:
                detail = f"Rollout {rollout_id} is {name_of(rollout.state)}."
                raise errors.NotAllowedNow(detail, members={"state": name_of(rollout.state)}) from illegal
            entry = self._commands.audit_entry(
                actor, f"rollout.{EVENT_NAMES[type(event)]}", rollout_id, _summary_of(moved, event)
            )
            return moved, _change_of(catalog, moved, entry)

        return await self._commands.commit(decide)


# ── what follows from a state ────────────────────────────────────────────────────────────────────────────────────────


def _moved(rollout: Rollout, event: RolloutEvent) -> Rollout:
    score = event.score if isinstance(event, Verify) else rollout.score
    return replace(rollout, state=advance(rollout.state, event), score=score)


def _change_of(catalog: Catalog, rollout: Rollout, entry: AuditEntry) -> CatalogChange:
    """The rollout as it is now, with what its alias, its canary's revision and the pools are by it."""
    alias = _routed(require_alias(catalog, rollout.tenant, rollout.alias), rollout)
    revisions = []
    if route_of(rollout.state) is Route.NEW:
        canary = require_revision(catalog, rollout.canary)
        revisions = [replace(canary, state=after(canary, Act.PUBLISH))]
    return CatalogChange(
        entry, rollouts=(rollout,), aliases=(alias,), revisions=revisions, pools=_freed_pools(catalog, rollout)
    )


def _routed(alias: Alias, rollout: Rollout) -> Alias:
    """The alias as the rollout's state has it. Its default output stays: a way back, or a retry, finds it as it was."""
    match route_of(rollout.state):
        case Route.OLD:
            return replace(alias, revision=rollout.stable, canary=None)
        case Route.SPLIT:
            assert rollout.step is not None
            weight = weight_of(rollout.plan, rollout.state)
            share = Canary(rollout.id, rollout.step, rollout.canary, weight, rollout.plan.tolerances)
            return replace(alias, revision=rollout.stable, canary=share)
        case Route.NEW:
            return replace(alias, revision=rollout.canary, canary=None)


def _freed_pools(catalog: Catalog, rollout: Rollout) -> list[Pool]:
    """Pools that a rollout's end leaves without work, retired. What a start declared is its own affair."""
    match rollout.state:
        case Live():
            names, revision = rollout.former_pools, rollout.stable
        case RolledBack():
            names, revision = rollout.pools, rollout.canary
        case _:
            return []
    if _is_used(catalog, revision, rollout):
        return []
    freed = (pool for pool in catalog.pools if pool.name in names and not pool.retired and not pool.declared)
    return [replace(pool, retired=True) for pool in freed]


def _is_used(catalog: Catalog, revision: str, over: Rollout) -> bool:
    """Whether anything but the alias of this rollout, which is over, leads to a revision, or may soon."""
    others = (alias for alias in catalog.aliases if (alias.tenant, alias.name) != (over.tenant, over.alias))
    moving = (each for each in catalog.rollouts if each.id != over.id and not each.is_over)
    return any(revision in targets_of(alias) for alias in others) or any(
        revision in (each.stable, each.canary) for each in moving
    )


def _pools_like(stable: Iterable[Pool], canary: Revision, rollout_id: str) -> list[Pool]:
    """A pool for the canary like each of the stable revision's, but for those of others where the canary is a tenant's own.

    None for an engine that the platform does not start.
    """
    if canary.engine is EngineKind.OPENAI:
        return []
    mark = rollout_id.removeprefix(_ID_PREFIX)[:_SUFFIX_CHARACTERS]
    like = [pool for pool in stable if canary.tenant is None or pool.tenant in (None, canary.tenant)]
    return [
        replace(
            pool,
            name=_shortened(pool.name, f"-{mark}-{number}" if number else f"-{mark}"),
            revision=canary.id,
            tenant=canary.tenant or pool.tenant,
            urls=(),
            on_demand=False,
            declared=False,
        )
        for number, pool in enumerate(like)
    ]


def _shortened(name: str, suffix: str) -> str:
    """A pool's name that ends so; what is cut off may be all that two names differ in."""
    return name[: _POOL_NAME_CHARACTERS - len(suffix)] + suffix


def _check_reach(catalog: Catalog, tenant: str | None, stable: Iterable[Pool], canary: Sequence[Pool]) -> None:
    """Raises NotAllowedNow where somebody whom the stable revision's pools serve would find none of the canary's.

    While both serve they would stay with the stable one, so that nobody saw it before the promotion. tenant: the alias's.
    """
    leaving = {each.name for each in catalog.tenants if each.leaves_its_pools}
    for pool in stable if tenant is None else within_reach(stable, tenant, leaves_its_pools=True):
        owners = {pool.tenant, tenant or pool.tenant} | ({None} if pool.tenant in leaving else set())
        alike = [each for each in canary if each.tenant in owners and _takes_as_long(each, pool)]
        missing = set(pool.service_classes) - {known for each in alike for known in each.service_classes}
        if missing:
            detail = f"No pool of the new revision serves all whom pool {pool.name!r} serves: {', '.join(sorted(missing))}."
            raise errors.NotAllowedNow(detail, members={"pool": pool.name})


def _takes_as_long(pool: Pool, other: Pool) -> bool:
    """Whether a pool takes inputs as long as another one does."""
    if pool.input_tokens_max is None or other.input_tokens_max is None:
        return pool.input_tokens_max is None
    return pool.input_tokens_max >= other.input_tokens_max


def _check_takes_as_much(stable: Revision, canary: Revision) -> None:
    """Raises NotAllowedNow where callers would be refused at the door: that is in no evidence, and nothing would stop it."""
    if stable.embeds or canary.embeds:
        detail = (
            "Vectors of two models cannot be compared, so no callers are split between them: give the new one another alias."
        )
        raise errors.NotAllowedNow(detail, members={"missing": ["embeddings"]})
    less = {
        "conversations": stable.chat and not canary.chat,
        f"a window of {stable.context_tokens} tokens": canary.context_tokens < stable.context_tokens,
        f"{stable.max_output_tokens} output tokens": canary.max_output_tokens < stable.max_output_tokens,
        "tenants whose work stays inside": canary.external and not stable.external,
    }
    missing = [name for name, is_missing in less.items() if is_missing]
    if missing:
        detail = (
            f"Revision {canary.id!r} does not take what {stable.id!r} does: {', '.join(missing)}. Publish it at once, or not."
        )
        raise errors.NotAllowedNow(detail, members={"missing": missing})


def _check_free(catalog: Catalog, alias: Alias) -> None:
    """Raises NotAllowedNow where a rollout moves the alias, or too many are under way."""
    if rollout := running_rollout(catalog, alias.tenant, alias.name):
        raise errors.NotAllowedNow(f"Rollout {rollout} moves this alias already.", members={"rollout": rollout})
    if sum(not each.is_over for each in catalog.rollouts) >= ROLLOUTS_MAX:
        raise errors.NotAllowedNow(f"{ROLLOUTS_MAX} rollouts are under way.", members={"limit": ROLLOUTS_MAX})


EVENT_NAMES: Mapping[type[RolloutEvent], str] = {
    Verify: "verify",
    RaiseWeight: "raise_weight",
    Promote: "promote",
    Finish: "finish",
    Pause: "pause",
    Resume: "resume",
    Lose: "lose",
    Regain: "regain",
    RollBack: "roll_back",
}
"""What each event is called in the audit trail, in logs and in metrics."""


def _summary_of(rollout: Rollout, event: RolloutEvent) -> dict[str, object]:
    summary: dict[str, object] = {"state": name_of(rollout.state), "weight": weight_of(rollout.plan, rollout.state)}
    if isinstance(event, RollBack):
        summary |= {"reason": event.reason.value, "detail": event.detail}
    if isinstance(event, Verify) and event.score is not None:
        summary |= {"passed": event.score.passed, "total": event.score.total}
    return summary
