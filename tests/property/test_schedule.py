"""What starts now, and how long a newcomer would wait: late binding, and a prediction that meets evidence."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.registry.model import DEFAULT_WORKLOAD_CLASSES
from weir.core.routing.capacity import Need
from weir.core.routing.placement import place
from weir.core.routing.prefixes import PrefixIndex
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits
from weir.core.scheduling.feasibility import (
    Caution,
    DecodeTime,
    FloorPace,
    PrefillTime,
    ServiceRate,
    WaitBias,
    predicted_wait_ms,
)
from weir.core.scheduling.orders import BYPASSES_MAX, ArrivalOrder
from weir.core.scheduling.queues import DomainQueue, Entry, QueueBounds
from weir.core.scheduling.schedule import next_start


def _replica(name: str, concurrency: int) -> Replica:
    replica = Replica(name, "pool", ReplicaLimits(concurrency))
    replica.advance(ReplicaEvent.ANSWERED)
    return replica


def _queue(*entries: tuple[str, int]) -> DomainQueue[int]:
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for tenant, key in entries:
        queue.push(Entry(tenant, key, 1, 1, 0))
    return queue


@given(
    waiting=st.lists(st.integers(0, 8), max_size=3),
    sizes=st.lists(st.integers(1, 3), max_size=3),
)
def test_dispatch_fills_what_is_free_and_nothing_more(waiting: list[int], sizes: list[int]) -> None:
    """Protects capacity and progress: as many start as have a lane, those of the first queue before those of the others."""
    queues = [_queue(*(("t", key) for key in range(number))) for number in waiting]
    replicas = [_replica(f"r{number}", size) for number, size in enumerate(sizes)]
    started = 0
    for _ in range(100):
        start = next_start(queues, replicas)
        if start is None:
            break
        assert start.site.replica.free > 0 and start.queue is next(queue for queue in queues if queue)
        assert start.waiting == next(start.queue.candidates()) and not start.passed
        start.queue.serve(start.waiting)
        start.site.replica.take_lane()
        started += 1
    assert started == min(sum(waiting), sum(sizes))


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
    replicas = [_replica(f"r{number}", max(1, size)) for number, size in enumerate(sizes)]
    for replica, size in zip(replicas, sizes, strict=True):
        if not size:
            replica.take_lane()  # a full one
    for _ in range(100):
        start = next_start([queue], replicas)
        if start is None:
            break
        waiting, replica = start.waiting, start.site.replica
        assert replica.free > 0 and replica.name != waiting.avoid and not start.passed
        candidates = list(queue.candidates())
        assert not any(place(replicas, avoid=other.avoid) for other in candidates[: candidates.index(waiting)])
        queue.serve(waiting)
        replica.take_lane()
    assert not any(place(replicas, avoid=waiting.avoid) for waiting in queue.candidates())


def test_nothing_starts_without_entries_or_replicas() -> None:
    """Protects the scheduler's rest: no entry or no replica, no start."""
    none: list[DomainQueue[int]] = []
    assert next_start(none, []) is None
    assert next_start([_queue()], [_replica("r", 1)]) is None
    assert next_start([_queue(("t", 1))], []) is None


def test_who_may_not_start_is_passed_over_as_if_absent() -> None:
    """Protects those who may: the next of another flow starts, and who was passed over keeps its turn."""
    queue, replicas = _queue(("one", 1), ("two", 2)), [_replica("r", 1)]
    start = next_start([queue], replicas, None, lambda key: key != 1)
    assert start is not None and start.waiting.key == 2 and not start.passed
    assert next_start([queue], replicas, None, lambda key: False) is None
    first = next_start([queue], replicas)
    assert first is not None and first.waiting.key == 1


def test_what_holds_the_beginning_takes_it() -> None:
    """Protects affinity through the schedule: the start names the replica that holds the prompt's beginning, and how much."""
    index, marks = PrefixIndex(), (b"first", b"second")
    index.placed("r1", marks, 100)
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    queue.push(Entry("t", 1, 1, 1, 0, Need(200, 100, marks, 512)))
    start = next_start([queue], [_replica("r0", 4), _replica("r1", 4)], index)
    assert start is not None and (start.site.replica.name, start.site.cached_tokens) == ("r1", 99)


def test_a_short_prompt_waits_for_the_backlog_that_a_long_one_joins() -> None:
    """Protects first outputs of both kinds: twenty milliseconds of prompts keep a short one back, which a long one passes."""
    short, long, _ = DEFAULT_WORKLOAD_CLASSES
    replica = _replica("r", 4)
    replica.room.input_ms = 0.2
    lane = replica.take_lane(0, 100)
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for key, workload, tokens in ((1, short, 100), (2, long, 8_000)):
        queue.push(Entry(workload.name, key, 1, 1, key, Need(tokens, tokens, backlog_ms=workload.backlog_ms)))
    start = next_start([queue], [replica])
    assert start is not None and (start.waiting.key, start.passed) == (2, ((queue, 1),))
    replica.showed_output(lane)
    start = next_start([queue], [replica])
    assert start is not None and (start.waiting.key, start.passed) == (1, ())


