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
    """The windows of one tenant in one process's life: those that are present stay as they are until the first one ends."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._latest = ["", ""]
        self._ends_ms: list[Millis] = [0, 0]
        self._looked = False

    def follow(self, tenant: Tenant) -> None:
        """The tenant as it is now; a changed zone is looked at."""
        self._looked = self._looked and (tenant.time_zone, tenant.former_time_zones) == (
            self._tenant.time_zone,
            self._tenant.former_time_zones,
        )
        self._tenant = tenant

    def remember(self, windows: Iterable[str]) -> None:
        """These were used: nothing earlier comes."""
        self._looked = False
        for window in windows:
            for kind, prefix in enumerate(_PREFIX):
                if window.startswith(prefix):
                    self._latest[kind] = max(self._latest[kind], window.removeprefix(prefix))

    def windows(self, wall_ms: Millis) -> tuple[str, str, str]:
        """Day, month and lifetime for a hold that is taken now."""
        if not self._looked or wall_ms >= min(self._ends_ms):
            self._looked = True
            for kind in (DAY, MONTH):
                self._look(kind, wall_ms, self._zone(kind, wall_ms))
        return _PREFIX[DAY] + self._latest[DAY], _PREFIX[MONTH] + self._latest[MONTH], "lifetime"

    def ends_ms(self, kind: int, wall_ms: Millis) -> Millis | None:
        """When the present window of a kind is over; None for a lifetime."""
        self.windows(wall_ms)
        return None if kind == LIFETIME else self._ends_ms[kind]

    def _look(self, kind: int, wall_ms: Millis, zone: str) -> None:
        """The date of a moment, or a later one that was there before; and where that ends."""
        self._latest[kind] = max(self._latest[kind], local_date(kind, wall_ms, zone))
        while local_date(kind, wall_ms, zone) < self._latest[kind]:
            wall_ms = end_ms(kind, wall_ms, zone)
        self._ends_ms[kind] = end_ms(kind, wall_ms, zone)

    def _zone(self, kind: int, wall_ms: Millis) -> str:
        """The zone in force: a wish counts once the window is over in which the first one since the last change was made."""
        changes = self._tenant.former_time_zones
        wishes = [*(former.time_zone for former in changes[1:]), self._tenant.time_zone]
        zone, pending, due_ms = (changes[0].time_zone if changes else self._tenant.time_zone), "", 0
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
