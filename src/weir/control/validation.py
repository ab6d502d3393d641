"""What administrators may set: names, addresses, time zones, weights, retention, limits, prices, each with its accepted form.

Pure. A value that is refused is named with its field and what would be accepted.
"""

import re
import zoneinfo
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from weir import errors
from weir.core.tenancy import (
    LIMIT_NAMES,
    RESUME_GRACE_SECONDS_MAX,
    RETENTION_BYTES_MAX,
    RETENTION_BYTES_MIN,
    RETENTION_SECONDS_MAX,
    TENANT_WEIGHT_MAX,
    Retention,
)
from weir.units import INT64_MAX

NAME_PATTERN = "[a-z0-9][a-z0-9._-]{0,62}"
ALIAS_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"
URL_CHARACTERS_MAX = 2_048
BOOTSTRAP, BOOTSTRAP_APPROVER, ROLLOUT = "bootstrap", "bootstrap-approver", "rollout"
BUILT_IN_ACTORS = (BOOTSTRAP, BOOTSTRAP_APPROVER, ROLLOUT)
"""Who acts in the audit trail where nobody did: no administrator has such a name."""
DETAIL_CHARACTERS_MAX = 500
PRICE_MAX = 1_000_000_000
"""Micro-dollars per million tokens: a thousand dollars, above which a sum could leave the store's integers."""
RETENTION_RANGES: Mapping[str, tuple[int, int]] = {
    "seconds": (1, RETENTION_SECONDS_MAX),
    "bytes": (RETENTION_BYTES_MIN, RETENTION_BYTES_MAX),
    "resume_grace_seconds": (1, RESUME_GRACE_SECONDS_MAX),
}
"""The least and the most of each field of a retention; the last one may be left out."""


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest unless it is a name of a tenant, an application or an actor."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise errors.InvalidRequest(f"{field} is not a valid name.", members={"field": field, "accepted": NAME_PATTERN})


def check_actor(name: str) -> None:
    """Raises InvalidRequest unless an administrator may be called so."""
    check_name("actor", name)
    if name in BUILT_IN_ACTORS:
        members = {"field": "actor", "accepted": f"{NAME_PATTERN}, but none of {', '.join(BUILT_IN_ACTORS)}"}
        raise errors.InvalidRequest("actor is the name of one that is built in.", members=members)


def check_alias(field: str, name: str) -> None:
    """Raises InvalidRequest unless it can be an alias."""
    if not re.fullmatch(ALIAS_PATTERN, name):
        raise errors.InvalidRequest(f"{field} is not a valid alias.", members={"field": field, "accepted": ALIAS_PATTERN})


def check_detail(field: str, text: str) -> None:
    """Raises InvalidRequest unless it is a line of text that can be shown as it is."""
    if not (text.isprintable() and text.strip() and len(text) <= DETAIL_CHARACTERS_MAX):
        accepted = f"one line of 1 … {DETAIL_CHARACTERS_MAX} printable characters"
        raise errors.InvalidRequest(f"{field} is no line of text.", members={"field": field, "accepted": accepted})


def check_url(field: str, url: str) -> None:
    """Raises InvalidRequest, without the URL, unless it is one of scheme, host, port and path alone."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or len(url) > URL_CHARACTERS_MAX or not re.fullmatch("[!-~]+", url) or set(url) & set("@?#"):
        members = {"field": field, "accepted": "http[s]://HOST[:PORT][/PATH]; a key belongs in the file of engine.api_key_file"}
        raise errors.InvalidRequest(f"{field} holds what is no address of an engine.", members=members)


def check_number(field: str, value: object, low: int, high: int) -> None:
    """Raises InvalidRequest unless it is an integer low … high."""
    if type(value) is not int or not low <= value <= high:
        members = {"field": field, "accepted": f"an integer {low} … {high}"}
        raise errors.InvalidRequest(f"{field} must be a whole number from {low} to {high}.", members=members)


def check_time_zone(name: str) -> None:
    """Raises InvalidRequest unless it is an IANA time zone of this machine."""
    try:
        zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError) as unknown:  # a directory, a path out of the database, an unknown name
        accepted = "an IANA time zone, such as Europe/Berlin"
        members = {"field": "time_zone", "accepted": accepted}
        raise errors.InvalidRequest("time_zone is not a known time zone.", members=members) from unknown


def check_weight(value: object) -> None:
    """Raises InvalidRequest unless it is an integer 1 … TENANT_WEIGHT_MAX."""
    if type(value) is not int or not 1 <= value <= TENANT_WEIGHT_MAX:
        members = {"field": "weight", "accepted": f"an integer 1 … {TENANT_WEIGHT_MAX}"}
        raise errors.InvalidRequest(f"weight must be a whole number from 1 to {TENANT_WEIGHT_MAX}.", members=members)


def checked_retention(asked: object) -> Retention | None:
    """How a tenant's streams are kept, of an object with the fields of RETENTION_RANGES; None for None, which keeps nothing.

    Raises InvalidRequest for anything else, naming the field within it.
    """
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        members = {"field": "retention", "accepted": f"an object with {', '.join(RETENTION_RANGES)}, or null"}
        raise errors.InvalidRequest("retention must be an object, or null.", members=members)
    for name in asked:
        if name not in RETENTION_RANGES:
            unknown: dict[str, Any] = {"field": f"retention.{name}", "accepted": list(RETENTION_RANGES)}
            raise errors.InvalidRequest("There is no such field.", members=unknown)
    chosen: dict[str, Any] = {name: amount for name, amount in asked.items() if amount is not None}
    for name, (low, high) in RETENTION_RANGES.items():
        if name in chosen or name != "resume_grace_seconds":
            check_number(f"retention.{name}", chosen.get(name), low, high)
    return Retention(**chosen)


def checked_aliases(aliases: Sequence[str] | None) -> frozenset[str] | None:
    """The aliases as a set. Raises InvalidRequest where one cannot be an alias."""
    for alias in aliases or ():
        if not re.fullmatch(ALIAS_PATTERN, alias):
            members = {"field": "aliases", "accepted": f"a list of {ALIAS_PATTERN}"}
            raise errors.InvalidRequest("aliases holds what cannot be an alias.", members=members)
    return None if aliases is None else frozenset(aliases)


def check_prices(amounts: Mapping[str, int]) -> None:
    """Raises InvalidRequest unless each is an integer 0 … PRICE_MAX."""
    for name, value in amounts.items():
        if type(value) is not int or not 0 <= value <= PRICE_MAX:
            members = {"field": name, "accepted": f"an integer 0 … {PRICE_MAX}"}
            raise errors.InvalidRequest(f"{name} must be a whole number of micro-dollars per million tokens.", members=members)


def check_batch_percent(value: object) -> None:
    """Raises InvalidRequest unless it is a part of a price in percent, 0 … 100."""
    check_number("batch_percent", value, 0, 100)


def checked_limits(changes: Mapping[str, object]) -> dict[str, Any]:
    """The changes, each None or an int in range. Raises InvalidRequest for an unknown name or another value."""
    accepted: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in LIMIT_NAMES:
            members = {"field": name, "accepted": list(LIMIT_NAMES)}
            raise errors.InvalidRequest("There is no such limit.", members=members)
        if value is None or (type(value) is int and 0 <= value <= INT64_MAX):
            accepted[name] = value
        else:
            members = {"field": name, "accepted": f"an integer 0 … {INT64_MAX}, or null"}
            raise errors.InvalidRequest(f"{name} must be a whole number that is not negative.", members=members)
    return accepted