def _reading(milliseconds: int) -> Replica:
    """One with free lanes that has so much to read."""
    replica = _replica("r", 8)
    replica.room.input_ms = 1.0
    replica.take_lane(0, milliseconds)
    return replica


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 40))
def test_one_of_many_leaves_a_replica_nearly_free_for_others(waiting: list[int], unread_ms: int) -> None:
    """Protects who asks for little: beside what is unread starts who waits alone, up to 20 ms, one of many only up to 2."""
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for key, tenant in enumerate(waiting):
        queue.push(Entry(f"t{tenant}", key, 1, 1, key, Need(1, 1, backlog_ms=20, of_many_backlog_ms=2)))
    able = {key for key, tenant in enumerate(waiting) if unread_ms < (20 if waiting.count(tenant) == 1 else 2)}
    start = next_start([queue], [_reading(unread_ms)])
    assert (start is not None) == bool(able) and (start is None or start.waiting.key in able)
    for tenant in range(4):
        count = waiting.count(tenant)
        assert queue.is_one_of_many(f"t{tenant}") == (count > 1)
        assert queue.is_one_of_many(f"t{tenant}", 1) == (count > 0)


def test_first_come_first_served_holds_nobody_back() -> None:
    """Protects the baseline: in the order of arrival one of many starts beside as much as anybody."""
    queue: DomainQueue[int] = DomainQueue(QueueBounds(), ArrivalOrder())
    for key, tenant in enumerate(["flood", "flood", "light"]):
        queue.push(Entry(tenant, key, 1, 1, key, Need(1, 1, backlog_ms=20, of_many_backlog_ms=2)))
    start = next_start([queue], [_reading(10)])
    assert start is not None and start.waiting.key == 0 and not queue.is_one_of_many("flood", 1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=5))
def test_a_replica_that_will_have_room_first_is_kept(reading: list[tuple[int, int]]) -> None:
    """Protects a head that others passed: of those with memory for it, what has least to read is kept, else the most memory."""
    replicas = []
    for number, (unread_ms, kv_tokens) in enumerate(reading):
        replica = _replica(f"r{number}", 8)
        replica.room.input_ms, replica.room.kv_tokens_max = 1.0, 100
        replica.take_lane(kv_tokens, 5 + unread_ms)
        replicas.append(replica)
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    queue.push(Entry("held", 0, 1, 1, 0, Need(30, 1, backlog_ms=5)))
    queue.push(Entry("small", 1, 1, 1, 1, Need(0, 1)))
    for _ in range(BYPASSES_MAX):
        queue.passed(0)
    able = [replica for replica in replicas if replica.room.holds(30)]
    kept = min(able, key=lambda each: (each.room.prefill_tokens, each.name)) if able else None
    kept = kept or max(replicas, key=lambda each: (each.room.left, each.name))
    start = next_start([queue], replicas)
    if len(replicas) == 1:
        assert start is None
    else:
        assert start is not None and start.waiting.key == 1 and start.site.replica is not kept


def test_what_asks_for_less_is_looked_at_behind_all_that_asks_for_more() -> None:
    """Protects who fits behind heads that do not, each for a reason of its own: memory, a backlog, or both."""
    replica = _reading(10)
    replica.room.kv_tokens_max = 100
    queue: DomainQueue[int] = DomainQueue(QueueBounds())
    for key, need in enumerate([Need(200, 1, backlog_ms=20), Need(1, 1, backlog_ms=5), Need(300, 1), Need(2, 1, backlog_ms=4)]):
        queue.push(Entry(f"t{key}", key, 1, 1, key, need))
    assert next_start([queue], [replica]) is None
    queue.push(Entry("t4", 4, 1, 1, 4, Need(3, 1, backlog_ms=20)))
    start = next_start([queue], [replica])
    assert start is not None and start.waiting.key == 4


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


@given(st.integers(1, 5_000), st.integers(1, 20_000), st.floats(0, 10**7), st.integers(0, 60))
def test_beyond_the_longest_it_goes_on_as_an_idle_replica_reads(longest: int, more: int, token_ns: float, quiet_s: int) -> None:
    """Protects callers of long inputs from being admitted in vain: a token that nobody measured takes an idle one's time."""
    prefill = PrefillTime()
    for number in range(20):
        prefill.observe(max(1, longest - (19 - number) % 3), (50 + number % 3) * 10**6, 0)
    assert prefill.expected_ns(longest, 0, 7, token_ns) == prefill.expected_ns(longest, 0, 7)
    idle_ns, left = int(more * token_ns), 0.5 ** (quiet_s / 10)
    seen_ns = prefill.expected_ns(longest, 0)
    expected = prefill.expected_ns(longest + more, quiet_s * SECOND, idle_ns, token_ns)
    assert abs(expected - (left * (seen_ns + more * token_ns) + (1 - left) * idle_ns)) <= 1_000 + 0.05 * expected


