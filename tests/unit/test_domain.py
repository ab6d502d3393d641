"""A domain's account of what requests cost and how long they take, against reports that are absurd or beside the point."""

from dataclasses import replace

import msgspec
import pytest
from tests.contract.stores import settle
from tests.simulation.test_late_messages import ASKED
from tests.unit.test_timelines import execution_of

from weir.config import CoordinatorConfig
from weir.coordinator.domain import Domain, Lanes
from weir.coordinator.execution import Execution, Placement
from weir.core.admission import Door, Times, door_refusal
from weir.core.endings import FinishReason, Status
from weir.core.ledger.records import SettleRecord, Timing
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES
from weir.core.routing.capacity import Need
from weir.core.routing.replica import Replica, ReplicaLimits
from weir.core.scheduling.fairness import FairOrder, TokenCosts
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.scheduling.queues import Waiting
from weir.messages import ReplicaPace
from weir.sim.world import REVISION
from weir.units import NANOS_PER_SECOND as SECOND
from weir.units import Nanos

REPLICA = Replica("r", "pool", ReplicaLimits(4))
ABSURD = 2**31 - 1
FOUR = Lanes(4, 4.0)
SHORT, LONG, _ = DEFAULT_WORKLOAD_CLASSES


class Stand:
    """A domain, and executions that pass through it."""

    def __init__(self) -> None:
        self.domain = Domain(CoordinatorConfig(), FairOrder(), OutputLengths())
        self.numbers = 0

    def waiting(self, tenant: str = "acme") -> Execution:
        """One more that waits."""
        self.numbers += 1
        execution = execution_of(f"r{self.numbers}", tenant=tenant)
        execution.need = self.domain.need_of(execution.acquire, REVISION, execution.workload)
        self.domain.push(execution)
        return execution

    def started(self, tenant: str = "acme", now_ns: Nanos = 0) -> Execution:
        """One that takes a lane, whoever else waits."""
        execution = self.waiting(tenant)
        self.domain.serve(Waiting(tenant, execution.id), execution, now_ns)
        execution.placements.append(Placement(REPLICA, 0, 1, now_ns))
        return execution

    def end(self, execution: Execution, record: SettleRecord, now_ns: Nanos = 0) -> None:
        """It ends so, and its lane is free."""
        execution.end_record = record
        self.domain.ended(execution)
        self.domain.lane_freed(execution, execution.placements[-1], now_ns)

    def predicted_ms(self, now_ns: Nanos) -> int:
        """What a newcomer behind ten others is told, all lanes taken."""
        return self.domain.predicted_wait_ms("newcomer", FOUR, 0, now_ns)


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
    assert stand.domain.predicted_wait_ms("newcomer", FOUR, 1, 0) == 0
    assert stand.domain.predicted_retry_ms(FOUR, 0, 0) > 0


def test_output_beyond_the_expected_is_charged_while_it_runs() -> None:
    """Protects the others from a long answer: its tenant's turn moves back with each step of it, and not before."""
    stand = Stand()
    running = stand.started("long")
    ticket = running.ticket
    assert ticket is not None
    stand.domain.produced(running, 0)
    assert running.ticket == ticket
    stand.domain.produced(running, 10_000)
    assert running.ticket == msgspec.structs.replace(
        ticket, cost=TokenCosts().cost(running.admit.worst.input_tokens, 0, 10_000)
    )


def test_a_request_needs_its_input_and_its_expected_output_for_every_choice() -> None:
    """Protects reservations: memory for what is expected, not for the most that is allowed, and what prefixes are read from."""
    domain = Domain(CoordinatorConfig(), FairOrder(), OutputLengths())
    asked = msgspec.structs.replace(
        ASKED, input_tokens=100, max_output_tokens=2_000, choices=3, prefix=(b"mark",), input_bytes=400
    )
    typical = REVISION.typical_output_tokens
    backlogs = LONG.backlog_ms, LONG.of_many_backlog_ms
    assert domain.need_of(asked, REVISION, LONG) == Need(300 + 3 * typical, 300, (b"mark",), 400, *backlogs)
    short = msgspec.structs.replace(asked, max_output_tokens=1)
    assert domain.need_of(short, REVISION, LONG).kv_tokens == 303
    for percent, backlogs in ((100, (20, 3)), (5, (1, 1)), (1, (1, 1)), (500, (100, 15))):
        scaled = Domain(CoordinatorConfig(backlog_percent=percent), FairOrder(), OutputLengths())
        need = scaled.need_of(short, REVISION, SHORT)
        assert (need.backlog_ms, need.of_many_backlog_ms) == backlogs
    need = scaled.need_of(short, REVISION, replace(SHORT, backlog_ms=None, of_many_backlog_ms=None))
    assert (need.backlog_ms, need.of_many_backlog_ms) == (None, None)


