"""What the management API answers: one model per answer, read from the core's values.

No answer has a field for a digest or an engine's credential, so that none can leak one; a secret appears in the answer to its
creation only. A field whose default is None is absent when it is None.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from weir.api.generations import generation_body
from weir.api.wire import rfc3339
from weir.core.tenancy import LIMIT_NAMES, Application, Limits, Role, Scope, ServiceClass
from weir.messages import GenerationRecord
from weir.ports import Acknowledgement, AuditEntry


class View(BaseModel):
    """An answer, read from an object of the core by its attributes; absent means none."""

    model_config = ConfigDict(from_attributes=True)


class Changed(View):
    """An answer to a change. pending: the parts of the cell that had not acknowledged it in time (then the status is 202)."""

    pending: list[str] | None = None


class RetentionView(View):
    """How a tenant's streams are kept: so long after their end, in so many bytes; so long goes one on that nobody reads."""

    seconds: int
    bytes: int
    resume_grace_seconds: int


class TenantView(Changed):
    """A tenant. retention: null where none is set."""

    name: str
    time_zone: str
    disabled: bool
    revoked: bool
    external_allowed: bool
    weight: int
    leaves_its_pools: bool
    retention: RetentionView | None


class ApplicationView(Changed):
    """An application; without aliases it may use every one."""

    tenant: str
    name: str
    service_class: ServiceClass
    aliases: list[str] | None = None
    revoked: bool

    @classmethod
    def of(cls, application: Application) -> "ApplicationView":
        """An application; no `aliases` means every one."""
        aliases = None if application.aliases is None else sorted(application.aliases)
        return cls(
            tenant=application.tenant,
            name=application.name,
            service_class=application.service_class,
            aliases=aliases,
            revoked=application.revoked,
        )


class KeyView(Changed):
    """An API key, without its secret."""

    id: str
    tenant: str
    application: str
    revoked: bool


class NewKeyView(KeyView):
    """secret: the key as its holder presents it, shown this once."""

    secret: str


class AdminKeyView(Changed):
    """An admin key, without its secret."""

    id: str
    actor: str
    role: Role
    revoked: bool


class NewAdminKeyView(AdminKeyView):
    """secret: the key as its holder presents it, shown this once."""

    secret: str


class ScopeView(View):
    """What limits attach to."""

    tenant: str
    application: str | None = None
    key: str | None = None
    alias: str | None = None
    service_class: ServiceClass | None = None


class LimitsView(Changed):
    """A scope and the limits that are set for it."""

    model_config = ConfigDict(extra="allow")

    scope: ScopeView

    @classmethod
    def of(cls, scope: Scope, limits: Limits) -> "LimitsView":
        """One entry; a limit that is not set is absent."""
        amounts = {name: amount for name in LIMIT_NAMES if (amount := getattr(limits, name)) is not None}
        return cls.model_validate({"scope": scope.public(), **amounts})


class TenantList(View):
    """All tenants."""

    tenants: list[TenantView]


class ApplicationList(View):
    """A tenant's applications."""

    applications: list[ApplicationView]


class KeyList(View):
    """An application's keys."""

    keys: list[KeyView]


class AdminKeyList(View):
    """All admin keys."""

    admin_keys: list[AdminKeyView]


class LimitsList(View):
    """Entries that match a query."""

    limits: list[LimitsView]


class UsageRowView(View):
    """Sums of one group, after the grouping columns. It only describes the answer, which `admin_tables` writes."""

    model_config = ConfigDict(extra="allow")

    requests: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    cost_microusd: int
    platform_cost_microusd: int


class UsageReport(View):
    """One row per group."""

    rows: list[UsageRowView]


class AccountView(View):
    """One limit of one scope. kind: the limit's name.

    resets_at: RFC 3339; when a budget's window ends or a per-minute limit is unused again, null where no clock says.
    """

    scope: ScopeView
    kind: str
    limit: int
    held: int
    spent: int
    resets_at: str | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """A row of `Book.accounts_of`."""
        resets_at_ms = row["resets_at_ms"]
        resets_at = None if resets_at_ms is None else rfc3339(resets_at_ms)
        amounts = {name: row[name] for name in ("scope", "limit", "held", "spent")}
        return cls.model_validate({**amounts, "kind": row["limit_name"], "resets_at": resets_at})


