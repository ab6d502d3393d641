"""Reads the short texts that describe a run: `NAME:VALUE,key=value,key=value`, each with what is accepted when it is wrong.

It knows form and ranges only; what a key means is its reader's. A text is a person's, so every refusal names the option, what
was given and the accepted range. Raises InvalidRequest, and nothing else.
"""

import math
import re

from weir import errors

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0}


def refused(option: str, given: str, accepted: str) -> errors.InvalidRequest:
    """The refusal of what an option was given."""
    return errors.InvalidRequest(f"{option} takes {accepted}, not {given!r}.", members={"field": option, "accepted": accepted})


def number(option: str, given: str, low: float, high: float) -> float:
    """A finite number from low to high. Raises InvalidRequest."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise refused(option, given, f"a number from {low:,.12g} to {high:,.12g}")
    return value


def whole(option: str, given: str, low: int, high: int) -> int:
    """A whole number from low to high. Raises InvalidRequest."""
    digits = given.replace("_", "")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and low <= int(digits) <= high):
        raise refused(option, given, f"a whole number from {low:,} to {high:,}")
    return int(digits)


def seconds(option: str, given: str, high: float = 30 * 86_400.0) -> float:
    """A time like 90, 90s, 1.5m or 2h as seconds. Raises InvalidRequest."""
    found = _DURATION.fullmatch(given)
    value = float(found[1]) * _SECONDS[found[2]] if found else math.nan
    if not 0 <= value <= high:
        raise refused(option, given, f"a time from 0 to {high:,.12g} seconds, like 90, 90s, 15m or 1h")
    return value


class Terms:
    """One text in its parts: name before the colon, value behind it, options by key. Taken options are not asked for again."""

    def __init__(self, option: str, text: str) -> None:
        """Raises InvalidRequest where a part is no key=value, or a key comes twice."""
        self.option = option
        self.text = text
        first, *rest = text.split(",")
        self.name, _, self.value = first.partition(":")
        if "=" in self.value:
            rest, self.value = [self.value, *rest], ""
        self._options: dict[str, str] = {}
        for part in rest:
            key, equals, value = part.partition("=")
            if not (key and equals and value) or key in self._options:
                raise refused(option, text, "NAME:VALUE,key=value with each key once")
            self._options[key] = value

    def take(self, key: str, default: str) -> str:
        """The text of an option."""
        return self._options.pop(key, default)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number option within its range. Raises InvalidRequest."""
        given = self._options.pop(key, None)
        return default if given is None else number(f"{self.option} {key}=", given, low, high)

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        """A whole-number option within its range. Raises InvalidRequest."""
        given = self._options.pop(key, None)
        return default if given is None else whole(f"{self.option} {key}=", given, low, high)

    def seconds(self, key: str, default: float) -> float:
        """A time option in seconds. Raises InvalidRequest."""
        given = self._options.pop(key, None)
        return default if given is None else seconds(f"{self.option} {key}=", given)

    def close(self, *known: str) -> None:
        """Everything was taken. known: the keys there are. Raises InvalidRequest for one that is left."""
        if self._options:
            raise refused(
                self.option, self.text, f"with {self.name!r} the keys {', '.join(known)}" if known else "no keys here"
            )
