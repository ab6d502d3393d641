"""Evidence of canaries where requests end: which requests count, for which arm, and what is measured of each."""

from dataclasses import replace
from typing import Any

import msgspec
from tests.contract.stores import settle
from tests.simulation.test_late_messages import ASKED
from tests.unit.test_timelines import execution_of

from weir.coordinator.canaries import Canaries
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.execution_table import ExecutionTable
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import ReleaseRecord, Timing
from weir.core.registry.evidence import Arm, Evidence, Pairs, Tally
from weir.core.registry.model import Alias, Canary
from weir.core.registry.rollout_plan import Tolerances
from weir.core.registry.snapshot import Snapshot
from weir.core.routing.replica import Replica, ReplicaLimits
from weir.messages import Acquire
from weir.sim.world import REVISION
from weir.storage.memory import MemoryLedger

STABLE, TRIED = REVISION.id, "sim@2"
CANARY = Canary("ro-1", 0, TRIED, 10)
ALIAS = Alias("assistant", STABLE, 64, CANARY)
REPLICA = Replica("r", "pool", ReplicaLimits(4))


def snapshot_of(*aliases: Alias) -> Snapshot:
    """With these aliases alone."""
    shared = {alias.name: alias for alias in aliases if alias.tenant is None}
    own = {(alias.tenant, alias.name): alias for alias in aliases if alias.tenant is not None}
    return Snapshot(1, aliases=shared, tenant_aliases=own)


class Stand:
    """Canaries, and executions that are admitted and end."""

    def __init__(self, *aliases: Alias) -> None:
        self.executions = ExecutionTable(MemoryLedger(), 100, 1_000)
        self.canaries = Canaries(self.executions, snapshot_of(*aliases))
        self.number = 0

    def admit(self, revision: str = TRIED, **changes: Any) -> Execution:
        """One that is pinned to a revision."""
        self.number += 1
        execution = execution_of(f"r{self.number}")
        execution.acquire = asked(revision, **changes)
        execution.assignment = self.canaries.assignment_of(execution.acquire)
        self.executions.add(execution)
        return execution

    def end(self, execution: Execution, *outputs_ms: float | None, tpot_ms: float | None = None, tokens: int = 8) -> None:
        """It completes. outputs_ms: of each attempt, when its first output came; they are dispatched each second from 0."""
        for number, output_ms in enumerate(outputs_ms):
            output_ns = None if output_ms is None else int(output_ms * 1_000_000)
            execution.placements.append(Placement(REPLICA, None, number + 1, number * 1_000_000_000, output_ns=output_ns))
        execution.end_record = msgspec.structs.replace(
            settle(9, execution.id),
            status=Status.COMPLETED,
            finish_reason=FinishReason.STOP,
            output_tokens=tokens,
            timing=Timing(tpot_ms=tpot_ms),
        )
        self.canaries.concluded(execution)

    def release(self, execution: Execution, reason: FinishReason) -> None:
        """It ends before it is dispatched."""
        execution.end_record = ReleaseRecord(9, 0, execution.id, Status.EXPIRED, reason, (), Timing())
        self.canaries.concluded(execution)

    def evidence(self, rollout: str = "ro-1") -> Evidence:
        """Of the rollout's present step."""
        step = self.canaries.step_of(rollout)
        assert step is not None
        return step.window.evidence()


def asked(revision: str, **changes: Any) -> Acquire:
    """A question about `assistant`, pinned to a revision."""
    return msgspec.structs.replace(ASKED, revision=revision, **changes)


def test_a_request_counts_for_the_arm_that_it_is_pinned_to() -> None:
    """Protects the comparison: the pin decides, not the weight, and one by another configuration counts for neither."""
    stand = Stand(ALIAS, Alias("plain", STABLE, 64))
    arms = {Arm.CANARY: TRIED, Arm.STABLE: STABLE}
    for arm, revision in arms.items():
        assignment = stand.canaries.assignment_of(asked(revision))
        assert assignment is not None and assignment.arm is arm
    for other in (asked("sim@0"), asked(STABLE, alias="plain"), asked(STABLE, alias="unknown")):
        assert stand.canaries.assignment_of(other) is None


def test_without_a_canary_nothing_is_gathered() -> None:
    """Protects the usual cell: no request is evidence of anything, and ends cost nothing."""
    stand = Stand(replace(ALIAS, canary=None))
    execution = stand.admit(STABLE)
    assert execution.assignment is None
    stand.end(execution, 10.0)
    assert stand.canaries.steps == [] and stand.canaries.step_of("ro-1") is None


def test_a_tenants_own_name_counts_for_itself() -> None:
    """Protects one tenant's rollout from another's requests: the same name is two aliases, by the rule of resolution."""
    own = replace(ALIAS, tenant="acme", canary=replace(CANARY, rollout="ro-2"))
    stand = Stand(ALIAS, own, Alias("assistant", STABLE, 64, tenant="globex"))
    stand.end(stand.admit(tenant="acme"), 10.0)
    stand.end(stand.admit(tenant="umbrella"), 10.0)
    stand.end(stand.admit(tenant="umbrella"), 10.0)
    assert stand.admit(tenant="globex").assignment is None
    assert (stand.evidence("ro-1").canary.requests, stand.evidence("ro-2").canary.requests) == (2, 1)


