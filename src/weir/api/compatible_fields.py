"""What compatible surfaces read alike: the model's name, fields that change nothing, and Weir's own options as headers.

The options have the same rules and refusals as natively.
"""

from collections.abc import Mapping

from weir.api.generations import ALIAS_CHARS_MAX, request_id_of
from weir.api.wire import Fields, checked_text, refuse_field
from weir.core.request import DEADLINE_MS_MAX
from weir.units import Millis

LABEL_CHARS_MAX = 256
METADATA_MAX, METADATA_NAME_CHARS_MAX, METADATA_CHARS_MAX = 16, 64, 512
_METADATA_ACCEPTED = "an object of up to 16 names of 1 to 64 characters with strings of up to 512 characters"
LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""Fields that change nothing in what is generated and are accepted; identity comes from the key."""


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_labels(fields: Fields) -> None:
    """Raises InvalidRequest for a label that OpenAI would refuse too."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.string(name, longest=LABEL_CHARS_MAX)
    metadata = fields.raw("metadata")
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > METADATA_MAX:
        refuse_field("metadata", _METADATA_ACCEPTED)
    for name, value in metadata.items():
        checked_text(name, "metadata", _METADATA_ACCEPTED)
        text = checked_text(value, "metadata", _METADATA_ACCEPTED)
        if not 1 <= len(name) <= METADATA_NAME_CHARS_MAX or len(text) > METADATA_CHARS_MAX:
            refuse_field("metadata", _METADATA_ACCEPTED)


def model_of(fields: Fields) -> str:
    """The alias that a body names as its model. Raises InvalidRequest."""
    model = fields.string("model", longest=ALIAS_CHARS_MAX)
    if model is None:
        refuse_field("model", "the name of a model alias")
    return model


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
