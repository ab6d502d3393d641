"""The management API's routes of rollouts: propose, look, pause, resume, promote, roll back.

Every releaser may do all of it: what a rollout leads to was approved before. Nothing here decides how one goes on, and looking
changes nothing.
"""

from typing import Annotated

from fastapi import Query
from fastapi.responses import JSONResponse

from weir.api.admin_auth import Releaser, Viewer
from weir.api.admin_parts import PENDING, Parts, admin_router
from weir.api.admin_rollout_bodies import NewRollout, RollBackBody, RolloutQuery
from weir.api.admin_rollout_views import RolloutDetailView, RolloutList, RolloutView
from weir.api.admin_views import acknowledged, shown
from weir.control.catalog_lookup import require_rollout
from weir.control.commands import Outcome
from weir.core.registry.rollout_plan import RolloutPlan
from weir.core.registry.rollout_record import Rollout

HISTORY_ENTRIES_MAX = 100
"""A rollout makes an entry per step; more come from pauses and from replicas that are lost again and again."""

router = admin_router()


@router.post("/rollouts", status_code=201, response_model=RolloutView, responses=PENDING)
async def propose_rollout(body: NewRollout, caller: Releaser, parts: Parts) -> JSONResponse:
    """Begin to move an alias to another revision: its replicas start, and nobody is routed to it yet."""
    plan = RolloutPlan() if body.plan is None else body.plan.plan()
    rollout, done = await parts.rollouts.propose(caller.actor, body.alias, body.revision, plan, body.tenant)
    return acknowledged(RolloutView.of(rollout), done, 201)


@router.get("/rollouts", response_model=RolloutList)
async def list_rollouts(query: Annotated[RolloutQuery, Query()], caller: Viewer) -> JSONResponse:
    """Rollouts, newest first; `alias` and `open` narrow them."""
    wanted = (
        rollout
        for rollout in caller.catalog.rollouts
        if query.alias in (None, rollout.alias) and query.open in (None, not rollout.is_over)
    )
    newest_first = sorted(wanted, key=lambda rollout: (-rollout.proposed_at_ms, rollout.id))
    return shown(RolloutList(rollouts=[RolloutView.of(rollout) for rollout in newest_first]))


@router.get("/rollouts/{rollout}", response_model=RolloutDetailView)
async def get_rollout(rollout: str, caller: Viewer, parts: Parts) -> JSONResponse:
    """One rollout, what was seen of it at last and what it waits for, and its history."""
    known = require_rollout(caller.catalog, rollout)
    entries = await parts.commands.audit_trail(HISTORY_ENTRIES_MAX, subject=known.id)
    return shown(RolloutDetailView.with_history(known, parts.looks.latest(known.id), entries))


@router.post("/rollouts/{rollout}/pause", response_model=RolloutView, responses=PENDING)
async def pause_rollout(rollout: str, caller: Releaser, parts: Parts) -> JSONResponse:
    """Hold it where it is; a canary that is worse is still rolled back."""
    return _changed(await parts.rollouts.pause(caller.actor, rollout))


@router.post("/rollouts/{rollout}/resume", response_model=RolloutView, responses=PENDING)
async def resume_rollout(rollout: str, caller: Releaser, parts: Parts) -> JSONResponse:
    """Let a paused one go on."""
    return _changed(await parts.rollouts.resume(caller.actor, rollout))


@router.post("/rollouts/{rollout}/promote", response_model=RolloutView, responses=PENDING)
async def promote_rollout(rollout: str, caller: Releaser, parts: Parts) -> JSONResponse:
    """Skip what is left of its steps: everybody gets the new revision now."""
    return _changed(await parts.rollouts.promote(caller.actor, rollout))


@router.post("/rollouts/{rollout}/roll-back", response_model=RolloutView, responses=PENDING)
async def roll_back_rollout(rollout: str, caller: Releaser, parts: Parts, body: RollBackBody | None = None) -> JSONResponse:
    """Send everybody to the stable revision, at once; `detail` says why."""
    given = {} if body is None else body.model_dump(exclude_none=True)
    return _changed(await parts.rollouts.roll_back(caller.actor, rollout, **given))


def _changed(outcome: Outcome[Rollout]) -> JSONResponse:
    rollout, done = outcome
    return acknowledged(RolloutView.of(rollout), done)
