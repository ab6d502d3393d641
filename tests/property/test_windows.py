"""Budget windows: days of 23, 24 and 25 hours, month ends, changed time zones and clocks that are set."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weir.core.windows import Calendar, FormerZone, WindowKind, Zones, day_of, floors_of

HOUR_MS = 3_600_000
ZONES = ("UTC", "Europe/Berlin", "America/St_Johns", "America/Sao_Paulo", "Asia/Tokyo", "Pacific/Apia", "Pacific/Pago_Pago")
zones = st.sampled_from(ZONES)
moments = st.integers(1_100_000_000_000, 2_000_000_000_000)


def at(text: str, zone: str = "UTC") -> int:
    """Wall-clock milliseconds of a local time."""
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def bounds(zone: str, kind: WindowKind, now_ms: int) -> tuple[str, int]:
    """A fresh calendar's window and its end."""
    calendar = Calendar(Zones(zone))
    ends_ms = calendar.ends_ms(kind, now_ms)
    assert ends_ms is not None
    return calendar.window(kind, now_ms), ends_ms


@pytest.mark.parametrize(
    ("zone", "noon", "hours"),
    [
        ("UTC", "2026-03-29T12:00", 24),
        ("Europe/Berlin", "2026-03-29T12:00", 23),
        ("Europe/Berlin", "2026-10-25T12:00", 25),
        ("America/Sao_Paulo", "2018-11-04T12:00", 23),  # its midnight does not exist
        ("America/Sao_Paulo", "2018-02-17T12:00", 25),  # its last hour comes twice
        ("America/St_Johns", "2005-10-30T12:00", 25),  # a minute after midnight it is the day before once more
        ("Pacific/Apia", "2011-12-29T12:00", 24),  # the day after it was skipped
    ],
)
def test_a_day_is_from_midnight_to_midnight(zone: str, noon: str, hours: int) -> None:
    """Protects daily budgets where clocks change: a day has 23 or 25 hours, and every moment of it is in its window."""
    window, ends_ms = bounds(zone, WindowKind.DAY, at(noon, zone))
    begins_ms = ends_ms - hours * HOUR_MS
    assert window == f"day/{noon[:10]}"
    assert bounds(zone, WindowKind.DAY, begins_ms) == bounds(zone, WindowKind.DAY, ends_ms - 1) == (window, ends_ms)
    assert bounds(zone, WindowKind.DAY, begins_ms - 1)[1] == begins_ms
    assert bounds(zone, WindowKind.DAY, ends_ms)[0] > window


@pytest.mark.parametrize(
    ("inside", "window", "end"),
    [
        ("2026-12-31T23:59", "month/2026-12", "2027-01-01T00:00"),
        ("2028-02-29T12:00", "month/2028-02", "2028-03-01T00:00"),
        ("2026-03-01T00:00", "month/2026-03", "2026-04-01T00:00"),
    ],
)
def test_a_month_ends_where_the_next_begins(inside: str, window: str, end: str) -> None:
    """Protects monthly budgets: year ends, leap days and a month in which clocks change."""
    assert bounds("Europe/Berlin", WindowKind.MONTH, at(inside, "Europe/Berlin")) == (window, at(end, "Europe/Berlin"))


@given(zone=zones, now_ms=moments, kind=st.sampled_from([WindowKind.DAY, WindowKind.MONTH]))
def test_windows_tile_time(zone: str, now_ms: int, kind: WindowKind) -> None:
    """Protects budgets: each moment lies in one window, named by the local date, and the next follows without a gap."""
    window, ends_ms = bounds(zone, kind, now_ms)
    assert now_ms < ends_ms
    assert bounds(zone, kind, ends_ms - 1) == (window, ends_ms)
    after, later_ms = bounds(zone, kind, ends_ms)
    assert after > window and later_ms > ends_ms
    local = datetime.fromtimestamp(now_ms / 1000, ZoneInfo(zone)).date().isoformat()
    assert window in (f"{kind}/{local[: len(window) - len(kind) - 1]}", after_repeat(kind, local))
    assert all(name >= floor for name, floor in zip((window,), floors_of(now_ms)[kind is WindowKind.MONTH :], strict=False))


def after_repeat(kind: WindowKind, local: str) -> str:
    """The window that stays present where clocks are set back over its first midnight."""
    following = (datetime.fromisoformat(local) + timedelta(days=1)).date().isoformat()
    return f"{kind}/{following if kind is WindowKind.DAY else following[:7]}"


@given(zone=zones, now_ms=moments, steps=st.lists(st.integers(-40 * 24, 40 * 24), max_size=12))
def test_a_window_never_comes_back(zone: str, now_ms: int, steps: list[int]) -> None:
    """Protects spent budgets from clocks that are set back: the present window stays until its own date has passed."""
    calendar = Calendar(Zones(zone))
    latest = calendar.windows(now_ms)
    for hours in steps:
        now_ms += hours * HOUR_MS
        present = calendar.windows(now_ms)
        assert all(after >= before for before, after in zip(latest, present, strict=True))
        fresh = Calendar(Zones(zone)).windows(now_ms)
        assert present == tuple(map(max, zip(latest, fresh, strict=True)))
        latest = present


@given(zone=zones, now_ms=moments)
def test_what_was_used_before_a_restart_is_remembered(zone: str, now_ms: int) -> None:
    """Protects budgets across a restart with a clock behind: windows of stored balances do not come back either."""
    used = Calendar(Zones(zone)).windows(now_ms)
    calendar = Calendar(Zones(zone))
    for window in used:
        calendar.remember(window)
    assert calendar.windows(now_ms - 50 * 24 * HOUR_MS) == used
    assert calendar.windows(now_ms) == used


