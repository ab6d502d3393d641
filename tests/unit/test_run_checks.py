"""What watches a run notices what is wrong, its clock keeps everything in its time, and its figures are exact."""

import asyncio
from collections.abc import Callable

import pytest

from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES, EngineKind
from weir.messages import Granted, ReplicaAddress
from weir.sim.runs.arrivals import Arrival
from weir.sim.runs.backlog import Backlog
from weir.sim.runs.courses import Course
from weir.sim.runs.figures import percentiles, window_seconds
from weir.sim.runs.oversight import Oversight
from weir.sim.runs.step_clock import StepClock
from weir.sim.virtual_loop import VirtualLoop, run
from weir.units import ns_from_ms


def course(ref: int = 1, *, admitted: bool = True) -> Course:
    """A request, admitted or not."""
    made = Course(ref, Arrival(0.0, "a", 10, 10), DEFAULT_WORKLOAD_CLASSES[0], 0)
    made.is_admitted = admitted
    return made


def grant(lane: int = 0, attempt: int = 1, replica: str = "r1") -> Granted:
    """A grant on a replica of two lanes."""
    address = ReplicaAddress(replica, "pool", "revision", EngineKind.SIMULATED, "", "revision", 1_000)
    return Granted(1, attempt, address, lane, 256)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def _granted_before_admission(oversight: Oversight) -> None:
    oversight.granted(course(admitted=False), grant())


def _granted_on_a_busy_lane(oversight: Oversight) -> None:
    oversight.granted(course(1), grant())
    oversight.granted(course(2), grant())


def _granted_above_concurrency(oversight: Oversight) -> None:
    oversight.granted(course(), grant(lane=2))


def _granted_on_a_lost_replica(oversight: Oversight) -> None:
    oversight.replica_gone("r1")
    oversight.granted(course(), grant())


def _granted_out_of_turn(oversight: Oversight) -> None:
    oversight.granted(course(), grant(attempt=2))


def _granted_a_third_time(oversight: Oversight) -> None:
    third = course()
    third.attempt = 2
    oversight.granted(third, grant(attempt=3))


def _granted_after_output(oversight: Oversight) -> None:
    delivered = course()
    delivered.attempt, delivered.handed_ns = 1, 5
    oversight.granted(delivered, grant(attempt=2))


def _admitted_twice(oversight: Oversight) -> None:
    oversight.admitted(course())


def _ended_twice(oversight: Oversight) -> None:
    ended = course()
    ended.is_ended = True
    oversight.ended(ended, admitted=True)


def _ended_without_admission(oversight: Oversight) -> None:
    oversight.ended(course(admitted=False), admitted=True)


def _left_a_request_open(oversight: Oversight) -> None:
    oversight.asked()
    oversight.at_rest({})


def _left_a_lane_taken(oversight: Oversight) -> None:
    oversight.granted(course(), grant())
    oversight.at_rest({})


def _left_a_hold_open(oversight: Oversight) -> None:
    oversight.at_rest({"open holds": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        *[_granted_before_admission, _granted_on_a_busy_lane, _granted_above_concurrency, _granted_on_a_lost_replica],
        *[_granted_out_of_turn, _granted_a_third_time, _granted_after_output, _admitted_twice, _ended_twice],
        *[_ended_without_admission, _left_a_request_open, _left_a_lane_taken, _left_a_hold_open],
    ],
)
def test_the_oversight_notices(wrong: Callable[[Oversight], None]) -> None:
    """Protects the checks themselves: each breach ends the run."""
    with pytest.raises(AssertionError):
        wrong(Oversight(2))


def test_the_oversight_lets_pass_what_is_right() -> None:
    """Protects runs from false alarms: a request that runs, is lost with its replica, runs again and ends."""
    oversight, whole = Oversight(2), course(admitted=False)
    oversight.asked()
    oversight.admitted(whole)
    whole.is_admitted = True
    oversight.granted(whole, grant())
    whole.attempt = 1
    oversight.replica_gone("r1")
    oversight.granted(whole, grant(attempt=2, replica="r2"))
    oversight.lane_freed("r1", 0)
    oversight.lane_freed("r2", 0)
    oversight.ended(whole, admitted=True)
    oversight.at_rest({"open holds": 0})


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_timers_and_what_is_ready_come_in_the_order_of_time() -> None:
    """Protects fidelity: a leap never passes a timer, nor what a step made ready, and steps of one instant keep their order."""
    seen: list[tuple[str, float]] = []

    async def live() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = StepClock(loop)

        def note(name: str) -> Callable[[], None]:
            return lambda: seen.append((name, loop.now_ns / 1e6))

        def step() -> None:
            note("step")()
            clock.soon(note("ready"))
            clock.after(ns_from_ms(1), note("later step"))

        loop.call_later(0.002, note("timer"))
        clock.after(ns_from_ms(3), note("last"))
        clock.after(ns_from_ms(1), step)
        clock.after(ns_from_ms(1), note("second"))
        await asyncio.sleep(0.01)

    run(live(), until_ms=1_000)
    names = ["step", "second", "ready", "timer", "later step", "last"]
    assert seen == list(zip(names, [1.0, 1.0, 1.0, 2.0, 2.0, 3.0], strict=True))


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_nearest_ranks() -> None:
    """Protects figures: a percentile is a value that occurred."""
    assert percentiles([]) is None
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0}
    assert percentiles([float(value) for value in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
    assert [window_seconds(span_s) for span_s in (1, 240, 241, 3_600, 86_400)] == [1, 1, 2, 20, 600]


def test_the_fairness_gap_counts_only_while_both_wait() -> None:
    """Protects the fairness gap: service while the other does not wait is nobody's loss; weights divide it."""
    backlog = Backlog({"b": 2})
    backlog.serve("a", 1_000, 0)
    backlog.waits("a", 1)
    backlog.waits("b", 1)
    backlog.serve("a", 100, 10)  # 140 for a
    backlog.serve("b", 0, 100)  # 200 for b, by its weight
    assert (backlog.gap, backlog.between) == (200.0, ("a", "b"))
    backlog.waits("b", 1)
    backlog.waits("b", -1)
    backlog.serve("b", 0, 100)
    assert backlog.gap == 400.0
    backlog.waits("b", -1)
    backlog.serve("a", 5_000, 0)
    backlog.waits("a", -1)
    assert backlog.is_empty and backlog.gap == 400.0
