"""Which replica takes a request: one with room, no fuller than the skew allows, and of those the one that reads it soonest."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.endings import FinishReason
from weir.core.routing.breaker import BACK_OFF_MS
from weir.core.routing.capacity import NOTHING, Need
from weir.core.routing.placement import SKEW, Site, place
from weir.core.routing.prefixes import PrefixIndex, cached_tokens
from weir.core.routing.replica import Replica, ReplicaEvent, ReplicaLimits, ReplicaState
from weir.units import ns_from_ms

KV_MAX = 1_000
MARKS = tuple(f"mark {number}".encode() for number in range(4))
LONG = Need(400, 300, MARKS, 2_048)


def ready(name: str, concurrency: int, *running: tuple[int, int], kv_tokens_max: int | None = KV_MAX) -> Replica:
    """One that runs these: (KV tokens, prompt tokens that it has still to read)."""
    replica = Replica(name, "pool", ReplicaLimits(concurrency))
    replica.room.kv_tokens_max = kv_tokens_max
    replica.advance(ReplicaEvent.ANSWERED)
    for kv_tokens, prefill_tokens in running[:concurrency]:
        replica.take_lane(kv_tokens, prefill_tokens)
    return replica


def half_open(name: str, concurrency: int, running: int = 0) -> Replica:
    """One that failed twice while so many ran, which still do, and that may be tried now."""
    replica = ready(name, concurrency, *running * [(0, 0)])
    for _ in range(2):
        replica.attempt_ended(None, FinishReason.STALLED, 0, showed_output=False)
        replica.answered(0)
    replica.answered(ns_from_ms(BACK_OFF_MS))
    assert replica.state is ReplicaState.HALF_OPEN and replica.free == min(1, concurrency - running)
    return replica


def share(replica: Replica) -> float:
    """Of its lanes, those taken."""
    return replica.running / replica.allowed


def unread(replica: Replica, need: Need, held: dict[str, int]) -> int:
    """Prompt tokens to be read until the first output of this request, its own counted double."""
    cached = cached_tokens(held.get(replica.name, 0), need.prefix_bytes, need.input_tokens)
    return replica.room.prefill_tokens + 2 * (need.input_tokens - cached)


loads = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), max_size=6), st.integers(0, 4)),
    min_size=1,
    max_size=6,
)
needs = st.builds(
    lambda input_tokens, output_tokens, marks, backlog_ms: Need(
        input_tokens + output_tokens, input_tokens, MARKS[:marks], 256 * marks, backlog_ms
    ),
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(0, 4),
    st.sampled_from([None, 20, 200]),
)


@given(loads, needs, st.sampled_from([None, "r0", "r1", "gone"]), st.booleans())
def test_what_is_chosen_has_room_is_not_much_fuller_and_reads_it_soonest(
    drawn: list[tuple[int, list[tuple[int, int]], int]], need: Need, avoid: str | None, has_index: bool
) -> None:
    """Protects every placement: room first, then the bounded skew, then the time to the first output; and it repeats."""
    index = PrefixIndex() if has_index else None
    replicas = []
    for number, (concurrency, running, marks) in enumerate(drawn):
        replicas.append(ready(f"r{number}", concurrency, *running))
        replicas[-1].room.input_ms = 0.5
        if index is not None:
            index.placed(f"r{number}", MARKS[:marks], 64 * marks)
    held = index.held(need.prefix) if index is not None else {}
    chosen = place(replicas, need, index, avoid)
    open_ones = [replica for replica in replicas if replica.free and replica.name != avoid and replica.room.fits(need)]
    if chosen is None:
        assert not open_ones
        return
    assert chosen.replica in open_ones
    assert chosen.cached_tokens == cached_tokens(held.get(chosen.replica.name, 0), need.prefix_bytes, need.input_tokens)
    bound = min(map(share, open_ones)) + SKEW
    assert share(chosen.replica) <= bound
    near = [replica for replica in open_ones if share(replica) <= bound]
    ranks = [(unread(replica, need, held), share(replica), replica.name) for replica in near]
    assert min(ranks)[2] == chosen.replica.name
    assert place(list(reversed(replicas)), need, index, avoid) == chosen, "the order in which they are listed says nothing"


def test_nobody_without_room_takes_it() -> None:
    """Protects replicas: neither lanes, memory nor the backlog of prompts is exceeded, whatever is held there."""
    full, crowded, reading = ready("a", 1, (10, 0)), ready("b", 4, (700, 0)), ready("c", 4, (10, 40))
    reading.room.input_ms = 0.5
    index, short = PrefixIndex(), msgspec.structs.replace(LONG, backlog_ms=20)
    for name in "abc":
        index.placed(name, MARKS, 300)
    assert place([]) is None
    for where in (None, index):
        assert place([full, crowded, reading], short, where) is None, "what is held makes no backlog shorter"
    assert place([full, crowded, reading], msgspec.structs.replace(LONG, backlog_ms=21), index) == Site(reading, 299)
    assert place([full, crowded], LONG, index) is None


@pytest.mark.parametrize("others", [1, 5])
def test_the_longer_of_two_beginnings_draws_it(others: int) -> None:
    """Protects affinity in small fleets and in large ones: so many leading marks as are held are counted."""
    index = PrefixIndex()
    index.placed("half", MARKS[:2], 150)
    index.placed("a quarter", MARKS[:1], 75)
    replicas = [ready(name, 8) for name in ("half", "a quarter", *map(str, range(others)))]
    site = place(replicas, LONG, index)
    assert site is not None and (site.replica.name, site.cached_tokens) == ("half", 150)


def test_what_is_held_draws_only_within_the_skew() -> None:
    """Protects balance: at a quarter of its lanes above the emptiest it still takes what it holds, beyond that it does not."""
    index = PrefixIndex()
    index.placed("b", MARKS, 300)
    for running, name in ((1, "b"), (2, "b"), (3, "a")):
        site = place([ready("a", 8), ready("b", 8, *running * [(1, 0)])], LONG, index)
        assert site is not None and site.replica.name == name


def test_equal_replicas_are_told_apart_by_load_and_then_by_name() -> None:
    """Protects repeatability: of equal times the smaller share wins, of equal shares the name."""
    pool = [ready("c", 8, (1, 0)), ready("b", 8), ready("a", 8, (1, 0))]
    site = place(pool)
    assert site is not None and site.replica.name == "b"
    pool[1].take_lane()
    site = place(pool)
    assert site is not None and site.replica.name == "a"


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_a_cold_fleet_is_spread_evenly(number: int, concurrency: int, data: st.DataObject) -> None:
    """Protects balance: equal requests that come at once, and are read at once, leave no replica one ahead of another."""
    replicas = [ready(f"r{place_}", concurrency, kv_tokens_max=None) for place_ in range(number)]
    for _ in range(data.draw(st.integers(0, number * concurrency))):
        site = place(replicas, LONG, PrefixIndex())
        assert site is not None
        site.replica.room.prefilled(site.replica.take_lane(LONG.kv_tokens, LONG.input_tokens), 0)
        running = [replica.running for replica in replicas]
        assert max(running) - min(running) <= 1


def test_a_popular_beginning_fills_no_replica_beyond_the_skew() -> None:
    """Protects the rest of a fleet's capacity: five hundred requests that all begin alike use every replica of it."""
    random, index = Random(7), PrefixIndex()
    replicas = [ready(f"r{number}", 16, kv_tokens_max=None) for number in range(6)]
    running: list[tuple[Replica, int]] = []
    taken: Counter[str] = Counter()
    for _ in range(500):
        site = place(replicas, LONG, index)
        assert site is not None
        emptiest = min(map(share, replicas))
        assert share(site.replica) <= emptiest + SKEW
        index.placed(site.replica.name, LONG.prefix, LONG.input_tokens)
        running.append((site.replica, site.replica.take_lane(LONG.kv_tokens, LONG.input_tokens - site.cached_tokens)))
        taken[site.replica.name] += 1
        assert share(site.replica) <= emptiest + SKEW + 1 / 16
        random.shuffle(running)
        while len(running) > 40:
            replica, lane = running.pop()
            replica.showed_output(lane)
            replica.free_lane(lane)
    assert len(taken) == 6 and max(taken.values()) < 500 / 2


def test_a_half_open_replica_is_tried_first_and_a_retry_goes_there_last() -> None:
    """Protects recovery and the one retry: the next request tries it, a second attempt only where nothing else has room."""
    tried, other = half_open("z", 4), ready("a", 4)
    site = place([other, tried])
    assert site is not None and site.replica is tried
    site = place([tried, other], avoid="gone")
    assert site is not None and site.replica is other
    site = place([tried], avoid="gone")
    assert site is not None and site.replica is tried
    tried.take_lane()
    site = place([tried, other])
    assert site is not None and site.replica is other


def test_a_retry_goes_to_a_busy_replica_before_one_that_failed() -> None:
    """Protects the last attempt: an idle replica that is only being tried is no reason to pass one that works."""
    tried, busy = half_open("a", 4), ready("b", 4, (1, 0), (1, 0), (1, 0))
    site = place([tried, busy], NOTHING, avoid="gone")
    assert site is not None and site.replica is busy


def test_a_half_open_replica_is_tried_although_old_requests_still_hold_lanes() -> None:
    """Protects recovery: what ran when it failed may stay for long, and must not keep it from being tried."""
    tried, idle = half_open("z", 4, running=2), ready("a", 4)
    site = place([tried, idle])
    assert site is not None and site.replica is tried
