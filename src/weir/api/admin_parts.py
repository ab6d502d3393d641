"""What the routes of the management API share: the parts that they ask, and a router whose routes know their caller.

It decides nothing. Each file of routes makes one router here, and the application includes them all.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast

from fastapi import APIRouter, Depends, Request

from weir.api.admin_auth import BEARER, AuthenticatedRoute
from weir.control.cell_view import CellView
from weir.control.commands import Commands
from weir.control.key_ring_commands import KeyRingCommands
from weir.control.model_commands import ModelCommands
from weir.control.registration import Registration
from weir.control.rollout_commands import RolloutCommands
from weir.control.rollout_loop import Look
from weir.ports import Entropy, LedgerStore


class RolloutLooks(Protocol):
    """What is seen of the rollouts that are under way."""

    def latest(self, rollout_id: str) -> Look | None:
        """The latest look; None where there was none since control started."""
        ...


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What the routes need. ledger is only read."""

    commands: Commands
    models: ModelCommands
    registration: Registration
    key_ring: KeyRingCommands
    rollouts: RolloutCommands
    looks: RolloutLooks
    ledger: LedgerStore
    cell: CellView
    entropy: Entropy


def _parts(request: Request) -> AdminParts:
    return cast(AdminParts, request.app.state.parts)


PENDING: dict[int | str, dict[str, Any]] = {
    202: {"description": "Stored; `pending` names the parts that have yet to acknowledge it"}
}
Parts = Annotated[AdminParts, Depends(_parts)]


def admin_router() -> APIRouter:
    """A router below /admin/v1 whose routes authenticate before they read a body."""
    return APIRouter(prefix="/admin/v1", route_class=AuthenticatedRoute, dependencies=[Depends(BEARER)])
