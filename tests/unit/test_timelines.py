"""Protects the ring of timelines: bounded in requests and in events, oldest first, and one tenant's apart from another's."""

import msgspec
import pytest
from tests.simulation.test_late_messages import ASKED

from weir import errors
from weir.coordinator.candidates import CANDIDATES_MAX, Candidate, Candidates, WhyNot, candidates_of
from weir.coordinator.execution import Execution, Placement
from weir.coordinator.explain import EVENTS_MAX, DoorFigures, Timelines
from weir.core.admission import Admit
from weir.core.endings import FinishReason
from weir.core.ledger.book import Taken
from weir.core.ledger.records import BucketTake, ExecutionId
from weir.core.ledger.reservation import Held
from weir.core.metering import worst_case
from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES
from weir.core.request import Queued
from weir.core.routing.capacity import NOTHING, Need
from weir.core.routing.prefixes import PrefixIndex
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits
from weir.core.tenancy import ServiceClass, scopes_of
from weir.messages import Finish, Stopped
from weir.sim.world import REVISION

WALL_MS = 1_700_000_000_000
WORST = worst_case(REVISION.price, ASKED.input_tokens, ASKED.max_output_tokens, 1)
SCOPES = scopes_of(ASKED.tenant, ASKED.application, ASKED.key, ASKED.alias, ServiceClass.INTERACTIVE)
TAKEN = Taken(("day/2023-11-14", "lifetime"), (BucketTake(None, None, None, "tokens_per_minute", 15),))
LIMITED = errors.BudgetExhausted("Not today.", members={"scope": {"tenant": ASKED.tenant}, "limit": 3, "used": 2, "held": 1})


class ManualClock:
    """Moves when it is told to; both clocks together."""

    now_ms = 0

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return WALL_MS + self.now_ms


def execution_of(request_id: str, number: int = 1, tenant: str = ASKED.tenant, arrived_ms: int = 0) -> Execution:
    """An execution that was admitted 1 ms after its arrival."""
    arrived_ns = arrived_ms * 1_000_000
    return Execution(
        id=ExecutionId(tenant, request_id, number),
        acquire=msgspec.structs.replace(ASKED, request_id=request_id, tenant=tenant),
        admit=Admit(number, REVISION, REVISION.price, SCOPES, WORST),
        session="gateway",
        pool="pool",
        arrived_ns=arrived_ns,
        admitted_ns=arrived_ns + 1_000_000,
        deadline_ns=arrived_ns + 60_000_000_000,
        state=Queued(arrived_ms, arrived_ms + 1),
        reservation=Held(WORST),
        workload=DEFAULT_WORKLOAD_CLASSES[0],
    )


def admit(timelines: Timelines, execution: Execution) -> Execution:
    """Tell of an admission behind two others."""
    timelines.admitted(execution, TAKEN, DoorFigures("pool", 4, 0, 2, 750, 30))
    return execution


def events_of(timelines: Timelines, request_id: str = "it") -> list[str]:
    """Names of the events of an id's latest timeline."""
    return [event["event"] for event in timelines.of(request_id)[0]["events"]]


def test_the_oldest_request_is_forgotten_first_and_what_is_said_of_it_is_dropped() -> None:
    """Protects memory: at most so many requests are kept, fewer of the rejected, and it is said since when all are there."""
    clock = ManualClock()
    timelines = Timelines(clock, 3)
    assert (len(timelines), timelines.since_ms) == (0, WALL_MS)
    executions = []
    for number in range(5):
        clock.now_ms = 10 * number + 1
        executions.append(admit(timelines, execution_of(f"id-{number}", arrived_ms=10 * number)))
    assert (len(timelines), timelines.since_ms) == (3, WALL_MS + 11)
    for number in range(50, 55):
        clock.now_ms = number
        timelines.rejected(msgspec.structs.replace(ASKED, request_id=f"refused-{number}"), LIMITED, None)
    assert (len(timelines), timelines.since_ms) == (4, WALL_MS + 53)
    assert timelines.of("refused-54") and not timelines.of("refused-53")
    assert all(timelines.of(kept.id.request_id) for kept in executions[2:]), "a loop that is refused evicts nobody's execution"
    for forgotten in executions[:2]:
        timelines.first_output(forgotten)
        timelines.considered(forgotten, Candidates())
        timelines.stepped(forgotten)
        assert timelines.of(forgotten.id.request_id) == []


def test_a_request_keeps_its_latest_events() -> None:
    """Protects memory: an execution has a bounded number of events, and says how many older ones it had."""
    timelines = Timelines(ManualClock(), 3)
    execution = admit(timelines, execution_of("it"))
    for number in range(2 * EVENTS_MAX):
        timelines.queued(execution, 0, number)
    [shown] = timelines.of("it")
    assert shown["dropped_events"] == EVENTS_MAX + 1
    assert [event["ahead"] for event in shown["events"][1:]] == [*range(EVENTS_MAX, 2 * EVENTS_MAX)]
    assert shown["events"][0]["event"] == "received"