def test_an_expected_length_follows_what_ended() -> None:
    """Protects memory from a declared length that is wrong: after a few answers a caller's own lengths count."""
    stand = Stand()
    asked = msgspec.structs.replace(ASKED, max_output_tokens=2_000)
    before = stand.domain.need_of(asked, REVISION, SHORT).kv_tokens
    for _ in range(50):
        execution = stand.started(asked.tenant)
        stand.end(execution, record(execution, output_tokens=1))
    assert stand.domain.need_of(asked, REVISION, SHORT).kv_tokens < before / 2


PACE = ReplicaPace(first_ms=20.0, input_ms=0.5, output_ms=10.0)


def paced_domain() -> Domain:
    """One whose pool has been warmed up."""
    return Domain(CoordinatorConfig(), FairOrder(), OutputLengths(), lambda: PACE)


def test_without_a_warm_up_only_what_was_measured_counts() -> None:
    """Protects callers of a pool whose pace is unknown: no deadline is called infeasible, and nothing is assumed."""
    stand = Stand()
    assert stand.domain.times(Need(200, 100), 0, 0) == Times()
    stand.domain.showed_output(stand.started(), SECOND, 0)
    assert stand.domain.times(Need(200, 100), 0, 0) == Times(prefill_ms=1_000)


def test_an_idle_replicas_times() -> None:
    """Protects the door: what some replica holds is not read, and neither doubt nor an upper bound refuses for good."""
    domain = paced_domain()
    assert domain.times(Need(200, 100), 60, 0) == Times(40, 990, 1_030, 20, 40)
    assert domain.times(Need(200, 100), 0, 0) == Times(70, 990, 1_060, 35, 70)
    assert domain.times(Need(200, 100), 0, 0, is_exact=False) == Times(70, 990, 1_060, 0, 70)


def test_measured_answers_make_the_expected_time_and_leave_the_best_case() -> None:
    """Protects both refusals: what replicas do now is predicted, what is infeasible stays a matter of an idle one."""
    stand = Stand()
    domain = stand.domain = paced_domain()
    execution = stand.started()
    execution.end_record = record(execution, output_tokens=8, timing=Timing(tpot_ms=40.0))
    domain.showed_output(execution, SECOND, 0)
    target_ms = execution.workload.tpot_target_ms
    assert domain.pace_of_answer(execution, 0) == 40.0 / target_ms
    assert domain.times(Need(105, 5), 0, 0) == Times(1_000, 99 * 40, 22 + 990, 11, 22)
    assert domain.times(Need(200, 100), 0, 0) == Times(1_047, 99 * 40, 70 + 990, 35, 70), "more is read as an idle one reads"
    assert domain.times(Need(200, 100), 0, 600 * SECOND) == Times(70, 990, 1_060, 35, 70)


