"""The management API's reports: usage, accounts, single generations and why they went so, replicas, pools, the audit trail.

Every route reads and none changes anything. Reports hold figures and names, never what was asked or answered; those of
a tenant that was deleted stay.
"""

import asyncio
from typing import Annotated

from fastapi import Header, Query, Response
from fastapi.responses import JSONResponse

from weir import errors
from weir.api.admin_auth import Viewer
from weir.api.admin_bodies import AuditQuery, TenantQuery, UsageParameters, parse_time
from weir.api.admin_parts import Parts, admin_router
from weir.api.admin_tables import CSV_TYPE, PARQUET_TYPE, USAGE_FORMATS, format_of
from weir.api.admin_views import (
    AccountView,
    AuditList,
    ExplanationView,
    GenerationView,
    LedgerView,
    PoolList,
    ReplicaList,
    UsageReport,
    audit_view,
    generation_view,
    shown,
)
from weir.api.wire import rfc3339
from weir.control.catalog_lookup import require_tenant_on_record
from weir.ports import UsageQuery

ANY_TENANT = "-"
"""In place of a tenant's name, which it cannot be."""

router = admin_router()


@router.get(
    "/usage",
    response_model=UsageReport,
    responses={200: {"content": {CSV_TYPE: {}, PARQUET_TYPE: {}}, "description": "JSON, or a table as a file"}},
)
async def get_usage(
    query: Annotated[UsageParameters, Query()], caller: Viewer, parts: Parts, accept: Annotated[str, Header()] = ""
) -> Response:
    """Sums over usage rows, by the columns of `group_by` (separated by commas); as JSON, CSV or Parquet."""
    if query.tenant is not None:
        require_tenant_on_record(caller.catalog, query.tenant)
    wanted, asked = format_of(query.format, accept), _usage_query(query)
    rows = await parts.ledger.usage(asked)
    form = USAGE_FORMATS[wanted]
    content = await asyncio.to_thread(form.write, asked.group_by, rows)
    headers = {"content-disposition": f"attachment; filename=usage.{wanted}"} if form.is_file else None
    return Response(content, media_type=form.media_type, headers=headers)


def _usage_query(query: UsageParameters) -> UsageQuery:
    """The question to the ledger, which knows its own columns. Raises InvalidRequest for a time, or an empty range."""
    groups = tuple(query.group_by.split(",")) if query.group_by else ()
    from_ms, to_ms = parse_time("from", query.from_), parse_time("to", query.to)
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        members = {"field": "to", "accepted": "a time after `from`; a date stands for its midnight in UTC"}
        raise errors.InvalidRequest("The range of time is empty.", members=members)
    return UsageQuery(query.tenant, from_ms, to_ms, groups)


@router.get("/ledger", response_model=LedgerView)
async def get_ledger(query: Annotated[TenantQuery, Query()], caller: Viewer, parts: Parts) -> JSONResponse:
    """A tenant's limited accounts and its open holds."""
    require_tenant_on_record(caller.catalog, query.tenant)
    rows = await parts.cell.accounts(query.tenant)
    accounts = [AccountView.of(row) for row in rows]
    return shown(LedgerView(accounts=accounts, open_holds=await parts.cell.open_holds(query.tenant)))


@router.get("/generations/{tenant}/{request_id}", response_model=GenerationView)
async def get_generation(tenant: str, request_id: str, caller: Viewer, parts: Parts) -> JSONResponse:
    """The latest execution of a tenant's request id; never its text."""
    require_tenant_on_record(caller.catalog, tenant)
    record = await parts.cell.generation(tenant, request_id)
    if record is None:
        raise errors.NotFound(f"Tenant {tenant!r} has no such request.")
    return shown(generation_view(record))


@router.get("/generations/{tenant}/{request_id}/explanation", response_model=ExplanationView)
async def get_explanation(tenant: str, request_id: str, caller: Viewer, parts: Parts) -> JSONResponse:
    """What happened to a tenant's request id of late, admitted or rejected; tenant `-`: the one that used this id."""
    if tenant != ANY_TENANT:
        require_tenant_on_record(caller.catalog, tenant)
    found = await parts.cell.explanations(request_id, None if tenant == ANY_TENANT else tenant)
    tenants = sorted({timeline["tenant"] for timeline in found.timelines})
    if not tenants:
        since = rfc3339(found.since_ms)
        raise errors.NotFound(
            f"No such request is remembered: timelines of {found.kept} requests are kept, every one since {since}.",
            members={"kept": found.kept, "since": since},
        )
    if len(tenants) > 1:
        raise errors.InvalidRequest(
            f"{len(tenants)} tenants have used this request id.", members={"field": "tenant", "accepted": tenants}
        )
    return shown(ExplanationView.of(found.timelines))


@router.get("/replicas", response_model=ReplicaList)
async def list_replicas(caller: Viewer, parts: Parts) -> JSONResponse:
    """Every replica, its state and what it can do."""
    return shown(ReplicaList.model_validate({"replicas": await parts.cell.replicas()}))


@router.get("/pools", response_model=PoolList)
async def list_pools(caller: Viewer, parts: Parts) -> JSONResponse:
    """Every pool, its replicas and its queue."""
    return shown(PoolList.model_validate({"pools": await parts.cell.pools()}))


@router.get("/audit", response_model=AuditList)
async def list_audit(query: Annotated[AuditQuery, Query()], caller: Viewer, parts: Parts) -> JSONResponse:
    """The newest changes, newest first; `before` continues."""
    entries = await parts.commands.audit_trail(query.limit, parse_time("before", query.before))
    return shown(AuditList(entries=[audit_view(entry) for entry in entries]))