def test_a_head_that_is_considered_often_takes_one_event() -> None:
    """Protects the rest of a timeline from a request that waits at the head of a full pool: the last look and their number."""
    timelines = Timelines(ManualClock(), 3)
    execution = admit(timelines, execution_of("it"))
    for running in range(200):
        timelines.considered(execution, Candidates([Candidate("first", 0, running, 70, 7, why_not=WhyNot.FULL)]))
    timelines.queued(execution, 0, 0)
    timelines.considered(execution, Candidates())
    [shown] = timelines.of("it")
    assert [event["event"] for event in shown["events"]] == ["received", "admitted", "considered", "queued", "considered"]
    assert shown["events"][2]["times"] == 200
    seen = {"replica": "first", "free": 0, "running": 199, "kv_tokens": 70, "prefill_tokens": 7, "why_not": "full"}
    assert shown["events"][2]["candidates"] == [seen]
    assert shown["events"][4] == {"event": "considered", "at_ms": 0.0, "times": 1}


def test_of_many_candidates_some_are_kept_and_the_chosen_one() -> None:
    """Protects memory in a large pool, and the answer to who took it: a few candidates, and how many more there were."""
    timelines = Timelines(ManualClock(), 3)
    execution = admit(timelines, execution_of("it"))
    replicas = [Replica(f"replica-{number}", "pool", ReplicaLimits(2)) for number in range(33)]
    timelines.considered(execution, candidates_of(replicas, NOTHING, PrefixIndex(), chosen=replicas[30]))
    [*_, looked] = timelines.of("it")[0]["events"]
    assert len(looked["candidates"]) == CANDIDATES_MAX and looked["more_candidates"] == 33 - CANDIDATES_MAX
    assert [one["replica"] for one in looked["candidates"][-2:]] == ["replica-6", "replica-30"]


def test_candidates_say_why_a_replica_does_not_take_it() -> None:
    """Protects the reasons of a placement: full, avoided, not ready or no room, and else the tokens that were compared."""
    names = ("idle", "half", "busy", "failed", "holding", "crowded", "starting")
    replicas = [Replica(name, "pool", ReplicaLimits(2)) for name in names]
    for replica in replicas[:-1]:
        replica.advance(ReplicaEvent.ANSWERED)
    for replica in (replicas[1], replicas[2], replicas[2], replicas[5]):
        replica.take_lane(100, 40)
    replicas[5].room.kv_tokens_max = 150
    index, prefix = PrefixIndex(), (b"first", b"second")
    index.placed("holding", prefix[:1], 32)
    assert candidates_of(replicas, Need(80, 64, prefix, 1_024), index, "failed").kept == [
        Candidate("idle", 2, 0, 0, 0, None, 128),
        Candidate("half", 1, 1, 100, 40, None, 168),
        Candidate("busy", 0, 2, 200, 80, why_not=WhyNot.FULL),
        Candidate("failed", 2, 0, 0, 0, why_not=WhyNot.AVOIDED),
        Candidate("holding", 2, 0, 0, 0, 32, 64),
        Candidate("crowded", 1, 1, 100, 40, why_not=WhyNot.NO_ROOM),
        Candidate("starting", 0, 0, 0, 0, why_not=WhyNot.NOT_READY),
    ]


def test_a_replica_on_trial_says_so() -> None:
    """Protects the answer to why an almost empty replica takes nothing: it is tried with one request at a time."""
    replica = Replica("tried", "pool", ReplicaLimits(2), back_off_ms=1)
    replica.advance(ReplicaEvent.ANSWERED)
    for _ in range(2):
        replica.attempt_ended(None, FinishReason.STALLED, 0, showed_output=False)
        replica.answered(0)
    replica.answered(1_000_000)
    replica.take_lane()
    [seen] = candidates_of([replica], NOTHING, PrefixIndex()).kept
    assert seen == Candidate("tried", 0, 1, 0, 0, why_not=WhyNot.ON_TRIAL)


def test_executions_and_rejections_of_an_id_stand_beside_each_other() -> None:
    """Protects a re-run and a conflict from hiding the run before: the latest comes first, a repeated rejection is one."""
    clock = ManualClock()
    timelines = Timelines(clock, 10)
    admit(timelines, execution_of("it"))
    for _ in range(3):
        timelines.rejected(msgspec.structs.replace(ASKED, request_id="it"), errors.RequestInFlight("It runs."), None)
    admit(timelines, execution_of("it", 2))
    shown = [(one["execution"], one["status"], one["rejections"]) for one in timelines.of("it")]
    assert shown == [(2, "queued", None), (None, "rejected", 3), (1, "queued", None)]
    assert len(timelines) == 3


