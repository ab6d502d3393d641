"""What starts now, and how long a newcomer would wait: late binding, and a prediction that meets evidence."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.routing.placement import place
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits
from weir.core.scheduling.feasibility import Caution, FloorPace, PrefillTime, ServiceRate, WaitBias, predicted_wait_ms
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds
from weir.core.scheduling.schedule import next_start


def _replica(name: str, pool: str, concurrency: int) -> Replica:
    replica = Replica(name, pool, ReplicaLimits(concurrency))
    replica.advance(ReplicaEvent.ANSWERED)
    return replica


def _queue(*entries: tuple[str, int]) -> DomainQueue[int]:
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for tenant, key in entries:
        queue.push(Entry(tenant, key, 1, 1, 0))
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
        queue.push_ahead(Entry("t", 100 + number, 1, 1, 0), avoid)
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


SECOND = 10**9


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 10**5))
def test_the_predicted_wait(work: int, lanes: int, request_ms: int) -> None:
    """Protects the door: it grows with the work ahead and falls with lanes; with none, it is the time until a lane frees."""
    rate = ServiceRate(request_ms * 10**6, 1_000)
    wait_ms = predicted_wait_ms(work, lanes, rate, 0)
    assert wait_ms <= predicted_wait_ms(work + 1, lanes, rate, 0)
    assert wait_ms >= predicted_wait_ms(work, lanes + 1, rate, 0)
    expected_ms = (1 + work / 1_000) * request_ms / lanes
    assert abs(wait_ms - expected_ms) <= expected_ms / 10**9


@given(st.integers(1, 10**5), st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 10**4)), min_size=1, max_size=50))
def test_the_estimate_stays_among_what_was_seen(prior_ms: int, seen: list[tuple[int, int]]) -> None:
    """Protects predictions: a mean of prior and evidence, never outside of both."""
    rate = ServiceRate(prior_ms * 10**6, 1_000)
    for number, (each_ms, cost) in enumerate(seen):
        rate.observe(cost, each_ms * 10**6, number * SECOND)
    now_ns = len(seen) * SECOND
    whole = [prior_ms, *(each_ms for each_ms, _ in seen)]
    assert min(whole) * 0.999 <= rate.request_ns(now_ns) / 1e6 <= max(whole) * 1.001
    units = [prior_ms / 1_000, *(each_ms / cost for each_ms, cost in seen)]
    assert min(units) * 0.999 <= rate.lane_ns(1, now_ns) / 1e6 <= max(units) * 1.001


def test_a_wrong_prior_meets_evidence() -> None:
    """Protects predictions: a minute of evidence makes up for any start, and after an hour of silence the prior holds again."""
    rate = ServiceRate(60 * SECOND, 1_000)
    for number in range(600):
        rate.observe(1_000, SECOND // 10, number * SECOND // 10)
    assert rate.request_ns(60 * SECOND) < SECOND // 2
    assert rate.request_ns(3_600 * SECOND) > 59 * SECOND


@given(
    st.floats(0, 10**9),
    st.floats(0, 10**6),
    st.lists(st.integers(1, 10_000), min_size=2, max_size=60).filter(lambda lengths: max(lengths) > 1.5 * min(lengths)),
    st.data(),
)
def test_prefill_is_a_line_through_what_was_measured(
    fixed_ns: float, each_ns: float, lengths: list[int], data: st.DataObject
) -> None:
    """Protects the last check before a start: a start-up time and a time per token are told apart, whatever the mix."""
    prefill = PrefillTime()
    asked = data.draw(st.integers(1, lengths[-1]))
    assert prefill.expected_ns(asked, 0) == 0
    for length in lengths:
        prefill.observe(length, int(fixed_ns + each_ns * length), 0)
    expected = fixed_ns + each_ns * asked
    assert abs(prefill.expected_ns(asked, 0) - expected) <= 1_000 + 0.01 * expected
    assert prefill.expected_ns(10 * max(lengths), 0) <= 1_000 + 1.01 * (fixed_ns + each_ns * max(lengths))


def test_what_was_not_measured_drops_nobody() -> None:
    """Protects long inputs from noise among short ones, and idle fleets from a slow minute that is over."""
    prefill = PrefillTime()
    for number in range(50):
        prefill.observe(28 + number % 5, (80 + 40 * (number % 5)) * 10**6, 0)
    assert prefill.expected_ns(6_000, 0) < 300_000_000
    assert prefill.expected_ns(30, 60 * SECOND) < 5_000_000


def test_answers_that_run_long_are_seen_before_they_end() -> None:
    """Protects the door from a minute-long answer on every lane: what runs counts as soon as it runs longer than usual."""
    rate = ServiceRate(SECOND, 1_000)
    for _ in range(4):
        rate.began(0)
    assert rate.request_ns(SECOND // 2) == SECOND
    assert rate.request_ns(30 * SECOND) == 30 * SECOND and rate.lane_ns(1_000, 30 * SECOND) == 30 * SECOND
    for _ in range(4):
        rate.left(0)
    assert rate.request_ns(30 * SECOND) == SECOND


def test_a_lead_takes_as_long_as_the_floor_needs() -> None:
    """Protects a flow that is ahead from being admitted in vain: those who come later go before it, at the pace of late."""
    pace = FloorPace()
    assert pace.wait_ns(100) == 0
    for _ in range(50):
        pace.observe(10, SECOND)
    assert abs(pace.wait_ns(100) - 10 * SECOND) < SECOND // 100
    for _ in range(50):
        pace.observe(40, SECOND)
    assert abs(pace.wait_ns(100) - 2.5 * SECOND) < SECOND // 5


@given(st.floats(0.3, 3.5), st.integers(1, 200), st.integers(50, 5_000))
def test_a_flow_that_waits_longer_than_predicted_is_predicted_longer(ratio: float, per_second: int, base_ms: int) -> None:
    """Protects admitted requests of a flow that others pass: within a minute predictions are right, at any rate of requests."""
    bias = WaitBias(0)
    for number in range(60 * per_second):
        now_ns = number * SECOND // per_second
        bias.observe(base_ms * bias.factor(now_ns), base_ms * ratio, now_ns)
    assert abs(bias.factor(60 * SECOND) / ratio - 1) < 0.1
    assert abs(bias.factor(660 * SECOND) - 1) < 0.01


@given(st.lists(st.tuples(st.floats(0.1, 10**6), st.floats(0, 10**6), st.integers(0, 10**10)), max_size=40))
def test_a_correction_is_bounded(observed: list[tuple[float, float, int]]) -> None:
    """Protects the door from one absurd wait: a factor of four at most, either way."""
    bias, now_ns = WaitBias(0), 0
    for predicted_ms, waited_ms, passed_ns in observed:
        now_ns += passed_ns
        bias.observe(predicted_ms, waited_ms, now_ns)
        assert 0.2499 < bias.factor(now_ns) < 4.001


def test_caution_grows_with_what_waited_in_vain_and_fades() -> None:
    """Protects admitted requests, and newcomers from an outage long past: at most twofold, and gone after minutes."""
    caution = Caution()
    assert caution.factor(0) == 1
    for number in range(100):
        caution.expired((10 + number) * SECOND)
        assert 1 < caution.factor((10 + number) * SECOND) <= 2.001
    assert caution.factor(109 * SECOND) > 1.9
    assert caution.factor(600 * SECOND) < 1.01
    for _ in range(1_000):
        caution.expired(600 * SECOND)
    assert caution.factor(600 * SECOND) < 1.2  # all at one moment: one outage
