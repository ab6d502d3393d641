"""What starts now, and how long a newcomer would wait: late binding, and a prediction that meets evidence."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.placement import place
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits
from weir.core.scheduling.feasibility import LaneOccupancy, predicted_wait_ms
from weir.core.scheduling.queues import DomainQueue, QueueBounds
from weir.core.scheduling.schedule import next_start


def _replica(name: str, pool: str, concurrency: int) -> Replica:
    replica = Replica(name, pool, ReplicaLimits(concurrency))
    replica.advance(ReplicaEvent.ANSWERED)
    return replica


def _queue(*entries: tuple[str, int]) -> DomainQueue[int]:
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for tenant, key in entries:
        queue.push(tenant, key, 1)
    return queue


@given(
    waiting=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 8), max_size=3),
    lanes=st.dictionaries(st.sampled_from("xyz"), st.lists(st.integers(1, 3), max_size=3), max_size=3),
)
def test_dispatch_fills_what_is_free_and_nothing_more(waiting: dict[str, int], lanes: dict[str, list[int]]) -> None:
    """Protects capacity and progress: in each domain as many start as have a lane; a full domain blocks no other."""
    queues = {pool: _queue(*(("t", key) for key in range(number))) for pool, number in waiting.items()}
    fleet = {pool: [_replica(f"{pool}{i}", pool, size) for i, size in enumerate(sizes)] for pool, sizes in lanes.items()}
    started: dict[str, int] = {}
    for _ in range(100):
        start = next_start(queues, fleet)
        if start is None:
            break
        assert start.replica.pool == start.domain and start.replica.free > 0
        assert start.waiting == next(queues[start.domain].candidates())
        queues[start.domain].serve(start.waiting)
        start.replica.take_lane()
        started[start.domain] = started.get(start.domain, 0) + 1
    for pool, number in waiting.items():
        assert started.get(pool, 0) == min(number, sum(lanes.get(pool, [])))


@given(
    failed=st.lists(st.sampled_from(["r0", "r1", "r2", "gone"]), max_size=6),
    fresh=st.integers(0, 4),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_a_retry_starts_elsewhere_and_before_others(failed: list[str], fresh: int, sizes: list[int]) -> None:
    """Protects retries and the rest: never on the replica that failed it, first wherever it fits, and it holds up nobody."""
    queue = _queue(*(("t", key) for key in range(fresh)))
    for number, avoid in enumerate(failed):
        queue.push_ahead("t", 100 + number, 1, avoid)
    replicas = [_replica(f"r{number}", "x", max(1, size)) for number, size in enumerate(sizes)]
    for replica, size in zip(replicas, sizes, strict=True):
        if not size:
            replica.take_lane()  # a full one
    for _ in range(100):
        start = next_start({"x": queue}, {"x": replicas})
        if start is None:
            break
        waiting = start.waiting
        assert start.replica.free > 0 and start.replica.name != waiting.avoid
        candidates = list(queue.candidates())
        assert not any(place(replicas, other.avoid) for other in candidates[: candidates.index(waiting)])
        queue.serve(waiting)
        start.replica.take_lane()
    assert not any(place(replicas, waiting.avoid) for waiting in queue.candidates())


def test_nothing_starts_without_entries_or_replicas() -> None:
    """Protects the scheduler's rest: no entry or no replica, no start."""
    assert next_start({}, {}) is None
    assert next_start({"x": _queue()}, {"x": [_replica("r", "x", 1)]}) is None
    assert next_start({"x": _queue(("t", 1))}, {}) is None


@given(st.integers(0, 500), st.integers(1, 64), st.integers(0, 64), st.floats(1, 60_000))
def test_the_predicted_wait(waiting: int, lanes: int, free: int, mean_ms: float) -> None:
    """Protects the door: no wait with a free lane for everybody ahead; else it grows with the queue and falls with lanes."""
    free = min(free, lanes)
    occupancy = LaneOccupancy(mean_ms)
    wait_ms = predicted_wait_ms(waiting, lanes, free, occupancy)
    assert (wait_ms == 0) == (waiting < free)
    assert wait_ms <= predicted_wait_ms(waiting + 1, lanes, free, occupancy)
    assert wait_ms >= predicted_wait_ms(waiting, lanes + 1, free, occupancy)
    behind = waiting + 1 - free
    assert behind <= 0 or wait_ms - 1 <= behind * mean_ms / lanes < wait_ms


@given(st.floats(1, 1e5), st.lists(st.floats(1, 1e5), min_size=1, max_size=50))
def test_the_estimate_stays_among_what_was_seen(prior_ms: float, seen_ms: list[float]) -> None:
    """Protects predictions: a mean of prior and evidence, never outside of both."""
    occupancy = LaneOccupancy(prior_ms)
    for each_ms in seen_ms:
        occupancy.observe(int(each_ms * 1e6))
    low, high = min(prior_ms, *seen_ms), max(prior_ms, *seen_ms)
    assert low - 1 <= occupancy.mean_ms <= high + 1


def test_a_wrong_prior_meets_evidence() -> None:
    """Protects predictions: thirty observations make up for any start."""
    occupancy = LaneOccupancy(60_000.0)
    for _ in range(30):
        occupancy.observe(100_000_000)
    assert occupancy.mean_ms < 200
