"""What requests to the management API may hold: bodies, queries, times.

Shapes are checked here (known fields, JSON types), meaning is checked by the commands. `null` in a body is the same as an
absent field, except where the field's contract says that it removes.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from weir import errors
from weir.control.validation import RETENTION_RANGES
from weir.core.tenancy import LIMIT_NAMES, RESUME_GRACE_SECONDS, TENANT_WEIGHT_MAX, Role, Scope, ServiceClass
from weir.units import INT64_MAX, Millis

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_FORM = re.compile(r"\d{4}-\d\d-\d\d([Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d))?")


class Known(BaseModel):
    """Something that takes only the fields it names. Raises InvalidRequest with the unknown field and the accepted ones."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: Any) -> Any:
        accepted = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in value if name not in accepted), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise errors.InvalidRequest("There is no such field.", members={"field": unknown, "accepted": accepted})
        return value


class Parameters(Known):
    """Query parameters; an empty one is the same as an absent one."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, value: Any) -> Any:
        return {name: text for name, text in value.items() if text != ""} if isinstance(value, dict) else value


class Body(Known):
    """A JSON body: no value is coerced from another type. Raises InvalidRequest for text that no store takes."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _only_whole_characters(cls, value: Any) -> Any:
        for name, text in value.items() if isinstance(value, dict) else ():
            if isinstance(text, str) and not _is_storable(text):
                accepted = "Unicode text without the character 0"
                raise errors.InvalidRequest("This is no text.", members={"field": name, "accepted": accepted})
        return value


def _is_storable(text: str) -> bool:
    """JSON can write halves of characters, which have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _whole_number(least: int, most: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "integer", "minimum": least, "maximum": most}, {"type": "null"}]}


Weight = Annotated[Any, WithJsonSchema(_whole_number(1, TENANT_WEIGHT_MAX))]
"""The command checks type and range in one, so that every refusal names the range."""
_RETENTION_FIELDS = {
    name: {"type": "integer", "minimum": least, "maximum": most} for name, (least, most) in RETENTION_RANGES.items()
}
_RETENTION_FIELDS["resume_grace_seconds"]["default"] = RESUME_GRACE_SECONDS
RetentionField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": _RETENTION_FIELDS,
                    "required": ["seconds", "bytes"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
"""Whole, in place of the one before; the command checks it."""


class NewTenant(Body):
    """A tenant to create; time_zone is an IANA name, UTC when absent; weight is 1 when absent; without retention none."""

    name: str
    time_zone: str | None = None
    external_allowed: bool | None = None
    weight: Weight = None
    leaves_its_pools: bool | None = None
    retention: RetentionField = None


class TenantPatch(Body):
    """Fields of a tenant to change; absent ones stay, and a retention of null ends it."""

    disabled: bool | None = None
    time_zone: str | None = None
    external_allowed: bool | None = None
    weight: Weight = None
    leaves_its_pools: bool | None = None
    retention: RetentionField = None


class NewApplication(Body):
    """An application to create; without aliases it may use every one."""

    name: str
    service_class: Annotated[ServiceClass | None, Field(strict=False)] = None
    aliases: list[str] | None = None


class ApplicationPatch(Body):
    """aliases: those it may use; null for every one."""

    aliases: list[str] | None = None


class NewKey(Body):
    """A new key takes no fields yet."""


class NewAdminKey(Body):
    """An admin key to create, for the named actor."""

    actor: str
    role: Annotated[Role, Field(strict=False)]


class ScopeBody(Body):
    """What limits attach to."""

    tenant: str
    application: str | None = None
    key: str | None = None
    alias: str | None = None
    service_class: Annotated[ServiceClass | None, Field(strict=False)] = None

    def scope(self) -> Scope:
        """As the core names it."""
        return Scope(self.tenant, self.application, self.key, self.alias, self.service_class)


def _limits_schema(schema: dict[str, Any]) -> None:
    schema["properties"] |= dict.fromkeys(LIMIT_NAMES, _whole_number(0, INT64_MAX))
    schema["additionalProperties"] = False


class LimitsBody(BaseModel):
    """A scope and the limits to change: absent stays, null removes. The command checks names and values."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_limits_schema)

    scope: ScopeBody

    def changes(self) -> dict[str, Any]:
        """The limits that the body names."""
        return self.model_extra or {}


class PriceBody(Body):
    """A price, in micro-dollars per million tokens. The command checks the amounts.

    batch_percent: what part of it batch requests pay. Absent: all of it at first, and what they paid when it changes.
    """

    input_microusd: int
    cached_input_microusd: int
    output_microusd: int
    batch_percent: int | None = None


class LimitsQuery(Parameters):
    """Parts of the scopes that are wanted; all optional."""

    tenant: str | None = None
    application: str | None = None
    key: str | None = None
    alias: str | None = None
    service_class: ServiceClass | None = None


class UsageParameters(Parameters):
    """from is inclusive, to exclusive: RFC 3339 times, or dates, which stand for their midnight in UTC.

    format: json, csv or parquet.
    """

    tenant: str | None = None
    from_: str | None = Field(None, alias="from")
    to: str | None = None
    group_by: str | None = None
    format: str | None = None


class TenantQuery(Parameters):
    """Which tenant."""

    tenant: str


class AuditQuery(Parameters):
    """How many entries, and the time before which they lie."""

    limit: int = Field(100, ge=1, le=1_000)
    before: str | None = None


def parse_time(field: str, text: str | None) -> Millis | None:
    """Wall-clock milliseconds of an RFC 3339 time or a date. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        if not _TIME_FORM.fullmatch(text):
            raise ValueError(field)
        moment = datetime.fromisoformat(text.upper())
    except ValueError as unreadable:
        accepted = "a date, or an RFC 3339 time with its offset (a plus sign is sent as %2B)"
        raise errors.InvalidRequest(f"{field} is not a time.", members={"field": field, "accepted": accepted}) from unreadable
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(milliseconds=1)
