"""Budget windows the slow way: the checkers' own calendar, by looking at the local date of a moment and nothing else.

It answers what the platform's calendar should say: the date a moment has in the tenant's zone, never an earlier window than one
that was there, a changed zone from the next window on. It shares no code with the core. Zones that repeat a midnight are left
out of simulated worlds, because a date alone does not tell those two hours apart.
"""

from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from zoneinfo import ZoneInfo

from weir.core.tenancy import Tenant
from weir.units import Millis

DAY, MONTH, LIFETIME = range(3)
_PREFIX = ("day/", "month/")
_CHARS = (10, 7)
_LONGEST_MS: Millis = 32 * 86_400_000


class NaiveCalendar:
    """The windows of one tenant in one process's life. seen: the latest of each kind so far, as a date's text."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._seen = ["", ""]

    def remember(self, windows: Iterable[str]) -> None:
        """These were used: nothing earlier comes."""
        for window in windows:
            for kind, prefix in enumerate(_PREFIX):
                if window.startswith(prefix):
                    self._seen[kind] = max(self._seen[kind], window.removeprefix(prefix))

    def windows(self, wall_ms: Millis) -> tuple[str, str, str]:
        """Day, month and lifetime for a hold that is taken now."""
        for kind in (DAY, MONTH):
            self._seen[kind] = max(self._seen[kind], local_date(kind, wall_ms, self._zone(kind, wall_ms)))
        return _PREFIX[DAY] + self._seen[DAY], _PREFIX[MONTH] + self._seen[MONTH], "lifetime"

    def ends_ms(self, kind: int, wall_ms: Millis) -> Millis | None:
        """When the present window of a kind is over; None for a lifetime."""
        if kind == LIFETIME:
            return None
        self.windows(wall_ms)
        zone = self._zone(kind, wall_ms)
        begin_ms = wall_ms
        while local_date(kind, begin_ms, zone) < self._seen[kind]:  # the clock was set back: the window is still to come
            begin_ms = end_ms(kind, begin_ms, zone)
        return end_ms(kind, begin_ms, zone)

    def _zone(self, kind: int, wall_ms: Millis) -> str:
        """The zone in force: a wish counts once the window is over in which the first one since the last change was made."""
        changes = self.tenant.former_time_zones
        wishes = [*(former.time_zone for former in changes[1:]), self.tenant.time_zone]
        zone, pending, due_ms = (changes[0].time_zone if changes else self.tenant.time_zone), "", 0
        for change, wish in zip(changes, wishes, strict=False):
            if pending and change.until_ms >= due_ms:
                zone, pending = pending, ""
            if not pending:
                due_ms = end_ms(kind, change.until_ms, zone)
            pending = wish
        return pending if pending and wall_ms >= due_ms else zone


def local_date(kind: int, wall_ms: Millis, zone: str) -> str:
    """The date, or the month of it, that a moment has in a zone."""
    return datetime.fromtimestamp(wall_ms / 1000, ZoneInfo(zone)).date().isoformat()[: _CHARS[kind]]


@lru_cache(maxsize=4_096)
def end_ms(kind: int, wall_ms: Millis, zone: str) -> Millis:
    """The first millisecond after a moment that has another date, or another month."""
    present, low, high = local_date(kind, wall_ms, zone), wall_ms, wall_ms + _LONGEST_MS
    if kind == DAY:
        high = wall_ms + _LONGEST_MS // 16
    while high - low > 1:
        middle = (low + high) // 2
        if local_date(kind, middle, zone) == present:
            low = middle
        else:
            high = middle
    return high
