"""JSON fields in, JSON and headers out: shared by every surface. The only place that turns an error into HTTP.

A field reader refuses with the field's name and the accepted range, and never echoes a value: it could be prompt text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from secrets import randbelow
from typing import Any, NoReturn

import msgspec

from weir import errors
from weir.errors import WeirError
from weir.messages import LimitView, StandingView
from weir.units import Millis, ceil_div

Headers = list[tuple[bytes, bytes]]

_DEPTH_TEXT = "JSON that is not nested too deeply"
_SPREAD_DIVISOR = 4
"""An estimate of when to come again is lengthened by up to a quarter: those who were refused together come one by one."""


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise errors.InvalidRequest("The body is not valid JSON.", members={"field": "body", "accepted": "JSON"}) from fault
    except RecursionError as fault:
        raise errors.InvalidRequest(
            "The body is nested too deeply.", members={"field": "body", "accepted": _DEPTH_TEXT}
        ) from fault
    if not isinstance(parsed, dict):
        raise errors.InvalidRequest("The body is not a JSON object.", members={"field": "body", "accepted": "an object"})
    return parsed


def refuse_field(field: str, accepted: str) -> NoReturn:
    """Raise InvalidRequest naming the field and what is accepted."""
    raise errors.InvalidRequest(
        f"'{field}' is not valid; accepted: {accepted}.", members={"field": field, "accepted": accepted}
    )


class Fields:
    """Readers of one JSON object's fields. null is the same as absent. prefix: shown before names, for nested objects."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise UnsupportedField for the first field that is not known; null counts as absent."""
        allowed = set(known)
        for name, value in self._values.items():
            if name not in allowed and value is not None:
                shown = f"{self._prefix}{name}"[:100]
                raise errors.UnsupportedField(
                    f"'{shown}' is not supported here.", members={"field": shown, "accepted": sorted(allowed)}
                )

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is; None if absent."""
        return self._values.get(name)

    def string(self, name: str, *, longest: int, accepted: str | None = None) -> str | None:
        """Text of 1 … longest characters."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 1 <= len(value) <= longest or not _is_text(value):
            refuse_field(self._prefix + name, accepted or f"a string of 1 to {longest} characters")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from low to high; a float, a bool or a string is refused."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse_field(self._prefix + name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number from low to high."""
        value = self._values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            refuse_field(self._prefix + name, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse_field(self._prefix + name, "true or false")
        return value

    def strings(self, name: str, *, most: int, longest: int) -> tuple[str, ...]:
        """A string, or a list of up to `most` strings, each of 1 … longest characters."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        accepted = f"a string or up to {most} strings of 1 to {longest} characters"
        if not isinstance(items, list) or len(items) > most:
            refuse_field(self._prefix + name, accepted)
        for item in items:
            if not isinstance(item, str) or not 1 <= len(item) <= longest or not _is_text(item):
                refuse_field(self._prefix + name, accepted)
        return tuple(items)


def _is_text(value: str) -> bool:
    """Whether a string is encodable: JSON can smuggle in lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_text(value: Any, field: str, accepted: str = "a string") -> str:
    """A string of any length that can be encoded. Raises InvalidRequest."""
    if not isinstance(value, str) or not _is_text(value):
        refuse_field(field, accepted)
    return value


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def id_headers(request_id: str) -> Headers:
    """The request's id under both names that SDKs read."""
    encoded = request_id.encode()
    return [(b"x-request-id", encoded), (b"request-id", encoded)]


def limit_headers(standing: StandingView | None) -> Headers:
    """x-ratelimit-* and RateLimit headers; nothing for what is unlimited."""
    if standing is None:
        return []
    headers: Headers = []
    policies: list[str] = []
    states: list[str] = []
    for name, view in (("requests", standing.requests), ("tokens", standing.tokens)):
        if view.limit is None or view.remaining is None or view.reset_ms is None:
            continue
        headers += _limit_triple(name, view)
        policies.append(f'"{name}";q={view.limit};w=60')
        states.append(f'"{name}";r={view.remaining};t={ceil_div(view.reset_ms, 1000)}')
    if policies:
        headers.append((b"ratelimit-policy", ", ".join(policies).encode()))
        headers.append((b"ratelimit", ", ".join(states).encode()))
    return headers


def _limit_triple(name: str, view: LimitView) -> Headers:
    assert view.reset_ms is not None
    return [
        (f"x-ratelimit-limit-{name}".encode(), str(view.limit).encode()),
        (f"x-ratelimit-remaining-{name}".encode(), str(view.remaining).encode()),
        (f"x-ratelimit-reset-{name}".encode(), go_duration(view.reset_ms).encode()),
    ]


def go_duration(millis: Millis) -> str:
    """A duration as Go prints it, which is what OpenAI's headers carry: 6m0s, 1.5s, 250ms."""
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}" if minutes else seconds