class LedgerView(View):
    """A tenant's limited accounts and the number of its open holds."""

    accounts: list[AccountView]
    open_holds: int


class ReplicaShown(View):
    """A replica; of its concurrency, allowed may be taken, as it adapts to its pace, and running is the requests on it now.

    kv_tokens: what its KV memory has room for, null where it does not say; kv_tokens_reserved: for what runs. prefill_tokens:
    of prompts that it has still to read. pace: measured as it became ready, idle: its first output after first_ms + input_ms
    per input token, output_ms per later token; null where it was not warmed up.
    """

    name: str
    pool: str
    revision: str
    engine: str
    state: str
    url: str
    model: str
    context_tokens: int
    concurrency: int
    allowed: int
    running: int
    capabilities: dict[str, bool]
    kv_tokens: int | None
    kv_tokens_reserved: int
    prefill_tokens: int
    pace: dict[str, float] | None
    detail: str | None


class ReplicaList(View):
    """All replicas."""

    replicas: list[ReplicaShown]


class PoolShown(View):
    """A pool; replicas is the wanted number, ready those that serve. tenant: whose it is alone, null where it is shared.

    detail: why fewer are ready than wanted, null where that is not known.
    """

    name: str
    revision: str
    replicas: int
    ready: int
    concurrency: int
    queued: int
    running: int
    on_demand: bool
    tenant: str | None
    service_classes: list[ServiceClass]
    input_tokens_max: int | None
    detail: str | None


class PoolList(View):
    """All pools."""

    pools: list[PoolShown]


class AuditEntryView(View):
    """Who changed what, and when."""

    at: str
    actor: str
    action: str
    subject: str
    summary: dict[str, Any]


class AuditList(View):
    """Changes, newest first."""

    entries: list[AuditEntryView]


class GenerationView(View):
    """The tenant's own view of an execution, and its number; never its text. usage and timing are there once it ended."""

    id: str
    request_id: str
    execution: int
    model_alias: str
    model_revision: str
    status: str
    finish_reason: str | None
    usage: dict[str, Any] | None = None
    timing: dict[str, float | None] | None = None
    error: dict[str, str] | None = None


class TimelineView(View):
    """An execution, or a rejected request id with how often it was rejected so far. delivery_steps: beyond the dispatches' own.

    events: each with its name and at_ms, milliseconds after arrived_at; dropped_events: older ones that are not kept.
    """

    execution: int | None = None
    status: str
    arrived_at: str
    rejections: int | None = None
    delivery_steps: int
    dropped_events: int
    events: list[dict[str, Any]]


class ExplanationView(View):
    """What the cell remembers of a tenant's request id, latest first."""

    tenant: str
    request_id: str
    timelines: list[TimelineView]

    @classmethod
    def of(cls, timelines: Sequence[Mapping[str, Any]]) -> Self:
        """Timelines of one tenant's request id, at least one."""
        views = [timeline | {"arrived_at": rfc3339(timeline["arrived_at_ms"])} for timeline in map(dict, timelines)]
        return cls.model_validate({**timelines[0], "timelines": views})


def generation_view(record: GenerationRecord) -> GenerationView:
    """A record in the words of the native answer."""
    return GenerationView.model_validate({**generation_body(record), "execution": record.execution})


def audit_view(entry: AuditEntry) -> AuditEntryView:
    """An entry with its time as RFC 3339; summary as JSON."""
    return AuditEntryView(
        at=rfc3339(entry.at_ms),
        actor=entry.actor,
        action=entry.action,
        subject=entry.subject,
        summary=msgspec.json.decode(entry.summary),
    )


def shown(view: View) -> JSONResponse:
    """An answer to a question: 200."""
    return JSONResponse(view.model_dump(mode="json", exclude_defaults=True))


def acknowledged(view: Changed, acknowledgement: Acknowledgement, status: int = 200) -> JSONResponse:
    """An answer to a change: `status` once it is in force everywhere, else 202 with the parts still pending."""
    body = view.model_dump(mode="json", exclude_defaults=True)
    if acknowledgement.pending:
        return JSONResponse(body | {"pending": list(acknowledgement.pending)}, status_code=202)
    return JSONResponse(body, status_code=status)