def test_a_request_counts_once() -> None:
    """Protects counts: what is told of an end again changes nothing."""
    stand = Stand(ALIAS)
    execution = stand.admit()
    for _ in range(2):
        stand.end(execution, 10.0)
    assert stand.evidence().canary == Tally(1)


def test_evidence_goes_on_while_rollout_and_step_are_the_same() -> None:
    """Protects what was gathered: other changes of the configuration, also of the weight, lose nothing of it."""
    stand = Stand(ALIAS)
    running = stand.admit()
    stand.end(stand.admit(), 10.0)
    heavier = replace(ALIAS, canary=replace(CANARY, weight=50))
    for alias in (ALIAS, heavier):
        stand.canaries.publish(snapshot_of(alias, Alias("other", STABLE, 1)))
    stand.end(running, 10.0)
    assert stand.evidence().canary == Tally(2)
    assert [step.canary.weight for step in stand.canaries.steps] == [50]


def test_another_step_or_rollout_begins_anew() -> None:
    """Protects the comparison over the same time: what was admitted before, short or long, says nothing of the new step."""
    stand = Stand(ALIAS)
    for canary in (replace(CANARY, step=1), replace(CANARY, rollout="ro-2")):
        before = [stand.admit(TRIED), stand.admit(STABLE)]
        stand.canaries.publish(snapshot_of(replace(ALIAS, canary=canary)))
        for execution in before:
            stand.end(execution, 10.0)
        assert stand.evidence(canary.rollout) == Evidence()
        stand.end(stand.admit(), 10.0)
        assert stand.evidence(canary.rollout).canary == Tally(1)
    assert stand.canaries.step_of("ro-1") is None


def test_a_canary_that_is_gone_leaves_nothing() -> None:
    """Protects memory and the next rollout: its window goes with it, and one that comes back begins anew."""
    stand = Stand(ALIAS)
    before = stand.admit()
    stand.canaries.publish(snapshot_of(replace(ALIAS, canary=None)))
    assert stand.canaries.steps == []
    stand.canaries.publish(snapshot_of(ALIAS))
    stand.end(before, 10.0)
    assert stand.evidence() == Evidence()


def test_first_token_is_measured_from_the_first_dispatch() -> None:
    """Protects clients of a canary that loses attempts: the time that a lost one took is in what its answer took."""
    stand = Stand(ALIAS)
    for _ in range(4):
        stand.end(stand.admit(STABLE), 1_000.0)
    stand.end(stand.admit(), 1_250.0)
    assert stand.evidence().first_token == Pairs(1, 0)
    stand.end(stand.admit(), None, 1_260.0)
    assert stand.evidence().first_token == Pairs(2, 1)
    stand.end(stand.admit(), 10.0, 1_260.0)  # what the lost attempt had was not handed out
    assert stand.evidence().first_token == Pairs(3, 2)
    stand.end(stand.admit(), None, None)
    assert stand.evidence().first_token == Pairs(3, 2)


def test_lengths_and_later_tokens_are_those_of_the_settlement() -> None:
    """Protects the comparison of lengths and pace: as settled, by the tolerances of the alias's canary."""
    stand = Stand(replace(ALIAS, canary=replace(CANARY, tolerances=Tolerances(per_token_percent=100, output_percent=0))))
    for _ in range(2):
        stand.end(stand.admit(STABLE), 10.0, tpot_ms=10.0, tokens=100)
    stand.end(stand.admit(), 10.0, tpot_ms=20.0, tokens=101)
    evidence = stand.evidence()
    assert (evidence.per_token, evidence.longer_output, evidence.shorter_output) == (Pairs(1, 0), Pairs(1, 1), Pairs(1, 0))
    stand.end(stand.admit(), 10.0, tpot_ms=20.1, tokens=99)
    evidence = stand.evidence()
    assert (evidence.per_token, evidence.longer_output, evidence.shorter_output) == (Pairs(2, 1), Pairs(2, 1), Pairs(2, 1))


def test_what_never_reached_a_replica_says_nothing() -> None:
    """Protects a canary from a full queue; only that there is no replica to wait for is its own doing."""
    stand = Stand(ALIAS)
    for reason in (FinishReason.QUEUE_WAIT, FinishReason.DEADLINE, FinishReason.DISCONNECT):
        stand.release(stand.admit(), reason)
    assert stand.evidence() == Evidence()
    stand.release(stand.admit(), FinishReason.NO_CAPACITY)
    assert stand.evidence().canary == Tally(1, errors=1)


def test_what_runs_on_a_revision_is_counted_whatever_it_is_evidence_of() -> None:
    """Protects what still runs as a canary goes back: its replicas are needed until nothing of the revision is live."""
    stand = Stand(ALIAS)
    one, other = stand.admit(), stand.admit(STABLE)
    stand.canaries.publish(snapshot_of(replace(ALIAS, canary=None)))
    late = stand.admit()
    assert (stand.canaries.running_on(TRIED), stand.canaries.running_on(STABLE)) == (2, 1)
    for execution in (one, other):
        stand.end(execution, 10.0)
        stand.executions.end(execution)
    assert (stand.canaries.running_on(TRIED), stand.canaries.running_on(STABLE)) == (1, 0)
    stand.executions.end(late)
    assert stand.canaries.running_on(TRIED) == 0
