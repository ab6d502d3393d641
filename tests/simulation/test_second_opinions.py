"""The checkers' own bucket, calendar and lengths, which are slow and plain, agree with the platform's, which are neither."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weir.core.ledger.bucket import Bucket
from weir.core.scheduling.output_lengths import OutputLengths
from weir.core.tenancy import Tenant
from weir.core.windows import Calendar, FormerZone, WindowKind
from weir.sim.changes import ZONES
from weir.sim.naive_bucket import NaiveBucket
from weir.sim.naive_calendar import DAY, MONTH, NaiveCalendar
from weir.sim.naive_lengths import NaiveLengths
from weir.sim.virtual_loop import WALL_START_MS

KINDS = ((DAY, WindowKind.DAY), (MONTH, WindowKind.MONTH))
HOUR_MS = 3_600_000
waits = st.integers(0, 40_000_000_000)
asks = st.tuples(waits, st.integers(1, 60), st.integers(0, 60), st.integers(0, 4))
CALLERS = (("acme", "app", "rev"), ("acme", "jobs", "rev"), ("globex", "app", "rev"), ("globex", "app", "other"))
limits = st.integers(1, 900)
answers = st.tuples(st.sampled_from(CALLERS), st.integers(0, 700))
steps = st.tuples(st.integers(-80 * 24, 80 * 24), st.one_of(st.none(), st.sampled_from(ZONES)))


@given(rate=st.integers(1, 200), moves=st.lists(asks, max_size=25))
def test_buckets_agree(rate: int, moves: list[tuple[int, int, int, int]]) -> None:
    """Protects per-minute limits: used, waits and returns are those of takes laid out anew for each question."""
    bucket, naive, now_ns, open_takes = Bucket(rate, 0), NaiveBucket(rate), 0, []
    for owner, (wait_ns, units, used, settled) in enumerate(moves):
        now_ns += wait_ns
        if units <= rate:
            assert bucket.wait_ns(units, now_ns) == naive.wait_ns(units, now_ns)
            if bucket.wait_ns(units, now_ns) == 0:
                bucket.take(owner, units, now_ns)
                naive.take(owner, units, now_ns)
                open_takes.append(owner)
        if settled < len(open_takes):
            done = open_takes.pop(settled)
            assert bucket.settle(done, used, now_ns) == naive.settle(done, used, now_ns)
        assert bucket.used(now_ns) == naive.used(now_ns)
        assert bucket.full_again_ns(now_ns) == naive.full_again_ns(now_ns)


@given(zone=st.sampled_from(ZONES), moves=st.lists(steps, min_size=1, max_size=15), offset_ms=st.integers(0, 86_400_000))
def test_calendars_agree(zone: str, moves: list[tuple[int, str | None]], offset_ms: int) -> None:
    """Protects budget windows: names and ends are those that local dates give, with clocks set and zones changed at will."""
    tenant, wall_ms = Tenant("t", zone), WALL_START_MS + offset_ms
    calendar, naive = Calendar(tenant.zones), NaiveCalendar(tenant)
    for hours, moved_to in moves:
        wall_ms += hours * HOUR_MS
        if moved_to is not None and moved_to != tenant.time_zone:
            former = (*tenant.former_time_zones, FormerZone(tenant.time_zone, wall_ms))
            tenant = replace(tenant, time_zone=moved_to, former_time_zones=former)
            naive.follow(tenant)
            calendar.set_zones(tenant.zones)
        assert calendar.windows(wall_ms) == naive.windows(wall_ms)
        for kind, theirs in KINDS:
            assert calendar.ends_ms(theirs, wall_ms) == naive.ends_ms(kind, wall_ms)


@given(
    seen=st.lists(answers, max_size=40),
    times=st.sampled_from([1, 1, 30]),
    limit=st.integers(1, 900),
    typical=st.integers(1, 300),
)
def test_expected_lengths_agree(seen: list[tuple[tuple[str, str, str], int]], times: int, limit: int, typical: int) -> None:
    """Protects what is reserved of a replica: expectations are those of plain lists of lengths, also after old ones faded."""
    lengths, naive = OutputLengths(), NaiveLengths()
    for caller, tokens in seen * times:
        lengths.observe(caller, tokens)
        naive.observe(caller, tokens)
    for caller in CALLERS:
        assert lengths.expected(caller, limit, typical) == naive.expected(caller, limit, typical)
