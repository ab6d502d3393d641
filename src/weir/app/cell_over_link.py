"""What control asks the running cell, over a link: questions on control's side, answers beside the coordinator.

Why a pool's replicas are not ready is control's own knowledge, and is filled in on its side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weir.app.running_view import FaultOf
from weir.control.cell_view import CellView, Explanations, GatheredEvidence, PoolReport, ReplicaReport
from weir.core.routing.replica import ReplicaState
from weir.link.control_end import ControlEnd
from weir.link.control_messages import (
    AskAccounts,
    AskEvidence,
    AskExplanations,
    AskGeneration,
    AskOpenHolds,
    AskPools,
    AskReplicas,
    ViewQuestion,
)
from weir.messages import GenerationRecord


class LinkedCell:
    """Implements control's CellView on a link. fault_of: why a pool's replicas are not ready."""

    def __init__(self, link: ControlEnd, fault_of: FaultOf) -> None:
        self._link = link
        self._fault_of = fault_of

    async def accounts(self, tenant: str) -> Sequence[Mapping[str, Any]]:
        """One row per scope and limit in force."""
        return await self._link.ask(AskAccounts(tenant), list[dict[str, Any]])

    async def open_holds(self, tenant: str) -> int:
        """Number of the tenant's holds that have not ended."""
        return await self._link.ask(AskOpenHolds(tenant), int)

    async def generation(self, tenant: str, request_id: str) -> GenerationRecord | None:
        """The latest execution of a request id."""
        found = await self._link.ask(AskGeneration(tenant, request_id), list[GenerationRecord])
        return found[0] if found else None

    async def explanations(self, request_id: str, tenant: str | None = None) -> Explanations:
        """What the coordinator remembers of a request id."""
        return await self._link.ask(AskExplanations(request_id, tenant), Explanations)

    async def evidence(self, rollout: str, revision: str) -> GatheredEvidence:
        """What is known of a rollout's canary. Raises CoordinatorLost also for a coordinator of an older version."""
        return await self._link.ask(AskEvidence(rollout, revision), GatheredEvidence)

    async def replicas(self) -> Sequence[ReplicaReport]:
        """Every replica that is known, by the name that the coordinator has for it."""
        reports = await self._link.ask(AskReplicas(), list[ReplicaReport])
        return [self._explained(report) for report in reports]

    def _explained(self, report: ReplicaReport) -> ReplicaReport:
        return report if report.state == ReplicaState.READY else replace(report, detail=self._fault_of(report.pool))

    async def pools(self) -> Sequence[PoolReport]:
        """Every pool."""
        reports = await self._link.ask(AskPools(), list[PoolReport])
        return [each if each.ready >= each.replicas else replace(each, detail=self._fault_of(each.name)) for each in reports]


async def answer_of(view: CellView, question: ViewQuestion) -> Any:
    """The answer in the form that LinkedCell reads. Raises as the view does."""
    match question:
        case AskAccounts():
            return await view.accounts(question.tenant)
        case AskOpenHolds():
            return await view.open_holds(question.tenant)
        case AskGeneration():
            found = await view.generation(question.tenant, question.request_id)
            return [] if found is None else [found]
        case AskExplanations():
            return await view.explanations(question.request_id, question.tenant)
        case AskReplicas():
            return await view.replicas()
        case AskPools():
            return await view.pools()
        case AskEvidence():
            return await view.evidence(question.rollout, question.revision)
