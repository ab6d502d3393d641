"""How long a batch may take: `24h`, or other numbers of hours, minutes and seconds, as `1h30m`."""

import re

from weir import errors
from weir.units import Millis

WINDOW_MS_MIN: Millis = 1_000
WINDOW_MS_MAX: Millis = 7 * 86_400_000

WINDOW_PATTERN = "^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?$"
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_ACCEPTED = "whole numbers of h, m and s, as 24h or 1h30m; from 1s to 168h"


def window_ms(text: str) -> Millis:
    """The window in milliseconds, WINDOW_MS_MIN … WINDOW_MS_MAX. Raises InvalidRequest."""
    written = re.fullmatch(WINDOW_PATTERN, text)
    parts = [part for part in written.groups() if part] if written else []
    window = sum(int(part[:-1]) * _UNIT_MS[part[-1]] for part in parts)
    if not WINDOW_MS_MIN <= window <= WINDOW_MS_MAX:
        raise errors.InvalidRequest(
            f"'completion_window' is not valid; accepted: {_ACCEPTED}.",
            members={"field": "completion_window", "accepted": _ACCEPTED},
        )
    return window
