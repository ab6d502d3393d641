"""How long a batch may take: `24h`, or another number of hours, minutes or seconds."""

import re

from weir import errors
from weir.units import Millis

WINDOW_MS_MIN: Millis = 1_000
WINDOW_MS_MAX: Millis = 7 * 86_400_000

_WRITTEN = re.compile(r"([0-9]{1,6})([smh])", re.ASCII)
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_ACCEPTED = "a whole number and one of s, m, h, as 24h; from 1s to 168h"


def window_ms(text: str) -> Millis:
    """The window in milliseconds, WINDOW_MS_MIN … WINDOW_MS_MAX. Raises InvalidRequest."""
    written = _WRITTEN.fullmatch(text)
    window = int(written[1]) * _UNIT_MS[written[2]] if written else 0
    if not WINDOW_MS_MIN <= window <= WINDOW_MS_MAX:
        raise errors.InvalidRequest(
            f"'completion_window' is not valid; accepted: {_ACCEPTED}.",
            members={"field": "completion_window", "accepted": _ACCEPTED},
        )
    return window