def test_windows_keep_their_order_whatever_was_remembered_first() -> None:
    """Protects budgets after a quiet restart: with only the month remembered, the day is still the first window."""
    calendar = Calendar(Zones())
    calendar.remember("month/2026-11")
    assert calendar.windows(at("2026-11-15T12:00")) == ("day/2026-11-15", "month/2026-11", "lifetime")
    assert calendar.window(WindowKind.DAY, at("2026-11-15T12:00")) == "day/2026-11-15"


def test_a_new_time_zone_waits_for_the_next_window() -> None:
    """Protects budgets from a change that would open a new window early: each kind's window ends as it began."""
    changed_ms = at("2026-11-10T12:00")
    calendar = Calendar(Zones("Asia/Tokyo", (FormerZone("UTC", changed_ms),)))
    late = at("2026-11-10T23:59")  # the 11th in Tokyo
    assert calendar.windows(late)[:2] == ("day/2026-11-10", "month/2026-11")
    assert calendar.ends_ms(WindowKind.DAY, late) == at("2026-11-11T00:00")
    assert calendar.window(WindowKind.DAY, at("2026-11-11T00:00")) == "day/2026-11-11"
    assert calendar.ends_ms(WindowKind.DAY, at("2026-11-11T00:00")) == at("2026-11-12T00:00", "Asia/Tokyo")
    assert calendar.window(WindowKind.MONTH, at("2026-11-30T23:59")) == "month/2026-11"
    assert calendar.ends_ms(WindowKind.MONTH, at("2026-12-02T00:00")) == at("2027-01-01T00:00", "Asia/Tokyo")


def test_a_zone_that_is_behind_keeps_the_present_day() -> None:
    """Protects budgets from a day that would be counted twice: the date is over where the new zone says so."""
    calendar = Calendar(Zones("Asia/Tokyo"))
    changed_ms = at("2026-11-10T12:00", "Asia/Tokyo")
    assert calendar.window(WindowKind.DAY, changed_ms) == "day/2026-11-10"
    calendar.set_zones(Zones("Pacific/Pago_Pago", (FormerZone("Asia/Tokyo", changed_ms),)))
    for hours in (1, 13, 25):
        assert calendar.window(WindowKind.DAY, changed_ms + hours * HOUR_MS) == "day/2026-11-10"
    assert calendar.ends_ms(WindowKind.DAY, changed_ms + 25 * HOUR_MS) == at("2026-11-11T00:00", "Pacific/Pago_Pago")


def test_of_several_changes_within_a_window_the_last_one_follows() -> None:
    """Protects a tenant that corrects itself: what was wanted in between never comes into force."""
    former = (FormerZone("UTC", at("2026-11-10T10:00")), FormerZone("Asia/Tokyo", at("2026-11-10T11:00")))
    zones = Zones("Europe/Berlin", former)
    assert zones.in_force(WindowKind.DAY, at("2026-11-10T23:00")) == "UTC"
    assert zones.in_force(WindowKind.DAY, at("2026-11-11T00:00")) == "Europe/Berlin"
    later = Zones("UTC", (*former, FormerZone("Europe/Berlin", at("2026-11-12T12:00"))))
    assert later.in_force(WindowKind.DAY, at("2026-11-12T22:00")) == "Europe/Berlin"
    assert later.in_force(WindowKind.DAY, at("2026-11-12T23:00")) == "UTC"
    assert later.in_force(WindowKind.MONTH, at("2026-11-30T12:00")) == "UTC"


changes = st.lists(st.tuples(st.integers(0, 100), zones), max_size=5)


@given(first=zones, now_ms=moments, moves=changes, hours=st.lists(st.integers(0, 60), min_size=1, max_size=20))
@example(first="UTC", now_ms=at("2026-11-30T12:00"), moves=[(0, "Asia/Tokyo"), (13, "Pacific/Apia")], hours=[1] * 20)
def test_a_calendar_rebuilt_from_the_history_agrees(
    first: str, now_ms: int, moves: list[tuple[int, str]], hours: list[int]
) -> None:
    """Protects restarts in the middle of a move: what a calendar learnt as it happened is what the history says."""
    live, current, former = Calendar(Zones(first)), first, list[FormerZone]()
    waiting = sorted(moves)
    elapsed = 0
    for step in hours:
        elapsed += step
        while waiting and waiting[0][0] <= elapsed:
            offset, zone = waiting.pop(0)
            live.windows(now_ms + offset * HOUR_MS)
            former.append(FormerZone(current, now_ms + offset * HOUR_MS))
            current = zone
            live.set_zones(Zones(current, tuple(former)))
        present = live.windows(now_ms + elapsed * HOUR_MS)
        rebuilt = Calendar(Zones(current, tuple(former)))
        for window in present:
            rebuilt.remember(window)
        assert rebuilt.windows(now_ms + elapsed * HOUR_MS) == present
        for kind in (WindowKind.DAY, WindowKind.MONTH):
            assert rebuilt.ends_ms(kind, now_ms + elapsed * HOUR_MS) == live.ends_ms(kind, now_ms + elapsed * HOUR_MS)


def test_the_day_of_a_hold_is_its_day_window() -> None:
    """Protects usage by day: it names what the day's budget was charged for."""
    assert day_of(Calendar(Zones("Asia/Tokyo")).windows(at("2026-11-10T20:00"))) == "2026-11-11"
    assert datetime.fromtimestamp(at("2026-11-10T20:00") / 1000, UTC).day == 10