def retry_headers(error: WeirError, *, generated: bool = False) -> Headers:
    """Retry-After in whole seconds rounded up, retry-after-ms, and x-should-retry where the status alone would mislead."""
    headers: Headers = []
    wait_ms = error.retry_after_ms
    if wait_ms is not None:
        if not error.waits_exactly:
            wait_ms += randbelow(wait_ms // _SPREAD_DIVISOR + 1)
        headers.append((b"retry-after", str(ceil_div(wait_ms, 1000)).encode()))
        headers.append((b"retry-after-ms", str(wait_ms).encode()))
    advice = False if generated else error.retry_advice
    if advice is not None:
        headers.append((b"x-should-retry", b"true" if advice else b"false"))
    return headers


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rendered:
    """A plain HTTP answer."""

    status: int
    content_type: bytes
    body: bytes
    headers: Headers

    def head(self, extra: Sequence[tuple[bytes, bytes]] = ()) -> Headers:
        """All headers of the answer."""
        fixed = [(b"content-type", self.content_type), (b"content-length", str(len(self.body)).encode())]
        return [*fixed, *self.headers, *extra]


def members_of(error: WeirError, now_wall_ms: Millis) -> dict[str, Any]:
    """The error's own fields as the contract names them: a reset is a time, RFC 3339."""
    members = dict(error.members)
    reset_ms = members.pop("reset_ms", None)
    if reset_ms is not None:
        members["resets_at"] = rfc3339(now_wall_ms + reset_ms)
    return members


def rfc3339(wall_ms: Millis) -> str:
    """Wall-clock milliseconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def problem(error: WeirError, now_wall_ms: Millis, extra: Mapping[str, Any] | None = None) -> Rendered:
    """problem+json (RFC 9457) of a refusal."""
    body = {
        "type": f"urn:weir:error:{error.code}",
        "title": error.title,
        "status": error.http_status,
        "code": error.code,
        "detail": error.detail,
        **members_of(error, now_wall_ms),
        **(extra or {}),
    }
    return Rendered(error.http_status, b"application/problem+json", msgspec.json.encode(body), retry_headers(error))


_OPENAI_TYPE = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error_body(error: WeirError, now_wall_ms: Millis, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """OpenAI's error object, with our code and the error's own fields beside it."""
    status = error.http_status
    kind = _OPENAI_TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    members = members_of(error, now_wall_ms)
    return {
        "message": error.detail,
        "type": kind,
        "param": members.get("field"),
        "code": error.code,
        **members,
        **(extra or {}),
    }


def openai_error(error: WeirError, now_wall_ms: Millis, *, extra: Mapping[str, Any] | None = None) -> Rendered:
    """OpenAI's error shape as a plain answer."""
    body = msgspec.json.encode({"error": openai_error_body(error, now_wall_ms, extra)})
    return Rendered(error.http_status, b"application/json", body, retry_headers(error))


_ANTHROPIC_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(
    error: WeirError, now_wall_ms: Millis, request_id: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Anthropic's error object, with our code and the error's own fields beside it; its SDK reads the code from `details`."""
    status = error.http_status
    shown = {
        "type": _ANTHROPIC_TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error"),
        "message": error.detail,
        "code": error.code,
        "details": {"error_code": error.code},
        **members_of(error, now_wall_ms),
        **(extra or {}),
    }
    return {"type": "error", "error": shown, "request_id": request_id}


def anthropic_error(error: WeirError, now_wall_ms: Millis, request_id: str, extra: Mapping[str, Any] | None = None) -> Rendered:
    """Anthropic's error shape as a plain answer."""
    body = msgspec.json.encode(anthropic_error_body(error, now_wall_ms, request_id, extra))
    return Rendered(error.http_status, b"application/json", body, retry_headers(error))
