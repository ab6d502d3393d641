"""Weir's own options as headers, which every compatible surface takes: the same rules and refusals as natively."""

from collections.abc import Mapping

from weir.api.generations import request_id_of
from weir.api.wire import refuse_field
from weir.core.request import DEADLINE_MS_MAX
from weir.units import Millis


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Idempotency-Key, the request id of compatible surfaces. Raises InvalidRequest."""
    return request_id_of(_text(headers.get(b"idempotency-key"), "Idempotency-Key"), "Idempotency-Key")


def deadline_of(headers: Mapping[bytes, bytes]) -> Millis | None:
    """weir-deadline-ms. Raises InvalidRequest."""
    value = headers.get(b"weir-deadline-ms")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 7 or not 1 <= int(value) <= DEADLINE_MS_MAX:
        refuse_field("weir-deadline-ms", f"a whole number from 1 to {DEADLINE_MS_MAX}")
    return int(value)


def session_of(headers: Mapping[bytes, bytes]) -> str | None:
    """weir-session. Raises InvalidRequest."""
    text = _text(headers.get(b"weir-session"), "weir-session")
    if text is not None and not 1 <= len(text) <= 128:
        refuse_field("weir-session", "1 to 128 characters")
    return text


def _text(value: bytes | None, field: str) -> str | None:
    if value is None:
        return None
    try:
        return value.decode("ascii")
    except UnicodeDecodeError:
        refuse_field(field, "ASCII text")