def test_what_was_measured_faster_than_the_warm_up_is_no_infeasible_deadline() -> None:
    """Protects callers from a slow warm-up: the best case is never worse than what was seen."""
    stand = Stand()
    stand.domain = paced_domain()
    stand.domain.showed_output(stand.started(), SECOND // 100, 0)
    assert stand.domain.times(Need(105, 5), 0, 0).least_ms == 10 // 2
    assert stand.domain.times(Need(200, 100), 0, 0).least_ms == (10 + 47) // 2


def test_an_input_longer_than_any_that_was_seen_takes_its_own_time() -> None:
    """Protects callers of long inputs from being admitted in vain: evidence of short ones says nothing about the rest."""
    stand = Stand()
    stand.domain = Domain(CoordinatorConfig(), FairOrder(), OutputLengths(), lambda: ReplicaPace(20.0, 0.17, 13.0))
    for number in range(60):
        execution = stand.started(now_ns=number * SECOND)
        execution.need = msgspec.structs.replace(execution.need, input_tokens=26 + number % 9)
        stand.domain.showed_output(execution, (25 + number % 9) * SECOND // 1_000, number * SECOND)
    times = stand.domain.times(Need(8_100, 8_000), 0, 60 * SECOND)
    assert times.least_ms >= 600 and times.prefill_ms >= 1_200
    refused = door_refusal(Door(4, None, 0, 5_000, times, 5_000), 600)
    assert refused is not None and refused.code == "deadline_infeasible"
    refused = door_refusal(Door(4, None, 0, 5_000, times, 5_000), 1_000)
    assert refused is not None and refused.code == "deadline_unmeetable_now"
    assert stand.domain.times(Need(130, 30), 0, 60 * SECOND).prefill_ms < 40


@pytest.mark.parametrize(
    "fields",
    [
        {"output_tokens": 7},
        {"status": Status.CANCELLED, "finish_reason": FinishReason.DISCONNECT},
        {"timing": Timing()},
    ],
)
def test_short_answers_and_partial_ones_say_nothing_about_the_pace(fields: dict[str, object]) -> None:
    """Protects the limit of a replica from noise: only whole answers of some length are compared with the target."""
    stand = Stand()
    execution = stand.started()
    assert stand.domain.pace_of_answer(execution, 0) is None
    whole = record(execution, **{"output_tokens": 100, "timing": Timing(tpot_ms=40.0)} | fields)
    execution.end_record = whole
    assert stand.domain.pace_of_answer(execution, 0) is None


def test_a_warm_up_sets_the_first_predictions() -> None:
    """Protects the door of a pool that just became ready: an idle replica's pace is expected until something ended."""
    slow = Domain(CoordinatorConfig(), FairOrder(), OutputLengths(), lambda: ReplicaPace(1_000.0, 5.0, 100.0))
    assert slow.predicted_wait_ms("acme", FOUR, 0, 0) > 3 * paced_domain().predicted_wait_ms("acme", FOUR, 0, 0)
    expected_ms = (20 + 50 + 128 * 10) / 4
    assert paced_domain().predicted_wait_ms("acme", FOUR, 0, 0) == pytest.approx(expected_ms, abs=2)


def test_what_is_cached_saves_its_flow_and_no_evidence() -> None:
    """Protects tenants with long common beginnings: their flow pays what is computed, and the pace is told the whole cost."""
    stand = Stand()
    execution = stand.waiting()
    whole = TokenCosts().cost(execution.need.input_tokens, 0, execution.need.kv_tokens - execution.need.input_tokens)
    cost = stand.domain.serve(Waiting("acme", execution.id), execution, 0, cached_tokens=4)
    saved = 4 * (TokenCosts().input - TokenCosts().cached_input)
    assert (cost, execution.cost) == (whole - saved, whole)
    assert execution.ticket is not None and execution.ticket.cost == whole - saved


def test_a_second_attempt_costs_its_class_nothing() -> None:
    """Protects classes from a lost replica: what was dispatched again had its turn before."""
    stand = Stand()
    execution = stand.started()
    stand.domain.push_ahead(execution, "r")
    assert stand.domain.serve(Waiting("acme", execution.id, execution.need, "r"), execution, 0) == 0


# ── the pace of turns ────────────────────────────────────────────────────────────────────────────────────────────────


def turns_of(stand: Stand, number: int = 200, each_ns: Nanos = SECOND // 100, now_ns: Nanos = 0) -> Nanos:
    """So many get their turn, one each time, while ten wait throughout; the time of the last turn. Those ten wait on."""
    waiting = [stand.waiting() for _ in range(10)]
    stand.domain.has_to_wait(4, now_ns)
    for _ in range(number):
        now_ns += each_ns
        waiting.append(stand.waiting())
        execution = waiting.pop(0)
        stand.domain.serve(Waiting("acme", execution.id), execution, now_ns, 4)
        stand.domain.lane_freed(execution, Placement(REPLICA, 0, 1, now_ns), now_ns)
    return now_ns


def test_the_wait_is_the_work_ahead_at_the_pace_of_turns() -> None:
    """Protects newcomers of a pool that is quicker than its warm-up says: ten wait, one has its turn every ten milliseconds."""
    stand = Stand()
    before_ms = stand.domain.predicted_wait_ms("acme", FOUR, 0, 0)
    now_ns = turns_of(stand)
    assert stand.domain.predicted_wait_ms("acme", FOUR, 0, now_ns) == pytest.approx(110, abs=2) != before_ms
    assert stand.domain.predicted_wait_ms("acme", Lanes(2, 2.0), 0, now_ns) == pytest.approx(220, abs=3), "one of two is lost"
    assert stand.domain.predicted_wait_ms("acme", Lanes(4, 1.0), 0, now_ns) == pytest.approx(110, abs=2), "its own turns say so"
    assert stand.domain.predicted_wait_ms("acme", FOUR, 11, now_ns) == 0


def test_a_pool_that_hangs_is_seen_before_anything_ends() -> None:
    """Protects the door: ten seconds without a turn count as they pass."""
    stand = Stand()
    now_ns = turns_of(stand, 1_000)
    waits_ms = [stand.domain.predicted_wait_ms("acme", FOUR, 0, now_ns + passed * SECOND) for passed in (0, 1, 10)]
    assert waits_ms[0] < waits_ms[1] < waits_ms[2] and waits_ms[2] > 1.8 * waits_ms[0]


def test_a_retry_waits_behind_retries_at_the_pace_of_turns() -> None:
    """Protects the second attempt: nobody else's work is before it, and its own pace is that of the pool."""
    stand = Stand()
    now_ns = turns_of(stand)
    lost = stand.started(now_ns=now_ns)
    assert stand.domain.predicted_retry_ms(FOUR, 1, now_ns) == 0
    alone_ms = stand.domain.predicted_retry_ms(FOUR, 0, now_ns)
    stand.domain.push_ahead(lost, "r")
    assert alone_ms == pytest.approx(11, abs=2)
    assert stand.domain.predicted_retry_ms(FOUR, 0, now_ns) == pytest.approx(21, abs=2)


@pytest.mark.parametrize("ending", ["served", "cancelled"])
def test_time_in_which_nobody_waits_does_not_count(ending: str) -> None:
    """Protects the first ones after a quiet hour: however the queue was emptied, the hour is nobody's wait."""
    stand = Stand()
    now_ns = turns_of(stand)
    for _ in range(10):
        waiting = next(stand.domain.queue.candidates())
        execution = execution_of(waiting.key.request_id, tenant=waiting.tenant)
        if ending == "served":
            stand.domain.serve(waiting, execution, now_ns, 4)
        else:
            stand.domain.remove(execution, now_ns)
    assert not stand.domain.queue
    before_ms = stand.domain.predicted_wait_ms("acme", FOUR, 0, now_ns)
    later_ns = now_ns + 10 * SECOND
    assert stand.domain.predicted_wait_ms("acme", FOUR, 0, later_ns) == before_ms
    execution = stand.waiting()
    stand.domain.has_to_wait(4, later_ns)
    stand.domain.serve(Waiting("acme", execution.id), execution, later_ns + SECOND // 100, 4)
    assert stand.domain.predicted_wait_ms("acme", FOUR, 0, later_ns + SECOND // 100) <= before_ms + 1


@pytest.mark.parametrize("quiet_s", [600, 10_500, 8 * 3_600])
def test_one_that_waits_in_vain_after_a_quiet_time_locks_no_door(quiet_s: int) -> None:
    """Protects the door: whatever the pace was before, one that hung up leaves the next one a prediction of ordinary size."""
    stand = Stand()
    now_ns = turns_of(stand)
    for _ in range(10):
        waiting = next(stand.domain.queue.candidates())
        stand.domain.remove(execution_of(waiting.key.request_id, tenant=waiting.tenant), now_ns)
    now_ns += quiet_s * SECOND
    gone = stand.waiting()
    stand.domain.has_to_wait(4, now_ns)
    stand.domain.remove(gone, now_ns + SECOND)
    stand.waiting()
    stand.domain.has_to_wait(4, now_ns + SECOND)
    assert stand.domain.predicted_wait_ms("acme", FOUR, 0, now_ns + SECOND) < 60_000


def test_one_that_leaves_others_waiting_ends_no_wait() -> None:
    """Protects the pace from a client that hangs up: the others go on waiting, and their time goes on counting."""
    stand = Stand()
    now_ns = turns_of(stand)
    gone = stand.waiting()
    stand.domain.remove(gone, now_ns)
    later_ns = now_ns + 5 * SECOND
    assert stand.domain.predicted_wait_ms("acme", FOUR, 0, later_ns) > stand.domain.predicted_wait_ms("acme", FOUR, 0, now_ns)