def test_a_long_input_after_short_ones() -> None:
    """Protects callers of long inputs: evidence of thirty tokens, eight thousand asked at 0.17 ms each, is above a second."""
    prefill = PrefillTime()
    for number in range(50):
        prefill.observe(30, (20 + number % 5) * 10**6, number * SECOND)
    for quiet_s in (0, 10, 600):
        assert prefill.expected_ns(8_000, (49 + quiet_s) * SECOND, int(1_380e6), 170_000) >= 1_200_000_000
    assert prefill.expected_ns(30, 49 * SECOND, int(25e6), 170_000) < 30_000_000


def test_what_runs_is_no_typical_request() -> None:
    """Protects the first predictions: before anything ended, long requests that run are expected to hold their lanes long."""
    rate = ServiceRate(SECOND, 1_000)
    for _ in range(2):
        rate.began(10_000, 0)
    assert rate.request_ns(0) > 2 * SECOND
    rate.left(10_000, 0)
    rate.left(10_000, 0)
    assert rate.request_ns(0) == SECOND


def test_answers_that_run_long_are_seen_before_they_end() -> None:
    """Protects the door from a minute-long answer on every lane: what runs counts as soon as it runs longer than usual."""
    rate = ServiceRate(SECOND, 1_000)
    for _ in range(4):
        rate.began(1_000, 0)
    assert rate.request_ns(SECOND // 2) == SECOND
    assert rate.request_ns(30 * SECOND) == 30 * SECOND and rate.lane_ns(1_000, 30 * SECOND) == 30 * SECOND
    for _ in range(4):
        rate.left(1_000, 0)
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


@given(st.integers(1, 6_000), st.integers(0, 10**10), st.integers(0, 600))
def test_prefill_returns_to_what_an_idle_replica_takes(input_tokens: int, idle_ns: int, quiet_s: int) -> None:
    """Protects the door from a slow minute that is over: unmeasured it is the idle time, then between the two, and back."""
    prefill = PrefillTime()
    assert prefill.expected_ns(input_tokens, 0, idle_ns) == idle_ns
    for _ in range(20):
        prefill.observe(input_tokens, 5 * SECOND, 0)
    expected = prefill.expected_ns(input_tokens, quiet_s * SECOND, idle_ns)
    assert min(idle_ns, 5 * SECOND) - 2 <= expected <= max(idle_ns, 5 * SECOND) + 2
    left = 0.5 ** (quiet_s / 10)
    assert abs(expected - idle_ns) <= left * abs(5 * SECOND - idle_ns) + 2


@given(st.lists(st.floats(0.1, 1_000), min_size=1, max_size=100), st.floats(0.1, 1_000), st.integers(0, 600))
def test_decode_is_a_mean_that_returns_to_the_idle_pace(seen_ms: list[float], idle_ms: float, quiet_s: int) -> None:
    """Protects predictions of long answers: among what was seen while it is fresh, the idle replica's pace once it is old."""
    decode = DecodeTime()
    assert decode.expected_ms(0, idle_ms) == idle_ms
    for token_ms in seen_ms:
        decode.observe(token_ms, 0)
    mean_ms = decode.expected_ms(0, idle_ms)
    assert min(seen_ms) - 1e-6 <= mean_ms <= max(seen_ms) + 1e-6
    expected_ms = decode.expected_ms(quiet_s * SECOND, idle_ms)
    assert abs(expected_ms - idle_ms) <= 0.5 ** (quiet_s / 10) * abs(mean_ms - idle_ms) + 1e-6


def test_the_pace_of_late_counts_more_than_the_pace_before() -> None:
    """Protects predictions after a change of load: some two hundred answers make up for any number before."""
    decode = DecodeTime()
    for token_ms in [10.0] * 1_000 + [40.0] * 200:
        decode.observe(token_ms, 0)
    assert 39 < decode.expected_ms(0, 10.0) <= 40


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_a_warm_up_replaces_the_prior_and_no_evidence(prior_ms: int, assumed_ms: int) -> None:
    """Protects predictions: what a warm-up measured is expected at once, at the prior's cost; what ended still outweighs it."""
    rate, told = ServiceRate(prior_ms * 10**6, 1_000), ServiceRate(assumed_ms * 10**6, 1_000)
    rate.assume(assumed_ms * 10**6)
    for _ in range(2):
        assert rate.request_ns(0) == told.request_ns(0) and rate.lane_ns(700, 0) == told.lane_ns(700, 0)
        for each in (rate, told):
            each.observe(1_000, 30 * SECOND, 0)
    rate.assume(SECOND)
    for _ in range(50):
        rate.observe(1_000, 20 * SECOND, 0)
    assert abs(rate.request_ns(0) / SECOND - 20) < 1


def test_a_flow_that_waited_twice_as_long_is_predicted_longer_and_forgets_it() -> None:
    """Protects admitted requests: the factor moves with time, half a minute halves it, and many at one moment move nothing."""
    bias = WaitBias(0)
    for _ in range(100):
        bias.observe(1_000, 2_000, 0)
    assert bias.factor(0) == 1
    bias.observe(1_000, 2_000, SECOND)
    moved = bias.factor(SECOND)
    assert 1.2 < moved < 1.3
    assert abs(bias.factor(31 * SECOND) - moved**0.5) < 0.001
