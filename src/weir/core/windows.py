"""Budget windows: which day and month a moment belongs to in a tenant's time zone, and when that ends.

A window is named `day/2026-11-29`, `month/2026-11` or `lifetime`. A day is the time from one local midnight to the next, so it
has 23 or 25 hours where clocks change, and begins with the transition where a midnight does not exist. A changed time zone
takes effect at the next window of each kind. A window never goes back: where a clock is set back, or a new zone's date is
behind, the present window stays until its own date has passed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from zoneinfo import ZoneInfo

from weir.units import Millis


class WindowKind(StrEnum):
    """What a budget is counted over."""

    DAY = "day"
    MONTH = "month"
    LIFETIME = "lifetime"


LIFETIME_WINDOW = WindowKind.LIFETIME.value
_SEPARATOR = "/"
_DATE_CHARS = {WindowKind.DAY: len("2026-11-29"), WindowKind.MONTH: len("2026-11")}
_LOOK_BACK_MS: Millis = 2 * 86_400_000
"""The lag of the slowest clock behind the fastest, and as much again."""


@dataclass(frozen=True, slots=True)
class FormerZone:
    """A time zone that a tenant had until a wall-clock time."""

    time_zone: str
    until_ms: Millis


@dataclass(frozen=True, slots=True)
class Zones:
    """A tenant's time zone and those it had of late, oldest first; IANA names."""

    time_zone: str = "UTC"
    former: tuple[FormerZone, ...] = ()

    def in_force(self, kind: WindowKind, wall_ms: Millis) -> str:
        """The zone whose windows count now: each change waits for the end of the window that it was made in."""
        zones = [*(change.time_zone for change in self.former), self.time_zone]
        zone = wanted = zones[0]
        begins_ms: Millis | None = None
        for change, wanted_next in zip(self.former, zones[1:], strict=True):
            if begins_ms is None or change.until_ms >= begins_ms:
                zone = wanted
                begins_ms = _end_ms(kind, _first_date(kind, change.until_ms, zone), zone)
            wanted = wanted_next
        return wanted if begins_ms is None or wall_ms >= begins_ms else zone


class Calendar:
    """The present windows of one tenant. It remembers the latest, so that none ever comes back."""

    __slots__ = ("_dates", "_ends_ms", "_until_ms", "_windows", "_zones")

    def __init__(self, zones: Zones) -> None:
        self._zones = zones
        self._dates: dict[WindowKind, date] = {}
        self._ends_ms: dict[WindowKind, Millis] = {}
        self._windows: tuple[str, ...] = ()
        self._until_ms: Millis = 0

    def set_zones(self, zones: Zones) -> None:
        """The tenant's time zone was changed; what is present stays until it ends."""
        if zones != self._zones:
            self._zones, self._until_ms = zones, 0

    def remember(self, window: str) -> None:
        """This window was used before: none earlier comes any more."""
        kind, _, text = window.partition(_SEPARATOR)
        if text:
            first = date.fromisoformat(text if kind == WindowKind.DAY else f"{text}-01")
            known = self._dates.get(WindowKind(kind), first)
            self._dates[WindowKind(kind)] = max(first, known)
            self._until_ms = 0

    def windows(self, wall_ms: Millis) -> tuple[str, ...]:
        """The windows that a hold taken now counts in: day, month, lifetime."""
        if wall_ms >= self._until_ms:
            self._advance(wall_ms)
        return self._windows

    def window(self, kind: WindowKind, wall_ms: Millis) -> str:
        """The present window of a kind."""
        return self.windows(wall_ms)[_POSITION[kind]]

    def ends_ms(self, kind: WindowKind, wall_ms: Millis) -> Millis | None:
        """When the present window of a kind ends, wall clock; None for a lifetime."""
        self.windows(wall_ms)
        return self._ends_ms.get(kind)

    def _advance(self, wall_ms: Millis) -> None:
        for kind in _DATE_CHARS:
            zone = self._zones.in_force(kind, wall_ms)
            first = _first_date(kind, wall_ms, zone)
            self._dates[kind] = first = max(first, self._dates.get(kind, first))
            self._ends_ms[kind] = _end_ms(kind, first, zone)
        self._windows = (*(_name(kind, self._dates[kind]) for kind in _DATE_CHARS), LIFETIME_WINDOW)
        self._until_ms = min(self._ends_ms.values())


_POSITION = {kind: position for position, kind in enumerate(WindowKind)}


def floors_of(since_ms: Millis) -> tuple[str, str]:
    """The earliest day and month that may be present anywhere on Earth at a time or later."""
    earliest = datetime.fromtimestamp((since_ms - _LOOK_BACK_MS) / 1000, UTC).date()
    return _name(WindowKind.DAY, earliest), _name(WindowKind.MONTH, earliest)


def _name(kind: WindowKind, first: date) -> str:
    return f"{kind}{_SEPARATOR}{first.isoformat()[: _DATE_CHARS[kind]]}"


def day_of(windows: tuple[str, ...]) -> str:
    """The date of the day window, which comes first among a hold's windows, YYYY-MM-DD."""
    kind, _, date_text = windows[0].partition(_SEPARATOR)
    assert kind == WindowKind.DAY
    return date_text


def _first_date(kind: WindowKind, wall_ms: Millis, zone: str) -> date:
    """The first date of the window that a moment lies in."""
    local = datetime.fromtimestamp(wall_ms / 1000, ZoneInfo(zone)).date()
    first = local if kind is WindowKind.DAY else local.replace(day=1)
    # Clocks that are set back over midnight repeat the end of a day that is over.
    return _NEXT[kind](first) if wall_ms >= _end_ms(kind, first, zone) else first


def _end_ms(kind: WindowKind, first: date, zone: str) -> Millis:
    """The first moment after a window: the next one's first midnight, or the transition that skips it."""
    after = _NEXT[kind](first)
    return round(datetime(after.year, after.month, after.day, tzinfo=ZoneInfo(zone)).timestamp() * 1000)


_NEXT: dict[WindowKind, Callable[[date], date]] = {
    WindowKind.DAY: lambda first: first + timedelta(days=1),
    WindowKind.MONTH: lambda first: (first + timedelta(days=31)).replace(day=1),
}
