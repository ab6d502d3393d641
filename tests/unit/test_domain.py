"""A domain's account of what requests cost and how long they take, against reports that are absurd or beside the point."""

from dataclasses import replace

import msgspec
import pytest
from tests.contract.stores import settle
from tests.unit.test_timelines import execution_of

from weir.config import CoordinatorConfig
from weir.coordinator.domain import Domain
from weir.coordinator.execution import Execution, Placement
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import SettleRecord
from weir.core.routing.replica import Replica, ReplicaLimits
from weir.core.scheduling.fairness import FairOrder, TokenCosts
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import Waiting
from weir.units import NANOS_PER_SECOND as SECOND
from weir.units import Nanos

REPLICA = Replica("r", "pool", ReplicaLimits(4))
ABSURD = 2**31 - 1


class Stand:
    """A domain, and executions that pass through it."""

    def __init__(self) -> None:
        self.domain = Domain(CoordinatorConfig(), FairOrder(), OutputLengths())
        self.numbers = 0

    def waiting(self, tenant: str = "acme") -> Execution:
        """One more that waits."""
        self.numbers += 1
        execution = execution_of(f"r{self.numbers}", tenant=tenant)
        self.domain.push(execution)
        return execution

    def started(self, tenant: str = "acme", now_ns: Nanos = 0) -> Execution:
        """One that takes a lane, whoever else waits."""
        execution = self.waiting(tenant)
        self.domain.serve(Waiting(tenant, execution.id), execution, now_ns)
        execution.placements.append(Placement(REPLICA, 0, 1, now_ns))
        return execution

    def end(self, execution: Execution, record: SettleRecord, now_ns: Nanos) -> None:
        """It ends so, and its lane is free."""
        execution.end_record = record
        self.domain.ended(execution)
        self.domain.lane_freed(execution, execution.placements[-1], now_ns)

    def predicted_ms(self, now_ns: Nanos) -> int:
        """What a newcomer behind ten others is told, all lanes taken."""
        return self.domain.predicted_wait_ms("newcomer", 4, 0, now_ns)


def record(execution: Execution, **fields: object) -> SettleRecord:
    """A settlement of its own size, or as given."""
    worst = execution.admit.worst
    whole = msgspec.structs.replace(
        settle(9, execution.id), input_tokens=worst.input_tokens, cached_input_tokens=0, output_tokens=worst.output_tokens
    )
    return msgspec.structs.replace(whole, **fields)


def test_what_an_engine_reports_beyond_the_worst_case_costs_its_tenant_no_more() -> None:
    """Protects a tenant from an engine's nonsense: its next request still has its turn after a few of the others'."""
    stand = Stand()
    victim = stand.started("victim")
    stand.waiting("victim")
    for _ in range(40):
        stand.waiting("busy")
    stand.end(victim, record(victim, input_tokens=ABSURD, cached_input_tokens=ABSURD, output_tokens=ABSURD), SECOND)
    turns = 0
    while (waiting := next(stand.domain.queue.candidates())).tenant != "victim":
        stand.domain.queue.serve(waiting)
        turns += 1
    assert turns < 20


@pytest.mark.parametrize(
    ("status", "reason", "input_tokens"),
    [
        (Status.FAILED, FinishReason.ENGINE_REJECTED, 0),
        (Status.CANCELLED, FinishReason.DISCONNECT, 5),
        (Status.COMPLETED, FinishReason.STOP, ABSURD),
    ],
)
def test_no_tenant_opens_the_door_for_everybody(status: Status, reason: FinishReason, input_tokens: int) -> None:
    """Protects predictions: refused at once, cancelled at once or absurdly counted requests are no evidence of speed."""
    stand = Stand()
    for _ in range(10):
        stand.waiting()
    before_ms = stand.predicted_ms(SECOND)
    for _ in range(50):
        execution = stand.started("odd", SECOND)
        odd = record(execution, status=status, finish_reason=reason, input_tokens=input_tokens, output_tokens=ABSURD)
        stand.end(execution, odd, SECOND + (SECOND if status is Status.COMPLETED else SECOND // 500))
    assert stand.predicted_ms(SECOND) > 0.9 * before_ms


def test_what_an_engine_refused_costs_no_turn() -> None:
    """Protects callers whose input was bounded from above: a refusal took nothing from anybody."""
    stand = Stand()
    for _ in range(3):
        stand.waiting("busy")
    refused = stand.started("acme")
    stand.waiting("acme")
    for _ in range(2):
        waiting = next(stand.domain.queue.candidates())
        assert waiting.tenant == "busy"
        ticket = stand.domain.queue.serve(waiting)
        assert ticket is not None
        stand.domain.queue.correct(ticket, 100)
    stand.end(refused, record(refused, status=Status.FAILED, finish_reason=FinishReason.ENGINE_REJECTED), SECOND)
    assert next(stand.domain.queue.candidates()).tenant == "acme"


def test_cached_input_does_not_make_the_door_stricter() -> None:
    """Protects callers with a warm cache: what waits and what ended are counted in the same measure."""
    stand, plain = Stand(), Stand()
    for each, cached in ((stand, 9), (plain, 0)):
        for _ in range(20):
            execution = each.started("acme", SECOND)
            each.end(execution, record(execution, input_tokens=10, cached_input_tokens=cached), 2 * SECOND)
        for _ in range(10):
            each.waiting()
    assert stand.predicted_ms(2 * SECOND) == pytest.approx(plain.predicted_ms(2 * SECOND), rel=0.01)


def test_with_a_free_lane_a_newcomer_does_not_wait_for_a_retry() -> None:
    """Protects newcomers: one that avoids the replica with the free lane does not use it up."""
    stand = Stand()
    lost = stand.started()
    stand.domain.push_ahead(lost, "r")
    assert stand.domain.predicted_wait_ms("newcomer", 4, 1, 0) == 0
    assert stand.domain.predicted_retry_ms(4, 0, 0) > 0


def test_output_beyond_the_expected_is_charged_while_it_runs() -> None:
    """Protects the others from a long answer: its tenant's turn moves back with each step of it, and not before."""
    stand = Stand()
    running = stand.started("long")
    ticket = running.ticket
    assert ticket is not None
    stand.domain.produced(running, 0)
    assert running.ticket == ticket
    stand.domain.produced(running, 10_000)
    assert running.ticket == replace(ticket, cost=TokenCosts().cost(running.admit.worst.input_tokens, 0, 10_000))