def test_a_tenants_request_is_its_own() -> None:
    """Protects isolation: the same id of another tenant is another timeline, and is not part of this one's."""
    timelines = Timelines(ManualClock(), 10)
    for tenant in ("tenant-0", "tenant-1"):
        admit(timelines, execution_of("it", tenant=tenant))
    assert [one["tenant"] for one in timelines.of("it")] == ["tenant-1", "tenant-0"]
    assert [one["tenant"] for one in timelines.of("it", "tenant-0")] == ["tenant-0"]
    assert timelines.of("it", "tenant-2") == []


def test_an_admission_shows_what_is_held_and_the_door() -> None:
    """Protects the figures of an admission: the worst case, its windows, scopes and takes, and the queue before it."""
    timelines = Timelines(ManualClock(), 10)
    admit(timelines, execution_of("it"))
    [shown] = timelines.of("it")
    received, admitted = shown["events"]
    assert (received["at_ms"], received["alias"], received["deadline_ms"]) == (0.0, "assistant", 60_000)
    assert admitted == {
        "event": "admitted",
        "at_ms": 1.0,
        "held_microusd": WORST.cost_microusd,
        "held_tokens": 15,
        "worst_input_tokens": 5,
        "worst_output_tokens": 10,
        "windows": ["day/2023-11-14", "lifetime"],
        "scopes": [scope.public() for scope in SCOPES],
        "takes": [{"limit": "tokens_per_minute", "units": 15}],
        "door": {"pool": "pool", "lanes": 4, "free": 0, "waiting": 2, "predicted_wait_ms": 750, "prefill_ms": 30},
    }
    assert not {"session_key", "body_digest"} & received.keys()


def test_a_rejection_shows_the_callers_figures() -> None:
    """Protects the answer to "why was I refused": the code, the members of the refusal, and the wait there would have been."""
    clock = ManualClock()
    timelines = Timelines(clock, 10)
    clock.now_ms = 7
    timelines.rejected(msgspec.structs.replace(ASKED, waited_ns=2_500_000), LIMITED, DoorFigures("pool", 4, 0, 2, 40, 30))
    [shown] = timelines.of("it")
    assert (shown["status"], shown["execution"], shown["arrived_at_ms"]) == ("rejected", None, WALL_MS + 5)
    assert shown["events"][1] == {
        "event": "rejected",
        "at_ms": 2.5,
        "code": "budget_exhausted",
        "detail": "Not today.",
        "figures": LIMITED.members,
        "predicted_wait_ms": 40,
        "door": {"pool": "pool", "lanes": 4, "free": 0, "waiting": 2, "predicted_wait_ms": 40, "prefill_ms": 30},
    }


@pytest.mark.parametrize("said", [1, 2])
def test_an_attempt_is_dispatched_once_however_often_it_is_said(said: int) -> None:
    """Protects the order of a retried execution: dispatched, lost, queued ahead, dispatched again; its first word counts."""
    timelines = Timelines(ManualClock(), 10)
    execution, failed = admit(timelines, execution_of("it")), Finish(1, 1, FinishReason.REPLICA_LOST)
    for attempt, name in enumerate(("first", "second"), 1):
        replica = Replica(name, "pool", ReplicaLimits(2))
        execution.placements.append(Placement(replica, 0, attempt, attempt * 2_000_000))
        for _ in range(said):
            timelines.dispatched(execution, replica, Candidates([Candidate(name, 2, 0, 0, 0, None, 5)]))
        if attempt == 1:
            timelines.finished(execution, failed)
            timelines.lost(execution, failed)
            assert timelines.of("it")[0]["status"] == "queued"
            timelines.queued(execution, 0, 0)
    timelines.stopped(execution, Stopped(1, 2, 3.25))
    lost = ["finished", "lost", "queued"]
    assert events_of(timelines) == ["received", "admitted", "dispatched", *lost, "dispatched", "stopped"]
    [shown] = timelines.of("it")
    assert shown["status"] == "running"
    assert shown["events"][6] == {
        "event": "dispatched",
        "at_ms": 4.0,
        "attempt": 2,
        "replica": "second",
        "lane": 0,
        "candidates": [{"replica": "second", "free": 2, "running": 0, "kv_tokens": 0, "prefill_tokens": 0, "score": 5}],
    }
    assert shown["events"][4] == {"event": "lost", "at_ms": 0.0, "attempt": 1, "reason": "replica_lost"}
    assert shown["events"][7] == {"event": "stopped", "at_ms": 0.0, "attempt": 2, "stop_ms": 3.25, "confirmed": True}
