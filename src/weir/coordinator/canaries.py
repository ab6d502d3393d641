"""What is known of canaries: of each alias with one, the evidence of the step that its rollout is at.

A request counts for the step at which it was admitted here, and only if its alias is at that step still as it ends. What an
earlier coordinator admitted counts nowhere, so after a takeover the evidence of a step begins anew. What follows from the
evidence is control's to decide; nothing here changes where a request goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from weir.coordinator.execution import Assignment, Execution
from weir.coordinator.execution_table import ExecutionTable
from weir.core.ledger.records import SettleRecord
from weir.core.registry.evidence import Arm, EvidenceWindow, Sample, outcome_of
from weir.core.registry.model import Alias, Canary
from weir.core.registry.snapshot import Snapshot
from weir.messages import Acquire

_AliasKey: TypeAlias = tuple[str | None, str]
"""(the tenant whom it belongs to, name)."""


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """The step that an alias is at. window: its evidence so far."""

    alias: Alias
    canary: Canary
    window: EvidenceWindow

    def arm_of(self, revision: str) -> Arm | None:
        """Which of the two a request was pinned to; None: to neither, by another configuration than the one in force."""
        if revision == self.canary.revision:
            return Arm.CANARY
        return Arm.STABLE if revision == self.alias.revision else None


class Canaries:
    """Owner of the evidence of a cell: at most one window for each alias with a canary. executions: of the coordinator."""

    def __init__(self, executions: ExecutionTable, snapshot: Snapshot) -> None:
        self._executions = executions
        self._snapshot = snapshot
        self._steps: Mapping[_AliasKey, CanaryStep] = {}
        self.publish(snapshot)

    def publish(self, snapshot: Snapshot) -> None:
        """A configuration comes into force: evidence goes on where rollout and step are the same, else it is dropped."""
        self._snapshot = snapshot
        aliases = chain(snapshot.aliases.values(), snapshot.tenant_aliases.values())
        self._steps = {
            (alias.tenant, alias.name): CanaryStep(alias, alias.canary, self._window_of(alias, alias.canary))
            for alias in aliases
            if alias.canary is not None
        }

    def _window_of(self, alias: Alias, canary: Canary) -> EvidenceWindow:
        before = self._steps.get((alias.tenant, alias.name))
        if before is not None and (before.canary.rollout, before.canary.step) == (canary.rollout, canary.step):
            return before.window
        return EvidenceWindow(canary.tolerances)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def assignment_of(self, asked: Acquire) -> Assignment | None:
        """What a request that is admitted now is evidence of; None: of nothing."""
        if not self._steps:
            return None
        alias = self._snapshot.alias_named(asked.tenant, asked.alias)
        if alias is None or (step := self._steps.get((alias.tenant, alias.name))) is None:
            return None
        arm = step.arm_of(asked.revision)
        return Assignment(step.window, arm) if arm is not None else None

    def concluded(self, execution: Execution) -> None:
        """Its terminal status is known. Told once of each execution; a window that was dropped is read by nobody."""
        assignment, execution.assignment = execution.assignment, None
        if assignment is not None:
            assignment.window.add(assignment.arm, _sample_of(execution))

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def steps(self) -> list[CanaryStep]:
        """The step of each alias with a canary; safe from another thread."""
        return list(self._steps.values())

    def step_of(self, rollout: str) -> CanaryStep | None:
        """The step that a rollout is at here; None where no alias in force has its canary."""
        return next((step for step in self.steps if step.canary.rollout == rollout), None)

    def running_on(self, revision: str) -> int:
        """Requests that are pinned to a revision and not over, by any alias; also those of an earlier coordinator."""
        return self._executions.live_of(revision)


def _sample_of(execution: Execution) -> Sample:
    record, placements = execution.end_record, execution.placements
    assert record is not None
    output_ns = placements[-1].output_ns if placements else None
    return Sample(
        workload_class=execution.workload.name,
        outcome=outcome_of(record.finish_reason, was_dispatched=bool(placements)),
        # From the first dispatch: what an attempt took that was lost is the revision's doing too.
        first_token_ms=None if output_ns is None else (output_ns - placements[0].lane_taken_ns) / 1e6,
        tpot_ms=record.timing.tpot_ms,
        output_tokens=record.output_tokens if isinstance(record, SettleRecord) else 0,
    )
